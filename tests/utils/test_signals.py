"""Tests of requests to stop by signals."""

from __future__ import annotations

import signal

import pytest

from pellucid.utils.signals import StopRequests


class Late(StopRequests):
    """Receives a request during the check for requests."""

    came = False

    def __bool__(self):
        found = len(self) > 0
        if not self.came:
            self.came = True
            self.handle_signal(signal.SIGTERM, None)
        return found


def test_request_during_the_check_interrupts_immediately():
    requests = Late()
    with pytest.raises(KeyboardInterrupt), requests.interrupt_immediately():
        pytest.fail("the block has begun")
    assert not requests.is_immediate


def test_earlier_request_interrupts_immediately():
    requests = StopRequests([signal.SIGINT])
    with pytest.raises(KeyboardInterrupt), requests.interrupt_immediately():
        pytest.fail("the block has begun")
    assert not requests.is_immediate

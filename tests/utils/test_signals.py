"""Requests to stop."""

from __future__ import annotations

import signal

import pytest

from pellucid.utils.signals import StopRequests


class Late(StopRequests):
    """A request comes while it is asked whether one has come."""

    came = False

    def __bool__(self):
        found = len(self) > 0
        if not self.came:
            self.came = True
            self.handle_signal(signal.SIGTERM, None)
        return found


def test_a_request_that_comes_at_the_threshold_is_served_at_once():
    requests = Late()
    with pytest.raises(KeyboardInterrupt), requests.interrupt_immediately():
        pytest.fail("the block has begun")
    assert not requests.is_immediate


def test_an_earlier_request_is_served_at_once():
    requests = StopRequests([signal.SIGINT])
    with pytest.raises(KeyboardInterrupt), requests.interrupt_immediately():
        pytest.fail("the block has begun")
    assert not requests.is_immediate

"""Tests for values derived from the algorithm's settings.

Refused settings are mostly tested in test_grpo.py, tests/distributed/test_runtime.py and tests/test_config.py.
"""

from __future__ import annotations

import pytest

from pellucid.algorithm.settings import GRPOConfig


def test_every_epoch_takes_a_step_for_each_minibatch():
    assert GRPOConfig(epochs=3, minibatches=2).inner_steps == 6
    assert GRPOConfig().inner_steps == 1


def test_minibatch_smaller_than_a_group_is_refused():
    """Four prompts of eight completions make 32 rows, which would split into 8 parts; the 4 groups do not."""
    with pytest.raises(ValueError, match="must divide prompts_per_step = 4"):
        GRPOConfig(minibatches=8, prompts_per_step=4, group_size=8)

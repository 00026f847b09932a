"""Values that follow from the settings of the algorithm. What settings refuse is mostly tested in test_grpo.py, in
tests/distributed/test_runtime.py and in tests/test_config.py."""

from __future__ import annotations

import pytest

from pellucid.algorithm.settings import GRPOConfig


def test_every_epoch_takes_a_step_for_each_minibatch():
    assert GRPOConfig(epochs=3, minibatches=2).inner_steps == 6
    assert GRPOConfig().inner_steps == 1


def test_a_minibatch_of_less_than_a_group_is_refused():
    """Four prompts of eight completions: 32 rows would split into 8 parts, groups do not."""
    with pytest.raises(ValueError, match="must divide prompts_per_step = 4"):
        GRPOConfig(minibatches=8, prompts_per_step=4, group_size=8)

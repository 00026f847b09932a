"""The settings of a judge and of a reward model: tables within `[[task.rewards]]`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JudgeSettings:
    """`[task.rewards.judge]`: the endpoint that judges, and what it is asked."""

    model: str = ""
    """The name by which the endpoint knows the model that judges."""


@dataclass(frozen=True)
class RewardModelSettings:
    """`[task.rewards.reward_model]`: how a reward model is run."""

    device: str = "auto"
    """The device that it runs on: auto, cpu, cuda, cuda:1."""

"""The settings of rewards: `[reward]`, and the tables of a judge and of a reward model in `[[task.rewards]]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RewardConfig:
    """`[reward]`: the processes that compute rewards, what they may take, and how long failures are borne with."""

    timeout: float = 10.0
    """Seconds that one completion's reward may take. One that takes longer has failed, and its process is ended."""
    step_timeout: float = 120.0
    """Seconds that a function may take which is asked about all completions of a step at once."""
    workers: int = 1
    """Processes that grade completions side by side. Rewards do not depend on it."""
    memory_gb: float = 8.0
    """Memory that each of them may ask for, on Linux; 0 is no limit. A judge of 3 B parameters in bf16 takes 6."""
    patience: int = 3
    """Steps in a row, each with all of its rewards failed, after which the run is saved and stops; 0 never stops it."""
    secrets: tuple[str, ...] = ()
    """Environment variables that rewards may read although they are called *_KEY, *_TOKEN, *_SECRET or *_PASSWORD."""

    def __post_init__(self) -> None:
        for name in ("timeout", "step_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)} must be a positive number of seconds")
        if self.workers < 1:
            raise ValueError(f"workers = {self.workers} must be at least 1")
        if not 0 <= self.memory_gb < math.inf or self.patience < 0:
            raise ValueError("memory_gb and patience must not be negative")


@dataclass(frozen=True)
class JudgeSettings:
    """`[task.rewards.judge]`: the endpoint that judges, and what it is asked."""

    model: str = ""
    """The name by which the endpoint knows the model that judges."""


@dataclass(frozen=True)
class RewardModelSettings:
    """`[task.rewards.reward_model]`: how a reward model is run."""

    device: str = "auto"
    """The device that it runs on: auto, cpu, cuda, cuda:1. auto is that of the policy, where that is auto."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of its weights and of computing. auto is that in which it was saved, as in transformers."""
    batch: int = 16
    """Sequences that it reads at once. Where they do not fit into memory, half of them and then the others."""
    max_tokens: int = 0
    """The longest sequence in tokens, with its prompt; 0 is the longest that the model can read. A longer one has no
    reward, which counts as failed: without its beginning or its end it is not what was answered."""
    label: int = 0
    """The column of its logits that is the reward, where it has several labels. 0 is what TRL takes."""
    revision: str = ""
    """Branch, tag or commit of a model of the Hub; empty is its default branch."""
    trust_remote_code: bool = False
    """Run the Python code that lies in the model's own folder, as you, with all that you may do: read it before."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch = {self.batch} must be at least 1")
        for name in ("max_tokens", "label"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")

    def note(self, source: str) -> str:
        """Return the line that must be shown before this model is read; empty where it runs nothing."""
        return f"reward_model.trust_remote_code: Python code of {source} runs as you" if self.trust_remote_code else ""

"""The records that pass between the stages of a step, and the seams between the parts. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question.

    Example: Prompt("train/0/3", ({"role": "user", "content": "What is 3 + 4?"},), answer="7")
    """

    id: str
    """Unique within a step: the samples of its group are seeded with it."""
    text: str | tuple[Message, ...]
    """Messages pass through the model's chat template; a string reaches the model as it stands."""
    answer: str = ""
    """The gold answer, where there is one."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """What else the data row holds, for reward functions."""

    @property
    def question(self) -> str:
        """What a person reads: the last message, or the whole string."""
        return self.text if isinstance(self.text, str) else self.text[-1]["content"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What the policy answered: tokens as sampled, the end-of-sequence token included where it was sampled."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token under the distribution that it was drawn from, as the sampler computed it; nats."""
    text: str
    """Decoded without special tokens."""
    finished: bool
    """Ended with an end-of-sequence token, not at the length limit."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A grade.

    Example: Reward(0.9, parts={"numeric": 1.0, "length": -0.1}, correct=True)
    """

    value: float
    """NaN where the reward could not be computed; `error` then says why."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The terms of a composite reward, before their weights."""
    correct: bool | None = None
    """Whether the answer counts as right in evaluation; where None, value >= 1 does."""
    error: str = ""

    @property
    def is_correct(self) -> bool:
        return self.value >= 1.0 if self.correct is None else self.correct


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt, later with their rewards and advantages, in the same order."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    rewards: tuple[Reward, ...] = ()
    advantages: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured share with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Accuracy on n held-out prompts: one greedy answer each, and k samples each."""

    task: str
    split: str
    n: int
    k: int
    greedy: Estimate
    mean_at_k: Estimate
    """The mean accuracy of a sample."""
    pass_at_k: Estimate
    """The share of prompts that at least one of k samples gets right."""


@dataclass(frozen=True)
class GRPOConfig:
    """`[algorithm]`: a point in the product of the axes of grpo.py."""

    steps: int = 30
    """Generate-update cycles."""
    prompts_per_step: int = 4
    """P: prompts drawn each step, over all processes."""
    group_size: int = 8
    """G: completions of each prompt."""
    epochs: int = 1
    """Passes over the rollouts of a step; more than one needs a ratio-based objective."""
    minibatches: int = 1
    """Optimizer steps in one epoch, over equal numbers of whole groups."""
    micro_batch: int = 0
    """Rows in one forward pass, to bound memory; 0 means a whole minibatch. Never changes the gradient."""
    advantage: Literal["grpo", "centered", "rloo"] = "grpo"
    objective: Literal["clipped", "unclipped", "naive"] = "clipped"
    aggregate: Literal["token", "sequence", "constant"] = "token"
    constant_length: int = 0
    """The divisor of aggregate = "constant", in tokens; 0 means sampler.max_tokens."""
    kl: Literal["k1", "k2", "k3"] = "k1"
    kl_in: Literal["reward", "loss"] = "reward"
    kl_coef: float = 0.0
    """Weight of the KL penalty; at 0 no reference model is loaded."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    seed: int = 0
    """Of the samples; and of the task, unless task.seed says otherwise."""

    def __post_init__(self) -> None:
        for name in ("steps", "prompts_per_step", "epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.group_size < 2:
            raise ValueError(
                f"group_size = {self.group_size} must be at least 2: a completion is compared with siblings"
            )
        for name in ("micro_batch", "constant_length", "kl_coef", "clip_low", "clip_high", "entropy_coef"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        if self.prompts_per_step % self.minibatches:
            raise ValueError(f"minibatches = {self.minibatches} must divide prompts_per_step = {self.prompts_per_step}")
        if self.kl_in == "reward" and self.kl != "k1":
            raise ValueError(f'kl = "{self.kl}" has no use in the reward: set kl = "k1" or kl_in = "loss"')
        if self.objective == "naive" and self.inner_steps > 1:
            raise ValueError(
                'objective = "naive" has no ratio: set epochs = 1 and minibatches = 1, or another objective'
            )

    @property
    def inner_steps(self) -> int:
        """Optimizer steps on one set of rollouts; from the second on, the rollouts are off-policy."""
        return self.epochs * self.minibatches


@dataclass(frozen=True)
class AdamWConfig:
    """`[optimizer]`: AdamW (arXiv 1711.05101) and the course of its learning rate."""

    lr: float = 2e-5
    """The peak."""
    warmup: int = 0
    """Optimizer steps of linear rise to the peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From the peak to the last step: stay, or fall to 0."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them as they are."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"lr = {self.lr} must be positive")
        for name in ("warmup", "max_grad_norm", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")

    def lr_at(self, update: int, total: int) -> float:
        """Learning rate of optimizer step `update` of `total`, both counted from 1."""
        if update <= self.warmup:
            return self.lr * update / self.warmup
        left = (total - update + 1) / max(1, total - self.warmup)  # 1 at the peak, 1 / length at the last step
        return (
            self.lr * {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[self.schedule]
        )


class Task(Protocol):
    """Where prompts come from and how completions are graded; a dataclass that is its own `[task]` section."""

    @property
    def seed(self) -> int: ...

    @property
    def split(self) -> str:
        """`train` or `test`; the splits are disjoint."""
        ...

    def sample(self, step: int, n: int) -> Sequence[Prompt]:
        """The n prompts of a step: a pure function of (seed, split, step)."""
        ...

    def reward(self, prompt: Prompt, completion: Completion) -> Reward: ...


class Sampler(Protocol):
    def generate(self, prompts: Sequence[Prompt], group_size: int, seed: str) -> list[Group]:
        """`group_size` completions of each prompt; the same arguments and weights give the same completions."""
        ...

    def sync(self, policy: Any) -> None:
        """Sample from these weights from now on."""


class Logger(Protocol):
    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None: ...

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None: ...

    def close(self) -> None: ...


class UserError(Exception):
    """Something that the user can mend: one line that says what is wrong, where, and what would be right (exit 2)."""

"""The records that pass between the stages of a step, and the seams between the parts. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol, cast, runtime_checkable

Message = Mapping[str, str]

ROUND = 10**8 + 7
"""Round r of dynamic sampling asks a task for step + r * ROUND: no other step of a run, however long it gets. A prime,
so that a task which walks round and round its rows comes to others; 42 rounds stay below 2**32, where some generators
have their largest seed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question to the policy.

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
    prefix: str = ""
    """How the answer begins: given, not sampled. The completion goes on from here; the reward sees both."""
    prefix_whole: bool = False
    """The prefix is a whole answer: to say it is to stop after it."""

    @property
    def question(self) -> str:
        """The part that a person reads: the last message, or the whole string."""
        return self.text if isinstance(self.text, str) else self.text[-1]["content"]

    @property
    def key(self) -> str:
        """The text that tells this question from others: the string, or all messages but those of the system."""
        if isinstance(self.text, str):
            return self.text
        return "\n\n".join(message["content"] for message in self.text if message["role"] != "system")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn.

    Example: Sampling(8, temperature=0.7, max_tokens=256, seed="0/12")
    """

    n: int = 1
    """Completions of each prompt."""
    temperature: float = 1.0
    """Tokens are drawn from softmax(logits / temperature); 0 is greedy."""
    max_tokens: int = 64
    """The longest completion, in tokens."""
    top_k: int = 0
    """Only the k likeliest tokens are drawn; 0 is off."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability are drawn; 1 is off."""
    min_p: float = 0.0
    """Only tokens at least this many times as likely as the likeliest are drawn; 0 is off."""
    seed: str = ""
    """The seed of the random numbers. The same prompts, sampling and weights give the same completions."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens may not be drawn, so that completions carry sampling masks."""
        return self.temperature > 0.0 and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of the policy: a sequence of tokens, each sampled by the policy or given to it."""

    token_ids: tuple[int, ...]
    """All tokens, with the end-of-sequence token where that was sampled."""
    logprobs: tuple[float, ...]
    """The log-prob of each token under the distribution that it was drawn from, as the sampler computed it; nats. 0 for
    tokens that were given."""
    text: str
    """The sampled tokens, decoded without special tokens."""
    finished: bool
    """Whether it ended with an end-of-sequence token, not at the length limit."""
    sampling_mask: Sequence[Any] = field(default=(), compare=False, repr=False)
    """The sampling mask of each token (sampling_mask.py) where the sampler truncates; empty where it does not."""
    given: tuple[tuple[int, int], ...] = ()
    """The stretches [start, end) of token_ids that were given, in ascending order: the prompt's prefix."""
    version: int = 0
    """The number of finished steps that made the weights which drew it."""

    @property
    def length(self) -> int:
        """How many tokens were sampled."""
        return len(self.token_ids) - sum(end - start for start, end in self.given)


@dataclass(frozen=True, slots=True)
class Reward:
    """The grade of one completion.

    Example: Reward(0.9, parts={"numeric": 1.0, "length": -0.1}, correct=True)
    """

    value: float
    """NaN where the reward could not be computed."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The terms of a composite reward, before their weights."""
    correct: bool | None = None
    """Whether the answer counts as right in evaluation; where None, value >= 1 does."""
    error: str = ""
    """Why the reward could not be computed. One with an error has failed, whatever `value` says."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each term by name; 1 where none is given."""
    applies: bool = True
    """False where no term is meant for this prompt: it has no grade on purpose, and nothing has failed."""

    @property
    def failed(self) -> bool:
        """Whether there is no grade. It then counts as the mean of its siblings, and as neither right nor wrong."""
        return bool(self.error) or not math.isfinite(self.value)

    @property
    def is_correct(self) -> bool:
        return not self.failed and bool(self.value >= 1.0 if self.correct is None else self.correct)


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt, later with their rewards and advantages, in the same order."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    rewards: tuple[Reward, ...] = ()
    advantages: tuple[float, ...] = ()
    demonstration: tuple[int, ...] = ()
    """A response that nobody sampled and that may be made likelier: the prefix, and where that is a whole answer the
    end-of-sequence token behind it."""


def equal_rewards(group: Group, min_reward_range: float = 0.0) -> list[Reward]:
    """The rewards of a group in which all are equal; an empty list where they differ, or where all failed."""
    graded = [reward for reward in group.rewards if not reward.failed]
    values = [reward.value for reward in graded]
    return graded if graded and alike(min(values), max(values), min_reward_range) else []


def alike(low: float, high: float, min_reward_range: float = 0.0) -> bool:
    """Whether rewards from `low` to `high` are equal: up to min_reward_range, and to rounding (0.1 + 0.2 is 0.3)."""
    return high - low <= min_reward_range + 1e-9 * max(abs(low), abs(high))


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
    right: tuple[int, ...] = ()
    """1 where the greedy answer to a prompt is right, else 0, in the order of the questions as strings."""
    questions: str = ""
    """A digest of the questions: evaluations with the same one can be compared question by question."""
    failed: int = 0
    """Answers, samples too, without a grade: none of them counts as right."""


class Task(Protocol):
    """Where prompts come from and how completions are graded; a dataclass that is its own `[task]` section."""

    @property
    def seed(self) -> int: ...

    @property
    def split(self) -> str:
        """`train` or `test`; the splits are disjoint."""
        ...

    def sample(self, step: int, n: int) -> Sequence[Prompt]:
        """The n prompts of a step: a pure function of (seed, split, step), and of what an StatefulTask has observed.

        Later rounds of dynamic sampling ask for step + r * ROUND.
        """
        ...

    def reward(self, prompt: Prompt, completion: Completion) -> Reward: ...


def grade(task: Task, groups: Sequence[Group]) -> list[Group]:
    """The groups with their rewards, in the same order. A task in a sandbox is given all completions at once."""
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    grades = task.reward_all(pairs) if isinstance(task, Grader) else [task.reward(*pair) for pair in pairs]
    rewards = iter(grades)
    return [replace(group, rewards=tuple(islice(rewards, len(group.completions)))) for group in groups]


@runtime_checkable
class Grader(Protocol):
    """A task that grades many completions in less time than one after the other."""

    def reward_all(self, pairs: Sequence[tuple[Prompt, Completion]], /) -> list[Reward]:
        """Return a reward for each completion, in their order."""
        ...


class StatefulTask(Protocol):
    """A task that learns from what it sees: what it has learnt is part of a checkpoint."""

    def observe(self, step: int, groups: Sequence[Group]) -> Mapping[str, float]:
        """The graded groups of a step, of all processes and rounds; returns metrics. `step` is then over."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what is to be saved, as JSON."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


def stateful_task(task: Task) -> StatefulTask | None:
    """The task as a StatefulTask, or None where it keeps no state. Found by attribute, as a sandbox passes them on.

    UserError for one that observes and keeps what it saw from checkpoints.
    """
    if not hasattr(task, "observe"):
        return None
    if not hasattr(task, "state") or not hasattr(task, "load_state"):
        raise UserError("a task that has observe() must have state() and load_state(): a resumed run needs what it saw")
    return cast(StatefulTask, task)


class Sampler(Protocol):
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """sampling.n completions of each prompt."""
        ...

    def sync(self, policy: Any, version: int) -> None:
        """Use the weights of this policy from now on. Completions carry their version: the steps that made them."""


class Logger(Protocol):
    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group], /) -> None: ...

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None: ...

    def close(self) -> None: ...


class UserError(Exception):
    """A mistake that the user can mend: one line that says what is wrong, where, and what is right (exit status 2)."""


class NotBegunError(UserError):
    """A UserError before a run has taken its first step: nothing of the run is worth keeping."""


class StrandedError(Exception):
    """A process has lost the other processes of its run: nobody's mistake, so one line and exit status 1."""

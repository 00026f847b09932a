"""The seams between the parts: what a task, a sampler and a logger are, to whoever uses one. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable

from pellucid.types import (
    Completion,
    Evaluation,
    Group,
    Message,
    Outcome,
    Progress,
    Prompt,
    Reward,
    Sampling,
    UserError,
)

if TYPE_CHECKING:
    pass


class Task(Protocol):
    """The source of prompts and the grader of completions: a dataclass whose fields are the keys of `[task]`."""

    @property
    def seed(self) -> int: ...

    @property
    def split(self) -> str:
        """`train` or `test`; the splits are disjoint."""
        ...

    def sample(self, step: int, n: int) -> Sequence[Prompt]:
        """Return the n prompts of a step: a pure function of (seed, split, step) and of a StatefulTask's state.

        Round r of dynamic sampling passes step + r * ROUND.
        """
        ...

    def reward(self, prompt: Prompt, completion: Completion) -> Reward: ...


def with_split(task: Any, split: str) -> Any:
    """Return the task on another split: by its own `with_split` if it has one, otherwise by replacing its field."""
    return task.with_split(split) if hasattr(task, "with_split") else replace(task, split=split)


def grade(task: Task, groups: Sequence[Group], progress: Progress = Progress()) -> list[Group]:  # noqa: B008 - frozen
    """Return the groups with their rewards, in the same order. A StepGrader gets all pairs at once."""
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    grades = (
        task.reward_all(pairs, progress) if isinstance(task, StepGrader) else [task.reward(*pair) for pair in pairs]
    )
    rewards = iter(grades)
    return [replace(group, rewards=tuple(islice(rewards, len(group.completions)))) for group in groups]


def grades_together(task: Any) -> bool:
    """Return whether a task has, in place of `reward`, the method rewards(prompts, completions).

    It grades all completions of a step, and returns a Reward for each, in their order.
    """
    own = type(task)
    return callable(getattr(own, "rewards", None)) and not callable(getattr(own, "reward", None))


@runtime_checkable
class StepGrader(Protocol):
    """A task that grades many completions together, as in a sandbox."""

    def reward_all(self, pairs: Sequence[tuple[Prompt, Completion]], progress: Progress, /) -> list[Reward]:
        """Return a reward for each pair, in the same order."""
        ...


class StatefulTask(Protocol):
    """A task that adapts to the groups it observes, as a curriculum does. Its state is part of a checkpoint."""

    def observe(self, step: int, groups: Sequence[Group]) -> Mapping[str, float]:
        """Learn from the graded groups of a step, of all processes and rounds, after its last round. Return metrics."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state to be saved, as JSON values."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


def stateful_task(task: Task) -> StatefulTask | None:
    """Return the task as a StatefulTask, or None where it has no `observe`.

    It is recognized by its attributes, which a sandbox passes on. UserError for a task with `observe` and without
    `state` or `load_state`: checkpoints would lose what it has learnt.
    """
    if not hasattr(task, "observe"):
        return None
    if not hasattr(task, "state") or not hasattr(task, "load_state"):
        raise UserError("a task that has observe() must have state() and load_state(): a resumed run needs what it saw")
    return cast(StatefulTask, task)


class Said(NamedTuple):
    """What the policy has said in one turn, as it was read."""

    message: Message
    """Of the role assistant, with the calls that could be read."""
    unreadable_calls: tuple[str, ...] = ()
    """Of each call that could not be read why not, in one line."""
    token_counts: tuple[int, int] = (0, 0)
    """How many it has read, and how many it has sampled."""
    is_truncated: bool = False
    """Whether a limit of tokens has ended the turn."""


class Reply(NamedTuple):
    """What the world says in a conversation: one of three things."""

    messages: tuple[Message, ...] = ()
    """Messages to the policy, which then speaks again."""
    prompt: Prompt | None = None
    """Or the question, as at the beginning. Later it is another history than the one so far: what follows is a sequence
    of its own, and of the same conversation."""
    outcome: Outcome | None = None
    """Or nothing more: what the conversation has left behind."""
    max_tokens: int = 0
    """The most tokens of the turn that follows; 0 means as many as the settings allow."""


class World(Protocol):
    """Those whom the policy talks with: environments and tools. Nobody waits here for the answer of another."""

    def start_conversation(self, number: int, prompt: Prompt, sibling: int) -> None:
        """Begin a conversation by a number of the caller's. Its first reply is the question, as the policy is asked it.

        sibling: which of those about this prompt it is. Does not wait.
        """
        ...

    def send_turn(self, number: int, turn: Said) -> None:
        """Tell what the policy has said in a conversation. Does not wait for the answer."""
        ...

    def end_conversation(self, number: int) -> None:
        """Tell that the policy says nothing more in a conversation. The reply is its outcome."""
        ...

    def receive_replies(self, seconds: float) -> list[tuple[int, Reply]]:
        """Return the replies that have come, with the numbers of their conversations; wait so long for the first."""
        ...

    def close(self) -> None: ...


class Sampler(Protocol):
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Return a group of sampling.n completions for each prompt, in their order."""
        ...

    def sync(self, policy: Any, version: int) -> None:
        """Use the weights of this policy from now on. Completions carry `version`, the number of steps behind them."""


@runtime_checkable
class InFlight(Protocol):
    """A sampler that may be given any number of prompts at once. Others are given a few at a time."""

    @property
    def batches_continuously(self) -> bool:
        """Whether it decodes a bounded number of rows at once, and lets the next prompts in as rows end."""
        ...


class Logger(Protocol):
    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group], /) -> None: ...

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None: ...

    def close(self) -> None: ...

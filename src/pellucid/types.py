"""The records that pass between the stages of a training step, and the protocols of its parts. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

Message = Mapping[str, Any]
"""A chat message with the strings `role` and `content`. A message of the policy that calls tools also has `tool_calls`,
in OpenAI's format, except that the arguments are an object. The result of a tool also has the `name` of the tool."""

ROUND_STRIDE = 10**8 + 7
"""Round r of dynamic sampling uses the prompts of step + r * ROUND_STRIDE, a number that no real step reaches. The
stride is prime, so that a task that cycles through its rows returns different rows in each round. The numbers of up to
42 rounds are below 2**32, the limit for seeds."""


# ---------------------------------------------------------------- prompts and completions


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt for the policy to answer.

    Example: Prompt("train/0/3", ({"role": "user", "content": "What is 3 + 4?"},), answer="7")
    """

    id: str
    """An identifier that is unique within a step. It seeds the sampling of the prompt's group."""
    text: str | tuple[Message, ...]
    """Messages, which are formatted with the model's chat template, or a string, which the model receives unchanged."""
    answer: str = ""
    """The gold answer; empty if there is none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the data row, for reward functions."""
    prefix: str = ""
    """The beginning of the answer, given to the policy. The completion continues it; both are graded together."""
    prefix_is_complete: bool = False
    """Whether the prefix is a complete answer, after which the model should stop."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The JSON schema of each tool that may be called, as chat templates take them."""
    escape_special_tokens: bool = False
    """Whether special tokens in the text of messages are treated as plain text, for text that is not fully trusted."""
    alternatives: tuple[str, ...] = ()
    """Other gold answers, which are as correct as `answer`."""

    @property
    def gold_answers(self) -> tuple[str, ...]:
        """All gold answers. A completion that states any of them is right."""
        return (self.answer, *self.alternatives)

    @property
    def question(self) -> str:
        """The part to show to a person: the last message, or the string."""
        return self.text if isinstance(self.text, str) else self.text[-1]["content"]

    @property
    def key(self) -> str:
        """The text that identifies this prompt: the string, or all messages except system messages.

        If that text is empty because an environment will ask the question, the key is the id of the prompt.
        """
        if isinstance(self.text, str):
            return self.text
        text = "\n\n".join(message["content"] for message in self.text if message["role"] != "system")
        return text or self.id


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are sampled.

    Example: Sampling(8, temperature=0.7, max_tokens=256, seed="0/12")
    """

    n: int = 1
    """The number of completions of each prompt."""
    temperature: float = 1.0
    """Tokens are sampled from softmax(logits / temperature); 0 is greedy."""
    max_tokens: int = 64
    """The maximum length of a completion in tokens. In a conversation, observations count too."""
    top_k: int = 0
    """Sample only among the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample only among the likeliest tokens that together have this probability; 1 is off."""
    min_p: float = 0.0
    """Sample only among tokens at least this many times as likely as the likeliest; 0 is off."""
    seed: str = ""
    """The seed of the random numbers. The same prompts, sampling and weights give the same completions."""
    turns: int = 8
    """The maximum number of policy turns in a conversation."""
    turn_tokens: int = 0
    """The maximum number of tokens in one policy turn; 0 means what remains of max_tokens."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled, so that completions have sampling masks."""
        return self.temperature > 0.0 and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)


@dataclass(frozen=True, slots=True)
class ConversationOutcome:
    """The result of a conversation, from the environment."""

    reward: float | None = None
    """The reward that the environment returned; None if it returned none."""
    error: str = ""
    """Why the conversation or its reward failed; empty if neither did."""
    events: Mapping[str, int] = field(default_factory=dict)
    """The number of tool calls (`calls`), and the number of failed calls of each kind: `unreadable`, `unknown`,
    `arguments`, `raised`, `timeout`, and `lost` (the process died)."""
    environment: bytes = field(default=b"", compare=False, repr=False)
    """The pickled environment after the conversation, for reward functions that take `environments`."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of the policy: a sequence of tokens, each sampled by the policy or given to it.

    A conversation is also one completion: the turns of the policy are sampled, and the tokens between them are given.
    """

    token_ids: tuple[int, ...]
    """All tokens, including the end-of-sequence token if it was sampled."""
    logprobs: tuple[float, ...]
    """The log-prob of each token in nats, computed by the sampler under the distribution that the token was sampled
    from; 0 for given tokens."""
    text: str
    """The sampled tokens, decoded without special tokens. In a conversation, only those of the last turn."""
    finished: bool
    """Whether the completion ended with an end-of-sequence token and not at the length limit."""
    sampling_mask: Sequence[Any] = field(default=(), compare=False, repr=False)
    """The sampling mask of each token (sampling_mask.py); empty if the sampler does not truncate the distribution."""
    given_spans: tuple[tuple[int, int], ...] = ()
    """The ranges [start, end) of token_ids that were given and not sampled, in ascending order: the prompt's prefix,
    and the observations and bridge tokens between the turns of the policy."""
    version: int = 0
    """The number of training steps after which the sampler received the weights that it used here."""
    messages: tuple[Message, ...] = ()
    """The messages of a conversation after the question; empty if there is only one answer."""
    outcome: ConversationOutcome | None = None
    """The result of the conversation; None if there was no conversation."""
    branches: tuple[Completion, ...] = ()
    """Other token sequences of the same conversation, created when its history was rewritten. They have its reward."""
    thinking: bool = False
    """Whether the chat template wrote `<think>` right before the text, so that the text begins inside a thought."""

    @property
    def full_text(self) -> str:
        """The text with the `<think>` that the chat template wrote. Graders read this text."""
        return "<think>" + self.text if self.thinking else self.text

    @property
    def length(self) -> int:
        """The number of sampled tokens. Unlike len(token_ids), it does not count given tokens."""
        return len(self.token_ids) - sum(end - start for start, end in self.given_spans)


# ---------------------------------------------------------------- rewards and groups


@dataclass(frozen=True, slots=True)
class Reward:
    """The grade of one completion.

    Example: Reward(0.9, parts={"numeric": 1.0, "length": -0.1}, correct=True)
    """

    value: float
    """NaN if the reward could not be computed."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The terms of a composite reward, before their weights."""
    correct: bool | None = None
    """Whether the answer counts as right in evaluation. None means that it is right if value >= 1."""
    error: str = ""
    """Why the reward could not be computed, or empty. A reward with an error has failed, regardless of its `value`."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each term by name; 1 where none is given."""
    applies: bool = True
    """False if no term of the reward applies to this prompt, so that the grade is missing intentionally."""
    is_decided: bool = True
    """False if the term that decides which answers are right has no value for this completion. The completion is then
    neither right nor wrong, regardless of `value`."""
    is_continuous: bool = False
    """True if the reward lies on a continuous scale and is no verdict. Evaluation then reports its mean."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """The error of each term that failed, by name."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns for rollouts.jsonl and the report: JSON values by name."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """Metric values by name. The metric of a step is the mean over the completions that have a value."""

    @property
    def failed(self) -> bool:
        """Whether there is no grade: neither right nor wrong, with the mean of the group in place of the reward."""
        return bool(self.error) or not math.isfinite(self.value)

    @property
    def is_correct(self) -> bool:
        """Whether the answer is right."""
        return self.is_judged and bool(self.value >= 1.0 if self.correct is None else self.correct)

    @property
    def is_judged(self) -> bool:
        """Whether the answer is either right or wrong: there is a grade, and the deciding term has a value."""
        return not self.failed and self.is_decided

    @property
    def is_verdict(self) -> bool:
        """Whether the reward is a verdict, right or wrong, given by `correct` or by a value of 0 or 1."""
        return self.is_decided and not self.is_continuous and (self.correct is not None or self.value in (0.0, 1.0))


def rewards_are_verdicts(rewards: Iterable[Reward]) -> bool:
    """Return whether every reward that is decided and has not failed is a verdict, right or wrong.

    All output for users follows this rule. If it returns True, answers are reported as right or wrong. Otherwise
    rewards lie on a continuous scale, and only the rewards are shown. Callers pass all rewards that are shown together:
    those of a step, an evaluation or a run.
    """
    graded = [reward for reward in rewards if not reward.failed]
    judged = [reward for reward in graded if reward.is_judged]
    return all(reward.is_verdict for reward in judged) and (bool(judged) or not graded)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run."""

    global_step: int = 0
    """The number of finished steps."""
    max_steps: int = 1
    """The number of all steps."""
    prompts_per_step: int = 1
    """The number of prompts of a step."""


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt, later with their rewards and advantages, in the same order."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    rewards: tuple[Reward, ...] = ()
    advantages: tuple[float, ...] = ()
    demonstration: tuple[int, ...] = ()
    """The tokens of the prompt's prefix, whose likelihood algorithm.prefix_coef can raise. The end-of-sequence token
    follows a prefix that is a complete answer."""
    is_zero_variance: bool | None = None
    """Whether the rewards are equal up to algorithm.min_reward_range, so that there is nothing to learn. It is set only
    for tasks that observe groups, and None otherwise."""


def get_equal_rewards(group: Group, min_reward_range: float = 0.0) -> list[Reward]:
    """Return the rewards that have not failed if they are all equal; an empty list if they differ or all failed."""
    graded = [reward for reward in group.rewards if not reward.failed]
    values = [reward.value for reward in graded]
    return graded if graded and are_rewards_equal(min(values), max(values), min_reward_range) else []


def are_rewards_equal(low: float, high: float, min_reward_range: float = 0.0) -> bool:
    """Return whether rewards from `low` to `high` count as equal: their range is at most min_reward_range.

    Rounding errors are ignored: 0.1 + 0.2 counts as equal to 0.3.
    """
    return high - low <= min_reward_range + 1e-9 * max(abs(low), abs(high))


# ---------------------------------------------------------------- evaluation


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured mean with its 95% confidence interval; NaN if nothing was measured.

    The bounds are NaN where there is no interval: there were too few prompts, or all of them had the same value.
    """

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Accuracy and reward on n held-out prompts, with one greedy answer and k samples for each."""

    task: str
    split: str
    n: int
    k: int
    greedy: Estimate
    mean_at_k: Estimate
    """The mean accuracy of a single sample."""
    pass_at_k: Estimate
    """The share of prompts for which at least one of k samples is right."""
    greedy_correct: tuple[int | None, ...] = ()
    """For each prompt 1 if its greedy answer is right, 0 if it is wrong or its reward failed, None if it is left out or
    undecided; sorted by the text of the questions."""
    questions_digest: str = ""
    """A digest of the questions. Evaluations with the same digest can be compared question by question."""
    failed: int = 0
    """The number of answers, greedy and sampled, without a grade because a reward failed. They do not count as
    right."""
    left_out: int = 0
    """The number of prompts that are excluded from all means, because no reward applies to their greedy answer."""
    undecided: int = 0
    """The number of greedy answers that are neither right nor wrong, because the deciding term returned None. They
    are excluded from the accuracies."""
    reward: Estimate = field(default_factory=Estimate)
    """The mean reward of the greedy answers that have one."""
    reward_at_k: Estimate = field(default_factory=Estimate)
    """The mean reward of a single sample."""
    rewards: tuple[float, ...] = ()
    """The reward of each greedy answer in the order of `greedy_correct`; NaN where it failed."""
    has_verdicts: bool = True
    """Whether every reward is a verdict, right or wrong. If not, only rewards are reported."""


# ---------------------------------------------------------------- errors


class UserError(Exception):
    """A mistake that the user can correct. One line says what is wrong, where, and what is right. Exit status 2."""


class DataError(UserError):
    """A UserError about a prompt or a row of the data, which settings of the model or the algorithm cannot fix."""


class MissingFileError(UserError):
    """A UserError about a file that does not exist."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


class NotBegunError(UserError):
    """A UserError raised before the first step of a run, when the run directory contains nothing worth keeping."""


class StrandedError(Exception):
    """This process lost contact with the other processes of its run. One line and exit status 1: not a user mistake."""


# ---------------------------------------------------------------- tasks


class Task(Protocol):
    """Provides prompts and grades completions. A task is a dataclass whose fields are the keys of `[task]`."""

    @property
    def seed(self) -> int: ...

    @property
    def split(self) -> str:
        """`train` or `test`. Their prompts are disjoint."""
        ...

    def sample(self, step: int, n: int) -> Sequence[Prompt]:
        """Return the prompts of a step.

        The result must depend only on (seed, split, step) and on the state of a StatefulTask, so that a resumed run
        does not have to repeat earlier steps.

        Args:
            step: The number of finished steps. Round r of dynamic sampling passes step + r * ROUND_STRIDE.
            n: The number of prompts.
        """
        ...

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        """Grade one completion."""
        ...


def with_split(task: Any, split: str) -> Any:
    """Return the task on another split, by its own `with_split` if it has one, else by replacing its field."""
    return task.with_split(split) if hasattr(task, "with_split") else replace(task, split=split)


def grade_groups(task: Task, groups: Sequence[Group], progress: Progress = Progress()) -> list[Group]:
    """Return the groups with their rewards, in the same order. A StepGrader gets all completions at once."""
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    grades = (
        task.reward_all(pairs, progress) if isinstance(task, _StepGrader) else [task.reward(*pair) for pair in pairs]
    )
    rewards = iter(grades)
    return [replace(group, rewards=tuple(islice(rewards, len(group.completions)))) for group in groups]


def has_batch_rewards(task: Any) -> bool:
    """Return whether a task has a method rewards(prompts, completions) and no `reward`.

    It grades all completions of a step, and returns a Reward for each, in the same order.
    """
    own = type(task)
    return callable(getattr(own, "rewards", None)) and not callable(getattr(own, "reward", None))


@runtime_checkable
class _StepGrader(Protocol):
    """A task that grades many completions together, as in a sandbox."""

    def reward_all(self, pairs: Sequence[tuple[Prompt, Completion]], progress: Progress, /) -> list[Reward]:
        """Return a reward for each pair, in the same order."""
        ...


class _StatefulTask(Protocol):
    """A task that adapts to the groups it observes, as a curriculum does. Checkpoints save its state."""

    def observe(self, step: int, groups: Sequence[Group]) -> Mapping[str, float]:
        """Learn from the graded groups of a step, of all processes and rounds. Return metrics."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state to save, as JSON values."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


def as_stateful_task(task: Task) -> _StatefulTask | None:
    """Return the task as a StatefulTask, or None where it has no `observe`.

    It is recognized by its attributes, since a wrapper that grades in a sandbox forwards them.

    Raises:
        UserError: If it has `observe` without `state` and `load_state`, so that checkpoints would lose what it learned.
    """
    if not hasattr(task, "observe"):
        return None
    if not hasattr(task, "state") or not hasattr(task, "load_state"):
        raise UserError("a task that has observe() must have state() and load_state(): a resumed run needs what it saw")
    return cast(_StatefulTask, task)


# ---------------------------------------------------------------- environments


class PolicyTurn(NamedTuple):
    """One turn of the policy, parsed."""

    message: Message
    """The assistant message, with the tool calls that could be parsed."""
    unreadable_calls: tuple[str, ...] = ()
    """One line for each tool call that could not be parsed, with the reason."""
    token_counts: tuple[int, int] = (0, 0)
    """How many tokens the policy read, and how many it sampled."""
    is_truncated: bool = False
    """Whether the turn ended because it reached a token limit."""


class EnvironmentReply(NamedTuple):
    """The reply of an environment. One of `messages`, `prompt` and `outcome` is set."""

    messages: tuple[Message, ...] = ()
    """Messages to the policy, which has the next turn."""
    prompt: Prompt | None = None
    """The question, or later a rewritten history, which starts another token sequence of the same conversation."""
    outcome: ConversationOutcome | None = None
    """The outcome, if the conversation has ended."""
    max_tokens: int = 0
    """The maximum number of tokens in the next turn; 0 means as many as the settings allow."""


class AsyncEnvironments(Protocol):
    """The environments and tools of many conversations at once. No call waits for another conversation."""

    def start_conversation(self, number: int, prompt: Prompt, sibling: int) -> None:
        """Start a conversation, without waiting. Its first reply is the question.

        Args:
            number: Identifies the conversation; chosen by the caller.
            prompt: The prompt as the task gives it.
            sibling: The index of this conversation among those about the same prompt.
        """
        ...

    def send_turn(self, number: int, turn: PolicyTurn) -> None:
        """Send a turn of the policy, without waiting for the reply."""
        ...

    def end_conversation(self, number: int) -> None:
        """End a conversation in which the policy has no more turns. The reply is its outcome."""
        ...

    def receive_replies(self, seconds: float) -> list[tuple[int, EnvironmentReply]]:
        """Return the replies that have arrived, with the numbers of their conversations.

        Args:
            seconds: How long to wait for the first one.
        """
        ...

    def close(self) -> None: ...


# ---------------------------------------------------------------- samplers and loggers


class Sampler(Protocol):
    """Generates completions with the weights that it received last."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Return a group of sampling.n completions for each prompt, in the same order."""
        ...

    def sync(self, policy: Any, version: int) -> None:
        """Use the weights of this policy from now on.

        Args:
            policy: The policy that is trained.
            version: The number of training steps that produced the weights. It is stored in each completion.
        """


@runtime_checkable
class ContinuousBatchingSampler(Protocol):
    """A sampler that accepts any number of prompts at once. Other samplers receive a few prompts at a time."""

    @property
    def batches_continuously(self) -> bool:
        """Whether it decodes a bounded number of rows at once, and admits the next prompts as rows finish."""
        ...


class Logger(Protocol):
    """Receives what a run measures."""

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group], /) -> None:
        """Log a finished step with its graded groups."""
        ...

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None: ...

    def close(self) -> None: ...

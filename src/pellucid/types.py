"""Records that pass between the stages of a training step, and protocols of its components. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

Message = Mapping[str, Any]
"""A chat message with the strings `role` and `content`. A message of the policy that calls tools also has `tool_calls`,
in OpenAI's format, except that the arguments are an object. The result of a tool also has the `name` of the tool."""

ROUND_STRIDE = 10**8 + 7
"""Round r of dynamic sampling uses the prompts of step + r * ROUND_STRIDE, a number that no real step reaches. The
stride is prime, so that a task that cycles through its rows returns different rows in each round. Up to round 42, these
numbers are below 2**32, the limit for seeds."""


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
    """How completions are sampled, as in Sampling(8, temperature=0.7, max_tokens=256, seed="0/12")."""

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
    """Sample only among tokens with at least this share of the probability of the likeliest token; 0 is off."""
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
    """One answer of the policy, or one conversation: its turns are sampled, and the tokens between them are given."""

    token_ids: tuple[int, ...]
    """All tokens, including the end-of-sequence token if it was sampled."""
    logprobs: tuple[float, ...]
    """The log-prob of each token, in nats, under the distribution that it was sampled from; 0 for given tokens."""
    text: str
    """The sampled tokens, decoded without special tokens. In a conversation, only those of the last turn."""
    finished: bool
    """Whether the completion ended with an end-of-sequence token and not at the length limit."""
    sampling_mask: Sequence[Any] = field(default=(), compare=False, repr=False)
    """The sampling mask of each token (sampling_mask.py); empty if the sampler does not truncate the distribution."""
    given_spans: tuple[tuple[int, int], ...] = ()
    """The ranges [start, end) of token_ids that were given, in ascending order: the prompt's prefix, observations and
    bridge tokens."""
    version: int = 0
    """The number of training steps of the weights that sampled this completion."""
    messages: tuple[Message, ...] = ()
    """The messages of a conversation after the question; empty if there is only one answer."""
    outcome: ConversationOutcome | None = None
    """The result of the conversation, if there was one."""
    branches: tuple[Completion, ...] = ()
    """Other token sequences of the same conversation, created by rewriting its history. They get the same reward."""
    thinking: bool = False
    """Whether the chat template wrote `<think>` right before the text, so that the text begins inside a thought."""

    @property
    def full_text(self) -> str:
        """The text with the `<think>` that the chat template wrote, as graders read it."""
        return "<think>" + self.text if self.thinking else self.text

    @property
    def length(self) -> int:
        """The number of sampled tokens. Unlike len(token_ids), it does not count given tokens."""
        return len(self.token_ids) - sum(end - start for start, end in self.given_spans)


# ---------------------------------------------------------------- rewards and groups


@dataclass(frozen=True, slots=True)
class Reward:
    """The grade of one completion, such as Reward(0.9, parts={"numeric": 1.0, "length": -0.1}, correct=True)."""

    value: float
    """NaN if the reward could not be computed."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The terms of a composite reward, before their weights."""
    correct: bool | None = None
    """Whether the answer counts as right in evaluation. None means that it is right if value >= 1."""
    error: str = ""
    """Why the reward could not be computed; empty if it was. A reward with an error has failed, whatever its value."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each term by name; 1 where none is given."""
    applies: bool = True
    """False if no term of the reward applies to this prompt, so that the grade is missing intentionally."""
    is_decided: bool = True
    """False if the term that decides correctness has no value: the answer is then neither right nor wrong."""
    is_continuous: bool = False
    """Whether the reward is on a continuous scale and not a verdict. Evaluation then reports its mean."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """The error of each term that failed, by name."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns for rollouts.jsonl and the report: JSON values by name."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """Metric values by name. The metric of a step is the mean over the completions that have a value."""

    @property
    def failed(self) -> bool:
        """Whether there is no grade. The answer is neither right nor wrong, and the group mean replaces its reward."""
        return bool(self.error) or not math.isfinite(self.value)

    @property
    def is_correct(self) -> bool:
        return self.is_judged and bool(self.value >= 1.0 if self.correct is None else self.correct)

    @property
    def is_judged(self) -> bool:
        """Whether the answer is either right or wrong."""
        return not self.failed and self.is_decided

    @property
    def is_verdict(self) -> bool:
        """Whether the reward is a verdict, given by `correct` or by a value of 0 or 1."""
        return self.is_decided and not self.is_continuous and (self.correct is not None or self.value in (0.0, 1.0))


def rewards_are_verdicts(rewards: Iterable[Reward]) -> bool:
    """Return whether every reward that is decided and has not failed is a verdict, right or wrong.

    If so, answers are shown as right or wrong, otherwise only as rewards. Callers pass all rewards that are shown
    together: those of a step, an evaluation or a run.
    """
    graded = [reward for reward in rewards if not reward.failed]
    judged = [reward for reward in graded if reward.is_judged]
    return all(reward.is_verdict for reward in judged) and (bool(judged) or not graded)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run: the number of finished steps, of all steps, and of prompts per step."""

    global_step: int = 0
    max_steps: int = 1
    prompts_per_step: int = 1


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt, later with their rewards and advantages, in the same order."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    rewards: tuple[Reward, ...] = ()
    advantages: tuple[float, ...] = ()
    demonstration: tuple[int, ...] = ()
    """The tokens of the prompt's prefix, and the end-of-sequence token if the prefix is a complete answer.
    algorithm.prefix_coef can raise their likelihood."""
    is_zero_variance: bool | None = None
    """Whether the rewards are equal up to algorithm.min_reward_range; set only for tasks that observe groups."""


def get_equal_rewards(group: Group, min_reward_range: float = 0.0) -> list[Reward]:
    """Return the rewards that have not failed if they are all equal; else an empty list."""
    graded = [reward for reward in group.rewards if not reward.failed]
    values = [reward.value for reward in graded]
    return graded if graded and are_rewards_equal(min(values), max(values), min_reward_range) else []


def are_rewards_equal(low: float, high: float, min_reward_range: float = 0.0) -> bool:
    """Return whether the range of rewards is at most min_reward_range, up to rounding errors: 0.1 + 0.2 equals 0.3."""
    return high - low <= min_reward_range + 1e-9 * max(abs(low), abs(high))


# ---------------------------------------------------------------- evaluation


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured mean with its 95% confidence interval; NaN if nothing was measured.

    The bounds are NaN if there were too few prompts for an interval, or all of them had the same value.
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
    """1 for a prompt whose greedy answer is right, 0 if the answer is wrong or its reward failed, None if the prompt is
    left out or undecided. Prompts are sorted by the text of the question."""
    questions_digest: str = ""
    """Evaluations with the same digest can be compared question by question."""
    failed: int = 0
    """The number of answers, greedy and sampled, whose reward failed. They do not count as right."""
    left_out: int = 0
    """The number of prompts that are excluded from all means, because no reward applies to their greedy answer."""
    undecided: int = 0
    """The number of greedy answers that are neither right nor wrong, and excluded from the accuracies."""
    reward: Estimate = field(default_factory=Estimate)
    """The mean reward of the greedy answers."""
    reward_at_k: Estimate = field(default_factory=Estimate)
    """The mean reward of a single sample."""
    rewards: tuple[float, ...] = ()
    """The reward of each greedy answer in the order of `greedy_correct`; NaN where it failed."""
    has_verdicts: bool = True
    """Whether every reward is a verdict. If not, only rewards are reported."""


# ---------------------------------------------------------------- errors


class UserError(Exception):
    """A mistake that the user can correct. One line says what is wrong, where, and what is right. Exit status 2.

    `page` names the page of docs/ that helps, such as "how-to/rewards"; the line ends with it.
    """

    def __init__(self, message: str = "", *, page: str = "") -> None:
        super().__init__(f"{message} (docs/{page}.md)" if page else message)


class DataError(UserError):
    """A UserError about a prompt or a row of the data, which settings of the model or the algorithm cannot fix."""


class MissingFileError(UserError):
    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


class NotBegunError(UserError):
    """A UserError before the first step of a run, when the run directory contains nothing worth keeping."""


class StrandedError(Exception):
    """This process lost contact with the others of its run. It is not a user mistake: one line, exit status 1."""


# ---------------------------------------------------------------- tasks


class Task(Protocol):
    """Provides prompts and grades completions. A task is a dataclass whose fields are the keys of `[task]`."""

    @property
    def seed(self) -> int: ...

    @property
    def split(self) -> str:
        """`train` or `test`. The two splits share no prompts."""
        ...

    def sample(self, step: int, n: int) -> Sequence[Prompt]:
        """Return n prompts for the step that follows `step` finished steps.

        The result must depend only on (seed, split, step) and on the state of a StatefulTask, so that a resumed run
        does not have to repeat earlier steps. Round r of dynamic sampling passes step + r * ROUND_STRIDE.
        """
        ...

    def reward(self, prompt: Prompt, completion: Completion) -> Reward: ...


def with_split(task: Any, split: str) -> Any:
    """Return the task on another split, by its own `with_split` if it has one, else by replacing its field."""
    return task.with_split(split) if hasattr(task, "with_split") else replace(task, split=split)


def grade_groups(task: Task, groups: Sequence[Group], progress: Progress = Progress()) -> list[Group]:
    """Return the groups with their rewards, in the same order.

    If the task has a method `reward_all`, as a sandbox does, it gets all pairs of prompt and completion at once.
    """
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    reward_all: Any = getattr(task, "reward_all", None)
    rewards = iter(reward_all(pairs, progress) if reward_all else [task.reward(*pair) for pair in pairs])
    return [replace(group, rewards=tuple(islice(rewards, len(group.completions)))) for group in groups]


def has_batch_rewards(task: Any) -> bool:
    """Return whether a task has a method rewards(prompts, completions) and no `reward`.

    It grades all completions of a step, and returns a Reward for each, in the same order.
    """
    own = type(task)
    return callable(getattr(own, "rewards", None)) and not callable(getattr(own, "reward", None))


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
    """Return the task as a StatefulTask, or None if it has no `observe`."""
    if not hasattr(task, "observe"):  # no isinstance: a wrapper that grades in a sandbox forwards attributes
        return None
    if not hasattr(task, "state") or not hasattr(task, "load_state"):
        raise UserError("a task that has observe() must have state() and load_state(), for resumed runs")
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
    """The reply of an environment. Exactly one of `messages`, `prompt` and `outcome` is set."""

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
        """Start conversation `number`, sample `sibling` of the prompt, without waiting. The reply is the question."""

    def send_turn(self, number: int, turn: PolicyTurn) -> None:
        """Send a turn of the policy, without waiting for the reply."""

    def end_conversation(self, number: int) -> None:
        """End a conversation in which the policy has no more turns. The reply is its outcome."""

    def receive_replies(self, seconds: float) -> list[tuple[int, EnvironmentReply]]:
        """Wait up to `seconds` for a reply. Return all that have arrived, with the numbers of their conversations."""
        ...

    def close(self) -> None: ...


# ---------------------------------------------------------------- samplers and loggers


class Sampler(Protocol):
    """Generates completions with the weights that it received last.

    A sampler whose `batches_continuously` is True takes any number of prompts in one call, and starts the next ones as
    others finish.
    """

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Return a group of sampling.n completions for each prompt, in the same order."""
        ...

    def sync(self, policy: Any, version: int) -> None:
        """Use the weights of this policy from now on. `version` is the number of their training steps."""


class Logger(Protocol):
    """Receives what a run measures."""

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group], /) -> None:
        """Log a finished step with its graded groups."""

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None: ...

    def close(self) -> None: ...

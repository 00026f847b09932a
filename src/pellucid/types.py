"""The records that pass between the stages of a training step, and the protocols of its parts. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable

Message = Mapping[str, Any]
"""`role` and `content`, both texts; where the policy has called tools, also `tool_calls`, as OpenAI has them but with
their arguments as an object; where a tool answers, also the `name` of the tool."""

ROUND_STRIDE = 10**8 + 7
"""Round r of dynamic sampling asks a task for the prompts of step + r * ROUND, which no real step reaches. A prime, so
that a task which cycles through its rows finds others in each round; 42 rounds stay below 2**32, a limit of seeds."""


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
    """The other columns of the data row, for reward functions."""
    prefix: str = ""
    """The beginning of the answer, given and not sampled. The completion goes on from it; the reward sees both."""
    prefix_is_complete: bool = False
    """Whether the prefix is a whole answer, after which the model should stop."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that may be called, each by its JSON schema, as chat templates take them."""
    escape_special_tokens: bool = False
    """Whether special tokens that are written in its messages are plain text, since not only we wrote them."""
    alternatives: tuple[str, ...] = ()
    """Other gold answers, each as right as `answer`."""

    @property
    def gold_answers(self) -> tuple[str, ...]:
        """Return all gold answers; a completion that states any of them is right."""
        return (self.answer, *self.alternatives)

    @property
    def question(self) -> str:
        """Return the part that a person reads: the last message, or the whole string."""
        return self.text if isinstance(self.text, str) else self.text[-1]["content"]

    @property
    def key(self) -> str:
        """Return the text that identifies this question: the string, or all messages except those of the system.

        Where they are empty, as an environment still is to ask, it is the id.
        """
        if isinstance(self.text, str):
            return self.text
        text = "\n\n".join(message["content"] for message in self.text if message["role"] != "system")
        return text or self.id


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn.

    Example: Sampling(8, temperature=0.7, max_tokens=256, seed="0/12")
    """

    n: int = 1
    """How many completions each prompt gets."""
    temperature: float = 1.0
    """Tokens are drawn from softmax(logits / temperature); 0 is greedy."""
    max_tokens: int = 64
    """The longest completion, in tokens; of a conversation all that follows the question, whoever said it."""
    top_k: int = 0
    """Only the k likeliest tokens are drawn; 0 is off."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability are drawn; 1 is off."""
    min_p: float = 0.0
    """Only tokens at least this many times as likely as the likeliest are drawn; 0 is off."""
    seed: str = ""
    """The seed of the random numbers. The same prompts, sampling and weights give the same completions."""
    turns: int = 8
    """How many times the policy may speak in a conversation."""
    turn_tokens: int = 0
    """The most tokens that it samples at a time there; 0 means as many as max_tokens leaves."""

    @property
    def truncates(self) -> bool:
        """Return whether some tokens may not be drawn, so that completions carry sampling masks."""
        return self.temperature > 0.0 and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)


@dataclass(frozen=True, slots=True)
class ConversationOutcome:
    """What a conversation has left behind, in the world that the policy talked with."""

    reward: float | None = None
    """What the environment says that it was worth; None where it says nothing."""
    error: str = ""
    """Why it could not be held, or its worth not be told; else empty."""
    events: Mapping[str, int] = field(default_factory=dict)
    """How often tools were called (`calls`), and how often a call came to nothing, by its kind: `unreadable`,
    `unknown`, `arguments`, `raised`, `timeout`, and `lost` with its process."""
    environment: bytes = field(default=b"", compare=False, repr=False)
    """The environment as the conversation left it, pickled, for reward functions that ask for `environments`."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of the policy: a sequence of tokens, each sampled by the policy or given to it.

    A conversation is one completion, too: what the policy said in its turns is sampled, what stands between is given.
    """

    token_ids: tuple[int, ...]
    """All tokens, with the end-of-sequence token where that was sampled."""
    logprobs: tuple[float, ...]
    """The log-prob of each token in nats, as the sampler computed it, under the distribution that the token was drawn
    from; 0 for given tokens."""
    text: str
    """The sampled tokens, decoded without special tokens; of a conversation those of its last turn."""
    finished: bool
    """Whether it ended with an end-of-sequence token, not at the length limit."""
    sampling_mask: Sequence[Any] = field(default=(), compare=False, repr=False)
    """The sampling mask of each token (sampling_mask.py) where the sampler truncates; empty where it does not."""
    given_spans: tuple[tuple[int, int], ...] = ()
    """The ranges [start, end) of token_ids that were given and not sampled, in ascending order: the prompt's prefix,
    and what was said to the policy between its turns."""
    version: int = 0
    """How many training steps the weights that sampled it had taken."""
    messages: tuple[Message, ...] = ()
    """Of a conversation what was said after the question, message by message; empty where there is only an answer."""
    outcome: ConversationOutcome | None = None
    """What a conversation has left behind; None where there was none."""
    branches: tuple[Completion, ...] = ()
    """Other sequences of the same conversation, where its history was rewritten; they have its reward."""
    thinking: bool = False
    """Whether the chat template wrote `<think>` right before the text, so that the text begins inside a thought."""

    @property
    def full_text(self) -> str:
        """Return the text together with the `<think>` that the chat template wrote. Graders read this text."""
        return "<think>" + self.text if self.thinking else self.text

    @property
    def length(self) -> int:
        """Return how many tokens were sampled; given tokens do not count."""
        return len(self.token_ids) - sum(end - start for start, end in self.given_spans)


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
    """Whether the answer counts as right in evaluation; None: it does where value >= 1."""
    error: str = ""
    """Why the reward could not be computed; else empty. A reward with an error has failed, whatever its `value` is."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each term by name; 1 where none is given."""
    applies: bool = True
    """False where no term of the reward is meant for this prompt: the grade is missing on purpose, not by a fault."""
    is_decided: bool = True
    """False where the term that says which answers are right says nothing of this completion: it is neither right nor
    wrong, whatever its value is."""
    is_continuous: bool = False
    """True where the reward is a matter of degree, and `correct` no verdict: evaluation then speaks of its mean."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Why each term that failed could not be computed, by its name."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns for rollouts.jsonl and the report: JSON values by name."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """Numbers by the names of metrics. A metric of a step is their mean over the completions that have one."""

    @property
    def failed(self) -> bool:
        """Return whether there is no grade: neither right nor wrong, and the mean of the group counts in its place."""
        return bool(self.error) or not math.isfinite(self.value)

    @property
    def is_correct(self) -> bool:
        return self.is_judged and bool(self.value >= 1.0 if self.correct is None else self.correct)

    @property
    def is_judged(self) -> bool:
        """Return whether the completion is either right or wrong: it has a grade, and the deciding term has a value."""
        return not self.failed and self.is_decided

    @property
    def is_verdict(self) -> bool:
        """Return whether it says right or wrong: by `correct`, or by a value that is 0 or 1."""
        return self.is_decided and not self.is_continuous and (self.correct is not None or self.value in (0.0, 1.0))


def rewards_are_verdicts(rewards: Iterable[Reward]) -> bool:
    """Return whether rewards say which answers are right: each one does that has not failed and was decided.

    This is the one rule for what users are shown. Where it holds, answers are called right or wrong; where it does not,
    rewards are a matter of degree, .8 is simply less than 1, and only the rewards are shown. A caller applies it to all
    rewards that are shown together: a step, an evaluation, a run.
    """
    graded = [reward for reward in rewards if not reward.failed]
    judged = [reward for reward in graded if reward.is_judged]
    return all(reward.is_verdict for reward in judged) and (bool(judged) or not graded)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is."""

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
    """The tokens of the prompt's prefix, which algorithm.prefix_coef can make likelier. Where the prefix is a whole
    answer, the end-of-sequence token follows it."""
    is_zero_variance: bool | None = None
    """Whether the group teaches nothing, since its rewards are equal up to algorithm.min_reward_range; None where that
    is not known. It is set for tasks that observe groups."""


def get_equal_rewards(group: Group, min_reward_range: float = 0.0) -> list[Reward]:
    """Return the rewards that have not failed, where all of them are equal; empty where they differ or all failed."""
    graded = [reward for reward in group.rewards if not reward.failed]
    values = [reward.value for reward in graded]
    return graded if graded and are_rewards_equal(min(values), max(values), min_reward_range) else []


def are_rewards_equal(low: float, high: float, min_reward_range: float = 0.0) -> bool:
    """Return whether rewards from `low` to `high` count as equal: their range is min_reward_range at most.

    Rounding does not count: 0.1 + 0.2 equals 0.3.
    """
    return high - low <= min_reward_range + 1e-9 * max(abs(low), abs(high))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured mean with its 95% interval; NaN where nothing was measured.

    The ends are NaN where there is no interval, since too few prompts were asked or all of them had the same value.
    """

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Accuracy and reward on n held-out prompts: one greedy answer each, and k samples each."""

    task: str
    split: str
    n: int
    k: int
    greedy: Estimate
    mean_at_k: Estimate
    """The mean accuracy of a single sample."""
    pass_at_k: Estimate
    """The share of prompts that at least one of k samples gets right."""
    greedy_correct: tuple[int | None, ...] = ()
    """For each prompt 1 if its greedy answer is right, 0 if it is wrong or its reward failed, None if it is left out or
    undecided; sorted by the text of the questions."""
    questions_digest: str = ""
    """A digest of the questions: evaluations with the same one can be compared question by question."""
    failed: int = 0
    """How many answers, greedy and sampled, have no grade because a reward failed; none of them counts as right."""
    left_out: int = 0
    """How many prompts are in no mean, because no reward applies to their greedy answer."""
    undecided: int = 0
    """How many greedy answers are neither right nor wrong, and so in no accuracy: the deciding term returned None."""
    reward: Estimate = field(default_factory=Estimate)
    """The mean reward of the greedy answers that have one."""
    reward_at_k: Estimate = field(default_factory=Estimate)
    """The mean reward of a single sample."""
    rewards: tuple[float, ...] = ()
    """The reward of each greedy answer in the order of `right`; NaN where it failed."""
    has_verdicts: bool = True
    """Whether every reward says right or wrong; where one does not, the reward is what there is to speak of."""


class UserError(Exception):
    """A mistake that the user can mend: one line that says what is wrong, where, and what is right (exit status 2)."""


class DataError(UserError):
    """A UserError about a prompt or a row of the data, which no setting of the model or the algorithm mends."""


class MissingFileError(UserError):
    """A UserError about a file that is not there."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


class NotBegunError(UserError):
    """A UserError before a run has taken its first step: its folder holds nothing worth keeping."""


class StrandedError(Exception):
    """A process has lost the other processes of its run: no mistake of the user, so one line and exit status 1."""


# ---------------------------------------------------------------- protocols
# The seams between the parts: what a task, a sampler and a logger are, to whoever uses one. No torch here.


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


def grade_groups(task: Task, groups: Sequence[Group], progress: Progress = Progress()) -> list[Group]:
    """Return the groups with their rewards, in the same order. A StepGrader gets all pairs at once."""
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    grades = (
        task.reward_all(pairs, progress) if isinstance(task, StepGrader) else [task.reward(*pair) for pair in pairs]
    )
    rewards = iter(grades)
    return [replace(group, rewards=tuple(islice(rewards, len(group.completions)))) for group in groups]


def has_batch_rewards(task: Any) -> bool:
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


def as_stateful_task(task: Task) -> StatefulTask | None:
    """Return the task as a StatefulTask, or None where it has no `observe`.

    It is recognized by its attributes, which a sandbox passes on. UserError for a task with `observe` and without
    `state` or `load_state`: checkpoints would lose what it has learnt.
    """
    if not hasattr(task, "observe"):
        return None
    if not hasattr(task, "state") or not hasattr(task, "load_state"):
        raise UserError("a task that has observe() must have state() and load_state(): a resumed run needs what it saw")
    return cast(StatefulTask, task)


class PolicyTurn(NamedTuple):
    """What the policy has said in one turn, as it was read."""

    message: Message
    """Of the role assistant, with the calls that could be read."""
    unreadable_calls: tuple[str, ...] = ()
    """Of each call that could not be read why not, in one line."""
    token_counts: tuple[int, int] = (0, 0)
    """How many it has read, and how many it has sampled."""
    is_truncated: bool = False
    """Whether a limit of tokens has ended the turn."""


class EnvironmentReply(NamedTuple):
    """What the world says in a conversation: one of three things."""

    messages: tuple[Message, ...] = ()
    """Messages to the policy, which then speaks again."""
    prompt: Prompt | None = None
    """Or the question, as at the beginning. Later it is another history than the one so far: what follows is a sequence
    of its own, and of the same conversation."""
    outcome: ConversationOutcome | None = None
    """Or nothing more: what the conversation has left behind."""
    max_tokens: int = 0
    """The most tokens of the turn that follows; 0 means as many as the settings allow."""


class AsyncEnvironments(Protocol):
    """Those whom the policy talks with: environments and tools. Nobody waits here for the answer of another."""

    def start_conversation(self, number: int, prompt: Prompt, sibling: int) -> None:
        """Begin a conversation by a number of the caller's. Its first reply is the question, as the policy is asked it.

        sibling: which of those about this prompt it is. Does not wait.
        """
        ...

    def send_turn(self, number: int, turn: PolicyTurn) -> None:
        """Tell what the policy has said in a conversation. Does not wait for the answer."""
        ...

    def end_conversation(self, number: int) -> None:
        """Tell that the policy says nothing more in a conversation. The reply is its outcome."""
        ...

    def receive_replies(self, seconds: float) -> list[tuple[int, EnvironmentReply]]:
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
class ContinuousBatchingSampler(Protocol):
    """A sampler that may be given any number of prompts at once. Others are given a few at a time."""

    @property
    def batches_continuously(self) -> bool:
        """Whether it decodes a bounded number of rows at once, and lets the next prompts in as rows end."""
        ...


class Logger(Protocol):
    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group], /) -> None: ...

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None: ...

    def close(self) -> None: ...

"""The questions of a run through its steps: each step is read once, and again only when its files have changed."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from pellucid.inspect.steps import StepTokens, build_step_tokens, measure_groups
from pellucid.reporting.charts import Point, Series, draw_chart
from pellucid.reporting.run_files import Record
from pellucid.reporting.token_files import get_token_metadata
from pellucid.types import UserError, are_rewards_equal

MAX_LISTED_QUESTIONS = 1000
"""How many questions are listed, those that were asked most often."""
MAX_LISTED_CHARS = 300
"""How many characters of a question are listed."""
RECENT_REWARD_COUNT = 6
"""How many of the last rewards stand beside a question."""
MAX_SHOWN_ANSWERS = 10
"""How many steps a question's best answer is shown of."""
CURVE_TITLES = {
    "reward": ("Reward", "mean of its answers"),
    "length": ("Length", "mean of its answers, tokens"),
    "entropy": ("Entropy", "nats a token"),
}
"""Of each curve its title and what it measures."""
Item = TypeVar("Item")
Summary = Mapping[str, Any]


class QuestionOccurrence(NamedTuple):
    """A question as one group of a step was asked it."""

    step: int
    group: int
    reward: float | None
    """Mean of the completions that have one, as are the others."""
    length: float | None
    entropy: float | None
    recorded: bool


class QuestionHistory:
    """summarised: of some steps the summaries. What is kept of a group is six numbers, and of a question its text."""

    def __init__(self, read_summaries: Callable[[Sequence[int]], Iterable[Summary]]):
        self.read_summaries = read_summaries
        self.fingerprints: dict[int, object] = {}
        """Of each step that was read, where its files were then."""
        self.by_step: dict[int, list[tuple[str, QuestionOccurrence]]] = {}
        self.prompts: dict[str, str] = {}
        self.occurrences: defaultdict[str, list[QuestionOccurrence]] = defaultdict(list)
        """Of each question the groups that were asked it, by their steps."""

    def update(self, fingerprints: Mapping[int, object]) -> None:
        """Read the steps whose marks have changed, and forget those that are gone."""
        gone = self.fingerprints.keys() - fingerprints.keys()
        changed = [step for step, mark in fingerprints.items() if self.fingerprints.get(step) != mark]
        for step in gone:
            del self.fingerprints[step], self.by_step[step]
        for step, found in zip(changed, self.read_summaries(changed), strict=True):
            self.fingerprints[step] = fingerprints[step]
            self.by_step[step] = [(group["question"], make_occurrence(step, group)) for group in found["groups"]]
            for group in found["groups"]:
                self.prompts.setdefault(group["question"], group["prompt"][:MAX_LISTED_CHARS])
        if gone or changed:
            self.occurrences = defaultdict(list)
            for step in sorted(self.by_step):
                for name, each in self.by_step[step]:
                    self.occurrences[name].append(each)

    def list_repeated(self) -> list[dict[str, Any]]:
        """Each question that was asked more than once, most often first: how often, and its last mean rewards."""
        often = sorted(self.occurrences.items(), key=lambda item: -len(item[1]))[:MAX_LISTED_QUESTIONS]
        return [
            {
                "question": name,
                "prompt": self.prompts[name],
                "times": len(times),
                "last": [each.reward for each in times[-RECENT_REWARD_COUNT:]],
            }
            for name, times in often
            if len(times) > 1
        ]

    def trace_question(self, name: str, can_show_step: Callable[[int], bool]) -> dict[str, Any]:
        """One question through the steps: its curves, and the groups whose best answers are to be shown.

        shown: whether the tokens of a recorded step can be. UserError where nobody asked that.
        """
        if name not in self.occurrences:
            raise UserError(f"no step asked the question {name}")
        times = self.occurrences[name]
        best = [[each.step, each.group] for each in times if each.recorded and can_show_step(each.step)]
        told = {"question": name, "prompt": self.prompts[name]}
        return {**told, "charts": draw_question_charts(times), "best": sample_evenly(best, MAX_SHOWN_ANSWERS)}


def make_occurrence(step: int, group: Summary) -> QuestionOccurrence:
    numbers = (compute_mean_of_known(group["rewards"]), compute_mean_of_known(group["lengths"]), group["entropy"])
    return QuestionOccurrence(step, group["group"], *numbers, group["recorded"])


def compute_mean_of_known(values: Sequence[float | None]) -> float | None:
    """Of those that there are."""
    known = [value for value in values if value is not None]
    return fsum(known) / len(known) if known else None


def draw_question_charts(occurrences: Sequence[QuestionOccurrence]) -> list[str]:
    """A question that several groups of a step were asked has a point for each of them."""
    drawn = []
    for name, (title, about) in CURVE_TITLES.items():
        points = [Point(each.step, value) for each in occurrences if (value := getattr(each, name)) is not None]
        drawn.append(draw_chart(title, about, [Series(name, points)]))
    return [svg for svg in drawn if svg]


def sample_evenly(items: Sequence[Item], limit: int) -> list[Item]:
    """All, or so many of them at even distances, the first and the last among them."""
    if len(items) <= limit:
        return list(items)
    return (
        [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)] if limit > 1 else list(items[-limit:])
    )


# ---------------------------------------------------------------- summaries
# What the groups of a step were: how they were rewarded, whether there was a signal, and what they taught.


SIGNAL, ALL_RIGHT, ALL_WRONG, PARTIAL, ALL_FAILED = "signal", "all_right", "all_wrong", "partial", "all_failed"
EQUAL = "equal"
MAX_PROMPT_CHARS = 2000
"""How many characters of a prompt a summary has; all of it is in rollouts.jsonl."""


def classify_signal(
    rewards: Sequence[float | None], correct: Sequence[bool | None], min_reward_range: float = 0.0
) -> str:
    """Whether the rewards of a group differ, or why there is nothing to compare.

    "all_right", "all_wrong" where all rewards are 0 or less, "partial" where all have the same reward above 0 and not
    all are right, "equal" where they have the same reward and nothing says which are right (`correct` is None),
    "all_failed" where no reward could be computed. least: the range of rewards that counts as none.
    """
    graded = [reward for reward in rewards if reward is not None]
    if not graded:
        return ALL_FAILED
    if not are_rewards_equal(min(graded), max(graded), min_reward_range):
        return SIGNAL
    stated = [right for right, reward in zip(correct, rewards, strict=True) if reward is not None]
    if None in stated:
        return EQUAL
    if all(stated):
        return ALL_RIGHT
    return PARTIAL if graded[0] > 0 else ALL_WRONG


def hash_question(prompt: str) -> str:
    """A short name of a question, the same in every step and every run that asks it."""
    return hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest()[:12]


def summarize_step(
    step: int,
    groups: Sequence[Sequence[Record]],
    table: pa.Table | None,
    min_reward_range: float = 0.0,
    verdicts: bool = True,
) -> dict[str, Any]:
    """The groups of a step, in its order: from rollouts.jsonl, and where that has none from the recorded tokens.

    `gradient` of a group is the sum of the gradient norms of its tokens and `entropy` the mean entropy of its sampled
    tokens in nats, both before the update; null where its tokens were not recorded.

    verdicts: False leaves out which answers are right, since the run's rewards are a matter of degree.
    """
    taught = measure_groups(table) if table is not None else {}
    told = {j: describe_rollouts(group) for j, group in enumerate(groups)}
    if table is not None and not told:
        tokens, questions = build_step_tokens(table), get_token_metadata(table).get("questions", {})
        told = {j: describe_recorded_tokens(tokens, j, questions.get(str(j))) for j in taught}
    rows = []
    for j, row in told.items():
        if not verdicts:
            row["correct"] = [None] * len(row["rewards"])
        signal = classify_signal(row["rewards"], row["correct"], min_reward_range)
        recorded = taught.get(j, {"gradient": None, "entropy": None})
        rows.append({"group": j, **row, "signal": signal, "recorded": j in taught, **recorded})
    return {"step": step, "groups": rows}


def describe_rollouts(group: Sequence[Record]) -> dict[str, Any]:
    return {
        **describe_question(str(group[0].get("prompt", "")), str(group[0].get("id", ""))),
        "rewards": [row.get("reward") for row in group],
        "correct": [row.get("correct") for row in group],
        "finished": [bool(row.get("finished")) for row in group],
        "lengths": [len(row.get("tokens", ())) for row in group],
    }


def describe_recorded_tokens(tokens: StepTokens, group: int, question: str | None) -> dict[str, Any]:
    whole = [each for each in tokens.sequences if each["group"] == group and each["branch"] == 0]
    answers = [each for each in whole if each["completion"] >= 0]
    templated = "".join(tokens.join_text(each) for each in whole if each["completion"] < 0)
    prompt = templated if question is None else question  # as rollouts.jsonl has it
    return {
        **describe_question(prompt, whole[0]["prompt_id"]),
        "rewards": [each["reward"] for each in answers],
        "correct": [each["correct"] for each in answers],
        "finished": [bool(each["finished"]) for each in answers],
        "lengths": [each["end"] - each["start"] for each in answers],
    }


def describe_question(prompt: str, prompt_id: str) -> dict[str, str]:
    return {"prompt": prompt[:MAX_PROMPT_CHARS], "id": prompt_id, "question": hash_question(prompt)}

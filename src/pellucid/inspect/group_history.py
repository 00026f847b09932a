"""Summaries of the groups of a step, and the history of each question through the steps of a run."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from pellucid.inspect.steps import StepTokens, build_step_tokens, measure_groups
from pellucid.reporting.charts import Point, Series, draw_chart
from pellucid.reporting.eval_metrics import compute_known_mean
from pellucid.reporting.run_files import Record
from pellucid.reporting.token_files import get_token_metadata
from pellucid.types import UserError, are_rewards_equal

_MAX_LISTED_QUESTIONS = 1000
"""The number of questions in the list, those that were asked most often."""
_RECENT_REWARD_COUNT = 6
"""The number of last rewards beside a question in the list."""
_MAX_SHOWN_ANSWERS = 10
"""The number of steps whose best answer to a question is shown."""
_CURVE_TITLES = {
    "reward": ("Reward", "mean of its answers"),
    "length": ("Length", "mean of its answers, tokens"),
    "entropy": ("Entropy", "nats per token"),
}
"""The title of each curve, and what it measures."""
_Summary = Mapping[str, Any]


class _QuestionOccurrence(NamedTuple):
    """A group that a step sampled for a question."""

    step: int
    group: int
    reward: float | None
    """The mean over the completions that have one; None if none has."""
    length: float | None
    entropy: float | None
    recorded: bool


class QuestionHistory:
    """The groups of each question. A step is read once, and again only when its files have changed.

    Six numbers of each group are in memory, and the beginning of each question's text.
    """

    def __init__(self, read_summaries: Callable[[Sequence[int]], Iterable[_Summary]]):
        self.read_summaries = read_summaries
        self.fingerprints: dict[int, object] = {}
        """The state of the files of each step when it was read."""
        self.by_step: dict[int, list[tuple[str, _QuestionOccurrence]]] = {}
        self.prompts: dict[str, str] = {}
        self.occurrences: defaultdict[str, list[_QuestionOccurrence]] = defaultdict(list)
        """The groups of each question, ordered by step."""

    def update(self, fingerprints: Mapping[int, object]) -> None:
        """Read the steps whose fingerprints have changed, and forget those that are gone."""
        gone = self.fingerprints.keys() - fingerprints.keys()
        changed = [step for step, known in fingerprints.items() if self.fingerprints.get(step) != known]
        for step in gone:
            del self.fingerprints[step], self.by_step[step]
        for step, summary in zip(changed, self.read_summaries(changed), strict=True):
            self.fingerprints[step] = fingerprints[step]
            self.by_step[step] = [(group["question"], _make_occurrence(step, group)) for group in summary["groups"]]
            for group in summary["groups"]:
                self.prompts.setdefault(group["question"], group["prompt"])
        if gone or changed:
            self.occurrences = defaultdict(list)
            for step in sorted(self.by_step):
                for name, occurrence in self.by_step[step]:
                    self.occurrences[name].append(occurrence)

    def list_repeated(self) -> list[dict[str, Any]]:
        """List the questions that were asked more than once, most often first, with their last mean rewards."""
        by_count = sorted(self.occurrences.items(), key=lambda item: -len(item[1]))[:_MAX_LISTED_QUESTIONS]
        return [
            {
                "question": name,
                "prompt": self.prompts[name],
                "times": len(occurrences),
                "last": [occurrence.reward for occurrence in occurrences[-_RECENT_REWARD_COUNT:]],
            }
            for name, occurrences in by_count
            if len(occurrences) > 1
        ]

    def trace_question(self, name: str, shown_steps: Container[int] | None = None) -> dict[str, Any]:
        """Return the curves of a question, and the groups in `shown_steps`, or all, whose best answers are shown.

        Raises:
            UserError: No step asked the question with this name.
        """
        if name not in self.occurrences:
            raise UserError(f"no step asked the question {name}")
        occurrences = self.occurrences[name]
        best = [[each.step, each.group] for each in occurrences if each.recorded]
        shown = [each for each in best if shown_steps is None or each[0] in shown_steps]
        return {
            "question": name,
            "prompt": self.prompts[name],
            "charts": _draw_question_charts(occurrences),
            "best": sample_evenly(shown, _MAX_SHOWN_ANSWERS),
        }


def _make_occurrence(step: int, group: _Summary) -> _QuestionOccurrence:
    reward, length = compute_known_mean(group["rewards"]), compute_known_mean(group["lengths"])
    return _QuestionOccurrence(step, group["group"], reward, length, group["entropy"], group["recorded"])


def _draw_question_charts(occurrences: Sequence[_QuestionOccurrence]) -> list[str]:
    """Return the curves of a question. Each of its groups is a point, even several of one step."""
    charts = []
    for name, (title, about) in _CURVE_TITLES.items():
        points = [Point(each.step, value) for each in occurrences if (value := getattr(each, name)) is not None]
        charts.append(draw_chart(title, about, [Series(name, points)]))
    return [svg for svg in charts if svg]


def sample_evenly(items: Sequence[Any], limit: int) -> list[Any]:
    """Return all items, or `limit` of them at even distances, among them the first and the last."""
    if len(items) <= limit or limit <= 1:
        return list(items[-limit:])
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


# ---------------------------------------------------------------- the summary of a step


_SIGNAL, ALL_RIGHT, ALL_WRONG, PARTIAL, _ALL_FAILED = "signal", "all_right", "all_wrong", "partial", "all_failed"
EQUAL = "equal"
_MAX_PROMPT_CHARS = 300
"""The number of characters of a prompt in a summary; rollouts.jsonl has the whole prompt."""


def classify_signal(
    rewards: Sequence[float | None], correct: Sequence[bool | None], min_reward_range: float = 0.0
) -> str:
    """Return "signal" if the rewards of a group differ, else the reason why there is nothing to compare.

    It is "all_right"; "all_wrong" if all rewards are equal and 0 or less; "partial" if all have the same reward above
    0 and not all are right; "equal" if all have the same reward and nothing tells which are right; "all_failed" if no
    reward could be computed. Rewards within `min_reward_range` count as equal.
    """
    graded = [reward for reward in rewards if reward is not None]
    if not graded:
        return _ALL_FAILED
    if not are_rewards_equal(min(graded), max(graded), min_reward_range):
        return _SIGNAL
    verdicts = [right for right, reward in zip(correct, rewards, strict=True) if reward is not None]
    if None in verdicts:
        return EQUAL
    if all(verdicts):
        return ALL_RIGHT
    return PARTIAL if graded[0] > 0 else ALL_WRONG


def summarize_step(
    step: int, groups: Sequence[Sequence[Record]], table: pa.Table | None, min_reward_range: float = 0.0
) -> dict[str, Any]:
    """Return the groups of a step in their order, from rollouts.jsonl or else from the recorded tokens.

    In the result, `gradient` of a group is the sum of the gradient norms of its tokens, and `entropy` the mean entropy
    of its sampled tokens in nats, both before the update; they are null if its tokens were not recorded.
    """
    measures = measure_groups(table) if table is not None else {}
    described = {j: _describe_rollouts(group) for j, group in enumerate(groups)}
    if table is not None and not described:
        tokens, questions = build_step_tokens(table), get_token_metadata(table).get("questions", {})
        described = {j: _describe_recorded_tokens(tokens, j, questions.get(str(j))) for j in measures}
    rows = []
    for j, row in described.items():
        signal = classify_signal(row["rewards"], row["correct"], min_reward_range)
        measured = measures.get(j, {"gradient": None, "entropy": None})
        rows.append({"group": j, **row, "signal": signal, "recorded": j in measures, **measured})
    return {"step": step, "groups": rows}


def _describe_rollouts(group: Sequence[Record]) -> dict[str, Any]:
    return {
        **_describe_question(str(group[0].get("prompt", "")), str(group[0].get("id", ""))),
        "rewards": [row.get("reward") for row in group],
        "correct": [row.get("correct") for row in group],
        "finished": [bool(row.get("finished")) for row in group],
        "lengths": [len(row.get("tokens", ())) for row in group],
    }


def _describe_recorded_tokens(tokens: StepTokens, group: int, question: str | None) -> dict[str, Any]:
    sequences = [each for each in tokens.sequences if each["group"] == group and each["branch"] == 0]
    answers = [each for each in sequences if each["completion"] >= 0]
    templated = "".join(tokens.join_text(each) for each in sequences if each["completion"] < 0)
    prompt = templated if question is None else question  # the prompt without the chat template, as in rollouts.jsonl
    return {
        **_describe_question(prompt, sequences[0]["prompt_id"]),
        "rewards": [each["reward"] for each in answers],
        "correct": [each["correct"] for each in answers],
        "finished": [bool(each["finished"]) for each in answers],
        "lengths": [each["end"] - each["start"] for each in answers],
    }


def _describe_question(prompt: str, prompt_id: str) -> dict[str, str]:
    """Return a question with a short name that is the same in every step and every run that asks it."""
    name = hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest()[:12]
    return {"prompt": prompt[:_MAX_PROMPT_CHARS], "id": prompt_id, "question": name}

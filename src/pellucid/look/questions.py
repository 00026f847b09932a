"""The questions of a run through its steps: each step is read once, and again only when its files have changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum
from typing import Any, NamedTuple, TypeVar

from pellucid.reporting.charts import Point, Series, chart
from pellucid.types import UserError

MOST_LISTED = 1000
"""How many questions are listed, those that were asked most often."""
LONGEST_LISTED = 300
"""How many characters of a question are listed."""
LAST = 6
"""How many of the last rewards stand beside a question."""
MOST_ANSWERS = 10
"""How many steps a question's best answer is shown of."""
LINES = {
    "reward": ("Reward", "mean of its answers"),
    "length": ("Length", "mean of its answers, tokens"),
    "entropy": ("Entropy", "nats a token"),
}
"""Of each curve its title and what it measures."""
Item = TypeVar("Item")
Summary = Mapping[str, Any]


class Asked(NamedTuple):
    """A question as one group of a step was asked it."""

    step: int
    group: int
    reward: float | None
    """Mean of the completions that have one, as are the others."""
    length: float | None
    entropy: float | None
    recorded: bool


class Questions:
    """summarised: of some steps the summaries. What is kept of a group is six numbers, and of a question its text."""

    def __init__(self, read_summaries: Callable[[Sequence[int]], Iterable[Summary]]):
        self.read_summaries = read_summaries
        self.fingerprints: dict[int, object] = {}
        """Of each step that was read, where its files were then."""
        self.by_step: dict[int, list[tuple[str, Asked]]] = {}
        self.prompts: dict[str, str] = {}
        self.occurrences: defaultdict[str, list[Asked]] = defaultdict(list)
        """Of each question the groups that were asked it, by their steps."""

    def update(self, fingerprints: Mapping[int, object]) -> None:
        """Read the steps whose marks have changed, and forget those that are gone."""
        gone = self.fingerprints.keys() - fingerprints.keys()
        changed = [step for step, mark in fingerprints.items() if self.fingerprints.get(step) != mark]
        for step in gone:
            del self.fingerprints[step], self.by_step[step]
        for step, found in zip(changed, self.read_summaries(changed), strict=True):
            self.fingerprints[step] = fingerprints[step]
            self.by_step[step] = [(group["question"], asked(step, group)) for group in found["groups"]]
            for group in found["groups"]:
                self.prompts.setdefault(group["question"], group["prompt"][:LONGEST_LISTED])
        if gone or changed:
            self.occurrences = defaultdict(list)
            for step in sorted(self.by_step):
                for name, each in self.by_step[step]:
                    self.occurrences[name].append(each)

    def list_repeated(self) -> list[dict[str, Any]]:
        """Each question that was asked more than once, most often first: how often, and its last mean rewards."""
        often = sorted(self.occurrences.items(), key=lambda item: -len(item[1]))[:MOST_LISTED]
        return [
            {
                "question": name,
                "prompt": self.prompts[name],
                "times": len(times),
                "last": [each.reward for each in times[-LAST:]],
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
        return {**told, "charts": charts(times), "best": spread(best, MOST_ANSWERS)}


def asked(step: int, group: Summary) -> Asked:
    numbers = (mean(group["rewards"]), mean(group["lengths"]), group["entropy"])
    return Asked(step, group["group"], *numbers, group["recorded"])


def mean(values: Sequence[float | None]) -> float | None:
    """Of those that there are."""
    known = [value for value in values if value is not None]
    return fsum(known) / len(known) if known else None


def charts(occurrences: Sequence[Asked]) -> list[str]:
    """A question that several groups of a step were asked has a point for each of them."""
    drawn = []
    for name, (title, about) in LINES.items():
        points = [Point(each.step, value) for each in occurrences if (value := getattr(each, name)) is not None]
        drawn.append(chart(title, about, [Series(name, points)]))
    return [svg for svg in drawn if svg]


def spread(items: Sequence[Item], limit: int) -> list[Item]:
    """All, or so many of them at even distances, the first and the last among them."""
    if len(items) <= limit:
        return list(items)
    return (
        [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)] if limit > 1 else list(items[-limit:])
    )

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

    def __init__(self, summarised: Callable[[Sequence[int]], Iterable[Summary]]):
        self.summarised = summarised
        self.marks: dict[int, object] = {}
        """Of each step that was read, where its files were then."""
        self.of_step: dict[int, list[tuple[str, Asked]]] = {}
        self.prompts: dict[str, str] = {}
        self.times: defaultdict[str, list[Asked]] = defaultdict(list)
        """Of each question the groups that were asked it, by their steps."""

    def read(self, marks: Mapping[int, object]) -> None:
        """Read the steps whose marks have changed, and forget those that are gone."""
        gone = self.marks.keys() - marks.keys()
        changed = [step for step, mark in marks.items() if self.marks.get(step) != mark]
        for step in gone:
            del self.marks[step], self.of_step[step]
        for step, found in zip(changed, self.summarised(changed), strict=True):
            self.marks[step] = marks[step]
            self.of_step[step] = [(group["question"], asked(step, group)) for group in found["groups"]]
            for group in found["groups"]:
                self.prompts.setdefault(group["question"], group["prompt"][:LONGEST_LISTED])
        if gone or changed:
            self.times = defaultdict(list)
            for step in sorted(self.of_step):
                for name, each in self.of_step[step]:
                    self.times[name].append(each)

    def listed(self) -> list[dict[str, Any]]:
        """Each question that was asked more than once, most often first: how often, and its last mean rewards."""
        often = sorted(self.times.items(), key=lambda item: -len(item[1]))[:MOST_LISTED]
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

    def followed(self, name: str, shown: Callable[[int], bool]) -> dict[str, Any]:
        """One question through the steps: its curves, and the groups whose best answers are to be shown.

        shown: whether the tokens of a recorded step can be. UserError where nobody asked that.
        """
        if name not in self.times:
            raise UserError(f"no step asked the question {name}")
        times = self.times[name]
        best = [[each.step, each.group] for each in times if each.recorded and shown(each.step)]
        told = {"question": name, "prompt": self.prompts[name]}
        return {**told, "charts": charts(times), "best": spread(best, MOST_ANSWERS)}


def asked(step: int, group: Summary) -> Asked:
    numbers = (mean(group["rewards"]), mean(group["lengths"]), group["entropy"])
    return Asked(step, group["group"], *numbers, group["recorded"])


def mean(values: Sequence[float | None]) -> float | None:
    """Of those that there are."""
    known = [value for value in values if value is not None]
    return fsum(known) / len(known) if known else None


def charts(times: Sequence[Asked]) -> list[str]:
    """A question that several groups of a step were asked has a point for each of them."""
    drawn = []
    for name, (title, about) in LINES.items():
        points = [Point(each.step, value) for each in times if (value := getattr(each, name)) is not None]
        drawn.append(chart(title, about, [Series(name, points)]))
    return [svg for svg in drawn if svg]


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """All, or so many of them at even distances, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)] if most > 1 else list(items[-most:])

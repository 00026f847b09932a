"""The graders of a task: what computes those terms of its reward that have a model of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pellucid.rewards.graded import grading
from pellucid.rewards.judge import Judge
from pellucid.rewards.parts import Grader


def graders_of(task: Any, cache: Path | None) -> dict[int, Grader]:
    """Return the graders by the places of their terms. UserError where one cannot work: no key, nobody who listens.

    cache: the folder in which judges keep their answers; None where nothing is kept.
    """
    terms = getattr(grading(task), "rewards", ())
    return {place: Judge(term.judge, cache) for place, term in enumerate(terms) if getattr(term, "judge", None)}

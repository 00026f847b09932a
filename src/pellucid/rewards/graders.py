"""The terms of a reward that are computed in the process of the run, beside the processes of all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pellucid.machine.endpoint import note_on
from pellucid.rewards.graded import grading
from pellucid.rewards.judge import Judge
from pellucid.rewards.model import RewardModel
from pellucid.rewards.parts import Grader
from pellucid.rewards.settings import RewardModelSettings
from pellucid.rewards.terms import MODEL, terms_of


def graders_of(task: Any, cache_folder: Path | None = None) -> dict[int, Grader]:
    """Return the graders of a task by their places in its `rewards`. Models are loaded: UserError as they have it.

    answers: the folder in which judges keep their answers; without one they keep none.
    """
    judged = {place: term.judge for place, term in enumerate(terms_of(grading(task))) if term.judge}
    graders: dict[int, Grader] = {place: Judge(settings, cache_folder) for place, settings in judged.items()}
    return graders | {place: RewardModel(source, settings) for place, (source, settings) in models_of(task).items()}


def notes_on(task: Any) -> list[str]:
    """Return the lines that must be shown before the graders of a task are loaded: whose code runs, what is sent."""
    codes = [note for source, settings in models_of(task).values() if (note := settings.get_trust_notice(source))]
    judges = [term.judge for term in terms_of(grading(task)) if term.judge]
    sent = [note_on(judge.base_url, judge.key, "judge: prompts and completions") for judge in judges]
    return list(dict.fromkeys([*codes, *sent]))


def models_of(task: Any) -> dict[int, tuple[str, RewardModelSettings]]:
    """Return name and settings of each reward model of a task, by its place in `rewards`."""
    return {
        place: (term.name.removeprefix(MODEL), term.reward_model or RewardModelSettings())
        for place, term in enumerate(terms_of(grading(task)))
        if term.name.startswith(MODEL)
    }

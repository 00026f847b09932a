"""A hundred families of puzzles and problems, generated and graded by the package `reasoning_gym`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache, partial
from random import Random
from typing import Any, Literal

from pellucid.rewards.answers import extract_answer
from pellucid.tasks.prompts import GeneratedTask, assign_split, build_chat, draw_prompts
from pellucid.types import Completion, Prompt, Reward, UserError
from pellucid.utils.plugins import did_you_mean, import_extra

_FamilyOptions = dict[str, bool | int | float | str | list[int | float | str | dict[str, Any]]]

TEST_SHARE = 0.25
MAX_TRIES = 1000
UNORDERED_FAMILIES = (
    "codeio isomorphic_strings knight_swap list_functions polynomial_multiplication ransom_note word_ladder"
)
"""Families that iterate over sets of strings, whose order differs between processes."""
_GRADER_ERRORS = (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)
"""The errors that graders raise for an answer that they cannot read."""


@dataclass(frozen=True)
class ReasoningGym(GeneratedTask):
    """The reward is the score of the family's own grader, from 0 to 1; an answer with a score of 1 is right.

    An answer that the grader cannot read earns 0. The splits share no question: a quarter of them, by a hash, are held
    out.

    Example: ReasoningGym(family="leg_counting", options={"max_animals": 4}).sample(step=0, n=8)
    """

    name: Literal["reasoning_gym"] = "reasoning_gym"
    """The name of the task."""
    family: str = "chain_sum"
    """A data set of the package, such as mini_sudoku; composite mixes those in options.datasets."""
    options: _FamilyOptions = field(default_factory=dict)
    """The family's own settings, such as max_terms of chain_sum."""
    system: str = "default"
    """The system message: default, simple, direct, chain_of_draft or DeepSeekZero of the package, or your own text;
    empty for none."""

    def __post_init__(self) -> None:
        families = _import_package_module("factory").DATASETS
        if self.family not in families:
            suggestion = did_you_mean(self.family, families) or f"; there are {', '.join(sorted(families))}"
            raise ValueError(f'family "{self.family}" is unknown{suggestion}')
        try:
            dataset = _create_family_dataset(self.family, self.options, 0)
        except (AssertionError, *_GRADER_ERRORS) as error:
            known = [name for name in families[self.family][1].__dataclass_fields__ if name not in ("seed", "size")]
            raise ValueError(f"options = {self.options}: {error}; {self.family} has {', '.join(known)}") from error
        names = getattr(dataset, "datasets", [self.family])
        unordered = [name for name in names if name in UNORDERED_FAMILIES.split()]
        if unordered and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise ValueError(
                f'family "{unordered[0]}" generates different questions in each process: set PYTHONHASHSEED=0 in the'
                " environment"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Construct the task in the other process, so that the package is loaded there before a reward is timed."""
        return partial(type(self), **{each.name: getattr(self, each.name) for each in fields(self)}), ()

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        grader = _load_grader(self.family, json.dumps(self.options))
        try:
            score = float(grader.score_answer(extract_answer(completion.full_text), prompt.columns["entry"]))
        except _GRADER_ERRORS:
            score = 0.0
        return Reward(score, correct=score >= 1)

    def sample(self, step: int, n: int) -> list[Prompt]:
        return draw_prompts(self, step, n, self._make_prompt)

    def _make_prompt(self, id: str, rng: Random) -> Prompt:
        for _ in range(MAX_TRIES):
            entry = _create_family_dataset(self.family, self.options, rng.getrandbits(31))[0]
            if assign_split(entry["question"], TEST_SHARE) == self.split:
                system = _import_package_module("utils").SYSTEM_PROMPTS.get(self.system, self.system).strip()
                return Prompt(id, build_chat(system, entry["question"]), entry["answer"] or "", {"entry": entry})
        raise UserError(
            f"{self.family} generated no {self.split} question in {MAX_TRIES} tries: choose options with more distinct"
            " questions"
        )


def _import_package_module(module: str) -> Any:
    return import_extra(f"reasoning_gym.{module}", "gym", 'task "reasoning_gym"')


def _create_family_dataset(family: str, options: Mapping[str, Any], seed: int) -> Any:
    """Return the family's data set with one question, which this seed makes."""
    if family == "composite":
        options = {
            "datasets": [
                _import_package_module("composite").DatasetSpec(**each) for each in options.get("datasets", [])
            ]
        }
    return _import_package_module("factory").create_dataset(family, **options, seed=seed, size=1)


@cache
def _load_grader(family: str, options: str) -> Any:
    """Return a data set that grades; its options are JSON. It is cached, since some families read long files."""
    return _create_family_dataset(family, json.loads(options), 0)

"""`pellucid list`: the names that a recipe may use, each with what its docstring says first. No torch is imported."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import get_args, get_type_hints

from pellucid import recipes
from pellucid.algorithm.settings import KLEstimator
from pellucid.machine import docstrings
from pellucid.machine.harmless import harmless
from pellucid.machine.plugins import did_you_mean
from pellucid.rewards.terms import JUDGE, MODEL
from pellucid.sections import SamplerConfig
from pellucid.tasks import TASKS
from pellucid.types import UserError

WIDTH = 100
"""The longest line, in characters."""


def tasks() -> dict[str, str]:
    return {name: docstrings.of_module(spec.partition(":")[0]) for name, spec in TASKS.items()}


def rewards() -> dict[str, str]:
    modules = {JUDGE: "pellucid.rewards.judge", f"{MODEL}FOLDER_OR_HUB_ID": "pellucid.rewards.model"}
    described = {name: docstrings.of_module(module) for name, module in modules.items()}
    return {**docstrings.of_dict("pellucid.rewards.terms", "TERMS"), **described}


def kl() -> dict[str, str]:
    functions = docstrings.of_dict("pellucid.algorithm.kl", "KL")
    note = docstrings.below("pellucid.algorithm.kl", "KL")
    return {name: functions.get(name, note) for name in get_args(KLEstimator)}


def samplers() -> dict[str, str]:
    names = get_args(get_type_hints(SamplerConfig)["name"])
    return {name: docstrings.of_module(f"pellucid.samplers.{name}") for name in names}


KINDS: dict[str, Callable[[], Mapping[str, str]]] = {
    "recipes": recipes.listed,
    "tasks": tasks,
    "rewards": rewards,
    "advantages": lambda: docstrings.of_dict("pellucid.algorithm.advantages", "ADVANTAGES"),
    "objectives": lambda: docstrings.of_dict("pellucid.algorithm.objectives", "OBJECTIVES"),
    "aggregates": lambda: docstrings.of_dict("pellucid.algorithm.objectives", "AGGREGATES"),
    "kl": kl,
    "samplers": samplers,
}


def show_all() -> int:
    """Print the names of every kind, each kind below its own heading."""
    for i, kind in enumerate(KINDS):
        print(f"{'' if not i else chr(10)}{kind}")
        show(kind)
    return 0


def show(kind: str) -> int:
    """Print a line for each name of a kind: the name, and what it is. UserError for a kind that there is not."""
    if kind not in KINDS:
        raise UserError(f'there is no list of "{kind}"{did_you_mean(kind, KINDS)}; there are {", ".join(KINDS)}')
    described = KINDS[kind]()
    column = max(map(len, described))
    for name, text in described.items():
        shortened = textwrap.shorten(text, WIDTH - column - 2, placeholder=" ...")
        print(harmless(f"{name:{column}}  {shortened}".rstrip()))
    return 0

"""Reads the TOML file of a study, which has variants of a base recipe with several seeds each, and lists its runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid import config
from pellucid.config import Config
from pellucid.reporting.run_files import Record
from pellucid.types import UserError, with_split
from pellucid.utils.plugins import did_you_mean

_STUDY_KEYS = ("base", "seeds", "common", "variants")
_VARIANT_NAME_PATTERN = re.compile(r"\w[\w.+=-]*")


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: a variant with a seed."""

    study_dir: Path
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant} seed {self.seed}"

    @property
    def recipe_path(self) -> Path:
        return self.study_dir / self.variant / "recipe.json"

    @property
    def run_dir(self) -> Path:
        return self.study_dir / self.variant / f"seed-{self.seed}"

    @property
    def log_path(self) -> Path:
        """Return the file that holds what the run printed."""
        return self.run_dir.with_suffix(".log")

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of `pellucid` that start this run from scratch."""
        return ["train", str(self.recipe_path), "--algorithm.seed", str(self.seed), "--run", str(self.run_dir)]


@dataclass(frozen=True)
class Study:
    path: Path
    seeds: tuple[int, ...]
    variants: Mapping[str, Record]
    """The settings of each variant, as a recipe has them; the first is the baseline."""

    def list_runs(self, study_dir: Path, only: Sequence[str] = ()) -> list[StudyRun]:
        """Return all runs, or those of the variants in `only`. Raises UserError for an unknown variant.

        The first seed of every variant comes before any second seed, so that a study cut short compares all variants.
        """
        for name in only:
            if name not in self.variants:
                raise UserError(f'{self.path} has no variant "{name}"{did_you_mean(name, self.variants)}')
        return [
            StudyRun(study_dir, name, seed) for seed in self.seeds for name in self.variants if name in (only or [name])
        ]


def read_study(path: Path) -> Study:
    """Return the study in a TOML file. Raises UserError with one line for mistakes outside variant settings."""
    values = config.read_settings(path)
    if "variants" not in values and config.SECTIONS.keys() & values.keys():
        raise UserError(
            f"{path} is a recipe, not a study: run pellucid train {path}, or name it as the base of a study"
        )
    for key in values:
        if key not in _STUDY_KEYS:
            raise UserError(
                f"{path}: {key}: no such key{did_you_mean(key, _STUDY_KEYS)}; there are {', '.join(_STUDY_KEYS)}"
            )
    base, common, variants = values.get("base"), values.get("common", {}), values.get("variants")
    if not isinstance(base, str) or not base:
        raise UserError(f'{path}: base must name the recipe that the variants change: base = "recipe.toml"')
    if not isinstance(variants, Mapping) or not variants:
        raise UserError(f"{path}: there are no variants: name the baseline with [variants.NAME]")
    _check_settings_table(path, "common", common)
    for name, table in variants.items():
        _check_settings_table(path, f"variants.{name}", table)
        if not _VARIANT_NAME_PATTERN.fullmatch(name):
            raise UserError(f"{path}: variants.{name!r} names a folder: use letters, digits and _ . + = -")
    recipe_path = config.find_recipe(base, path.parent)
    config.load_config(recipe_path)  # otherwise a mistake in it would be reported for the first variant
    recipe = config.read_settings(recipe_path)
    recipe["task"] = {"name": config.Config.task_names[0], **recipe.get("task", {})}
    settings = dict[str, Record]()
    for name, table in variants.items():
        try:
            settings[name] = config.merge_settings(config.merge_settings(recipe, common), table)
        except UserError as error:
            raise UserError(f"{path}: variants.{name}: {error}") from error
    return Study(path, _parse_seeds(path, values.get("seeds")), settings)


def _parse_seeds(path: Path, value: Any) -> tuple[int, ...]:
    is_valid = isinstance(value, list) and value and all(type(seed) is int for seed in value)
    if not is_valid or len(set(value)) < len(value):
        raise UserError(f"{path}: seeds must be a list of different whole numbers: seeds = [0, 1, 2]")
    return tuple(value)


def _check_settings_table(path: Path, name: str, table: Any) -> None:
    if not isinstance(table, Mapping):
        raise UserError(f"{path}: {name} must be a table of settings, as [{name}.algorithm]")
    if isinstance(algorithm := table.get("algorithm"), Mapping) and "seed" in algorithm:
        raise UserError(f"{path}: {name} sets algorithm.seed: name the seeds of all variants in seeds = [...]")


def load_variant_configs(study: Study) -> dict[str, Config]:
    """Return the complete settings of each variant, as a run has them. Raises UserError, which names the variant."""
    configs = dict[str, Config]()
    for name, settings in study.variants.items():
        source = f"{study.path}: variants.{name}"
        configs[name] = config.build_config(settings, source)
        try:
            with_split(configs[name].task, "train")  # finds a missing file of prefixes before hours of other runs
        except UserError as error:
            raise UserError(f"{source}: {error}") from error
    return configs


def write_variant_recipe(path: Path, settings: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=2, default=str) + "\n", encoding="utf-8")

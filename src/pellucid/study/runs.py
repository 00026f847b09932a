"""Read the runs to be compared from their folders, and order them by variant and seed."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pellucid.reporting.report import get_setting
from pellucid.reporting.run_files import Record, is_run_finished, read_config, read_evaluation_records, read_records
from pellucid.study.plan import StudyRun
from pellucid.types import UserError
from pellucid.utils.plugins import did_you_mean, suggest_path

_SEED_FOLDER_PATTERN = re.compile(r"seed-(-?\d+)")


@dataclass(frozen=True)
class ComparedRun:
    run_dir: Path
    variant: str
    seed: int
    is_finished: bool
    metrics: Sequence[Record]
    evaluations: Sequence[Record]
    """The evaluations on its own held-out questions."""

    @property
    def name(self) -> str:
        return f"{self.variant} seed {self.seed}"

    @property
    def last_evaluation(self) -> Record:
        return self.evaluations[-1]

    @property
    def command(self) -> str:
        """Return the command that trains this run again, in another folder if the recipe of its study is missing."""
        study_run = StudyRun(self.run_dir.parent.parent, self.variant, self.seed)
        if study_run.run_dir == self.run_dir and study_run.recipe_path.is_file():
            return format_command(study_run.arguments)
        copy = Path("again", self.variant, f"seed-{self.seed}")
        return format_command(["train", str(self.run_dir / "config.json"), "--run", str(copy)])


@dataclass(frozen=True)
class Comparison:
    """The runs that are compared, and those that cannot be."""

    baseline: str
    finished: Mapping[str, Mapping[int, ComparedRun]]
    """Runs by variant, the baseline first, and by seed; a variant may have none yet."""
    unfinished: Sequence[ComparedRun]
    missing: Sequence[str]
    """The names of runs that are missing although other variants, or the study, have their seed."""

    @property
    def measure(self) -> str:
        """Return what is compared: "greedy" (accuracy), or "reward" if rewards are a matter of degree."""
        rows = [row for run in self.finished_runs for row in run.evaluations]
        return "greedy" if all(row.get("verdicts", True) for row in rows) else "reward"

    @property
    def finished_runs(self) -> list[ComparedRun]:
        return [run for by_seed in self.finished.values() for run in by_seed.values()]


def gather_runs(folders: Sequence[Path], baseline: str = "") -> Comparison:
    """Return the runs in these folders, each of them a run or a study. UserError if they cannot be compared."""
    runs = [_read_compared_run(run_dir) for folder in folders for run_dir in _find_run_dirs(folder)]
    by_name: dict[tuple[str, int], ComparedRun] = {}
    for run in runs:
        other = by_name.setdefault((run.variant, run.seed), run)
        if _normalize_path(other.run_dir) != _normalize_path(run.run_dir):
            raise UserError(f"{other.run_dir} and {run.run_dir} are both {run.name}: rename one, or leave it out")
    plans = [plan for folder in folders for plan in read_records(folder / "study.json", whole_file=True)]
    planned = [(variant, seed) for plan in plans for variant in plan["variants"] for seed in plan["seeds"]]
    variants = list(dict.fromkeys([*(variant for variant, _ in planned), *(run.variant for run in runs)]))
    baseline = baseline or variants[0]
    _check_comparable(runs, variants, baseline)
    variants = [baseline, *(variant for variant in variants if variant != baseline)]
    seeds = sorted({seed for _, seed in [*planned, *by_name]})
    found = {v: {s: by_name[v, s] for s in seeds if (v, s) in by_name} for v in variants}
    return Comparison(
        baseline,
        {v: {s: run for s, run in by_seed.items() if run.is_finished} for v, by_seed in found.items()},
        [run for by_seed in found.values() for run in by_seed.values() if not run.is_finished],
        [StudyRun(Path(), v, s).name for v in variants for s in seeds if s not in found[v]],
    )


def _check_comparable(runs: Sequence[ComparedRun], variants: Sequence[str], baseline: str) -> None:
    if baseline not in variants:
        raise UserError(
            f'--baseline: there is no variant "{baseline}"{did_you_mean(baseline, variants)}; '
            f"there are {', '.join(variants)}"
        )
    for run in runs:
        if run.is_finished and not run.evaluations:
            raise UserError(f"{run.run_dir} has no evaluation: leave it out, or train it with evaluate.every above 0")
    if not any(run.is_finished for run in runs if run.variant == baseline):
        raise UserError(f'no run of the baseline "{baseline}" is finished: finish one, or name another --baseline')


def _find_run_dirs(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run, else the runs of the study, or of a variant of one."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder{suggest_path(folder)}")
    if (folder / "config.json").is_file():
        return [folder]
    paths = [path for level in ("seed-*", "*/seed-*") for path in sorted(folder.glob(f"{level}/config.json"))]
    found = [path.parent for path in paths if _SEED_FOLDER_PATTERN.fullmatch(path.parent.name)]
    if not found:
        raise UserError(f"{folder} holds no run: name run folders, or the folder of a study (VARIANT/seed-S in it)")
    return found


def _read_compared_run(run_dir: Path) -> ComparedRun:
    path = _normalize_path(run_dir)
    match = _SEED_FOLDER_PATTERN.fullmatch(path.name)
    return ComparedRun(
        run_dir,
        path.parent.name if match else path.name,
        int(match[1]) if match else get_setting(read_config(run_dir), "algorithm.seed", 0),
        is_run_finished(run_dir),
        list(read_records(run_dir / "metrics.jsonl")),
        next(iter(read_evaluation_records(run_dir).values()), []),
    )


def _normalize_path(run_dir: Path) -> Path:
    """Return the absolute path of a run folder, so that "." has a name, too. A symbolic link keeps its own name."""
    return Path(os.path.normpath(run_dir.absolute()))


def write_study_plan(study_dir: Path, variants: Sequence[str], seeds: Sequence[int]) -> None:
    """Write which runs a study has, for `gather_runs`. A copy of its folder may lack this file."""
    text = json.dumps({"variants": list(variants), "seeds": list(seeds)}, indent=2)
    (study_dir / "study.json").write_text(text + "\n", encoding="utf-8")


def format_command(arguments: Sequence[str]) -> str:
    return f"pellucid {shlex.join(arguments)}"

"""The runs of a study on disk: whether they can be resumed or must begin anew, and what remains of finished ones."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from pellucid import config
from pellucid.config import Config
from pellucid.reporting.run_folder import Record, checkpoints, read_config, records
from pellucid.study.plan import Cell
from pellucid.training import changes, claim, files
from pellucid.types import UserError


def check(run: Cell, recipe: Config) -> None:
    """Raise UserError where the run folder holds anything but a run of this cell with the settings it has now."""
    run_dir = run.run_dir
    if not run_dir.exists():
        return
    claim.refuse_held(run_dir)
    if not run_dir.is_dir() or claim.foreign(run_dir):
        raise UserError(f"{run_dir} is no run (no config.json) and in the way: move it, or choose another --into")
    if not read_config(run_dir):
        if checkpoints(run_dir) or any(records(run_dir / "metrics.jsonl")):
            raise UserError(f"{run_dir}/config.json cannot be read: mend it, or delete that run")
        return  # the run crashed in its first moment
    for key, (theirs, ours) in changes.matter(run_dir, wanted_of(run, recipe)).items():
        raise UserError(
            f"{run_dir} was made with {key} = {theirs!r}, the study says {ours!r}: "
            f"choose another --into, or delete that run"
        )


def wanted_of(run: Cell, recipe: Config) -> Record:
    """Return the settings of the cell as its run records them, except a dtype that is left to the machine."""
    seeded = replace(recipe, algorithm=replace(recipe.algorithm, seed=run.seed))
    return files.recorded(config.resolved(seeded))


def resuming(run: Cell) -> list[str]:
    """Return the arguments that resume the cell's run from its last checkpoint; empty where there is no checkpoint."""
    return ["train", "--resume", str(run.run_dir)] if checkpoints(run.run_dir) else []


def clear(run_dir: Path) -> None:
    """Empty the folder of a run without a checkpoint; `check` has made sure that it is a run.

    UserError where that run is in progress.
    """
    claim.refuse_held(run_dir)
    if run_dir.exists():
        claim.clear(run_dir)


def tidy(run_dir: Path, keep_model: bool) -> None:
    """Remove the checkpoints of a finished run, hundreds of megabytes, and its model unless it is to be kept.

    The model goes last: a run with checkpoints and without a model counts as unfinished.
    """
    for name in ("checkpoints",) if keep_model else ("checkpoints", "adapter", "model"):
        if (run_dir / name).exists():
            shutil.rmtree(run_dir / name)

"""What is there of a run of a study: finished, to go on with, or nothing yet."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from pellucid import config
from pellucid.config import Config
from pellucid.folder import Record, read_config, records
from pellucid.report import at, flat, total
from pellucid.study.plan import Cell
from pellucid.types import UserError


def finished(run_dir: Path) -> bool:
    """Whether the last step is taken and evaluated: true as well of a copy of config, metrics and evals alone.

    A checkpoint without a model is that of a run which was stopped before its end.
    """
    settings, steps = read_config(run_dir), list(records(run_dir / "metrics.jsonl"))
    if not steps:
        return False
    last, minutes = steps[-1]["step"], at(settings, "algorithm.minutes", 0)
    at_end = last == at(settings, "algorithm.steps") or 0 < minutes * 60 <= total(steps, "time/step")
    evaluated = any(row["step"] == last for row in records(run_dir / "evals.jsonl"))
    evaluated = evaluated or at(settings, "evaluate.every") == 0
    return at_end and evaluated and ((run_dir / "model").is_dir() or not has_checkpoint(run_dir))


def has_checkpoint(run_dir: Path) -> bool:
    return any(path.suffix != ".partial" for path in (run_dir / "checkpoints").glob("step-*"))


def check(cell: Cell, recipe: Config) -> None:
    """UserError where the folder of the cell holds something else than this cell as its recipe is now."""
    run_dir = cell.run_dir
    if not run_dir.exists():
        return
    names = {path.name for path in run_dir.iterdir()} if run_dir.is_dir() else {run_dir.name}
    if names - {"config.json.partial"} and "config.json" not in names:
        raise UserError(f"{run_dir} is no run (no config.json) and in the way: move it, or choose another --into")
    if not read_config(run_dir):
        if has_checkpoint(run_dir) or any(records(run_dir / "metrics.jsonl")):
            raise UserError(f"{run_dir}/config.json cannot be read: mend it, or delete that run")
        return  # a crash in its first moment
    found, wanted = config.dump(config.load(run_dir / "config.json")), wanted_of(cell, recipe)
    if key := difference(found, wanted):
        raise UserError(
            f"{run_dir} was made with {key} = {at(found, key)!r}, the study says {at(wanted, key)!r}: "
            f"choose another --into, or delete that run"
        )


def wanted_of(cell: Cell, recipe: Config) -> Record:
    """The settings of the cell as its run writes them down, but for a dtype that is left to the machine."""
    seeded = recipe.model_copy(update={"algorithm": replace(recipe.algorithm, seed=cell.seed)})
    return config.dump(config.settled(seeded))


def difference(found: Record, wanted: Record) -> str:
    """The first setting in which a run is not what is wanted; empty where there is none."""
    theirs, ours = dict(flat(found)), dict(flat(wanted))
    if ours["policy.dtype"] == "auto":
        ours["policy.dtype"] = theirs["policy.dtype"]
    return next((key for key in {**ours, **theirs} if theirs.get(key) != ours.get(key)), "")


def resuming(cell: Cell) -> list[str]:
    """The arguments that go on from the cell's last checkpoint; none where there is no checkpoint."""
    return ["train", "--resume", str(cell.run_dir)] if has_checkpoint(cell.run_dir) else []


def clear(run_dir: Path) -> None:
    """Empties the folder of a run that came to no checkpoint; `check` has seen that it is one."""
    for path in run_dir.iterdir() if run_dir.exists() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def tidy(run_dir: Path, keep_model: bool) -> None:
    """Removes what only a run in progress needs, some hundred megabytes; the model last, which says that it is done."""
    for name in ("checkpoints",) if keep_model else ("checkpoints", "model"):
        if (run_dir / name).exists():
            shutil.rmtree(run_dir / name)

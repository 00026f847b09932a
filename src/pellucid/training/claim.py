"""Who a run folder belongs to: nobody, a run that came to nothing, a run that can go on, or another process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pellucid import config
from pellucid.config import Config
from pellucid.machine import disk
from pellucid.machine.locks import locked, refuse_locked
from pellucid.machine.plugins import near
from pellucid.reporting import loggers
from pellucid.reporting.run_folder import checkpoints, finished, read_config, records, step_of
from pellucid.training import changes, files
from pellucid.types import NotBegunError, UserError

LOCK = ".lock"
DATA = "data.jsonl"
"""The rows that `pellucid.train` was given in memory."""
RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""The environment variables in which launchers say which process this is, as Accelerate reads them."""


def first_process() -> bool:
    """Whether this is the process that writes files, of those that train together. Known before torch is imported."""
    return next((os.environ[name] for name in RANKS if name in os.environ), "0") == "0"


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run folder, which is made where it is missing, until this process ends in any way.

    One that was made for a run that could not begin, since the model is not there or its rewards fail, goes again; from
    one that was there its rows do.
    """
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    run_dir.mkdir(parents=True, exist_ok=True)
    with locked(run_dir / LOCK, trains_in(run_dir)):
        rows_before = (run_dir / DATA).exists()
        try:
            yield
        except NotBegunError:
            if made:
                clear(run_dir)
            raise
        finally:
            if not rows_before and not (run_dir / "config.json").exists():
                (run_dir / DATA).unlink(missing_ok=True)
            if made and set(os.listdir(run_dir)) <= {LOCK}:
                with suppress(OSError):  # Windows keeps a file that is open, and others may be in the folders above
                    (run_dir / LOCK).unlink()
                    for folder in made:
                        folder.rmdir()


def clear(run_dir: Path) -> None:
    """Remove all that is in the folder but its lock."""
    for path in [path for path in run_dir.iterdir() if path.name != LOCK]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def refuse_held(run_dir: Path) -> None:
    """Raise UserError where another process trains in the folder."""
    refuse_locked(run_dir / LOCK, trains_in(run_dir))


def trains_in(run_dir: Path) -> str:
    return f"trains in {run_dir}"


def foreign(run_dir: Path) -> list[str]:
    """Names in a folder without a config.json that are no part of a run; hidden files do not count."""
    if (run_dir / "config.json").is_file() or not run_dir.is_dir():
        return []
    ours = ("config.json.partial", DATA)
    return sorted(path.name for path in run_dir.iterdir() if path.name[0] != "." and path.name not in ours)


def check_new(run_dir: Path) -> None:
    """Raise UserError where no run can begin in the folder. Nothing is loaded, and nothing is written."""
    check_writable(run_dir)
    refuse_held(run_dir)
    check_free(run_dir)


def check_free(run_dir: Path) -> None:
    """Raise UserError where a new run would destroy something in the folder."""
    names = foreign(run_dir)
    if not names and (run_dir / "config.json").is_file() and "algorithm" not in read_config(run_dir):
        names = ["config.json"]  # of a model, or damaged
    if names:
        raise UserError(f"{run_dir} holds {names[0]}, which is no run's: choose another folder with --run")
    if checkpoints(run_dir) or finished(run_dir) or (run_dir / "model").exists():
        raise UserError(f"{run_dir} holds a run: go on with --resume {run_dir}, or choose another folder with --run")


def check_begun(run_dir: Path, cfg: Config) -> None:
    """Raise UserError where a run of other settings has left steps in the folder, though no checkpoint."""
    if any(records(run_dir / "metrics.jsonl")):
        for key in changes.matter(run_dir, files.recorded(config.resolved(cfg))):
            raise UserError(
                f"{run_dir} holds steps of a run with another {key}: begin again with --resume {run_dir}, or choose"
                " another folder with --run"
            )


def check_resumable(run_dir: Path) -> None:
    """Raise UserError where no run can be resumed in the folder. Nothing is loaded, and nothing is written."""
    path = run_dir / "config.json"
    if not path.is_file():
        raise UserError(f"--resume {run_dir}: there is no run in that folder (no config.json){near(run_dir)}")
    if "algorithm" not in read_config(run_dir):
        raise UserError(f"{path} is no run's, or damaged: bring it back from a copy, or start in another folder")
    check_writable(run_dir)
    refuse_held(run_dir)
    if finished(run_dir) and not checkpoints(run_dir):
        model = f" with --policy.model {run_dir / 'model'}" if (run_dir / "model").is_dir() else ""
        raise UserError(
            f"{run_dir} is finished and has no checkpoint to go on from, which checkpoint.every above 0 and"
            f' checkpoint.keep_finished = "newest" would have left: start a new run{model}'
        )


def note_on_finished(run_dir: Path, resume_changes: changes.Changes, steps: int) -> str:
    """What is said at once of a run that is resumed with the settings it was finished with; empty for any other."""
    if resume_changes or not finished(run_dir) or not has_last_model(run_dir):
        return ""
    done = max((row["step"] for row in records(run_dir / "metrics.jsonl")), default=0)
    saved = checkpoints(run_dir)
    if saved and step_of(saved[-1]) < done:  # the steps after the newest checkpoint can be taken again
        return ""
    left = "nothing is left to do" if done >= steps else "its minutes are used up"
    return f"{run_dir} is finished after step {done}: {left}; --algorithm.steps {2 * steps} would take more steps"


def has_last_model(run_dir: Path) -> bool:
    """Whether the model was saved after the last step was logged; an older one is that of fewer steps."""
    saved = [path.stat().st_mtime_ns for path in (run_dir / "model").glob("*")]
    return max(saved, default=0) >= (run_dir / "metrics.jsonl").stat().st_mtime_ns


def check_writable(run_dir: Path) -> None:
    """Raise UserError where the folder cannot be made or written to. Nothing is left behind."""
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if os.path.lexists(path))
    try:
        with suppress(FileNotFoundError):  # but not a name that is too long
            run_dir.lstat()
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise UserError(f"{run_dir} cannot be written to ({error.strerror}): choose another folder") from error


def note_bad_data(run_dir: Path, reason: str) -> None:
    """Note that a run was ended by its data, which may then be other data when the run goes on."""
    disk.write_whole(changes.bad_data_file(run_dir), f"{reason}\n")


def begin_again(run_dir: Path) -> None:
    """Remove the logs of a run that came to no checkpoint."""
    loggers.truncate(run_dir, -1)
    for folder in ("tensorboard", "tokens"):
        shutil.rmtree(run_dir / folder, ignore_errors=True)

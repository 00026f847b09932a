"""Locks and checks the directory of a run: whether a run can start or resume there, and with which changed settings.

The module is used before torch is imported. It also finds the files that settings name, makes their paths absolute,
since a run may be resumed from any folder, and computes their digests.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pellucid.config import Config, PolicyConfig, dump_config, load_config, resolve_config
from pellucid.reporting.loggers import truncate_logs
from pellucid.reporting.report import flatten_config
from pellucid.reporting.run_files import (
    Record,
    get_checkpoint_step,
    has_stopped_improving,
    is_run_finished,
    list_checkpoints,
    read_config,
    read_records,
)
from pellucid.rewards.terms import REWARD_MODEL_PREFIX
from pellucid.tasks.data_files import is_file_pattern, list_matching_files
from pellucid.types import NotBegunError, UserError
from pellucid.utils import files
from pellucid.utils.files import check_unlocked, hold_lock
from pellucid.utils.plugins import IN_PROCESS_PREFIX, load_object, suggest_path
from pellucid.utils.text import format_option

_ANOTHER_FOLDER = "choose another folder with"
_LOCK_FILE = ".lock"
ROW_FILES = {"data": "data.jsonl", "test_data": "test_data.jsonl"}
"""The files of rows that `pellucid.train` was given in memory, by its argument."""
BAD_DATA_FILE = "bad_data.txt"
"""The error in the data that ended the run."""
_RANK_VARIABLES = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""The environment variables in which launchers set the rank of this process. Accelerate reads the same ones."""


def is_first_process() -> bool:
    """Whether this is the process of the run that writes files. This check does not import torch."""
    return next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0") == "0"


@contextmanager
def hold_run_dir(run_dir: Path) -> Iterator[None]:
    """Create a run directory if it is missing, and hold its lock until the context or this process ends.

    If the run cannot start, for example because its model is missing or its rewards fail, a new directory is removed.
    An existing one loses only the rows that were written for this run. Raise UserError if another process trains there.
    """
    new_folders = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    run_dir.mkdir(parents=True, exist_ok=True)
    with hold_lock(run_dir / _LOCK_FILE, f"trains in {run_dir}"):
        had_rows = [name for name in ROW_FILES.values() if (run_dir / name).exists()]
        try:
            yield
        except NotBegunError:
            if new_folders:
                clear_run_dir(run_dir)
            raise
        finally:
            if not (run_dir / "config.json").exists():
                for name in {*ROW_FILES.values()} - {*had_rows}:
                    (run_dir / name).unlink(missing_ok=True)
            if new_folders and set(os.listdir(run_dir)) <= {_LOCK_FILE}:
                with suppress(OSError):  # Windows keeps open files, and the parents may have other content by now
                    (run_dir / _LOCK_FILE).unlink()
                    for folder in new_folders:
                        folder.rmdir()


def clear_run_dir(run_dir: Path) -> None:
    """Remove everything but the lock."""
    for path in [path for path in run_dir.iterdir() if path.name != _LOCK_FILE]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def refuse_locked_run_dir(run_dir: Path) -> None:
    """Raise UserError if another process trains in the directory."""
    check_unlocked(run_dir / _LOCK_FILE, f"trains in {run_dir}")


def list_foreign_files(run_dir: Path) -> list[str]:
    """Return the names of visible files that do not belong to a run; empty if the folder has a config.json."""
    if (run_dir / "config.json").is_file() or not run_dir.is_dir():
        return []
    own_names = ("config.json.partial", *ROW_FILES.values())
    return sorted(path.name for path in run_dir.iterdir() if path.name[0] != "." and path.name not in own_names)


def check_new_run_dir(run_dir: Path) -> None:
    """Raise UserError if no run can start in the directory."""
    check_writable(run_dir)
    refuse_locked_run_dir(run_dir)
    check_free_run_dir(run_dir)


def check_free_run_dir(run_dir: Path) -> None:
    """Raise UserError if a new run would destroy something in the directory."""
    names = list_foreign_files(run_dir)
    if not names and (run_dir / "config.json").is_file() and "algorithm" not in read_config(run_dir):
        names = ["config.json"]  # that of a model, or a damaged one
    if names:
        raise UserError(f"{run_dir} holds {names[0]}, not a run: {_ANOTHER_FOLDER} {format_option('run')}")
    if list_checkpoints(run_dir) or is_run_finished(run_dir) or (run_dir / "model").exists():
        resume = format_option("resume", run_dir)
        raise UserError(f"{run_dir} holds a run: resume with {resume}, or {_ANOTHER_FOLDER} {format_option('run')}")


def check_begun_run_dir(run_dir: Path, cfg: Config) -> None:
    """Raise UserError if the directory has steps of a run with other settings but no checkpoint."""
    if any(read_records(run_dir / "metrics.jsonl")):
        for key in find_relevant_changes(run_dir, dump_settings(resolve_config(cfg))):
            raise UserError(
                f"{run_dir} holds steps of a run with another {key}: start again with"
                f" {format_option('resume', run_dir)}, or {_ANOTHER_FOLDER} {format_option('run')}"
            )


def check_resumable_run_dir(run_dir: Path) -> None:
    """Raise UserError if no run can be resumed in the directory."""
    path = run_dir / "config.json"
    if not path.is_file():
        option, near = format_option("resume", run_dir), suggest_path(run_dir)
        raise UserError(f"{option}: there is no run in that folder (no config.json){near}")
    _read_run_config(run_dir)
    check_writable(run_dir)
    refuse_locked_run_dir(run_dir)
    if is_run_finished(run_dir) and not list_checkpoints(run_dir):
        model = run_dir / "model"
        advice = f" with {format_option('policy.model', model)}" if model.is_dir() else ""
        raise UserError(
            f"{run_dir} is finished and has no checkpoint to resume from: it would need checkpoint.every above 0 and"
            f' checkpoint.keep_finished = "newest"; start a new run{advice}'
        )


def _read_run_config(run_dir: Path) -> Record:
    """Return config.json. Raise UserError if it is not what `pellucid train` wrote."""
    config = read_config(run_dir)
    if "algorithm" not in config or "digests" not in config:
        path = run_dir / "config.json"
        raise UserError(f"{path} is damaged or not part of a run: restore it from a copy, or start in another folder")
    return config


def describe_finished_run(run_dir: Path, resume_changes: SettingChanges, steps: int) -> str:
    """Return a message if a resume with these settings has nothing to do; else an empty string."""
    if resume_changes or not is_run_finished(run_dir):
        return ""
    done = max((row["step"] for row in read_records(run_dir / "metrics.jsonl")), default=0)
    saved = max((path.stat().st_mtime_ns for path in (run_dir / "model").glob("*")), default=0)
    is_last_model = saved >= (run_dir / "metrics.jsonl").stat().st_mtime_ns  # an older model has fewer steps
    # The steps after the newest checkpoint can be taken again.
    if not is_last_model or any(get_checkpoint_step(path) < done for path in list_checkpoints(run_dir)[-1:]):
        return ""
    if done < steps and has_stopped_improving(run_dir):
        more = format_option("evaluate.patience", 0)
        return f"{run_dir} is finished after step {done}: its evaluations found no new best; {more} would go on"
    reason = "nothing is left to do" if done >= steps else "its minutes are used up"
    more = format_option("algorithm.steps", 2 * steps)
    return f"{run_dir} is finished after step {done}: {reason}; {more} would take more steps"


def check_writable(run_dir: Path) -> None:
    """Raise UserError if the directory cannot be created or written to. Nothing is left behind."""
    nearest = next(path for path in (run_dir, *run_dir.absolute().parents) if os.path.lexists(path))
    try:
        with suppress(FileNotFoundError):  # a name that is too long raises another OSError
            run_dir.lstat()
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise UserError(f"{run_dir} cannot be written to ({error.strerror}): choose another folder") from error


def record_bad_data(run_dir: Path, reason: str) -> None:
    """Record that the data ended the run, so that the next resume may change it."""
    files.write_file_atomically(run_dir / BAD_DATA_FILE, f"{reason}\n")


def remove_logs(run_dir: Path) -> None:
    """Remove the logs of a run that has no checkpoint."""
    truncate_logs(run_dir, -1)
    for folder in ("tensorboard", "tokens"):
        shutil.rmtree(run_dir / folder, ignore_errors=True)


# ---------------------------------------------------------------- settings that a resume may change
# A resume may change only settings that leave the metrics of a run comparable from the first step to the last.


CHANGEABLE_SETTINGS = (
    *("algorithm.steps", "algorithm.minutes", "algorithm.micro_batch"),
    *("evaluate.every", "evaluate.patience"),
    *("policy.device", "policy.reference", "policy.dtype", "policy.save_dtype", "policy.engine"),
    *("policy.deterministic", "policy.gradient_checkpointing"),
    *("sampler.rows", "sampler.cache_gb", "sampler.urls", "sampler.timeout"),
    *("reward.", "optimizer.", "runtime.", "checkpoint.", "log."),
)
"""The number of steps, the machine and the speed. `optimizer.` and `reward.` are included because metrics.jsonl records
the learning rate and the failed rewards of each step. Questions, rewards, sampling and objective must stay the same."""

_NEUTRAL_SETTINGS = ("policy.save_dtype", "checkpoint.", "log.", "runtime.timeout", "reward.workers", "reward.patience")
"""Settings that change no result of a run."""

_CHANGEABLE_TERM_SETTINGS = {
    "judge": ("base_url", "key", "concurrency", "timeout", "retries", "step_timeout", "cache"),
    "reward_model": ("device", "batch"),
}
"""For each table of a reward term, the keys that may change: where and how fast the term is computed."""

_COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")

_DATA_KEY_PATTERN = re.compile(r"task\.(?:task\.)*(?:data|test_data)(?:\.\d+)?")
"""Settings that name the data of the task, or of a task within it. If the data ended the run, these settings and the
content of the files may change."""
_SKIP_BAD_ROWS_PATTERN = re.compile(r"task\.(?:task\.)*skip_bad_rows")
"""This may always change, since the rows that it leaves out were never trained on."""

SettingChanges = Mapping[str, Sequence[Any]]
"""The old and the new value by dotted key."""


def find_resume_changes(run_dir: Path, cfg: Config) -> SettingChanges:
    """Return the settings that a resume with `cfg` changes. Raise UserError if one of them must not change."""
    changed, steps = dict(_find_setting_changes(run_dir, dump_settings(cfg))), cfg.algorithm.steps
    if cfg.algorithm.micro_batch == "auto":  # a run records the number, so that the user has asked to choose it again
        changed["algorithm.micro_batch"] = (_read_run_config(run_dir)["algorithm"].get("micro_batch"), "auto")
    done = max(map(get_checkpoint_step, list_checkpoints(run_dir)), default=0)
    if steps < done:
        raise UserError(f"{run_dir} has taken {done} steps already: algorithm.steps = {steps} must be at least {done}")
    data_may_change = (run_dir / BAD_DATA_FILE).is_file()
    for key, (old, new) in changed.items():
        if not (
            key.startswith(CHANGEABLE_SETTINGS)
            or _SKIP_BAD_ROWS_PATTERN.fullmatch(key)
            or (data_may_change and _DATA_KEY_PATTERN.fullmatch(key))
            or (key.endswith(".rewards") and _strip_execution_settings(old) == _strip_execution_settings(new))
        ):
            when = "" if (run_dir / "model").is_dir() else "when it is finished, "
            raise UserError(
                f"{run_dir} was trained with {key} = {old}, now {new}: resume it with the old value, or {when}start"
                f" a new run from its model with {format_option('policy.model', run_dir / 'model')}",
                page="how-to/resume-and-share",
            )
    return changed


def _strip_execution_settings(term: Any) -> Any:
    """Return a reward term, or a list of them, without the settings that say where and how fast terms are computed."""
    if isinstance(term, list):
        return list(map(_strip_execution_settings, term))
    if not isinstance(term, Mapping):
        return term
    tables = {
        name: {key: value for key, value in term[name].items() if key not in changeable}
        for name, changeable in _CHANGEABLE_TERM_SETTINGS.items()
        if isinstance(term.get(name), Mapping)
    }
    return {**term, **tables, "timeout": None}


def _find_setting_changes(run_dir: Path, settings: Record) -> SettingChanges:
    """Return the differences between the settings of a run and other settings (`dump_settings`).

    A file counts as changed if its content is different, wherever it is. The dtype "auto" is that of the run, and so is
    the micro-batch "auto". A branch or a tag is the commit to which it leads in the cache of the Hub.
    """
    old_digests, new_digests = _read_run_config(run_dir)["digests"], digest_named_files(settings)
    old, new = (
        dict(flatten_config(values)) for values in (dump_settings(load_config(run_dir / "config.json")), settings)
    )
    for key in ("policy.dtype", "algorithm.micro_batch"):
        if new[key] == "auto":
            new[key] = old[key]
    if commit := _find_cached_commit(new["policy.model"], new["policy.revision"], old["policy.revision"]):
        new["policy.revision"] = commit
    changed = {
        key: (old.get(key), new.get(key))
        for key in {**new, **old}
        if old.get(key) != new.get(key) and not (key in old_digests and old_digests[key] == new_digests.get(key))
    }
    edited = {
        key: tuple(f"a file of sha256 {value[:12]}" for value in (digest, new_digests.get(key, "none")))
        for key, digest in old_digests.items()
        if digest != new_digests.get(key)
    }
    return {**edited, **changed}


def _find_cached_commit(model: str, revision: str, recorded: str) -> str:
    """Return the commit of a revision from the cache of the Hub; the recorded one if the cache has none."""
    if revision == recorded or not _COMMIT_PATTERN.fullmatch(recorded) or _COMMIT_PATTERN.fullmatch(revision):
        return revision
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - most models have no revision

    try:
        file = try_to_load_from_cache(model, "config.json", revision=revision or None)
    except ValueError:  # a name that only ModelScope knows
        file = None
    return Path(file).parent.name if isinstance(file, str) else recorded


def find_relevant_changes(run_dir: Path, settings: Record) -> SettingChanges:
    """Return the changes of `_find_setting_changes`, without settings that change no result."""
    return {
        key: change
        for key, change in _find_setting_changes(run_dir, settings).items()
        if not key.startswith(_NEUTRAL_SETTINGS)
    }


def add_resume_record(run_dir: Path, step: int, changed: SettingChanges, facts: Record) -> Record:
    """Return the facts from the start of the run, and the list of its resumes with this one appended."""
    recorded = read_config(run_dir)
    resume = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step, "changed": dict(changed), **facts}
    at_start = {name: recorded.get(name, fact) for name, fact in facts.items()}
    return {**at_start, "resumes": [*(recorded.get("resumes") or []), resume]}


def describe_resume(run_dir: Path, step: int, facts: Record) -> str:
    """Return a line on the last resume: the step after which it continues, and what has changed."""
    *earlier, resume = [{**facts, "changed": {}}, *facts["resumes"]]
    changes = [f"{key} = {new} (was {old})" for key, (old, new) in resume["changed"].items()]
    versions = earlier[-1]["versions"]
    changes += [
        f"{name} {new} (was {old})" for name, new in resume["versions"].items() if (old := versions.get(name)) != new
    ]
    return f"{run_dir} goes on after step {step}" + (f", with {', '.join(changes)}" if changes else "")


# ---------------------------------------------------------------- files that settings name


FUNCTION_SETTINGS = ("advantage", "objective")
"""The settings of `[algorithm]` that may name a function of the user."""


def dump_settings(cfg: Config) -> dict[str, Any]:
    """Return all settings as JSON values (`dump_config`), with absolute paths of all files that exist."""
    values = dump_config(cfg)
    model = values["policy"]["model"]
    if model != PolicyConfig.model and os.path.exists(os.path.expanduser(model)):
        values["policy"]["model"] = _make_absolute(model)
    values["policy"]["template"] = _resolve_paths(values["policy"]["template"])
    functions = {axis: _resolve_paths(values["algorithm"][axis]) for axis in FUNCTION_SETTINGS}
    return {**values, "task": _resolve_paths(values["task"]), "algorithm": {**values["algorithm"], **functions}}


def _resolve_paths(value: Any) -> Any:
    """Return a setting, or all values in a table, with the absolute paths of the files and reward models it names."""
    if isinstance(value, Mapping):
        return {key: _resolve_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_resolve_paths(item) for item in value]
    return _resolve_path(value) if isinstance(value, str) else value


def _resolve_path(value: str) -> str:
    if is_file_pattern(value):
        return _make_absolute(value)
    if value.startswith(REWARD_MODEL_PREFIX):
        folder = value.removeprefix(REWARD_MODEL_PREFIX)
        return REWARD_MODEL_PREFIX + _make_absolute(folder) if os.path.isdir(os.path.expanduser(folder)) else value
    if _find_file(value) is None:
        return value
    source, colon, name = value.rpartition(":")
    if source.endswith(".py"):
        return f"{_make_absolute(source)}{colon}{name}"
    return value if colon else _make_absolute(value)


def digest_named_files(settings: Record) -> dict[str, str]:
    """Return by dotted key the sha256 of each file that the settings of task, axes and policy name.

    For an object that was passed to `pellucid.train`, it is the digest of its source code.
    """
    sources = [
        *_find_named_files(settings["task"], "task"),
        *_find_named_files({axis: settings["algorithm"][axis] for axis in FUNCTION_SETTINGS}, "algorithm"),
        *_find_named_files({"template": settings["policy"]["template"]}, "policy"),
    ]
    return {key: _digest_source(source) for key, source in sources}


def digest_code_files(settings: Record) -> dict[str, str]:
    """Return by dotted key the sha256 of each code file that the settings of task and axes name."""
    values = {**settings["task"], **{axis: settings["algorithm"][axis] for axis in FUNCTION_SETTINGS}}
    return {
        key.removeprefix("."): _digest_source(path)
        for key, path in _find_named_files(values, "")
        if isinstance(path, Path) and path.suffix == ".py"
    }


def _digest_source(source: Path | Sequence[Path] | str) -> str:
    """Return the sha256 of a file, of a text, or of the output of `sha256sum` for several files."""
    if isinstance(source, Path):
        return files.compute_file_digest(source)
    if not isinstance(source, str):
        source = "".join(f"{files.compute_file_digest(path)}  {path.name}\n" for path in source)
    return hashlib.sha256(source.encode()).hexdigest()


def _find_named_files(value: Any, key: str) -> Iterator[tuple[str, Path | list[Path] | str]]:
    """Yield by dotted key the file that a setting names, all files of a pattern, or the source of an object."""
    if isinstance(value, Mapping | list | tuple):
        for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _find_named_files(item, f"{key}.{name}")
    elif not isinstance(value, str):
        return
    elif is_file_pattern(value):
        yield key, list_matching_files(value)
    elif value.startswith(IN_PROCESS_PREFIX):
        if source := _get_source(load_object(value)):
            yield key, source
    elif path := _find_file(value):
        yield key, path


def _find_file(value: str) -> Path | None:
    """Return the file of `path/to/file.ext`, `path/to/file.py:Name` or, once it is imported, `module:Name`."""
    source, _, name = value.rpartition(":")
    if name.isidentifier() and source in sys.modules:
        origin = getattr(sys.modules[source], "__file__", None)
        return Path(origin) if origin else None
    path = Path(os.path.expanduser(source if source.endswith(".py") else value))
    return path if path.suffix and os.path.isfile(path) else None


def _get_source(definition: Any) -> str:
    """Return the source of a function or a class; empty if it has none of its own, as a lambda."""
    if getattr(definition, "__name__", "<lambda>") == "<lambda>":
        return ""
    with suppress(OSError, TypeError):
        return inspect.getsource(getattr(definition, "original", definition))
    return ""


def _make_absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))

"""Who a run folder belongs to: nobody, a run that came to nothing, a run that can go on, or another process."""

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

from pellucid import config
from pellucid.config import Config, PolicyConfig, dump_config
from pellucid.reporting import loggers
from pellucid.reporting.report import flatten_config
from pellucid.reporting.run_files import (
    Record,
    get_checkpoint_step,
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

LOCK_FILE = ".lock"
DATA_FILE = "data.jsonl"
"""The rows that `pellucid.train` was given in memory."""
RANK_VARIABLES = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""The environment variables in which launchers say which process this is, as Accelerate reads them."""


def is_first_process() -> bool:
    """Whether this is the process that writes files, of those that train together. Known before torch is imported."""
    return next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0") == "0"


@contextmanager
def hold_run_dir(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run folder, which is made where it is missing, until this process ends in any way.

    One that was made for a run that could not begin, since the model is not there or its rewards fail, goes again; from
    one that was there its rows do.
    """
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    run_dir.mkdir(parents=True, exist_ok=True)
    with hold_lock(run_dir / LOCK_FILE, format_lock_owner(run_dir)):
        rows_before = (run_dir / DATA_FILE).exists()
        try:
            yield
        except NotBegunError:
            if made:
                clear_run_dir(run_dir)
            raise
        finally:
            if not rows_before and not (run_dir / "config.json").exists():
                (run_dir / DATA_FILE).unlink(missing_ok=True)
            if made and set(os.listdir(run_dir)) <= {LOCK_FILE}:
                with suppress(OSError):  # Windows keeps a file that is open, and others may be in the folders above
                    (run_dir / LOCK_FILE).unlink()
                    for folder in made:
                        folder.rmdir()


def clear_run_dir(run_dir: Path) -> None:
    """Remove all that is in the folder but its lock."""
    for path in [path for path in run_dir.iterdir() if path.name != LOCK_FILE]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def refuse_locked_run_dir(run_dir: Path) -> None:
    """Raise UserError where another process trains in the folder."""
    check_unlocked(run_dir / LOCK_FILE, format_lock_owner(run_dir))


def format_lock_owner(run_dir: Path) -> str:
    return f"trains in {run_dir}"


def list_foreign_files(run_dir: Path) -> list[str]:
    """Names in a folder without a config.json that are no part of a run; hidden files do not count."""
    if (run_dir / "config.json").is_file() or not run_dir.is_dir():
        return []
    ours = ("config.json.partial", DATA_FILE)
    return sorted(path.name for path in run_dir.iterdir() if path.name[0] != "." and path.name not in ours)


def check_new_run_dir(run_dir: Path) -> None:
    """Raise UserError where no run can begin in the folder. Nothing is loaded, and nothing is written."""
    check_writable(run_dir)
    refuse_locked_run_dir(run_dir)
    check_free_run_dir(run_dir)


def check_free_run_dir(run_dir: Path) -> None:
    """Raise UserError where a new run would destroy something in the folder."""
    names = list_foreign_files(run_dir)
    if not names and (run_dir / "config.json").is_file() and "algorithm" not in read_config(run_dir):
        names = ["config.json"]  # of a model, or damaged
    if names:
        raise UserError(f"{run_dir} holds {names[0]}, which is no run's: choose another folder with --run")
    if list_checkpoints(run_dir) or is_run_finished(run_dir) or (run_dir / "model").exists():
        raise UserError(f"{run_dir} holds a run: go on with --resume {run_dir}, or choose another folder with --run")


def check_begun_run_dir(run_dir: Path, cfg: Config) -> None:
    """Raise UserError where a run of other settings has left steps in the folder, though no checkpoint."""
    if any(read_records(run_dir / "metrics.jsonl")):
        for key in find_relevant_changes(run_dir, dump_settings(config.resolve_config(cfg))):
            raise UserError(
                f"{run_dir} holds steps of a run with another {key}: begin again with --resume {run_dir}, or choose"
                " another folder with --run"
            )


def check_resumable_run_dir(run_dir: Path) -> None:
    """Raise UserError where no run can be resumed in the folder. Nothing is loaded, and nothing is written."""
    path = run_dir / "config.json"
    if not path.is_file():
        raise UserError(f"--resume {run_dir}: there is no run in that folder (no config.json){suggest_path(run_dir)}")
    if "algorithm" not in read_config(run_dir):
        raise UserError(f"{path} is no run's, or damaged: bring it back from a copy, or start in another folder")
    check_writable(run_dir)
    refuse_locked_run_dir(run_dir)
    if is_run_finished(run_dir) and not list_checkpoints(run_dir):
        model = f" with --policy.model {run_dir / 'model'}" if (run_dir / "model").is_dir() else ""
        raise UserError(
            f"{run_dir} is finished and has no checkpoint to go on from, which checkpoint.every above 0 and"
            f' checkpoint.keep_finished = "newest" would have left: start a new run{model}'
        )


def describe_finished_run(run_dir: Path, resume_changes: SettingChanges, steps: int) -> str:
    """What is said at once of a run that is resumed with the settings it was finished with; empty for any other."""
    if resume_changes or not is_run_finished(run_dir) or not has_last_model(run_dir):
        return ""
    done = max((row["step"] for row in read_records(run_dir / "metrics.jsonl")), default=0)
    saved = list_checkpoints(run_dir)
    if saved and get_checkpoint_step(saved[-1]) < done:  # the steps after the newest checkpoint can be taken again
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


def record_bad_data(run_dir: Path, reason: str) -> None:
    """Note that a run was ended by its data, which may then be other data when the run goes on."""
    files.write_file_atomically(get_bad_data_path(run_dir), f"{reason}\n")


def remove_logs(run_dir: Path) -> None:
    """Remove the logs of a run that came to no checkpoint."""
    loggers.truncate_logs(run_dir, -1)
    for folder in ("tensorboard", "tokens"):
        shutil.rmtree(run_dir / folder, ignore_errors=True)


# ---------------------------------------------------------------- changes
# What a resume may change of a run's settings: all that leaves its log true, comparable from end to end.


CHANGEABLE_SETTINGS = (
    "algorithm.steps",
    "algorithm.minutes",
    "algorithm.micro_batch",
    "policy.deterministic",
    "policy.device",
    "policy.dtype",
    "policy.engine",
    "policy.gradient_checkpointing",
    "policy.reference",
    "policy.save_dtype",
    "sampler.rows",
    "sampler.cache_gb",
    "sampler.urls",
    "sampler.timeout",
    "evaluate.every",
    "reward.",
    "optimizer.",
    "runtime.",
    "checkpoint.",
    "log.",
)
"""How far, on what machine and how fast: the learning rate of each step stands in metrics.jsonl. Questions, rewards,
samples and objective stay what they were; which rewards failed for want of time or memory stands there too."""

NUMERICALLY_NEUTRAL_SETTINGS = (
    "policy.save_dtype",
    "checkpoint.",
    "log.",
    "runtime.timeout",
    "reward.workers",
    "reward.patience",
)
"""Settings that change no number of a run."""

CHANGEABLE_TERM_SETTINGS = {
    "judge": ("base_url", "key", "concurrency", "timeout", "retries", "step_timeout", "cache"),
    "reward_model": ("device", "batch"),
}
"""By the table of a term of the reward, what may change of it: where and how fast it is computed."""

COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")

DATA_KEY_PATTERN = re.compile(r"task\.(?:task\.)*(?:data|test_data)(?:\.\d+)?")
"""Settings that name data, whatever tasks are around it. They may change, and so may the content of the files, where
the run was ended by its data."""
SKIP_BAD_ROWS_PATTERN = re.compile(r"task\.(?:task\.)*skip_bad_rows")
"""Always free: rows that it leaves out were never trained on."""

SettingChanges = Mapping[str, Sequence[Any]]


def find_resume_changes(run_dir: Path, cfg: Config) -> SettingChanges:
    """The settings that a resume changes: (old, new) by dotted key. UserError for one that must stay as it was."""
    changed, steps = find_setting_changes(run_dir, dump_settings(cfg)), cfg.algorithm.steps
    done = max(map(get_checkpoint_step, list_checkpoints(run_dir)), default=0)
    if steps < done:
        raise UserError(f"{run_dir} has taken {done} steps already: algorithm.steps = {steps} must be at least {done}")
    data_may_change = get_bad_data_path(run_dir).is_file()
    for key, (was, is_) in changed.items():
        if data_may_change and DATA_KEY_PATTERN.fullmatch(key):
            continue
        if (
            not key.startswith(CHANGEABLE_SETTINGS)
            and not SKIP_BAD_ROWS_PATTERN.fullmatch(key)
            and not (key.endswith(".rewards") and is_same_grading(was, is_))
        ):
            ready = "" if (run_dir / "model").is_dir() else "when it is finished, "
            raise UserError(
                f"{run_dir} was trained with {key} = {was}, now {is_}: resume it with what it was, or {ready}start"
                f" a new run from its model with --policy.model {run_dir / 'model'}"
            )
    return changed


def get_bad_data_path(run_dir: Path) -> Path:
    """Return the file of a run folder that says how its data ended the run, if it did."""
    return run_dir / "bad_data.txt"


def is_same_grading(was: Any, is_: Any) -> bool:
    """Whether two lists of terms of a reward differ only in how they are computed."""
    return (
        isinstance(was, list)
        and isinstance(is_, list)
        and list(map(strip_execution_settings, was)) == list(map(strip_execution_settings, is_))
    )


def strip_execution_settings(term: Any) -> Any:
    """What a term of the reward says, wherever and however fast it is computed."""
    if not isinstance(term, Mapping):
        return term
    tables = {name: term[name] for name in CHANGEABLE_TERM_SETTINGS if isinstance(term.get(name), Mapping)}
    cut = {
        name: {key: table[key] for key in table if key not in CHANGEABLE_TERM_SETTINGS[name]}
        for name, table in tables.items()
    }
    return {**term, **cut, "timeout": None}


def find_setting_changes(run_dir: Path, settings: Record) -> SettingChanges:
    """By dotted key, in what a run and settings as `files.recorded` has them differ: a setting or a file's content.

    A dtype that is left to the machine is the run's, and so is a commit that a branch or a tag leads to as far as is
    known here. The same file in another place is the same.
    """
    theirs, ours = (
        dict(flatten_config(of)) for of in (dump_settings(config.load_config(run_dir / "config.json")), settings)
    )
    then, now = read_config(run_dir).get("digests") or {}, digest_named_files(settings)  # an older version noted none
    if ours["policy.dtype"] == "auto":
        ours["policy.dtype"] = theirs["policy.dtype"]
    if known := find_cached_commit(ours["policy.model"], ours["policy.revision"], theirs["policy.revision"]):
        ours["policy.revision"] = known
    changed = {
        key: (theirs.get(key), ours.get(key))
        for key in {**ours, **theirs}
        if theirs.get(key) != ours.get(key) and not (key in then and then[key] == now.get(key))
    }
    edited = {
        key: (format_file_digest(then[key]), format_file_digest(now.get(key, "none")))
        for key in then
        if then[key] != now.get(key)
    }
    return {**edited, **changed}


def find_cached_commit(model: str, revision: str, recorded: str) -> str:
    """The commit that a revision leads to by the Hub's cache; the recorded one where that does not know it."""
    if revision == recorded or not COMMIT_PATTERN.fullmatch(recorded) or COMMIT_PATTERN.fullmatch(revision):
        return revision
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - most models have no revision

    try:
        file = try_to_load_from_cache(model, "config.json", revision=revision or None)
    except ValueError:  # a name that only ModelScope knows
        file = None
    return Path(file).parent.name if isinstance(file, str) else recorded


def find_relevant_changes(run_dir: Path, settings: Record) -> SettingChanges:
    """`unlike` without the settings that change no number, whose defaults may be others in a later version."""
    return {
        key: both
        for key, both in find_setting_changes(run_dir, settings).items()
        if not key.startswith(NUMERICALLY_NEUTRAL_SETTINGS)
    }


def format_file_digest(digest: str) -> str:
    return f"a file of sha256 {digest[:12]}"


def add_resume_record(run_dir: Path, step: int, changed: SettingChanges, facts: Record) -> Record:
    """The facts of a run as of its start, with the list of its resumes; this one is the last."""
    before = read_config(run_dir)
    now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step, "changed": dict(changed), **facts}
    started = {name: before.get(name, fact) for name, fact in facts.items()}
    return {**started, "resumes": [*(before.get("resumes") or []), now]}


def describe_resume(run_dir: Path, step: int, facts: Record) -> str:
    """One line on the last resume: the step it goes on from, and what has changed since."""
    *earlier, now = [{**facts, "changed": {}}, *facts["resumes"]]
    changed = [f"{key} = {is_} (was {was})" for key, (was, is_) in now["changed"].items()]
    versions = earlier[-1]["versions"]
    changed += [
        f"{name} {is_} (was {was})" for name, is_ in now["versions"].items() if (was := versions.get(name)) != is_
    ]
    return f"{run_dir} goes on after step {step}" + (f", with {', '.join(changed)}" if changed else "")


# ---------------------------------------------------------------- files
# The files that settings name: their absolute paths, since a run may go on from any folder, and their digests.


AXES = ("advantage", "objective")
"""Of `[algorithm]`: settings that may name a function of the user's own."""


def dump_settings(cfg: Config) -> dict[str, Any]:
    """All settings as JSON, as `config.dump` gives them, with the absolute paths of all files that exist."""
    values = dump_config(cfg)
    model = values["policy"]["model"]
    if model != PolicyConfig.model and os.path.exists(os.path.expanduser(model)):
        values["policy"]["model"] = make_absolute(model)
    values["policy"]["template"] = resolve_paths(values["policy"]["template"])
    own = {axis: resolve_paths(values["algorithm"][axis]) for axis in AXES}
    return {**values, "task": resolve_paths(values["task"]), "algorithm": {**values["algorithm"], **own}}


def resolve_paths(value: Any) -> Any:
    """A task's section, or a value in it, with absolute paths."""
    if isinstance(value, Mapping):
        return {key: resolve_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolve_paths(item) for item in value]
    return resolve_path(value) if isinstance(value, str) else value


def resolve_path(value: str) -> str:
    """A text with the absolute path of the files or the reward model that it names; any other as it is."""
    if is_file_pattern(value):
        return make_absolute(value)
    if value.startswith(REWARD_MODEL_PREFIX):
        folder = value.removeprefix(REWARD_MODEL_PREFIX)
        return REWARD_MODEL_PREFIX + make_absolute(folder) if os.path.isdir(os.path.expanduser(folder)) else value
    if find_file(value) is None:
        return value
    source, colon, name = value.rpartition(":")
    if source.endswith(".py"):
        return f"{make_absolute(source)}{colon}{name}"
    return value if colon else make_absolute(value)


def digest_named_files(settings: Record) -> dict[str, str]:
    """By dotted key, the sha256 of each file that the settings of task, axes and policy name: code, prefixes, data.

    Of what was given to `pellucid.train` it is that of its source.
    """
    axes = {axis: settings["algorithm"][axis] for axis in AXES}
    template = {"template": settings["policy"].get("template", "")}
    named = [
        *find_named_files(settings["task"], "task"),
        *find_named_files(axes, "algorithm"),
        *find_named_files(template, "policy"),
    ]
    return {key: digest_source(what) for key, what in named}


def digest_code_files(settings: Record) -> dict[str, str]:
    """By dotted key, the sha256 of each file of code that the settings of task and axes name."""
    named = {**settings["task"], **{axis: settings["algorithm"][axis] for axis in AXES}}
    found = [
        (key, path) for key, path in find_named_files(named, "") if isinstance(path, Path) and path.suffix == ".py"
    ]
    return {key.removeprefix("."): digest_source(path) for key, path in found}


def digest_source(source: Path | Sequence[Path] | str) -> str:
    """The sha256 of a file, of several, or of a source."""
    if isinstance(source, str):
        return hashlib.sha256(source.encode()).hexdigest()
    return files.compute_file_digest(source) if isinstance(source, Path) else digest_file_list(source)


def digest_file_list(paths: Sequence[Path]) -> str:
    """The sha256 of what `sha256sum` prints of files, by their names: it tells one more, one less and one edited."""
    lines = "".join(f"{files.compute_file_digest(path)}  {path.name}\n" for path in paths)
    return hashlib.sha256(lines.encode()).hexdigest()


def find_named_files(value: Any, key: str) -> Iterator[tuple[str, Path | list[Path] | str]]:
    """What is behind settings, by dotted key: a file, all that match a pattern, or the source of what has no file."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from find_named_files(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from find_named_files(item, f"{key}.{i}")
    elif isinstance(value, str) and is_file_pattern(value):
        yield key, list_matching_files(value)
    elif isinstance(value, str) and value.startswith(IN_PROCESS_PREFIX):
        yield from ((key, source) for source in [get_source(load_object(value))] if source)
    elif isinstance(value, str) and (path := find_file(value)):
        yield key, path


def find_file(value: str) -> Path | None:
    """The file behind `path/to/file.ext`, `path/to/file.py:Name` or, once it is imported, `module:Name`."""
    source, _, name = value.rpartition(":")
    if name.isidentifier() and source in sys.modules:
        origin = getattr(sys.modules[source], "__file__", None)
        return Path(origin) if origin else None
    path = Path(os.path.expanduser(source if source.endswith(".py") else value))
    return path if path.suffix and os.path.isfile(path) else None


def get_source(thing: Any) -> str:
    """The source of a function or a class; empty where it has none of its own, as a lambda in the middle of a line."""
    if getattr(thing, "__name__", "<lambda>") == "<lambda>":
        return ""
    with suppress(OSError, TypeError):
        return inspect.getsource(getattr(thing, "original", thing))
    return ""


def make_absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))

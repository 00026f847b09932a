"""What a resume may change of a run's settings: all that leaves its log true, comparable from end to end."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pellucid import config
from pellucid.config import Config
from pellucid.reporting.report import flat
from pellucid.reporting.run_folder import Record, checkpoints, read_config, step_of
from pellucid.training import files
from pellucid.types import UserError

FREE = (
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

WITHOUT_EFFECT = ("policy.save_dtype", "checkpoint.", "log.", "runtime.timeout", "reward.workers", "reward.patience")
"""Settings that change no number of a run."""

HOW = {
    "judge": ("base_url", "key", "concurrency", "timeout", "retries", "step_timeout", "cache"),
    "reward_model": ("device", "batch"),
}
"""By the table of a term of the reward, what may change of it: where and how fast it is computed."""

COMMIT = re.compile(r"[0-9a-f]{40}")

DATA = re.compile(r"task\.(?:task\.)*(?:data|test_data)(?:\.\d+)?")
"""Settings that name data, whatever tasks are around it. They may change, and so may the content of the files, where
the run was ended by its data."""
SKIPS = re.compile(r"task\.(?:task\.)*skip_bad_rows")
"""Always free: rows that it leaves out were never trained on."""

Changes = Mapping[str, Sequence[Any]]


def of_resume(run_dir: Path, cfg: Config) -> Changes:
    """The settings that a resume changes: (old, new) by dotted key. UserError for one that must stay as it was."""
    changed, steps = unlike(run_dir, files.recorded(cfg)), cfg.algorithm.steps
    done = max(map(step_of, checkpoints(run_dir)), default=0)
    if steps < done:
        raise UserError(f"{run_dir} has taken {done} steps already: algorithm.steps = {steps} must be at least {done}")
    data_may_change = bad_data_file(run_dir).is_file()
    for key, (was, is_) in changed.items():
        if data_may_change and DATA.fullmatch(key):
            continue
        if (
            not key.startswith(FREE)
            and not SKIPS.fullmatch(key)
            and not (key.endswith(".rewards") and graded_alike(was, is_))
        ):
            ready = "" if (run_dir / "model").is_dir() else "when it is finished, "
            raise UserError(
                f"{run_dir} was trained with {key} = {was}, now {is_}: resume it with what it was, or {ready}start"
                f" a new run from its model with --policy.model {run_dir / 'model'}"
            )
    return changed


def bad_data_file(run_dir: Path) -> Path:
    """Return the file of a run folder that says how its data ended the run, if it did."""
    return run_dir / "bad_data.txt"


def graded_alike(was: Any, is_: Any) -> bool:
    """Whether two lists of terms of a reward differ only in how they are computed."""
    return isinstance(was, list) and isinstance(is_, list) and list(map(essence, was)) == list(map(essence, is_))


def essence(term: Any) -> Any:
    """What a term of the reward says, wherever and however fast it is computed."""
    if not isinstance(term, Mapping):
        return term
    tables = {name: term[name] for name in HOW if isinstance(term.get(name), Mapping)}
    cut = {name: {key: table[key] for key in table if key not in HOW[name]} for name, table in tables.items()}
    return {**term, **cut, "timeout": None}


def unlike(run_dir: Path, settings: Record) -> Changes:
    """By dotted key, in what a run and settings as `files.recorded` has them differ: a setting or a file's content.

    A dtype that is left to the machine is the run's, and so is a commit that a branch or a tag leads to as far as is
    known here. The same file in another place is the same.
    """
    theirs, ours = (dict(flat(of)) for of in (files.recorded(config.load(run_dir / "config.json")), settings))
    then, now = read_config(run_dir).get("digests") or {}, files.digests(settings)  # an older version noted none
    if ours["policy.dtype"] == "auto":
        ours["policy.dtype"] = theirs["policy.dtype"]
    if known := commit_in_cache(ours["policy.model"], ours["policy.revision"], theirs["policy.revision"]):
        ours["policy.revision"] = known
    changed = {
        key: (theirs.get(key), ours.get(key))
        for key in {**ours, **theirs}
        if theirs.get(key) != ours.get(key) and not (key in then and then[key] == now.get(key))
    }
    edited = {key: (short(then[key]), short(now.get(key, "none"))) for key in then if then[key] != now.get(key)}
    return {**edited, **changed}


def commit_in_cache(model: str, revision: str, recorded: str) -> str:
    """The commit that a revision leads to by the Hub's cache; the recorded one where that does not know it."""
    if revision == recorded or not COMMIT.fullmatch(recorded) or COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - most models have no revision

    try:
        file = try_to_load_from_cache(model, "config.json", revision=revision or None)
    except ValueError:  # a name that only ModelScope knows
        file = None
    return Path(file).parent.name if isinstance(file, str) else recorded


def matter(run_dir: Path, settings: Record) -> Changes:
    """`unlike` without the settings that change no number, whose defaults may be others in a later version."""
    return {key: both for key, both in unlike(run_dir, settings).items() if not key.startswith(WITHOUT_EFFECT)}


def short(digest: str) -> str:
    return f"a file of sha256 {digest[:12]}"


def history(run_dir: Path, step: int, changed: Changes, facts: Record) -> Record:
    """The facts of a run as of its start, with the list of its resumes; this one is the last."""
    before = read_config(run_dir)
    now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step, "changed": dict(changed), **facts}
    started = {name: before.get(name, fact) for name, fact in facts.items()}
    return {**started, "resumes": [*(before.get("resumes") or []), now]}


def shown(run_dir: Path, step: int, facts: Record) -> str:
    """One line on the last resume: the step it goes on from, and what has changed since."""
    *earlier, now = [{**facts, "changed": {}}, *facts["resumes"]]
    changed = [f"{key} = {is_} (was {was})" for key, (was, is_) in now["changed"].items()]
    versions = earlier[-1]["versions"]
    changed += [
        f"{name} {is_} (was {was})" for name, is_ in now["versions"].items() if (was := versions.get(name)) != is_
    ]
    return f"{run_dir} goes on after step {step}" + (f", with {', '.join(changed)}" if changed else "")

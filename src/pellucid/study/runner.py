"""`pellucid study`: make the missing runs of a study, each in a process of its own, up to --jobs of them at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from io import TextIOWrapper
from pathlib import Path

from pellucid import config
from pellucid.config import Config
from pellucid.reporting.charts import format_count
from pellucid.reporting.eval_metrics import HEADLINE_LABELS, get_measures, parse_evaluation, select_headline
from pellucid.reporting.report import format_duration
from pellucid.reporting.run_files import (
    BEST_MODEL_DIR,
    Record,
    is_run_finished,
    list_checkpoints,
    read_config,
    read_records,
)
from pellucid.study.plan import Study, StudyRun, load_variant_configs, write_variant_recipe
from pellucid.study.runs import format_command, write_study_plan
from pellucid.training.run_dir import (
    clear_run_dir,
    dump_settings,
    find_relevant_changes,
    list_foreign_files,
    refuse_locked_run_dir,
)
from pellucid.types import UserError
from pellucid.utils.files import hold_lock, write_lock_holder
from pellucid.utils.signals import INTERRUPTED_EXIT_STATUS, collect_stop_requests
from pellucid.utils.text import escape_controls

POLL_INTERVAL_SECONDS = 0.2
"""Seconds between two checks of the runs in progress."""


@dataclass(frozen=True)
class Job:
    """A run in progress."""

    run: StudyRun
    process: subprocess.Popen[bytes]
    start_time: float = field(default_factory=time.monotonic)


@dataclass
class Progress:
    """Counts the runs that have ended, among those that were unfinished at the start."""

    total: int
    ended: int = 0
    start_time: float = field(default_factory=time.monotonic)
    failures: dict[StudyRun, int] = field(default_factory=dict)
    """Runs that failed, with their exit statuses."""

    def format(self) -> str:
        seconds = (time.monotonic() - self.start_time) / self.ended * (self.total - self.ended)
        left = f"about {format_duration(seconds)}" if self.ended < self.total else "none"
        return f"{self.ended}/{self.total}, {left} left"


def run_study(study: Study, study_dir: Path, jobs: int = 1, only: Sequence[str] = (), keep_models: bool = False) -> int:
    """Make all runs of the study, or as many as end before Ctrl-C. A second call continues where the first stopped.

    Up to `jobs` runs are made at once, of all variants or of those in `only`. Returns the exit status.
    """
    if jobs < 1:
        raise UserError(f"--jobs {jobs} must be at least 1")
    runs, recipes = study.list_runs(study_dir, only), load_variant_configs(study)
    study_dir.mkdir(parents=True, exist_ok=True)
    lock_file = hold_lock(study_dir / ".lock", f"is at work on {study_dir}")
    with lock_file as lock, collect_stop_requests() as requests:
        for run in runs:
            check_run_dir(run, recipes[run.variant])
        for run in runs:
            write_variant_recipe(run.recipe_path, study.variants[run.variant])
        write_study_plan(study_dir, list(study.variants), study.seeds)
        waiting = deque[StudyRun]()
        for run in runs:
            if is_run_finished(run.run_dir):
                prune_finished_run(run.run_dir, keep_model=True)  # the user may have kept the model on purpose
            else:
                waiting.append(run)
        done = len(runs) - len(waiting)
        _print_line(f"{format_count(len(runs), 'run')} in {study_dir}: {done} done, {len(waiting)} to go")
        progress = _run_jobs(waiting, jobs, keep_models, lock, requests)
    status = report_failures(progress.failures)
    if not requests:
        return status
    _print_line(f"stopped after {progress.ended} of {progress.total} runs; the same command continues")
    return INTERRUPTED_EXIT_STATUS


def _run_jobs(
    waiting: deque[StudyRun], jobs: int, keep_models: bool, lock: TextIOWrapper, requests: Sequence[int]
) -> Progress:
    """Make the runs, up to `jobs` at once. After a request to stop, start no others and wait for those in progress."""
    running, interrupted, progress = list[Job](), False, Progress(len(waiting))
    try:
        while running or (waiting and not requests):
            while waiting and not requests and len(running) < jobs:
                running.append(start_job(waiting.popleft(), jobs, lock))
            if requests and not interrupted:
                interrupted = True
                _interrupt_jobs(running)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                _finish_job(job, keep_models, progress, stopping=bool(requests))
            time.sleep(POLL_INTERVAL_SECONDS)
    finally:  # no run is left behind, not even after a second Ctrl-C
        _interrupt_jobs(running)
        for job in running:
            job.process.wait()
    return progress


def start_job(run: StudyRun, jobs: int, lock: TextIOWrapper) -> Job:
    resumed = build_resume_arguments(run)
    if not resumed:
        clear_unresumable_run(run.run_dir)
    command = [sys.executable, "-P", "-m", "pellucid", *(resumed or run.arguments)]
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))} if jobs > 1 else {}
    with run.log_path.open("a" if resumed else "w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**threads, **os.environ},
            pass_fds=[lock.fileno()],
            start_new_session=True,  # otherwise it gets Ctrl-C as well as our SIGINT, and two end it at once
        )
    write_lock_holder(lock, process.pid)
    _print_line(f"{run.name}: {'resumed' if resumed else 'started'}, log {run.log_path}")
    return Job(run, process)


def _interrupt_jobs(jobs: Iterable[Job]) -> None:
    for job in jobs:
        job.process.send_signal(signal.SIGINT)


def _finish_job(job: Job, keep_models: bool, progress: Progress, stopping: bool) -> None:
    run, status = job.run, job.process.returncode
    duration = format_duration(time.monotonic() - job.start_time)
    if status and stopping:
        _print_line(f"{run.name}: stopped after {duration}")
        return
    progress.ended += 1
    if status or not is_run_finished(run.run_dir):
        progress.failures[run] = status
        _print_line(f"{run.name}: FAILED after {duration}; {progress.format()}")
        return
    prune_finished_run(run.run_dir, keep_models)
    _print_line(f"{run.name}: done in {duration}, {format_accuracy_change(run.run_dir)}; {progress.format()}")


def report_failures(failures: dict[StudyRun, int]) -> int:
    """Print the failed runs. Return the exit status: 0 if there are none, 2 if all are user errors, else 1."""
    for run, status in failures.items():
        lines = run.log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        _print_line(f"failed (exit {status}): {run.name}: {lines[-1] if lines else 'it printed nothing'}")
        _print_line(f"  to retry: {format_command(build_resume_arguments(run) or run.arguments)}")
    return 0 if not failures else 2 if set(failures.values()) == {2} else 1


def format_accuracy_change(run_dir: Path) -> str:
    found = [parse_evaluation(row) for row in read_records(run_dir / "evals.jsonl")]
    if not found:
        return "not evaluated"
    name = select_headline([found[0], found[-1]])
    if not name:
        return "evaluated without grades of greedy answers"
    first, last = (get_measures(evaluation)[name].value for evaluation in (found[0], found[-1]))
    return f"{HEADLINE_LABELS[name]} {first:.3f} -> {last:.3f}"


def _print_line(line: str) -> None:
    print(escape_controls(line), flush=True)


# ---------------------------------------------------------------- the folders of the runs


def check_run_dir(run: StudyRun, recipe: Config) -> None:
    """Raise UserError if the folder holds anything but this run with the current settings of the study."""
    run_dir = run.run_dir
    if not run_dir.exists():
        return
    refuse_locked_run_dir(run_dir)
    if not run_dir.is_dir() or list_foreign_files(run_dir):
        raise UserError(f"{run_dir} exists and is not a run (no config.json): move it, or choose another --into")
    if not read_config(run_dir):
        if list_checkpoints(run_dir) or any(read_records(run_dir / "metrics.jsonl")):
            raise UserError(f"{run_dir}/config.json cannot be read: fix it, or delete that run")
        return  # the run crashed before it wrote its settings
    for key, (theirs, ours) in find_relevant_changes(run_dir, get_expected_settings(run, recipe)).items():
        raise UserError(
            f"{run_dir} was made with {key} = {theirs!r}, the study says {ours!r}: choose another --into, or delete"
            " that run"
        )


def get_expected_settings(run: StudyRun, recipe: Config) -> Record:
    """Return the settings as the run records them in its folder, except a dtype that depends on the machine."""
    seeded = replace(recipe, algorithm=replace(recipe.algorithm, seed=run.seed))
    return dump_settings(config.resolve_config(seeded))


def build_resume_arguments(run: StudyRun) -> list[str]:
    """Return the arguments that resume the run from its last checkpoint; empty if there is no checkpoint."""
    return ["train", "--resume", str(run.run_dir)] if list_checkpoints(run.run_dir) else []


def clear_unresumable_run(run_dir: Path) -> None:
    """Empty the folder of a run without a checkpoint. UserError if that run is in progress."""
    refuse_locked_run_dir(run_dir)
    if run_dir.exists():
        clear_run_dir(run_dir)


def prune_finished_run(run_dir: Path, keep_model: bool) -> None:
    """Remove the checkpoints of a finished run, hundreds of megabytes, and its model unless it is to be kept.

    The model goes last: a run with checkpoints and without a model counts as unfinished.
    """
    for name in ("checkpoints",) if keep_model else ("checkpoints", "adapter", BEST_MODEL_DIR, "model"):
        if (run_dir / name).exists():
            shutil.rmtree(run_dir / name)

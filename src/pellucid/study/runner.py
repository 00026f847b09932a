"""`pellucid study`: make the missing runs of a study, each in a process of its own, up to --jobs of them at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path

from pellucid.machine.harmless import harmless
from pellucid.machine.interrupts import INTERRUPTED, stop_requests
from pellucid.machine.locks import locked, note_holder
from pellucid.reporting.charts import counted
from pellucid.reporting.measures import NAMES, evaluation_of, headline, measures
from pellucid.reporting.run_folder import finished, records
from pellucid.study import plan
from pellucid.study.cells import check, clear, resuming, tidy
from pellucid.study.plan import Cell, Study
from pellucid.study.runs import shown_command, write_plan
from pellucid.types import UserError

PAUSE = 0.2
"""Seconds between two looks at the runs."""


@dataclass(frozen=True)
class Job:
    """A run in progress."""

    run: Cell
    process: subprocess.Popen[bytes]
    start_time: float = field(default_factory=time.monotonic)


@dataclass
class Progress:
    """How many of the runs that were unfinished at the start have ended."""

    total: int
    ended: int = 0
    start_time: float = field(default_factory=time.monotonic)
    failures: dict[Cell, int] = field(default_factory=dict)
    """Runs that failed, with their exit statuses."""

    def format_time_left(self) -> str:
        seconds = (time.monotonic() - self.start_time) / self.ended * (self.total - self.ended)
        return f"about {span(seconds)} left" if self.ended < self.total else "none left"


def run(study: Study, study_dir: Path, jobs: int = 1, only: Sequence[str] = (), keep_models: bool = False) -> int:
    """Run the study to its end, or until Ctrl-C. Return the exit status. A second call goes on where it stopped."""
    if jobs < 1:
        raise UserError(f"--jobs {jobs} must be at least 1")
    cells, recipes = study.list_runs(study_dir, only), plan.checked(study)
    study_dir.mkdir(parents=True, exist_ok=True)
    at_work = locked(study_dir / ".lock", f"is at work on {study_dir}")
    with at_work as lock, stop_requests() as requests:
        for cell in cells:
            check(cell, recipes[cell.variant])
        for name in dict.fromkeys(cell.variant for cell in cells):
            plan.write_recipe(study_dir / name / "recipe.json", study.variants[name])
        write_plan(study_dir, list(study.variants), study.seeds)
        waiting = [cell for cell in cells if not finished(cell.run_dir)]
        for cell in cells:
            if cell not in waiting:
                tidy(cell.run_dir, keep_model=True)  # the user may have kept it on purpose
        say(f"{counted(len(cells), 'run')} in {study_dir}: {len(cells) - len(waiting)} done, {len(waiting)} to go")
        progress = Progress(len(waiting))
        work(waiting, jobs, keep_models, lock, requests, progress)
    if requests:
        verdict(progress.failures)
        say(f"stopped with {progress.ended} of {progress.total} ended; the same command goes on")
        return INTERRUPTED
    return verdict(progress.failures)


def work(
    runs: Sequence[Cell],
    jobs: int,
    keep_models: bool,
    lock: TextIOWrapper,
    requests: Sequence[int],
    progress: Progress,
) -> None:
    """Run the cells, up to `jobs` at once. After a request to stop, start no others and wait for those in progress."""
    waiting, running, asked = deque(runs), list[Job](), False
    try:
        while running or (waiting and not requests):
            while waiting and not requests and len(running) < jobs:
                running.append(start(waiting.popleft(), jobs, lock))
            if requests and not asked:
                asked = True
                ask_to_stop(running)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                end(job, keep_models, progress, stopping=bool(requests))
            time.sleep(PAUSE)
    finally:  # no run is left behind, not even after a second Ctrl-C
        ask_to_stop(running)
        for job in running:
            job.process.wait()


def start(run: Cell, jobs: int, lock: TextIOWrapper) -> Job:
    resumed = resuming(run)
    if not resumed:
        clear(run.run_dir)
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
            start_new_session=True,  # else Ctrl-C would reach it as well as our SIGINT, and two end it at once
        )
    note_holder(lock, process.pid)
    say(f"{named(run)}: {'goes on' if resumed else 'started'}, log {run.log_path}")
    return Job(run, process)


def ask_to_stop(jobs: Iterable[Job]) -> None:
    for job in jobs:
        job.process.send_signal(signal.SIGINT)


def end(job: Job, keep_models: bool, progress: Progress, stopping: bool) -> None:
    cell, status = job.run, job.process.returncode
    minutes = span(time.monotonic() - job.start_time)
    if status and stopping:
        say(f"{named(cell)}: stopped after {minutes}")
        return
    progress.ended += 1
    left = f"{progress.ended}/{progress.total}, {progress.format_time_left()}"
    if status or not finished(cell.run_dir):
        progress.failures[cell] = status
        say(f"{named(cell)}: FAILED after {minutes}; {left}")
        return
    tidy(cell.run_dir, keep_models)
    say(f"{named(cell)}: done in {minutes}, {accuracies(cell.run_dir)}; {left}")


def verdict(failures: dict[Cell, int]) -> int:
    """Print what failed. Return the exit status: 0, or 2 where all failures are the user's to mend, else 1."""
    for cell, status in failures.items():
        lines = cell.log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [
            "it printed nothing"
        ]
        say(f"failed (exit {status}): {named(cell)}: {lines[-1]}")
        say(f"  again: {shown_command(resuming(cell) or cell.arguments)}")
    if not failures:
        return 0
    return 2 if set(failures.values()) == {2} else 1


def accuracies(run_dir: Path) -> str:
    found = [evaluation_of(row) for row in records(run_dir / "evals.jsonl")]
    ends = [found[0], found[-1]] if found else []
    name = headline(ends)
    if not name:
        return "not evaluated" if not found else "evaluated without grades of greedy answers"
    first, last = (measures(evaluation)[name].value for evaluation in ends)
    return f"{NAMES[name]} {first:.3f} -> {last:.3f}"


def named(run: Cell) -> str:
    return f"{run.variant} seed {run.seed}"


def span(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes / 60:.1f} h" if minutes >= 90 else f"{minutes:.1f} min"


def say(line: str) -> None:
    print(harmless(line), flush=True)

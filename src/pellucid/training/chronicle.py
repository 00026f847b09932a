"""What a run writes into its folder at its begin, while it goes on, and at its end."""

from __future__ import annotations

import json
from pathlib import Path

import rich

from pellucid.config import Config, dump
from pellucid.machine import disk
from pellucid.machine.harmless import harmless
from pellucid.protocols import Logger
from pellucid.reporting import boards, loggers, notebook
from pellucid.reporting.console import before_after, terminal
from pellucid.reporting.report import write_report
from pellucid.reporting.run_folder import records
from pellucid.training import changes, claim, files, provenance
from pellucid.training.changes import Changes


def start_folder(run_dir: Path, cfg: Config, step: int, resume_changes: Changes | None) -> None:
    """Write config.json, and remove the logs of a run that came to no checkpoint.

    UserError where the folder holds another run.
    """
    if resume_changes is None:
        claim.check_free(run_dir)
    if step == 0:
        claim.begin_again(run_dir)
    settings, facts = files.recorded(cfg), provenance.facts()
    if resume_changes is not None:
        facts = changes.history(run_dir, step, resume_changes, facts)
        changes.bad_data_file(run_dir).unlink(missing_ok=True)
        print(harmless(changes.shown(run_dir, step, facts)), flush=True)
    disk.write_whole(
        run_dir / "config.json",
        json.dumps({**settings, **facts, "digests": files.digests(settings)}, indent=2) + "\n",
    )


def open_logs(cfg: Config, run_dir: Path, first_step: int) -> loggers.Loggers:
    screen = screen_of(cfg.algorithm.steps, first_step, run_dir)
    for step, evaluation in loggers.read_evaluations(run_dir).items():
        screen.log_evaluation(step, evaluation)
    shown: list[Logger] = []
    if cfg.log.tensorboard:
        shown.append(boards.TensorBoard(run_dir / "tensorboard", first_step))
    if cfg.log.wandb != "off":
        shown.append(boards.WandB(run_dir, cfg.log.project, cfg.log.wandb, dump(cfg)))
    return loggers.Loggers([loggers.Jsonl(run_dir, cfg.log.rollouts)], [*shown, screen])


def screen_of(total_steps: int, first_step: int, run_dir: Path) -> Logger:
    """What a person sees of the run: a picture in a notebook, else what a terminal or a file can hold."""
    if notebook.is_running():
        return notebook.Notebook(total_steps, list(records(run_dir / "metrics.jsonl")))
    return terminal(total_steps, first_step)


def finish(run_dir: Path, stopped_step: int, resume_hint: str) -> None:
    """Show what a person wants to know about the result, whose failure costs nothing.

    again: how to go on; empty where an error says it.
    """
    if stopped_step and resume_hint:
        print(harmless(f"stopped after step {stopped_step}, nothing is lost; go on with: {resume_hint}"))
    shown = {"model": "model", "metrics": "metrics.jsonl"}
    with loggers.only_shown("report.html"):
        write_report(run_dir)
        shown = {"model": "model", "report": "report.html", "metrics": "metrics.jsonl"}
    if stopped_step:
        return
    with loggers.only_shown("the table"):
        evaluations = list(loggers.read_evaluations(run_dir).values())
        if evaluations:
            rich.print(before_after(evaluations[0], evaluations[-1]))
    for what, name in shown.items():
        print(harmless(f"{what:8} {run_dir / name}"))

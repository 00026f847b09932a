"""One run: settings in, a run folder out."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path

import rich
from accelerate.utils import set_seed

from pellucid import config
from pellucid.algorithm import grpo
from pellucid.algorithm.diagnostics import Watch
from pellucid.config import Config, dump
from pellucid.doctor.profile import profiled
from pellucid.machine import disk, hardware
from pellucid.machine.interrupts import INTERRUPTED, StopRequests, stop_requests
from pellucid.reporting import boards, loggers
from pellucid.reporting.console import before_after, first_error, terminal
from pellucid.reporting.metrics import all_failed, describe
from pellucid.reporting.report import write_report
from pellucid.reporting.run_folder import checkpoints
from pellucid.runtimes.processes import needing_others
from pellucid.tasks.sandbox import Sandboxed
from pellucid.training import changes, checkpoint, claim, files, preflight, provenance
from pellucid.training.changes import Changes
from pellucid.training.compose import Components, compose, evaluation_sampling, settled, training_sampling
from pellucid.training.evaluate import evaluate, greedy, sample_and_grade
from pellucid.training.snapshot import restore, save, save_model
from pellucid.types import Evaluation, Group, Logger, UserError

FEW = 8
"""How many answers are graded before all others, to see that rewards work."""


def train(cfg: Config, run_dir: Path, resumed: Changes | None = None, profile: bool = False) -> int:
    """Train to the end, or to the step in which a request to stop came. Return the exit status.

    resumed: the settings that a resume changes (`changes.of_resume`); None begins a new run.
    """
    hardware.keep_freed_memory()
    if cfg.policy.deterministic:
        hardware.make_deterministic()
    cfg = settled(config.resolved(cfg))
    with stop_requests() as requests, ExitStack() as until_the_end:
        with requests.raised():
            preflight.check(cfg, run_dir)
            if claim.first_process():
                until_the_end.enter_context(claim.held(run_dir))
            set_seed(cfg.algorithm.seed)  # adapters start at random
            parts = compose(cfg, run_dir / "rewards.log")
            until_the_end.callback(parts.close)
            evaluation = begin(cfg, run_dir, parts, resumed)
        log = open_logs(cfg, run_dir, parts.state.step) if parts.runtime.main else loggers.Loggers([])
        with closing(log), needing_others(run_dir):
            if evaluation:
                log.log_evaluation(0, evaluation)
            stopped = follow(cfg, run_dir, parts, log, requests, profile)
            if not stopped:
                save_model(run_dir, parts)
                if parts.runtime.main:
                    checkpoint.tidy(run_dir, cfg.checkpoint)
        if parts.runtime.main:
            finish(run_dir, stopped)
    if hopeless(cfg, parts):
        raise UserError(
            f"every reward of the last {len(parts.failures)} steps failed, the last with {parts.failures[-1]}; nothing"
            " is lost, and reward.patience is how many such steps a run bears with"
        )
    return INTERRUPTED if stopped else 0


def begin(cfg: Config, run_dir: Path, parts: Components, resumed: Changes | None) -> Evaluation | None:
    """Bring the folder and all parts to the state before the next step. Return the evaluation before step 1."""
    notes = restore(run_dir, parts) if resumed is not None and checkpoints(run_dir) else []
    if parts.runtime.main:
        start_folder(run_dir, cfg, parts.state.step, resumed)
        for note in notes:
            print(f"! {note}", flush=True)
        with loggers.only_shown("the settings"):
            preflight.show_numbers(cfg, parts.policy, parts.runtime.world, run_dir)
    parts.runtime.any(False)  # no process writes there, as rewards do, before it is known to be free
    return look_first(cfg, parts) if parts.state.step == 0 else None


def follow(
    cfg: Config, run_dir: Path, parts: Components, log: Logger, requests: StopRequests, profile: bool = False
) -> int:
    """Take the steps; log, save and evaluate. Return the step that a stop request ended, or 0."""
    steps = grpo.train(
        parts.task,
        parts.sampler,
        parts.policy,
        parts.runtime,
        cfg.algorithm,
        parts.reference,
        parts.state,
        training_sampling(cfg),
    )
    if profile and parts.runtime.main:
        steps = profiled(steps, run_dir / "profile.txt", parts.policy.dtype)
    watch, heap, fresh = Watch(cfg.algorithm), hardware.Heap(), parts.state.step == 0
    if not fresh and missed(cfg, run_dir, parts) and not evaluated(cfg, parts, log, requests):
        return parts.state.step
    if out_of_time(cfg, parts):  # stopped or killed when all was saved but the model
        return 0
    for step, measured, groups in steps:
        parts.seconds += measured["time/step"]
        metrics = {**describe(groups, cfg.algorithm.min_reward_range), **measured, **memory_now(parts)}
        if "reward/kl" in metrics:
            metrics["reward/after_kl"] = metrics["reward/mean"] + metrics["reward/kl"]
        log.log(step, metrics, groups)
        heap.after_step()
        for note in watch.notes(metrics) if parts.runtime.main and fresh else []:
            print(f"! {note}", flush=True)
        last, due = is_last(cfg, parts), is_due(cfg, parts)
        saving = cfg.checkpoint.every > 0 and (last or step % cfg.checkpoint.every == 0)
        # A supervisor waits seconds between its request and its kill: first what must not be lost.
        parts.failures = [*parts.failures, first_error(groups)] if all_failed(groups) else []
        stop = parts.runtime.any(bool(requests)) or hopeless(cfg, parts)
        if saving or stop:
            save(run_dir, cfg, parts)
        if due and not stop and not evaluated(cfg, parts, log, requests):
            stop = True
            if not saving:
                save(run_dir, cfg, parts)
        if stop and (due or not last):
            return step
        if last:
            return 0
    return 0


def memory_now(parts: Components) -> dict[str, float]:
    """Memory of this process in GB: the peak, on the GPU where there is one, and the resident size."""
    return {"memory/peak_gb": parts.runtime.peak_gb(), "memory/resident_gb": hardware.resident_gb()}


def hopeless(cfg: Config, parts: Components) -> bool:
    """Whether the run must end as too many steps in a row had no reward. The same for all processes."""
    return 0 < cfg.reward.patience <= len(parts.failures)


def is_last(cfg: Config, parts: Components) -> bool:
    return parts.state.step == cfg.algorithm.steps or out_of_time(cfg, parts)


def out_of_time(cfg: Config, parts: Components) -> bool:
    """Whether algorithm.minutes are used up. The same for all processes."""
    return parts.runtime.any(0 < cfg.algorithm.minutes * 60 <= parts.seconds)


# ---------------------------------------------------------------- evaluation


def is_due(cfg: Config, parts: Components) -> bool:
    """Whether the policy is evaluated after this step."""
    every = cfg.evaluate.every
    return every > 0 and (parts.state.step % every == 0 or is_last(cfg, parts))


def missed(cfg: Config, run_dir: Path, parts: Components) -> bool:
    """Whether the evaluation of the last step is missing, as after a stop or a kill between the two."""
    there = parts.runtime.main and parts.state.step in loggers.read_evaluations(run_dir)
    return is_due(cfg, parts) and not parts.runtime.any(there)


def evaluated(cfg: Config, parts: Components, log: Logger, requests: StopRequests) -> bool:
    """Evaluate the policy. False where a request to stop came: the resumed run then makes the evaluation.

    Several processes wait for one another: they end it first.
    """
    try:
        with requests.raised() if parts.runtime.world == 1 else nullcontext():
            evaluation = evaluate_policy(cfg, parts)[0]
    except KeyboardInterrupt:
        return False
    log.log_evaluation(parts.state.step, evaluation)
    return not parts.runtime.any(bool(requests))


def evaluate_policy(cfg: Config, parts: Components) -> tuple[Evaluation, list[Group]]:
    """The evaluation of the policy, and the graded samples."""
    parts.sampler.sync(parts.policy, parts.state.step)
    task, prompts, sampling = parts.test_task, parts.test_prompts, evaluation_sampling(cfg)
    evaluation, groups, _ = evaluate(
        cfg.task_name, task, prompts, parts.sampler, sampling, cfg.evaluate.k, parts.runtime
    )
    return evaluation, groups


def look_first(cfg: Config, parts: Components) -> Evaluation | None:
    """Before step 1: held-out accuracy, one real exchange, and how many groups are going to teach anything."""
    try_rewards(cfg, parts)
    evaluation, groups = evaluate_policy(cfg, parts) if cfg.evaluate.every else (None, [])
    sampling = training_sampling(cfg)
    as_trained = replace(evaluation_sampling(cfg), n=sampling.n) == sampling
    if not groups or len(groups[0].completions) < sampling.n or not as_trained:
        parts.sampler.sync(parts.policy, parts.state.step)
        prompts = parts.runtime.shard(parts.task.sample(0, cfg.algorithm.prompts_per_step))
        groups = parts.runtime.gather(sample_and_grade(parts.task, parts.sampler, prompts, sampling))
    preflight.refuse_failing(groups)
    if parts.runtime.main:
        with loggers.only_shown("the first exchange"):
            preflight.show_exchange(parts.policy, groups[0])
            preflight.show_signal(groups, cfg)
    return evaluation


def try_rewards(cfg: Config, parts: Components) -> None:
    """Raise NotBegunError where a few greedy answers have no reward. If all hung, a whole look would take hours."""
    if isinstance(parts.task, Sandboxed):
        prompts = parts.test_prompts or parts.task.sample(0, cfg.algorithm.prompts_per_step)
        parts.sampler.sync(parts.policy, parts.state.step)
        few = parts.runtime.shard(prompts[:FEW])
        answers = sample_and_grade(parts.task, parts.sampler, few, greedy(training_sampling(cfg)))
        preflight.refuse_failing(parts.runtime.gather(answers))


# ---------------------------------------------------------------- the run folder


def start_folder(run_dir: Path, cfg: Config, step: int, resumed: Changes | None) -> None:
    """Write config.json, and remove the logs of a run that came to no checkpoint.

    UserError where the folder holds another run.
    """
    if resumed is None:
        claim.check_free(run_dir)
    if step == 0:
        claim.begin_again(run_dir)
    settings, facts = files.recorded(cfg), provenance.facts()
    if resumed is not None:
        facts = changes.history(run_dir, step, resumed, facts)
        print(changes.shown(run_dir, step, facts), flush=True)
    disk.write_whole(
        run_dir / "config.json",
        json.dumps({**settings, **facts, "digests": files.digests(settings)}, indent=2) + "\n",
    )


def open_logs(cfg: Config, run_dir: Path, first_step: int) -> loggers.Loggers:
    screen = terminal(cfg.algorithm.steps, first_step)
    for step, evaluation in loggers.read_evaluations(run_dir).items():
        screen.log_evaluation(step, evaluation)
    shown: list[Logger] = []
    if cfg.log.tensorboard:
        shown.append(boards.TensorBoard(run_dir / "tensorboard", first_step))
    if cfg.log.wandb != "off":
        shown.append(boards.WandB(run_dir, cfg.log.project, cfg.log.wandb, dump(cfg)))
    return loggers.Loggers([loggers.Jsonl(run_dir, cfg.log.rollouts)], [*shown, screen])


def finish(run_dir: Path, stopped: int) -> None:
    """Show what a person wants to know about the result, whose failure costs nothing."""
    if stopped:
        print(f"stopped after step {stopped}, nothing is lost; go on with: pellucid train --resume {run_dir}")
    with loggers.only_shown("report.html"):
        write_report(run_dir)
    if stopped:
        return
    with loggers.only_shown("the table"):
        evaluations = list(loggers.read_evaluations(run_dir).values())
        if evaluations:
            rich.print(before_after(evaluations[0], evaluations[-1]))
    for what, name in {"model": "model", "report": "report.html", "metrics": "metrics.jsonl"}.items():
        print(f"{what:8} {run_dir / name}")

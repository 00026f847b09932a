"""One run: settings in, a run folder out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import rich
from accelerate.utils import set_seed

from pellucid import checkpoint, grpo, hardware, loggers, policy, preflight, provenance
from pellucid.compose import Parts, compose, isolated, pick_sampler, settled, truncation_of
from pellucid.config import Config, dump
from pellucid.console import accuracy_table, before_after, terminal, verdict
from pellucid.effects import Watch
from pellucid.evaluate import OneProcess, evaluate, graded, held_out
from pellucid.interrupts import INTERRUPTED, stop_requests
from pellucid.metrics import describe
from pellucid.models.drawing import WHOLE
from pellucid.policy import Policy
from pellucid.profile import profiled
from pellucid.report import write_report
from pellucid.runtime import needing_others
from pellucid.tasks.wrappers import with_split
from pellucid.types import Evaluation, Group, Logger, UserError, observer

OPTIMIZER = "optimizer."


def train(cfg: Config, run_dir: Path, resume: bool = False, profile: bool = False) -> int:
    """Trains to the end, or to the step in which Ctrl-C came; returns the exit status."""
    hardware.keep_freed_memory()
    cfg = settled(cfg)
    set_seed(cfg.algorithm.seed)  # adapters start at random
    parts = compose(cfg)
    main = parts.runtime.main
    if resume:
        restore(run_dir, parts)
    first_step = parts.state.step
    if main:
        start_folder(run_dir, cfg, resume)
        preflight.show_numbers(cfg, parts.policy, parts.runtime.world)
    evaluation = look_first(cfg, parts) if first_step == 0 else None
    log = open_logs(cfg, run_dir, first_step) if main else loggers.Loggers([])
    with closing(log), stop_requests() as requests, needing_others(run_dir):
        if evaluation:
            log.log_evaluation(0, evaluation)
        stopped = follow(cfg, run_dir, parts, log, requests, profile)
    if main:
        finish(run_dir, parts.policy, stopped)
    return INTERRUPTED if stopped else 0


def follow(
    cfg: Config, run_dir: Path, parts: Parts, log: Logger, requests: Sequence[int], profile: bool = False
) -> int:
    """Walks through the steps, logging, evaluating and saving; the step that a stop request ended, or 0."""
    steps = grpo.train(
        parts.task, parts.sampler, parts.policy, parts.runtime, cfg.algorithm, parts.reference, parts.state
    )
    if profile and parts.runtime.main:
        steps = profiled(steps, run_dir / "profile.txt", parts.policy.dtype)
    if out_of_time(cfg, parts):  # killed when all was saved but the model
        return 0
    watch, fresh = Watch(cfg.algorithm), parts.state.step == 0
    for step, measured, groups in steps:
        parts.seconds += measured["time/step"]
        last = step == cfg.algorithm.steps or out_of_time(cfg, parts)
        metrics = {**describe(groups, cfg.algorithm.min_spread), **measured, "memory/peak_gb": parts.runtime.peak_gb()}
        if "reward/kl" in metrics:
            metrics["reward/after_kl"] = metrics["reward/mean"] + metrics["reward/kl"]
        log.log(step, metrics, groups)
        for note in watch.notes(metrics) if parts.runtime.main and fresh else []:
            print(f"! {note}", flush=True)
        if cfg.evaluate.every and (last or step % cfg.evaluate.every == 0):
            log.log_evaluation(step, evaluate_policy(cfg, parts)[0])
        stop = parts.runtime.any(bool(requests))
        if stop or last or (cfg.checkpoint.every and step % cfg.checkpoint.every == 0):
            save(run_dir, cfg, parts)
        if last or stop:
            return 0 if last else step
    return 0


def out_of_time(cfg: Config, parts: Parts) -> bool:
    """The same for all processes."""
    return parts.runtime.any(0 < cfg.algorithm.minutes * 60 <= parts.seconds)


# ---------------------------------------------------------------- evaluation


def evaluate_policy(cfg: Config, parts: Parts) -> tuple[Evaluation, list[Group]]:
    """And the graded samples."""
    parts.greedy.sync(parts.policy)
    parts.test_sampler.sync(parts.policy)
    k, samples = cfg.evaluate.k, cfg.evaluate.samples or cfg.evaluate.k
    evaluation, groups, _ = evaluate(
        cfg.task_name, parts.test_task, parts.test_prompts, parts.greedy, parts.test_sampler, k, samples, parts.runtime
    )
    return evaluation, groups


def look_first(cfg: Config, parts: Parts) -> Evaluation | None:
    """Before step 1: held-out accuracy, one real exchange, and how many groups are going to teach anything."""
    evaluation, groups = evaluate_policy(cfg, parts) if cfg.evaluate.every else (None, [])
    size = cfg.algorithm.group_size
    if not groups or len(groups[0].completions) < size or truncation_of(cfg) != WHOLE:
        parts.sampler.sync(parts.policy)
        prompts = parts.runtime.shard(parts.task.sample(0, cfg.algorithm.prompts_per_step))
        groups = parts.runtime.gather(graded(parts.task, parts.sampler, prompts, size))
    if parts.runtime.main:
        preflight.show_exchange(parts.policy, groups[0])
        preflight.show_signal(groups, size, cfg.algorithm.min_spread)
    return evaluation


def evaluate_model(cfg: Config, model: str, show: int) -> int:
    """`pellucid eval`: prints `show` greedy answers to the task's held-out questions, and the accuracy over all."""
    hardware.keep_freed_memory()
    device = hardware.pick_device(cfg.policy.device)
    dtype = hardware.pick_dtype(cfg.policy.dtype, device)
    frozen = policy.load_frozen(model, device, dtype, cfg.sampler.temperature, cfg.policy.engine)
    task = isolated(with_split(cfg.task, "test"))
    sampler, greedy = pick_sampler(cfg, truncation_of(cfg)), replace(pick_sampler(cfg), temperature=0.0)
    sampler.sync(frozen)
    greedy.sync(frozen)
    k, samples = cfg.evaluate.k, cfg.evaluate.samples or cfg.evaluate.k
    prompts = held_out(task, cfg.evaluate.n)
    evaluation, _, best = evaluate(cfg.task_name, task, prompts, greedy, sampler, k, samples, OneProcess())
    for group in best[:show]:
        rich.print(verdict(group))
    rich.print(accuracy_table(model, evaluation))
    return 0


# ---------------------------------------------------------------- the run folder


def start_folder(run_dir: Path, cfg: Config, resume: bool) -> None:
    """UserError where the folder holds another run."""
    path = run_dir / "config.json"
    if path.exists() and not resume:
        raise UserError(f"{run_dir} holds a run: go on with --resume {run_dir}, or choose another folder with --run")
    run_dir.mkdir(parents=True, exist_ok=True)
    whole = path.with_name("config.json.partial")
    whole.write_text(json.dumps({**dump(cfg), **provenance.facts()}, indent=2) + "\n")
    whole.replace(path)


def open_logs(cfg: Config, run_dir: Path, first_step: int) -> loggers.Loggers:
    screen = terminal(cfg.algorithm.steps, first_step)
    for step, evaluation in loggers.read_evaluations(run_dir).items():
        screen.log_evaluation(step, evaluation)
    boards: list[Logger] = []
    if cfg.log.tensorboard:
        boards.append(loggers.TensorBoard(run_dir / "tensorboard", first_step))
    if cfg.log.wandb != "off":
        boards.append(loggers.WandB(run_dir, cfg.log.project, cfg.log.wandb, dump(cfg)))
    return loggers.Loggers([loggers.Jsonl(run_dir), *boards, screen])


def save(run_dir: Path, cfg: Config, parts: Parts) -> None:
    runtime, state, reference = parts.runtime, parts.state, parts.reference
    generators = runtime.gather([checkpoint.random_state()])
    replay, replay_facts = checkpoint.pack_replay(runtime.gather([state.experiences]))
    if not runtime.main:
        return
    # A file for each moment: safetensors holds a whole file in memory while it writes.
    moments = {f"{OPTIMIZER}{moment}": tensors for moment, tensors in runtime.optimizer_state().items()}
    moving = (
        {"reference": reference.weights()} if cfg.algorithm.reference_every and isinstance(reference, Policy) else {}
    )
    tensors = {"policy": parts.policy.trainable(), **moments, **moving, **replay}
    facts = {"updates": runtime.updates, "seconds": parts.seconds, "random": generators, "replay": replay_facts}
    facts |= {"micro_batch": runtime.micro_batch} if runtime.micro_batch else {}
    facts |= {"kl_coef": state.kl_coef} if cfg.algorithm.kl_target else {}
    watching = observer(parts.task)
    facts |= {"task": watching.state()} if watching else {}
    checkpoint.save(run_dir, state.step, tensors, facts, cfg.checkpoint.keep_last)


def restore(run_dir: Path, parts: Parts) -> None:
    """Puts everything back to the last whole checkpoint and cuts the logs to it."""
    folders = checkpoint.found(run_dir)
    if not folders:
        raise UserError(f"{run_dir} has no checkpoint to resume from: start it again in another folder")
    tensors, facts = checkpoint.load(folders[-1])
    runtime, state = parts.runtime, parts.state
    if len(facts["random"]) != runtime.world:
        raise UserError(f"{run_dir} was trained by {len(facts['random'])} processes: resume it with as many")
    parts.policy.load_trainable(tensors["policy"])
    if "reference" in tensors and isinstance(parts.reference, Policy):
        parts.reference.follow(tensors["reference"], decay=0.0)
    moments = {name.removeprefix(OPTIMIZER): value for name, value in tensors.items() if name.startswith(OPTIMIZER)}
    runtime.load_optimizer_state(moments, facts["updates"])
    runtime.micro_batch = facts.get("micro_batch", 0)
    checkpoint.restore_random_state(facts["random"][runtime.rank])
    parts.seconds = facts["seconds"]
    state.step, state.kl_coef = facts["step"], facts.get("kl_coef", state.kl_coef)
    if watching := observer(parts.task):
        watching.load_state(facts["task"])
    kept = checkpoint.unpack_replay(tensors, facts["replay"], runtime.rank)
    state.experiences = [(step, batch.to(parts.policy.device)) for step, batch in kept]
    if runtime.main:
        loggers.truncate(run_dir, state.step)


def finish(run_dir: Path, learner: Policy, stopped: int) -> None:
    """The result on disk, and what a person wants to know about it."""
    report = write_report(run_dir)
    if stopped:
        print(f"stopped after step {stopped}, nothing is lost; go on with: pellucid train --resume {run_dir}")
        return
    partial = run_dir / "model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    learner.save(partial)
    shutil.rmtree(run_dir / "model", ignore_errors=True)
    partial.rename(run_dir / "model")
    evaluations = list(loggers.read_evaluations(run_dir).values())
    if evaluations:
        rich.print(before_after(evaluations[0], evaluations[-1]))
    for what, path in {"model": run_dir / "model", "report": report, "metrics": run_dir / "metrics.jsonl"}.items():
        print(f"{what:8} {path}")

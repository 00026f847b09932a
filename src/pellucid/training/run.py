"""One run: builds what a Config describes, takes the steps, and writes the run directory.

`train_run` is `pellucid train`, `evaluate_model` is `pellucid eval`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import rich
import torch
from accelerate.utils import set_seed

from pellucid import __version__
from pellucid.algorithm import async_grpo, grpo
from pellucid.algorithm.grpo import StepResult
from pellucid.algorithm.metrics import InertSettingWatcher
from pellucid.algorithm.settings import GRPOConfig
from pellucid.config import Config, dump_config, resolve_config
from pellucid.distributed.process_group import SINGLE_PROCESS, broadcast_decision, detect_lost_processes
from pellucid.policy.access import ModelAccess
from pellucid.policy.policy import Policy, load_frozen_policy
from pellucid.reporting.best_evaluation import (
    BestEvaluation,
    count_evaluations_since_best,
    find_best_evaluation,
)
from pellucid.reporting.charts import format_count
from pellucid.reporting.console import (
    NotebookLogger,
    find_first_error,
    is_in_notebook,
    make_comparison_table,
    make_evaluation_table,
    make_screen_logger,
    make_verdict_table,
)
from pellucid.reporting.conversations import make_conversation_columns
from pellucid.reporting.loggers import (
    CompositeLogger,
    JsonlLogger,
    TensorBoardLogger,
    WandbLogger,
    compute_group_metrics,
    format_json_line,
    guard_display,
    have_all_failed,
)
from pellucid.reporting.report import write_report
from pellucid.reporting.run_files import (
    BEST_MODEL_DIR,
    Record,
    describe_best_model,
    find_merged_adapter,
    list_checkpoints,
    read_best_model_step,
    read_evaluations,
    read_records,
)
from pellucid.reporting.warning_signs import WarningSignWatcher, find_accuracy_fall
from pellucid.rewards.grading import GradedTask
from pellucid.training.build import (
    Components,
    build_components,
    check_sampler,
    convert_gguf_model,
    isolate_task_rewards,
    make_environments,
    make_evaluation_sampling,
    make_progress,
    make_template,
    make_training_sampling,
    pick_sampler,
    resolve_machine_settings,
)
from pellucid.training.checkpoint import (
    link_best_model,
    remove_later_best_model,
    remove_old_checkpoints,
    restore_run,
    save_best_model,
    save_checkpoint,
    save_model,
)
from pellucid.training.doctor import profile_steps
from pellucid.training.evaluate import evaluate, make_greedy_sampling, sample_and_grade, sample_held_out_prompts
from pellucid.training.memory import suggest_memory_remedy
from pellucid.training.preflight import (
    check_prompts,
    check_reward_signatures,
    describe_loaded_model,
    print_disclosures,
    refuse_useless_rewards,
    run_preflight_checks,
    show_first_completion,
    show_plan,
    show_signal,
)
from pellucid.training.run_dir import (
    BAD_DATA_FILE,
    SettingChanges,
    add_resume_record,
    check_free_run_dir,
    describe_resume,
    digest_named_files,
    dump_settings,
    hold_run_dir,
    is_first_process,
    record_bad_data,
    remove_logs,
)
from pellucid.training.time_estimate import (
    MEASURED_STEP,
    FirstLook,
    describe_measured_time,
    describe_time_after_first_look,
)
from pellucid.training.token_recorder import record_steps
from pellucid.types import DataError, Evaluation, Group, Logger, UserError, with_split
from pellucid.utils import files, hardware
from pellucid.utils.signals import INTERRUPTED_EXIT_STATUS, StopRequests, collect_stop_requests
from pellucid.utils.text import escape_controls, print_notes

_NO_REWARD = "None, since no reward applies to its rows"
_MIN_PROBE_ANSWERS = 8
"""The number of answers that are graded first, to check that the rewards work."""


def train_run(cfg: Config, run_dir: Path, resume_changes: SettingChanges | None = None, profile: bool = False) -> int:
    """Train to the end, or finish the step in which a stop request arrives. Return the exit status.

    Args:
        cfg: The settings of the run.
        run_dir: The run directory.
        resume_changes: The settings that a resume changes (`find_resume_changes`); None starts a new run.
        profile: Whether the third step is profiled.
    """
    with collect_stop_requests() as stop_requests:
        run = TrainingRun(cfg, run_dir, resume_changes, stop_requests, profile=profile)
        for _ in run:
            pass
    return INTERRUPTED_EXIT_STATUS if run.stopped_step else 0


class TrainingRun:
    """One run. Iterating over it takes the steps.

    Each step is yielded after it was logged, saved and evaluated. Leaving the iteration early, by break or by an
    exception, ends the run as a stop request does: it is saved, the report is written and the lock is released. The
    next iteration resumes it.

    Args:
        cfg: The settings of the run.
        run_dir: The run directory.
        resume_changes: The settings that a resume changes; None starts a new run.
        stop_requests: The stop requests that the caller collects.
        resume_hint: How to resume the run, as the user would type it.
        prepare: Writes files that the settings name, once the run directory is locked.
        profile: Whether the third step is profiled.
    """

    def __init__(
        self,
        cfg: Config,
        run_dir: Path,
        resume_changes: SettingChanges | None,
        stop_requests: StopRequests,
        resume_hint: str = "",
        prepare: Callable[[], None] | None = None,
        profile: bool = False,
    ) -> None:
        self.cfg, self.run_dir, self.resume_changes, self.stop_requests = cfg, run_dir, resume_changes, stop_requests
        self.resume_hint = resume_hint or f"pellucid train --resume {run_dir}"
        self.prepare, self.profile = prepare, profile
        self.policy: Policy | None = None
        """The model that is trained, also after the run has ended; None before it starts."""
        self.stopped_step = 0
        """The step after which a stop request or the caller ended the run; 0 if it was not ended early."""
        self.prompt_tokens = 0
        """The length of the longest of the first prompts, for the memory plan."""
        self._saved_step = 0
        self._signs = WarningSignWatcher()
        self._data_error: DataError | None = None
        """The error in the data that ended the run, if one did."""

    def __iter__(self) -> Generator[StepResult]:
        self.stopped_step, self._saved_step, self._data_error = 0, 0, None
        with ExitStack() as stack:
            with self.stop_requests.interrupt_immediately():
                parts = self._build(stack)
                evaluation = _begin_run(self.cfg, self.run_dir, parts, self.resume_changes, self.prompt_tokens)
            self.resume_changes, self.prepare = self.resume_changes or {}, None
            is_main = parts.runtime.is_main
            log = _open_logs(self.cfg, self.run_dir, parts.state.step) if is_main else CompositeLogger([])
            with closing(log), detect_lost_processes(self.run_dir):
                if evaluation:
                    log.log_evaluation(0, evaluation)
                parts.evaluations = parts.runtime.gather([read_evaluations(self.run_dir) if is_main else {}])[0]
                for result in self._run_until_data_error(parts, log):
                    try:
                        yield result
                    except GeneratorExit:
                        if not _is_last_step(self.cfg, parts):
                            self.stopped_step = parts.state.step
                            self._save_checkpoint(parts)
                        break
                if not self.stopped_step:
                    save_model(self.run_dir, self.cfg, parts)
                    if is_main:
                        self._keep_last_model(parts)
                        remove_old_checkpoints(self.run_dir, self.cfg.checkpoint)
            if is_main:
                print_results(self.run_dir, self.stopped_step, self.resume_hint if self._data_error is None else "")
        if self._data_error is not None:
            raise UserError(
                f"{self._data_error}; saved after step {self.stopped_step}: fix the data, then {self.resume_hint}"
            )
        if _is_out_of_patience(self.cfg.reward.patience, parts):
            raise UserError(
                f"every reward of the last {len(parts.failures)} steps failed, the last with {parts.failures[-1]};"
                " nothing is lost, and reward.patience sets after how many such steps a run ends",
                page="how-to/rewards",
            )

    def _run_until_data_error(self, parts: Components, log: Logger) -> Iterator[StepResult]:
        """Take the steps. If a prompt is unusable, save the run as of the previous step."""
        try:
            yield from self._run_steps(parts, log)
        except DataError as error:
            if not parts.state.step:
                raise
            self.stopped_step, self._data_error = parts.state.step, error
            self._save_checkpoint(parts)
            if parts.runtime.is_main:
                record_bad_data(self.run_dir, str(error))

    def _build(self, stack: ExitStack) -> Components:
        """Lock the run directory and build the components. Both are released with the stack."""
        hardware.keep_freed_memory()
        if self.cfg.policy.deterministic:
            stack.enter_context(hardware.use_deterministic_algorithms())
        self.policy = None  # frees the policy of an earlier iteration: memory may not suffice for two
        self.cfg = resolve_machine_settings(resolve_config(self.cfg))
        convert_gguf_model(self.cfg)
        if self.prepare is None:
            self._check_preflight()
        if is_first_process():
            stack.enter_context(hold_run_dir(self.run_dir))
            if self.resume_changes is None:
                check_free_run_dir(self.run_dir)  # before `prepare` writes rows over those of another run
        if self.prepare is not None:
            prepare, device = self.prepare, hardware.pick_device(self.cfg.policy.device)
            broadcast_decision(lambda: prepare() or "", device, self.cfg.runtime.timeout)  # the others wait
            self._check_preflight()
        set_seed(self.cfg.algorithm.seed)  # the initial weights of adapters are random
        parts = build_components(self.cfg, self.run_dir / "rewards.log")
        stack.callback(parts.close)
        parts.runtime.out_of_memory_hint = suggest_memory_remedy(
            describe_loaded_model(parts.policy, self.prompt_tokens), self.cfg, parts.runtime.world_size
        )
        self.policy = parts.policy
        return parts

    def _check_preflight(self) -> None:
        """Run the preflight checks. If the data ends a resumed run, allow the next resume to change the data."""
        try:
            self.cfg, self.prompt_tokens = run_preflight_checks(self.cfg, self.run_dir)
        except DataError as error:
            if self.resume_changes is not None and is_first_process():
                record_bad_data(self.run_dir, str(error))
            raise

    def _run_steps(self, parts: Components, log: Logger) -> Iterator[StepResult]:
        """Take the steps; log, save and evaluate. Set `stopped_step` if a stop request ends the run."""
        cfg = self.cfg
        watcher, heap, is_new = InertSettingWatcher(cfg.algorithm), hardware.HeapTrimmer(), parts.state.step == 0
        self._signs = _watch_logged_steps(self.run_dir, parts)
        if not is_new and _is_evaluation_missing(cfg, parts) and not self._evaluate(parts, log):
            self.stopped_step = parts.state.step
            return
        # If only the model was left to save when the run was stopped or killed, there is no step to take.
        if is_out_of_time(cfg.algorithm, parts) or has_stopped_improving(cfg, parts):
            return
        self._keep_best_model(parts)
        for step, measured, groups in self._make_step_iterator(parts):
            parts.elapsed_seconds += measured["time/step"]
            metrics = {
                **compute_group_metrics(groups, cfg.algorithm.min_reward_range),
                **measured,
                "memory/peak_gb": hardware.get_peak_memory_gb(parts.policy.device),
                "memory/resident_gb": hardware.get_resident_gb(),
            }
            if "reward/kl" in metrics:
                metrics["reward/after_kl"] = metrics["reward/mean"] + metrics["reward/kl"]
            log.log(step, metrics, groups)
            heap.trim_after_step()
            if parts.runtime.is_main and is_new:
                print_notes(*watcher.observe_step(metrics))
            if parts.runtime.is_main:
                print_notes(*(sign.describe() for sign in self._signs.observe_step(step, metrics)))
            if parts.runtime.is_main and step == MEASURED_STEP:
                _print_measured_time(cfg, self.run_dir, parts, self.prompt_tokens)
            is_last, is_due = _is_last_step(cfg, parts), _is_evaluation_due(cfg, parts)
            error = find_first_error(groups) or _NO_REWARD
            parts.failures = [*parts.failures, error] if have_all_failed(groups) else []
            stop = parts.runtime.any_rank(bool(self.stop_requests)) or _is_out_of_patience(cfg.reward.patience, parts)
            # The checkpoint comes before the evaluation: a supervisor waits only seconds between SIGTERM and SIGKILL.
            if stop or (cfg.checkpoint.every and (is_last or step % cfg.checkpoint.every == 0)):
                self._save_checkpoint(parts)
            if is_due and not stop and not self._evaluate(parts, log):
                stop = True
                self._save_checkpoint(parts)
            if not stop and not is_last and has_stopped_improving(cfg, parts):
                is_last = True
                self._end_without_improvement(parts)
            is_stopped = stop and (is_due or not is_last)
            self.stopped_step = step if is_stopped else 0
            yield StepResult(step, metrics, groups)
            if is_stopped or is_last:
                return

    def _make_step_iterator(self, parts: Components) -> Iterator[StepResult]:
        cfg = self.cfg
        train = async_grpo.train_async if cfg.sampler.ahead else grpo.train
        steps = train(
            *(parts.task, parts.sampler, parts.policy, parts.runtime),
            *(cfg.algorithm, parts.reference, parts.state, make_training_sampling(cfg)),
        )
        steps = record_steps(end_forked_copies(steps), cfg, self.run_dir, parts)
        if self.profile and parts.runtime.is_main:
            return profile_steps(steps, self.run_dir / "profile.txt", parts.policy.dtype)
        return steps

    def _save_checkpoint(self, parts: Components) -> None:
        """Save the run, unless this step is saved already."""
        if self._saved_step != parts.state.step:
            start = perf_counter()
            save_checkpoint(self.run_dir, self.cfg, parts)
            parts.checkpoint_seconds, self._saved_step = perf_counter() - start, parts.state.step

    def _evaluate(self, parts: Components, log: Logger) -> bool:
        """Evaluate the policy. Return False if a stop request arrived.

        A single process interrupts the evaluation, and the resumed run repeats it. Several processes, which wait for
        one another, finish it.
        """
        is_alone = parts.runtime.world_size == 1
        try:
            with self.stop_requests.interrupt_immediately() if is_alone else nullcontext():
                evaluation = evaluate_policy(self.cfg, parts)[0]
        except KeyboardInterrupt:
            return False
        step = parts.state.step
        log.log_evaluation(step, evaluation)
        parts.evaluations[step] = evaluation
        if parts.runtime.is_main:
            print_notes(*(sign.describe() for sign in self._signs.observe_evaluation(step, evaluation)))
        self._keep_best_model(parts)
        return not parts.runtime.any_rank(bool(self.stop_requests))

    def _keep_best_model(self, parts: Components) -> None:
        """Save the policy as `model-best/` if its evaluation is the best and it is not saved. All processes call this.

        The model of the last step is left to `_keep_last_model`. If saving fails, as on a full disk, training goes on.
        """
        best, runtime = self._find_best_here(parts), parts.runtime
        if best is None or _is_last_step(self.cfg, parts):
            return
        if runtime.any_rank(runtime.is_main and read_best_model_step(self.run_dir) == best.step):
            return
        try:
            save_best_model(self.run_dir, self.cfg, parts, best)
        except (OSError, UserError) as error:
            if runtime.is_main:
                print_notes(f"{self.run_dir / BEST_MODEL_DIR} could not be saved ({error}); training goes on")

    def _keep_last_model(self, parts: Components) -> None:
        """Make `model-best/` of `model/` if the last evaluation is the best."""
        if best := self._find_best_here(parts):
            try:
                link_best_model(self.run_dir, best)
            except OSError as error:
                print_notes(
                    f"{self.run_dir / BEST_MODEL_DIR} could not be saved ({error}): {self.run_dir / 'model'} is it"
                )

    def _find_best_here(self, parts: Components) -> BestEvaluation | None:
        """Return the best evaluation if it is that of this step, and its model is to be kept."""
        best = find_best_evaluation(parts.evaluations)
        is_here = best is not None and 0 < best.step == parts.state.step
        return best if is_here and self.cfg.checkpoint.keep_best else None

    def _end_without_improvement(self, parts: Components) -> None:
        """Save the run before evaluate.patience ends it, and print why."""
        if self.cfg.checkpoint.every:
            self._save_checkpoint(parts)
        if parts.runtime.is_main:
            step, steps = parts.state.step, self.cfg.algorithm.steps
            evaluations = format_count(self.cfg.evaluate.patience, "evaluation")
            print_notes(f"the run ends after step {step} of {steps}: no new best in {evaluations} (evaluate.patience)")


def end_forked_copies(steps: Iterator[StepResult]) -> Iterator[StepResult]:
    """Yield the steps. If user code forked this process during a step, end the copy.

    The copy would write into the same run directory, and end the worker processes of this process.
    """
    owner = os.getpid()
    while True:
        try:
            result = next(steps, None)
        except BaseException as error:
            files.exit_if_forked(owner, error)
            raise
        files.exit_if_forked(owner)
        if result is None:
            return
        yield result


def _begin_run(
    cfg: Config, run_dir: Path, parts: Components, resume_changes: SettingChanges | None, prompt_tokens: int
) -> Evaluation | None:
    """Restore the run if it is resumed, and write config.json. Return the evaluation before step 1."""
    notes = restore_run(run_dir, parts) if resume_changes is not None and list_checkpoints(run_dir) else []
    if parts.runtime.is_main:
        start_run_dir(run_dir, cfg, parts.state.step, resume_changes)
        print_notes(*notes)
        with guard_display("the settings"):
            model, fallback_reason = (
                describe_loaded_model(parts.policy, prompt_tokens),
                parts.policy.find_fallback_reason(),
            )
            show_plan(cfg, model, fallback_reason, parts.runtime.world_size, run_dir)
    # A barrier: rewards of other processes may write into the run directory once the main process has checked it.
    parts.runtime.any_rank(False)
    if parts.state.step == 0:
        return _evaluate_before_training(cfg, parts, prompt_tokens)
    if parts.runtime.is_main:
        _print_measured_time(cfg, run_dir, parts, prompt_tokens)
    return None


def _print_measured_time(cfg: Config, run_dir: Path, parts: Components, prompt_tokens: int) -> None:
    """Print how long the rest of the run will take, from the recorded steps."""
    with guard_display("the time that is left"):
        model, steps = describe_loaded_model(parts.policy, prompt_tokens), list(read_records(run_dir / "metrics.jsonl"))
        text = describe_measured_time(
            *(cfg, model, steps, parts.elapsed_seconds, len(parts.test_prompts)),
            *(parts.evaluation_seconds, parts.checkpoint_seconds, parts.runtime.world_size),
        )
        if text:
            print(f"time      {text}", flush=True)


def _is_out_of_patience(patience: int, parts: Components) -> bool:
    """Whether the run must end because too many steps in a row had no reward. All processes agree."""
    return 0 < patience <= len(parts.failures)


def _is_last_step(cfg: Config, parts: Components) -> bool:
    is_done = parts.state.step == cfg.algorithm.steps or has_stopped_improving(cfg, parts)
    return is_done or is_out_of_time(cfg.algorithm, parts)


def has_stopped_improving(cfg: Config, parts: Components) -> bool:
    """Whether the last evaluate.patience evaluations were no better than one before. All processes agree."""
    return 0 < cfg.evaluate.patience <= count_evaluations_since_best(parts.evaluations)


def is_out_of_time(cfg: GRPOConfig, parts: Components) -> bool:
    """Whether algorithm.minutes are used up. All processes agree."""
    return parts.runtime.any_rank(0 < cfg.minutes * 60 <= parts.elapsed_seconds)


# ---------------------------------------------------------------- evaluation


def _is_evaluation_due(cfg: Config, parts: Components) -> bool:
    """Whether the policy is evaluated after this step."""
    every = cfg.evaluate.every
    return every > 0 and (parts.state.step % every == 0 or _is_last_step(cfg, parts))


def _is_evaluation_missing(cfg: Config, parts: Components) -> bool:
    """Whether the last step is due for evaluation but was not evaluated, because the run was stopped or killed."""
    return _is_evaluation_due(cfg, parts) and parts.state.step not in parts.evaluations


def _watch_logged_steps(run_dir: Path, parts: Components) -> WarningSignWatcher:
    """Return a watcher that has seen the steps and evaluations before a resume, whose signs are printed already."""
    signs = WarningSignWatcher()
    for row in read_records(run_dir / "metrics.jsonl"):
        signs.observe_step(row["step"], row)
    for step, evaluation in parts.evaluations.items():
        signs.observe_evaluation(step, evaluation)
    return signs


def evaluate_policy(cfg: Config, parts: Components) -> tuple[Evaluation, list[Group]]:
    """Return the evaluation of the policy, and the graded samples."""
    start = perf_counter()
    parts.sampler.sync(parts.policy, parts.state.step)
    task, prompts, sampling = parts.test_task, parts.test_prompts, make_evaluation_sampling(cfg)
    k, progress = cfg.evaluate.k, make_progress(cfg.algorithm, parts.state.step)
    evaluation, groups, _ = evaluate(cfg.task_name, task, prompts, parts.sampler, sampling, k, parts.runtime, progress)
    parts.evaluation_seconds = perf_counter() - start
    return evaluation, groups


def _evaluate_before_training(cfg: Config, parts: Components, prompt_tokens: int) -> Evaluation | None:
    """Evaluate the policy before step 1, and show one exchange, the predicted share of zero-variance groups, and how
    long the run will take.

    Raise NotBegunError if no reward applies, or all fail.
    """
    parts.sampler.sync(parts.policy, parts.state.step)
    _try_rewards(cfg, parts)
    evaluation, groups = evaluate_policy(cfg, parts) if cfg.evaluate.every else (None, [])
    sampling, progress = make_training_sampling(cfg), make_progress(cfg.algorithm, 0)
    is_same_sampling = replace(make_evaluation_sampling(cfg), n=sampling.n) == sampling
    start, sampling_seconds = perf_counter(), 0.0
    if not groups or len(groups[0].completions) < sampling.n or not is_same_sampling:
        prompts = parts.runtime.shard(parts.task.sample(0, cfg.algorithm.prompts_per_step))
        groups = parts.runtime.gather(sample_and_grade(parts.task, parts.sampler, prompts, sampling, progress))
        sampling_seconds = perf_counter() - start
    refuse_useless_rewards(groups)
    if parts.runtime.is_main:
        with guard_display("the first completion"):
            show_first_completion(parts.policy, groups[0])
            show_signal(groups, cfg, parts.policy.eos_ids)
            look = FirstLook(groups, len(parts.test_prompts), parts.evaluation_seconds, sampling_seconds)
            model = describe_loaded_model(parts.policy, prompt_tokens)
            text = describe_time_after_first_look(cfg, model, look, parts.runtime.world_size)
            print(f"time      {text}", flush=True)
    return evaluation


def _try_rewards(cfg: Config, parts: Components) -> None:
    """Raise NotBegunError if none of _MIN_PROBE_ANSWERS answers has a reward.

    Without this, an evaluation whose rewards all hang would take hours. The prompts are held-out ones, then those of
    the first step. Each prompt gets one greedy answer, or several samples if there are too few prompts.
    """
    if not isinstance(parts.task, GradedTask):
        return
    prompts = list(parts.test_prompts[:_MIN_PROBE_ANSWERS])
    if len(prompts) < _MIN_PROBE_ANSWERS:
        prompts = [*prompts, *parts.task.sample(0, cfg.algorithm.prompts_per_step)][:_MIN_PROBE_ANSWERS]
    n, sampling = -(-_MIN_PROBE_ANSWERS // len(prompts)), make_training_sampling(cfg)
    sampling = make_greedy_sampling(sampling) if n == 1 else replace(sampling, n=n)
    own_prompts, progress = parts.runtime.shard(prompts), make_progress(cfg.algorithm, 0)
    groups = sample_and_grade(parts.task, parts.sampler, own_prompts, sampling, progress)
    refuse_useless_rewards(parts.runtime.gather(groups), is_probe=True)


# ---------------------------------------------------------------- files of the run directory


def start_run_dir(run_dir: Path, cfg: Config, step: int, resume_changes: SettingChanges | None) -> None:
    """Write config.json, and remove the logs of a run that has no checkpoint."""
    if resume_changes is None:
        check_free_run_dir(run_dir)
    if step == 0:
        remove_logs(run_dir)
    remove_later_best_model(run_dir, step)
    settings, facts = dump_settings(cfg), collect_provenance()
    if resume_changes is not None:
        facts = add_resume_record(run_dir, step, resume_changes, facts)
        (run_dir / BAD_DATA_FILE).unlink(missing_ok=True)
        print(escape_controls(describe_resume(run_dir, step, facts)), flush=True)
    files.write_file_atomically(
        run_dir / "config.json",
        json.dumps({**settings, **facts, "digests": digest_named_files(settings)}, indent=2) + "\n",
    )


def _open_logs(cfg: Config, run_dir: Path, first_step: int) -> CompositeLogger:
    """Open the loggers of a run: its files, the dashboards that the settings name, and the screen."""
    if is_in_notebook():
        screen: Logger = NotebookLogger(cfg.algorithm.steps, list(read_records(run_dir / "metrics.jsonl")))
    else:
        screen = make_screen_logger(cfg.algorithm.steps, first_step)
    for step, evaluation in read_evaluations(run_dir).items():
        screen.log_evaluation(step, evaluation)
    dashboards: list[Logger] = []
    if cfg.log.tensorboard:
        dashboards.append(TensorBoardLogger(run_dir / "tensorboard", first_step))
    if cfg.log.wandb != "off":
        dashboards.append(WandbLogger(run_dir, cfg.log.project, cfg.log.wandb, dump_config(cfg)))
    return CompositeLogger([JsonlLogger(run_dir, cfg.log.rollouts)], [*dashboards, screen])


def print_results(run_dir: Path, stopped_step: int, resume_hint: str) -> None:
    """Write the report, and print `resume_hint` for a stopped run or the results of a finished one."""
    if stopped_step and resume_hint:
        print(escape_controls(f"stopped after step {stopped_step}, nothing is lost; resume with: {resume_hint}"))
    outputs = {"model": "model"}
    with guard_display("report.html"):
        write_report(run_dir)
        outputs["report"] = "report.html"
    if stopped_step:
        return
    with guard_display("the table"):
        evaluations = list(read_evaluations(run_dir).values())
        if evaluations:
            rich.print(make_comparison_table(evaluations[0], evaluations[-1]))
    for label, name in {**outputs, "metrics": "metrics.jsonl"}.items():
        print(escape_controls(f"{label:8} {run_dir / name}"))
    with guard_display("the best model"):
        _print_best_model(run_dir)


def _print_best_model(run_dir: Path) -> None:
    """Print the best evaluation and where its model is; recommend that model if the last one is worse."""
    evaluations = read_evaluations(run_dir)
    if best := describe_best_model(run_dir):
        print(escape_controls(f"{'best':8} {best}"))
    if fall := find_accuracy_fall(evaluations):
        step = int(fall.values["best_step"])
        kept = run_dir / BEST_MODEL_DIR if step and read_best_model_step(run_dir) == step else "the best one"
        print_notes(f"{run_dir / 'model'} is worse than the best, by more than chance: use {kept}")


def collect_provenance() -> Record:
    """Return the versions, the git revision and the hardware of a run, for config.json."""
    return {"versions": collect_versions(), "git": get_git_revision(), "hardware": hardware.describe_hardware()}


def collect_versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate")}
    return {"pellucid": __version__, "python": platform.python_version(), **packages}


def get_git_revision() -> str:
    """Return the git revision of the working directory; empty outside a repository."""
    git = shutil.which("git")
    command = [git, "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() if git else ""


# ---------------------------------------------------------------- pellucid eval


def evaluate_model(cfg: Config, model: str, access: ModelAccess, show: int, output: Path | None = None) -> int:
    """Evaluate a model on the held-out prompts of a task, and print the accuracy. Return the exit status, 0.

    Args:
        cfg: The settings of task, rewards, sampler and evaluation.
        model: The name or the folder of the model.
        access: How the model is accessed.
        show: How many greedy answers are printed.
        output: A file for a record of every answer.

    Raises:
        UserError: The settings, the task or the model cannot be used.
        NotBegunError: All rewards failed, or none applies.
    """
    hardware.keep_freed_memory()
    device = hardware.pick_device(cfg.policy.device)
    dtype = hardware.pick_dtype(cfg.policy.dtype, device)
    if os.path.isdir(model):
        access = access._replace(revision="")  # it names a revision of the base model, not of this one
    print_disclosures(cfg, access.format_warning(model))
    check_sampler(cfg)
    task = with_split(cfg.task, "test")
    check_reward_signatures(cfg, sample_held_out_prompts(task, cfg.evaluate.n))
    policy = load_frozen_policy(
        model,
        device,
        dtype,
        cfg.sampler.temperature,
        cfg.policy.engine,
        make_template(cfg.policy),
        access,
        merged_adapter=None if dtype == torch.float32 else find_merged_adapter(model),
    )
    check_prompts(cfg, policy.tokenizer, policy.context_length, policy.vocabulary_size, ("test",))
    prompts = sample_held_out_prompts(task, cfg.evaluate.n)  # without the rows that `check_prompts` marked as bad
    with ExitStack() as stack:
        task = isolate_task_rewards(task, cfg.reward)
        if isinstance(task, GradedTask):
            stack.callback(task.close)
        if environments := make_environments(cfg, policy):
            stack.callback(environments.close)
        sampler, sampling = pick_sampler(cfg, policy, environments), make_evaluation_sampling(cfg)
        sampler.sync(policy, 0)
        k, progress = cfg.evaluate.k, make_progress(cfg.algorithm, cfg.algorithm.steps)
        evaluation, groups, greedy_groups = evaluate(
            cfg.task_name, task, prompts, sampler, sampling, k, SINGLE_PROCESS, progress
        )
    verdicts = evaluation.has_verdicts
    for group in greedy_groups[:show]:
        rich.print(make_verdict_table(group, verdicts))
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        greedy_answers = make_answer_records(greedy_groups, "greedy", verdicts)
        answers = [*greedy_answers, *make_answer_records(groups, "sample", verdicts)]
        files.write_file_atomically(output, "".join(map(format_json_line, answers)))
        print(escape_controls(f"answers {output}"))
    refuse_useless_rewards([*greedy_groups, *groups])
    rich.print(make_evaluation_table(escape_controls(model), evaluation))
    return 0


def make_answer_records(groups: Sequence[Group], sampling_kind: str, verdicts: bool) -> Iterator[dict[str, Any]]:
    """Yield a record of each answer: the question, the answer or the conversation, and the reward.

    `answer` is the last turn of a conversation. `reward` is null if it failed. `correct` is null if the reward failed
    or the rewards are no verdicts.
    """
    for group in groups:
        prompt = group.prompt
        for i, (completion, reward) in enumerate(zip(group.completions, group.rewards, strict=True)):
            yield {
                "drawn": sampling_kind,
                "sample": i,
                "question": prompt.question,
                "gold": " or ".join(prompt.gold_answers),
                "answer": completion.text,
                **make_conversation_columns(completion),
                "finished": completion.finished,
                "tokens": completion.length,
                "reward": None if reward.failed else float(reward.value),
                "correct": reward.is_correct if verdicts and not reward.failed else None,
                "parts": {name: float(value) for name, value in reward.parts.items()},
                "error": reward.error,
                **({"extra": dict(reward.extra)} if reward.extra else {}),
            }

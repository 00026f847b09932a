"""One run: settings in, a run folder out."""

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
from typing import Any

import rich
from accelerate.utils import set_seed

from pellucid import __version__, config
from pellucid.algorithm import async_grpo, grpo
from pellucid.algorithm.grpo import StepResult
from pellucid.algorithm.metrics import InertSettingWatcher
from pellucid.config import Config, dump_config
from pellucid.distributed.process_group import broadcast_decision, detect_lost_processes
from pellucid.policy import policy
from pellucid.policy.access import ModelAccess
from pellucid.policy.policy import Policy
from pellucid.reporting import console, loggers
from pellucid.reporting.console import (
    find_first_error,
    make_comparison_table,
    make_evaluation_table,
    make_screen_logger,
    make_verdict_table,
)
from pellucid.reporting.conversations import make_conversation_columns
from pellucid.reporting.loggers import compute_group_metrics, format_json_line, have_all_failed
from pellucid.reporting.report import write_report
from pellucid.reporting.run_files import list_checkpoints, read_records
from pellucid.rewards.grading import GradedTask
from pellucid.training import checkpoint, memory, preflight
from pellucid.training import run_dir as run_dirs
from pellucid.training.build import (
    Components,
    build_components,
    isolate_task_rewards,
    make_environments,
    make_evaluation_sampling,
    make_progress,
    make_template,
    make_training_sampling,
    pick_sampler,
    resolve_machine_settings,
)
from pellucid.training.checkpoint import restore_run, save_checkpoint, save_model
from pellucid.training.doctor import profile_steps
from pellucid.training.evaluate import (
    SingleProcess,
    evaluate,
    make_greedy_sampling,
    sample_and_grade,
    sample_held_out_prompts,
)
from pellucid.training.run_dir import SettingChanges
from pellucid.training.token_recorder import record_steps
from pellucid.types import DataError, Evaluation, Group, Logger, UserError, with_split
from pellucid.utils import files, hardware
from pellucid.utils.files import exit_if_forked
from pellucid.utils.signals import INTERRUPTED_EXIT_STATUS, StopRequests, collect_stop_requests
from pellucid.utils.text import escape_controls

NO_REWARD = "None: no reward applies to its rows"
MIN_PROBE_ANSWERS = 8
"""How many answers, at least, are graded before all others, to see that rewards work."""


def train_run(cfg: Config, run_dir: Path, resume_changes: SettingChanges | None = None, profile: bool = False) -> int:
    """Train to the end, or to the step in which a request to stop came. Return the exit status.

    resumed: the settings that a resume changes (`run_dirs.find_resume_changes`); None begins a new run.
    """
    with collect_stop_requests() as requests:
        course = TrainingRun(cfg, run_dir, resume_changes, requests, profile=profile)
        for _ in course:
            pass
    return INTERRUPTED_EXIT_STATUS if course.stopped_step else 0


class TrainingRun:
    """The steps of one run: to iterate over it is to take them. The command does nothing else, nor does the library.

    Each step is yielded when it has been logged, saved and evaluated. Who leaves the iteration before its end, by break
    or by an exception, ends the run as a request to stop does: saved, with its report, its folder free. Iterated over
    again, the run goes on from there, as it does in another process.

    requests: where the caller notes requests to stop. again: how to go on, as the user would type it. prepare: writes
    what settings name and is not there yet, in the folder that is then held.
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
        self.resume_hint, self.prepare, self.profile = (
            resume_hint or f"pellucid train --resume {run_dir}",
            prepare,
            profile,
        )
        self.policy: Policy | None = None
        """The model that is trained, also when the run has ended; None before its begin."""
        self.stopped_step = 0
        """The step that a request to stop ended, or after which the caller left; 0 where there is none."""
        self._saved_step = 0
        self._data_error: DataError | None = None
        """Why the data has ended the run; None where it has not."""

    def __iter__(self) -> Generator[StepResult]:
        self.stopped_step, self._data_error = 0, None
        with ExitStack() as until_the_end:
            with self.stop_requests.interrupt_immediately():
                parts = self._build(until_the_end)
                evaluation = begin_run(self.cfg, self.run_dir, parts, self.resume_changes)
            self.resume_changes, self.prepare = self.resume_changes or {}, None
            log = (
                open_logs(self.cfg, self.run_dir, parts.state.step)
                if parts.runtime.is_main
                else loggers.CompositeLogger([])
            )
            with closing(log), detect_lost_processes(self.run_dir):
                if evaluation:
                    log.log_evaluation(0, evaluation)
                for result in self._run_until_data_error(parts, log):
                    try:
                        yield result
                    except GeneratorExit:
                        self._stop_early(parts)
                        break
                if not self.stopped_step:
                    save_model(self.run_dir, self.cfg, parts)
                    if parts.runtime.is_main:
                        checkpoint.remove_old_checkpoints(self.run_dir, self.cfg.checkpoint)
            if parts.runtime.is_main:
                print_results(self.run_dir, self.stopped_step, self.resume_hint if self._data_error is None else "")
        if self._data_error is not None:
            raise UserError(
                f"{self._data_error}; saved after step {self.stopped_step}: mend the data, then {self.resume_hint}"
            )
        if is_out_of_patience(self.cfg, parts):
            raise UserError(
                f"every reward of the last {len(parts.failures)} steps failed, the last with {parts.failures[-1]};"
                " nothing is lost, and reward.patience is how many such steps a run bears with"
            )

    def _run_until_data_error(self, parts: Components, log: Logger) -> Iterator[StepResult]:
        """Take the steps until a prompt cannot be asked; the run is then saved as it is after the step before."""
        try:
            yield from self._run_steps(parts, log)
        except DataError as error:
            if not parts.state.step:
                raise
            self.stopped_step, self._data_error = parts.state.step, error
            if self._saved_step != self.stopped_step:
                self._save_checkpoint(parts)
            if parts.runtime.is_main:
                run_dirs.record_bad_data(self.run_dir, str(error))

    def _build(self, until_the_end: ExitStack) -> Components:
        """The folder is held and what the settings describe is built, until the end."""
        hardware.keep_freed_memory()
        if self.cfg.policy.deterministic:
            until_the_end.enter_context(hardware.use_deterministic_algorithms())
        self.policy = None  # that of an earlier iteration: two would not fit everywhere
        self.cfg = resolve_machine_settings(config.resolve_config(self.cfg))
        if self.prepare is None:
            self._check_preflight()
        if run_dirs.is_first_process():
            until_the_end.enter_context(run_dirs.hold_run_dir(self.run_dir))
            if self.resume_changes is None:
                run_dirs.check_free_run_dir(self.run_dir)  # before rows are written over those of another run
        if self.prepare is not None:
            run_in_first_process(self.prepare, self.cfg)
            self._check_preflight()
        set_seed(self.cfg.algorithm.seed)  # adapters start at random
        parts = build_components(self.cfg, self.run_dir / "rewards.log")
        until_the_end.callback(parts.close)
        parts.runtime.out_of_memory_hint = memory.suggest_memory_remedy(
            preflight.describe_loaded_model(parts.policy), self.cfg, parts.runtime.world_size
        )
        self.policy = parts.policy
        return parts

    def _check_preflight(self) -> None:
        """Check what would otherwise fail later. A run that was to go on, and cannot for its data, may change it."""
        try:
            preflight.run_preflight_checks(self.cfg, self.run_dir)
        except DataError as error:
            if self.resume_changes is not None and run_dirs.is_first_process():
                run_dirs.record_bad_data(self.run_dir, str(error))
            raise

    def _run_steps(self, parts: Components, log: Logger) -> Iterator[StepResult]:
        """Take the steps; log, save and evaluate. Notes in `stopped` the step that a request to stop ended."""
        cfg = self.cfg
        watch, heap, fresh = InertSettingWatcher(cfg.algorithm), hardware.HeapTrimmer(), parts.state.step == 0
        if (
            not fresh
            and is_evaluation_missing(cfg, self.run_dir, parts)
            and not evaluate_and_log(cfg, parts, log, self.stop_requests)
        ):
            self.stopped_step = parts.state.step
            return
        if is_out_of_time(cfg, parts):  # stopped or killed when all was saved but the model
            return
        for step, measured, groups in self._make_step_iterator(parts):
            parts.elapsed_seconds += measured["time/step"]
            metrics = {
                **compute_group_metrics(groups, cfg.algorithm.min_reward_range),
                **measured,
                **measure_memory(parts),
            }
            if "reward/kl" in metrics:
                metrics["reward/after_kl"] = metrics["reward/mean"] + metrics["reward/kl"]
            log.log(step, metrics, groups)
            heap.trim_after_step()
            for note in watch.observe_step(metrics) if parts.runtime.is_main and fresh else []:
                print(escape_controls(f"! {note}"), flush=True)
            last, due = is_last_step(cfg, parts), is_evaluation_due(cfg, parts)
            saving = cfg.checkpoint.every > 0 and (last or step % cfg.checkpoint.every == 0)
            # A supervisor waits seconds between its request and its kill: first what must not be lost.
            parts.failures = [*parts.failures, find_first_error(groups) or NO_REWARD] if have_all_failed(groups) else []
            stop = parts.runtime.any_rank(bool(self.stop_requests)) or is_out_of_patience(cfg, parts)
            if saving or stop:
                self._save_checkpoint(parts)
            if due and not stop and not evaluate_and_log(cfg, parts, log, self.stop_requests):
                stop = True
                if not saving:
                    self._save_checkpoint(parts)
            ends = stop and (due or not last)
            self.stopped_step = step if ends else 0
            yield StepResult(step, metrics, groups)
            if ends or last:
                return

    def _make_step_iterator(self, parts: Components) -> Iterator[StepResult]:
        cfg = self.cfg
        objects = (parts.task, parts.sampler, parts.policy, parts.runtime)
        facts = (cfg.algorithm, parts.reference, parts.state, make_training_sampling(cfg))
        steps = end_forked_copies((async_grpo.train_async if cfg.sampler.ahead else grpo.train)(*objects, *facts))
        steps = record_steps(steps, cfg, self.run_dir, parts)
        if not (self.profile and parts.runtime.is_main):
            return steps
        return profile_steps(steps, self.run_dir / "profile.txt", parts.policy.dtype)

    def _stop_early(self, parts: Components) -> None:
        """The caller takes no more steps. After the last one the run is as finished as if they had asked for more."""
        if not is_last_step(self.cfg, parts):
            self.stopped_step = parts.state.step
            if self._saved_step != self.stopped_step:
                self._save_checkpoint(parts)

    def _save_checkpoint(self, parts: Components) -> None:
        save_checkpoint(self.run_dir, self.cfg, parts)
        self._saved_step = parts.state.step


def end_forked_copies(steps: Iterator[StepResult]) -> Iterator[StepResult]:
    """Yield the steps of this process. A copy of it that code of the user's has forked in a step ends instead.

    It would write into the run of its owner, and end the processes that this one has started.
    """
    owner = os.getpid()
    while True:
        try:
            result = next(steps, None)
        except BaseException as error:
            exit_if_forked(owner, error)
            raise
        exit_if_forked(owner)
        if result is None:
            return
        yield result


def begin_run(
    cfg: Config, run_dir: Path, parts: Components, resume_changes: SettingChanges | None
) -> Evaluation | None:
    """Bring the folder and all parts to the state before the next step. Return the evaluation before step 1."""
    notes = restore_run(run_dir, parts) if resume_changes is not None and list_checkpoints(run_dir) else []
    if parts.runtime.is_main:
        start_run_dir(run_dir, cfg, parts.state.step, resume_changes)
        for note in notes:
            print(escape_controls(f"! {note}"), flush=True)
        with loggers.guard_display("the settings"):
            preflight.show_loaded_plan(cfg, parts.policy, parts.runtime.world_size, run_dir)
    parts.runtime.any_rank(False)  # no process writes there, as rewards do, before it is known to be free
    return evaluate_before_training(cfg, parts) if parts.state.step == 0 else None


def run_in_first_process(action: Callable[[], None], cfg: Config) -> None:
    """Act in the first process, while the others wait."""

    def acted() -> str:
        action()
        return ""

    broadcast_decision(acted, hardware.pick_device(cfg.policy.device), cfg.runtime.timeout)


def measure_memory(parts: Components) -> dict[str, float]:
    """Memory of this process in GB: the peak, on the GPU where there is one, and the resident size."""
    return {"memory/peak_gb": parts.runtime.get_peak_memory_gb(), "memory/resident_gb": hardware.get_resident_gb()}


def is_out_of_patience(cfg: Config, parts: Components) -> bool:
    """Whether the run must end as too many steps in a row had no reward. The same for all processes."""
    return 0 < cfg.reward.patience <= len(parts.failures)


def is_last_step(cfg: Config, parts: Components) -> bool:
    return parts.state.step == cfg.algorithm.steps or is_out_of_time(cfg, parts)


def is_out_of_time(cfg: Config, parts: Components) -> bool:
    """Whether algorithm.minutes are used up. The same for all processes."""
    return parts.runtime.any_rank(0 < cfg.algorithm.minutes * 60 <= parts.elapsed_seconds)


# ---------------------------------------------------------------- evaluation


def is_evaluation_due(cfg: Config, parts: Components) -> bool:
    """Whether the policy is evaluated after this step."""
    every = cfg.evaluate.every
    return every > 0 and (parts.state.step % every == 0 or is_last_step(cfg, parts))


def is_evaluation_missing(cfg: Config, run_dir: Path, parts: Components) -> bool:
    """Whether the evaluation of the last step is missing, as after a stop or a kill between the two."""
    there = parts.runtime.is_main and parts.state.step in loggers.read_evaluations(run_dir)
    return is_evaluation_due(cfg, parts) and not parts.runtime.any_rank(there)


def evaluate_and_log(cfg: Config, parts: Components, log: Logger, stop_requests: StopRequests) -> bool:
    """Evaluate the policy. False where a request to stop came: the resumed run then makes the evaluation.

    Several processes wait for one another: they end it first.
    """
    try:
        with stop_requests.interrupt_immediately() if parts.runtime.world_size == 1 else nullcontext():
            evaluation = evaluate_policy(cfg, parts)[0]
    except KeyboardInterrupt:
        return False
    log.log_evaluation(parts.state.step, evaluation)
    return not parts.runtime.any_rank(bool(stop_requests))


def evaluate_policy(cfg: Config, parts: Components) -> tuple[Evaluation, list[Group]]:
    """The evaluation of the policy, and the graded samples."""
    parts.evaluation_sampler.sync(parts.policy, parts.state.step)
    task, prompts, sampling = parts.test_task, parts.test_prompts, make_evaluation_sampling(cfg)
    k, progress = cfg.evaluate.k, make_progress(cfg, parts.state.step)
    evaluation, groups, _ = evaluate(
        cfg.task_name, task, prompts, parts.evaluation_sampler, sampling, k, parts.runtime, progress
    )
    return evaluation, groups


def evaluate_before_training(cfg: Config, parts: Components) -> Evaluation | None:
    """Before step 1: held-out accuracy, one real exchange, and how many groups are going to teach anything."""
    parts.sampler.sync(parts.policy, parts.state.step)
    try_rewards(cfg, parts)
    evaluation, groups = evaluate_policy(cfg, parts) if cfg.evaluate.every else (None, [])
    sampling, progress = make_training_sampling(cfg), make_progress(cfg, 0)
    as_trained = replace(make_evaluation_sampling(cfg), n=sampling.n) == sampling
    if not groups or len(groups[0].completions) < sampling.n or not as_trained:
        prompts = parts.runtime.shard(parts.task.sample(0, cfg.algorithm.prompts_per_step))
        groups = parts.runtime.gather(sample_and_grade(parts.task, parts.sampler, prompts, sampling, progress))
    preflight.refuse_failed_rewards(groups)
    preflight.refuse_inapplicable_rewards(groups)
    if parts.runtime.is_main:
        with loggers.guard_display("the first exchange"):
            preflight.show_exchange(parts.policy, groups[0])
            preflight.show_signal(groups, cfg, parts.policy.eos_ids)
    return evaluation


def try_rewards(cfg: Config, parts: Components) -> None:
    """Raise NotBegunError if none of a few answers has a reward. If all hung, a whole look would take hours.

    They are greedy answers to held-out prompts. If there are fewer of these than FEW, prompts of the first step are
    asked too, and each often enough that there are FEW answers: a single one that fails says little.
    """
    if isinstance(parts.task, GradedTask):
        prompts = list(parts.test_prompts[:MIN_PROBE_ANSWERS])
        if len(prompts) < MIN_PROBE_ANSWERS:
            prompts = [*prompts, *parts.task.sample(0, cfg.algorithm.prompts_per_step)][:MIN_PROBE_ANSWERS]
        sampling, progress = make_training_sampling(cfg), make_progress(cfg, 0)
        each = -(-MIN_PROBE_ANSWERS // len(prompts))
        sampling = make_greedy_sampling(sampling) if each == 1 else replace(sampling, n=each)
        few = parts.runtime.shard(prompts)
        answers = sample_and_grade(parts.task, parts.sampler, few, sampling, progress)
        preflight.refuse_failed_rewards(parts.runtime.gather(answers))


# ---------------------------------------------------------------- chronicle
# What a run writes into its folder at its begin, while it goes on, and at its end.


def start_run_dir(run_dir: Path, cfg: Config, step: int, resume_changes: SettingChanges | None) -> None:
    """Write config.json, and remove the logs of a run that came to no checkpoint.

    UserError where the folder holds another run.
    """
    if resume_changes is None:
        run_dirs.check_free_run_dir(run_dir)
    if step == 0:
        run_dirs.remove_logs(run_dir)
    settings, facts = run_dirs.dump_settings(cfg), collect_provenance()
    if resume_changes is not None:
        facts = run_dirs.add_resume_record(run_dir, step, resume_changes, facts)
        run_dirs.get_bad_data_path(run_dir).unlink(missing_ok=True)
        print(escape_controls(run_dirs.describe_resume(run_dir, step, facts)), flush=True)
    files.write_file_atomically(
        run_dir / "config.json",
        json.dumps({**settings, **facts, "digests": run_dirs.digest_named_files(settings)}, indent=2) + "\n",
    )


def open_logs(cfg: Config, run_dir: Path, first_step: int) -> loggers.CompositeLogger:
    screen = choose_screen_logger(cfg.algorithm.steps, first_step, run_dir)
    for step, evaluation in loggers.read_evaluations(run_dir).items():
        screen.log_evaluation(step, evaluation)
    shown: list[Logger] = []
    if cfg.log.tensorboard:
        shown.append(loggers.TensorBoardLogger(run_dir / "tensorboard", first_step))
    if cfg.log.wandb != "off":
        shown.append(loggers.WandbLogger(run_dir, cfg.log.project, cfg.log.wandb, dump_config(cfg)))
    return loggers.CompositeLogger([loggers.JsonlLogger(run_dir, cfg.log.rollouts)], [*shown, screen])


def choose_screen_logger(total_steps: int, first_step: int, run_dir: Path) -> Logger:
    """What a person sees of the run: a picture in a notebook, else what a terminal or a file can hold."""
    if console.is_in_notebook():
        return console.NotebookLogger(total_steps, list(read_records(run_dir / "metrics.jsonl")))
    return make_screen_logger(total_steps, first_step)


def print_results(run_dir: Path, stopped_step: int, resume_hint: str) -> None:
    """Show what a person wants to know about the result, whose failure costs nothing.

    again: how to go on; empty where an error says it.
    """
    if stopped_step and resume_hint:
        print(escape_controls(f"stopped after step {stopped_step}, nothing is lost; go on with: {resume_hint}"))
    shown = {"model": "model", "metrics": "metrics.jsonl"}
    with loggers.guard_display("report.html"):
        write_report(run_dir)
        shown = {"model": "model", "report": "report.html", "metrics": "metrics.jsonl"}
    if stopped_step:
        return
    with loggers.guard_display("the table"):
        evaluations = list(loggers.read_evaluations(run_dir).values())
        if evaluations:
            rich.print(make_comparison_table(evaluations[0], evaluations[-1]))
    for what, name in shown.items():
        print(escape_controls(f"{what:8} {run_dir / name}"))


# ---------------------------------------------------------------- provenance
# Where a run came from: versions, git revision, hardware.


def collect_provenance() -> dict[str, Any]:
    return {"versions": collect_versions(), "git": get_git_revision(), "hardware": hardware.describe_hardware()}


def collect_versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate")}
    return {"pellucid": __version__, "python": platform.python_version(), **packages}


def get_git_revision() -> str:
    """The git revision of the working folder; empty outside a repository."""
    git = shutil.which("git")
    command = [git, "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() if git else ""


# ---------------------------------------------------------------- exam
# `pellucid eval`: what a model answers to held-out questions, without training it.


def evaluate_model(cfg: Config, model: str, access: ModelAccess, show: int, output: Path | None = None) -> int:
    """Print `show` greedy answers to the task's held-out questions, and the accuracy over all.

    output: a file that gets every answer, greedy and sampled.
    """
    hardware.keep_freed_memory()
    device = hardware.pick_device(cfg.policy.device)
    dtype = hardware.pick_dtype(cfg.policy.dtype, device)
    if os.path.isdir(model):
        access = access._replace(revision="")  # it is that of the base which the folder's model was trained from
    for note in filter(None, (access.format_warning(model), *preflight.collect_disclosure_notes(cfg))):
        print(escape_controls(f"! {note}"), flush=True)
    task = with_split(cfg.task, "test")
    prompts = sample_held_out_prompts(task, cfg.evaluate.n)
    preflight.check_reward_signatures(cfg, prompts)
    frozen = policy.load_frozen_policy(
        model, device, dtype, cfg.sampler.temperature, cfg.policy.engine, make_template(cfg), access
    )
    preflight.check_prompts(cfg, frozen.tokenizer, frozen.context_length, frozen.vocabulary_size, ("test",))
    prompts = sample_held_out_prompts(task, cfg.evaluate.n)  # without the bad rows, if these are to be skipped
    task = isolate_task_rewards(task, cfg.reward)
    world = make_environments(cfg, frozen)
    sampler, sampling = pick_sampler(cfg, frozen, world), make_evaluation_sampling(cfg)
    sampler.sync(frozen, 0)
    trained = make_progress(cfg, cfg.algorithm.steps)
    evaluation, groups, best = evaluate(
        cfg.task_name, task, prompts, sampler, sampling, cfg.evaluate.k, SingleProcess(), trained
    )
    if world:
        world.close()
    for group in best[:show]:
        rich.print(make_verdict_table(group, evaluation.has_verdicts))
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        answers = [
            *make_answer_records(best, "greedy", evaluation.has_verdicts),
            *make_answer_records(groups, "sample", evaluation.has_verdicts),
        ]
        files.write_file_atomically(output, "".join(map(format_json_line, answers)))
        print(escape_controls(f"answers {output}"))
    preflight.refuse_failed_rewards([*best, *groups])
    preflight.refuse_inapplicable_rewards([*best, *groups])
    rich.print(make_evaluation_table(escape_controls(model), evaluation))
    return 0


def make_answer_records(groups: Sequence[Group], sampling_kind: str, verdicts: bool) -> Iterator[dict[str, Any]]:
    """A record of each answer, group by group: what was asked and said, and how it was graded.

    Of a conversation all that was said is in it; `answer` is its last turn.

    `correct` is null where the reward failed or rewards are a matter of degree, and `reward` where it failed.
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

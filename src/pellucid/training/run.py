"""One run: settings in, a run folder out."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path

from accelerate.utils import set_seed

from pellucid import config
from pellucid.algorithm import ahead, grpo
from pellucid.algorithm.diagnostics import Watch
from pellucid.algorithm.grpo import StepResult
from pellucid.config import Config
from pellucid.doctor import memory
from pellucid.doctor.profile import profiled
from pellucid.machine import hardware
from pellucid.machine.copies import end_copy
from pellucid.machine.harmless import harmless
from pellucid.machine.interrupts import INTERRUPTED, StopRequests, stop_requests
from pellucid.policy.policy import Policy
from pellucid.protocols import Logger
from pellucid.reporting import loggers
from pellucid.reporting.console import first_error
from pellucid.reporting.metrics import all_failed, describe
from pellucid.reporting.run_folder import checkpoints
from pellucid.rewards.graded import Graded
from pellucid.runtimes.processes import decided, needing_others
from pellucid.training import checkpoint, claim, preflight
from pellucid.training.changes import Changes
from pellucid.training.chronicle import finish, open_logs, start_folder
from pellucid.training.compose import Components, compose, evaluation_sampling, progress_of, settled, training_sampling
from pellucid.training.evaluate import evaluate, greedy, sample_and_grade
from pellucid.training.microscope import recorded
from pellucid.training.snapshot import restore, save, save_model
from pellucid.types import DataError, Evaluation, Group, UserError

NO_REWARD = "None: no reward applies to its rows"
FEW = 8
"""How many answers, at least, are graded before all others, to see that rewards work."""


def train(cfg: Config, run_dir: Path, resume_changes: Changes | None = None, profile: bool = False) -> int:
    """Train to the end, or to the step in which a request to stop came. Return the exit status.

    resumed: the settings that a resume changes (`changes.of_resume`); None begins a new run.
    """
    with stop_requests() as requests:
        course = Course(cfg, run_dir, resume_changes, requests, profile=profile)
        for _ in course:
            pass
    return INTERRUPTED if course.stopped_step else 0


class Course:
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
        resume_changes: Changes | None,
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
                evaluation = begin(self.cfg, self.run_dir, parts, self.resume_changes)
            self.resume_changes, self.prepare = self.resume_changes or {}, None
            log = open_logs(self.cfg, self.run_dir, parts.state.step) if parts.runtime.is_main else loggers.Loggers([])
            with closing(log), needing_others(self.run_dir):
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
                        checkpoint.tidy(self.run_dir, self.cfg.checkpoint)
            if parts.runtime.is_main:
                finish(self.run_dir, self.stopped_step, self.resume_hint if self._data_error is None else "")
        if self._data_error is not None:
            raise UserError(
                f"{self._data_error}; saved after step {self.stopped_step}: mend the data, then {self.resume_hint}"
            )
        if hopeless(self.cfg, parts):
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
                claim.note_bad_data(self.run_dir, str(error))

    def _build(self, until_the_end: ExitStack) -> Components:
        """The folder is held and what the settings describe is built, until the end."""
        hardware.keep_freed_memory()
        if self.cfg.policy.deterministic:
            until_the_end.enter_context(hardware.deterministic())
        self.policy = None  # that of an earlier iteration: two would not fit everywhere
        self.cfg = settled(config.resolved(self.cfg))
        if self.prepare is None:
            self._check_preflight()
        if claim.first_process():
            until_the_end.enter_context(claim.held(self.run_dir))
            if self.resume_changes is None:
                claim.check_free(self.run_dir)  # before rows are written over those of another run
        if self.prepare is not None:
            first_alone(self.prepare, self.cfg)
            self._check_preflight()
        set_seed(self.cfg.algorithm.seed)  # adapters start at random
        parts = compose(self.cfg, self.run_dir / "rewards.log")
        until_the_end.callback(parts.close)
        parts.runtime.out_of_memory_hint = memory.remedy(
            preflight.count(parts.policy), self.cfg, parts.runtime.world_size
        )
        self.policy = parts.policy
        return parts

    def _check_preflight(self) -> None:
        """Check what would otherwise fail later. A run that was to go on, and cannot for its data, may change it."""
        try:
            preflight.check(self.cfg, self.run_dir)
        except DataError as error:
            if self.resume_changes is not None and claim.first_process():
                claim.note_bad_data(self.run_dir, str(error))
            raise

    def _run_steps(self, parts: Components, log: Logger) -> Iterator[StepResult]:
        """Take the steps; log, save and evaluate. Notes in `stopped` the step that a request to stop ended."""
        cfg = self.cfg
        watch, heap, fresh = Watch(cfg.algorithm), hardware.Heap(), parts.state.step == 0
        if not fresh and missed(cfg, self.run_dir, parts) and not evaluated(cfg, parts, log, self.stop_requests):
            self.stopped_step = parts.state.step
            return
        if out_of_time(cfg, parts):  # stopped or killed when all was saved but the model
            return
        for step, measured, groups in self._make_step_iterator(parts):
            parts.elapsed_seconds += measured["time/step"]
            metrics = {**describe(groups, cfg.algorithm.min_reward_range), **measured, **memory_now(parts)}
            if "reward/kl" in metrics:
                metrics["reward/after_kl"] = metrics["reward/mean"] + metrics["reward/kl"]
            log.log(step, metrics, groups)
            heap.trim_after_step()
            for note in watch.observe_step(metrics) if parts.runtime.is_main and fresh else []:
                print(harmless(f"! {note}"), flush=True)
            last, due = is_last(cfg, parts), is_due(cfg, parts)
            saving = cfg.checkpoint.every > 0 and (last or step % cfg.checkpoint.every == 0)
            # A supervisor waits seconds between its request and its kill: first what must not be lost.
            parts.failures = [*parts.failures, first_error(groups) or NO_REWARD] if all_failed(groups) else []
            stop = parts.runtime.any_rank(bool(self.stop_requests)) or hopeless(cfg, parts)
            if saving or stop:
                self._save_checkpoint(parts)
            if due and not stop and not evaluated(cfg, parts, log, self.stop_requests):
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
        facts = (cfg.algorithm, parts.reference, parts.state, training_sampling(cfg))
        steps = owned((ahead.train if cfg.sampler.ahead else grpo.train)(*objects, *facts))
        steps = recorded(steps, cfg, self.run_dir, parts)
        if not (self.profile and parts.runtime.is_main):
            return steps
        return profiled(steps, self.run_dir / "profile.txt", parts.policy.dtype)

    def _stop_early(self, parts: Components) -> None:
        """The caller takes no more steps. After the last one the run is as finished as if they had asked for more."""
        if not is_last(self.cfg, parts):
            self.stopped_step = parts.state.step
            if self._saved_step != self.stopped_step:
                self._save_checkpoint(parts)

    def _save_checkpoint(self, parts: Components) -> None:
        save(self.run_dir, self.cfg, parts)
        self._saved_step = parts.state.step


def owned(steps: Iterator[StepResult]) -> Iterator[StepResult]:
    """Yield the steps of this process. A copy of it that code of the user's has forked in a step ends instead.

    It would write into the run of its owner, and end the processes that this one has started.
    """
    owner = os.getpid()
    while True:
        try:
            result = next(steps, None)
        except BaseException as error:
            end_copy(owner, error)
            raise
        end_copy(owner)
        if result is None:
            return
        yield result


def begin(cfg: Config, run_dir: Path, parts: Components, resume_changes: Changes | None) -> Evaluation | None:
    """Bring the folder and all parts to the state before the next step. Return the evaluation before step 1."""
    notes = restore(run_dir, parts) if resume_changes is not None and checkpoints(run_dir) else []
    if parts.runtime.is_main:
        start_folder(run_dir, cfg, parts.state.step, resume_changes)
        for note in notes:
            print(harmless(f"! {note}"), flush=True)
        with loggers.only_shown("the settings"):
            preflight.show_numbers(cfg, parts.policy, parts.runtime.world_size, run_dir)
    parts.runtime.any_rank(False)  # no process writes there, as rewards do, before it is known to be free
    return look_first(cfg, parts) if parts.state.step == 0 else None


def first_alone(action: Callable[[], None], cfg: Config) -> None:
    """Act in the first process, while the others wait."""

    def acted() -> str:
        action()
        return ""

    decided(acted, hardware.pick_device(cfg.policy.device), cfg.runtime.timeout)


def memory_now(parts: Components) -> dict[str, float]:
    """Memory of this process in GB: the peak, on the GPU where there is one, and the resident size."""
    return {"memory/peak_gb": parts.runtime.get_peak_memory_gb(), "memory/resident_gb": hardware.resident_gb()}


def hopeless(cfg: Config, parts: Components) -> bool:
    """Whether the run must end as too many steps in a row had no reward. The same for all processes."""
    return 0 < cfg.reward.patience <= len(parts.failures)


def is_last(cfg: Config, parts: Components) -> bool:
    return parts.state.step == cfg.algorithm.steps or out_of_time(cfg, parts)


def out_of_time(cfg: Config, parts: Components) -> bool:
    """Whether algorithm.minutes are used up. The same for all processes."""
    return parts.runtime.any_rank(0 < cfg.algorithm.minutes * 60 <= parts.elapsed_seconds)


# ---------------------------------------------------------------- evaluation


def is_due(cfg: Config, parts: Components) -> bool:
    """Whether the policy is evaluated after this step."""
    every = cfg.evaluate.every
    return every > 0 and (parts.state.step % every == 0 or is_last(cfg, parts))


def missed(cfg: Config, run_dir: Path, parts: Components) -> bool:
    """Whether the evaluation of the last step is missing, as after a stop or a kill between the two."""
    there = parts.runtime.is_main and parts.state.step in loggers.read_evaluations(run_dir)
    return is_due(cfg, parts) and not parts.runtime.any_rank(there)


def evaluated(cfg: Config, parts: Components, log: Logger, stop_requests: StopRequests) -> bool:
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
    task, prompts, sampling = parts.test_task, parts.test_prompts, evaluation_sampling(cfg)
    k, progress = cfg.evaluate.k, progress_of(cfg, parts.state.step)
    evaluation, groups, _ = evaluate(
        cfg.task_name, task, prompts, parts.evaluation_sampler, sampling, k, parts.runtime, progress
    )
    return evaluation, groups


def look_first(cfg: Config, parts: Components) -> Evaluation | None:
    """Before step 1: held-out accuracy, one real exchange, and how many groups are going to teach anything."""
    parts.sampler.sync(parts.policy, parts.state.step)
    try_rewards(cfg, parts)
    evaluation, groups = evaluate_policy(cfg, parts) if cfg.evaluate.every else (None, [])
    sampling, progress = training_sampling(cfg), progress_of(cfg, 0)
    as_trained = replace(evaluation_sampling(cfg), n=sampling.n) == sampling
    if not groups or len(groups[0].completions) < sampling.n or not as_trained:
        prompts = parts.runtime.shard(parts.task.sample(0, cfg.algorithm.prompts_per_step))
        groups = parts.runtime.gather(sample_and_grade(parts.task, parts.sampler, prompts, sampling, progress))
    preflight.refuse_failing(groups)
    preflight.refuse_none(groups)
    if parts.runtime.is_main:
        with loggers.only_shown("the first exchange"):
            preflight.show_exchange(parts.policy, groups[0])
            preflight.show_signal(groups, cfg, parts.policy.eos_ids)
    return evaluation


def try_rewards(cfg: Config, parts: Components) -> None:
    """Raise NotBegunError if none of a few answers has a reward. If all hung, a whole look would take hours.

    They are greedy answers to held-out prompts. If there are fewer of these than FEW, prompts of the first step are
    asked too, and each often enough that there are FEW answers: a single one that fails says little.
    """
    if isinstance(parts.task, Graded):
        prompts = list(parts.test_prompts[:FEW])
        if len(prompts) < FEW:
            prompts = [*prompts, *parts.task.sample(0, cfg.algorithm.prompts_per_step)][:FEW]
        sampling, progress = training_sampling(cfg), progress_of(cfg, 0)
        each = -(-FEW // len(prompts))
        sampling = greedy(sampling) if each == 1 else replace(sampling, n=each)
        few = parts.runtime.shard(prompts)
        answers = sample_and_grade(parts.task, parts.sampler, few, sampling, progress)
        preflight.refuse_failing(parts.runtime.gather(answers))

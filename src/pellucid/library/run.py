"""A run in the hands of a notebook or a program: its steps one by one, and what came of them."""

from __future__ import annotations

import atexit
import ctypes
import inspect
import os
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pellucid.config import Config
from pellucid.library.data import forget
from pellucid.machine.harmless import harmless
from pellucid.machine.interrupts import StopRequests, deferred, handled
from pellucid.machine.plugins import given
from pellucid.reporting import loggers, notebook
from pellucid.reporting.report import write_report
from pellucid.reporting.run_folder import records
from pellucid.training import files
from pellucid.training.changes import Changes
from pellucid.types import Evaluation, UserError

if TYPE_CHECKING:  # these import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from pellucid.algorithm.grpo import StepResult
    from pellucid.policy.policy import Policy
    from pellucid.training.run import Course


class Run:
    """A run of `pellucid.train`. To iterate over it is to train: each step is yielded when it is logged and saved.

    A loop may be left at any time, by break or by an exception: the run is then saved, with its report, and its folder
    free. Another loop over it goes on after the last step, to the numbers of a run that was never left; when all steps
    are taken, it has none. One that is still open then, since its iterator has a name, is left first, and so it is when
    the process ends. An interrupt, as by Ctrl-C, ends it after the step that it is in, with a KeyboardInterrupt when
    all is saved; a second one at once.
    """

    def __init__(
        self,
        cfg: Config,
        folder: Path,
        resumed: Changes | None,
        objects: dict[str, Any],
        prepare: Callable[[], None] | None,
    ) -> None:
        self.folder = folder
        """Where the run is written: model/, report.html, metrics.jsonl, checkpoints/ and the rest."""
        self.finished = False
        """Whether all steps have been taken, and the model saved."""
        self._cfg, self._resumed, self._objects, self._prepare = cfg, resumed, objects, prepare
        self._code_digests = self._digest_code()
        self._course: Course | None = None
        self._loop: Callable[[], Generator[StepResult] | None] = lambda: None
        self._owner_pid = 0
        """The process that has the loop which is open; 0 where none is."""

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {len(self.metrics)} of {self._cfg.algorithm.steps} steps>"

    def __iter__(self) -> Iterator[StepResult]:
        if self._owner_pid not in (0, os.getpid()):
            raise UserError(self._not_owner_message)
        self._close_loop()
        loop = self._iter_steps()
        self._loop = weakref.ref(loop)  # a loop that is left has no other owner, and ends at once
        return loop

    def finish(self) -> Self:
        """Take all steps that are left. Return the run."""
        for _ in self:
            pass
        return self

    @property
    def model(self) -> PreTrainedModel:
        """The model as it is now, as transformers has it: to generate with, or for `save_pretrained`.

        It is the very one that is trained; with LoRA, or with weights offloaded, a copy of it in fp32 with all in its
        weights, made at each access. UserError before the first step, and where several processes share the parameters.
        """
        policy = self._get_unsharded_policy()
        masters = policy.masters()
        whole = all(masters[name] is weight for name, weight in policy.trainable().items())
        return policy.model if whole and not policy.adapter else policy.build_merged_model(masters)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with the chat template that the model is trained with. UserError before the first step."""
        return self._get_policy().tokenizer

    def save(self, folder: str | Path) -> Path:
        """Save model and tokenizer as they are now, for anything that loads transformers' models. Return the folder.

        The weights are saved in `save_dtype`, float32 unless the run has another.
        """
        policy = self._get_unsharded_policy()
        import torch  # noqa: PLC0415 - `import pellucid` is light; the policy has imported it

        policy.save(Path(folder), dtype=getattr(torch, self._cfg.policy.save_dtype))
        return Path(folder)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step so far, with its number as `step`; None where there was no number."""
        return [dict(row) for row in records(self.folder / "metrics.jsonl")]

    @property
    def evaluations(self) -> dict[int, Evaluation]:
        """The evaluations so far, each by the step that it followed; 0 is before the first."""
        return loggers.read_evaluations(self.folder)

    def report(self) -> Path:
        """Write report.html of what there is so far, and show it in a notebook. Return its path."""
        if not (self.folder / "config.json").is_file():
            raise UserError("there is nothing to report yet: take a step first")
        path = write_report(self.folder)
        if notebook.is_running():
            notebook.show_page(path)
        return path

    def _iter_steps(self) -> Generator[StepResult]:
        if self.finished:
            return
        requests = StopRequests()
        steps = iter(self._start_course(requests))
        self._owner_pid = owner = os.getpid()
        try:
            while (result := self._take_step(steps, requests)) is not None:
                with at_exit(self._close_loop):
                    yield result
                if os.getpid() != owner:
                    keep_for_ever(steps)
                    raise UserError(self._not_owner_message)
        except GeneratorExit:
            if os.getpid() != owner:
                keep_for_ever(steps)
                return
            self._stop_steps(steps, requests)
        finally:
            if os.getpid() == owner:
                self._owner_pid = 0

    @property
    def _not_owner_message(self) -> str:
        return (
            f"the run in {self.folder} belongs to process {self._owner_pid}, of which this one is a fork: only that process"
            " takes its steps, saves it and closes it"
        )

    def _close_loop(self) -> None:
        """Leave the loop that is open, if one is. UserError where it is taking a step, as in another thread.

        A fork of the process that has the loop leaves it alone.
        """
        if self._owner_pid not in (0, os.getpid()):
            return
        loop = self._loop()
        if loop is not None and inspect.getgeneratorstate(loop) == inspect.GEN_RUNNING:
            raise UserError(f"the run in {self.folder} is taking a step: wait for it")
        if loop is not None:
            loop.close()

    def _start_course(self, requests: StopRequests) -> Course:
        """What takes the steps, from where the run is. UserError where its code is no longer what was asked for."""
        with deferred():
            from pellucid.training.run import Course  # noqa: PLC0415 - it imports torch

        now = self._digest_code()
        for key, digest in self._code_digests.items():
            if now.get(key) != digest:
                raise UserError(f"the file of {key} was edited since this run was asked for: call pellucid.train again")
        if self._course is None:
            self._course = Course(self._cfg, self.folder, self._resumed, requests, self._resume_hint, self._prepare)
        self._course.stop_requests = requests
        forget()
        return self._course

    def _digest_code(self) -> dict[str, str]:
        """The digests of the user's files that the settings name."""
        with given(self._objects):
            return files.of_code(files.recorded(self._cfg))

    def _take_step(self, steps: Iterator[StepResult], requests: StopRequests) -> StepResult | None:
        """Take a step; None after the last. KeyboardInterrupt where an interrupt has ended the run."""
        with self._working_context(requests):
            result = next(steps, None)
        if result is None:
            self._update_finished()
            if requests:
                raise KeyboardInterrupt
        return result

    def _stop_steps(self, steps: Generator[StepResult], requests: StopRequests) -> None:
        """The loop was left, maybe by an error of the caller's, which one of ours must not hide."""
        try:
            with self._working_context(requests):
                steps.close()
        except UserError as error:
            print(harmless(f"! {error}"), flush=True)
        else:
            self._update_finished()

    def _update_finished(self) -> None:
        assert self._course is not None
        self.finished = not self._course.stopped_step

    @contextmanager
    def _working_context(self, requests: StopRequests) -> Iterator[None]:
        """In here signals ask for a stop, and names stand for what was given. Between steps neither is so."""
        with told_in_python(self.folder), handled(requests.handle_signal), given(self._objects):
            try:
                yield
            except KeyboardInterrupt:
                begun = (self.folder / "config.json").is_file()
                how = f"go on with: {self._resume_hint}" if begun else "the same call starts again"
                print(harmless(f"stopped at once; nothing that was saved is lost, {how}"), flush=True)
                raise

    @property
    def _resume_hint(self) -> str:
        """How to go on in another process."""
        given_too = ", with the functions and tasks that were given to it" if self._objects else ""
        return f'pellucid.train(resume="{self.folder}"){given_too}'

    def _get_policy(self) -> Policy:
        if self._course is None or self._course.policy is None:
            raise UserError("the run has not begun: take a step first, or load the model with transformers")
        return self._course.policy

    def _get_unsharded_policy(self) -> Policy:
        """Return the policy. UserError where this process has only a part of its parameters."""
        policy = self._get_policy()
        if policy.sharded_modules:
            raise UserError(f"the parameters lie in several processes: the model will be in {self.folder / 'model'}")
        return policy


def keep_for_ever(steps: Iterator[StepResult]) -> None:
    """Keep the steps of another process from being closed in this fork of it, also when this process ends.

    They would save the run, release its folder and end the processes of rewards.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(steps))


@contextmanager
def at_exit(act: Callable[[], None]) -> Iterator[None]:
    """A process that ends in here acts before it does what was registered earlier, as to leave a group of processes."""
    atexit.register(act)
    try:
        yield
    finally:
        atexit.unregister(act)


@contextmanager
def told_in_python(folder: Path) -> Iterator[None]:
    """Tell as keywords the mends that the command line has as options, of the run in this folder."""
    try:
        yield
    except UserError as error:
        told = str(error).replace("with --run", "with run=")
        told = told.replace(f"--policy.model {folder / 'model'}", f'model="{folder / "model"}"')
        told = told.replace(f"--resume {folder}", f'resume="{folder}"')
        raise type(error)(told) from error

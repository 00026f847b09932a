"""Boards that show a run: TensorBoard and Weights & Biases."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from pellucid.machine.extras import extra
from pellucid.machine.harmless import harmless
from pellucid.reporting.measures import measures
from pellucid.types import Evaluation, Group, UserError

FIELD_TAGS = {
    "loss": "train/loss",
    "kl": "train/kl_divergence",
    "grad_norm": "train/grad_norm",
    "reward/mean": "rollout/returns",
    "completion/correct": "rollout/success_rate",
}
"""What other trainers call our metrics, on the boards where runs of several trainers are compared."""


def tagged(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics under our names, and under those of other trainers."""
    return {**metrics, **{tag: metrics[name] for name, tag in FIELD_TAGS.items() if name in metrics}}


class TensorBoard:
    """Scalars for TensorBoard. Raises UserError where it is not installed.

    If its files cannot be written, as on a full disk, that is one line, and nothing more is written.

    first_step: finished steps at the start; on resume, what was logged after it is purged.
    """

    def __init__(self, log_dir: Path, first_step: int = 0):
        board = extra("torch.utils.tensorboard", "tensorboard", "log.tensorboard")
        self.log_dir, self.failed = log_dir, False
        self.previous_hook = threading.excepthook
        threading.excepthook = self._on_thread_error  # its thread prints a traceback, and raises again in `log`
        self.writer: Any = None
        with self._report_failure_once():
            self.writer = board.SummaryWriter(str(log_dir), purge_step=first_step + 1 if first_step else None)

    def log(self, step: int, metrics: Mapping[str, float], _groups: Sequence[Group]) -> None:
        self._write_scalars(step, tagged(metrics))

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        found = measures(evaluation)
        self._write_scalars(step, {f"heldout/{name.replace('@', '_at_')}": found[name].value for name in found})

    def close(self) -> None:
        with self._report_failure_once():
            if self.writer:
                self.writer.close()
        if threading.excepthook == self._on_thread_error:
            threading.excepthook = self.previous_hook

    def _write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        if self.failed:
            return
        with self._report_failure_once():
            for name, value in scalars.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()

    @contextmanager
    def _report_failure_once(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self.failed:
                why = error.strerror or error
                line = f"! {self.log_dir} cannot be written ({why}): the run goes on without TensorBoard"
                print(harmless(line), flush=True)
            self.failed = True

    def _on_thread_error(self, args: Any) -> None:
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
            self.previous_hook(args)


def check_wandb(mode: str) -> None:
    """Raise UserError where wandb is not installed, or where it is online and nobody is logged in."""
    wandb = extra("wandb", "wandb", "log.wandb")
    if mode == "online" and not wandb.login(prompt=False):
        raise UserError('log.wandb = "online": nobody is logged in: run wandb login; "offline" needs no account')


class WandB:
    """A run at Weights & Biases, or a folder that `wandb sync` uploads. UserError where it is not installed or refuses.

    The id comes from the run folder, so that a resumed run goes on where it was.
    """

    def __init__(self, run_dir: Path, project: str, mode: str, config: Mapping[str, Any]):
        wandb = extra("wandb", "wandb", "log.wandb")
        try:
            self.run = wandb.init(
                project=project,
                name=run_dir.name,
                id=uuid5(NAMESPACE_URL, run_dir.resolve().as_uri()).hex,
                dir=run_dir,
                mode=mode,
                resume="allow" if mode == "online" else None,
                config=dict(config),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except (wandb.errors.UsageError, wandb.errors.CommError) as error:
            raise UserError(
                f'log.wandb = "{mode}": {str(error).splitlines()[0]}; "offline" needs no account'
            ) from error
        self.run.define_metric("*", step_metric="step")
        self.error_class = wandb.errors.Error

    def log(self, step: int, metrics: Mapping[str, float], _groups: Sequence[Group]) -> None:
        self._send({"step": step, **tagged(metrics)})

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._send({"step": step, **{f"heldout/{name}": e.value for name, e in measures(evaluation).items()}})

    def _send(self, record: Mapping[str, float]) -> None:
        try:
            self.run.log(dict(record))
        except self.error_class as error:  # of wandb's own kind, which only wandb knows
            raise OSError(f"Weights & Biases: {error}") from error

    def close(self) -> None:
        self.run.finish()

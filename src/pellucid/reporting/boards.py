"""Boards that show a run: TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from pellucid.machine.extras import extra
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

    first_step: finished steps at the start; on resume, what was logged after it is purged.
    """

    def __init__(self, log_dir: Path, first_step: int = 0):
        board = extra("torch.utils.tensorboard", "tensorboard", "log.tensorboard")
        self.writer = board.SummaryWriter(str(log_dir), purge_step=first_step + 1 if first_step else None)

    def log(self, step: int, metrics: Mapping[str, float], _groups: Sequence[Group]) -> None:
        for name, value in tagged(metrics).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        for name, estimate in measures(evaluation).items():
            self.writer.add_scalar(f"heldout/{name.replace('@', '_at_')}", estimate.value, step)

    def close(self) -> None:
        self.writer.close()


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
        self.failures = wandb.errors.Error

    def log(self, step: int, metrics: Mapping[str, float], _groups: Sequence[Group]) -> None:
        self._send({"step": step, **tagged(metrics)})

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._send({"step": step, **{f"heldout/{name}": e.value for name, e in measures(evaluation).items()}})

    def _send(self, record: Mapping[str, float]) -> None:
        try:
            self.run.log(dict(record))
        except self.failures as error:  # of wandb's own kind, which only wandb knows
            raise OSError(f"Weights & Biases: {error}") from error

    def close(self) -> None:
        self.run.finish()

"""What a reward function finds in `trainer_state`, by the names of transformers' TrainerState."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.types import Progress

ALSO = {"reward": "reward/mean", "reward_std": "reward/std", "learning_rate": "lr"}
"""Names that TRL's log has, and ours for them."""


@dataclass(frozen=True)
class TrainerState:
    """How far a run is. It has no other attributes of transformers' record: what they hold is not known here."""

    global_step: int
    """The number of finished steps."""
    max_steps: int
    """The number of all steps."""
    epoch: float
    """How often all questions were asked; of a task that makes up its own, the share of the run that is done."""
    num_train_epochs: int
    """The same at the end of the run, rounded up."""
    metrics_file: str = ""
    """The file metrics.jsonl of the run, where there is one."""

    @property
    def log_history(self) -> list[dict[str, Any]]:
        """The metrics of the finished steps, each with its `step`, and TRL's names beside ours."""
        lines = []
        with suppress(OSError):
            lines = Path(self.metrics_file).read_text(encoding="utf-8").splitlines() if self.metrics_file else []
        return [with_their_names(json.loads(line)) for line in lines if line.strip()]

    @property
    def is_world_process_zero(self) -> bool:
        return os.environ.get("RANK", "0") == "0"

    @property
    def is_local_process_zero(self) -> bool:
        return os.environ.get("LOCAL_RANK", "0") == "0"


def state_of(progress: Progress, question_count: int | None, metrics_file: str = "") -> TrainerState:
    """Return the state of a run whose task has so many questions; None where it makes up new ones."""
    if question_count:
        epochs = [
            steps * progress.prompts_per_step / question_count for steps in (progress.global_step, progress.max_steps)
        ]
    else:
        epochs = [progress.global_step / progress.max_steps, 1.0]
    return TrainerState(progress.global_step, progress.max_steps, epochs[0], math.ceil(epochs[1]), metrics_file)


def with_their_names(record: Mapping[str, Any]) -> dict[str, Any]:
    return {**record, **{theirs: record[ours] for theirs, ours in ALSO.items() if ours in record}}

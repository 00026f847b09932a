"""How much room a run takes on its disk: while it trains, and when it is finished."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from pellucid.config import Config
from pellucid.doctor import memory
from pellucid.reporting.run_folder import checkpoints


@dataclass(frozen=True)
class Room:
    """Sizes in GB. Logs come on top of them."""

    model_gb: float
    checkpoint_gb: float
    max_checkpoints: int
    """The most checkpoints that lie side by side: a new one is whole before the oldest goes."""
    final_checkpoints: int
    """The checkpoints that are left when the run is finished."""
    replaced_gb: float
    """What a resumed run has there already, and replaces."""
    free_gb: float

    @property
    def peak_gb(self) -> float:
        return self.model_gb + self.max_checkpoints * self.checkpoint_gb

    @property
    def final_gb(self) -> float:
        return self.model_gb + self.final_checkpoints * self.checkpoint_gb

    @property
    def needed_gb(self) -> float:
        """How much must be free."""
        return self.peak_gb - self.replaced_gb

    def describe(self, is_saved: bool) -> str:
        """One line. is_saved: the run writes checkpoints, and not only where it is stopped."""
        kept = {0: "the model", 1: "the model and the newest checkpoint"}.get(
            self.final_checkpoints, f"the model and {self.final_checkpoints} checkpoints"
        )
        stopped = "" if is_saved else f", {self.checkpoint_gb:.1f} more where it is stopped"
        most = f"up to {self.peak_gb:.1f} GB of {self.free_gb:.0f} GB free{stopped}"
        return f"{most}; left at the end: {self.final_gb:.1f} GB, {kept}"


def of_run(cfg: Config, model: memory.Model, run_dir: Path) -> Room:
    settings, found = cfg.checkpoint, len(checkpoints(run_dir))
    saves = max(math.ceil(cfg.algorithm.steps / settings.every), found + (found > 0)) if settings.every else 0
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    return Room(
        model_gb=saved_bytes(model, cfg) / 1e9,
        checkpoint_gb=checkpoint_bytes(model, cfg) / 1e9,
        max_checkpoints=min(settings.keep_last + 1, saves),
        final_checkpoints=min({"newest": 1, "all": settings.keep_last, "none": 0}[settings.keep_finished], saves),
        replaced_gb=used_bytes(run_dir) / 1e9,
        free_gb=shutil.disk_usage(place).free / 1e9,
    )


def saved_bytes(model: memory.Model, cfg: Config) -> int:
    narrow = cfg.policy.save_dtype != "float32"
    return model.parameter_count * (2 if narrow else 4) + (4 * model.trained_count if cfg.policy.lora else 0)


def checkpoint_bytes(model: memory.Model, cfg: Config) -> int:
    """Bytes of a checkpoint: weights, or their masters, and two moments in fp32."""
    moving = 4 * model.parameter_count if cfg.algorithm.reference_every else 0
    return 12 * model.trained_count + moving


def used_bytes(run_dir: Path) -> int:
    """Bytes on disk that a resumed run will replace."""
    old = [*run_dir.glob("checkpoints/*/*"), *run_dir.glob("model/*"), *run_dir.glob("adapter/*")]
    return sum(os.path.getsize(path) for path in old if path.is_file())

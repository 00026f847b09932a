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

    model: float
    checkpoint: float
    at_once: int
    """The most checkpoints that lie side by side: a new one is whole before the oldest goes."""
    kept: int
    """The checkpoints that are left when the run is finished."""
    there: float
    """What a resumed run has there already, and replaces."""
    free: float

    @property
    def most(self) -> float:
        return self.model + self.at_once * self.checkpoint

    @property
    def left(self) -> float:
        return self.model + self.kept * self.checkpoint

    @property
    def needed(self) -> float:
        """How much must be free."""
        return self.most - self.there

    def described(self, is_saved: bool) -> str:
        """One line. is_saved: the run writes checkpoints, and not only where it is stopped."""
        kept = {0: "the model", 1: "the model and the newest checkpoint"}.get(
            self.kept, f"the model and {self.kept} checkpoints"
        )
        stopped = "" if is_saved else f", {self.checkpoint:.1f} more where it is stopped"
        most = f"up to {self.most:.1f} GB of {self.free:.0f} GB free{stopped}"
        return f"{most}; left at the end: {self.left:.1f} GB, {kept}"


def of_run(cfg: Config, model: memory.Model, run_dir: Path) -> Room:
    settings, found = cfg.checkpoint, len(checkpoints(run_dir))
    saves = max(math.ceil(cfg.algorithm.steps / settings.every), found + (found > 0)) if settings.every else 0
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    return Room(
        model=saved_bytes(model, cfg) / 1e9,
        checkpoint=checkpoint_bytes(model, cfg) / 1e9,
        at_once=min(settings.keep_last + 1, saves),
        kept=min({"newest": 1, "all": settings.keep_last, "none": 0}[settings.keep_finished], saves),
        there=used_bytes(run_dir) / 1e9,
        free=shutil.disk_usage(place).free / 1e9,
    )


def saved_bytes(model: memory.Model, cfg: Config) -> int:
    narrow = cfg.policy.save_dtype != "float32"
    return model.parameters * (2 if narrow else 4) + (4 * model.trained if cfg.policy.lora else 0)


def checkpoint_bytes(model: memory.Model, cfg: Config) -> int:
    """Bytes of a checkpoint: weights, or their masters, and two moments in fp32."""
    moving = 4 * model.parameters if cfg.algorithm.reference_every else 0
    return 12 * model.trained + moving


def used_bytes(run_dir: Path) -> int:
    """Bytes on disk that a resumed run will replace."""
    old = [*run_dir.glob("checkpoints/*/*"), *run_dir.glob("model/*"), *run_dir.glob("adapter/*")]
    return sum(os.path.getsize(path) for path in old if path.is_file())

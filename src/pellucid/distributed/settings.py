"""The settings of the processes of a run. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

REDUCE_BUCKET_ELEMENTS = 50_000_000
"""Elements of gradients that DeepSpeed reduces at once."""


@dataclass(frozen=True)
class RuntimeConfig:
    """`[runtime]`: how the processes of a run share the work."""

    engine: Literal["auto", "ddp", "fsdp2", "deepspeed"] = "auto"
    """ddp: every process holds the whole model. fsdp2: each holds a part of every parameter, gradient and moment, and
    gathers a layer while it computes. deepspeed: ZeRO, by `zero_stage`. auto: ddp."""
    zero_stage: Literal[2, 3] = 2
    """With deepspeed. 2: gradients and optimizer state are sharded among all processes. 3: weights, too."""
    shards: int = 0
    """fsdp2: the number of processes that share one copy of the parameters, such as those of one machine. Each group
    holds a replica. 0: all processes."""
    timeout: float = 10.0
    """Minutes that processes wait for one that does not answer; then they exit."""

    def __post_init__(self) -> None:
        if self.shards < 0:
            raise ValueError(f"shards = {self.shards} must not be negative")
        if not self.timeout > 0:
            raise ValueError(f"timeout = {self.timeout} must be positive")

    @property
    def shards_weights(self) -> bool:
        """Whether each process holds a part of the weights, and gathers those of a layer while it computes."""
        return self.engine == "fsdp2" or (self.engine == "deepspeed" and self.zero_stage == 3)

"""The only file that knows how many processes there are: one, or as many as `torchrun` started (Accelerate)."""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from pellucid.grpo import Batch
from pellucid.policy import Policy


@dataclass(frozen=True)
class AdamW:
    """`[optimizer]`: AdamW (arXiv 1711.05101) and the course of its learning rate."""

    lr: float = 2e-5
    """The peak."""
    warmup: int = 0
    """Optimizer steps of linear rise to the peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From the peak to the last step: stay, or fall to 0."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them as they are."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def lr_at(self, update: int, total: int) -> float:
        """Learning rate of optimizer step `update` of `total`, both counted from 1."""
        if update <= self.warmup:
            return self.lr * update / self.warmup
        left = (total - update + 1) / max(1, total - self.warmup)  # 1 at the peak, 1 / length at the last step
        return self.lr * {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[self.schedule]


class Runtime:
    """Optimizer steps on the gradient of a global sum. `total` is the number of optimizer steps of the whole run."""

    def __init__(self, policy: Policy, optimizer: AdamW, total: int) -> None:
        self.cfg, self.total, self.updates = optimizer, total, 0
        self.parameters = policy.trainable()
        self.accelerator = Accelerator(cpu=policy.device.type == "cpu", device_placement=False)
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=policy.device.type != "mps",
        )
        self.module = policy.module = self.accelerator.prepare_model(policy.module)

    @property
    def main(self) -> bool:
        """Whether this process writes."""
        return self.accelerator.is_main_process

    def shard(self, items: Sequence[Any]) -> Sequence[Any]:
        """Every world-th item: a minibatch, a run of prompts, then holds the same prompts whatever the world."""
        return items[self.rank :: self.world]

    def gather(self, items: Sequence[Any]) -> list[Any]:
        """The inverse of `shard`, on every process."""
        if self.world == 1:
            return list(items)
        shards: list[Any] = [None] * self.world
        dist.all_gather_object(shards, list(items))
        return [item for rank_by_rank in zip(*shards, strict=True) for item in rank_by_rank]

    def sum(self, x: Tensor) -> Tensor:
        return self.accelerator.reduce(x, "sum") if self.world > 1 else x

    def accumulate(self, micro_batches: Sequence[Batch]) -> Iterator[Batch]:
        """Processes exchange gradients once, at the last micro-batch."""
        for i, micro_batch in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.module):
                yield micro_batch

    def backward(self, loss: Tensor) -> None:
        # Data parallelism averages gradients over processes; the loss is a sum over them.
        self.accelerator.backward(loss * self.world)

    def step(self) -> dict[str, float]:
        """Clips, steps and clears; a gradient that is not finite is thrown away, counted, and costs no weights."""
        limit = self.cfg.max_grad_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit))
        self.updates += 1
        lr = self.cfg.lr_at(self.updates, self.total)
        self.optimizer.param_groups[0]["lr"] = lr
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "lr": lr, "skipped": float(not math.isfinite(norm))}

    def optimizer_state(self) -> dict[str, Tensor]:
        """`<parameter>/<moment>` -> tensor."""
        state = self.optimizer.state
        return {f"{name}/{key}": value for name, p in self.parameters.items() for key, value in state[p].items()}

    def load_optimizer_state(self, tensors: dict[str, Tensor], updates: int) -> None:
        self.updates = updates
        for path, tensor in tensors.items():
            name, _, key = path.rpartition("/")
            p = self.parameters[name]
            # AdamW keeps its step count on the CPU.
            self.optimizer.state[p][key] = tensor if key == "step" else tensor.to(p.device)

    def peak_gb(self) -> float:
        """Peak memory of this process in GB: of the GPU where there is one, else resident."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() / 1e9
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def pick_device(name: str) -> torch.device:
    """`auto` is this process's GPU, else MPS, else the CPU."""
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")

"""The runtime on Accelerate: one process, or as many as `torchrun` started. No other file knows how many."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from pellucid.algorithm.grpo import Batch, Scores
from pellucid.algorithm.settings import AdamWConfig
from pellucid.machine import hardware
from pellucid.models.masters import whole
from pellucid.runtimes import fsdp2
from pellucid.runtimes.fsdp2 import Shardable
from pellucid.runtimes.optimizer import OffloadedAdamW
from pellucid.runtimes.processes import joined
from pellucid.runtimes.settings import RuntimeConfig
from pellucid.types import UserError

T = TypeVar("T")
MISSING = object()
"""Stands for an item that one process has less than another."""


class Trainable(Shardable, Protocol):
    """The part of a policy that a runtime needs."""

    dtype: torch.dtype

    def score(self, batch: Batch) -> Scores: ...
    def trainable(self) -> dict[str, Tensor]: ...
    def masters(self) -> dict[str, Tensor]: ...


def build(cfg: AdamWConfig, policy: Trainable) -> torch.optim.Optimizer:
    parameters = policy.trainable().values()
    facts = {"lr": cfg.lr, "betas": cfg.betas, "eps": cfg.eps, "weight_decay": cfg.weight_decay}
    if cfg.offload and not policy.sharded:
        return OffloadedAdamW(parameters, **facts, masters=list(policy.masters().values()))
    return torch.optim.AdamW(parameters, **facts, fused=policy.device.type != "mps")


class Runtime:
    """Optimizer steps on the gradient of a global sum. `total` is the number of optimizer steps of the whole run."""

    def __init__(
        self,
        policy: Trainable,
        optimizer: AdamWConfig,
        total: int,
        cfg: RuntimeConfig = RuntimeConfig(),  # noqa: B008 - frozen
    ) -> None:
        self.cfg, self.total, self.updates = optimizer, total, 0
        self.micro_batch = 0  # the most rows at once since memory ran out; 0 where it never has
        self.policy, self.device = policy, policy.device
        joined(policy.device, cfg.timeout)
        self.accelerator = Accelerator(cpu=policy.device.type == "cpu", device_placement=False)
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.mesh = fsdp2.mesh_of(self.device, self.world, cfg.shards) if cfg.engine == "fsdp2" else None
        if self.mesh:
            fsdp2.shard(policy, self.mesh, optimizer.offload)
        else:
            policy.module = self.accelerator.prepare_model(policy.module)
        self.module, self.parameters = policy.module, policy.trainable()
        self.optimizer = build(optimizer, policy)
        self.scaler = GradScaler(self.device.type, enabled=policy.dtype == torch.float16)
        self.lost = False  # whether a loss of the next optimizer step, in this process, was not finite

    def share(self, reference: Shardable) -> None:
        """Shard a frozen policy on the same device, where the trained one is sharded."""
        if self.mesh and reference.device == self.device:
            fsdp2.shard(reference, self.mesh, offload=False)

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files."""
        return self.accelerator.is_main_process

    def shard(self, items: Sequence[Any]) -> Sequence[Any]:
        """Every world-th item, from this process's rank on. A minibatch then holds the same prompts in any world."""
        return items[self.rank :: self.world]

    def gather(self, items: Sequence[Any]) -> list[Any]:
        """The items of all processes in their global order, on every process: the inverse of `shard`."""
        if self.world == 1:
            return list(items)
        shards: list[list[Any]] = [[] for _ in range(self.world)]
        dist.all_gather_object(shards, list(items))
        ranks = zip_longest(*shards, fillvalue=MISSING)
        return [item for rank_by_rank in ranks for item in rank_by_rank if item is not MISSING]

    def sum(self, x: Tensor) -> Tensor:
        total = x.clone()
        if self.world > 1:
            dist.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on at least one process."""
        return bool(self.sum(torch.tensor(float(flag), device=self.accelerator.device)))

    def fit(self, compute: Callable[[int], T], rows: int) -> T:
        """Return compute(rows). Each time memory runs out, halve the rows, in this call and all later ones.

        UserError where it runs out with one row, or where other processes wait for the gradients of this one.
        """
        while True:
            rows = min(rows, self.micro_batch or rows)
            try:
                return compute(rows)
            except (RuntimeError, MemoryError) as error:
                if not hardware.out_of_memory(error):
                    raise
            # Only here, when the error is forgotten, are the tensors of its frames, too.
            self.optimizer.zero_grad(set_to_none=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.micro_batch = self.halved(rows)

    def halved(self, rows: int) -> int:
        ran_out = f"memory ran out with {rows} rows in a forward pass"
        if rows == 1:
            raise UserError(
                "memory ran out with one row in a forward pass: "
                "set policy.gradient_checkpointing, or a lower sampler.max_tokens"
            )
        if self.world > 1:
            raise UserError(f"{ran_out}: go on with --resume and --algorithm.micro_batch {rows // 2}")
        print(f"! {ran_out}: {rows // 2} from now on, as of algorithm.micro_batch = {rows // 2}", flush=True)
        return rows // 2

    def accumulate(self, micro_batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yield the micro-batches. Processes exchange gradients once, at the last one, and sharded ones at each.

        There, all gather parameters together: one that has fewer micro-batches takes part in the others' with its last.
        """
        if self.mesh:
            most = max(self.gather([len(micro_batches)]))
            yield from micro_batches
            for _ in range(most - len(micro_batches)):
                (0 * self.policy.score(micro_batches[-1].rows(slice(1))).logprobs.sum()).backward()
            return
        for i, micro_batch in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.module):
                yield micro_batch

    def backward(self, loss: Tensor) -> None:
        if self.scaler.is_enabled():
            self.lost |= not bool(loss.detach().isfinite())
        # Data parallelism averages gradients over processes; the loss is a sum over them.
        self.accelerator.backward(self.scaler.scale(loss * self.world))

    def step(self) -> dict[str, float]:
        """Clip the gradient, take a step, clear. A gradient that is not finite is thrown away and counted.

        So is one that is 0, of dead groups: there is nothing to learn, and momentum alone would move the weights.
        """
        self.scaler.unscale_(self.optimizer)
        limit = self.cfg.max_grad_norm or math.inf
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit)))
        self.updates += 1
        lr = self.cfg.lr_at(self.updates, self.total)
        self.optimizer.param_groups[0]["lr"] = lr
        if math.isfinite(norm) and norm > 0:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "lr": lr, "idle": float(norm == 0), **self.rescaled(norm)}

    def rescaled(self, norm: float) -> dict[str, float]:
        """In fp16: a gradient that overflowed halves the scale of the loss, 2000 in a row that did not double it.

        Not so where a loss was not finite, or the scale is 1: what does not fit then is the model's own, and is skipped
        as in any dtype. arXiv 1710.03740, section 3.2.
        """
        finite, scale = math.isfinite(norm), self.scaler.get_scale()
        overflow = not finite and scale > 1 and not self.any(self.lost)
        self.scaler.update(None if finite or overflow else scale)
        self.lost = False
        about_scale = {"skipped/overflow": float(overflow), "loss_scale": scale} if self.scaler.is_enabled() else {}
        return {"skipped": float(not finite and not overflow), **about_scale}

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of the optimizer by moment and parameter name."""
        moments: dict[str, dict[str, Tensor]] = {}
        for name, p in self.parameters.items():
            for moment, value in self.optimizer.state[p].items():
                moments.setdefault(moment, {})[name] = value
        return moments

    def load_optimizer_state(self, moments: Mapping[str, Mapping[str, Tensor]], updates: int) -> None:
        """Load what `optimizer_state` gave after `updates` optimizer steps."""
        self.updates = updates
        for moment, values in moments.items():
            for name, value in values.items():
                p = self.parameters[name]
                # Fused AdamW keeps its step count beside the weights, any other on the CPU.
                on_cpu = self.cfg.offload or (moment == "step" and not self.optimizer.defaults.get("fused"))
                self.optimizer.state[p][moment] = value if on_cpu else value.to(p.device)

    def peak_gb(self) -> float:
        """Peak memory of this process in GB: of its GPU, else resident."""
        return hardware.peak_gb(self.device)

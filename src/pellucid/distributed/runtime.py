"""The runtime: one process, or as many as `torchrun` started, and an engine that takes their optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from pellucid.algorithm.batch import Batch
from pellucid.algorithm.settings import AdamWConfig
from pellucid.distributed.deepspeed import ZeroEngine
from pellucid.distributed.fsdp2 import ShardablePolicy
from pellucid.distributed.process_group import join_process_group, set_group_timeouts
from pellucid.distributed.settings import RuntimeConfig
from pellucid.distributed.torch_engine import Moments, TorchEngine, TrainablePolicy
from pellucid.types import UserError
from pellucid.utils import hardware

T = TypeVar("T")
MISSING_ITEM = object()
"""Stands for an item that one process has less than another."""


class TrainingEngine(Protocol):
    """Whoever holds parameters, gradients and moments, and takes optimizer steps with them: `Plain` or `Zero`."""

    @property
    def is_lockstep(self) -> bool: ...
    def shard_reference(self, reference: ShardablePolicy) -> None: ...
    def micro_batch_context(self, is_last: bool) -> AbstractContextManager[Any]: ...
    def backward(self, loss: Tensor) -> None: ...
    def reset_for_retry(self) -> bool: ...
    def step(self, lr: float) -> dict[str, float]: ...
    def weights(self) -> dict[str, Tensor]: ...
    def masters(self) -> dict[str, Tensor]: ...
    def load_masters(self, masters: Mapping[str, Tensor]) -> None: ...
    def moments(self) -> dict[str, dict[str, Tensor]]: ...
    def load_moments(self, moments: Moments) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, facts: Mapping[str, Any]) -> None: ...


class Runtime:
    """Optimizer steps on the gradient of a global sum. `total` is the number of optimizer steps of the whole run."""

    def __init__(
        self,
        policy: TrainablePolicy,
        optimizer: AdamWConfig,
        total_updates: int,
        cfg: RuntimeConfig = RuntimeConfig(),  # noqa: B008 - frozen
    ) -> None:
        self.cfg, self.total_updates, self.updates = optimizer, total_updates, 0
        self.max_micro_batch_rows = 0  # the most rows at once since memory ran out; 0 where it never has
        self.out_of_memory_hint = "set a lower sampler.max_tokens"  # where memory runs out with one row
        self.policy, self.device = policy, policy.device
        join_process_group(policy.device, cfg.timeout)
        accelerator = Accelerator(cpu=policy.device.type == "cpu", device_placement=False)
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes
        self.engine: TrainingEngine
        if cfg.engine == "deepspeed":
            self.engine = ZeroEngine(policy, optimizer, cfg.zero_stage, self.world_size)
        else:
            self.engine = TorchEngine(policy, optimizer, cfg, accelerator, self.any_rank)
        set_group_timeouts(cfg.timeout)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def shard(self, items: Sequence[Any]) -> Sequence[Any]:
        """Every world-th item, from this process's rank on. A minibatch then holds the same prompts in any world."""
        return items[self.rank :: self.world_size]

    def gather(self, items: Sequence[Any]) -> list[Any]:
        """The items of all processes in their global order, on every process: the inverse of `shard`."""
        if self.world_size == 1:
            return list(items)
        shards: list[list[Any]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(shards, list(items))
        ranks = zip_longest(*shards, fillvalue=MISSING_ITEM)
        return [item for rank_by_rank in ranks for item in rank_by_rank if item is not MISSING_ITEM]

    def sum(self, x: Tensor) -> Tensor:
        if self.world_size == 1:
            return x.clone()
        total = x.clone().to(self.device)  # where processes meet
        dist.all_reduce(total)
        return total.to(x.device)

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is true on at least one process."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def compute_within_memory(self, compute: Callable[[int], T], rows: int) -> T:
        """Return compute(rows). Each time memory runs out, halve the rows, in this call and all later ones.

        UserError where it runs out with one row, where other processes wait for the gradients of this one, or where the
        engine cannot make part of a step again.
        """
        while True:
            rows = min(rows, self.max_micro_batch_rows or rows)
            try:
                return compute(rows)
            except (RuntimeError, MemoryError) as error:
                if not hardware.is_out_of_memory(error):
                    raise
            # Only here, when the error is forgotten, are the tensors of its frames, too.
            self.max_micro_batch_rows = self._halve_rows(rows)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _halve_rows(self, rows: int) -> int:
        ran_out = f"memory ran out with {rows} rows in a forward pass"
        if rows == 1:
            raise UserError(f"memory ran out with one row in a forward pass: {self.out_of_memory_hint}")
        if self.world_size > 1 or not self.engine.reset_for_retry():
            raise UserError(f"{ran_out}: go on with --resume and --algorithm.micro_batch {rows // 2}")
        print(f"! {ran_out}: {rows // 2} from now on, as of algorithm.micro_batch = {rows // 2}", flush=True)
        return rows // 2

    def accumulate(self, micro_batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yield the micro-batches. Processes exchange whole gradients once, at the last one, and sharded ones at each.

        There, all gather parameters together: one that has fewer micro-batches takes part in the others' with its last.
        """
        own = len(micro_batches)
        rounds = max(self.gather([own])) if self.engine.is_lockstep else own
        for i in range(rounds):
            with self.engine.micro_batch_context(is_last=i == rounds - 1):
                if i < own:
                    yield micro_batches[i]
                else:
                    self.backward(0 * self.policy.score(micro_batches[-1].select_rows(slice(1))).logprobs.sum())

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> dict[str, float]:
        """Clip the gradient, take a step, clear. A gradient that is not finite is thrown away and counted.

        So is one that is 0, of dead groups: there is nothing to learn, and momentum alone would move the weights.
        """
        self.updates += 1
        lr = self.cfg.compute_lr(self.updates, self.total_updates)
        taken = self.engine.step(lr)
        return {**taken, "lr": lr, "idle": float(taken["grad_norm"] == 0)}

    def get_peak_memory_gb(self) -> float:
        """Peak memory of this process in GB: of its GPU, else resident."""
        return hardware.get_peak_memory_gb(self.device)

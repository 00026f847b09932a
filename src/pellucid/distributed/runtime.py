"""The runtime: the processes of a run, and the engine that takes their optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from pellucid.algorithm.batch import Batch
from pellucid.algorithm.settings import AdamWConfig, LRAdaptation
from pellucid.distributed.deepspeed import ZeroEngine
from pellucid.distributed.process_group import join_process_group, set_group_timeouts
from pellucid.distributed.settings import RuntimeConfig
from pellucid.distributed.torch_engine import TorchEngine
from pellucid.types import UserError
from pellucid.utils import hardware

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

T = TypeVar("T")


class Runtime:
    """This process and the others that a launcher started, which train on the gradient of a global sum.

    `total_updates` is the number of optimizer steps of the run, for the learning rate.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: AdamWConfig,
        total_updates: int,
        cfg: RuntimeConfig = RuntimeConfig(),  # noqa: B008 - frozen
    ) -> None:
        self.optimizer_cfg, self.total_updates, self.updates = optimizer, total_updates, 0
        self.lr_adaptation = LRAdaptation()
        self.max_micro_batch_rows = 0
        """The maximum rows in a forward pass since memory ran out; 0 if it never has."""
        self.out_of_memory_hint = "set a lower sampler.max_tokens"
        """The advice in the error if memory runs out with one row."""
        self.policy, self.device = policy, policy.device
        join_process_group(policy.device, cfg.timeout)
        accelerator = Accelerator(cpu=policy.device.type == "cpu", device_placement=False)
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes
        self.engine: TorchEngine | ZeroEngine
        if cfg.engine == "deepspeed":
            self.engine = ZeroEngine(policy, optimizer, cfg.zero_stage, self.world_size)
        else:
            self.engine = TorchEngine(policy, optimizer, cfg, accelerator, self.any_rank)
        self.timeout_minutes = cfg.timeout
        self.group: dist.ProcessGroup | None = None
        """The process group of exchanges; None is that of the run."""
        set_group_timeouts(cfg.timeout)

    def for_thread(self) -> Runtime:
        """Return this runtime for another thread: its exchanges never mix with those of this one.

        All processes call this together.
        """
        if self.world_size == 1:
            return self
        runtime = copy(self)
        group = dist.new_group(backend="gloo", timeout=timedelta(minutes=self.timeout_minutes))
        assert isinstance(group, dist.ProcessGroup)
        runtime.group = group
        runtime.device = torch.device("cpu")  # gloo exchanges tensors in host memory
        return runtime

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def shard(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return every `world_size`-th item from `rank` on, so that minibatches do not depend on the world size."""
        return items[self.rank :: self.world_size]

    def gather(self, items: Sequence[Any]) -> list[Any]:
        """Return the items of all processes in their global order, on every process: the inverse of `shard`."""
        if self.world_size == 1:
            return list(items)
        shards: list[list[Any]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(shards, list(items), group=self.group)
        return [shard[i] for i in range(max(map(len, shards))) for shard in shards if i < len(shard)]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, on every process."""
        if self.world_size == 1:
            return x.clone()
        total = x.clone().to(self.device)  # collectives need the device of the process group
        dist.all_reduce(total, group=self.group)
        return total.to(x.device)

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is true on at least one process."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def compute_within_memory(self, compute: Callable[[int], T], rows: int) -> T:
        """Return compute(rows). Each time memory runs out, halve the rows, in this call and in all later ones.

        Raises UserError if it runs out with one row, or in one of several processes, or with an engine that cannot
        repeat a part of a step.
        """
        while True:
            rows = min(rows, self.max_micro_batch_rows or rows)
            try:
                return compute(rows)
            except (RuntimeError, MemoryError) as error:
                if not hardware.is_out_of_memory(error):
                    raise
            # Outside of `except`, the error no longer keeps the tensors of its frames alive.
            self.max_micro_batch_rows = self._halve_rows(rows)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _halve_rows(self, rows: int) -> int:
        ran_out = f"memory ran out with {rows} rows in a forward pass"
        if rows == 1:
            raise UserError(f"memory ran out with one row in a forward pass: {self.out_of_memory_hint}")
        if self.world_size > 1 or not self.engine.reset_for_retry():
            raise UserError(f"{ran_out}: continue with --resume and --algorithm.micro_batch {rows // 2}")
        print(f"! {ran_out}: {rows // 2} from now on, as with algorithm.micro_batch = {rows // 2}", flush=True)
        return rows // 2

    def accumulate(self, micro_batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yield the micro-batches of an optimizer step, in the context of the engine.

        If parameters are sharded, each pass gathers them in all processes, so a process with fewer micro-batches makes
        up for them with passes of one row whose gradient is 0.
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
        """Clip the gradient, take an optimizer step and clear the gradient. Return metrics."""
        self.updates += 1
        lr = self.optimizer_cfg.compute_lr(self.updates, self.total_updates) * self.lr_adaptation.factor
        metrics = self.engine.step(lr)
        return {**metrics, "lr": lr, "idle": float(metrics["grad_norm"] == 0)}

    def adapt_lr(self, update_kl: float) -> None:
        """Adapt the learning rate of the next steps to optimizer.desired_kl."""
        self.lr_adaptation = self.optimizer_cfg.adapt_lr(self.lr_adaptation, update_kl, self.updates)

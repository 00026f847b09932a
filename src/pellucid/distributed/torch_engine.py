"""Optimizer steps by torch: on parameters that stand in every process, or on FSDP2's parts of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_

from pellucid.algorithm.grpo import Batch, Scores
from pellucid.algorithm.settings import AdamWConfig
from pellucid.distributed import fsdp2, optimizer
from pellucid.distributed.fsdp2 import ShardablePolicy
from pellucid.distributed.optimizer import OffloadedAdamW, OnePassAdamW
from pellucid.distributed.settings import RuntimeConfig
from pellucid.models.decoder import Decoder
from pellucid.models.linear import gather_full_tensor

Moments = Mapping[str, Mapping[str, Tensor]]
"""The tensors of an optimizer by moment and parameter name."""


class TrainablePolicy(ShardablePolicy, Protocol):
    """The part of a policy that a runtime needs."""

    dtype: torch.dtype

    def score(self, batch: Batch) -> Scores: ...
    def trainable(self) -> dict[str, Tensor]: ...
    def masters(self) -> dict[str, Tensor]: ...
    def load_trainable(self, tensors: Mapping[str, Tensor]) -> None: ...
    def weights(self) -> dict[str, Tensor]: ...


def build_optimizer(cfg: AdamWConfig, policy: TrainablePolicy) -> torch.optim.Optimizer:
    parameters = policy.trainable().values()
    facts = {"lr": cfg.lr, "betas": cfg.betas, "eps": cfg.eps, "weight_decay": cfg.weight_decay}
    if cfg.offload and not policy.sharded_modules:
        return OffloadedAdamW(parameters, **facts, masters=list(policy.masters().values()))
    if optimizer.supports_one_pass(parameters):
        decoders = [module for module in policy.module.modules() if isinstance(module, Decoder)]
        return OnePassAdamW(
            parameters, **facts, cast_weights=[part for each in decoders for part in each.list_cast_weights()]
        )
    return torch.optim.AdamW(parameters, **facts, fused=policy.device.type != "mps")


class TorchEngine:
    """`ddp`, where every process holds the whole model, and `fsdp2`, where each holds a part of every parameter.

    anywhere: whether something is true in at least one process.
    """

    def __init__(
        self,
        policy: TrainablePolicy,
        cfg: AdamWConfig,
        runtime: RuntimeConfig,
        accelerator: Accelerator,
        any_rank: Callable[[bool], bool],
    ) -> None:
        self.policy, self.cfg, self.accelerator, self.any_rank = policy, cfg, accelerator, any_rank
        world = accelerator.num_processes
        self.mesh = fsdp2.make_device_mesh(policy.device, world, runtime.shards) if runtime.engine == "fsdp2" else None
        if self.mesh:
            fsdp2.shard_policy(policy, self.mesh, cfg.offload)
        else:
            policy.module = accelerator.prepare_model(policy.module)
        self.module, self.parameters = policy.module, policy.trainable()
        self.optimizer = build_optimizer(cfg, policy)
        self.scaler = GradScaler(policy.device.type, enabled=policy.dtype == torch.float16)
        self.has_nonfinite_loss = False  # whether a loss of the next optimizer step, in this process, was not finite

    @property
    def is_lockstep(self) -> bool:
        """Whether processes make as many forward and backward passes as one another."""
        return self.mesh is not None

    def shard_reference(self, reference: ShardablePolicy) -> None:
        """Shard a frozen policy on the same device, where the trained one is sharded."""
        if self.mesh and reference.device == self.policy.device:
            fsdp2.shard_policy(reference, self.mesh, offload=False)

    def micro_batch_context(self, is_last: bool) -> AbstractContextManager[Any]:
        """Around the passes of a micro-batch. Whole gradients meet at the last one of an optimizer step."""
        return nullcontext() if is_last or self.mesh else self.accelerator.no_sync(self.module)

    def backward(self, loss: Tensor) -> None:
        loss = loss * self.accelerator.num_processes  # data parallelism averages over processes; the loss is a sum
        if self.scaler.is_enabled():
            self.has_nonfinite_loss |= not bool(loss.detach().isfinite())
            loss = self.scaler.scale(loss.to(self.policy.device))
        self.accelerator.backward(loss)

    def reset_for_retry(self) -> bool:
        """Drop the gradients of a step that is to be made again. Whether it can be: FSDP2 goes on waiting for the end
        of a backward pass that was broken off, and hands out no gradient any more.
        """
        self.optimizer.zero_grad(set_to_none=True)
        return self.mesh is None

    def step(self, lr: float) -> dict[str, float]:
        """Clip the gradient, take a step where there is one to take, clear. Return the norm and what was skipped."""
        self.scaler.unscale_(self.optimizer)
        norm = float(gather_full_tensor(self.clip_gradients(self.cfg.max_grad_norm or math.inf)))
        self.optimizer.param_groups[0]["lr"] = lr
        if math.isfinite(norm) and norm > 0:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, **self.update_loss_scale(norm)}

    def clip_gradients(self, max_norm: float) -> Tensor:
        """The norm of the gradient, which the next step takes as if it were no longer than `limit`."""
        if isinstance(self.optimizer, OnePassAdamW):
            return self.optimizer.clip_gradients(max_norm)
        return clip_grad_norm_(self.parameters.values(), max_norm)

    def update_loss_scale(self, norm: float) -> dict[str, float]:
        """In fp16: a gradient that overflowed halves the scale of the loss, 2000 in a row that did not double it.

        Not so where a loss was not finite, or the scale is 1: what does not fit then is the model's own, and is skipped
        as in any dtype. arXiv 1710.03740, section 3.2.
        """
        finite, scale = math.isfinite(norm), self.scaler.get_scale()
        overflow = not finite and scale > 1 and not self.any_rank(self.has_nonfinite_loss)
        self.scaler.update(None if finite or overflow else scale)
        self.has_nonfinite_loss = False
        about_scale = {"skipped/overflow": float(overflow), "loss_scale": scale} if self.scaler.is_enabled() else {}
        return {"skipped": float(not finite and not overflow), **about_scale}

    def weights(self) -> dict[str, Tensor]:
        """All parameters by name, trained or not, unrounded; of sharded ones this process's part."""
        return {**self.policy.weights(), **self.policy.masters()}

    def masters(self) -> dict[str, Tensor]:
        return self.policy.masters()

    def load_masters(self, masters: Mapping[str, Tensor]) -> None:
        self.policy.load_trainable(masters)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        moments: dict[str, dict[str, Tensor]] = {}
        for name, p in self.parameters.items():
            for moment, value in self.optimizer.state[p].items():
                moments.setdefault(moment, {})[name] = value
        return moments

    def load_moments(self, moments: Moments) -> None:
        for moment, values in moments.items():
            for name, value in values.items():
                p = self.parameters[name]
                # Fused AdamW keeps its step count beside the weights, any other on the CPU.
                on_cpu = self.cfg.offload or (moment == "step" and not self.optimizer.defaults.get("fused"))
                self.optimizer.state[p][moment] = value if on_cpu else value.to(p.device)

    def state(self) -> dict[str, Any]:
        """Facts of a checkpoint besides tensors."""
        return {"scaler": self.scaler.state_dict()} if self.scaler.is_enabled() else {}

    def load_state(self, facts: Mapping[str, Any]) -> None:
        if "scaler" in facts:
            self.scaler.load_state_dict(facts["scaler"])

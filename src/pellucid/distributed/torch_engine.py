"""Optimizer steps by PyTorch, for the engines `ddp` and `fsdp2`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_

from pellucid.algorithm.settings import AdamWConfig
from pellucid.distributed import fsdp2, optimizer
from pellucid.distributed.optimizer import OffloadedAdamW, OnePassAdamW
from pellucid.distributed.settings import RuntimeConfig
from pellucid.models.decoder import Decoder
from pellucid.models.linear import accumulate_in_place, gather_full_tensor

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

Moments = Mapping[str, Mapping[str, Tensor]]
"""The tensors of an optimizer, by moment and then by parameter name."""


def build_optimizer(cfg: AdamWConfig, policy: Policy) -> torch.optim.Optimizer:
    parameters = policy.trainable().values()
    settings = {"lr": cfg.lr, "betas": cfg.betas, "eps": cfg.eps, "weight_decay": cfg.weight_decay}
    if cfg.offload and not policy.sharded_modules:
        return OffloadedAdamW(parameters, **settings, masters=list(policy.masters().values()))
    if optimizer.supports_one_pass(parameters):
        decoders = [module for module in policy.module.modules() if isinstance(module, Decoder)]
        return OnePassAdamW(
            parameters, **settings, cast_weights=[part for each in decoders for part in each.list_cast_weights()]
        )
    return torch.optim.AdamW(parameters, **settings, fused=policy.device.type != "mps")


class TorchEngine:
    """`ddp`, where every process holds the whole model, or `fsdp2`, where each holds a shard of every parameter.

    `any_rank` returns whether a flag is true in at least one process.
    """

    def __init__(
        self,
        policy: Policy,
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
        self.has_nonfinite_loss: bool | Tensor = False
        """Whether a loss of the next optimizer step, in this process, was not finite; on the device."""

    @property
    def is_lockstep(self) -> bool:
        """Whether all processes must make the same number of forward and backward passes."""
        return self.mesh is not None

    def shard_reference(self, reference: Policy) -> None:
        """Shard the reference if the policy is sharded and both are on the same device."""
        if self.mesh and reference.device == self.policy.device:
            fsdp2.shard_policy(reference, self.mesh, offload=False)

    def micro_batch_context(self, is_last: bool) -> AbstractContextManager[Any]:
        """Return a context in which unsharded gradients are exchanged only at the last micro-batch."""
        return nullcontext() if is_last or self.mesh else self.accelerator.no_sync(self.module)

    def backward(self, loss: Tensor) -> None:
        loss = loss * self.accelerator.num_processes  # data parallelism averages over processes; the loss is a sum
        if self.scaler.is_enabled():
            self.has_nonfinite_loss = ~loss.detach().isfinite() | self.has_nonfinite_loss
            loss = self.scaler.scale(loss.to(self.policy.device))
        # Other engines have hooks for the gradients that autograd adds.
        is_alone = self.accelerator.num_processes == 1 and self.mesh is None
        with accumulate_in_place(is_alone and self.policy.device.type == "cuda"):
            self.accelerator.backward(loss)

    def reset_for_retry(self) -> bool:
        """Drop the gradients of an interrupted step. Return whether the step can be repeated.

        With FSDP2 it cannot: after an interrupted backward pass, FSDP2 waits for its end and returns no gradients.
        """
        self.optimizer.zero_grad(set_to_none=True)
        return self.mesh is None

    def step(self, lr: float) -> dict[str, float]:
        """Clip the gradient, take a step unless the gradient is 0 or not finite, and clear it. Return metrics."""
        self.scaler.unscale_(self.optimizer)
        norm = float(gather_full_tensor(self.clip_gradients(self.cfg.max_grad_norm or math.inf)))
        self.optimizer.param_groups[0]["lr"] = lr
        if math.isfinite(norm) and norm > 0:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, **self.update_loss_scale(norm)}

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Return the norm of the gradient, and scale the gradient down to `max_norm` for the next step."""
        if isinstance(self.optimizer, OnePassAdamW):
            return self.optimizer.clip_gradients(max_norm)
        return clip_grad_norm_(self.parameters.values(), max_norm)

    def update_loss_scale(self, norm: float) -> dict[str, float]:
        """Update the loss scale of fp16 (arXiv 1710.03740, section 3.2), and return metrics.

        The scale is halved if the gradient overflows, and doubled after 2000 steps without overflow. If a loss was not
        finite or the scale is 1, the scale is not the cause: it stays, and the step is skipped as in any dtype.
        """
        is_finite, scale = math.isfinite(norm), self.scaler.get_scale()
        overflow = not is_finite and scale > 1 and not self.any_rank(bool(self.has_nonfinite_loss))
        self.scaler.update(None if is_finite or overflow else scale)
        self.has_nonfinite_loss = False
        metrics = {"skipped": float(not is_finite and not overflow)}
        if self.scaler.is_enabled():
            metrics |= {"skipped/overflow": float(overflow), "loss_scale": scale}
        return metrics

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters by name, or their shards in this process; trained ones in fp32."""
        return {**self.policy.weights(), **self.policy.masters()}

    def masters(self) -> dict[str, Tensor]:
        """Return the trained parameters by name, in fp32."""
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
                # Fused AdamW keeps its step count on the device of the weights, any other on the CPU.
                on_cpu = self.cfg.offload or (moment == "step" and not self.optimizer.defaults.get("fused"))
                self.optimizer.state[p][moment] = value if on_cpu else value.to(p.device)

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint saves besides tensors."""
        return {"scaler": self.scaler.state_dict()} if self.scaler.is_enabled() else {}

    def load_state(self, facts: Mapping[str, Any]) -> None:
        if "scaler" in facts:
            self.scaler.load_state_dict(facts["scaler"])

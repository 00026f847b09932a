"""DeepSpeed's ZeRO (arXiv 1910.02054): stage 2 shards gradients and optimizer state, stage 3 the weights as well.

DeepSpeed holds the fp32 masters and their moments. The parameters of the model are in the compute dtype, and gradients
are summed in fp32. Accelerate's plug-in for DeepSpeed is not used, since its backward pass takes the optimizer step,
and the training loop decides on clipping, learning rate and micro-batches.

Checkpoints have the layout of FSDP2, tensor by tensor, so that any engine can resume them.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from pellucid.algorithm.settings import AdamWConfig
from pellucid.distributed import fsdp2
from pellucid.distributed.process_group import raise_in_all_processes
from pellucid.distributed.settings import REDUCE_BUCKET_ELEMENTS
from pellucid.distributed.torch_engine import Moments
from pellucid.models.linear import POLICY_MISMATCH, copy_to_cpu, gather_full_tensor
from pellucid.policy.stored_weights import StoredWeights
from pellucid.types import UserError
from pellucid.utils.plugins import import_extra

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

PERSISTENCE_THRESHOLD_ELEMENTS = 10_000
"""Parameters with fewer elements, such as norms, are not sharded in stage 3."""
_MOMENT_NAMES = ("exp_avg", "exp_avg_sq")


class _SkipZeroGradientAdamW(torch.optim.AdamW):
    """AdamW that takes no step if the gradient is 0, since momentum alone would move the weights."""

    get_grad_norm: Callable[[], float]

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.get_grad_norm() > 0:
            super().step(closure)


class _ShardedParameters:
    """Parameters that stage 3 has sharded. They are gathered from `unshard` to `reshard`."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        self.parameters = list(parameters)

    def unshard(self) -> None:
        if missing := [p for p in self.parameters if p.ds_status.name == "NOT_AVAILABLE"]:
            missing[0].all_gather(missing)

    def reshard(self, include_persistent: bool = False) -> None:
        """Keep only this process's shards, if `include_persistent` also of parameters that stage 3 leaves unsharded."""
        chosen = [p for p in self.parameters if include_persistent or not p.ds_persist]
        gathered = [p for p in chosen if p.ds_status.name == "AVAILABLE"]
        if gathered:
            gathered[0].partition(gathered)


class ZeroEngine:
    """A training engine like `TorchEngine`: DeepSpeed takes its optimizer steps."""

    is_lockstep = True

    def __init__(self, policy: Policy, cfg: AdamWConfig, stage: int, world_size: int) -> None:
        self.policy, self.stage, self.world_size = policy, stage, world_size
        self.mesh: DeviceMesh = fsdp2.make_device_mesh(policy.device, world_size, 0)
        self.deepspeed = _import_deepspeed(policy.device)
        will_round = any(p.dtype != policy.dtype for p in policy.trainable().values())
        stored = policy.stored_weights
        unrounded = {
            name: copy_to_cpu(p) for name, p in policy.trainable().items() if will_round and name not in stored
        }
        external_parameters = policy.list_external_parameters() if stage == 3 else []
        self.deepspeed_config = _build_deepspeed_config(policy.dtype, cfg, stage)
        options = {"lr": cfg.lr, "betas": cfg.betas, "eps": cfg.eps, "weight_decay": cfg.weight_decay}
        self.optimizer = _SkipZeroGradientAdamW(list(policy.trainable().values()), **options, fused=True)
        self.optimizer.get_grad_norm = self.get_grad_norm
        self.zero_optimizer: Any = None
        self.module = self.wrap_policy(policy, external_parameters, self.optimizer)
        self.zero_optimizer = self.module.optimizer
        self.parameters = policy.trainable()
        self.initialize_moments()
        if will_round and stored:
            raise_in_all_processes(lambda: self.read_masters(stored, unrounded))
        elif unrounded:
            self.load_masters(unrounded)

    def partition_placeholders(self, policy: Policy) -> None:
        """Partition the parameters of a policy one after another, and read this process's shards of placeholders.

        A process has memory for all elements of one parameter at a time. All processes call this together; if one
        cannot read its shards, all raise its UserError.
        """
        stored, policy.stored_weights = policy.stored_weights, StoredWeights()
        parameters = cast(list[Any], list(policy.model.parameters()))
        placeholders: dict[Any, str] = {p: name for name, p in policy.model.named_parameters() if name in stored}
        options = {"dtype": policy.dtype, "device": policy.device}
        for p in parameters:
            p.data = torch.empty(p.shape, **options) if p in placeholders else p.data.to(policy.dtype)
            if p is parameters[0]:
                self.deepspeed.zero.Init(
                    module=torch.nn.ParameterList([p]), config_dict_or_path=self.deepspeed_config, dtype=policy.dtype
                )
            else:
                parameters[0].convert_to_zero_parameters(param_list=[p])

        def read() -> None:
            for p, name in placeholders.items():
                stored.read_elements(name, self.mesh.get_rank() * p.ds_tensor.numel(), p.ds_tensor)

        raise_in_all_processes(read)

    def read_masters(self, stored: StoredWeights, others: Mapping[str, Tensor]) -> None:
        """Set the masters of this process to the unrounded weights: those of the files, and other ones by name."""
        _ShardedParameters(self.parameters.values()).reshard(include_persistent=True)
        for name, p in self.parameters.items():
            if name in stored:
                shard = torch.empty_like(cast(Any, p).ds_tensor, dtype=torch.float32)
                stored.read_elements(name, self.mesh.get_rank() * shard.numel(), shard)
                self.deepspeed.utils.safe_set_local_fp32_param(p, shard)
            else:
                self.write_local_shard(p, others[name])

    def wrap_policy(
        self,
        policy: Policy,
        external_parameters: Sequence[tuple[torch.nn.Module, list[Any]]],
        optimizer: Any = None,
    ) -> Any:
        """Replace the module of a policy by a DeepSpeed engine around it, and return the engine."""
        module = policy.module
        if policy.stored_weights:
            self.partition_placeholders(policy)
        policy.module, *_ = self.deepspeed.initialize(model=module, optimizer=optimizer, config=self.deepspeed_config)
        for reader, parameters in external_parameters:
            for p in parameters:
                self.deepspeed.zero.register_external_parameter(reader, p)
        if self.stage == 3:
            policy.sharded_modules = [_ShardedParameters(module.parameters())]
            # Parameters that were gathered for sampling are freed before the layers gather them one by one.
            policy.module.register_forward_pre_hook(lambda *_: policy.sharded_modules[0].reshard())
        return policy.module

    def shard_reference(self, reference: Policy) -> None:
        if self.stage == 3 and reference.device == self.policy.device:
            self.wrap_policy(reference, reference.list_external_parameters())

    def micro_batch_context(self, is_last: bool) -> AbstractContextManager[Any]:
        self.module.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss = loss * self.world_size  # DeepSpeed averages over processes; the loss is a sum over them
        self.module.backward(loss.to(self.policy.device))

    def reset_for_retry(self) -> bool:
        return False  # DeepSpeed cannot repeat a part of a step

    def get_grad_norm(self) -> float:
        """Return the norm before clipping, which DeepSpeed computes before it calls the optimizer."""
        return float(self.zero_optimizer._global_grad_norm)

    def step(self, lr: float) -> dict[str, float]:
        self.optimizer.param_groups[0]["lr"] = lr
        self.module.step()
        norm = math.inf if self.zero_optimizer.overflow else self.get_grad_norm()
        return {"grad_norm": norm, "skipped": float(not math.isfinite(norm))}

    def initialize_moments(self) -> None:
        """Set the moments to 0, as AdamW does in the first step, so that they can be read and loaded before it."""
        for flat in self.get_flat_masters():
            self.optimizer.state[flat] = {"step": torch.zeros((), device=flat.device)} | {
                moment: torch.zeros_like(flat) for moment in _MOMENT_NAMES
            }
        if self.stage == 2:
            self.zero_optimizer._lazy_init_hp_params_optimizer_state()

    def get_flat_masters(self) -> list[Tensor]:
        """Return this process's shard of the masters: one flat tensor for each parameter group."""
        return (
            self.zero_optimizer.fp32_partitioned_groups_flat
            if self.stage == 3
            else self.zero_optimizer.single_partition_of_fp32_groups
        )

    def shard_tensor(self, value: Tensor) -> Tensor:
        """Return the shard of this process in the layout of FSDP2."""
        return distribute_tensor(value, self.mesh, [Shard(0)], src_data_rank=None)

    def masters(self) -> dict[str, Tensor]:
        get_master = self.deepspeed.utils.safe_get_full_fp32_param
        return {name: self.shard_tensor(get_master(p)) for name, p in self.parameters.items()}

    def moments(self) -> dict[str, dict[str, Tensor]]:
        get_moment = self.deepspeed.utils.safe_get_full_optimizer_state
        steps = self.optimizer.state[self.get_flat_masters()[0]]["step"]
        moments = {
            moment: {name: self.shard_tensor(get_moment(p, moment)) for name, p in self.parameters.items()}
            for moment in _MOMENT_NAMES
        }
        return {"step": {name: steps.clone() for name in self.parameters}, **moments}

    def weights(self) -> dict[str, Tensor]:
        frozen = {name: p for name, p in self.policy.weights().items() if name not in self.parameters}
        return {**{name: self.shard_tensor(gather_full_tensor(p)) for name, p in frozen.items()}, **self.masters()}

    def load_masters(self, masters: Mapping[str, Tensor]) -> None:
        if masters.keys() != self.parameters.keys():
            raise UserError(POLICY_MISMATCH)
        if self.stage == 3:
            # Gathered parameters would keep their old values.
            _ShardedParameters(self.parameters.values()).reshard(include_persistent=True)
        for name, p in self.parameters.items():  # in the same order in all processes
            self.write_local_shard(p, gather_full_tensor(masters[name]))
        if self.stage == 2:
            self.zero_optimizer.update_lp_params()
            for p in self.parameters.values():
                torch.autograd.graph.increment_version(p)

    def load_moments(self, moments: Moments) -> None:
        if not moments:  # the checkpoint is from before the first step
            return
        for flat in self.get_flat_masters():
            self.optimizer.state[flat]["step"].copy_(next(iter(moments["step"].values())))
        for moment in _MOMENT_NAMES:
            for name, p in self.parameters.items():
                self.write_local_shard(p, gather_full_tensor(moments[moment][name]), moment)

    def write_local_shard(self, p: Any, value: Tensor, moment: str | None = None) -> None:
        """Set this process's shard of a master, or of one of its moments, from the full tensor."""
        tools, value = self.deepspeed.utils, value.to(p.device, torch.float32)
        if self.stage == 2:
            if moment:
                tools.safe_set_full_optimizer_state(p, value, moment)
            else:
                tools.safe_set_full_fp32_param(p, value)
            return
        size = p.ds_tensor.numel()
        shard = F.pad(value.flatten(), (0, size * self.world_size - value.numel())).split(size)[self.mesh.get_rank()]
        if moment:
            tools.safe_set_local_optimizer_state(p, shard, moment)
        else:
            tools.safe_set_local_fp32_param(p, shard)
            p.ds_tensor.copy_(shard)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, facts: Mapping[str, Any]) -> None:
        pass


def _import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for a device, which it chooses at import, and silence its log. Raises UserError."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    module = import_extra("deepspeed", "deepspeed", 'runtime.engine = "deepspeed"')
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed needs it; a single process without a launcher has none
    return module


def _build_deepspeed_config(dtype: torch.dtype, cfg: AdamWConfig, stage: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration. It sums micro-batches unscaled, since token weights already scale the loss."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": cfg.max_grad_norm,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
            "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD_ELEMENTS,
            "offload_optimizer": {"device": "cpu" if cfg.offload else "none"},
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }

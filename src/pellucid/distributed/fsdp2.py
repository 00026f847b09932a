"""FSDP2: of each parameter, its gradient and its moments a process keeps a part; a layer is gathered while it computes.

`torch.distributed.fsdp.fully_shard`, on our own decoder and on transformers' models alike. Masters stay in fp32; layers
of our decoder are gathered in the dtype of computing, and gradients are added up in fp32. A mesh of two dimensions
shards within a group of processes, such as those of a machine, and replicates across (hybrid sharding).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from pellucid.models.linear import ShardedModule
from pellucid.types import UserError


class ShardablePolicy(Protocol):
    """The part of a policy that is sharded."""

    module: nn.Module
    sharded_modules: Sequence[ShardedModule]

    device: torch.device

    @property
    def gathered_dtype(self) -> torch.dtype | None: ...
    def blocks(self) -> list[nn.Module]: ...
    def list_external_parameters(self) -> list[tuple[nn.Module, list[Any]]]: ...


def make_device_mesh(device: torch.device, world_size: int, shard_count: int) -> DeviceMesh:
    """All processes in groups of `shards`, 0 being one group. UserError where they do not divide the processes."""
    if not dist.is_initialized():  # one process, started by itself
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    shard_count = shard_count or world_size
    if world_size % shard_count:
        raise UserError(f"runtime.shards = {shard_count} must divide the number of processes, which is {world_size}")
    if shard_count == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh(
        device.type, (world_size // shard_count, shard_count), mesh_dim_names=("replicate", "shard")
    )


def shard_policy(policy: ShardablePolicy, mesh: DeviceMesh, offload: bool) -> None:
    """Shard a policy in place: each block is a group of parameters, what is left of the module another."""
    wide = MixedPrecisionPolicy(policy.gathered_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    away = CPUOffloadPolicy() if offload and policy.device.type != "cpu" else OffloadPolicy()
    one = partial(fully_shard, mesh=mesh, mp_policy=wide, offload_policy=away)
    policy.sharded_modules = [one(module) for module in (*policy.blocks(), policy.module)]

"""FSDP2: each process holds a shard of every parameter, gradient and moment, and gathers each layer to compute it.

This is `torch.distributed.fsdp.fully_shard` on our decoder and on transformers' models. Masters are in fp32. Layers of
our decoder are gathered in the compute dtype, and gradients are summed in fp32. A mesh of two dimensions shards within
a group of processes, such as those of a machine, and replicates across groups (hybrid sharding).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from pellucid.types import UserError

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy


def make_device_mesh(device: torch.device, world_size: int, shard_count: int) -> DeviceMesh:
    """Return the mesh of all processes, in groups of `shard_count` that share the parameters; 0 makes one group.

    Raises UserError if `shard_count` does not divide the number of processes.
    """
    if not dist.is_initialized():  # a single process without a launcher
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    shard_count = shard_count or world_size
    if world_size % shard_count:
        raise UserError(f"runtime.shards = {shard_count} must divide the number of processes, which is {world_size}")
    if shard_count == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh(
        device.type, (world_size // shard_count, shard_count), mesh_dim_names=("replicate", "shard")
    )


def shard_policy(policy: Policy, mesh: DeviceMesh, offload: bool) -> None:
    """Shard a policy in place. Each block is gathered alone, and the rest of the module as one unit."""
    mixed_precision = MixedPrecisionPolicy(policy.gathered_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offloading = CPUOffloadPolicy() if offload and policy.device.type != "cpu" else OffloadPolicy()
    policy.sharded_modules = [
        fully_shard(module, mesh=mesh, mp_policy=mixed_precision, offload_policy=offloading)
        for module in (*policy.blocks(), policy.module)
    ]

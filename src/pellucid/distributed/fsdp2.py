"""FSDP2: each process holds a shard of every parameter, gradient and moment, and gathers each layer to compute it.

This is `torch.distributed.fsdp.fully_shard` on our decoder and on transformers' models. Masters are in fp32. Layers of
our decoder are gathered in the compute dtype, and gradients are summed in fp32. A mesh of two dimensions shards within
a group of processes, such as those of a machine, and replicates across groups (hybrid sharding).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pellucid.distributed.process_group import raise_in_all_processes
from pellucid.policy.stored_weights import StoredWeights
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
    """Shard a policy in place. Each block is gathered alone, and the rest of the module as one unit.

    Placeholders become shards whose rows are read from the files. All processes call this together; if one cannot read
    its rows, all raise its UserError.
    """
    if policy.stored_weights:
        _move_placeholders_to_meta(policy)
    mixed_precision = MixedPrecisionPolicy(policy.gathered_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offloading = CPUOffloadPolicy() if offload and policy.device.type != "cpu" else OffloadPolicy()
    policy.sharded_modules = [
        fully_shard(module, mesh=mesh, mp_policy=mixed_precision, offload_policy=offloading)
        for module in (*policy.blocks(), policy.module)
    ]
    on_cpu = isinstance(offloading, CPUOffloadPolicy)
    raise_in_all_processes(lambda: _read_shards(policy, mesh, torch.device("cpu") if on_cpu else policy.device))


def _move_placeholders_to_meta(policy: Policy) -> None:
    """Replace placeholders by parameters on the meta device, which FSDP2 can shard."""
    on_meta = {
        p: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
        for name, p in policy.model.named_parameters()
        if name in policy.stored_weights
    }
    for module in policy.model.modules():
        for name, p in module.named_parameters(recurse=False):
            module._parameters[name] = on_meta.get(p, p)


def _read_shards(policy: Policy, mesh: DeviceMesh, device: torch.device) -> None:
    """Read the rows of this process of each parameter on the meta device. Raise UserError if a file cannot be read."""
    stored, policy.stored_weights = policy.stored_weights, StoredWeights()
    names = {p: name for name, p in policy.model.named_parameters() if name in stored}
    shards = dict[Tensor, nn.Parameter]()
    for module in policy.model.modules():
        read = {}
        for name, p in module.named_parameters(recurse=False):
            if p in names and p not in shards:  # a tied one is read once
                shards[p] = _read_shard(names[p], cast(DTensor, p), stored, mesh, device)
            if p in shards:
                read[name] = shards[p]
        if read:
            module.load_state_dict(read, strict=False, assign=True)  # FSDP2 then takes the new parameters


def _read_shard(name: str, p: DTensor, stored: StoredWeights, mesh: DeviceMesh, device: torch.device) -> nn.Parameter:
    shard_mesh = mesh if mesh.ndim == 1 else mesh["shard"]
    rows = torch.empty(p.to_local().shape, dtype=p.dtype, device=device)
    stored.read_rows(name, min(len(p), shard_mesh.get_local_rank() * -(-len(p) // shard_mesh.size())), rows)
    shard = DTensor.from_local(rows, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
    return nn.Parameter(shard, p.requires_grad)

"""Saves and loads sharded tensors: each process writes and reads its own shards, as safetensors.

This is `torch.distributed.checkpoint` with the storage of Hugging Face. Files contain no pickle, and a shard says where
in its tensor it belongs, so that any number of processes can load them.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor

_MAX_FILE_BYTES = 5 * 2**30
"""The size limit of a file of a saved model. A single tensor may exceed it."""


def has_sharded_tensors(state: Mapping[str, Tensor]) -> bool:
    return any(isinstance(x, DTensor) for x in state.values())


def save_shards(folder: Path, state: Mapping[str, Tensor]) -> list[Path]:
    """Write the shards of this process into a folder, and return their files. All processes must call this.

    Raises OSError in every process if one cannot write.
    """
    _save_distributed(state, HuggingFaceStorageWriter(str(folder), save_distributed=True))
    return list(folder.glob(f"shard-{dist.get_rank() + 1:05d}-*"))


def _save_distributed(state: Mapping[str, Tensor], writer: HuggingFaceStorageWriter) -> None:
    try:
        save(dict(state), storage_writer=writer)
    except CheckpointException as error:  # raised in every process; it is a BaseException
        raise OSError(str(next(iter(error.failures.values()))[0])) from error


def save_consolidated_model(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write sharded tensors as files that transformers can read. The shards are joined on disk, not in memory."""
    writer = HuggingFaceStorageWriter(
        str(folder),
        _assign_files(state),
        save_distributed=True,
        enable_consolidation=True,
        thread_count_consolidation=2,
    )
    _save_distributed(state, writer)
    shutil.rmtree(folder / "sharded", ignore_errors=True)


def _assign_files(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the file number of each tensor, counted from 1."""
    numbers, number, file_bytes = {}, 1, 0
    for name, x in state.items():
        size = x.numel() * x.element_size()
        if file_bytes and file_bytes + size > _MAX_FILE_BYTES:
            number, file_bytes = number + 1, 0
        numbers[name], file_bytes = number, file_bytes + size
    return numbers


def load_shards(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Load tensors that `save_shards` wrote. All processes must call this.

    `like` maps names to tensors with the shape, dtype and sharding to load; other names are ignored.
    """
    reader = HuggingFaceStorageReader(str(folder))
    names = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty_like(like[name]) for name in names if name in like}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # uninitialized, in a single process
        load(state, storage_reader=reader)
    return state


def take_local_shard(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the shard of a tensor for this process if `like` is sharded, else the tensor."""
    if not isinstance(like, DTensor):
        return tensor
    tensor = tensor.to(like.device, like.dtype)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)

"""Tensors that lie in several processes, to disk and back: each writes and reads its own part, as safetensors.

`torch.distributed.checkpoint` with the storage of Hugging Face: no pickle, and a part says where in its tensor it
belongs, so that other numbers of processes, or one, read what these wrote.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor

MAX_FILE_BYTES = 5 * 2**30
"""Of a file of a saved model, at most, but for one larger tensor."""


def has_sharded_tensors(state: Mapping[str, Tensor]) -> bool:
    return any(isinstance(x, DTensor) for x in state.values())


def save_shards(folder: Path, state: Mapping[str, Tensor]) -> list[Path]:
    """Write this process's parts into a folder that all of them share; they call it together. Return its own files.

    OSError, in all processes, where one of them cannot write.
    """
    _save_distributed(state, HuggingFaceStorageWriter(str(folder), save_distributed=True))
    return list(folder.glob(f"shard-{dist.get_rank() + 1:05d}-*"))


def _save_distributed(state: Mapping[str, Tensor], writer: HuggingFaceStorageWriter) -> None:
    try:
        save(dict(state), storage_writer=writer)
    except CheckpointException as failure:  # in every process; it is no Exception
        raise OSError(str(next(iter(failure.failures.values()))[0])) from failure


def save_consolidated_model(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write whole tensors in files as transformers reads them. They are put together on disk, in no one's memory."""
    writer = HuggingFaceStorageWriter(
        str(folder), assign_files(state), save_distributed=True, enable_consolidation=True, thread_count_consolidation=2
    )
    _save_distributed(state, writer)
    shutil.rmtree(folder / "sharded", ignore_errors=True)


def assign_files(state: Mapping[str, Tensor]) -> dict[str, int]:
    """For each tensor the number of its file, from 1 on."""
    numbers, number, filled = {}, 1, 0
    for name, x in state.items():
        size = x.numel() * x.element_size()
        if filled and filled + size > MAX_FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name], filled = number, filled + size
    return numbers


def load_shards(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that `write` wrote, those that `like` knows: of each what this process keeps of it there.

    Processes call it together.
    """
    state = {name: torch.empty_like(like[name]) for name in list_tensor_names(folder) if name in like}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # uninitialized: one process may read, too
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    return state


def list_tensor_names(folder: Path) -> set[str]:
    """Of the tensors in a folder."""
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found.update(file.keys())
    return found


def take_local_shard(tensor: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this process keeps where `like` is sharded, else all of it."""
    if not isinstance(like, DTensor):
        return tensor
    tensor = tensor.to(like.device, like.dtype)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)

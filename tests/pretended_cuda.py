"""A CUDA device in a torch without CUDA: a library that lets tensors say that they lie on cuda:0, the functions of
torch.cuda, and operators that only CUDA has.

simulated_device.py loads it in processes whose environment names the library (`ASKED`), before their first backward
pass. Values are computed on the CPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

ASKED = "PELLUCID_PRETENDED_CUDA"
SOURCE = Path(__file__).with_suffix(".cpp")


def compiled(folder):
    """Path of the library, made in this folder; None without g++ or torch's headers, and for a torch that has CUDA."""
    home = Path(torch.__file__).parent
    if torch.version.cuda or not (shutil.which("g++") and (home / "include/ATen/detail/CUDAHooksInterface.h").exists()):
        return None
    made = folder / "pretended_cuda.so"
    libraries = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", SOURCE, *libraries, "-o", made]
    subprocess.run(command, check=True)
    return made


def load(path):
    ctypes.CDLL(path)


# ---------------------------------------------------------------- torch.cuda


def nothing(*_, **__):
    pass


ANSWERS = {
    "_lazy_init": nothing,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": nothing,
    "synchronize": nothing,
    "empty_cache": nothing,
    "manual_seed_all": nothing,
    "reset_peak_memory_stats": nothing,
    "max_memory_allocated": lambda device=None: 10**6,
    "is_bf16_supported": lambda including_emulation=True: True,
    "get_device_name": lambda device=None: "a pretended GPU",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=80 * 10**9),
    "get_device_capability": lambda device=None: (9, 0),
    "get_rng_state_all": list,
    "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state_all": nothing,
    "set_rng_state": nothing,
}


@contextmanager
def torch_cuda():
    """In here torch.cuda says that there is a device."""
    with patch.multiple(torch.cuda, **ANSWERS):
        yield


# ---------------------------------------------------------------- operators that only CUDA has


def product(x, y, dtype):
    return (x.float() @ y.float()).to(dtype)


def flash_attention(query, key, value, queries, keys, most_queries, most_keys, dropout, causal, debug, **how):
    """Of sequences that stand one behind the other, [N, H, d] of [M, K, d]. The last query stands at the last key."""
    check(query, key, value, queries, keys, dropout)
    read, sums = torch.empty_like(query), query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    for own, seen, bias in sequences(queries, keys, most_queries, most_keys, causal, **how):
        q, k, v = heads_first(query[own]), shared(key[seen], query), shared(value[seen], query)
        scores = q @ k.mT * query.shape[2] ** -0.5 + bias
        read[own] = (scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype)
        sums[:, own] = scores.logsumexp(-1)
    nothing_drawn = torch.zeros(2, dtype=torch.int64)
    return read, sums, nothing_drawn, torch.zeros(()), query.new_zeros(0)


def flash_attention_backward(
    grad, query, key, value, read, sums, queries, keys, most_queries, most_keys, dropout, causal, state, unused, **how
):
    check(query, key, value, queries, keys, dropout)
    scale = query.shape[2] ** -0.5
    of_query, of_key, of_value = (torch.zeros(x.shape, dtype=torch.float32) for x in (query, key, value))
    for own, seen, bias in sequences(queries, keys, most_queries, most_keys, causal, **how):
        q, g = heads_first(query[own]), heads_first(grad[own])
        k, v = shared(key[seen], query), shared(value[seen], query)
        probs = (q @ k.mT * scale + bias - sums[:, own, None]).exp()
        of_probs = g @ v.mT
        of_scores = probs * (of_probs - (of_probs * probs).sum(-1, keepdim=True)) * scale
        of_query[own] = (of_scores @ k).transpose(0, 1)
        for total, each in ((of_key, of_scores.mT @ q), (of_value, probs.mT @ g)):
            total[seen] += each.transpose(0, 1).unflatten(1, (key.shape[1], -1)).sum(2)
    return tuple(x.to(query.dtype) for x in (of_query, of_key, of_value))


def check(query, key, value, queries, keys, dropout):
    """What the kernel refuses."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if query.shape[2] % 8 or query.shape[2] > 256 or query.shape[1] % key.shape[1]:
        raise RuntimeError("FlashAttention does not support such heads")
    assert queries.dtype == keys.dtype == torch.int32
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    assert not dropout


def sequences(queries, keys, most_queries, most_keys, causal, *, window_size_left, window_size_right, scale=None):
    """Slices of the queries and keys of each sequence, and a bias that is -inf where a query does not read a key."""
    assert scale is None
    left, right = window_size_left, 0 if causal else window_size_right
    for (first, end), (key, last) in zip(*(pairwise(x.tolist()) for x in (queries, keys)), strict=True):
        assert end - first <= most_queries
        assert last - key <= most_keys
        behind = torch.arange(last - key - (end - first), last - key)[:, None] - torch.arange(last - key)
        unseen = (behind < -right if right >= 0 else False) | (behind > left if left >= 0 else False)
        yield slice(first, end), slice(key, last), torch.zeros(behind.shape).masked_fill(unseen, -torch.inf)


def heads_first(x):
    return x.float().transpose(0, 1)


def shared(x, query):
    """Keys or values of the heads that share them, for each head of the queries."""
    return heads_first(x).repeat_interleave(query.shape[1] // x.shape[1], 0)


BY_HAND = {
    torch.ops.aten.mm.dtype: product,
    torch.ops.aten._flash_attention_forward.default: flash_attention,
    torch.ops.aten._flash_attention_backward.default: flash_attention_backward,
}

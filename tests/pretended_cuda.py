"""Simulate a CUDA device in a torch without CUDA.

A library lets tensors report that they are on cuda:0. The functions of torch.cuda and operators that only CUDA has are
replaced. simulated_device.py loads the library in processes whose environment names it (LIBRARY_VARIABLE), before their
first backward pass. Values are computed on the CPU.

    python tests/pretended_cuda.py tests/models/on_cuda_counts.py -k kernels       runs pytest in such a process
    TRITON_INTERPRET=0 python tests/pretended_cuda.py ...                          as if Triton was not installed
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

LIBRARY_VARIABLE = "PELLUCID_PRETENDED_CUDA"
SOURCE = Path(__file__).with_suffix(".cpp")


def compile_library(folder):
    """Compile the library in this folder, and return its path, or None without g++ or torch's headers, or with CUDA."""
    home = Path(torch.__file__).parent
    if torch.version.cuda or not (shutil.which("g++") and (home / "include/ATen/detail/CUDAHooksInterface.h").exists()):
        return None
    library = folder / "pretended_cuda.so"
    libraries = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = [
        "g++",
        "-O0",
        "-std=c++20",
        "-shared",
        "-fPIC",
        f"-I{home / 'include'}",
        SOURCE,
        *libraries,
        "-o",
        library,
    ]
    subprocess.run(command, check=True)
    return library


def load(path):
    """Load the library, and Triton's interpreter unless TRITON_INTERPRET=0."""
    ctypes.CDLL(path)
    if os.environ.get("TRITON_INTERPRET") == "0":
        sys.modules["triton"] = None
    elif importlib.util.find_spec("triton"):
        importlib.import_module("triton_interpreter")


# ---------------------------------------------------------------- torch.cuda


@contextmanager
def activate(device):
    """Make torch.cuda report this device, and run Triton kernels on it."""
    memory, generator_state = device.memory, torch.zeros(16, dtype=torch.uint8)

    def do_nothing(*_, **__):
        pass

    def reset_peak(*_):
        memory.peak = memory.allocated

    answers = {
        "_lazy_init": do_nothing,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "device": nullcontext,
        "current_device": lambda: 0,
        "set_device": do_nothing,
        "synchronize": lambda *_: device.wait(),
        "empty_cache": do_nothing,
        "manual_seed_all": do_nothing,
        "reset_peak_memory_stats": reset_peak,
        "max_memory_allocated": lambda *_: memory.peak,
        "memory_allocated": lambda *_: memory.allocated,
        "mem_get_info": lambda *_: (memory.limit - memory.allocated, memory.limit),
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_name": lambda *_: "a pretended GPU",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=memory.limit),
        "get_device_capability": lambda *_: (9, 0),
        "get_rng_state_all": lambda: [generator_state.clone()],
        "get_rng_state": lambda *_: generator_state.clone(),
        "set_rng_state_all": lambda states: generator_state.copy_(states[0]),
        "set_rng_state": lambda state, *_: generator_state.copy_(state),
    }
    with patch.multiple(torch.cuda, **answers), run_triton_on(device):
        yield


# ---------------------------------------------------------------- Triton


def interprets_triton():
    return "triton_interpreter" in sys.modules


@contextmanager
def run_triton_on(device):
    if not interprets_triton():
        yield
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    run = interpreter.InterpretedFunction.run

    def launch(function, *arguments, grid, warmup, **constants):
        device.launch(TritonLaunch(partial(run, function, grid=grid, warmup=warmup, **constants)), arguments)

    with patch.object(interpreter.InterpretedFunction, "run", launch):
        yield


class TritonLaunch:
    """A Triton kernel with its grid and constants."""

    def __init__(self, run):
        self.run, self.name = run, run.args[0].__name__

    def compute(self, arguments):
        self.run(*arguments)

    def __str__(self):
        return f"{self.name}, {self.run.keywords}"


# ---------------------------------------------------------------- operators with a function of their own

HALF_PRECISION = (torch.bfloat16, torch.float16)


def round_once(product):
    """Return a product that computes half precision in float32, like a GPU, and rounds the result. A CPU without
    instructions for half precision takes minutes for a large product.
    """

    def compute(*factors, **settings):
        dtype = factors[0].dtype
        if dtype not in HALF_PRECISION:
            return product(*factors, **settings)
        return product(*(x.float() for x in factors), **settings).to(dtype)

    return compute


def multiply(x, y, dtype):
    return (x.float() @ y.float()).to(dtype)


def add_product(total, x, y, dtype, *, beta=1, alpha=1, out=None):
    result = (beta * total.float() + alpha * (x.float() @ y.float())).to(dtype)
    return result if out is None else out.copy_(result)


def attend(query, key, value, query_offsets, key_offsets, max_queries, max_keys, dropout, causal, debug, **settings):
    """Compute attention of consecutive sequences, with queries [N, H, d] and keys [M, K, d]. The last query of each
    sequence attends up to its last key.
    """
    check_attention(query, key, value, query_offsets, key_offsets, dropout)
    output, normalizers = torch.empty_like(query), query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    sequences = iterate_sequences(query_offsets, key_offsets, max_queries, max_keys, causal, **settings)
    for own, keys, bias in sequences:
        q, k, v = put_heads_first(query[own]), repeat_heads(key[keys], query), repeat_heads(value[keys], query)
        scores = q @ k.mT * query.shape[2] ** -0.5 + bias
        output[own] = (scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype)
        normalizers[:, own] = scores.logsumexp(-1)
    random_state = torch.zeros(2, dtype=torch.int64)
    return output, normalizers, random_state, torch.zeros(()), query.new_zeros(0)


def attend_backward(
    grad, query, key, value, output, normalizers, query_offsets, key_offsets, max_queries, max_keys, dropout, causal,
    random_state, unused, **settings,
):  # fmt: skip
    check_attention(query, key, value, query_offsets, key_offsets, dropout)
    scale = query.shape[2] ** -0.5
    query_grad, key_grad, value_grad = (torch.zeros(x.shape, dtype=torch.float32) for x in (query, key, value))
    sequences = iterate_sequences(query_offsets, key_offsets, max_queries, max_keys, causal, **settings)
    for own, keys, bias in sequences:
        q, g = put_heads_first(query[own]), put_heads_first(grad[own])
        k, v = repeat_heads(key[keys], query), repeat_heads(value[keys], query)
        probs = (q @ k.mT * scale + bias - normalizers[:, own, None]).exp()
        probs_grad = g @ v.mT
        scores_grad = probs * (probs_grad - (probs_grad * probs).sum(-1, keepdim=True)) * scale
        query_grad[own] = (scores_grad @ k).transpose(0, 1)
        for total, each in ((key_grad, scores_grad.mT @ q), (value_grad, probs.mT @ g)):
            total[keys] += each.transpose(0, 1).unflatten(1, (key.shape[1], -1)).sum(2)
    return tuple(x.to(query.dtype) for x in (query_grad, key_grad, value_grad))


def check_attention(query, key, value, query_offsets, key_offsets, dropout):
    """Raise an error for arguments that the kernel refuses."""
    if query.dtype not in HALF_PRECISION:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if query.shape[2] % 8 or query.shape[2] > 256 or query.shape[1] % key.shape[1]:
        raise RuntimeError("FlashAttention does not support such heads")
    assert query_offsets.dtype == key_offsets.dtype == torch.int32
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    assert not dropout


def iterate_sequences(
    query_offsets, key_offsets, max_queries, max_keys, causal, *, window_size_left, window_size_right, scale=None
):
    """Yield each sequence's slices of queries and keys, and a bias that is -inf if a query does not attend to a key."""
    assert scale is None
    left, right = window_size_left, 0 if causal else window_size_right
    for (first, end), (first_key, end_key) in zip(
        *(pairwise(x.tolist()) for x in (query_offsets, key_offsets)), strict=True
    ):
        assert end - first <= max_queries
        assert end_key - first_key <= max_keys
        positions = torch.arange(end_key - first_key - (end - first), end_key - first_key)[:, None]
        distance = positions - torch.arange(end_key - first_key)
        is_masked = (distance < -right if right >= 0 else False) | (distance > left if left >= 0 else False)
        bias = torch.zeros(distance.shape).masked_fill(is_masked, -torch.inf)
        yield slice(first, end), slice(first_key, end_key), bias


def put_heads_first(x):
    return x.float().transpose(0, 1)


def repeat_heads(x, query):
    """Repeat keys or values for each head of the queries that attend to them."""
    return put_heads_first(x).repeat_interleave(query.shape[1] // x.shape[1], 0)


BY_HAND = {
    **{
        op: round_once(op)
        for op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)
    },
    torch.ops.aten.mm.dtype: multiply,
    torch.ops.aten.addmm.dtype: add_product,
    torch.ops.aten.addmm.dtype_out: add_product,
    torch.ops.aten._flash_attention_forward.default: attend,
    torch.ops.aten._flash_attention_backward.default: attend_backward,
}


def run_pytest(library, arguments, interpret=True, **streams):
    """Run pytest in a separate process in which the device is cuda:0."""
    environment = {**os.environ, LIBRARY_VARIABLE: str(library), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["TRITON_INTERPRET"] = str(int(interpret))
    command = [sys.executable, "-m", "pytest", *PYTEST, *(() if interpret else WITHOUT_TRITON), *arguments]
    return subprocess.run(command, env=environment, check=False, **streams)


PYTEST = ("-q", "-n", "0", "-p", "no:cacheprovider", "-m", "", "-W", "ignore::pytest.PytestAssertRewriteWarning")
WITHOUT_TRITON = ("-W", "ignore:norms, gates and log-probs are computed without Triton")

if __name__ == "__main__":
    interpret = os.environ.get("TRITON_INTERPRET") != "0"
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run_pytest(compile_library(Path(folder)), sys.argv[1:], interpret).returncode)

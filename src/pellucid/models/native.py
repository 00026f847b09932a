"""The C++ of cpp/ as a library: compiled by g++ where there is one, once, in some seconds, and kept."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pellucid.models import ops
from pellucid.models.ops import compute_exponent_factor

CPP_FOLDER = Path(__file__).with_name("cpp")
COMPILER_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-mfma"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
    *("-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),  # run where a processor has them
    "-ffp-contract=off",  # what is rounded between a product and a sum must stay so
)


class KernelUnavailableError(Exception):
    """Why the library cannot be used."""


@functools.cache
def load_library() -> Any:
    """The library. UnusableError or OSError where it cannot be had."""
    if not torch.cpu._is_avx512_bf16_supported():
        raise KernelUnavailableError("a CPU without AVX-512 for bfloat16")
    return compile_library()


@functools.cache
def has_amx() -> bool:
    """Whether this processor has AMX, and this process may use it from now on."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


def compile_library() -> Any:
    """The library, compiled where it was not kept."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        raise KernelUnavailableError("no g++")
    libraries = Path(torch.__file__).parent / "lib"
    links = [libraries / "libtorch_cpu.so", *libraries.glob("libgomp*")]  # torch's threads, and none beside them
    sources = sorted(CPP_FOLDER.iterdir())
    key = repr(([path.read_text() for path in sources], COMPILER_FLAGS, compiler, torch.__version__, links))
    name = f"fused-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    command = [*shlex.split(compiler), *COMPILER_FLAGS]
    try:
        return open_library(cache / "pellucid" / name, command, links)
    except OSError:  # a home that cannot be written to, or from which nothing may be run
        with tempfile.TemporaryDirectory() as folder:  # it stays loaded
            return open_library(Path(folder) / name, command, links)


def open_library(path: Path, command: Sequence[str], links: Sequence[Path]) -> Any:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            build_library(made, command, links)
            made.replace(path)  # at once: other processes may look for it
    return ctypes.CDLL(str(path))


def build_library(made: Path, command: Sequence[str], links: Sequence[Path]) -> None:
    """Each source by a compiler of its own, as many at once as there are cores."""
    units = {path: made.with_name(f"{path.stem}.o") for path in sorted(CPP_FOLDER.glob("*.cpp"))}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda unit: run_compiler([*command, "-c", unit, "-o", units[unit]]), units))
    run_compiler([*command, "-shared", *units.values(), *links, "-o", made])


def run_compiler(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelUnavailableError(" ".join(f"{command[0]} fails: {done.stderr}".split())[:200])


# ---------------------------------------------------------------- calling


class OperationCounter:
    """Floating-point operations of matrix products in C++, while somebody counts them: doctor/profile.py does."""

    entries: ClassVar[list[tuple[float, float]] | None] = None
    """When each call had ended, by time.perf_counter, and how many."""

    @classmethod
    def count(cls, n: float) -> None:
        if cls.entries is not None:
            cls.entries.append((time.perf_counter(), n))


call_counts: Counter[str] = Counter()
"""How often this process has called each function of the library, trials included."""


def call_kernel(function: Any, *arguments: Any) -> int:
    """A function of the library: tensors and structures as their addresses, whole numbers as int64_t, None as null.

    Return the fault that it returns, 0 where there was none; of a function that returns nothing it means nothing.
    """
    call_counts[function.__name__] += 1
    return function(*map(convert_argument, arguments))


def convert_argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, ctypes.Structure | ctypes.Array):
        return ctypes.byref(x)
    return ctypes.c_float(x) if isinstance(x, float) else None if x is None else ctypes.c_int64(x)


# ---------------------------------------------------------------- kernels
# What an update does besides matrix products, in C++ (cpp/update.cpp): one pass over memory each.
#
# Each process tries them once, on small tensors: they are used where they have the bits of operators.py, which has the
# same functions by operators of torch, and these go on where they do not, or where there is no library.
#
# Shapes: as in operators.py; V vocabulary.


VECTOR_WIDTH = 16
"""Numbers at a time: widths are a multiple of it."""


def select_kernels(x: Tensor, dtype: torch.dtype, *widths: int) -> Kernels | ModuleType:
    """What computes x, and all that comes with it, in such a dtype and of such widths: kernels, or operators."""
    return find_kernels(x, dtype, *widths) or ops


def find_kernels(x: Tensor, dtype: torch.dtype, *widths: int) -> Kernels | None:
    """The kernels where they compute such a tensor: in bf16 on the CPU, not traced, without a forward-mode gradient."""
    if x.device.type != "cpu" or dtype != torch.bfloat16 or any(width % VECTOR_WIDTH for width in widths):
        return None
    if torch.compiler.is_compiling() or forward_ad.unpack_dual(x).tangent is not None:
        return None
    return load_kernels()[0]


@functools.cache
def load_kernels() -> tuple[Kernels | None, str]:
    """The kernels, and why there are none."""
    try:
        kernels = Kernels(load_library())
        check_kernels(kernels)
    except (KernelUnavailableError, OSError) as error:
        return None, str(error)
    return kernels, ""


class LogitStatistics(NamedTuple):
    """What a row of logits says."""

    logprobs: Tensor
    """[n] of the tokens."""
    entropy: Tensor
    """[n]"""
    kl: Tensor
    """[n], 0 without another policy."""
    log_normalizer: Tensor
    """[n]"""


class StatisticsGradients(NamedTuple):
    """The gradients [n] of what was read; an entropy or a KL may have none."""

    logprobs_grad: Tensor
    entropy_grad: Tensor | None
    kl_grad: Tensor | None


class ScaledLogits(NamedTuple):
    """Rows [n, V] of a head's product, and what they are multiplied by."""

    product: Tensor
    factor: float


class Kernels:
    """Called with tensors that are fit: bf16 but where it says fp32."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def norm_forward(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """x and weight in fp32; the width is a multiple of two vectors."""
        y, x = torch.empty(x.shape, dtype=dtype), x.contiguous()
        self._call("norm_forward", x, None, weight, *count_rows_and_columns(x), eps, None, y)
        return y

    def norm_backward(self, x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
        return self._norm_backward(x, weight, eps, grad, None, None)

    def add_norm_forward(self, x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x and weight in fp32."""
        x, more = x.contiguous(), more.contiguous()
        together, y = torch.empty_like(x), torch.empty_like(more)
        self._call("norm_forward", x, more, weight, *count_rows_and_columns(x), eps, together, y)
        return together, y

    def add_norm_backward(
        self, x: Tensor, weight: Tensor, eps: float, beyond: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        of_more = torch.empty_like(grad, memory_format=torch.contiguous_format)
        of_x, of_weight = self._norm_backward(x, weight, eps, grad, beyond.contiguous(), of_more)
        return of_x, of_more, of_weight

    def _norm_backward(
        self, x: Tensor, weight: Tensor, eps: float, grad: Tensor, beyond: Tensor | None, of_more: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        n, width = count_rows_and_columns(x)
        of_x, of_weight, runs = (
            torch.empty_like(x),
            torch.empty_like(weight),
            weight.new_empty(-(-n // VECTOR_WIDTH), width),
        )
        size = n, width, eps
        self._call("norm_backward", x, weight, grad.contiguous(), beyond, *size, of_x, of_more, of_weight, runs)
        return of_x, of_weight

    def rotate_forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._rotate(x, cos, sin, back=False)

    def rotate_backward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._rotate(x, cos, sin, back=True)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
        x = x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()  # heads among others, as they stand
        y = torch.empty(x.shape, dtype=x.dtype)
        self._call("rotate_heads", x, x.stride(0), cos.contiguous(), sin.contiguous(), *x.shape, int(back), y)
        return y

    def swiglu_forward(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        y = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        self._call("gate_forward", gate_up, *count_rows_and_columns(y), y)
        return y

    def swiglu_backward(self, gate_up: Tensor, grad: Tensor) -> Tensor:
        of_gate_up = torch.empty_like(gate_up)
        self._call("gate_backward", gate_up, grad.contiguous(), *count_rows_and_columns(grad), of_gate_up)
        return of_gate_up

    def softmax(self, scores: Tensor, bias: Tensor) -> Tensor:
        self._call("softmax_rows", scores, bias.contiguous(), *get_score_sizes(scores, bias))
        return scores

    def softmax_backward(self, scores: Tensor, bias: Tensor, of_probs: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """scores in fp32."""
        probs, of_scores = torch.empty_like(of_probs), torch.empty_like(of_probs)
        size = get_score_sizes(scores, bias)
        self._call("softmax_backward", scores, bias.contiguous(), of_probs, *size, scale, probs, of_scores)
        return probs, of_scores

    def compute_statistics(self, logits: ScaledLogits, tokens: Tensor, other: ScaledLogits | None) -> LogitStatistics:
        """Of tokens [n], among logits [n, V] in bf16, and of their distributions; KL from those of another policy."""
        read = LogitStatistics(*torch.empty(4, len(tokens)))
        self._call("read_rows", make_logits_struct(logits), make_logits_struct(other), tokens, len(tokens), *read)
        return read

    def compute_product_gradient(
        self,
        logits: ScaledLogits,
        tokens: Tensor,
        other: ScaledLogits | None,
        read: LogitStatistics,
        weight: StatisticsGradients,
    ) -> None:
        """Puts the gradient of the product in its place.

        With l the log-probs, H the entropy, l' the other's log-probs, it is
        exp(l) (-of_logprobs - of_entropy (l + H) + of_kl (l - l' - KL)), and of_logprobs more at the token.
        """
        slopes = [None if x is None else x.contiguous() for x in (*weight, *read[1:])]
        self._call("of_product", make_logits_struct(logits), make_logits_struct(other), tokens, len(tokens), *slopes)

    def sample_with_masses(self, logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        token = torch.empty(len(logits), dtype=torch.long)
        mass, total = torch.empty(2, len(logits))
        by = uniforms.contiguous() if temperature else None
        self._call(
            "draw", logits.contiguous(), *logits.shape, compute_exponent_factor(temperature), by, token, mass, total
        )
        return token, mass, total

    def _call(self, name: str, *arguments: Any) -> None:
        call_kernel(getattr(self.library, name), *arguments, torch.get_num_threads())


class LogitsStruct(ctypes.Structure):
    """As in cpp/update.cpp."""

    _fields_ = (("product", ctypes.c_void_p), ("vocabulary", ctypes.c_int64), ("factor", ctypes.c_float))


def make_logits_struct(logits: ScaledLogits | None) -> LogitsStruct | None:
    return logits and LogitsStruct(logits.product.data_ptr(), logits.product.shape[-1], logits.factor)


def count_rows_and_columns(x: Tensor) -> tuple[int, int]:
    """Rows, and how long they are."""
    return x.numel() // x.shape[-1], x.shape[-1]


def get_score_sizes(scores: Tensor, bias: Tensor) -> tuple[int, int, int, int]:
    """Of scores [B, K, C / K * T, S]: B, C, T and S."""
    rows, _, queries, keys = bias.shape
    return rows, scores.numel() // (rows * queries * keys), queries, keys


# ---------------------------------------------------------------- the trial


@torch.no_grad()
def check_kernels(kernels: Kernels) -> None:
    """UnusableError where they have other bits than operators."""
    chance = torch.Generator().manual_seed(0)

    def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(shape, generator=chance) * 3).to(dtype)

    x, weight = noise(37, 544, dtype=torch.float32), noise(544, dtype=torch.float32)
    more = noise(37, 544)
    bias = torch.zeros(2, 1, 5, 112, dtype=torch.bfloat16).masked_fill_(noise(2, 1, 5, 112) > 2, -torch.inf)
    scores, scale = noise(2, 3, 10, 112), 0.125
    chances = torch.rand(3, dtype=torch.float64, generator=chance)
    trials: list[tuple[str, tuple[Any, ...]]] = [
        ("norm_forward", (x, weight, 1e-5, torch.bfloat16)),
        ("norm_backward", (x, weight, 1e-5, more)),
        ("add_norm_forward", (x, more, weight, 1e-5)),
        ("add_norm_backward", (x, weight, 1e-5, x * 2, more)),
        *(
            (name, (noise(5, 9, 64)[:, :6], noise(5, 1, 64), noise(5, 1, 64)))
            for name in ("rotate_forward", "rotate_backward")
        ),
        ("swiglu_forward", (noise(5, 96),)),
        ("swiglu_backward", (noise(5, 96), noise(5, 48))),
        ("softmax", (scores, bias)),
        *(("sample_with_masses", (noise(3, 8528), chances, temperature)) for temperature in (1.0, 0.7, 0.0)),
        ("softmax_backward", (scores.float(), bias, noise(2, 3, 10, 112), scale)),
    ]
    for name, arguments in trials:
        ours, theirs = (getattr(by, name)(*clone_tensors(arguments)) for by in (kernels, ops))
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
        if not all(torch.equal(*pair) for pair in pairs):
            raise KernelUnavailableError(f"this processor or this torch rounds otherwise ({name})")


def clone_tensors(arguments: tuple[Any, ...]) -> list[Any]:
    """The same, tensors cloned: some are written over."""
    return [x.clone() if isinstance(x, Tensor) else x for x in arguments]

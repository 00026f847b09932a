"""The compiled CPU kernels of cpp/: building and loading the library, the self-checks, and the kernels of an update.

g++ builds the library once, in a few seconds, and the result is cached. Each process then compares every kernel with
PyTorch's operators, bit for bit. A kernel that differs is not used; without g++, none is used.

On a GPU, the kernels of an update are those of `triton_update`, compared up to rounding.
"""

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
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from pellucid.models import ops
from pellucid.models.ops import compute_exponent_factor

CPP_FOLDER = Path(__file__).with_name("cpp")
_COMPILER_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-mfma"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
    *("-mamx-tile", "-mamx-bf16"),  # executed only on processors that have them
    "-ffp-contract=off",  # a product is rounded before it is added, as in PyTorch's operators
)
KernelT = TypeVar("KernelT")


# ---------------------------------------------------------------- building and loading


class KernelUnavailableError(Exception):
    """The library cannot be used; the message says why."""


@functools.cache
def load_library() -> Any:
    """Return the library. Raises KernelUnavailableError or OSError if there is none for this machine."""
    if not torch.cpu._is_avx512_bf16_supported():
        raise KernelUnavailableError("a CPU without AVX-512 for bfloat16")
    return compile_library()


@functools.cache
def has_amx() -> bool:
    """Return whether this processor has AMX, and ask the system to let this process use it."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


class KernelVariant(NamedTuple):
    """The library, and how it multiplies."""

    library: Any
    uses_amx: bool
    """Whether products use AMX, with its order of sums, or AVX-512."""


def list_variants(library: Any) -> list[KernelVariant]:
    """Return the variants that this machine can run: with AVX-512, then with AMX."""
    return [KernelVariant(library, uses_amx) for uses_amx in ((False, True) if has_amx() else (False,))]


def compile_library() -> Any:
    """Load the library from the cache, or compile it first."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        raise KernelUnavailableError("no g++")
    libraries = Path(torch.__file__).parent / "lib"
    links = [libraries / "libtorch_cpu.so", *libraries.glob("libgomp*")]  # one thread pool: torch's
    sources = sorted(CPP_FOLDER.iterdir())
    key = repr(([path.read_text() for path in sources], _COMPILER_FLAGS, compiler, torch.__version__, links))
    name = f"fused-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    command = [*shlex.split(compiler), *_COMPILER_FLAGS]
    try:
        return _open_library(cache / "pellucid" / name, command, links)
    except OSError:  # the cache is not writable, or nothing may be executed there
        with tempfile.TemporaryDirectory() as folder:  # the library stays loaded when its file is gone
            return _open_library(Path(folder) / name, command, links)


def _open_library(path: Path, command: Sequence[str], links: Sequence[Path]) -> Any:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            _build_library(built, command, links)
            built.replace(path)  # atomic: other processes may be looking for it
    return ctypes.CDLL(str(path))


def _build_library(output: Path, command: Sequence[str], links: Sequence[Path]) -> None:
    """Compile the sources in parallel, one compiler per core, and link them."""
    objects = {path: output.with_name(f"{path.stem}.o") for path in sorted(CPP_FOLDER.glob("*.cpp"))}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: _run_compiler([*command, "-c", source, "-o", objects[source]]), objects))
    _run_compiler([*command, "-shared", *objects.values(), *links, "-o", output])


def _run_compiler(command: Sequence[str | Path]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise KernelUnavailableError(" ".join(f"{command[0]} fails: {result.stderr}".split())[:200])


# ---------------------------------------------------------------- calling a kernel


class OperationCounter:
    """Counts the floating-point operations of matrix products in C++ while `entries` is a list, for `doctor`."""

    entries: ClassVar[list[tuple[float, float]] | None] = None
    """For each call, the time at which it returned (time.perf_counter) and its number of operations."""

    @classmethod
    def count(cls, n: float) -> None:
        if cls.entries is not None:
            cls.entries.append((time.perf_counter(), n))


call_counts: Counter[str] = Counter()
"""How often this process has called each function of the library, self-checks included."""


def call_kernel(function: Any, *arguments: Any) -> int:
    """Call a function of the library, and return its status: 0 for success, undefined if it returns void.

    Tensors and structures are passed as their addresses, integers as int64_t, None as a null pointer.
    """
    call_counts[function.__name__] += 1
    return function(*map(_convert_argument, arguments))


def _convert_argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, ctypes.Structure | ctypes.Array):
        return ctypes.byref(x)
    return ctypes.c_float(x) if isinstance(x, float) else None if x is None else ctypes.c_int64(x)


# ---------------------------------------------------------------- self-checks


SELF_CHECKS: dict[str, Callable[[], tuple[Any, str]]] = {}
"""Every self-check by the name of what it checks. Calling one returns the kernel, or None and the reason."""


def add_self_check(
    name: str,
    list_candidates: Callable[[], Iterable[KernelT]],
    compare: Callable[[KernelT], Iterable[tuple[str, Any, Any]]],
) -> functools._lru_cache_wrapper[tuple[KernelT | None, str]]:
    """Add a self-check to SELF_CHECKS.

    Args:
        name: What is checked, for SELF_CHECKS and for messages.
        list_candidates: Returns kernels in the order of preference. It may raise KernelUnavailableError or OSError.
        compare: Runs a kernel and PyTorch's operators on small inputs, and yields for each step its name, our result
            and that of PyTorch. Results are tensors or tuples of tensors.

    Returns:
        A cached function that runs the check, and returns the first candidate with the bits of PyTorch's operators and
        an empty string, or None and the reason why there is none.
    """

    @functools.cache
    def load() -> tuple[KernelT | None, str]:
        difference = name
        try:
            for kernel in list_candidates():
                if not (difference := find_difference(compare(kernel))):
                    return kernel, ""
        except (KernelUnavailableError, OSError) as error:
            return None, str(error)
        return None, f"this processor or this torch rounds otherwise ({difference})"

    SELF_CHECKS[name] = load
    return load


@torch.no_grad()
def find_difference(results: Iterable[tuple[str, Any, Any]]) -> str:
    """Return the name of the first step whose two results differ in any bit; empty if there is none."""
    for name, ours, theirs in results:
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
        if not all(torch.equal(*pair) for pair in pairs):
            return name
    return ""


# ---------------------------------------------------------------- kernels of an update
# The work of an update besides matrix products, in C++ (cpp/update.cpp), with one pass over memory per operator.
# `ops` has the same functions in PyTorch. Shapes are as in `ops`; V vocabulary.


VECTOR_WIDTH = 16
"""Elements of a vector register: the kernels take widths that are multiples of it."""
KERNEL_HEAD_SIZES = range(64, 257, 64)
"""Head sizes that the attention kernels take."""


def select_kernels(x: Tensor, dtype: torch.dtype, *widths: int) -> Kernels | ModuleType:
    """Return the compiled kernels if they take this tensor, on a GPU those of Triton, else the module `ops`.

    See `find_kernels`.
    """
    return (find_triton_kernels(x, dtype) if x.device.type == "cuda" else find_kernels(x, dtype, *widths)) or ops


def find_triton_kernels(x: Tensor, dtype: torch.dtype) -> ModuleType | None:
    """Return the module `triton_update` if it can compute with a tensor in this dtype, else None."""
    is_supported = x.device.type == "cuda" and dtype in (torch.float32, torch.bfloat16, torch.float16)
    return load_triton_kernels(x.device, dtype) if is_supported else None


@functools.cache
def load_triton_kernels(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return the module `triton_update`; None if Triton is not installed, or if its kernels fail the check on this GPU.

    In the latter case there is a warning.
    """
    try:
        from pellucid.models import triton_update  # noqa: PLC0415 - Triton is imported only if there is a GPU
    except ModuleNotFoundError:
        return None
    if not (fault := triton_update.find_fault(device, dtype)):
        return triton_update
    warnings.warn(f"norms, gates and log-probs are computed without Triton: {fault}", stacklevel=2)
    return None


def find_kernels(x: Tensor, dtype: torch.dtype, *widths: int) -> Kernels | None:
    """Return the compiled kernels if they can compute with a tensor in this dtype, else None.

    They compute in bf16 on the CPU, with rows whose widths are multiples of VECTOR_WIDTH.
    """
    if x.device.type != "cpu" or dtype != torch.bfloat16 or any(width % VECTOR_WIDTH for width in widths):
        return None
    return load_kernels()[0]


class LogitStatistics(NamedTuple):
    """Statistics [n] of n rows of logits: log-probs of given tokens, and a KL of 0 without another policy."""

    logprobs: Tensor
    entropy: Tensor
    kl: Tensor
    log_normalizer: Tensor


class StatisticsGradients(NamedTuple):
    """The gradients [n] of the loss with respect to LogitStatistics; entropy and KL may have none."""

    logprobs_grad: Tensor
    entropy_grad: Tensor | None
    kl_grad: Tensor | None


class ScaledLogits(NamedTuple):
    """Logits [n, V]: the output of the head, and the factor that scales it, 1 / temperature."""

    head_output: Tensor
    factor: float


class Kernels:
    """The kernels, under the names and with the arguments of the functions in `ops`.

    Tensors are in bf16 unless a docstring says fp32. `find_kernels` says whether a tensor is suitable.
    """

    def __init__(self, library: Any) -> None:
        self.library = library

    def norm_forward(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """x and weight in fp32; the width is a multiple of 2 * VECTOR_WIDTH."""
        y, x = torch.empty(x.shape, dtype=dtype), x.contiguous()
        self._call("norm_forward", x, None, weight, *_count_rows_and_columns(x), eps, None, y)
        return y

    def norm_backward(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        grad: Tensor,
        sum_grad: Tensor | None = None,
        more_grad: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`sum_grad` is added to the gradient of x, which is also written to `more_grad`, rounded."""
        x = x.contiguous()
        n, width = _count_rows_and_columns(x)
        x_grad, weight_grad = torch.empty_like(x), torch.empty_like(weight)
        partial_sums = weight.new_empty(-(-n // VECTOR_WIDTH), width)
        outputs = x_grad, more_grad, weight_grad, partial_sums
        self._call("norm_backward", x, weight, grad.contiguous(), sum_grad, n, width, eps, *outputs)
        return x_grad, weight_grad

    def add_norm_forward(self, x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x and weight in fp32."""
        x, more = x.contiguous(), more.contiguous()
        total, y = torch.empty_like(x), torch.empty_like(more)
        self._call("norm_forward", x, more, weight, *_count_rows_and_columns(x), eps, total, y)
        return total, y

    def add_norm_backward(
        self, x: Tensor, weight: Tensor, eps: float, sum_grad: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        more_grad = torch.empty_like(grad, memory_format=torch.contiguous_format)
        x_grad, weight_grad = self.norm_backward(x, weight, eps, grad, sum_grad.contiguous(), more_grad)
        return x_grad, more_grad, weight_grad

    def rotate_forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._rotate(x, cos, sin, inverse=False)

    def rotate_backward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._rotate(x, cos, sin, inverse=True)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
        x = x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()  # the heads may be a slice of more heads
        y = torch.empty(x.shape, dtype=x.dtype)
        self._call("rotate_heads", x, x.stride(0), cos.contiguous(), sin.contiguous(), *x.shape, int(inverse), y)
        return y

    def swiglu_forward(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        y = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        self._call("gate_forward", gate_up, *_count_rows_and_columns(y), y)
        return y

    def swiglu_backward(self, gate_up: Tensor, grad: Tensor) -> Tensor:
        gate_up_grad = torch.empty_like(gate_up)
        self._call("gate_backward", gate_up, grad.contiguous(), *_count_rows_and_columns(grad), gate_up_grad)
        return gate_up_grad

    def softmax(self, scores: Tensor, bias: Tensor) -> Tensor:
        """It overwrites `scores`."""
        self._call("softmax_rows", scores, bias.contiguous(), *_get_score_sizes(scores, bias))
        return scores

    def softmax_backward(self, scores: Tensor, bias: Tensor, probs_grad: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """scores in fp32."""
        probs, scores_grad = torch.empty_like(probs_grad), torch.empty_like(probs_grad)
        sizes = _get_score_sizes(scores, bias)
        self._call("softmax_backward", scores, bias.contiguous(), probs_grad, *sizes, scale, probs, scores_grad)
        return probs, scores_grad

    def compute_statistics(self, logits: ScaledLogits, tokens: Tensor, other: ScaledLogits | None) -> LogitStatistics:
        """Compute statistics of the distributions that logits [n, V] in bf16 define, for tokens [n].

        `other` are the logits [n, V] of the policy from which the KL divergence is measured; None for no KL.
        """
        statistics = LogitStatistics(*torch.empty(4, len(tokens)))
        self._call(
            "read_rows", _make_logits_struct(logits), _make_logits_struct(other), tokens, len(tokens), *statistics
        )
        return statistics

    def compute_product_gradient(
        self,
        logits: ScaledLogits,
        tokens: Tensor,
        other: ScaledLogits | None,
        statistics: LogitStatistics,
        gradients: StatisticsGradients,
        out: Tensor,
    ) -> None:
        """Write the gradient of the loss with respect to the head output to `out`, which is that output itself.

        With l the log-probs, l' those of the other policy, H the entropy, and g the gradients of the statistics, it is
        exp(l) (-g_logprobs - g_entropy (l + H) + g_kl (l - l' - KL)), plus g_logprobs at the token, times the factor.
        """
        assert out.data_ptr() == logits.head_output.data_ptr()
        inputs = [None if x is None else x.contiguous() for x in (*gradients, *statistics[1:])]
        self._call("of_product", _make_logits_struct(logits), _make_logits_struct(other), tokens, len(tokens), *inputs)

    def sample_with_masses(self, logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        token = torch.empty(len(logits), dtype=torch.long)
        mass, total = torch.empty(2, len(logits))
        factor, uniforms_or_none = compute_exponent_factor(temperature), uniforms.contiguous() if temperature else None
        self._call("draw", logits.contiguous(), *logits.shape, factor, uniforms_or_none, token, mass, total)
        return token, mass, total

    def _call(self, name: str, *arguments: Any) -> None:
        call_kernel(getattr(self.library, name), *arguments, torch.get_num_threads())


class _LogitsStruct(ctypes.Structure):
    """The struct of the same fields in cpp/update.cpp."""

    _fields_ = (("product", ctypes.c_void_p), ("vocabulary", ctypes.c_int64), ("factor", ctypes.c_float))


def _make_logits_struct(logits: ScaledLogits | None) -> _LogitsStruct | None:
    return logits and _LogitsStruct(logits.head_output.data_ptr(), logits.head_output.shape[-1], logits.factor)


def _count_rows_and_columns(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


def _get_score_sizes(scores: Tensor, bias: Tensor) -> tuple[int, int, int, int]:
    """Return B, C, T and S of scores [B, K, C / K * T, S]."""
    rows, _, queries, keys = bias.shape
    return rows, scores.numel() // (rows * queries * keys), queries, keys


def compare_kernels(kernels: Kernels) -> Iterable[tuple[str, Any, Any]]:
    """Run each operator with the kernels and in PyTorch; see `add_self_check`."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(shape, generator=generator) * 3).to(dtype)

    x, weight = noise(37, 544, dtype=torch.float32), noise(544, dtype=torch.float32)
    more = noise(37, 544)
    bias = torch.zeros(2, 1, 5, 112, dtype=torch.bfloat16).masked_fill_(noise(2, 1, 5, 112) > 2, -torch.inf)
    scores, scale = noise(2, 3, 10, 112), 0.125
    uniforms = torch.rand(3, dtype=torch.float64, generator=generator)
    calls: list[tuple[str, tuple[Any, ...]]] = [
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
        *(("sample_with_masses", (noise(3, 8528), uniforms, temperature)) for temperature in (1.0, 0.7, 0.0)),
        ("softmax_backward", (scores.float(), bias, noise(2, 3, 10, 112), scale)),
    ]
    for name, arguments in calls:
        # Each gets copies, since some operators overwrite their arguments.
        ours, theirs = (getattr(module, name)(*deepcopy(arguments)) for module in (kernels, ops))
        yield name, ours, theirs


load_kernels = add_self_check("update", lambda: [Kernels(load_library())], compare_kernels)
"""Return the kernels of an update, or None and the reason why there are none."""

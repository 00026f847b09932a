"""Devices and dtypes, the speed of matrix products, and memory."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch.amp.grad_scaler import GradScaler

from pellucid.types import UserError

try:
    import resource
except ImportError:  # Windows
    resource = None


CUBLAS_WORKSPACE_VARIABLE, DETERMINISTIC_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""The variable, and its values with which cuBLAS sums in the same order when a product is repeated."""

_TRIM_RATIO = 1.03
"""Free memory is returned to the system when the resident size is this many times what a step needs."""
_SLOW_TIMES = 1.5
"""A CPU counts as slow in a dtype if it multiplies this many times as fast in fp32. Less may be noise."""
_GEMM_CACHE_LIMITS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""How many matrix product shapes oneDNN and torch's bridge to it cache, 1024 each by default. Every step has new
shapes: entries of older ones are never reused, and fragment the heap."""


# ---------------------------------------------------------------- devices and dtypes


def pick_device(name: str, setting: str = "policy.device") -> torch.device:
    """Return a device by its PyTorch name; "cuda" is this process's GPU; "auto" is that GPU, Apple's or the CPU.

    Raises:
        UserError: There is no such device. `setting` is the user's name for the setting.
    """
    if name in ("auto", "cuda") and torch.cuda.is_available():
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    elif name == "auto":
        name = "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f'{setting} = "{name}": {str(error).splitlines()[0]}; "cpu" always works') from error


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name; "auto" is bf16 on a GPU that has it or a CPU that is faster with it, else fp32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    faster = device.type == "cpu" and measure_matmul_tflops(torch.bfloat16) > 1.2 * measure_matmul_tflops(torch.float32)
    return torch.bfloat16 if faster else torch.float32


def describe_missing_bf16(device: torch.device) -> str:
    """Return a hint for a GPU without bf16; empty for other devices."""
    if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return ""
    return 'this GPU has no bf16: policy.dtype = "float16" may be several times as fast, if its range suffices'


def describe_slow_dtype(name: str, device: torch.device) -> str:
    """Return a hint if a device computes faster in another dtype than in the one of this name, else ""."""
    if name == "float32":
        return describe_missing_bf16(device)
    if device.type != "cpu":
        return ""
    speed = measure_matmul_tflops(getattr(torch, name), repeats=2)
    times = measure_matmul_tflops(torch.float32, repeats=2) / speed
    if times < _SLOW_TIMES:
        return ""
    advice = 'set policy.dtype = "float32", or "auto"'
    return f"this CPU multiplies {times:.0f} times as fast in float32 as in {name}: {advice}"


def check_float16(device: torch.device) -> None:
    """Raise UserError if torch cannot multiply in fp16 or scale the loss on a device."""
    try:
        x, scaler = torch.ones(2, 2, device=device, requires_grad=True), GradScaler(device.type)
        scaler.scale((x.half() @ x.half()).float().sum()).backward()
        scaler.unscale_(torch.optim.SGD([x]))
        scaler.update()
    except (RuntimeError, TypeError, AssertionError) as error:
        raise UserError(
            f'policy.dtype = "float16" cannot be trained on {device} ({str(error).splitlines()[0]}): set "float32"'
        ) from error


def pick_float64_device(device: torch.device) -> torch.device:
    """Return the device that computes float64 sums of tensors on `device`.

    It is the CPU if the device has no float64 (Apple's), and in deterministic mode, where CUDA has no cumulative sums.
    """
    if torch.are_deterministic_algorithms_enabled():
        return torch.device("cpu")
    try:
        return torch.empty(0, dtype=torch.float64, device=device).device
    except TypeError:
        return torch.device("cpu")


@contextmanager
def use_deterministic_algorithms() -> Iterator[None]:
    """Within the block, GPU operations are repeatable bit for bit, or raise. Enter it before any operation.

    Raise UserError if the environment has another setting for cuBLAS.
    """
    workspace = os.environ.get(CUBLAS_WORKSPACE_VARIABLE)
    mode, benchmark = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    if workspace not in (None, *DETERMINISTIC_WORKSPACES):
        allowed = " or ".join(DETERMINISTIC_WORKSPACES)
        raise UserError(f"policy.deterministic needs {CUBLAS_WORKSPACE_VARIABLE} to be {allowed}: unset it")
    os.environ[CUBLAS_WORKSPACE_VARIABLE] = workspace or DETERMINISTIC_WORKSPACES[0]
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            del os.environ[CUBLAS_WORKSPACE_VARIABLE]


def measure_matmul_tflops(dtype: torch.dtype, size: int = 512, repeats: int = 10, threads: int = 1) -> float:
    """Return the TFLOP/s of the fastest of a few matrix products on the CPU. This takes tens of milliseconds.

    With two threads, which wait for each other, the wrong dtype might look faster on a busy machine.
    """
    before, x = torch.get_num_threads(), torch.ones(size, size, dtype=dtype)
    torch.set_num_threads(threads)
    seconds = []
    try:
        for _ in range(repeats):
            start = time.perf_counter()
            torch.mm(x, x)
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return 2 * size**3 / min(seconds) / 1e12


# ---------------------------------------------------------------- memory


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory ran out: CUDA raises its own class, others only a message."""
    words = ("DefaultCPUAllocator", "MPS backend out of memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in words)


def keep_freed_memory() -> bool:
    """Configure glibc to keep freed memory for the next tensor, and limit the caches of matrix product shapes.

    A training step frees and allocates the same gigabytes again and again; on CPUs the page faults cost a quarter of
    its time. The limits have no effect after torch's first product. Return False without glibc.
    """
    for name, capacity in _GEMM_CACHE_LIMITS.items():
        os.environ.setdefault(name, capacity)
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # malloc.h
    return all(
        libc.mallopt(option, value) for option, value in ((m_mmap_max, 0), (m_trim_threshold, -1), (m_top_pad, 2**28))
    )


class HeapTrimmer:
    """Returns free memory to the system from time to time, after `keep_freed_memory`: the heap is fragmented, and would
    grow during the whole run.
    """

    def __init__(self) -> None:
        self.needed_gb = 0.0
        """The largest resident size in GB after a step that began with a trimmed heap."""
        self.was_trimmed = False
        """Whether the last step began with a trimmed heap."""

    def trim_after_step(self) -> None:
        """Return free memory if the resident size exceeds what a step needs. The next step has page faults again."""
        resident = get_resident_gb()
        self.needed_gb = max(self.needed_gb, resident) if self.was_trimmed else self.needed_gb
        self.was_trimmed = resident > _TRIM_RATIO * self.needed_gb
        if self.was_trimmed:
            self.trim()

    def trim(self) -> None:
        """Return all free memory to the system, which takes tens of milliseconds per gigabyte."""
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)


def get_resident_gb() -> float:
    """Return the resident size of this process in GB."""
    return psutil.Process().memory_info().rss / 1e9


def get_cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def get_memory_gb() -> float:
    return psutil.virtual_memory().total / 1e9


def get_available_memory_gb(device: torch.device) -> float:
    """Return the memory in GB that a process of a run can have.

    Of a GPU it is the total, so that each start of a run gets the same answer. For every other device it is what other
    programs leave of the memory of this machine and of the limits of control groups, divided among the processes that
    a launcher started here.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 1e9
    own = psutil.Process().memory_info().rss
    free = [psutil.virtual_memory().available, *(limit - used for limit, used in iterate_cgroup_memory())]
    return (min(free) + own) / 1e9 / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


_CGROUP_FILES = {
    "v2": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}
"""By version: the files with the limit and the used bytes, and the lines of memory.stat with caches of files, which are
dropped before memory runs out."""


def iterate_cgroup_memory(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Iterator[tuple[int, int]]:
    """Yield the limit and the used bytes of each control group that limits the memory of this process.

    Args:
        root: Where control groups are mounted: those of version 2, or a folder `memory` of version 1.
        membership: The file that says to which control groups this process belongs.
    """
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version, mount = ("v1", root / "memory") if controllers else ("v2", root)
        limit_file, used_file, cache_lines = _CGROUP_FILES[version]
        group = mount / path.strip("/")
        # In a container the path may be that of the host, which is not mounted: then its own group is the root.
        for folder in {mount, *(each for each in (group, *group.parents) if each.is_relative_to(mount))}:
            try:
                limit = (folder / limit_file).read_text().strip()
                if limit != "max":
                    stat = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                    cached = sum(int(stat.get(name, 0)) for name in cache_lines)
                    yield int(limit), int((folder / used_file).read_text()) - cached
            except OSError:  # no such folder, or no limit at the root
                continue


def get_peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory of this process in GB: on its GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if resource is None:
        return psutil.Process().memory_info()._asdict()["peak_wset"] / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def describe_hardware() -> dict[str, str | int | float]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(terse=True),
        "cpu": get_cpu_name(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(get_memory_gb(), 1),
        "gpus": ", ".join(gpus),
    }

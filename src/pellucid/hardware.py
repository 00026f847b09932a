"""What this machine is and does: devices, matrix speed, memory."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from pathlib import Path

import torch

from pellucid.types import UserError


def pick_device(name: str) -> torch.device:
    """`auto` is this process's GPU, else Apple's, else the CPU. UserError where torch knows no such device."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f'policy.device = "{name}": {str(error).splitlines()[0]}; "cpu" always works') from error


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16 on a GPU that has it and on a CPU that multiplies faster in it, else fp32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    faster = device.type == "cpu" and matmul_tflops(torch.bfloat16) > 1.2 * matmul_tflops(torch.float32)
    return torch.bfloat16 if faster else torch.float32


def matmul_tflops(dtype: torch.dtype, size: int = 512, repeats: int = 10, threads: int = 1) -> float:
    """The best of a few matrix products on the CPU, in TFLOP/s: some tens of milliseconds in all.

    On one thread by default, because two wait for each other and a busy machine then decides which dtype looks faster.
    """
    before, x = torch.get_num_threads(), torch.ones(size, size, dtype=dtype)
    torch.set_num_threads(threads)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(x, x)
        seconds.append(time.perf_counter() - start)
    torch.set_num_threads(before)
    return 2 * size**3 / min(seconds) / 1e12


def out_of_memory(error: Exception) -> bool:
    """On a CUDA device it has a class of its own; on others it is told by its words."""
    words = ("DefaultCPUAllocator", "MPS backend out of memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in words)


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory for the next tensor instead of returning it page by page.

    A training step frees and asks for the same gigabytes again and again; on CPUs the page faults cost a quarter of
    it. True where it took effect: glibc only.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # malloc.h
    return all(
        libc.mallopt(option, value) for option, value in ((m_mmap_max, 0), (m_trim_threshold, -1), (m_top_pad, 2**28))
    )


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def describe() -> dict[str, str | int | float]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(terse=True),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(memory_gb(), 1),
        "gpus": ", ".join(gpus),
    }

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
from typing import Any, ClassVar

import torch
from torch import Tensor

SOURCES = Path(__file__).with_name("cpp")
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-mfma"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
    *("-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),  # run where a processor has them
    "-ffp-contract=off",  # what is rounded between a product and a sum must stay so
)


class UnusableError(Exception):
    """Why the library cannot be used."""


@functools.cache
def library() -> Any:
    """The library. UnusableError or OSError where it cannot be had."""
    if not torch.cpu._is_avx512_bf16_supported():
        raise UnusableError("a CPU without AVX-512 for bfloat16")
    return load()


@functools.cache
def has_tiles() -> bool:
    """Whether this processor has AMX, and this process may use it from now on."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


def load() -> Any:
    """The library, compiled where it was not kept."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        raise UnusableError("no g++")
    libraries = Path(torch.__file__).parent / "lib"
    links = [libraries / "libtorch_cpu.so", *libraries.glob("libgomp*")]  # torch's threads, and none beside them
    sources = sorted(SOURCES.iterdir())
    key = repr(([path.read_text() for path in sources], FLAGS, compiler, torch.__version__, links))
    name = f"fused-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    command = [*shlex.split(compiler), *FLAGS]
    try:
        return opened(cache / "pellucid" / name, command, links)
    except OSError:  # a home that cannot be written to, or from which nothing may be run
        with tempfile.TemporaryDirectory() as folder:  # it stays loaded
            return opened(Path(folder) / name, command, links)


def opened(path: Path, command: Sequence[str], links: Sequence[Path]) -> Any:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            build(made, command, links)
            made.replace(path)  # at once: other processes may look for it
    return ctypes.CDLL(str(path))


def build(made: Path, command: Sequence[str], links: Sequence[Path]) -> None:
    """Each source by a compiler of its own, as many at once as there are cores."""
    units = {path: made.with_name(f"{path.stem}.o") for path in sorted(SOURCES.glob("*.cpp"))}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda unit: run_compiler([*command, "-c", unit, "-o", units[unit]]), units))
    run_compiler([*command, "-shared", *units.values(), *links, "-o", made])


def run_compiler(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnusableError(" ".join(f"{command[0]} fails: {done.stderr}".split())[:200])


# ---------------------------------------------------------------- calling


class Operations:
    """Floating-point operations of matrix products in C++, while somebody counts them: doctor/profile.py does."""

    entries: ClassVar[list[tuple[float, float]] | None] = None
    """When each call had ended, by time.perf_counter, and how many."""

    @classmethod
    def count(cls, n: float) -> None:
        if cls.entries is not None:
            cls.entries.append((time.perf_counter(), n))


calls: Counter[str] = Counter()
"""How often this process has called each function of the library, trials included."""


def call(function: Any, *arguments: Any) -> int:
    """A function of the library: tensors and structures as their addresses, whole numbers as int64_t, None as null.

    Return the fault that it returns, 0 where there was none; of a function that returns nothing it means nothing.
    """
    calls[function.__name__] += 1
    return function(*map(passed, arguments))


def passed(x: Any) -> Any:
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, ctypes.Structure | ctypes.Array):
        return ctypes.byref(x)
    return ctypes.c_float(x) if isinstance(x, float) else None if x is None else ctypes.c_int64(x)

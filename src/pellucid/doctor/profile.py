"""`pellucid train --profile`: where one step's time and memory go, against what the machine can do."""

from __future__ import annotations

import bisect
import itertools
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid.algorithm.grpo import StepResult
from pellucid.machine import hardware
from pellucid.machine.harmless import harmless
from pellucid.models import compiling, fused, products, sums

STEP = 3
"""The step that is profiled: the first two fill caches."""
LEFT_OPERAND = {
    torch.ops.aten.mm: 0,
    torch.ops.aten.bmm: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.baddbmm: 1,
}
"""Operators that are matrix products, and which of their arguments is the left one."""
if torch.backends.mkldnn.is_available():
    LEFT_OPERAND[torch.ops.mkldnn._linear_pointwise] = 0
COLLECTIVES = ("gloo:", "nccl:")
"""Beginnings of the names of what goes between processes, waits for slower ones included."""
STAGES: tuple[str, ...] = ("generate", "reward", "score", "update")
KINDS = {
    "tokens, fused": (fused.NAME,),
    "matrix products": (
        *("mm", "bmm", "addmm", "baddbmm", "_linear_pointwise", "linear", "matmul"),
        *(products.NAME, sums.NAME),
    ),
    "attention": ("attention", "_scaled_dot", "scaled_dot", "_flash", "_efficient"),
    "embedding": ("embedding",),
    "optimizer": ("_fused_adam", "_foreach", "linalg_vector_norm", "_amp"),
    "softmax, exp, log": ("softmax", "_softmax", "exp", "log", "sigmoid", "silu"),
    "copies, casts, indices": (
        "copy",
        "cat",
        "index",
        "gather",
        "scatter",
        "constant_pad",
        "fill",
        "zero",
        "clone",
        "sort",
    ),
    "the rest": ("",),
}
"""Beginnings of the names of torch's operators; the first kind that fits counts."""


class Memory(NamedTuple):
    seconds: float
    gb: float


class Stage(NamedTuple):
    seconds: float
    seconds_by_kind: defaultdict[str, float]
    """Seconds in operators by kind; the rest of a step is Python and the way into operators."""
    memory_gb: list[float]
    """Samples of the resident memory."""
    communication: list[tuple[float, float]]
    """From when to when something went between processes, in seconds; what is computed meanwhile counts in by_kind."""


def profiled(steps: Iterator[StepResult], path: Path, dtype: torch.dtype) -> Iterator[StepResult]:
    """Pass the steps through, and write down where the time of the third one went."""
    operations: dict[str, float] = {}
    for number in itertools.count(1):
        if number == STEP - 1:
            result, operations = counted(steps)
        elif number == STEP:
            result = observed(steps, operations, path, dtype)
        else:
            result = next(steps, None)
        if result is None:
            return
        yield result


def counted(steps: Iterator[StepResult]) -> tuple[StepResult | None, dict[str, float]]:
    """The next step, and floating-point operations a token of its rollouts, by stage. In a step of its own: counting
    slows operators down, and torch.profiler, when it counts, holds gigabytes. Attention in C++ is not counted.
    """
    with Operations() as operations, in_cpp(operations.operations):
        start = time.perf_counter()
        result = next(steps, None)
    if result is None:
        return None, {}
    stage_at, tokens = stages_by_time(result.metrics), tokens_of(result)
    flops = dict.fromkeys(STAGES, 0.0)
    for seconds, n in operations.operations:
        flops[stage_at(seconds - start)] += n / max(1, tokens)
    return result, flops


def observed(
    steps: Iterator[StepResult], operations: Mapping[str, float], path: Path, dtype: torch.dtype
) -> StepResult | None:
    with watched() as memory, torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        result = next(steps, None)
    if result is None:
        return None
    stages = stages_of(list(profiler.events() or []), memory, start, result.metrics)
    tflop = {name: flops * tokens_of(result) / 1e12 for name, flops in operations.items()}
    speed = hardware.matmul_tflops(dtype, size=2048, repeats=5, threads=torch.get_num_threads())
    text = table(stages, tflop, speed, str(dtype).removeprefix("torch."))
    path.write_text(text)
    print(harmless(f"{text}\nprofile of step {result.step}: {path}"))
    return result


def tokens_of(result: StepResult) -> int:
    return sum(c.length for group in result.groups for c in group.completions)


@contextmanager
def in_cpp(operations: list[tuple[float, float]]) -> Iterator[None]:
    """Count what is computed in C++ there, too."""
    compiling.Operations.entries = operations
    try:
        yield
    finally:
        compiling.Operations.entries = None


class Operations(TorchDispatchMode):
    """Floating-point operations of matrix products, and when they were done. [n, k] by [k, m] takes 2 n k m."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[float, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (left := LEFT_OPERAND.get(func.overloadpacket)) is not None:
            self.operations.append((time.perf_counter(), 2.0 * result.numel() * args[left].shape[-1]))
        return result


@contextmanager
def watched() -> Iterator[list[Memory]]:
    """Sample the resident memory every 20 ms."""
    seen: list[Memory] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            seen.append(Memory(time.perf_counter(), hardware.resident_gb()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def stages_by_time(metrics: Mapping[str, float]) -> Callable[[float], str]:
    """The stage of a step at a moment, in seconds since its start: stages follow one another."""
    ends = list(itertools.accumulate(metrics[f"time/{name}"] for name in STAGES))
    return lambda seconds: STAGES[min(bisect.bisect_right(ends, seconds), len(STAGES) - 1)]


def stages_of(
    events: Sequence[Any], memory: Sequence[Memory], start: float, metrics: Mapping[str, float]
) -> dict[str, Stage]:
    """An operator belongs to the stage in which it began."""
    stage_at = stages_by_time(metrics)
    origin = min((event.time_range.start for event in events), default=0.0)
    stages = {name: Stage(metrics[f"time/{name}"], defaultdict(float), [], []) for name in STAGES}
    for event in events:
        began, ended = ((moment - origin) / 1e6 for moment in (event.time_range.start, event.time_range.end))
        stage = stages[stage_at(began)]
        stage.seconds_by_kind[kind_of(event.name)] += event.self_cpu_time_total / 1e6
        if event.name.startswith(COLLECTIVES):
            stage.communication.append((began, ended))
    for moment in memory:
        stages[stage_at(moment.seconds - start)].memory_gb.append(moment.gb)
    return stages


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """How long at least one of them lasts."""
    total, until = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def kind_of(operator: str) -> str:
    name = operator.removeprefix("aten::").removeprefix("mkldnn::")
    return next(kind for kind, beginnings in KINDS.items() if name.startswith(beginnings))


def table(phases: Mapping[str, Stage], tflop: Mapping[str, float], peak_tflops: float, dtype: str) -> str:
    """Fixed-width text. tflop: of each stage's matrix products; speed: TFLOP/s of a large one here."""
    lines = [f"{'':26}" + "".join(f"{name:>12}" for name in [*phases, "step"])]

    def row(name: str, values: Sequence[float], form: str, total: float | None = None) -> None:
        cells = [*values, sum(values) if total is None else total]
        lines.append(f"{name:26}" + "".join(f"{format(value, form):>12}" for value in cells))

    each, products = list(phases.values()), [tflop[name] for name in phases]
    seconds = sum(s.seconds for s in each)
    row("seconds", [s.seconds for s in each], ".2f")
    for kind in KINDS:
        row(f"  {kind}", [s.seconds_by_kind[kind] for s in each], ".2f")
    row("  Python and dispatch", [max(0.0, s.seconds - sum(s.seconds_by_kind.values())) for s in each], ".2f")
    if any(s.communication for s in each):
        row("between processes", [covered(s.communication) for s in each], ".2f")
    row("matrix products, TFLOP", products, ".3f")
    row("  at this machine's speed", [x / peak_tflops for x in products], ".2f")
    shares = [x / peak_tflops / s.seconds if s.seconds else 0.0 for x, s in zip(products, each, strict=True)]
    row("  share of that speed", shares, ".0%", sum(products) / peak_tflops / seconds)
    peaks = [max(s.memory_gb, default=0.0) for s in each]
    row("peak memory, GB", peaks, ".2f", max(peaks))
    lines.append(f"\nThis machine: {peak_tflops:.2f} TFLOP/s in {dtype}, one product of 2048 x 2048, all threads.")
    lines.append(
        "The profiler itself slows operators down. Operations were counted in the step before, and go by tokens.\n"
    )
    return "\n".join(lines)

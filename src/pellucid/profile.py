"""`pellucid train --profile`: where one step's time and memory go, against what the machine can do."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

from pellucid import hardware
from pellucid.grpo import StepResult

STEP = 3
"""The one that is looked at: the first two fill caches."""
STAGES = ("generate", "reward", "score", "update")
KINDS = {
    "matrix products": ("mm", "bmm", "addmm", "baddbmm", "mkldnn_linear", "linear", "matmul"),
    "attention": ("_scaled_dot", "scaled_dot", "_flash", "_efficient"),
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
    by_kind: Mapping[str, float]
    """Seconds in operators; what is missing is Python and the way into them."""
    tflop: float
    """Of matrix products."""
    peak_gb: float


def profiled(steps: Iterator[StepResult], path: Path, dtype: torch.dtype) -> Iterator[StepResult]:
    """Passes the steps through, and writes what the third was made of."""
    for number in itertools.count(1):
        result = observed(steps, path, dtype) if number == STEP else next(steps, None)
        if result is None:
            return
        yield result


def observed(steps: Iterator[StepResult], path: Path, dtype: torch.dtype) -> StepResult | None:
    with watched() as memory, torch.profiler.profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiler:
        start = time.perf_counter()
        result = next(steps, None)
    if result is None:
        return None
    stages = stages_of(list(profiler.events() or []), memory, start, result.metrics)
    speed = hardware.matmul_tflops(dtype, size=2048, repeats=5, threads=torch.get_num_threads())
    text = table(stages, speed, str(dtype).removeprefix("torch."))
    path.write_text(text)
    print(f"{text}\nprofile of step {result.step}: {path}")
    return result


@contextmanager
def watched() -> Iterator[list[Memory]]:
    """Resident memory every 20 ms."""
    seen: list[Memory] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            seen.append(Memory(time.perf_counter(), resident_gb()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def resident_gb() -> float:
    """Now; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9 if statm.exists() else 0.0


def stages_of(
    events: Sequence[Any], memory: Sequence[Memory], start: float, metrics: Mapping[str, float]
) -> dict[str, Stage]:
    """A step's stages follow one another: an operator belongs to the stage in which it began."""
    lengths = [metrics[f"time/{name}"] for name in STAGES]
    ends = list(itertools.accumulate(lengths))
    origin = min((event.time_range.start for event in events), default=0.0)

    def stage_at(seconds: float) -> int:
        return next((i for i, end in enumerate(ends) if seconds < end), len(ends) - 1)

    spent: list[dict[str, float]] = [defaultdict(float) for _ in STAGES]
    tflop, peak = [0.0] * len(STAGES), [0.0] * len(STAGES)
    for event in events:
        i = stage_at((event.time_range.start - origin) / 1e6)
        spent[i][kind_of(event.name)] += event.self_cpu_time_total / 1e6
        tflop[i] += (event.flops or 0) / 1e12
    for moment in memory:
        i = stage_at(moment.seconds - start)
        peak[i] = max(peak[i], moment.gb)
    rows = zip(lengths, spent, tflop, peak, strict=True)
    return {name: Stage(*row) for name, row in zip(STAGES, rows, strict=True)}


def kind_of(operator: str) -> str:
    name = operator.removeprefix("aten::").removeprefix("mkldnn::")
    return next(kind for kind, beginnings in KINDS.items() if name.startswith(beginnings))


def table(stages: Mapping[str, Stage], speed: float, dtype: str) -> str:
    """Fixed-width text. speed: TFLOP/s of one large matrix product here."""
    lines = [f"{'':26}" + "".join(f"{name:>12}" for name in stages) + f"{'step':>12}"]

    def row(name: str, values: Sequence[float], form: str, total: float | None = None) -> None:
        cells = [*values, sum(values) if total is None else total]
        lines.append(f"{name:26}" + "".join(f"{format(value, form):>12}" for value in cells))

    each = list(stages.values())
    row("seconds", [s.seconds for s in each], ".2f")
    for kind in KINDS:
        row(f"  {kind}", [s.by_kind.get(kind, 0.0) for s in each], ".2f")
    row("  Python and dispatch", [max(0.0, s.seconds - sum(s.by_kind.values())) for s in each], ".2f")
    row("matrix products, TFLOP", [s.tflop for s in each], ".3f")
    row("  at this machine's speed", [s.tflop / speed for s in each], ".2f")
    row("  share of that speed", [share(s, speed) for s in each], ".0%", share_of_all(each, speed))
    row("peak memory, GB", [s.peak_gb for s in each], ".2f", max(s.peak_gb for s in each))
    lines.append(
        f"\nThis machine: {speed:.2f} TFLOP/s in {dtype}, one product of 2048 x 2048, all threads. The profiler"
    )
    lines.append("itself slows small operators down.\n")
    return "\n".join(lines)


def share(stage: Stage, speed: float) -> float:
    return stage.tflop / speed / stage.seconds if stage.seconds else 0.0


def share_of_all(stages: Sequence[Stage], speed: float) -> float:
    return sum(s.tflop for s in stages) / speed / sum(s.seconds for s in stages)

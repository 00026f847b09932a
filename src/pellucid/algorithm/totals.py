"""The metrics of a step: sums over tokens that become means over all processes, and the time of each stage."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

LAST, COUNTED = ("lr", "loss_scale"), ("skipped", "skipped/overflow", "idle")
"""Metrics of optimizer steps: of several, the last value is kept of the former, the sum of the latter."""


class Totals:
    """Sums over tokens and over optimizer steps, until they become means over all processes."""

    def __init__(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.step_metrics: list[dict[str, float]] = []
        self.gap_max = 0.0

    def add_tokens(self, metrics: Mapping[str, Tensor]) -> None:
        """Add metrics, each [N] of the N tokens that it speaks of. `loss` holds the share of each token in a sum."""
        there = {name: value for name, value in metrics.items() if len(value)}
        for name, value in there.items():
            self.sums[name] += float(value.sum())
            self.counts[name] += len(value)
        if "sampler/gap_mean" in there:
            self.gap_max = max(self.gap_max, float(there["sampler/gap_mean"].max()))

    def compute_means(self, gather: Callable[[list[Any]], list[Any]]) -> dict[str, float]:
        """The mean of each metric over all processes, whose lists `gather` joins."""
        sums, counts = added(gather([self.sums])), added(gather([self.counts]))
        loss, steps = sums.pop("loss"), len(self.step_metrics)
        return {name: value / counts[name] for name, value in sums.items()} | {
            "sampler/gap_max": max(gather([self.gap_max])),
            "loss": loss / steps,  # already a weighted sum: adding up is its mean
            "grad_norm": sum(s["grad_norm"] for s in self.step_metrics) / steps,
            **{name: self.step_metrics[-1][name] for name in LAST if name in self.step_metrics[-1]},
            **{name: sum(s[name] for s in self.step_metrics) for name in COUNTED if name in self.step_metrics[-1]},
        }


def added(shares: list[Mapping[str, float]]) -> dict[str, float]:
    """Add up the sums of all processes by name; a process without prefixes has none for them."""
    names = dict.fromkeys(name for share in shares for name in share)
    return {name: sum(share.get(name, 0.0) for share in shares) for name in names}


class Clock:
    """Splits a step into named laps, in seconds."""

    def __init__(self) -> None:
        self.start = self.last_lap = time.perf_counter()
        self.laps: dict[str, float] = {}

    def record_lap(self, name: str) -> None:
        before, self.last_lap = self.last_lap, time.perf_counter()
        self.laps[f"time/{name}"] = self.laps.get(f"time/{name}", 0.0) + self.last_lap - before

    def get_times(self) -> dict[str, float]:
        return {**self.laps, "time/step": self.last_lap - self.start}

"""The metrics of a step: sums over tokens that become means over all processes, and the time of each stage."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from pellucid.algorithm.advantages import Grades, compute_advantages_from_grades
from pellucid.algorithm.settings import GRPOConfig

LAST_VALUE_METRICS, SUMMED_METRICS = ("lr", "loss_scale"), ("skipped", "skipped/overflow", "idle")
"""Metrics of optimizer steps: of several, the last value is kept of the former, the sum of the latter."""


class MetricTotals:
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
        sums, counts = sum_by_name(gather([self.sums])), sum_by_name(gather([self.counts]))
        loss, steps = sums.pop("loss"), len(self.step_metrics)
        return {name: value / counts[name] for name, value in sums.items()} | {
            "sampler/gap_max": max(gather([self.gap_max])),
            "loss": loss / steps,  # already a weighted sum: adding up is its mean
            "grad_norm": sum(s["grad_norm"] for s in self.step_metrics) / steps,
            **{name: self.step_metrics[-1][name] for name in LAST_VALUE_METRICS if name in self.step_metrics[-1]},
            **{
                name: sum(s[name] for s in self.step_metrics)
                for name in SUMMED_METRICS
                if name in self.step_metrics[-1]
            },
        }


def sum_by_name(shares: list[Mapping[str, float]]) -> dict[str, float]:
    """Add up the sums of all processes by name; a process without prefixes has none for them."""
    names = dict.fromkeys(name for share in shares for name in share)
    return {name: sum(share.get(name, 0.0) for share in shares) for name in names}


class StageClock:
    """Splits a step into named laps, in seconds."""

    def __init__(self) -> None:
        self.start = self.last_lap = time.perf_counter()
        self.laps: dict[str, float] = {}

    def record_lap(self, name: str) -> None:
        before, self.last_lap = self.last_lap, time.perf_counter()
        self.laps[f"time/{name}"] = self.laps.get(f"time/{name}", 0.0) + self.last_lap - before

    def get_times(self) -> dict[str, float]:
        return {**self.laps, "time/step": self.last_lap - self.start}


# ---------------------------------------------------------------- diagnostics
# Whether a technique did anything: the share of advantages, tokens or groups that it changed.
#
# A switch that is on and changes nothing teaches a study nothing: `effect/*` of metrics.jsonl, and `known_inert` before
# training, say so.


MIN_VISIBLE_CHANGE = 0.01
"""A change of an advantage, or of a token's factor in the gradient, that counts: advantages are of the order of 1."""
INERT_AFTER_STEPS = 5
"""Steps after which a technique that has changed nothing is called inert."""


def compute_advantage_effects(grades: Grades, shaped: Tensor, advantages: Tensor, cfg: GRPOConfig) -> dict[str, float]:
    """Shares of [P, G] advantages: by shaped rewards, and by another comparison than (r - mean) / std."""
    shares = {}
    if has_reward_shaping(cfg):
        shares["effect/shaping"] = compute_changed_share(
            advantages - compute_advantages_from_grades(grades, grades.rewards, cfg)
        )
    if cfg.advantage != "grpo":
        shares["effect/advantage"] = compute_changed_share(
            advantages - compute_advantages_from_grades(grades, shaped, replace(cfg, advantage="grpo"))
        )
    return shares


def has_reward_shaping(cfg: GRPOConfig) -> bool:
    return cfg.similarity != "none" or cfg.overlong_cache > 0 or (cfg.kl_coef > 0 and cfg.kl_in == "raw_reward")


def compute_kl_penalty_effect(penalty: Tensor | float, gather: Callable[[list[Any]], list[Any]]) -> dict[str, float]:
    """The share of advantages that KL in the reward changed."""
    if not isinstance(penalty, Tensor):
        return {}
    changed = gather((penalty.abs() > MIN_VISIBLE_CHANGE).flatten().tolist())
    return {"effect/kl": sum(changed) / len(changed)}


def compute_kl_loss_effect(
    logprobs: Tensor, ref_logprobs: Tensor | None, exact_kl: Tensor | None, cfg: GRPOConfig
) -> dict[str, Tensor]:
    """[B, T]: tokens that the KL in the loss weighs by more than LEAST.

    The factor of a token in the gradient of k2 is kl_coef * |log pi - log ref|, in that of k3 the same to first order.
    The exact KL knows no token: there kl_coef * sqrt(2 KL) is its size, KL being half its mean square to second order.
    """
    if cfg.kl_in != "loss":
        return {}
    if exact_kl is not None:
        return {"effect/kl": cfg.kl_coef * (2 * exact_kl.detach().clamp(min=0.0)).sqrt() > MIN_VISIBLE_CHANGE}
    assert ref_logprobs is not None
    return {"effect/kl": cfg.kl_coef * (logprobs - ref_logprobs).abs() > MIN_VISIBLE_CHANGE}


def compute_changed_share(difference: Tensor) -> float:
    return float((difference.abs() > MIN_VISIBLE_CHANGE).double().mean())


# ---------------------------------------------------------------- what is known to change nothing


def find_inert_settings(cfg: GRPOConfig) -> list[str]:
    """A line for each switch that cannot do anything in this setting, with what would let it."""
    lines = []
    if not cfg.is_off_policy and (cfg.objective == "dcpo" or cfg.clip_difficulty or cfg.dual_clip):
        lines.append(
            "clipping is inert: with one optimizer step on each set of rollouts the ratio is 1;"
            " set algorithm.epochs or algorithm.minibatches above 1"
        )
    if cfg.prompts_per_step == 1 and (cfg.advantage in ("difficulty", "batch") or cfg.clip_difficulty):
        lines.append("difficulty is inert: it compares the groups of a step; set prompts_per_step above 1")
    if cfg.kl_coef and cfg.kl_in == "loss" and cfg.kl == "k1":
        lines.append('kl = "k1" in the loss is inert: its expected gradient is 0; set kl = "k2", or kl_in = "reward"')
    return lines


class InertSettingWatcher:
    """Says once of each `effect/*` that it was 0 in the first WATCHED steps, and of prefixes that there were none."""

    def __init__(self, cfg: GRPOConfig) -> None:
        self.inert_metrics = {"prefix/nll"} if cfg.prefix_coef else set[str]()
        self.step_count = 0

    def observe_step(self, metrics: Mapping[str, float]) -> list[str]:
        """The lines that a step gives occasion for."""
        if self.step_count == 0:
            self.inert_metrics |= {name for name in metrics if name.startswith("effect/") or name == "prefix/share"}
            self.inert_metrics -= {"prefix/nll"} if "prefix/share" in self.inert_metrics else set()
        self.inert_metrics -= {name for name, value in metrics.items() if value}
        self.step_count += 1
        return (
            [describe_inert_metric(name) for name in sorted(self.inert_metrics)]
            if self.step_count == INERT_AFTER_STEPS
            else []
        )


def describe_inert_metric(name: str) -> str:
    if name == "prefix/nll":
        return 'algorithm.prefix_coef is inert: no prompt had a prefix; [task] name = "prefixed" gives them'
    if name == "prefix/share":
        return f"no question had a prefix in {INERT_AFTER_STEPS} steps: task.file is of other questions, or of another task.seed"
    return f"{name} was 0 in {INERT_AFTER_STEPS} steps: what it measures does nothing in this setting"

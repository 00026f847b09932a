"""The metrics of a step: means over the tokens of all processes, times of the stages, and effects of techniques."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pellucid.algorithm.advantages import Grades, compute_advantages_from_grades
from pellucid.algorithm.settings import GRPOConfig
from pellucid.types import Group

LAST_VALUE_METRICS, SUMMED_METRICS = ("lr", "loss_scale"), ("skipped", "skipped/overflow", "idle")
"""Metrics of optimizer steps. A training step reports the last value of the former and the sum of the latter."""
MIN_VISIBLE_CHANGE = 0.01
"""The smallest change of an advantage, or of a token's factor in the gradient, that counts. Advantages are around 1."""
INERT_AFTER_STEPS = 5
"""The number of steps after which a technique that has changed nothing is reported as inert."""


# ---------------------------------------------------------------- means of a step, and times


class MetricTotals:
    """Sums over tokens and optimizer steps, from which means over all processes are computed at the end of a step.

    Sums on a GPU are copied to the CPU once, at that time, so that micro-batches do not wait for them.
    """

    def __init__(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.step_metrics: list[dict[str, float]] = []
        self.gap_max = 0.0
        self.pending: list[tuple[list[str], Tensor]] = []
        """For each micro-batch the names of its metrics and, on the device, their sums; then the largest gap."""

    def add_tokens(self, metrics: Mapping[str, Tensor]) -> None:
        """Add metrics, each [N] over the N tokens to which it applies. `loss` holds each token's term of a sum."""
        nonempty = {name: value for name, value in metrics.items() if len(value)}
        for name, value in nonempty.items():
            self.counts[name] += len(value)
        statistics = [value.sum() for value in nonempty.values()]
        if "sampler/gap_mean" in nonempty:
            statistics.append(nonempty["sampler/gap_mean"].max())
        if statistics:
            self.pending.append((list(nonempty), torch.stack([x.double() for x in statistics])))
        if not any(x.device.type == "cuda" for x in statistics):
            self.read_pending()

    def read_pending(self) -> None:
        """Add the sums that are still on the device."""
        values = iter(torch.cat([x for _, x in self.pending]).tolist() if self.pending else ())
        for names, statistics in self.pending:
            for name in names:
                self.sums[name] += next(values)
            if len(statistics) > len(names):
                self.gap_max = max(self.gap_max, next(values))
        self.pending = []

    def compute_means(self, gather: Callable[[list[Any]], list[Any]]) -> dict[str, float]:
        """Return the mean of each metric over all processes. `gather` joins the lists of all processes."""
        self.read_pending()
        sums, counts = sum_by_name(gather([self.sums])), sum_by_name(gather([self.counts]))
        loss, steps = sums.pop("loss"), len(self.step_metrics)
        last = self.step_metrics[-1]
        return {name: value / counts[name] for name, value in sums.items()} | {
            "sampler/gap_max": max(gather([self.gap_max])),
            "loss": loss / steps,  # the token weights already make this sum a mean
            "grad_norm": sum(s["grad_norm"] for s in self.step_metrics) / steps,
            **{name: last[name] for name in LAST_VALUE_METRICS if name in last},
            **{name: sum(s[name] for s in self.step_metrics) for name in SUMMED_METRICS if name in last},
        }


def sum_by_name(shares: list[Mapping[str, float]]) -> dict[str, float]:
    """Add up the values of all processes by name. A process may lack a name, such as "prefix/nll"."""
    names = dict.fromkeys(name for share in shares for name in share)
    return {name: sum(share.get(name, 0.0) for share in shares) for name in names}


class StageClock:
    """Measures the seconds that each stage of a step takes. A stage is a named lap."""

    def __init__(self) -> None:
        self.start = self.last_lap = time.perf_counter()
        self.laps: dict[str, float] = {}
        self.sampling_seconds: float | None = None
        """The seconds spent on generating the next rollouts during this step; None if they are not generated ahead."""

    def record_lap(self, name: str) -> None:
        """Add the time since the last lap to the lap of this name."""
        before, self.last_lap = self.last_lap, time.perf_counter()
        self.laps[f"time/{name}"] = self.laps.get(f"time/{name}", 0.0) + self.last_lap - before

    def get_times(self) -> dict[str, float]:
        """Return the seconds of each lap and of the step.

        If rollouts are generated ahead, also the share of the step in which training waited for them, and the share in
        which none were generated.
        """
        seconds = self.last_lap - self.start
        times = {**self.laps, "time/step": seconds}
        if self.sampling_seconds is None:
            return times
        waiting, idle = self.laps["time/generate"], max(0.0, seconds - self.sampling_seconds)
        shares = {"time/bubble_training": waiting / seconds, "time/bubble_sampling": idle / seconds}
        return {"time/reward": 0.0, **times, **shares}


def compute_sampling_metrics(groups: Sequence[Group], zero_variance: int) -> dict[str, float]:
    """Return metrics of dynamic sampling: the number of generated groups, and the tokens of all their sequences."""
    tokens = sum(s.length for group in groups for c in group.completions for s in (c, *c.branches))
    return {"groups/drawn": len(groups), "groups/drawn_dead": zero_variance / len(groups), "tokens": float(tokens)}


# ---------------------------------------------------------------- effects: the share that a technique changed
# If a technique is on but changes nothing, an experiment with it shows nothing. The metrics `effect/*` in metrics.jsonl
# reveal this, and `find_inert_settings` finds known cases before training.


def compute_advantage_effects(grades: Grades, shaped: Tensor, advantages: Tensor, cfg: GRPOConfig) -> dict[str, float]:
    """Return the shares of advantages changed by reward shaping, by an advantage other than "grpo", by difficulty.

    `advantages` [P, G] were computed from the rewards `shaped` [P, G] with cfg.advantage.
    """
    effects = {}
    if cfg.shapes_rewards:
        unshaped = compute_advantages_from_grades(grades, grades.rewards, cfg)
        effects["effect/shaping"] = compute_changed_share(advantages - unshaped)
    if cfg.advantage != "grpo":
        plain = compute_advantages_from_grades(grades, shaped, replace(cfg, advantage="grpo"))
        effects["effect/advantage"] = compute_changed_share(advantages - plain)
    if cfg.advantage_difficulty:
        unweighted = compute_advantages_from_grades(grades, shaped, replace(cfg, advantage_difficulty=0.0))
        effects["effect/difficulty"] = compute_changed_share(advantages - unweighted)
    return effects


def compute_changed_share(difference: Tensor) -> float:
    return float((difference.abs() > MIN_VISIBLE_CHANGE).double().mean())


def compute_kl_penalty_effect(penalty: Tensor | float, gather: Callable[[list[Any]], list[Any]]) -> dict[str, float]:
    """Return the share of advantages that the KL in the reward changed; empty if none is subtracted."""
    if not isinstance(penalty, Tensor):
        return {}
    changed = gather((penalty.abs() > MIN_VISIBLE_CHANGE).flatten().tolist())
    return {"effect/kl": sum(changed) / len(changed)}


def compute_kl_loss_effect(
    logprobs: Tensor, ref_logprobs: Tensor | None, exact_kl: Tensor | None, cfg: GRPOConfig
) -> dict[str, Tensor]:
    """Return a mask [B, T] of tokens whose factor in the gradient of the KL loss is above MIN_VISIBLE_CHANGE.

    The factor in the gradient of k2 is kl_coef |log(pi / ref)|, and that of k3 is the same to first order. The exact KL
    has no factor per token: there it is kl_coef sqrt(2 KL), the root mean square to second order.
    """
    if cfg.kl_in != "loss":
        return {}
    if exact_kl is not None:
        return {"effect/kl": cfg.kl_coef * (2 * exact_kl.detach().clamp(min=0.0)).sqrt() > MIN_VISIBLE_CHANGE}
    assert ref_logprobs is not None
    return {"effect/kl": cfg.kl_coef * (logprobs - ref_logprobs).abs() > MIN_VISIBLE_CHANGE}


# ---------------------------------------------------------------- settings that change nothing


def find_inert_settings(cfg: GRPOConfig) -> list[str]:
    """Return a line for each setting without effect. The line says how to give the setting an effect."""
    lines = []
    clips_by_difficulty = bool(cfg.clip_difficulty or cfg.clip_difficulty_low)
    if not cfg.is_off_policy and (cfg.objective == "dcpo" or clips_by_difficulty or cfg.dual_clip):
        lines.append(
            "clipping is inert: with one optimizer step on each set of rollouts the ratio is 1;"
            " set algorithm.epochs or algorithm.minibatches above 1"
        )
    compares_groups = cfg.advantage in ("difficulty", "batch") or cfg.advantage_difficulty
    if cfg.prompts_per_step == 1 and (compares_groups or clips_by_difficulty):
        lines.append("difficulty is inert: it compares the groups of a step; set prompts_per_step above 1")
    if cfg.kl_coef and cfg.kl_in == "loss" and cfg.kl == "k1":
        lines.append('kl = "k1" in the loss is inert: its expected gradient is 0; set kl = "k2", or kl_in = "reward"')
    return lines


class InertSettingWatcher:
    """Reports each `effect/*` that stayed 0 in the first INERT_AFTER_STEPS steps, and prefixes that never occurred."""

    def __init__(self, cfg: GRPOConfig) -> None:
        self.inert_metrics = {"prefix/nll"} if cfg.prefix_coef else set[str]()
        self.step_count = 0

    def observe_step(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the lines to show after this step."""
        if self.step_count == 0:
            self.inert_metrics |= {name for name in metrics if name.startswith("effect/") or name == "prefix/share"}
            self.inert_metrics -= {"prefix/nll"} if "prefix/share" in self.inert_metrics else set()
        self.inert_metrics -= {name for name, value in metrics.items() if value}
        self.step_count += 1
        if self.step_count != INERT_AFTER_STEPS:
            return []
        return [_describe_inert_metric(name) for name in sorted(self.inert_metrics)]


def _describe_inert_metric(name: str) -> str:
    if name == "prefix/nll":
        return 'algorithm.prefix_coef is inert: no prompt had a prefix; set [task] name = "prefixed"'
    if name == "prefix/share":
        return (
            f"no question had a prefix in {INERT_AFTER_STEPS} steps: task.file was written for other questions, or for"
            " another task.seed"
        )
    return f"{name} was 0 in {INERT_AFTER_STEPS} steps: the technique that it measures has no effect here"

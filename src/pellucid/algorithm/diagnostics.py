"""Whether a technique did anything: the share of advantages, tokens or groups that it changed.

A switch that is on and changes nothing teaches a study nothing: `effect/*` of metrics.jsonl, and `known_inert` before
training, say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from pellucid.algorithm.advantages import Grades, advantages_of
from pellucid.algorithm.settings import GRPOConfig

LEAST = 0.01
"""A change of an advantage, or of a token's factor in the gradient, that counts: advantages are of the order of 1."""
WATCHED = 5
"""Steps after which a technique that has changed nothing is called inert."""


def on_advantages(grades: Grades, shaped: Tensor, advantages: Tensor, cfg: GRPOConfig) -> dict[str, float]:
    """Shares of [P, G] advantages: by shaped rewards, and by another comparison than (r - mean) / std."""
    shares = {}
    if reshapes(cfg):
        shares["effect/shaping"] = moved(advantages - advantages_of(grades, grades.rewards, cfg))
    if cfg.advantage != "grpo":
        shares["effect/advantage"] = moved(advantages - advantages_of(grades, shaped, replace(cfg, advantage="grpo")))
    return shares


def reshapes(cfg: GRPOConfig) -> bool:
    return cfg.similarity != "none" or cfg.overlong_cache > 0 or (cfg.kl_coef > 0 and cfg.kl_in == "raw_reward")


def of_penalty(penalty: Tensor | float, gather: Callable[[list[Any]], list[Any]]) -> dict[str, float]:
    """The share of advantages that KL in the reward changed."""
    if not isinstance(penalty, Tensor):
        return {}
    changed = gather((penalty.abs() > LEAST).flatten().tolist())
    return {"effect/kl": sum(changed) / len(changed)}


def of_loss_kl(
    logprobs: Tensor, ref_logprobs: Tensor | None, exact_kl: Tensor | None, cfg: GRPOConfig
) -> dict[str, Tensor]:
    """[B, T]: tokens that the KL in the loss weighs by more than LEAST.

    The factor of a token in the gradient of k2 is kl_coef * |log pi - log ref|, in that of k3 the same to first order.
    The exact KL knows no token: there kl_coef * sqrt(2 KL) is its size, KL being half its mean square to second order.
    """
    if cfg.kl_in != "loss":
        return {}
    if exact_kl is not None:
        return {"effect/kl": cfg.kl_coef * (2 * exact_kl.detach().clamp(min=0.0)).sqrt() > LEAST}
    assert ref_logprobs is not None
    return {"effect/kl": cfg.kl_coef * (logprobs - ref_logprobs).abs() > LEAST}


def moved(difference: Tensor) -> float:
    return float((difference.abs() > LEAST).double().mean())


# ---------------------------------------------------------------- what is known to change nothing


def known_inert(cfg: GRPOConfig) -> list[str]:
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


class Watch:
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
        return [said_inert(name) for name in sorted(self.inert_metrics)] if self.step_count == WATCHED else []


def said_inert(name: str) -> str:
    if name == "prefix/nll":
        return 'algorithm.prefix_coef is inert: no prompt had a prefix; [task] name = "prefixed" gives them'
    if name == "prefix/share":
        return f"no question had a prefix in {WATCHED} steps: task.file is of other questions, or of another task.seed"
    return f"{name} was 0 in {WATCHED} steps: what it measures does nothing in this setting"

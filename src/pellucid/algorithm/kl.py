"""KL(pi, reference): its estimators, its place in the reward, its coefficient; docs/kl.md has the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor

from pellucid.algorithm.advantages import subtract_leave_one_out_mean
from pellucid.algorithm.objectives import MAX_LOG_RATIO, clamp_log_ratio, compute_ratio
from pellucid.algorithm.settings import GRPOConfig

# Estimators: on tokens that pi_old drew, [B, T] each.


def k1(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """log pi - log ref: unbiased. Its place is the reward; in the loss its expected gradient is 0."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """(log pi - log ref)^2 / 2: in the loss its expected gradient is that of KL(pi, ref)."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """ref / pi - 1 - log(ref / pi): unbiased and never negative; in the loss its gradient is that of KL(ref, pi)."""
    log_ratio = ref_logprobs - logprobs
    return clamp_log_ratio(log_ratio).exp() - 1 - log_ratio


def k3_weighted(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """pi / pi_old k3 (DeepSeek-V3.2, arXiv 2512.02556): in the loss its gradient is KL(pi, ref)'s, off-policy too."""
    return compute_ratio(logprobs, old_logprobs) * k3(logprobs, ref_logprobs, old_logprobs)


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "k3_weighted": k3_weighted}
"""Besides, kl = "exact" is the sum over the vocabulary, which the policy computes itself."""


def compute_kl_metrics(logprobs: Tensor, ref_logprobs: Tensor | None) -> dict[str, Tensor]:
    """Metrics [B, T]: k3, whatever estimator is optimised, and where its exponent had to be clamped."""
    assert ref_logprobs is not None
    overflow = (ref_logprobs - logprobs).abs() > MAX_LOG_RATIO
    return {"kl": k3(logprobs, ref_logprobs, logprobs), "kl/overflow": overflow}


def sum_kl_per_response(kl: Tensor, mask: Tensor, cfg: GRPOConfig) -> Tensor:
    """The KL of each response, [P, G], summed over its tokens; float64 on the CPU, as rewards are."""
    return (kl * mask).cpu().double().sum(-1).view(-1, cfg.group_size)


def subtract_kl_from_rewards(rewards: Tensor, kl: Tensor | None, mask: Tensor, cfg: GRPOConfig) -> Tensor:
    """[P, G]: R - kl_coef * K, to be normalised: what is left of kl_coef then depends on the group's spread."""
    if kl is None or cfg.kl_in != "raw_reward":
        return rewards
    return rewards - cfg.kl_coef * sum_kl_per_response(kl, mask, cfg)


def compute_kl_penalty(kl: Tensor | None, mask: Tensor, cfg: GRPOConfig) -> Tensor | float:
    """[P, G]: kl_coef * (K - mean K of the others), K the sum over a response; subtracted from the advantages.

    Equivalent in expectation to the reward R - kl_coef * K, but outside the division by the group's std, so that
    kl_coef keeps its meaning in every group, dead ones included.
    """
    if kl is None or cfg.kl_in != "reward":
        return 0.0
    return cfg.kl_coef * subtract_leave_one_out_mean(sum_kl_per_response(kl, mask, cfg))


def compute_kl_cost(
    kl: Tensor | None, mask: Tensor, cfg: GRPOConfig, gather: Callable[[list[float]], list[float]]
) -> dict[str, float]:
    """What a response of a step pays for its KL in the mean, where rewards pay; `gather` joins processes."""
    if kl is None:
        return {}
    return {"reward/kl": -cfg.kl_coef * fmean(gather(sum_kl_per_response(kl, mask, cfg).flatten().tolist()))}


def adapt_kl_coef(kl_coef: float, measured_kl: float, cfg: GRPOConfig) -> float:
    """10% of the relative error, itself clipped to 20% (arXiv 1909.08593, section 2.2), towards cfg.kl_target.

    A KL that is not finite says nothing: kl_coef stays.
    """
    if not cfg.kl_target or not math.isfinite(measured_kl):
        return kl_coef
    error = torch.tensor((measured_kl - cfg.kl_target) / cfg.kl_target).clamp(-0.2, 0.2)
    return kl_coef * (1 + 0.1 * float(error))

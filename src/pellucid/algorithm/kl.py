"""KL(policy, reference): estimators, the penalty in the reward, and the coefficient.

docs/explanation/kl.md has the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor

from pellucid.algorithm.advantages import subtract_leave_one_out_mean
from pellucid.algorithm.objectives import MAX_LOG_RATIO, clamp_log_ratio, compute_ratio
from pellucid.algorithm.settings import GRPOConfig

# ---------------------------------------------------------------- estimators, on tokens that the old policy sampled
# Each takes logprobs, ref_logprobs and old_logprobs, all [B, T] in nats, and returns [B, T].
# J. Schulman, 2020, is "Approximating KL divergence".


def k1(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """log(pi / ref): unbiased, for use in the reward; in the loss its expected gradient is 0 (J. Schulman, 2020)."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """log(pi / ref)^2 / 2, never negative (J. Schulman, 2020).

    In the loss its expected gradient is that of KL(pi, ref).
    """
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """ref / pi - 1 - log(ref / pi): unbiased, never negative (J. Schulman, 2020; arXiv 2402.03300, equation 4).

    In the loss its expected gradient is that of KL(ref, pi). The exponent is clamped to MAX_LOG_RATIO.
    """
    log_ratio = ref_logprobs - logprobs
    return clamp_log_ratio(log_ratio).exp() - 1 - log_ratio


def k3_weighted(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """(pi / pi_old) k3, never negative (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

    In the loss its expected gradient is that of KL(pi, ref), also off-policy.
    """
    return compute_ratio(logprobs, old_logprobs) * k3(logprobs, ref_logprobs, old_logprobs)


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "k3_weighted": k3_weighted}
"""For kl = "exact" the policy itself sums over the vocabulary."""


def compute_kl_metrics(
    logprobs: Tensor, ref_logprobs: Tensor | None, exact_kl: Tensor | None = None
) -> dict[str, Tensor]:
    """Compute the metrics [B, T] of the KL: the exact KL if it is given, else k3, regardless of the estimator in use.

    `kl/overflow` marks tokens whose exponent was clamped.
    """
    if exact_kl is not None:
        return {"kl": exact_kl.detach()}
    assert ref_logprobs is not None
    overflow = (ref_logprobs - logprobs).abs() > MAX_LOG_RATIO
    return {"kl": k3(logprobs, ref_logprobs, logprobs), "kl/overflow": overflow}


# ---------------------------------------------------------------- KL in the reward


def sum_kl_per_response(kl: Tensor, mask: Tensor, cfg: GRPOConfig) -> Tensor:
    """Sum the KL [B, T] over the tokens of a mask; a KL that is already summed is [B, 1], and so is its mask.

    Returns [P, G] float64 on the CPU, as rewards are.
    """
    return (kl * mask).cpu().double().sum(-1).view(-1, cfg.group_size)


def subtract_kl_from_rewards(rewards: Tensor, kl: Tensor | None, mask: Tensor, cfg: GRPOConfig) -> Tensor:
    """R - kl_coef K for kl_in = "raw_reward", where K is the KL summed over a response; R for any other kl_in. [P, G]

    The rewards are normalized afterwards, so the effective kl_coef depends on the spread of rewards in the group.
    """
    if kl is None or cfg.kl_in != "raw_reward":
        return rewards
    return rewards - cfg.kl_coef * sum_kl_per_response(kl, mask, cfg)


def compute_kl_penalty(kl: Tensor | None, mask: Tensor, cfg: GRPOConfig) -> Tensor | float:
    """kl_coef (K - mean K of the siblings) for kl_in = "reward"; else 0.0. [P, G]

    It is subtracted from the advantages. In expectation this equals the reward R - kl_coef K. It is not divided by the
    group's std, so kl_coef means the same in every group, including zero-variance groups.
    """
    if kl is None or cfg.kl_in != "reward":
        return 0.0
    return cfg.kl_coef * subtract_leave_one_out_mean(sum_kl_per_response(kl, mask, cfg))


def compute_kl_cost(
    kl: Tensor | None, mask: Tensor, cfg: GRPOConfig, gather: Callable[[list[float]], list[float]]
) -> dict[str, float]:
    """Compute the metric `reward/kl`: minus kl_coef times the KL of a response, averaged over all processes.

    It is left out if no KL is subtracted from rewards or advantages. `gather` joins the lists of all processes.
    """
    if kl is None:
        return {}
    return {"reward/kl": -cfg.kl_coef * fmean(gather(sum_kl_per_response(kl, mask, cfg).flatten().tolist()))}


# ---------------------------------------------------------------- the coefficient


def adapt_kl_coef(kl_coef: float, measured_kl: float, cfg: GRPOConfig) -> float:
    """Adapt kl_coef so that the KL approaches cfg.kl_target (Ziegler et al., arXiv 1909.08593, section 2.2).

    kl_coef changes by 10% of the relative error of the measured KL per token, and the error is clipped to 20%. It does
    not change where kl_target is 0 or the KL is not finite.
    """
    if not cfg.kl_target or not math.isfinite(measured_kl):
        return kl_coef
    error = torch.tensor((measured_kl - cfg.kl_target) / cfg.kl_target).clamp(-0.2, 0.2)
    return kl_coef * (1 + 0.1 * float(error))

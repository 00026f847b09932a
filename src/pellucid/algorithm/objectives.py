"""What is maximised for each response token, [B, T]; how tokens add up; and where the clip acts.

An objective takes (logprobs, old_logprobs, advantages, mask, cfg): logprobs [B, T] with gradient, old_logprobs [B, T]
of the policy that the rollouts came from, advantages [B, 1], mask [B, T] true on tokens. What it says off the mask is
not read. A member whose ratio belongs to the whole response gives its value to each of its tokens: with
aggregate = "sequence" every response then counts once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pellucid.algorithm.settings import GRPOConfig

Objective = Callable[[Tensor, Tensor, Tensor, Tensor, GRPOConfig], Tensor]

MAX_LOG_RATIO = 20.0
"""exp() of a larger log-ratio says nothing but overflow."""


def clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return clamped(logprobs - old_logprobs).exp()


def mean_over_response(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B, 1]"""
    return (x * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


# ---------------------------------------------------------------- objectives


def naive(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cfg: GRPOConfig) -> Tensor:
    """A log pi: REINFORCE with the group as baseline."""
    return advantages * logprobs


def unclipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cfg: GRPOConfig) -> Tensor:
    """A pi / pi_old: importance-weighted, no trust region."""
    return advantages * ratio_of(logprobs, old_logprobs)


def clipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cfg: GRPOConfig) -> Tensor:
    """min(A ratio, A clip(ratio)) (PPO, arXiv 1707.06347, equation 7): no gain beyond the trust region."""
    return surrogate(ratio_of(logprobs, old_logprobs), advantages, fixed_bounds(old_logprobs, cfg), cfg)


def dynamic(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cfg: GRPOConfig) -> Tensor:
    """`clipped` between bounds that the old probability of a token sets (DCPO, arXiv 2509.02333)."""
    return surrogate(ratio_of(logprobs, old_logprobs), advantages, probability_bounds(old_logprobs, cfg), cfg)


def gspo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cfg: GRPOConfig) -> Tensor:
    """`clipped` with one ratio a response, exp(mean of its log-ratios) (GSPO, arXiv 2507.18071, equations 5 to 7)."""
    ratio = sequence_ratio(logprobs, old_logprobs, mask)
    return surrogate(ratio, advantages, fixed_bounds(old_logprobs, cfg), cfg).expand(mask.shape)


def gspo_token(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cfg: GRPOConfig) -> Tensor:
    """`gspo`'s value and clip, each token with its own gradient: sg[s] pi / sg[pi] (arXiv 2507.18071, equation 14)."""
    ratio = sequence_ratio(logprobs, old_logprobs, mask).detach() * (logprobs - logprobs.detach()).exp()
    return surrogate(ratio, advantages, fixed_bounds(old_logprobs, cfg), cfg)


def cispo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cfg: GRPOConfig) -> Tensor:
    """sg[min(ratio, 1 + clip_high)] A log pi (MiniMax-M1, arXiv 2506.13585): clips weights, never gradients."""
    weight = ratio_of(logprobs, old_logprobs).clamp(max=1 + cfg.clip_high).detach()
    return weight * advantages * logprobs


def sapo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cfg: GRPOConfig) -> Tensor:
    """A 4/t sigmoid(t (ratio - 1)) (SAPO, arXiv 2511.20347): a soft gate, t by the sign of A."""
    positive, negative = (logprobs.new_tensor(t) for t in cfg.soft_temperature)
    t = torch.where(advantages > 0, positive, negative)
    return advantages * 4 / t * torch.sigmoid(t * (ratio_of(logprobs, old_logprobs) - 1))


def gmpo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cfg: GRPOConfig) -> Tensor:
    """A exp(mean of clipped log-ratios) (GMPO, arXiv 2507.20673): the geometric mean mutes a token far out.

    Clipped in log-space, each token on the side where the sign of A would lead it further out; 0.4 is the paper's.
    """
    log_ratio = clamped(logprobs - old_logprobs)
    low, high = log_ratio.clamp(min=-cfg.clip_low), log_ratio.clamp(max=cfg.clip_high)
    held = torch.where(advantages > 0, high, low)
    return (advantages * mean_over_response(held, mask).exp()).expand(mask.shape)


def clipped_by_row(clip_high: Tensor) -> Objective:
    """`clipped` with an upper bound of each row's own, clip_high [B, 1]."""

    def objective(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cfg: GRPOConfig) -> Tensor:
        bounds = row_bounds(clip_high, old_logprobs, cfg)
        return surrogate(ratio_of(logprobs, old_logprobs), advantages, bounds, cfg)

    return objective


def clip_by_difficulty(correct: Tensor, mean: Tensor, cfg: GRPOConfig) -> Tensor:
    """[P, G] shares of right answers -> [P, G] clip_high: wider where a group is right less often than `mean`.

    A group of which nobody knows, all NaN, is as hard as the others.
    """
    harder = (mean - correct.mean(-1, keepdim=True)).nan_to_num(0.0)
    return (cfg.clip_high * (1 + cfg.clip_difficulty * harder).clamp(0.5, 2.0)).expand(correct.shape)


OBJECTIVES = {
    "clipped": clipped,
    "unclipped": unclipped,
    "naive": naive,
    "dynamic": dynamic,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
}


# ---------------------------------------------------------------- ratios and their bounds

Bounds = tuple[Tensor, Tensor]


def surrogate(ratio: Tensor, advantages: Tensor, bounds: Bounds, cfg: GRPOConfig) -> Tensor:
    """min(A ratio, A clip(ratio)), with cfg.dual_clip at least dual_clip * A where A < 0 (arXiv 1912.09729, eq. 5)."""
    value = torch.minimum(advantages * ratio, advantages * ratio.clamp(*bounds))
    if not cfg.dual_clip:
        return value
    return torch.where(advantages < 0, torch.maximum(value, cfg.dual_clip * advantages), value)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[B, 1]: the geometric mean of the tokens' ratios."""
    return clamped(mean_over_response(logprobs - old_logprobs, mask)).exp()


def fixed_bounds(old_logprobs: Tensor, cfg: GRPOConfig) -> Bounds:
    return old_logprobs.new_tensor(1 - cfg.clip_low), old_logprobs.new_tensor(1 + cfg.clip_high)


def row_bounds(clip_high: Tensor, old_logprobs: Tensor, cfg: GRPOConfig) -> Bounds:
    return old_logprobs.new_tensor(1 - cfg.clip_low), 1 + clip_high.to(old_logprobs)


def probability_bounds(old_logprobs: Tensor, cfg: GRPOConfig) -> Bounds:
    """The solutions of |(r - 1) r| q = eps, q the old probability of the token: rare tokens may move further.

    The lower bound is 1/2 where q <= 4 clip_low, the upper is capped at clip_cap.
    """
    q = old_logprobs.exp()
    low = 0.5 + 0.5 * (1 - 4 * cfg.clip_low / q).clamp(min=0.0).sqrt()
    high = 0.5 + 0.5 * (1 + 4 * cfg.clip_high / q).sqrt()
    return low, high.clamp(max=cfg.clip_cap)


def log_bounds(old_logprobs: Tensor, cfg: GRPOConfig) -> Bounds:
    return old_logprobs.new_tensor(-cfg.clip_low).exp(), old_logprobs.new_tensor(cfg.clip_high).exp()


BOUNDS = {
    "clipped": fixed_bounds,
    "dynamic": probability_bounds,
    "gspo": fixed_bounds,
    "gspo_token": fixed_bounds,
    "cispo": fixed_bounds,
    "gmpo": log_bounds,
}
"""Lowest and highest ratio of the trust region; an objective that is not here has none."""


def clip_metrics(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: GRPOConfig,
    clip_high: Tensor | None = None,
) -> dict[str, Tensor]:
    """[B, T] each. Where the clip takes a gradient: the ratio below its bounds with A < 0, above them with A > 0.

    cispo's clip takes no gradient, it bounds the weight of one, whatever the sign of A. effect/clip: where bounds that
    move, with a token's probability or a row's clip_high [B, 1], decide otherwise than the fixed ones would.
    """
    log_ratio = logprobs - old_logprobs
    if cfg.objective in ("gspo", "gspo_token"):
        log_ratio = mean_over_response(log_ratio, mask).expand(mask.shape)
    ratio = clamped(log_ratio).exp()
    metrics = {"ratio/mean": ratio, "ratio/overflow": log_ratio.abs() > MAX_LOG_RATIO}
    if cfg.objective not in BOUNDS:
        return metrics | dict.fromkeys(("clip/low", "clip/high"), torch.zeros_like(mask))
    own = BOUNDS[cfg.objective](old_logprobs, cfg)
    low, high = own if clip_high is None else row_bounds(clip_high, old_logprobs, cfg)
    if cfg.objective == "cispo":
        return metrics | {"clip/low": torch.zeros_like(mask), "clip/high": ratio > high}
    if cfg.objective == "dynamic" or clip_high is not None:
        fixed = beyond(ratio, advantages, *fixed_bounds(old_logprobs, cfg))
        metrics["effect/clip"] = beyond(ratio, advantages, low, high) != fixed
    far_out = (ratio > cfg.dual_clip) & (advantages < 0) if cfg.dual_clip else torch.zeros_like(mask)
    return metrics | {
        "clip/low": (ratio < low) & (advantages < 0),
        "clip/high": ((ratio > high) & (advantages > 0)) | far_out,
    }


def beyond(ratio: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """[B, T]: where the clip takes the gradient."""
    return torch.where(advantages < 0, ratio < low, (ratio > high) & (advantages > 0))


# ---------------------------------------------------------------- aggregation: the weight of each token, [B, T]


def by_token(mask: Tensor, rows: Tensor, tokens: Tensor, cfg: GRPOConfig) -> Tensor:
    """Every token of the minibatch weighs the same (DAPO, arXiv 2503.14476, equation 8)."""
    return mask / tokens


def by_sequence(mask: Tensor, rows: Tensor, tokens: Tensor, cfg: GRPOConfig) -> Tensor:
    """Every response weighs the same, its tokens share that (DeepSeekMath): short ones speak louder per token."""
    return mask / mask.sum(-1, keepdim=True).clamp(min=1) / rows


def by_constant(mask: Tensor, rows: Tensor, tokens: Tensor, cfg: GRPOConfig) -> Tensor:
    """Every token weighs 1 / (B L), L a constant, whatever the lengths (Dr. GRPO): no length bias."""
    return mask / (rows * cfg.divisor)


AGGREGATES = {"token": by_token, "sequence": by_sequence, "constant": by_constant}

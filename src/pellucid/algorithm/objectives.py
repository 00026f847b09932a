"""Objectives: what is maximized for each response token, where it is clipped, and how tokens add up to a loss.

An objective is one function, `objective(tokens, cfg) -> ObjectiveOutput`. Its output contains the value, the log-ratio
from which it is computed, and the tokens whose gradient is removed by clipping. Values outside the mask are ignored. An
objective with one ratio per response returns the same value for each of its tokens; with aggregate = "sequence" every
response then counts once. `algorithm.objective = "file.py:function"` selects a user-defined objective, which may return
only the value.

Shapes: B responses, T tokens. Notation: A is the advantage of a token, ratio = pi / pi_old, sg stops the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.algorithm.settings import GRPOConfig
from pellucid.utils.plugins import load_function

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this absolute value before they are exponentiated, to avoid overflow."""


class ObjectiveInputs(NamedTuple):
    """The inputs of an objective."""

    logprobs: Tensor
    """[B, T] under the policy, with gradient, in nats."""
    old_logprobs: Tensor
    """[B, T] under the policy at the start of the update."""
    advantages: Tensor
    """[B, T]"""
    mask: Tensor
    """[B, T] bool: tokens that the policy sampled."""
    clip_high: Tensor | None = None
    """[B, 1] clip_high of each row, if it depends on the difficulty of the prompt."""
    clip_low: Tensor | None = None
    """[B, 1] clip_low of each row, if it depends on the difficulty of the prompt."""


_RatioBounds = tuple[Tensor, Tensor]
"""The lowest and the highest ratio of a trust region, each [] or [B, T]."""


class ObjectiveOutput(NamedTuple):
    """The output of an objective. Each field is [B, T], or [B, 1] if there is one value for each response."""

    value: Tensor
    """The value that is maximized, with gradient."""
    log_ratio: Tensor
    """log(pi / pi_old) of the token or of its response, whichever the objective uses."""
    clipped_low: Tensor | None = None
    """bool: the gradient is 0 because the ratio is too low. None where the objective does not clip."""
    clipped_high: Tensor | None = None
    """bool: the gradient is 0 because the ratio is too high."""
    clip_changed: Tensor | None = None
    """bool: the bounds 1 - clip_low and 1 + clip_high would clip the token and `bounds` do not, or the reverse."""
    bounds: _RatioBounds | None = None
    """The bounds with which `clipped_low` and `clipped_high` compare the ratio."""


_ObjectiveFunction = Callable[[ObjectiveInputs, GRPOConfig], ObjectiveOutput]


# ---------------------------------------------------------------- objectives


def ppo_clip(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """min(A ratio, A clip(ratio, 1 - clip_low, 1 + clip_high)) (PPO, arXiv 1707.06347, equation 7).

    There is no gain beyond the trust region. Separate bounds are from DAPO, arXiv 2503.14476, section 3.1. Rows with
    their own clip_low or clip_high use it instead.
    """
    fixed, log_ratio = compute_fixed_bounds(tokens, cfg), compute_log_ratio(tokens)
    if tokens.clip_low is None and tokens.clip_high is None:
        return compute_clipped_surrogate(tokens, log_ratio, fixed, cfg)
    low = fixed[0] if tokens.clip_low is None else 1 - tokens.clip_low.to(tokens.old_logprobs)
    high = fixed[1] if tokens.clip_high is None else 1 + tokens.clip_high.to(tokens.old_logprobs)
    return compute_clipped_surrogate(tokens, log_ratio, (low, high), cfg, fixed)


def importance_weighted(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """A ratio, without a trust region (PPO, arXiv 1707.06347, equation 6)."""
    log_ratio = compute_log_ratio(tokens)
    return ObjectiveOutput(tokens.advantages * clamp_log_ratio(log_ratio).exp(), log_ratio)


def reinforce(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """A log pi (REINFORCE, R. J. Williams, 1992).

    It has no ratio, so it is for one optimizer step on each set of rollouts.
    """
    return ObjectiveOutput(tokens.advantages * tokens.logprobs, compute_log_ratio(tokens))


def dcpo(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """`ppo_clip` with the bounds of `compute_probability_bounds`, wider for rare tokens (DCPO, arXiv 2509.02333)."""
    clip_low = cfg.clip_low if tokens.clip_low is None else tokens.clip_low
    clip_high = cfg.clip_high if tokens.clip_high is None else tokens.clip_high
    bounds = compute_probability_bounds(tokens.old_logprobs, clip_low, clip_high, cfg.clip_cap)
    return compute_clipped_surrogate(tokens, compute_log_ratio(tokens), bounds, cfg, compute_fixed_bounds(tokens, cfg))


def gspo(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """`ppo_clip` with one ratio per response, exp(mean log-ratio of its tokens) (GSPO, arXiv 2507.18071, equation 5).

    All tokens of a response have the same value; the ratio is [B, 1].
    """
    log_ratio = average_over_response(compute_log_ratio(tokens), tokens.mask)
    bounds = compute_fixed_bounds(tokens, cfg)
    return compute_clipped_surrogate(average_response_advantages(tokens), log_ratio, bounds, cfg)


def gspo_token(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """`gspo` in value and clip, with a gradient per token (GSPO, arXiv 2507.18071, equation 14).

    The ratio is sg[ratio of the response] pi / sg[pi].
    """
    output = gspo(tokens, cfg)
    ratio = clamp_log_ratio(output.log_ratio).exp().detach() * (tokens.logprobs - tokens.logprobs.detach()).exp()
    value = compute_clipped_value(ratio, tokens.advantages, compute_fixed_bounds(tokens, cfg), cfg)
    return output._replace(value=value)


def cispo(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """sg[min(ratio, 1 + clip_high)] A log pi: clips a weight, never a gradient (CISPO, arXiv 2506.13585).

    `clipped_high` marks weights that were clipped, for either sign of A.
    """
    log_ratio, (_, high) = compute_log_ratio(tokens), compute_fixed_bounds(tokens, cfg)
    ratio = clamp_log_ratio(log_ratio).exp()
    weight = ratio.clamp(max=1 + cfg.clip_high).detach()
    return ObjectiveOutput(weight * tokens.advantages * tokens.logprobs, log_ratio, clipped_high=ratio > high)


def sapo(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """A (4 / t) sigmoid(t (ratio - 1)): a soft gate (SAPO, arXiv 2511.20347).

    The temperature t = cfg.soft_temperature depends on the sign of A.
    """
    positive, negative = (tokens.logprobs.new_full((), t) for t in cfg.soft_temperature)
    t, log_ratio = torch.where(tokens.advantages > 0, positive, negative), compute_log_ratio(tokens)
    gate = torch.sigmoid(t * (clamp_log_ratio(log_ratio).exp() - 1))
    return ObjectiveOutput(tokens.advantages * 4 / t * gate, log_ratio)


def gmpo(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """A exp(mean of clipped log-ratios): in a geometric mean, outlier tokens count less (GMPO, arXiv 2507.20673).

    A log-ratio is clipped to at most clip_high where A > 0, and to at least -clip_low elsewhere. The paper sets both to
    0.4. All tokens of a response have the same value, but their own ratios.
    """
    log_ratio, advantages = compute_log_ratio(tokens), average_response_advantages(tokens).advantages
    low, high = clamp_log_ratio(log_ratio).clamp(min=-cfg.clip_low), clamp_log_ratio(log_ratio).clamp(max=cfg.clip_high)
    clipped = torch.where(advantages > 0, high, low)
    value = (advantages * average_over_response(clipped, tokens.mask).exp()).expand(tokens.mask.shape)
    bounds = log_ratio.new_full((), -cfg.clip_low).exp(), log_ratio.new_full((), cfg.clip_high).exp()
    clips = find_clipped_tokens(clamp_log_ratio(log_ratio).exp(), advantages, bounds)
    return ObjectiveOutput(value, log_ratio, *clips, bounds=bounds)


OBJECTIVES: dict[str, _ObjectiveFunction] = {
    "ppo_clip": ppo_clip,
    "importance_weighted": importance_weighted,
    "reinforce": reinforce,
    "dcpo": dcpo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
}


def get_objective_function(name: str) -> _ObjectiveFunction:
    """Return a function of OBJECTIVES or of "file.py:function". Raises UserError if there is none."""
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    function: Callable[[ObjectiveInputs, GRPOConfig], ObjectiveOutput | Tensor] = load_function(name, "objective")

    def objective(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
        output = function(tokens, cfg)
        return output if isinstance(output, ObjectiveOutput) else ObjectiveOutput(output, compute_log_ratio(tokens))

    return objective


# ---------------------------------------------------------------- ratios and their bounds


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp a log-ratio to [-MAX_LOG_RATIO, MAX_LOG_RATIO]."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def compute_log_ratio(tokens: ObjectiveInputs) -> Tensor:
    """log(pi / pi_old). [B, T]"""
    return tokens.logprobs - tokens.old_logprobs


def compute_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """pi / pi_old. [B, T]"""
    return clamp_log_ratio(logprobs - old_logprobs).exp()


def average_over_response(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x [B, T] over the tokens of each response. [B, 1]"""
    return (x * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def average_response_advantages(tokens: ObjectiveInputs) -> ObjectiveInputs:
    """Replace the advantages of the tokens of a response by their mean, [B, 1].

    The mean is computed from differences to the first one, so the mean of equal advantages is bitwise equal to them.
    """
    advantages = tokens.advantages.expand(tokens.mask.shape)
    first = advantages.gather(-1, tokens.mask.byte().argmax(-1, keepdim=True))
    return tokens._replace(advantages=first + average_over_response(advantages - first, tokens.mask))


def compute_clipped_surrogate(
    tokens: ObjectiveInputs, log_ratio: Tensor, bounds: _RatioBounds, cfg: GRPOConfig, fixed: _RatioBounds | None = None
) -> ObjectiveOutput:
    """PPO's clipped surrogate with a log-ratio [B, T], or [B, 1] for one ratio per response, clipped to `bounds`.

    `fixed` are the bounds that `bounds` replaces, for the metric `effect/clip`.
    """
    ratio, advantages = clamp_log_ratio(log_ratio).exp(), tokens.advantages
    value = compute_clipped_value(ratio, advantages, bounds, cfg).expand(tokens.mask.shape)
    low, high = find_clipped_tokens(ratio.detach(), advantages, bounds)
    changed = None
    if fixed is not None:
        fixed_low, fixed_high = find_clipped_tokens(ratio.detach(), advantages, fixed)
        changed = (low | high) != (fixed_low | fixed_high)
    if cfg.dual_clip:
        high = high | ((ratio.detach() > cfg.dual_clip) & (advantages < 0))
    return ObjectiveOutput(value, log_ratio, low, high, changed, bounds)


def compute_clipped_value(ratio: Tensor, advantages: Tensor, bounds: _RatioBounds, cfg: GRPOConfig) -> Tensor:
    """min(A ratio, A clip(ratio)); with cfg.dual_clip at least dual_clip A where A < 0 (arXiv 1912.09729, eq. 5)."""
    value = torch.minimum(advantages * ratio, advantages * ratio.clamp(*bounds))
    if not cfg.dual_clip:
        return value
    return torch.where(advantages < 0, torch.maximum(value, cfg.dual_clip * advantages), value)


def find_clipped_tokens(ratio: Tensor, advantages: Tensor, bounds: _RatioBounds) -> tuple[Tensor, Tensor]:
    """Find the tokens without gradient: the ratio is below the bounds and A < 0, or above the bounds and A > 0."""
    low, high = bounds
    return (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)


def compute_fixed_bounds(tokens: ObjectiveInputs, cfg: GRPOConfig) -> _RatioBounds:
    """1 - clip_low and 1 + clip_high."""
    return tokens.old_logprobs.new_full((), 1 - cfg.clip_low), tokens.old_logprobs.new_full((), 1 + cfg.clip_high)


def compute_probability_bounds(
    old_logprobs: Tensor, clip_low: Tensor | float, clip_high: Tensor | float, clip_cap: float
) -> _RatioBounds:
    """Compute the bounds r [B, T] with |(r - 1) r| q = clip, where q is the old probability (DCPO, arXiv 2509.02333).

    Rare tokens have wider bounds. The lower one is 1/2 where q <= 4 clip_low; the upper one is at most clip_cap.
    """
    q = old_logprobs.exp()
    low = 0.5 + 0.5 * (1 - 4 * clip_low / q).clamp(min=0.0).sqrt()
    high = 0.5 + 0.5 * (1 + 4 * clip_high / q).sqrt()
    return low, high.clamp(max=clip_cap)


def compute_clip_ranges_by_difficulty(correct: Tensor, mean: Tensor, cfg: GRPOConfig) -> dict[str, Tensor]:
    """Compute clip_high and clip_low of each row, [P, G], where clip_difficulty and clip_difficulty_low are set.

    Each is multiplied by clip(1 + strength (mean - share of right answers in the group), 0.5, 2). `correct` [P, G] is 1
    where an answer is right, and `mean` is its mean over the step. A group of NaN has average difficulty.
    """
    hardness = (mean - correct.mean(-1, keepdim=True)).nan_to_num(0.0)
    strengths = {
        "clip_high": (cfg.clip_high, cfg.clip_difficulty),
        "clip_low": (cfg.clip_low, cfg.clip_difficulty_low),
    }
    return {
        name: (clip * (1 + strength * hardness).clamp(0.5, 2.0)).expand(correct.shape)
        for name, (clip, strength) in strengths.items()
        if strength
    }


def compute_clip_metrics(output: ObjectiveOutput, mask: Tensor) -> dict[str, Tensor]:
    """Compute the metrics of clipping: the ratio, clamped exponents, and clipped tokens. [B, T] each

    `effect/clip` marks the tokens for which their own bounds and the fixed bounds lead to different decisions.
    """
    log_ratio = output.log_ratio.detach()
    unclipped = torch.zeros_like(mask)
    metrics = {
        "ratio/mean": clamp_log_ratio(log_ratio).exp(),
        "ratio/overflow": log_ratio.abs() > MAX_LOG_RATIO,
        "clip/low": unclipped if output.clipped_low is None else output.clipped_low,
        "clip/high": unclipped if output.clipped_high is None else output.clipped_high,
    }
    metrics |= {} if output.clip_changed is None else {"effect/clip": output.clip_changed}
    return {name: x.expand(mask.shape) for name, x in metrics.items()}


# ---------------------------------------------------------------- aggregation: the weight of each token
# Each function returns weights [B, T]. Its counts are over the minibatches of all processes:
#   mask: [B, T] bool, the tokens that are trained on.
#   rollouts: [], the number of rollouts with such a token.
#   tokens: [], the number of such tokens.
#   lengths: [B, 1], the trained tokens in the rollout of each row. A rollout has several rows where an agent rewrote
#       its history. None means that each row is a rollout.


def weigh_by_token(
    mask: Tensor, rollouts: Tensor, tokens: Tensor, cfg: GRPOConfig, lengths: Tensor | None = None
) -> Tensor:
    """1 / tokens: every token of the minibatch weighs the same, together 1 (DAPO, arXiv 2503.14476, equation 8).

    The weight of a rollout is proportional to its length.
    """
    return mask / tokens


def weigh_by_sequence(
    mask: Tensor, rollouts: Tensor, tokens: Tensor, cfg: GRPOConfig, lengths: Tensor | None = None
) -> Tensor:
    """1 / (rollouts * length): every rollout weighs the same, together 1 (DeepSeekMath, arXiv 2402.03300, equation 3).

    So a token of a short rollout weighs more. All sequences of a rollout share its weight.
    """
    lengths = mask.sum(-1, keepdim=True) if lengths is None else lengths
    return mask / lengths.clamp(min=1) / rollouts


def weigh_by_constant(
    mask: Tensor, rollouts: Tensor, tokens: Tensor, cfg: GRPOConfig, lengths: Tensor | None = None
) -> Tensor:
    """1 / (rollouts * L), where L is the constant cfg.constant_divisor: no bias by length (Dr. GRPO, arXiv 2503.20783).

    The weights add up to mean length / L.
    """
    return mask / (rollouts * cfg.constant_divisor)


AGGREGATES = {"token": weigh_by_token, "sequence": weigh_by_sequence, "constant": weigh_by_constant}

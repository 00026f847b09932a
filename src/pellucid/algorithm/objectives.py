"""Objectives: what is maximised for each response token, and where its clip acts; and how tokens add up.

An objective is one function, `objective(tokens, cfg) -> Outcome`, that says all there is to say of it: the value, the
ratio that it is made of, and the tokens whose gradient its clip takes. What it says off the mask is not read. One whose
ratio belongs to the whole response gives its value to each token: with aggregate = "sequence" every response then
counts once. `algorithm.objective = "file.py:function"` is one of the user's own; it may return the value alone.

Shapes: B responses, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.algorithm.settings import GRPOConfig
from pellucid.utils.plugins import load_function

MAX_LOG_RATIO = 20.0
"""exp() of a larger log-ratio says nothing but overflow."""


class ObjectiveInputs(NamedTuple):
    """What an objective is made from."""

    logprobs: Tensor
    """[B, T] under the policy, with gradient; nats."""
    old_logprobs: Tensor
    """[B, T] under the policy that the rollouts came from."""
    advantages: Tensor
    """[B, T]"""
    mask: Tensor
    """[B, T] bool: tokens that the policy sampled."""
    clip_high: Tensor | None = None
    """[B, 1] of each row, where the difficulty of its prompt sets it."""


RatioBounds = tuple[Tensor, Tensor]
"""The lowest and the highest ratio of a trust region."""


class ObjectiveOutput(NamedTuple):
    """What an objective comes to, [B, T] each, or [B, 1] where that is the same for a whole response."""

    value: Tensor
    """What is maximised, with gradient."""
    log_ratio: Tensor
    """log(pi / pi_old), of the token or of the response, whichever the objective goes by."""
    clipped_low: Tensor | None = None
    """bool: the gradient is gone because the ratio is too low; None where nothing is clipped."""
    clipped_high: Tensor | None = None
    """bool: ... because it is too high."""
    clip_changed: Tensor | None = None
    """bool: bounds that are not the fixed ones decided otherwise than those would have."""
    bounds: RatioBounds | None = None
    """What `below` and `above` compare the ratio with."""


ObjectiveFunction = Callable[[ObjectiveInputs, GRPOConfig], ObjectiveOutput]


# ---------------------------------------------------------------- objectives


def ppo_clip(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """min(A ratio, A clip(ratio)) (PPO, arXiv 1707.06347, equation 7): no gain beyond the trust region.

    Where the rows have upper bounds of their own, those.
    """
    fixed, log_ratio = compute_fixed_bounds(tokens, cfg), compute_log_ratio(tokens)
    if tokens.clip_high is None:
        return compute_clipped_surrogate(tokens, log_ratio, fixed, cfg)
    own = fixed[0], 1 + tokens.clip_high.to(tokens.old_logprobs)
    return compute_clipped_surrogate(tokens, log_ratio, own, cfg, fixed)


def importance_weighted(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """A pi / pi_old: no trust region."""
    log_ratio = compute_log_ratio(tokens)
    return ObjectiveOutput(tokens.advantages * clamp_log_ratio(log_ratio).exp(), log_ratio)


def reinforce(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """A log pi: REINFORCE with the group as baseline."""
    return ObjectiveOutput(tokens.advantages * tokens.logprobs, compute_log_ratio(tokens))


def dcpo(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """`ppo_clip` between bounds that the old probability of a token sets (DCPO, arXiv 2509.02333)."""
    bounds = compute_probability_bounds(tokens.old_logprobs, cfg)
    return compute_clipped_surrogate(tokens, compute_log_ratio(tokens), bounds, cfg, compute_fixed_bounds(tokens, cfg))


def gspo(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """`ppo_clip` with one ratio a response, exp(mean of its log-ratios) (GSPO, arXiv 2507.18071, equations 5 to 7)."""
    mean = average_over_response(compute_log_ratio(tokens), tokens.mask)
    return compute_clipped_surrogate(average_response_advantages(tokens), mean, compute_fixed_bounds(tokens, cfg), cfg)


def gspo_token(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """`gspo`'s value and clip, each token with its own gradient: sg[s] pi / sg[pi] (arXiv 2507.18071, equation 14)."""
    of_response = gspo(tokens, cfg)
    ratio = clamp_log_ratio(of_response.log_ratio).exp().detach() * (tokens.logprobs - tokens.logprobs.detach()).exp()
    return of_response._replace(
        value=compute_clipped_value(ratio, tokens.advantages, compute_fixed_bounds(tokens, cfg), cfg)
    )


def cispo(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """sg[min(ratio, 1 + clip_high)] A log pi (MiniMax-M1, arXiv 2506.13585): clips weights, never gradients.

    `above` is where a weight was held, whatever the sign of A.
    """
    log_ratio, (_, high) = compute_log_ratio(tokens), compute_fixed_bounds(tokens, cfg)
    ratio = clamp_log_ratio(log_ratio).exp()
    weight = ratio.clamp(max=1 + cfg.clip_high).detach()
    return ObjectiveOutput(weight * tokens.advantages * tokens.logprobs, log_ratio, clipped_high=ratio > high)


def sapo(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """A 4/t sigmoid(t (ratio - 1)) (SAPO, arXiv 2511.20347): a soft gate, t by the sign of A."""
    positive, negative = (tokens.logprobs.new_tensor(t) for t in cfg.soft_temperature)
    t, log_ratio = torch.where(tokens.advantages > 0, positive, negative), compute_log_ratio(tokens)
    return ObjectiveOutput(
        tokens.advantages * 4 / t * torch.sigmoid(t * (clamp_log_ratio(log_ratio).exp() - 1)), log_ratio
    )


def gmpo(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
    """A exp(mean of clipped log-ratios) (GMPO, arXiv 2507.20673): the geometric mean mutes a token far out.

    Clipped in log-space, each token on the side where the sign of A would lead it further out; 0.4 is the paper's.
    """
    log_ratio, advantages = compute_log_ratio(tokens), average_response_advantages(tokens).advantages
    low, high = clamp_log_ratio(log_ratio).clamp(min=-cfg.clip_low), clamp_log_ratio(log_ratio).clamp(max=cfg.clip_high)
    held = torch.where(advantages > 0, high, low)
    value = (advantages * average_over_response(held, tokens.mask).exp()).expand(tokens.mask.shape)
    bounds = log_ratio.new_tensor(-cfg.clip_low).exp(), log_ratio.new_tensor(cfg.clip_high).exp()
    return ObjectiveOutput(
        value, log_ratio, *find_clipped_tokens(clamp_log_ratio(log_ratio).exp(), advantages, bounds), bounds=bounds
    )


OBJECTIVES: dict[str, ObjectiveFunction] = {
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


def get_objective_function(name: str) -> ObjectiveFunction:
    """One of OBJECTIVES, or the user's own; UserError where `file.py:function` leads to none."""
    return OBJECTIVES[name] if name in OBJECTIVES else wrap_custom_objective(load_function(name, "objective"))


def wrap_custom_objective(
    function: Callable[[ObjectiveInputs, GRPOConfig], ObjectiveOutput | Tensor],
) -> ObjectiveFunction:
    """An objective whose function may return its value alone."""

    def objective(tokens: ObjectiveInputs, cfg: GRPOConfig) -> ObjectiveOutput:
        found = function(tokens, cfg)
        return found if isinstance(found, ObjectiveOutput) else ObjectiveOutput(found, compute_log_ratio(tokens))

    return objective


# ---------------------------------------------------------------- ratios, and the bounds that they are clipped to


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """To where its exponential is finite in every dtype."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def compute_log_ratio(tokens: ObjectiveInputs) -> Tensor:
    """log(pi / pi_old), [B, T]."""
    return tokens.logprobs - tokens.old_logprobs


def compute_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """pi / pi_old, [B, T]."""
    return clamp_log_ratio(logprobs - old_logprobs).exp()


def average_over_response(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B, 1]: the mean over the tokens of each response."""
    return (x * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def average_response_advantages(tokens: ObjectiveInputs) -> ObjectiveInputs:
    """With one advantage a response, [B, 1]: their mean, by way of what they are from the first, so that equal ones are
    their mean to the bit.
    """
    advantages = tokens.advantages.expand(tokens.mask.shape)
    first = advantages.gather(-1, tokens.mask.byte().argmax(-1, keepdim=True))
    return tokens._replace(advantages=first + average_over_response(advantages - first, tokens.mask))


def compute_clipped_surrogate(
    tokens: ObjectiveInputs, log_ratio: Tensor, bounds: RatioBounds, cfg: GRPOConfig, fixed: RatioBounds | None = None
) -> ObjectiveOutput:
    """PPO's clipped surrogate for a log-ratio [B, T] or [B, 1]; `fixed` are the bounds that `bounds` stand for."""
    ratio, advantages = clamp_log_ratio(log_ratio).exp(), tokens.advantages
    value = compute_clipped_value(ratio, advantages, bounds, cfg).expand(tokens.mask.shape)
    below, above = find_clipped_tokens(ratio.detach(), advantages, bounds)
    moved = None
    if fixed is not None:
        fixed_below, fixed_above = find_clipped_tokens(ratio.detach(), advantages, fixed)
        moved = (below | above) != (fixed_below | fixed_above)
    if cfg.dual_clip:
        above = above | ((ratio.detach() > cfg.dual_clip) & (advantages < 0))
    return ObjectiveOutput(value, log_ratio, below, above, moved, bounds)


def compute_clipped_value(ratio: Tensor, advantages: Tensor, bounds: RatioBounds, cfg: GRPOConfig) -> Tensor:
    """min(A ratio, A clip(ratio)), with cfg.dual_clip at least dual_clip * A where A < 0 (arXiv 1912.09729, eq. 5)."""
    value = torch.minimum(advantages * ratio, advantages * ratio.clamp(*bounds))
    if not cfg.dual_clip:
        return value
    return torch.where(advantages < 0, torch.maximum(value, cfg.dual_clip * advantages), value)


def find_clipped_tokens(ratio: Tensor, advantages: Tensor, bounds: RatioBounds) -> tuple[Tensor, Tensor]:
    """Where the clip takes the gradient: ratio below the bounds and A < 0; ratio above them and A > 0."""
    low, high = bounds
    return (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)


def compute_fixed_bounds(tokens: ObjectiveInputs, cfg: GRPOConfig) -> RatioBounds:
    """1 - clip_low and 1 + clip_high."""
    return tokens.old_logprobs.new_tensor(1 - cfg.clip_low), tokens.old_logprobs.new_tensor(1 + cfg.clip_high)


def compute_probability_bounds(old_logprobs: Tensor, cfg: GRPOConfig) -> RatioBounds:
    """The solutions of |(r - 1) r| q = eps, q the old probability of the token: rare tokens may move further.

    The lower bound is 1/2 where q <= 4 clip_low, the upper is capped at clip_cap.
    """
    q = old_logprobs.exp()
    low = 0.5 + 0.5 * (1 - 4 * cfg.clip_low / q).clamp(min=0.0).sqrt()
    high = 0.5 + 0.5 * (1 + 4 * cfg.clip_high / q).sqrt()
    return low, high.clamp(max=cfg.clip_cap)


def compute_clip_high_by_difficulty(correct: Tensor, mean: Tensor, cfg: GRPOConfig) -> Tensor:
    """[P, G] shares of right answers -> [P, G] clip_high: wider where a group is right less often than `mean`.

    A group of which nobody knows, all NaN, is as hard as the others.
    """
    harder = (mean - correct.mean(-1, keepdim=True)).nan_to_num(0.0)
    return (cfg.clip_high * (1 + cfg.clip_difficulty * harder).clamp(0.5, 2.0)).expand(correct.shape)


def compute_clip_metrics(outcome: ObjectiveOutput, mask: Tensor) -> dict[str, Tensor]:
    """[B, T] each: the ratio, where its exponent had to be clamped, and where the clip acts.

    effect/clip: where bounds that move with a token or a row decide otherwise than the fixed ones would.
    """
    log_ratio = outcome.log_ratio.detach()
    none = torch.zeros_like(mask)
    metrics = {
        "ratio/mean": clamp_log_ratio(log_ratio).exp(),
        "ratio/overflow": log_ratio.abs() > MAX_LOG_RATIO,
        "clip/low": none if outcome.clipped_low is None else outcome.clipped_low,
        "clip/high": none if outcome.clipped_high is None else outcome.clipped_high,
    }
    metrics |= {} if outcome.clip_changed is None else {"effect/clip": outcome.clip_changed}
    return {name: x.expand(mask.shape) for name, x in metrics.items()}


# ---------------------------------------------------------------- aggregation: the weight of each token, [B, T]
#
# Arguments of an aggregate, counted over the minibatches of all processes:
#   mask: [B, T] bool, the tokens that are trained.
#   rollouts: [] how many rollouts have such a token. tokens: [] how many such tokens there are.
#   lengths: [B, 1] the trained tokens of the rollout that each row belongs to. A rollout is one row unless an agent
#       rewrote its history: then it has a row per sequence. None means that each row is a rollout.


def weigh_by_token(
    mask: Tensor, rollouts: Tensor, tokens: Tensor, cfg: GRPOConfig, lengths: Tensor | None = None
) -> Tensor:
    """Every token of the minibatch weighs the same (DAPO, arXiv 2503.14476, equation 8).

    A rollout weighs as much as it has tokens, in however many sequences.
    """
    return mask / tokens


def weigh_by_sequence(
    mask: Tensor, rollouts: Tensor, tokens: Tensor, cfg: GRPOConfig, lengths: Tensor | None = None
) -> Tensor:
    """Every rollout weighs the same, and its tokens share that (DeepSeekMath): short ones speak louder per token.

    The tokens of all sequences of a rollout share one weight.
    """
    lengths = mask.sum(-1, keepdim=True) if lengths is None else lengths
    return mask / lengths.clamp(min=1) / rollouts


def weigh_by_constant(
    mask: Tensor, rollouts: Tensor, tokens: Tensor, cfg: GRPOConfig, lengths: Tensor | None = None
) -> Tensor:
    """Every token weighs 1 / (N L), N rollouts and L a constant, whatever the lengths (Dr. GRPO): no length bias."""
    return mask / (rollouts * cfg.constant_divisor)


AGGREGATES = {"token": weigh_by_token, "sequence": weigh_by_sequence, "constant": weigh_by_constant}

"""What the loss does to each token, and which rule took its policy gradient: for those who look, never for training.

All comes from the loss itself, by autograd with respect to what the policy says of a token, and from the functions that
it is made of. It draws no random numbers and leaves no trace: a run that is looked at takes the same steps to the bit.

Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.algorithm import shaping
from pellucid.algorithm.batch import Batch
from pellucid.algorithm.grpo import Scores, compute_loss
from pellucid.algorithm.objectives import ObjectiveInputs, ObjectiveOutput, clamp_log_ratio, get_objective_function
from pellucid.algorithm.settings import GRPOConfig

GRADIENT_RULES = (
    "",
    "given",
    "all_failed",
    "zero_variance",
    "no_advantage",
    "overlong_filter",
    "entropy_share",
    "clip_low",
    "clip_high",
    "dual_clip",
    "correction",
    "other",
)
"""Who took the policy gradient of a token; "" is nobody. Whether an advantage of 0 is that of a group whose rewards are
all equal, zero_variance, or have all failed, all_failed, is not known here: it is called no_advantage."""


class LossExplanation(NamedTuple):
    """[B, T] each. What is off the sampled tokens is not to be read, but for the rule."""

    ratio: Tensor
    """The ratio that the objective goes by, of the token or of its response."""
    importance: Tensor
    """The weight that makes up for the sampler's arithmetic."""
    logprob_grad: Tensor
    """d loss / d log-prob. Its negative is how much the loss pushes the token up."""
    entropy_grad: Tensor
    """d loss / d entropy."""
    kl_grad: Tensor
    """d loss / d exact KL."""
    rule: Tensor
    """int: the place in RULES of who took the policy gradient."""
    bound: Tensor
    """What the ratio was compared with, where the rule is clip_low or clip_high; NaN elsewhere."""


def explain_loss(scores: Scores, batch: Batch, cfg: GRPOConfig) -> LossExplanation:
    """Explain the loss of a micro-batch with advantages and weights, from the scores that its loss is made of."""
    assert batch.advantages is not None
    logprobs = scores.logprobs.detach()
    old_logprobs = logprobs if batch.old_logprobs is None else batch.old_logprobs
    clip_high = None if batch.clip_high is None else batch.clip_high[:, None]
    tokens = ObjectiveInputs(logprobs, old_logprobs, batch.advantages.to(logprobs), batch.action_mask, clip_high)
    with torch.no_grad(), preserve_random_state(logprobs):
        outcome = get_objective_function(cfg.objective)(tokens, cfg)
    importance = shaping.compute_importance_weights(old_logprobs, batch.sampler_logprobs, batch.action_mask, cfg)
    of_policy = compute_score_gradients(scores, replace(batch, likelihood_weights=None), remove_penalties(cfg))[0]
    rule = find_gradient_rules(outcome, importance, of_policy, batch, cfg)
    return LossExplanation(
        clamp_log_ratio(outcome.log_ratio).exp().expand_as(logprobs),
        importance,
        *compute_score_gradients(scores, batch, cfg),
        rule,
        select_clip_bounds(outcome, rule),
    )


def compute_score_gradients(scores: Scores, batch: Batch, cfg: GRPOConfig) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T] gradients of the loss with respect to log-probs, entropies and exact KL; 0 for what it does not read."""
    leaves = [x.detach().requires_grad_() for x in scores if x is not None]
    with torch.enable_grad(), preserve_random_state(scores.logprobs):
        loss, _ = compute_loss(Scores(*leaves), batch, cfg)
    of_logprob, of_entropy, *of_kl = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return of_logprob, of_entropy, of_kl[0] if of_kl else torch.zeros_like(of_logprob)


def remove_penalties(cfg: GRPOConfig) -> GRPOConfig:
    """The settings of a loss that is the objective alone."""
    return replace(cfg, kl_coef=0.0, kl_target=0.0, reference_every=0, reference_decay=0.0, entropy_coef=0.0)


def preserve_random_state(x: Tensor) -> AbstractContextManager[None]:
    """In here random numbers, which an objective of the user's own may draw, are those of the loss that is to come."""
    return torch.random.fork_rng([x.device] if x.is_cuda else [])


def find_gradient_rules(
    outcome: ObjectiveOutput, importance: Tensor, policy_grad: Tensor, batch: Batch, cfg: GRPOConfig
) -> Tensor:
    """[B, T] int: who took the gradient of_policy, the first that could have where there are several."""
    assert batch.advantages is not None and batch.token_weights is not None
    nowhere = torch.zeros_like(batch.action_mask)
    below, above = (nowhere if x is None else x for x in (outcome.clipped_low, outcome.clipped_high))
    dual = above & (batch.advantages < 0) if cfg.dual_clip else nowhere
    could = {
        "given": ~batch.action_mask,
        "overlong_filter": batch.token_weights == 0,
        "no_advantage": batch.advantages == 0,
        "entropy_share": nowhere if batch.loss_mask is None else ~batch.loss_mask,
        "correction": importance == 0,
        "clip_low": below,
        "dual_clip": dual,
        "clip_high": above,
        "other": ~nowhere,
    }
    rule = torch.zeros_like(batch.response_ids)
    for name, where in reversed(could.items()):
        rule = torch.where(where, GRADIENT_RULES.index(name), rule)
    return torch.where((policy_grad == 0) | ~batch.action_mask, rule, GRADIENT_RULES.index(""))


def select_clip_bounds(outcome: ObjectiveOutput, rule: Tensor) -> Tensor:
    """[B, T]: the bound of each token that the clip took, NaN elsewhere."""
    bound = torch.full(rule.shape, torch.nan, dtype=outcome.log_ratio.dtype, device=rule.device)
    if outcome.bounds is None:
        return bound
    for name, of_side in zip(("clip_low", "clip_high"), outcome.bounds, strict=True):
        bound = torch.where(rule == GRADIENT_RULES.index(name), of_side, bound)
    return bound

"""The effect of the loss on each token, and which rule removed its policy gradient. Training itself does not use this.

All values are computed from the loss itself, by autograd with respect to the scores of a token, and from the functions
that the loss calls. The random state is not changed, so recording a run does not change a single bit of its steps.

Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.algorithm.batch import Batch
from pellucid.algorithm.grpo import compute_loss, make_objective_inputs
from pellucid.algorithm.objectives import ObjectiveOutput, clamp_log_ratio, get_objective_function
from pellucid.algorithm.protocols import Scores
from pellucid.algorithm.settings import GRPOConfig
from pellucid.algorithm.shaping import compute_importance_weights

GRADIENT_RULES = (
    *("", "given", "all_failed", "zero_variance", "no_advantage", "overlong_filter", "entropy_share"),
    *("clip_low", "clip_high", "dual_clip", "correction", "other"),
)
"""The rules that remove the policy gradient of a token; "" means that none did. This file reports an advantage of 0 as
no_advantage. The caller replaces that with zero_variance if the rewards of the group were all equal, or with
all_failed if they all failed."""


class LossExplanation(NamedTuple):
    """The effect of the loss on each token, all [B, T]. For tokens that were not sampled, only `rule` is meaningful."""

    ratio: Tensor
    """The ratio that the objective uses, of the token or of its response."""
    importance: Tensor
    """The importance weight, which corrects for the sampler."""
    logprob_grad: Tensor
    """d loss / d log-prob. Its negative is how much the loss pushes the token up."""
    entropy_grad: Tensor
    """d loss / d entropy."""
    kl_grad: Tensor
    """d loss / d exact KL."""
    rule: Tensor
    """int: the index in GRADIENT_RULES of the rule that removed the policy gradient."""
    bound: Tensor
    """The bound with which the ratio was compared if the rule is clip_low or clip_high; NaN elsewhere."""


def explain_loss(scores: Scores, batch: Batch, cfg: GRPOConfig) -> LossExplanation:
    """Explain the loss that these scores gave for a micro-batch, which has advantages and token_weights."""
    tokens = make_objective_inputs(scores.logprobs.detach(), batch)
    with torch.no_grad(), preserve_random_state(tokens.logprobs):
        output = get_objective_function(cfg.objective)(tokens, cfg)
    importance = compute_importance_weights(tokens.old_logprobs, batch.sampler_logprobs, batch.action_mask, cfg)
    policy_batch = replace(batch, likelihood_weights=None)
    policy_grad, _, _ = _compute_score_gradients(scores, policy_batch, remove_penalties(cfg))
    rule = find_gradient_rules(output, importance, policy_grad, batch, cfg)
    return LossExplanation(
        clamp_log_ratio(output.log_ratio).exp().expand_as(tokens.logprobs),
        importance,
        *_compute_score_gradients(scores, batch, cfg),
        rule,
        select_clip_bounds(output, rule),
    )


def _compute_score_gradients(scores: Scores, batch: Batch, cfg: GRPOConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients [B, T] of the loss with respect to log-probs, entropies and exact KL; 0 where unused."""
    leaves = [x.detach().requires_grad_() for x in scores if x is not None]
    with torch.enable_grad(), preserve_random_state(scores.logprobs):
        loss, _ = compute_loss(Scores(*leaves), batch, cfg)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    logprob_grad, entropy_grad, *kl_grad = gradients
    return logprob_grad, entropy_grad, kl_grad[0] if kl_grad else torch.zeros_like(logprob_grad)


def remove_penalties(cfg: GRPOConfig) -> GRPOConfig:
    """Return the settings without KL and entropy terms, so that the loss contains only the objective."""
    return replace(cfg, kl_coef=0.0, kl_target=0.0, reference_every=0, reference_decay=0.0, entropy_coef=0.0)


def preserve_random_state(x: Tensor) -> AbstractContextManager[None]:
    """Restore the random state afterwards, since a user's own objective may use random numbers."""
    return torch.random.fork_rng([x.device] if x.is_cuda else [])


def find_gradient_rules(
    output: ObjectiveOutput, importance: Tensor, policy_grad: Tensor, batch: Batch, cfg: GRPOConfig
) -> Tensor:
    """Return the rule that removed the policy gradient of each token: the first one that applies. [B, T] int"""
    assert batch.advantages is not None and batch.token_weights is not None
    no_tokens = torch.zeros_like(batch.action_mask)
    low, high = (no_tokens if x is None else x for x in (output.clipped_low, output.clipped_high))
    candidates = {
        "given": ~batch.action_mask,
        "overlong_filter": batch.token_weights == 0,
        "no_advantage": batch.advantages == 0,
        "entropy_share": no_tokens if batch.loss_mask is None else ~batch.loss_mask,
        "correction": importance == 0,
        "clip_low": low,
        "dual_clip": high & (batch.advantages < 0) if cfg.dual_clip else no_tokens,
        "clip_high": high,
        "other": ~no_tokens,
    }
    rule = torch.zeros_like(batch.response_ids)
    for name, applies in reversed(candidates.items()):
        rule = torch.where(applies, GRADIENT_RULES.index(name), rule)
    return torch.where((policy_grad == 0) | ~batch.action_mask, rule, GRADIENT_RULES.index(""))


def select_clip_bounds(output: ObjectiveOutput, rule: Tensor) -> Tensor:
    """Return the bound at which each token was clipped, NaN elsewhere. [B, T]"""
    bound = torch.full(rule.shape, torch.nan, dtype=output.log_ratio.dtype, device=rule.device)
    if output.bounds is None:
        return bound
    for name, ratio_limit in zip(("clip_low", "clip_high"), output.bounds, strict=True):
        bound = torch.where(rule == GRADIENT_RULES.index(name), ratio_limit, bound)
    return bound

"""Shaping: adjustments of rewards before they are compared, and of tokens before they are trained on.

All functions are pure. Shapes: P prompts, G completions of each, B = P * G rows, T tokens, D hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.algorithm.settings import GRPOConfig

# ---------------------------------------------------------------- rewards


def smooth_rewards(rewards: Tensor, states: Tensor, cfg: GRPOConfig) -> Tensor:
    """(1 - mix) r + mix * sum over siblings of softmax(cosine / temperature) r: similar answers share rewards.

    This is mathgrpo's `similarity` with states [P, G, D] that are averaged over tokens and centered in their group,
    since all answers to one prompt have states of similar direction. A reward changes by at most mix times the range of
    its group. At a high temperature the map is affine, which `grpo` cancels by standardizing.
    """
    unit = F.normalize(states.double() - states.double().mean(1, keepdim=True), dim=-1)
    is_itself = torch.eye(rewards.shape[-1], dtype=torch.bool, device=rewards.device)
    share = (unit @ unit.mT / cfg.similarity_temperature).masked_fill(is_itself, -torch.inf).softmax(-1)  # [P, G, G]
    neighbors = (share @ rewards[:, :, None])[:, :, 0]
    return (1 - cfg.similarity_mix) * rewards + cfg.similarity_mix * neighbors


def discount_similar_rewards(rewards: Tensor, states: Tensor, cfg: GRPOConfig) -> Tensor:
    """r / sum over the group of max(cosine, 0): common answers count less (DRA-GRPO, arXiv 2505.09655).

    The sum includes the answer itself. Only the difference to the lowest reward of the group is divided, since dividing
    a negative reward would raise it.
    """
    unit = F.normalize(states.double(), dim=-1)
    similarity = (unit @ unit.mT).clamp(min=0.0).sum(-1)
    lowest = rewards.amin(-1, keepdim=True)
    return lowest + (rewards - lowest) / similarity.clamp(min=1.0)


SIMILARITY_SHAPERS = {"smooth": smooth_rewards, "diversity": discount_similar_rewards}


def penalize_overlong(rewards: Tensor, lengths: Tensor, cfg: GRPOConfig) -> Tensor:
    """r - clip((length - (max_length - overlong_cache)) / overlong_cache, 0, 1) (DAPO, arXiv 2503.14476, equation 13).

    The penalty rises from 0 to 1 over the last overlong_cache tokens before max_length. Rewards and lengths are [P, G].
    """
    if not cfg.overlong_cache:
        return rewards
    start = cfg.required_max_length - cfg.overlong_cache
    return rewards - ((lengths - start) / cfg.overlong_cache).clamp(0.0, 1.0)


# ---------------------------------------------------------------- tokens


def compute_importance_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, cfg: GRPOConfig) -> Tensor:
    """Compute weights [B, T] that correct for differences between sampler and policy, from w = pi_old / pi_sampler.

    "token" is min(w, cap), truncated importance sampling (F. Yao et al., 2025). "sequence" is the product of w over the
    response, or 0 if it is above the cap. "geometric" is 1, or 0 if the geometric mean of w over the response is
    outside [1 / cap, cap]. "none" is 1. The mask [B, T] marks the sampled tokens.
    """
    gap = torch.where(mask, old_logprobs - sampler_logprobs, 0.0)
    if cfg.correction == "none":
        return torch.ones_like(gap)
    if cfg.correction == "token":
        return gap.exp().clamp(max=cfg.correction_cap)
    total = gap.sum(-1, keepdim=True)
    limit = torch.tensor(cfg.correction_cap).log()
    if cfg.correction == "sequence":
        return torch.where(total <= limit, total.exp(), 0.0).expand(gap.shape)
    mean = total / mask.sum(-1, keepdim=True)
    return (mean.abs() <= limit).to(gap).expand(gap.shape)


def find_corrected_tokens(weights: Tensor, cfg: GRPOConfig) -> Tensor:
    """Find the tokens [B, T] whose importance weight [B, T] was capped, or whose response has weight 0."""
    return weights >= cfg.correction_cap if cfg.correction == "token" else weights == 0


def find_entropy_threshold(entropy: Tensor, share: float) -> Tensor:
    """Find the threshold that this share of the entropies [N], in nats, reaches or exceeds (arXiv 2506.01939)."""
    count = max(1, round(share * len(entropy)))
    return entropy.topk(count).values[-1]

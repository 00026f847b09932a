"""What is done to rewards before they are compared, and to tokens before they are trained on. Pure functions.

P prompts, G completions of each, B = P * G rows, T tokens, D hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.algorithm.settings import GRPOConfig

# ---------------------------------------------------------------- rewards: [P, G] -> [P, G]


def smooth_rewards(rewards: Tensor, states: Tensor, cfg: GRPOConfig) -> Tensor:
    """(1 - mix) r + mix * sum over siblings of softmax(cosine / temperature) r: near a right answer is nearly right.

    states: [P, G, D]. The group's mean is taken off first, since all answers to one prompt point the same way. A reward
    moves by at most mix times the spread of its group. At a high temperature the map is affine, and `grpo` undoes it.
    (mathgrpo's `similarity`, centred and averaged over tokens.)
    """
    unit = F.normalize(states.double() - states.double().mean(1, keepdim=True), dim=-1)
    itself = torch.eye(rewards.shape[-1], dtype=torch.bool, device=rewards.device)
    share = (unit @ unit.mT / cfg.similarity_temperature).masked_fill(itself, -torch.inf).softmax(-1)  # [P, G, G]
    neighbours = (share @ rewards[:, :, None])[:, :, 0]
    return (1 - cfg.similarity_mix) * rewards + cfg.similarity_mix * neighbours


def discount_similar_rewards(rewards: Tensor, states: Tensor, cfg: GRPOConfig) -> Tensor:
    """r / sum over the group, itself included, of max(cosine, 0) (DRA-GRPO, arXiv 2505.09655): the common counts less.

    What is above the group's lowest reward is divided, so that a negative reward is not mended by being common.
    """
    unit = F.normalize(states.double(), dim=-1)
    alike = (unit @ unit.mT).clamp(min=0.0).sum(-1)
    floor = rewards.amin(-1, keepdim=True)
    return floor + (rewards - floor) / alike.clamp(min=1.0)


SIMILARITY_SHAPERS = {"smooth": smooth_rewards, "diversity": discount_similar_rewards}


def penalize_overlong(rewards: Tensor, lengths: Tensor, cfg: GRPOConfig) -> Tensor:
    """Less 0 to 1 over the last overlong_cache tokens before max_length (DAPO, arXiv 2503.14476, equation 13)."""
    if not cfg.overlong_cache:
        return rewards
    start = cfg.required_max_length - cfg.overlong_cache
    return rewards - ((lengths - start) / cfg.overlong_cache).clamp(0.0, 1.0)


# ---------------------------------------------------------------- tokens: [B, T]


def compute_importance_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, cfg: GRPOConfig) -> Tensor:
    """[B, T] weights that make up for the sampler's arithmetic, w = pi_old / pi_sampler.

    token: min(w, cap) (truncated importance sampling, Yao et al. 2025). sequence: the product over the response, or 0
    above the cap. geometric: 1, or 0 where the mean over the response is out of [1 / cap, cap].
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
    """Where the correction took something away: a weight held at the cap, or a response left out."""
    return weights >= cfg.correction_cap if cfg.correction == "token" else weights == 0


def find_entropy_threshold(entropy: Tensor, share: float) -> Tensor:
    """The lowest of the highest `share` of all entropies, [N] -> []; tokens from there on are trained on."""
    count = max(1, round(share * len(entropy)))
    return entropy.topk(count).values[-1]

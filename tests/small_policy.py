"""A policy small enough to sum over all of its outputs: three tokens, one of which stops, and two steps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import torch

from conftest import OneProcessRuntime
from pellucid.algorithm import grpo
from pellucid.algorithm.advantages import ADVANTAGES, Grades
from pellucid.algorithm.batch import Batch, collect_grades
from pellucid.algorithm.grpo import Scores, compute_loss
from pellucid.algorithm.objectives import AGGREGATES
from pellucid.types import Completion, Group, Prompt, Reward

F64 = torch.float64
STOP, WORDS, LENGTH = 2, 3, 2
SEQUENCES = [(STOP,), *((a, b) for a in range(WORDS - 1) for b in range(WORDS))]
LENGTHS = torch.tensor([len(ids) for ids in SEQUENCES])
MASK = torch.arange(LENGTH) < LENGTHS[:, None]  # [N, T]


def thetas(count=2, seed=5):
    """Return [W, W] logits each: of the first token, then of the second given the first."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(WORDS, WORDS, dtype=F64, generator=generator).requires_grad_() for _ in range(count)]


def distributions(theta):
    """Return [N, T, V] log-probabilities of every possible token at t."""
    states = torch.tensor([[0, 1 + ids[0] if len(ids) > 1 else 0] for ids in SEQUENCES])
    return theta.log_softmax(-1)[states]


def token_scores(theta):
    """Return [N, T] log-probability of each token of each sequence, 0 after its end."""
    tokens = torch.tensor([ids + (0,) * (LENGTH - len(ids)) for ids in SEQUENCES])
    return distributions(theta).gather(-1, tokens[..., None])[..., 0].masked_fill(~MASK, 0.0)


def chances(theta):
    """Return [N] probabilities, which sum to 1."""
    return token_scores(theta).sum(-1).exp()


def exact_kl(theta, ref):
    """Return [N, T] exact KL at each state of a sequence."""
    mine, other = distributions(theta), distributions(ref)
    return (mine.exp() * (mine - other)).sum(-1).masked_fill(~MASK, 0.0)


@cache
def groups(size):
    """Return [number of groups, G] indices into SEQUENCES: all possible groups."""
    return torch.tensor(list(itertools.product(range(len(SEQUENCES)), repeat=size)))


def grades(rewards, lengths=None, correct=None, parts=None, weights=None):
    rewards = torch.as_tensor(rewards, dtype=F64)
    ones = torch.ones_like(rewards)
    parts = rewards[..., None] if parts is None else torch.as_tensor(parts, dtype=F64)
    return Grades(
        rewards,
        (rewards >= 1).double() if correct is None else torch.as_tensor(correct, dtype=F64),
        ones if lengths is None else torch.as_tensor(lengths, dtype=F64),
        parts,
        torch.ones(len(rewards), parts.shape[-1], dtype=F64)
        if weights is None
        else torch.as_tensor(weights, dtype=F64),
    )


@cache
def advantages_of(cfg, rewards):
    """Return [groups, G], each group treated as a whole step."""
    members = groups(cfg.group_size)
    values = torch.tensor(rewards, dtype=F64)[members]
    lengths = LENGTHS[members].double()
    step = [grades(v[None], lengths=n[None]) for v, n in zip(values, lengths, strict=True)]
    return torch.cat([ADVANTAGES[cfg.advantage](each, cfg) for each in step])


@cache
def weights_of(cfg):
    """Return [groups, G, T], each group a minibatch, in float64, because nothing else in these sums may round."""
    masks = MASK[groups(cfg.group_size)].double()
    rows = torch.tensor(cfg.group_size)
    return torch.stack([AGGREGATES[cfg.aggregate](mask, rows, mask.sum(), cfg) for mask in masks])


def batch_of(mask, **tensors):
    rows = len(mask)
    return Batch(
        prompt_ids=((0,),),
        demonstrations=((),),
        prompt_indices=torch.zeros(rows, dtype=torch.long),
        response_ids=torch.zeros(mask.shape, dtype=torch.long),
        response_mask=mask,
        action_mask=mask,
        finished=torch.ones(rows, dtype=torch.bool),
        sampler_logprobs=torch.zeros(mask.shape, dtype=F64),
        **tensors,
    )


def records(members, rewards):
    """Return the groups as a sampler and a task produce them."""
    completions = [Completion(ids, (0.0,) * len(ids), "", True) for ids in SEQUENCES]
    return [
        Group(Prompt("p", ""), (0,), tuple(completions[n] for n in group), tuple(Reward(rewards[n]) for n in group))
        for group in members.tolist()
    ]


def expected_gradient(theta, cfg, rewards, ref=None, old=None):
    """Return the expected gradient of the package's loss over all groups drawn by `old` (None: theta itself)."""
    old = theta if old is None else old
    members = groups(cfg.group_size)
    mask = MASK[members].flatten(0, 1)
    chance = chances(old.detach())[members].prod(-1)

    def rows(x):
        return x[members].flatten(0, 1)

    old_logprobs = token_scores(old.detach())
    scores = Scores(rows(token_scores(theta)), rows(torch.zeros_like(old_logprobs)))
    batch = batch_of(mask, old_logprobs=rows(old_logprobs))
    if ref is not None:
        batch = replace(batch, ref_logprobs=rows(token_scores(ref.detach())))
        scores = scores._replace(kl=rows(exact_kl(theta, ref.detach()))) if cfg.kl == "exact" else scores
    advantages = advantages_of(without_kl(cfg), tuple(rewards))
    if cfg.kl_coef and cfg.kl_in != "loss":
        # Measured as in the package: under the policy that drew the rollouts.
        sampled = Scores(rows(old_logprobs), scores.entropy, None if scores.kl is None else scores.kl.detach())
        charged = replace(batch, kl=grpo.estimate_kl(sampled, batch.ref_logprobs, rows(old_logprobs), cfg))
        advantages, _ = grpo.compute_advantages(
            collect_grades(records(members, rewards)), charged, None, OneProcessRuntime(), cfg
        )
    weights = weights_of(without_kl(cfg)) * chance[:, None, None]
    batch = replace(
        batch, advantages=batch.broadcast_to_tokens(advantages.flatten()), token_weights=weights.flatten(0, 1)
    )
    loss, _ = compute_loss(scores, batch, cfg)
    return torch.autograd.grad(loss, theta)[0]


def without_kl(cfg):
    return replace(cfg, kl_coef=0.0, objective="ppo_clip")

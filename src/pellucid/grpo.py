"""Group Relative Policy Optimization, whole: Generate -> Reward -> Advantage -> Update.

The algorithm of DeepSeekMath (arXiv 2402.03300), section 4.1, and its relatives, as points in a product of small axes:
how a completion compares with its siblings (ADVANTAGES), what is maximised for a token (OBJECTIVES), how tokens are
added up (AGGREGATES), and how the policy is held near a reference (KL, in the loss or in the reward). Each axis is a
dict of pure functions; the loop does not know which was chosen.

Left out on purpose: a value network (the group's mean is the baseline), token-level rewards (a completion has one
grade), and everything that knows how a model, a process group or a file works.

Shapes: P prompts a step, G completions of each, B = P * G rows in the order p * G + g, T response tokens. Every [B, T]
tensor speaks of response tokens: x[b, t] is about token t of response b. Rewards and advantages are float64.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.types import Group, GRPOConfig, Sampler, Task

MAX_LOG_RATIO = 20.0
"""exp() of a larger log-ratio says nothing but overflow."""


class Scores(NamedTuple):
    """Log-probability of each response token and entropy of the distribution it was drawn from; nats, [B, T]."""

    logprobs: Tensor
    entropy: Tensor


class Policy(Protocol):
    @property
    def device(self) -> torch.device: ...
    def score(self, batch: Batch) -> Scores: ...


class Runtime(Protocol):
    """Processes and their common optimizer.

    `shard` takes this process's share of a global list, `gather` is its inverse, `sum` adds a tensor up over processes.
    `accumulate` yields the micro-batches of one optimizer step, at the last of which the gradients of `backward` meet;
    `step` takes that step and reports `grad_norm`, `lr` and `skipped`, 1 where the gradient was not finite.
    """

    def shard(self, items: Sequence[Any]) -> Sequence[Any]: ...
    def gather(self, items: Sequence[Any]) -> list[Any]: ...
    def sum(self, x: Tensor) -> Tensor: ...
    def accumulate(self, micro_batches: Sequence[Batch]) -> Iterator[Batch]: ...
    def backward(self, loss: Tensor) -> None: ...
    def step(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class Batch:
    """Rollouts as tensors; each row is one completion.

    Example: prompts of 5 and 6 tokens, G = 2 and completions of 2, 3, 1 and 3 tokens give P = 2, B = 4, T = 3 and
    mask = [[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]]. The end-of-sequence token is a token like any other.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    """Once per group."""
    prompt_of: Tensor
    """[B] index of each row's prompt."""
    response_ids: Tensor
    """[B, T] padded on the right; what the padding holds is never looked at."""
    mask: Tensor
    """[B, T] bool: true on the tokens of the response. Made from lengths, since pad may equal EOS."""
    sampler_logprobs: Tensor
    """[B, T] as the sampler reported them."""
    old_logprobs: Tensor | None = None
    """[B, T] under the policy at the start of the update; None where that is the policy being updated."""
    ref_logprobs: Tensor | None = None
    """[B, T] under the frozen reference."""
    advantages: Tensor | None = None
    """[B]"""
    weights: Tensor | None = None
    """[B, T] share of each token in the loss."""

    def __len__(self) -> int:
        return len(self.prompt_of)

    def rows(self, index: slice | Tensor) -> Batch:
        """Some rows, no wider than their longest response."""
        width = int(self.mask[index].sum(-1).max())
        tensors = {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        return replace(
            self, **{name: x[index][..., :width] if x.dim() > 1 else x[index] for name, x in tensors.items()}
        )

    def chunks(self, size: int) -> list[Batch]:
        """Consecutive batches of at most `size` rows; 0 means one."""
        return [self.rows(slice(i, i + size)) for i in range(0, len(self), size)] if size else [self]


# ---------------------------------------------------------------- the loop


class StepResult(NamedTuple):
    """`step` counts finished steps; `groups` are of all processes, graded."""

    step: int
    metrics: dict[str, float]
    groups: list[Group]


def train(
    task: Task,
    sampler: Sampler,
    policy: Policy,
    runtime: Runtime,
    cfg: GRPOConfig,
    reference: Policy | None = None,
    first_step: int = 0,
) -> Iterator[StepResult]:
    """Yields after each step, when the policy may be evaluated, saved or left."""
    sampler.sync(policy)
    for step in range(first_step, cfg.steps):
        clock = Clock()
        # 1. Generate: G completions of each prompt, from the current policy.
        prompts = runtime.shard(task.sample(step, cfg.prompts_per_step))
        groups = sampler.generate(prompts, cfg.group_size, seed=f"{cfg.seed}/{step}")
        clock.lap("generate")
        # 2. Reward: the task grades every completion.
        groups, rewards = grade(task, groups)  # [P, G]
        clock.lap("reward")
        # 3. Advantage: how much better each completion did than its siblings.
        batch = score_fixed(collate(groups, policy.device), policy, reference, cfg)
        advantages = ADVANTAGES[cfg.advantage](rewards) - kl_penalty(batch, cfg)  # [P, G]
        clock.lap("score")
        # 4. Update: make the better ones more likely, without leaving the trust region.
        metrics = update(policy, replace(batch, advantages=advantages.flatten()), runtime, cfg)
        sampler.sync(policy)
        clock.lap("update")
        yield StepResult(step + 1, metrics | clock.times(), runtime.gather(with_advantages(groups, advantages)))


def update(policy: Policy, batch: Batch, runtime: Runtime, cfg: GRPOConfig) -> dict[str, float]:
    """Takes cfg.inner_steps optimizer steps on the rollouts; the mean of each metric over the tokens trained on."""
    totals = Totals()
    for _ in range(cfg.epochs):
        for minibatch in batch.chunks(len(batch) // cfg.minibatches):
            weighted = replace(minibatch, weights=AGGREGATES[cfg.aggregate](minibatch.mask, runtime, cfg))
            for micro_batch in runtime.accumulate(with_gradient(weighted, cfg).chunks(cfg.micro_batch)):
                loss, metrics = loss_terms(policy.score(micro_batch), micro_batch, cfg)
                runtime.backward(loss)
                totals.add_tokens(metrics, micro_batch.mask)
            totals.steps.append(runtime.step())
    return totals.means(runtime)


def with_gradient(batch: Batch, cfg: GRPOConfig) -> Batch:
    """Leaves out rows that add 0, as those of dead groups; one stays, since every process takes part in a step."""
    if cfg.entropy_coef or (cfg.kl_coef and cfg.kl_in == "loss"):
        return batch
    live = batch.advantages != 0
    return batch.rows(live if bool(live.any()) else slice(1))


def loss_terms(scores: Scores, batch: Batch, cfg: GRPOConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """-sum of weights * (objective - kl_coef * KL + entropy_coef * entropy), and the [B, T] values worth a look."""
    assert batch.advantages is not None and batch.weights is not None
    logprobs, entropy = scores
    old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    advantages = batch.advantages.to(logprobs)[:, None]  # [B, 1]

    value = OBJECTIVES[cfg.objective](logprobs, old_logprobs, advantages, cfg)  # [B, T]
    metrics = clip_metrics(logprobs.detach(), old_logprobs, advantages, cfg)
    metrics |= {"entropy": entropy.detach(), "sampler/gap_mean": (batch.sampler_logprobs - old_logprobs).abs()}
    if batch.ref_logprobs is not None:
        kl = KL[cfg.kl](logprobs, batch.ref_logprobs)
        metrics["kl"] = KL["k3"](logprobs.detach(), batch.ref_logprobs)
        value = value - cfg.kl_coef * kl if cfg.kl_in == "loss" else value
    if cfg.entropy_coef:
        value = value + cfg.entropy_coef * entropy
    losses = -(batch.weights * value)
    return losses.sum(), metrics | {"loss": losses.detach()}


# ---------------------------------------------------------------- advantages: [P, G] -> [P, G]


def dead(rewards: Tensor) -> Tensor:
    """[P, 1]: groups without signal, max == min. The margin is float64 rounding: 0.1 + 0.2 is the reward 0.3."""
    low, high = rewards.aminmax(dim=-1, keepdim=True)
    return high - low <= 1e-9 * torch.maximum(low.abs(), high.abs())


def centered(rewards: Tensor) -> Tensor:
    """r - mean (Dr. GRPO, arXiv 2503.20783). The mean includes r itself: (1 - 1/G) of the unbiased gradient."""
    return (rewards - rewards.mean(-1, keepdim=True)).masked_fill(dead(rewards), 0.0)


def grpo(rewards: Tensor) -> Tensor:
    """(r - mean) / std with the population std (DeepSeekMath, equation 3); no epsilon, since dead groups are 0."""
    std = rewards.std(-1, correction=0, keepdim=True)
    return centered(rewards) / std.masked_fill(dead(rewards), 1.0)


def rloo(rewards: Tensor) -> Tensor:
    """r - mean of the others (arXiv 2402.14740), an unbiased baseline: G / (G - 1) times `centered`."""
    size = rewards.shape[-1]
    return centered(rewards) * (size / (size - 1))


ADVANTAGES = {"grpo": grpo, "centered": centered, "rloo": rloo}


# ---------------------------------------------------------------- objectives: what is maximised, [B, T]


def ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def naive(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cfg: GRPOConfig) -> Tensor:
    """A log pi: REINFORCE with the group as baseline."""
    return advantages * logprobs


def unclipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cfg: GRPOConfig) -> Tensor:
    """A pi / pi_old: importance-weighted, no trust region."""
    return advantages * ratio_of(logprobs, old_logprobs)


def clipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cfg: GRPOConfig) -> Tensor:
    """min(A ratio, A clip(ratio)) (PPO, arXiv 1707.06347, equation 7): no gain beyond the trust region."""
    ratio = ratio_of(logprobs, old_logprobs)
    return torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high))


OBJECTIVES = {"naive": naive, "unclipped": unclipped, "clipped": clipped}


# ---------------------------------------------------------------- aggregation: the weight of each token, [B, T]


def by_token(mask: Tensor, runtime: Runtime, cfg: GRPOConfig) -> Tensor:
    """Every token of the minibatch weighs the same (DAPO, arXiv 2503.14476)."""
    return mask / runtime.sum(mask.sum())


def by_sequence(mask: Tensor, runtime: Runtime, cfg: GRPOConfig) -> Tensor:
    """Every response weighs the same, its tokens share that (DeepSeekMath): short ones speak louder per token."""
    return mask / mask.sum(-1, keepdim=True) / runtime.sum(mask.new_tensor(len(mask), dtype=torch.long))


def by_constant(mask: Tensor, runtime: Runtime, cfg: GRPOConfig) -> Tensor:
    """Every token weighs 1 / (B constant_length), whatever the lengths (Dr. GRPO): no length bias."""
    return mask / (runtime.sum(mask.new_tensor(len(mask), dtype=torch.long)) * cfg.constant_length)


AGGREGATES = {"token": by_token, "sequence": by_sequence, "constant": by_constant}


# ---------------------------------------------------------------- KL(pi, reference), estimated on pi's own tokens


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log pi - log ref: unbiased. Its place is the reward; in the loss its expected gradient is 0."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log pi - log ref)^2 / 2: in the loss its expected gradient is that of KL(pi, ref)."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """ref / pi - 1 - log(ref / pi): unbiased and never negative; in the loss its gradient is that of KL(ref, pi)."""
    log_ratio = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() - 1 - log_ratio


KL = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalty(batch: Batch, cfg: GRPOConfig) -> Tensor | float:
    """[P, G]: kl_coef * (K - mean K of the others), K = sum over a response of k1; subtracted from the advantages.

    Equivalent in expectation to the reward R - kl_coef * K, but outside the division by the group's std, so that
    kl_coef keeps its meaning in every group, dead ones included.
    """
    if not cfg.kl_coef or cfg.kl_in != "reward":
        return 0.0
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    per_token = k1(batch.old_logprobs, batch.ref_logprobs).double() * batch.mask
    return cfg.kl_coef * rloo(per_token.sum(-1).view(-1, cfg.group_size))


# ---------------------------------------------------------------- between the stages


def grade(task: Task, groups: Sequence[Group]) -> tuple[list[Group], Tensor]:
    """The graded groups and their rewards, [P, G] float64. A reward that failed counts as the mean of its siblings."""
    graded = [replace(g, rewards=tuple(task.reward(g.prompt, c) for c in g.completions)) for g in groups]
    rewards = torch.tensor([[r.value for r in g.rewards] for g in graded], dtype=torch.float64)
    failed = ~rewards.isfinite()
    siblings = rewards.masked_fill(failed, torch.nan).nanmean(-1, keepdim=True).nan_to_num(0.0)
    return graded, torch.where(failed, siblings, rewards)


def with_advantages(groups: Sequence[Group], advantages: Tensor) -> list[Group]:
    return [replace(g, advantages=tuple(row)) for g, row in zip(groups, advantages.tolist(), strict=True)]


def collate(groups: Sequence[Group], device: torch.device) -> Batch:
    completions = [c for g in groups for c in g.completions]
    lengths = torch.tensor([len(c.token_ids) for c in completions], device=device)

    def padded(rows: list[Any], dtype: torch.dtype) -> Tensor:
        tensors = [torch.tensor(row, dtype=dtype) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(device)

    return Batch(
        prompt_ids=tuple(g.prompt_ids for g in groups),
        prompt_of=torch.tensor([p for p, g in enumerate(groups) for _ in g.completions], device=device),
        response_ids=padded([c.token_ids for c in completions], torch.long),
        mask=torch.arange(int(lengths.max()), device=device) < lengths[:, None],
        sampler_logprobs=padded([c.logprobs for c in completions], torch.float32),
    )


def score_fixed(batch: Batch, policy: Policy, reference: Policy | None, cfg: GRPOConfig) -> Batch:
    """Adds the log-probs that stay fixed during the update, each only where something reads it."""
    if cfg.inner_steps > 1 or (cfg.kl_coef and cfg.kl_in == "reward"):
        batch = replace(batch, old_logprobs=score_detached(batch, policy, cfg))
    if reference is not None and cfg.kl_coef:
        batch = replace(batch, ref_logprobs=score_detached(batch, reference, cfg))
    return batch


@torch.no_grad()
def score_detached(batch: Batch, policy: Policy, cfg: GRPOConfig) -> Tensor:
    """[B, T] log-probs without gradient, a micro-batch at a time."""
    parts = [policy.score(micro_batch).logprobs for micro_batch in batch.chunks(cfg.micro_batch)]
    return torch.cat([F.pad(part, (0, batch.mask.shape[1] - part.shape[1])) for part in parts])


# ---------------------------------------------------------------- what the update reports


def clip_metrics(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cfg: GRPOConfig) -> dict[str, Tensor]:
    """Where the clip takes a token's gradient: the ratio below the trust region with A < 0, above it with A > 0."""
    ratio = ratio_of(logprobs, old_logprobs)
    return {
        "ratio/mean": ratio,
        "clip/low": (ratio < 1 - cfg.clip_low) & (advantages < 0),
        "clip/high": (ratio > 1 + cfg.clip_high) & (advantages > 0),
    }


class Totals:
    """Sums over response tokens and over optimizer steps, until they become means over all processes."""

    def __init__(self) -> None:
        self.tokens: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []
        self.gap_max = 0.0

    def add_tokens(self, metrics: dict[str, Tensor], mask: Tensor) -> None:
        self.gap_max = max(self.gap_max, float(metrics["sampler/gap_mean"][mask].max()))
        for name, value in {**metrics, "count": mask}.items():
            self.tokens[name] += float(value[mask].sum())

    def means(self, runtime: Runtime) -> dict[str, float]:
        shares = runtime.gather([self.tokens])
        sums = {name: sum(share[name] for share in shares) for name in self.tokens}
        count, loss, steps = sums.pop("count"), sums.pop("loss"), len(self.steps)
        return {name: value / count for name, value in sums.items()} | {
            "sampler/gap_max": max(runtime.gather([self.gap_max])),
            "loss": loss / steps,  # already a weighted sum: adding up is its mean
            "grad_norm": sum(s["grad_norm"] for s in self.steps) / steps,
            "lr": self.steps[-1]["lr"],
            "skipped": sum(s["skipped"] for s in self.steps),
        }


class Clock:
    """Splits a step into named laps, in seconds."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        before, self.last = self.last, time.perf_counter()
        self.laps[f"time/{name}"] = self.last - before

    def times(self) -> dict[str, float]:
        return {**self.laps, "time/step": self.last - self.start}

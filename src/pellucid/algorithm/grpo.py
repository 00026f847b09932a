"""Group Relative Policy Optimization, whole: Generate -> Reward -> Advantage -> Update.

The algorithm of DeepSeekMath (arXiv 2402.03300), section 4.1, and its relatives, as points in a product of small axes
of pure functions: how a completion compares with its siblings (advantages.py), what is maximised for a token and how
tokens are added up (objectives.py), how the policy is held near a reference (kl.py), what is done to rewards and tokens
before (shaping.py). The loop does not know which was chosen. docs/variants.md says which paper is which point.

Left out on purpose: a value network (the group's mean is the baseline), token-level rewards (a completion has one
grade), and everything that knows how a model, a process group or a file works.

Shapes: P prompts a step, G completions of each, B = P * G rows in the order p * G + g, T response tokens. Every [B, T]
tensor speaks of response tokens: x[b, t] is about token t of response b. Rewards and advantages are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from pellucid.algorithm import kl, shaping
from pellucid.algorithm import metrics as diagnostics
from pellucid.algorithm.advantages import Grades, compute_advantages_from_grades, is_zero_variance
from pellucid.algorithm.batch import (
    Batch,
    append_demonstrations,
    collate,
    collect_grades,
    collect_task_rewards,
    concat_batches,
    concat_token_rows,
)
from pellucid.algorithm.kl import KL_ESTIMATORS
from pellucid.algorithm.metrics import MetricTotals, StageClock
from pellucid.algorithm.objectives import (
    AGGREGATES,
    ObjectiveInputs,
    compute_clip_high_by_difficulty,
    compute_clip_metrics,
    get_objective_function,
)
from pellucid.algorithm.settings import GRPOConfig
from pellucid.types import (
    ROUND_STRIDE,
    DataError,
    Group,
    Progress,
    Prompt,
    Sampler,
    Sampling,
    Task,
    as_stateful_task,
    get_equal_rewards,
    grade_groups,
)

T = TypeVar("T")


class Scores(NamedTuple):
    """What a policy says of each response token, [B, T], in nats."""

    logprobs: Tensor
    entropy: Tensor
    """The entropy of the distribution that the token was drawn from."""
    kl: Tensor | None = None
    """KL(pi, reference) of that distribution, summed over the vocabulary; where kl = "exact"."""


class Policy(Protocol):
    @property
    def device(self) -> torch.device: ...
    def score(self, batch: Batch) -> Scores: ...
    def embed(self, batch: Batch, layer: int) -> Tensor:
        """[B, D]: the output of a layer, averaged over the response tokens."""
        ...

    def weights(self) -> Mapping[str, Tensor]: ...


class Reference(Protocol):
    def score(self, batch: Batch) -> Scores: ...
    def update_weights(self, weights: Mapping[str, Tensor], decay: float) -> None:
        """Set the weights to decay * themselves + (1 - decay) * weights."""
        ...


class Runtime(Protocol):
    """The processes of a run, and the optimizer that they share.

    `shard` takes this process's share of a global list, `gather` is its inverse, `sum` adds a tensor up over processes.
    `accumulate` yields the micro-batches of one optimizer step, at the last of which the gradients of `backward` meet;
    `step` takes that step and reports `grad_norm`, `lr`, and as 1 what kept it from moving a weight: `skipped`, a
    gradient that was not finite, or `idle`, one that was 0; in fp16 also `loss_scale`, and `skipped/overflow`, one that
    was too large for it.
    `fit(compute, rows)` is `compute(rows)`, of micro-batches of so many rows; where memory runs out, it is made again,
    without the gradients that there are, in smaller ones.
    """

    @property
    def world_size(self) -> int:
        """The number of processes."""
        ...

    def shard(self, items: Sequence[Any]) -> Sequence[Any]: ...
    def gather(self, items: Sequence[Any]) -> list[Any]: ...
    def sum(self, x: Tensor) -> Tensor: ...
    def compute_within_memory(self, compute: Callable[[int], T], rows: int) -> T: ...
    def accumulate(self, micro_batches: Sequence[Batch]) -> Iterator[Batch]: ...
    def backward(self, loss: Tensor) -> None: ...
    def step(self) -> dict[str, float]: ...


# ---------------------------------------------------------------- the loop


@dataclass
class TrainingState:
    """What one step leaves to the next, besides weights and optimizer state. A checkpoint saves it."""

    step: int = 0
    """The number of finished steps."""
    kl_coef: float | None = None
    """The kl_coef of the next step, which follows cfg.kl_target. None before the first step: cfg.kl_coef."""
    replay_buffer: list[tuple[int, Batch]] = field(default_factory=list)
    """Replay buffer: (step that drew it, batch) pairs, newest first."""
    next_rollouts: tuple[Sequence[Group], dict[str, float]] | None = None  # what ahead.py has drawn for the next step


class StepResult(NamedTuple):
    """One finished step: how many there are now, its metrics, and the graded groups of all processes."""

    step: int
    metrics: dict[str, float]
    groups: list[Group]


def train(
    task: Task,
    sampler: Sampler,
    policy: Policy,
    runtime: Runtime,
    cfg: GRPOConfig,
    reference: Reference | None = None,
    state: TrainingState | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
) -> Iterator[StepResult]:
    """Train, and yield after each step. The caller may then evaluate, save `policy` and `state`, or stop."""
    state = state or TrainingState()
    state.kl_coef = cfg.kl_coef if state.kl_coef is None else state.kl_coef
    sampler.sync(policy, state.step)
    for step in range(state.step, cfg.steps):
        clock = StageClock()
        cfg = replace(cfg, kl_coef=state.kl_coef)
        # 1. Generate: G completions of each prompt, from the current policy. 2. Reward: the task grades every one.
        groups, drawn = collect_rollouts(task, sampler, sampling, runtime, step, cfg, clock)
        # 3. Advantage: how much better each completion did than its siblings.
        fresh = add_old_and_reference_logprobs(collate(groups), policy, reference, runtime, cfg)
        advantages, changed = compute_advantages(groups, fresh, policy, runtime, cfg)  # [P, G]
        batch = append_replayed_batches(state, step, attach_advantages(fresh, groups, advantages, runtime, cfg), cfg)
        clock.record_lap("score")
        # 4. Update: make the better ones more likely, without leaving the trust region.
        metrics = update_policy(policy, batch, runtime, cfg)
        sampler.sync(policy, step + 1)
        clock.record_lap("update")
        finish_step(state, step, reference, policy, metrics, cfg)
        metrics |= drawn | changed | kl.compute_kl_cost(*get_charged_kl(fresh), cfg, runtime.gather) | clock.get_times()
        yield StepResult(state.step, metrics, runtime.gather(store_group_advantages(groups, advantages)))


def collect_rollouts(
    task: Task, sampler: Sampler, sampling: Sampling, runtime: Runtime, step: int, cfg: GRPOConfig, clock: StageClock
) -> tuple[Sequence[Group], dict[str, float]]:
    """Graded groups of the step's prompts, this process's share, and metrics of how they were come by.

    With cfg.max_rounds > 1 (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2) groups whose task rewards are all
    equal make room for others: round r draws the prompts of step + r * ROUND. When the rounds are used up, dead groups
    fill the batch up.
    """
    live: list[Group] = []
    spare: list[Group] = []
    for number in range(cfg.max_rounds):
        prompts = task.sample(step + number * ROUND_STRIDE, cfg.prompts_per_step)
        prompts = prompts[: count_missing_prompts(len(live), len(spare), runtime.world_size, cfg)]
        seed = f"{cfg.seed}/{step}/{number}" if number else f"{cfg.seed}/{step}"
        groups = generate_groups(sampler, runtime, prompts, replace(sampling, n=cfg.group_size, seed=seed))
        clock.record_lap("generate")
        groups = grade_groups(task, groups, Progress(step, cfg.steps, cfg.prompts_per_step))
        clock.record_lap("reward")
        if cfg.max_rounds == 1:
            return groups, notify_stateful_task(task, step, groups, runtime, cfg)
        for group in runtime.gather(groups):
            (spare if bool(is_zero_variance(collect_task_rewards([group]), cfg.min_reward_range)) else live).append(
                group
            )
        if len(live) >= cfg.prompts_per_step:
            break
    drawn = live + spare
    kept = runtime.shard(drawn[: cfg.prompts_per_step])
    return kept, compute_sampling_metrics(drawn, len(spare)) | notify_stateful_task(
        task, step, runtime.shard(drawn), runtime, cfg
    )


def generate_groups(
    sampler: Sampler, runtime: Runtime, prompts: Sequence[Prompt], sampling: Sampling
) -> Sequence[Group]:
    """Sample this process's share of the prompts. DataError in all processes where one of them raises it.

    So all of them know that the step is over, and can save the run together.
    """
    try:
        groups, fault = sampler.generate(runtime.shard(prompts), sampling), []
    except DataError as error:
        if runtime.world_size == 1:
            raise
        groups, fault = [], [str(error)]
    if runtime.world_size > 1 and (faults := runtime.gather(fault)):
        raise DataError(faults[0])
    return groups


def compute_sampling_metrics(drawn: Sequence[Group], dead: int) -> dict[str, float]:
    """Metrics of how many groups were drawn to fill the batch, and of the tokens of all their sequences."""
    tokens = sum(s.length for group in drawn for c in group.completions for s in (c, *c.branches))
    return {"groups/drawn": len(drawn), "groups/drawn_dead": dead / len(drawn), "tokens": float(tokens)}


def notify_stateful_task(
    task: Task, step: int, groups: Sequence[Group], runtime: Runtime, cfg: GRPOConfig
) -> dict[str, float]:
    """Show the groups of all processes to a stateful task, in every process alike; return its metrics."""
    watching = as_stateful_task(task)
    if not watching:
        return {}
    shown = [
        replace(group, is_zero_variance=bool(get_equal_rewards(group, cfg.min_reward_range)))
        for group in runtime.gather(groups)
    ]
    return dict(watching.observe(step, shown))


def count_missing_prompts(live: int, spare: int, processes: int, cfg: GRPOConfig) -> int:
    """How many prompts to draw next: enough for the missing live groups, by the share of live ones seen so far."""
    missing = cfg.prompts_per_step - live
    expected = math.ceil(missing * (live + spare) / max(live, 1)) if live + spare else missing
    return min(cfg.prompts_per_step, math.ceil(expected / processes) * processes)


def compute_advantages(
    groups: Sequence[Group], batch: Batch, policy: Policy, runtime: Runtime, cfg: GRPOConfig
) -> tuple[Tensor, dict[str, float]]:
    """Advantages [P, G] of this process's groups, compared with those of all processes, and `effect/*` metrics."""
    grades = collect_grades(runtime.gather(groups))
    shaped = torch.stack(runtime.gather(list(shape_rewards(collect_grades(groups), batch, policy, cfg))))
    advantages = compute_advantages_from_grades(grades, shaped, cfg)
    penalty = kl.compute_kl_penalty(*get_charged_kl(batch), cfg)
    changed = diagnostics.compute_advantage_effects(
        grades, shaped, advantages, cfg
    ) | diagnostics.compute_kl_penalty_effect(penalty, runtime.gather)
    return torch.stack(list(runtime.shard(list(advantages)))) - penalty, changed


def get_charged_kl(batch: Batch) -> tuple[Tensor | None, Tensor]:
    """The KL that rewards are charged with, and what of it counts."""
    return (None, batch.action_mask) if batch.kl is None else batch.sum_by_rollout(batch.kl)


def attach_advantages(
    batch: Batch, groups: Sequence[Group], advantages: Tensor, runtime: Runtime, cfg: GRPOConfig
) -> Batch:
    """Batch with advantages [B, T] and, where set, clip_high [B]. Branches stand beside their completions."""
    clip_high = None
    if cfg.clip_difficulty:
        mean = collect_grades(runtime.gather(groups)).correct.nanmean()
        clip_high = (
            compute_clip_high_by_difficulty(collect_grades(groups).correct, mean, cfg)
            .flatten()
            .to(batch.sampler_logprobs)
        )
    of_rows = advantages.flatten().to(batch.sampler_logprobs)
    if batch.rollout_indices is not None:
        rollouts, beside = batch.rollout_indices.sort(stable=True)
        batch, of_rows = batch.select_rows(beside), of_rows[rollouts]
        clip_high = None if clip_high is None else clip_high[rollouts]
    return replace(batch, advantages=batch.broadcast_to_tokens(of_rows), clip_high=clip_high)


def update_policy(policy: Policy, batch: Batch, runtime: Runtime, cfg: GRPOConfig) -> dict[str, float]:
    """Take cfg.inner_steps optimizer steps on the rollouts. Return the mean of each metric over trained tokens."""
    totals = MetricTotals()
    for _ in range(cfg.epochs):
        for minibatch in batch.split_into_minibatches(cfg.minibatches):
            weighted = attach_token_weights(minibatch, runtime, cfg)
            accumulate = partial(accumulate_gradients, policy, weighted, totals, runtime, cfg)
            totals = runtime.compute_within_memory(accumulate, cfg.micro_batch or len(minibatch))
            totals.step_metrics.append(runtime.step())
    return totals.compute_means(runtime.gather)


def accumulate_gradients(
    policy: Policy, batch: Batch, totals: MetricTotals, runtime: Runtime, cfg: GRPOConfig, rows: int
) -> MetricTotals:
    """Add up the gradients of one optimizer step over micro-batches of `rows` rows. Return the grown totals."""
    totals = deepcopy(totals)
    for micro_batch in runtime.accumulate(batch.split_into_chunks(rows)):
        loss, metrics = compute_loss(policy.score(micro_batch), micro_batch, cfg)
        runtime.backward(loss)
        totals.add_tokens(metrics)
    return totals


def attach_token_weights(batch: Batch, runtime: Runtime, cfg: GRPOConfig) -> Batch:
    """Batch with weights and, where cfg.prefix_coef asks for them, demonstrations with likelihood_weights.

    Rows that add nothing to the gradient, such as those of dead groups, are dropped.
    """
    weighted = drop_rows_without_gradient(replace(batch, token_weights=compute_token_weights(batch, runtime, cfg)), cfg)
    if not cfg.prefix_coef:
        return weighted
    shown = append_demonstrations(weighted, batch.prompt_indices.unique())
    assert shown.likelihood_weights is not None
    tokens = runtime.sum(shown.likelihood_weights.sum())
    return replace(shown, likelihood_weights=cfg.prefix_coef * shown.likelihood_weights / tokens.clamp(min=1))


def compute_token_weights(batch: Batch, runtime: Runtime, cfg: GRPOConfig) -> Tensor:
    """Weight [B, T] of each token in the loss, from counts over all processes; 0 where a response is filtered out."""
    mask = batch.action_mask & batch.finished[:, None] if cfg.overlong_filter else batch.action_mask
    count, lengths = batch.count_rollouts(mask)
    rollouts, tokens = runtime.sum(count), runtime.sum(mask.sum())
    return AGGREGATES[cfg.aggregate](mask, rollouts.clamp(min=1), tokens.clamp(min=1), cfg, lengths)


def drop_rows_without_gradient(batch: Batch, cfg: GRPOConfig) -> Batch:
    """Drop rows that add nothing to the gradient, such as those of dead groups; keep one, as all processes step."""
    assert batch.advantages is not None and batch.token_weights is not None
    live = batch.token_weights.any(-1)
    if not (cfg.entropy_coef or (cfg.kl_coef and cfg.kl_in == "loss")):
        live = live & (batch.advantages != 0).any(-1)
    return batch if bool(live.all()) else batch.select_rows(live if bool(live.any()) else slice(1))


def compute_loss(scores: Scores, batch: Batch, cfg: GRPOConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, a sum over tokens, and metrics: each [N] of the N tokens that it speaks of.

    The loss is -sum of weights * (objective - kl_coef * KL + entropy_coef * entropy) + likelihood_weights * log pi.
    """
    assert batch.advantages is not None and batch.token_weights is not None
    logprobs, entropy, exact_kl = scores
    now = logprobs.detach()
    old_logprobs = now if batch.old_logprobs is None else batch.old_logprobs
    importance_weights = shaping.compute_importance_weights(
        old_logprobs, batch.sampler_logprobs, batch.action_mask, cfg
    )

    clip_high = None if batch.clip_high is None else batch.clip_high[:, None]  # [B, 1]
    tokens = ObjectiveInputs(logprobs, old_logprobs, batch.advantages.to(logprobs), batch.action_mask, clip_high)
    outcome = get_objective_function(cfg.objective)(tokens, cfg)
    value = importance_weights * outcome.value  # [B, T]
    value = value if batch.loss_mask is None else value * batch.loss_mask
    metrics = compute_clip_metrics(outcome, batch.action_mask)
    metrics |= {"entropy": entropy.detach(), "sampler/gap_mean": (batch.sampler_logprobs - old_logprobs).abs()}
    metrics |= (
        {"sampler/corrected": shaping.find_corrected_tokens(importance_weights, cfg)}
        if cfg.correction != "none"
        else {}
    )
    if cfg.kl_coef:
        estimate = estimate_kl(scores, batch.ref_logprobs, old_logprobs, cfg)
        metrics |= kl.compute_kl_metrics(now, batch.ref_logprobs) if exact_kl is None else {"kl": exact_kl.detach()}
        metrics |= diagnostics.compute_kl_loss_effect(now, batch.ref_logprobs, exact_kl, cfg)
        value = value - cfg.kl_coef * estimate if cfg.kl_in == "loss" else value
    if cfg.entropy_coef:
        value = value + cfg.entropy_coef * entropy
    # Where nothing was sampled there may be anything, infinities included.
    losses = -batch.token_weights * value.masked_fill(~batch.action_mask, 0.0)
    metrics = {name: x[batch.action_mask] for name, x in metrics.items()}
    if batch.likelihood_weights is not None:
        learnt = batch.likelihood_weights != 0
        losses = losses - batch.likelihood_weights * logprobs.masked_fill(~learnt, 0.0)
        metrics["prefix/nll"] = -now[learnt]
    return losses.sum(), metrics | {"loss": losses.detach()[batch.response_mask]}


def estimate_kl(scores: Scores, ref_logprobs: Tensor | None, old_logprobs: Tensor, cfg: GRPOConfig) -> Tensor:
    """[B, T] KL(pi, reference), by the estimator of cfg.kl."""
    if scores.kl is not None:
        return scores.kl
    assert ref_logprobs is not None
    return KL_ESTIMATORS[cfg.kl](scores.logprobs, ref_logprobs, old_logprobs)


# ---------------------------------------------------------------- between the stages


def shape_rewards(grades: Grades, batch: Batch, policy: Policy, cfg: GRPOConfig) -> Tensor:
    """Rewards [P, G] after shaping, as they are compared."""
    rewards = grades.rewards
    if cfg.similarity != "none":
        completions = batch if batch.rollout_indices is None else batch.select_rows(slice(rewards.numel()))
        chunks = completions.split_into_chunks(cfg.micro_batch)
        states = [policy.embed(micro_batch, cfg.similarity_layer).cpu() for micro_batch in chunks]
        rewards = shaping.SIMILARITY_SHAPERS[cfg.similarity](rewards, torch.cat(states).view(*rewards.shape, -1), cfg)
    if cfg.overlong_cache:
        rewards = shaping.penalize_overlong(rewards, batch.compute_rollout_lengths().view_as(rewards), cfg)
    return kl.subtract_kl_from_rewards(rewards, *get_charged_kl(batch), cfg)


def store_group_advantages(groups: Sequence[Group], advantages: Tensor) -> list[Group]:
    return [replace(g, advantages=tuple(row)) for g, row in zip(groups, advantages.tolist(), strict=True)]


def add_old_and_reference_logprobs(
    batch: Batch, policy: Policy, reference: Reference | None, runtime: Runtime, cfg: GRPOConfig
) -> Batch:
    """Batch with old_logprobs, ref_logprobs, kl and acts, each only where the settings need it."""
    charged = bool(cfg.kl_coef) and cfg.kl_in != "loss"
    if reference is not None and cfg.kl_coef and cfg.kl != "exact":
        batch = replace(batch, ref_logprobs=score_without_gradient(batch, reference, runtime, cfg).logprobs)
    if not (cfg.is_off_policy or charged or cfg.entropy_share < 1):
        return batch
    scores = score_without_gradient(batch, policy, runtime, cfg)
    batch = replace(batch, old_logprobs=scores.logprobs)
    if charged:
        batch = replace(batch, kl=estimate_kl(scores, batch.ref_logprobs, scores.logprobs, cfg))
    if cfg.entropy_share < 1:
        entropies = torch.cat(runtime.gather([scores.entropy[batch.action_mask].cpu()]))
        least = shaping.find_entropy_threshold(entropies, cfg.entropy_share).to(scores.entropy)
        batch = replace(batch, loss_mask=batch.action_mask & (scores.entropy >= least))
    return batch


@torch.no_grad()
def score_without_gradient(batch: Batch, policy: Policy | Reference, runtime: Runtime, cfg: GRPOConfig) -> Scores:
    """Scores of a batch without gradient, computed a micro-batch at a time."""

    def scored(rows: int) -> list[Scores]:
        return [policy.score(micro_batch) for micro_batch in batch.split_into_chunks(rows)]

    parts = runtime.compute_within_memory(scored, cfg.micro_batch or len(batch))
    logprobs, entropy, exact_kl = zip(*parts, strict=True)
    width = batch.response_mask.shape[1]
    return Scores(
        concat_token_rows(logprobs, width),
        concat_token_rows(entropy, width),
        None if exact_kl[0] is None else concat_token_rows(exact_kl, width),
    )


def append_replayed_batches(state: TrainingState, step: int, batch: Batch, cfg: GRPOConfig) -> Batch:
    """This step's batch joined with those of earlier steps that are less than cfg.max_staleness steps old."""
    fresh = [(then, kept) for then, kept in state.replay_buffer if step - then < cfg.max_staleness]
    state.replay_buffer = [(step, batch), *fresh] if cfg.max_staleness > 1 else []
    return concat_batches([batch, *(kept.mark_as_replayed() for _, kept in fresh)])


def finish_step(
    state: TrainingState,
    step: int,
    reference: Reference | None,
    policy: Policy,
    metrics: dict[str, float],
    cfg: GRPOConfig,
) -> None:
    state.step = step + 1
    if reference is None or not cfg.kl_coef:
        return
    metrics["kl_coef"] = cfg.kl_coef
    state.kl_coef = kl.adapt_kl_coef(cfg.kl_coef, metrics["kl"], cfg)
    if cfg.reference_every and state.step % cfg.reference_every == 0:
        reference.update_weights(policy.weights(), cfg.reference_decay)

"""Group Relative Policy Optimization: generate, reward, compare, update.

This is the algorithm of DeepSeekMath (arXiv 2402.03300, section 4.1) and of its variants. A variant is a choice on four
axes of pure functions: how a completion compares with its siblings (advantages.py), what is maximized for a token and
how tokens add up (objectives.py), how the policy is kept close to a reference (kl.py), and how rewards and tokens are
adjusted beforehand (shaping.py). The loop is the same for all. docs/reference/variants.md lists papers with their
settings.

Three things are left out on purpose: a value network, since the mean of the group is the baseline; token-level rewards,
since a completion has one reward; and models, process groups and files, which are accessed through the protocols in
protocols.py and types.py.

Shapes: P prompts, G completions of each, B = P * G rows in the order p * G + g, T response tokens. In every [B, T]
tensor, x[b, t] belongs to token t of response b. Rewards and advantages are float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.algorithm.advantages import Grades, compute_advantages_from_grades
from pellucid.algorithm.batch import (
    Batch,
    append_demonstrations,
    collate,
    collect_grades,
    concat_batches,
    concat_token_rows,
    find_tokens,
)
from pellucid.algorithm.kl import (
    KL_ESTIMATORS,
    adapt_kl_coef,
    compute_kl_cost,
    compute_kl_metrics,
    compute_kl_penalty,
    subtract_kl_from_rewards,
)
from pellucid.algorithm.metrics import (
    MetricTotals,
    StageClock,
    compute_advantage_effects,
    compute_kl_loss_effect,
    compute_kl_penalty_effect,
)
from pellucid.algorithm.objectives import (
    AGGREGATES,
    ObjectiveInputs,
    compute_clip_metrics,
    compute_clip_ranges_by_difficulty,
    get_objective_function,
)
from pellucid.algorithm.protocols import Policy, Reference, Runtime, Scores
from pellucid.algorithm.rollouts import RolloutCollector, Rollouts
from pellucid.algorithm.settings import GRPOConfig
from pellucid.algorithm.shaping import (
    SIMILARITY_SHAPERS,
    compute_importance_weights,
    find_corrected_tokens,
    find_entropy_threshold,
    penalize_overlong,
)
from pellucid.algorithm.update_size import UpdateProbe, choose_probe_rows, compute_update_kl
from pellucid.types import Group, Sampler, Sampling, Task


@dataclass
class TrainingState:
    """What one step passes on to the next, besides weights and optimizer state. Checkpoints contain it."""

    step: int = 0
    """The number of finished steps."""
    kl_coef: float | None = None
    """The kl_coef of the next step, adapted to cfg.kl_target. None before the first step means cfg.kl_coef."""
    replay_buffer: list[tuple[int, Batch]] = field(default_factory=list)
    """Pairs (step, batch), newest first, of earlier rollouts that later steps train on again."""
    next_rollouts: Rollouts | None = None
    """The rollouts of the next step, if they are generated one step ahead (async_grpo.py)."""


class StepResult(NamedTuple):
    """One finished step."""

    step: int
    """The number of finished steps."""
    metrics: dict[str, float]
    groups: list[Group]
    """The graded groups of all processes, with advantages."""


# ---------------------------------------------------------------- the training loop


def train(
    task: Task,
    sampler: Sampler,
    policy: Policy,
    runtime: Runtime,
    cfg: GRPOConfig,
    reference: Reference | None = None,
    state: TrainingState | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    collector: RolloutCollector | None = None,
) -> Iterator[StepResult]:
    """Train a policy in place and yield the result of each step. Between steps the caller may evaluate, save or stop.

    Args:
        sampler: Receives the weights of the policy after each step.
        reference: The model to which the KL is measured; required if cfg.kl_coef > 0.
        state: The state after the last finished step, updated in place. None starts from step 0.
        sampling: How completions are sampled. Each step replaces `n` and `seed`.
        collector: Generates the rollouts. With None, each step first generates its own.
    """
    state = state or TrainingState()
    state.kl_coef = cfg.kl_coef if state.kl_coef is None else state.kl_coef
    collector = collector or RolloutCollector(task, sampler, sampling, runtime)
    sampler.sync(policy, state.step)
    for step in range(state.step, cfg.steps):
        clock = StageClock()
        cfg = replace(cfg, kl_coef=state.kl_coef)
        # 1. Generate: G completions of each prompt. 2. Reward: the task grades each completion.
        groups, sampling_metrics = collector.collect(step, cfg, clock)
        # 3. Advantage: how much better each completion is than its siblings.
        batch = add_old_and_reference_logprobs(collate(groups), policy, reference, runtime, cfg)
        all_groups = runtime.gather(groups)
        grades = collect_grades(all_groups)
        advantages, advantage_metrics = compute_advantages(grades, batch, policy, runtime, cfg)  # [P, G]
        batch = attach_advantages(batch, grades, advantages, runtime, cfg)
        batch = append_replayed_batches(state, step, batch, cfg)
        clock.record_lap("score")
        # 4. Update: make the better completions more likely, without leaving the trust region.
        metrics = update_and_measure(policy, batch, runtime, cfg)
        collector.sync_sampler(policy, step + 1, clock)
        finish_step(state, step, reference, policy, metrics, cfg)
        metrics |= sampling_metrics | advantage_metrics | clock.get_times()
        yield StepResult(state.step, metrics, store_group_advantages(all_groups, runtime.gather(list(advantages))))


def finish_step(
    state: TrainingState,
    step: int,
    reference: Reference | None,
    policy: Policy,
    metrics: dict[str, float],
    cfg: GRPOConfig,
) -> None:
    """Increment the step, adapt kl_coef to the measured KL, and update the reference if it is due."""
    state.step = step + 1
    if reference is None or not cfg.kl_coef:
        return
    metrics["kl_coef"] = cfg.kl_coef
    state.kl_coef = adapt_kl_coef(cfg.kl_coef, metrics["kl"], cfg)
    if cfg.reference_every and state.step % cfg.reference_every == 0:
        reference.update_weights(policy.weights(), cfg.reference_decay)


def store_group_advantages(groups: Sequence[Group], advantages: Iterable[Tensor]) -> list[Group]:
    return [replace(g, advantages=tuple(row.tolist())) for g, row in zip(groups, advantages, strict=True)]


# ---------------------------------------------------------------- 3. Advantage


def add_old_and_reference_logprobs(
    batch: Batch, policy: Policy, reference: Reference | None, runtime: Runtime, cfg: GRPOConfig
) -> Batch:
    """Add tensors that stay fixed in the update, if settings need them: old_logprobs, ref_logprobs, kl, loss_mask."""
    is_kl_in_reward = bool(cfg.kl_coef) and cfg.kl_in != "loss"
    if reference is not None and cfg.kl_coef and cfg.kl != "exact":
        batch = replace(batch, ref_logprobs=score_without_gradient(batch, reference, runtime, cfg).logprobs)
    if not (cfg.is_off_policy or is_kl_in_reward or cfg.entropy_share < 1):
        return batch
    scores = score_without_gradient(batch, policy, runtime, cfg)
    batch = replace(batch, old_logprobs=scores.logprobs)
    if is_kl_in_reward:
        batch = replace(batch, kl=estimate_kl(scores, batch.ref_logprobs, scores.logprobs, cfg))
    if cfg.entropy_share < 1:
        entropies = torch.cat(runtime.gather([scores.entropy[batch.action_mask].cpu()]))
        threshold = find_entropy_threshold(entropies, cfg.entropy_share).to(scores.entropy)
        batch = replace(batch, loss_mask=batch.action_mask & (scores.entropy >= threshold))
    return batch


@torch.no_grad()
def score_without_gradient(batch: Batch, model: Policy | Reference, runtime: Runtime, cfg: GRPOConfig) -> Scores:
    """Score a batch one micro-batch at a time."""

    def score_chunks(rows: int) -> list[Scores]:
        return [model.score(micro_batch) for micro_batch in batch.split_into_chunks(rows)]

    parts = runtime.compute_within_memory(score_chunks, cfg.micro_batch_rows or len(batch))
    logprobs, entropy, exact_kl = zip(*parts, strict=True)
    width = batch.response_mask.shape[1]
    return Scores(
        concat_token_rows(logprobs, width),
        concat_token_rows(entropy, width),
        None if exact_kl[0] is None else concat_token_rows(exact_kl, width),
    )


def compute_advantages(
    grades: Grades, batch: Batch, policy: Policy, runtime: Runtime, cfg: GRPOConfig
) -> tuple[Tensor, dict[str, float]]:
    """Compare completions with their siblings; some advantages also compare the groups of all processes.

    Args:
        grades: The grades of the groups of all processes.
        batch: The rows of this process's groups; with `kl` if it is subtracted from rewards or advantages.
        policy: Embeds the responses if cfg.similarity needs embeddings.

    Returns:
        The advantages of this process's groups, [P, G] float64, and the metrics `effect/*` and `reward/kl`.
    """
    own_rewards = select_own_groups(grades.rewards, runtime)
    shaped = torch.stack(runtime.gather(list(shape_rewards(own_rewards, batch, policy, cfg))))
    all_advantages = compute_advantages_from_grades(grades, shaped, cfg)
    charged_kl, mask = get_charged_kl(batch)
    penalty = compute_kl_penalty(charged_kl, mask, cfg)
    metrics = compute_advantage_effects(grades, shaped, all_advantages, cfg)
    metrics |= compute_kl_penalty_effect(penalty, runtime.gather)
    metrics |= compute_kl_cost(charged_kl, mask, cfg, runtime.gather)
    return select_own_groups(all_advantages, runtime) - penalty, metrics


def select_own_groups(x: Tensor, runtime: Runtime) -> Tensor:
    """Select the rows of this process's groups from those of all processes."""
    return torch.stack(list(runtime.shard(list(x))))


def shape_rewards(rewards: Tensor, batch: Batch, policy: Policy, cfg: GRPOConfig) -> Tensor:
    """Return the rewards [P, G] after similarity shaping, the length penalty and the KL penalty on the raw reward."""
    if cfg.similarity != "none":
        # `collate` puts branches after all rollouts, so the first rows are the rollouts.
        completions = batch if batch.rollout_indices is None else batch.select_rows(slice(rewards.numel()))
        chunks = completions.split_into_chunks(cfg.micro_batch_rows)
        states = torch.cat([policy.embed(chunk, cfg.similarity_layer).cpu() for chunk in chunks])
        rewards = SIMILARITY_SHAPERS[cfg.similarity](rewards, states.view(*rewards.shape, -1), cfg)
    if cfg.overlong_cache:
        rewards = penalize_overlong(rewards, batch.compute_rollout_lengths().view_as(rewards), cfg)
    return subtract_kl_from_rewards(rewards, *get_charged_kl(batch), cfg)


def get_charged_kl(batch: Batch) -> tuple[Tensor | None, Tensor]:
    """Return the KL that is subtracted from rewards or advantages, or None, and the mask of its valid values."""
    return (None, batch.action_mask) if batch.kl is None else batch.sum_by_rollout(batch.kl)


def attach_advantages(batch: Batch, grades: Grades, advantages: Tensor, runtime: Runtime, cfg: GRPOConfig) -> Batch:
    """Add advantages [B, T], and clip_low and clip_high [B] where they depend on the difficulty of the prompt.

    Sequences of one rollout are moved next to each other, so that no minibatch splits a rollout.
    """
    values = {"advantages": advantages}
    if cfg.clip_difficulty or cfg.clip_difficulty_low:
        own_correct = select_own_groups(grades.correct, runtime)
        values |= compute_clip_ranges_by_difficulty(own_correct, grades.correct.nanmean(), cfg)
    rows = {name: x.flatten().to(batch.sampler_logprobs) for name, x in values.items()}  # [B]
    if batch.rollout_indices is not None:
        rollouts, order = batch.rollout_indices.sort(stable=True)
        batch, rows = batch.select_rows(order), {name: x[rollouts] for name, x in rows.items()}
    return replace(batch, **rows | {"advantages": batch.broadcast_to_tokens(rows["advantages"])})


def append_replayed_batches(state: TrainingState, step: int, batch: Batch, cfg: GRPOConfig) -> Batch:
    """Append the batches of earlier steps that are less than cfg.max_staleness steps old."""
    replayed = [(then, old) for then, old in state.replay_buffer if step - then < cfg.max_staleness]
    state.replay_buffer = [(step, batch), *replayed] if cfg.max_staleness > 1 else []
    return concat_batches([batch, *(old.mark_as_replayed() for _, old in replayed)])


# ---------------------------------------------------------------- 4. Update


def update_and_measure(policy: Policy, batch: Batch, runtime: Runtime, cfg: GRPOConfig) -> dict[str, float]:
    """Update the policy, measure how far it moved (`update/kl`), and adapt the learning rate to that."""
    rows, counted = choose_probe_rows(batch, cfg.group_size, runtime, cfg.micro_batch_rows)
    probe = UpdateProbe(rows, score_without_gradient(rows, policy, runtime, cfg).logprobs, counted)
    metrics = update_policy(policy, batch, runtime, cfg)
    update_kl = compute_update_kl(probe, score_without_gradient(rows, policy, runtime, cfg).logprobs, runtime)
    runtime.adapt_lr(update_kl)
    return {**metrics, "update/kl": update_kl}


def update_policy(policy: Policy, batch: Batch, runtime: Runtime, cfg: GRPOConfig) -> dict[str, float]:
    """Take cfg.inner_steps optimizer steps on a batch. Return the mean of each metric over the trained tokens."""
    totals = MetricTotals()
    for _ in range(cfg.epochs):
        for minibatch in batch.split_into_minibatches(cfg.minibatches):
            weighted = attach_token_weights(minibatch, runtime, cfg)
            accumulate = partial(accumulate_gradients, policy, weighted, totals, runtime, cfg)
            totals = runtime.compute_within_memory(accumulate, cfg.micro_batch_rows or len(minibatch))
            totals.step_metrics.append(runtime.step())
    return totals.compute_means(runtime.gather)


def accumulate_gradients(
    policy: Policy, batch: Batch, totals: MetricTotals, runtime: Runtime, cfg: GRPOConfig, rows: int
) -> MetricTotals:
    """Add up the gradients of one optimizer step, in micro-batches of `rows` rows. Return new totals with its metrics.

    The old ones are left as they are, so that the step can be repeated if memory runs out.
    """
    totals = deepcopy(totals)
    for micro_batch in runtime.accumulate(batch.split_into_chunks(rows)):
        loss, metrics = compute_loss(policy.score(micro_batch), micro_batch, cfg)
        runtime.backward(loss)
        totals.add_tokens(metrics)
    return totals


def attach_token_weights(batch: Batch, runtime: Runtime, cfg: GRPOConfig) -> Batch:
    """Add token_weights, drop rows without gradient, and append demonstrations where cfg.prefix_coef is set."""
    weighted = replace(batch, token_weights=compute_token_weights(batch, runtime, cfg))
    weighted = drop_rows_without_gradient(weighted, cfg)
    if not cfg.prefix_coef:
        return weighted
    extended = append_demonstrations(weighted, batch.prompt_indices.unique())
    assert extended.likelihood_weights is not None
    tokens = runtime.sum(extended.likelihood_weights.sum())
    return replace(extended, likelihood_weights=cfg.prefix_coef * extended.likelihood_weights / tokens.clamp(min=1))


def compute_token_weights(batch: Batch, runtime: Runtime, cfg: GRPOConfig) -> Tensor:
    """Compute the weight [B, T] of each token in the loss, from counts over all processes; 0 in filtered responses.

    Since the counts are global, neither micro-batches nor the number of processes change the gradient.
    """
    mask = batch.action_mask & batch.finished[:, None] if cfg.overlong_filter else batch.action_mask
    count, lengths = batch.count_rollouts(mask)
    rollouts, tokens = runtime.sum(count), runtime.sum(mask.sum())
    return AGGREGATES[cfg.aggregate](mask, rollouts.clamp(min=1), tokens.clamp(min=1), cfg, lengths)


def drop_rows_without_gradient(batch: Batch, cfg: GRPOConfig) -> Batch:
    """Drop rows without gradient, as in zero-variance groups. Keep at least one, since every process takes the step."""
    assert batch.advantages is not None and batch.token_weights is not None
    has_gradient = batch.token_weights.any(-1)
    if not (cfg.entropy_coef or (cfg.kl_coef and cfg.kl_in == "loss")):
        has_gradient = has_gradient & (batch.advantages != 0).any(-1)
    if bool(has_gradient.all()):
        return batch
    return batch.select_rows(has_gradient if bool(has_gradient.any()) else slice(1))


def compute_loss(scores: Scores, batch: Batch, cfg: GRPOConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of a micro-batch. The sum over micro-batches and processes is the loss of the optimizer step.

    With w the importance weight of a token, the loss is minus the sum over tokens of

        token_weights * (w * objective - kl_coef * KL + entropy_coef * entropy) + likelihood_weights * logprobs

    Returns:
        The loss, and the metrics: each is a tensor [N] over the N tokens to which it applies.
    """
    logprobs, entropy, exact_kl = scores
    device = logprobs.device
    sampled_tokens, response_tokens = (find_tokens(x, device) for x in (batch.action_mask, batch.response_mask))
    learned = None if batch.likelihood_weights is None else find_tokens(batch.likelihood_weights != 0, device)
    batch = batch.copy_loss_inputs(device)
    assert batch.token_weights is not None
    mask, detached = batch.action_mask, logprobs.detach()
    tokens = make_objective_inputs(logprobs, batch)
    importance_weights = compute_importance_weights(tokens.old_logprobs, batch.sampler_logprobs, mask, cfg)
    output = get_objective_function(cfg.objective)(tokens, cfg)
    value = importance_weights * output.value  # [B, T]
    value = value if batch.loss_mask is None else value * batch.loss_mask
    metrics = compute_clip_metrics(output, mask)
    metrics |= {"entropy": entropy.detach(), "sampler/gap_mean": (batch.sampler_logprobs - tokens.old_logprobs).abs()}
    if cfg.correction != "none":
        metrics["sampler/corrected"] = find_corrected_tokens(importance_weights, cfg)
    if cfg.kl_coef:
        metrics |= compute_kl_metrics(detached, batch.ref_logprobs, exact_kl)
        metrics |= compute_kl_loss_effect(detached, batch.ref_logprobs, exact_kl, cfg)
        if cfg.kl_in == "loss":
            value = value - cfg.kl_coef * estimate_kl(scores, batch.ref_logprobs, tokens.old_logprobs, cfg)
    if cfg.entropy_coef:
        value = value + cfg.entropy_coef * entropy
    losses = -batch.token_weights * value.masked_fill(~mask, 0.0)  # outside the mask, values may be infinite
    metrics = {name: x.take(sampled_tokens) for name, x in metrics.items()}
    if batch.likelihood_weights is not None and learned is not None:
        losses = losses - batch.likelihood_weights * logprobs.masked_fill(batch.likelihood_weights == 0, 0.0)
        metrics["prefix/nll"] = -detached.take(learned)
    return losses.sum(), metrics | {"loss": losses.detach().take(response_tokens)}


def make_objective_inputs(logprobs: Tensor, batch: Batch) -> ObjectiveInputs:
    """Make the inputs of the objective. Without old_logprobs, the policy has not changed, and the ratio is 1."""
    assert batch.advantages is not None
    old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    clips = (None if x is None else x[:, None] for x in (batch.clip_high, batch.clip_low))  # [B, 1]
    return ObjectiveInputs(logprobs, old_logprobs, batch.advantages.to(logprobs), batch.action_mask, *clips)


def estimate_kl(scores: Scores, ref_logprobs: Tensor | None, old_logprobs: Tensor, cfg: GRPOConfig) -> Tensor:
    """KL(policy, reference) of each token by the estimator cfg.kl. [B, T]"""
    if scores.kl is not None:
        return scores.kl
    assert ref_logprobs is not None
    return KL_ESTIMATORS[cfg.kl](scores.logprobs, ref_logprobs, old_logprobs)

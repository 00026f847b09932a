"""Tests for the training loop and the update: identities, invariances, and state carried between steps.

The mathematics is tested in test_expectations.py, test_advantages.py, test_objectives.py and test_shaping.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from conftest import EOS, CountDigits, OneProcessRuntime, make_policy
from pellucid.algorithm import grpo, kl
from pellucid.algorithm.advantages import ADVANTAGES
from pellucid.algorithm.batch import collate, collect_grades, collect_task_rewards, concat_batches
from pellucid.algorithm.grpo import Scores, TrainingState, compute_loss, train, update_policy
from pellucid.algorithm.metrics import StageClock
from pellucid.algorithm.objectives import OBJECTIVES
from pellucid.algorithm.rollouts import collect_rollouts, count_missing_prompts
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed.runtime import Runtime
from pellucid.reporting.loggers import compute_group_metrics
from pellucid.rollout.native import NativeSampler
from pellucid.tasks.curriculum import Curriculum
from pellucid.types import ROUND_STRIDE, Completion, Group, Prompt, Reward, Sampling, UserError, grade_groups
from small_policy import batch_of

F64 = torch.float64
AXES = [{"aggregate": "token"}, {"aggregate": "sequence"}, {"aggregate": "constant"}]


def rollouts(policy, size=6, n=4, max_tokens=24):
    sampling = Sampling(size, max_tokens=max_tokens, seed="0/0")
    groups = grade_groups(CountDigits(), NativeSampler(policy=policy).generate(CountDigits().sample(0, n), sampling))
    batch = collate(groups)
    assert not bool(batch.response_mask.all()), "completions must differ in length"
    return replace(
        batch, advantages=batch.broadcast_to_tokens(ADVANTAGES["grpo"](collect_grades(groups), GRPOConfig()).flatten())
    )


def gradients_of(policy, batch, cfg):
    runtime = OneProcessRuntime(policy)
    metrics = update_policy(policy, batch, runtime, cfg)
    return runtime.gradients, metrics


def distance(one, other):
    norm = math.sqrt(sum(float(g.square().sum()) for g in one.values()))
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in one)) / norm


# ---------------------------------------------------------------- the update: identities and invariances


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_has_the_reinforce_gradient_on_policy(objective):
    """The ratio is the exp of a difference, so its gradient raises the log-prob if the advantage is positive."""
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    naive, _ = gradients_of(policy, batch, GRPOConfig(objective="reinforce"))
    this, metrics = gradients_of(policy, batch, GRPOConfig(objective=objective))
    assert distance(naive, this) < 1e-12
    assert metrics["grad_norm"] > 1e-3
    assert metrics["ratio/mean"] == 1.0


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_the_gradient_does_not_depend_on_the_micro_batch(axis, micro_batch):
    policy = make_policy(dtype=F64)
    batch = replace(rollouts(policy), ref_logprobs=None)
    cfg = GRPOConfig(**axis, constant_length=24, entropy_coef=0.1)
    whole, metrics = gradients_of(policy, batch, cfg)
    split, split_metrics = gradients_of(policy, batch, replace(cfg, micro_batch=micro_batch))
    assert distance(whole, split) < 1e-10
    assert split_metrics == pytest.approx(metrics, rel=1e-9)


def widened(batch, extra):
    """Return the same rollouts with `extra` columns of junk on the right."""

    def pad(x):
        if not isinstance(x, torch.Tensor) or x.dim() == 1:
            return x
        rubbish = torch.full((len(x), extra), EOS, dtype=x.dtype) if x.dtype != torch.bool else None
        return torch.cat([x, torch.zeros(len(x), extra, dtype=torch.bool) if rubbish is None else rubbish], 1)

    return replace(batch, **{name: pad(getattr(batch, name)) for name in batch.__dataclass_fields__})


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("extra", [1, 7])
def test_the_gradient_does_not_depend_on_padding(axis, extra):
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    cfg = GRPOConfig(**axis, constant_length=24)
    plain, metrics = gradients_of(policy, batch, cfg)
    padded, padded_metrics = gradients_of(policy, widened(batch, extra), cfg)
    assert distance(plain, padded) < 1e-12
    assert padded_metrics == pytest.approx(metrics, rel=1e-9)


def test_eos_token_is_trained_and_padding_is_not():
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    row, t = (batch.response_ids == EOS).logical_and(batch.response_mask).nonzero()[0].tolist()
    leaf = policy.score(batch).logprobs.detach().requires_grad_()
    weights = grpo.compute_token_weights(batch, OneProcessRuntime(), GRPOConfig())
    loss, _ = compute_loss(Scores(leaf, torch.zeros_like(leaf)), replace(batch, token_weights=weights), GRPOConfig())
    gradient = torch.autograd.grad(loss, leaf)[0]
    assert gradient[row, t] != 0.0
    assert bool((gradient[~batch.response_mask] == 0.0).all())


def test_ratio_is_one_in_bf16_when_nothing_has_changed():
    """Logits are reduced in fp32 both for the old log-probs (without gradient) and for the new ones (with gradient).

    The new ones are scored in chunks: a matrix product with other rows may round a row differently, by 4e-4 on average.
    """
    policy = make_policy(dtype=torch.bfloat16)
    cfg = GRPOConfig(epochs=2, micro_batch=16)
    batch = grpo.add_old_and_reference_logprobs(rollouts(policy), policy, None, OneProcessRuntime(), cfg)
    now = torch.cat([policy.score(part).logprobs[part.response_mask] for part in batch.split_into_chunks(8)])
    ratio = (now.detach() - batch.old_logprobs[batch.response_mask]).exp()
    assert (ratio - 1).abs().max() < 1e-3
    rounded = (now.detach().bfloat16().float() - batch.old_logprobs[batch.response_mask]).exp()
    assert (rounded - 1).abs().max() > 2e-3, "what bf16 log-probs would do"


def test_response_that_stops_at_once_is_trained():
    policy = make_policy(dtype=F64)
    group = Group(
        Prompt("p", "1+1?"),
        (1, 2, 3),
        tuple(Completion(ids, (-1.0,) * len(ids), "", True) for ids in ((EOS,), (1, EOS))),
    )
    batch = collate([group])
    batch = replace(batch, advantages=batch.broadcast_to_tokens(torch.tensor([1.0, 0.0], dtype=F64)))
    before = policy.score(batch).logprobs[0, 0].item()
    update_policy(policy, batch, OneProcessRuntime(policy, lr=0.1), GRPOConfig(group_size=2))
    assert policy.score(batch).logprobs[0, 0].item() > before + 1e-3


def test_clamped_kl_exponent_is_counted_as_overflow():
    far = kl.compute_kl_metrics(torch.tensor([[-1.0, -200.0]]), torch.tensor([[-2.0, -1.0]]))
    assert far["kl/overflow"].tolist() == [[False, True]]
    assert bool(far["kl"].isfinite().all())


def test_the_loss_is_zero_on_policy_while_the_gradient_is_not():
    policy = make_policy(dtype=F64)
    _, metrics = gradients_of(policy, rollouts(policy), GRPOConfig(aggregate="sequence"))
    assert abs(metrics["loss"]) < 1e-8  # the weights are fp32
    assert metrics["grad_norm"] > 1e-3


def test_the_entropy_bonus_raises_entropy():
    policy = make_policy(dtype=F64, entropy_grad=True)
    batch = rollouts(policy)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    before = update_policy(policy, batch, OneProcessRuntime(policy, lr=0.05), GRPOConfig(entropy_coef=1.0))["entropy"]
    after = update_policy(policy, batch, OneProcessRuntime(policy), GRPOConfig(entropy_coef=1.0))["entropy"]
    assert after > before + 1e-4


@pytest.mark.parametrize("axis", AXES)
def test_rows_without_advantage_are_left_out_and_change_nothing(axis):
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    advantages = batch.advantages.clone()
    advantages[6:18] = 0.0
    batch = replace(batch, advantages=advantages)
    cfg = GRPOConfig(**axis, constant_length=24)
    weighted = replace(batch, token_weights=grpo.compute_token_weights(batch, OneProcessRuntime(), cfg))
    assert len(grpo.drop_rows_without_gradient(weighted, cfg)) == int((advantages != 0).any(-1).sum()) < len(batch)
    skipped, _ = gradients_of(policy, batch, cfg)
    # A negligible entropy bonus makes the update compute every row.
    computed, _ = gradients_of(policy, batch, replace(cfg, entropy_coef=1e-300))
    assert distance(skipped, computed) < 1e-10


def test_step_is_taken_even_if_all_groups_are_dead():
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    _, metrics = gradients_of(policy, replace(batch, advantages=torch.zeros_like(batch.advantages)), GRPOConfig())
    assert metrics["grad_norm"] == 0.0
    assert math.isfinite(metrics["entropy"])


def test_sampler_gap_metrics_measure_injected_gaps():
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    batch.sampler_logprobs[3, 0] += 0.25
    batch.sampler_logprobs[7, 0] -= 0.5
    metrics = gradients_of(policy, batch, GRPOConfig(micro_batch=4, entropy_coef=1e-300))[1]
    assert metrics["sampler/gap_max"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["sampler/gap_mean"] == pytest.approx(0.75 / float(batch.response_mask.sum()), abs=1e-5)


def test_gradient_does_not_depend_on_row_order():
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    order = torch.randperm(len(batch))
    for axis in AXES:
        cfg = GRPOConfig(**axis, constant_length=24)
        assert (
            distance(gradients_of(policy, batch, cfg)[0], gradients_of(policy, batch.select_rows(order), cfg)[0])
            < 1e-10
        )


def test_prompt_may_be_stored_once_or_with_every_row():
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    repeated = replace(
        batch,
        prompt_ids=tuple(batch.prompt_ids[p] for p in batch.prompt_indices.tolist()),
        prompt_indices=torch.arange(len(batch)),
    )
    one, other = (gradients_of(policy, b, GRPOConfig())[0] for b in (batch, repeated))
    assert distance(one, other) < 1e-12


class Half(OneProcessRuntime):
    """One of two processes, whose sums cover both."""

    def __init__(self, policy, other):
        super().__init__(policy)
        self.other = other

    def sum(self, x):
        return x + self.other.pop(0)


@pytest.mark.parametrize("axis", AXES)
def test_gradients_of_two_processes_add_up_to_one_process(axis):
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    cfg = GRPOConfig(**axis, constant_length=24)
    whole, _ = gradients_of(policy, batch, cfg)
    halves = [batch.select_rows(slice(0, 12)), batch.select_rows(slice(12, 24))]
    parts = []
    for mine, other in (halves, halves[::-1]):
        runtime = Half(policy, [torch.tensor(12), other.response_mask.sum()])
        update_policy(policy, mine, runtime, cfg)
        parts.append(runtime.gradients)
    assert distance(whole, {name: parts[0][name] + parts[1][name] for name in whole}) < 1e-7  # fp32 weights


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("extra", [{}, {"entropy_coef": 0.1}])
def test_filtered_completions_equal_removed_completions(axis, extra):
    """overlong_filter removes a completion from the numerator, the denominator and the metrics."""
    policy = make_policy(dtype=F64, entropy_grad=True)
    batch = rollouts(policy, max_tokens=10)
    assert 0 < int(batch.finished.sum()) < len(batch)
    cfg = GRPOConfig(**axis, **extra, constant_length=24, overlong_filter=True)
    masked, metrics = gradients_of(policy, batch, cfg)
    removed, fewer = gradients_of(policy, batch.select_rows(batch.finished), replace(cfg, overlong_filter=False))
    assert distance(masked, removed) < 1e-10
    assert metrics == pytest.approx(fewer, rel=1e-9)
    assert distance(masked, gradients_of(policy, batch, replace(cfg, overlong_filter=False))[0]) > 1e-3


def test_step_with_everything_filtered_moves_nothing():
    policy = make_policy(dtype=F64)
    batch = replace(rollouts(policy), finished=torch.zeros(24, dtype=torch.bool))
    _, metrics = gradients_of(policy, batch, GRPOConfig(overlong_filter=True))
    assert metrics["grad_norm"] == 0.0


def test_only_tokens_of_high_entropy_get_the_objectives_gradient():
    policy = make_policy(dtype=F64)
    cfg = GRPOConfig(entropy_share=0.2, micro_batch=5)
    batch = rollouts(policy)
    fixed = grpo.add_old_and_reference_logprobs(batch, policy, None, OneProcessRuntime(), cfg)
    entropy = policy.score(batch).entropy.detach()
    chosen = fixed.loss_mask
    assert int(chosen.sum()) == round(0.2 * int(batch.response_mask.sum()))
    assert entropy[chosen].min() >= entropy[batch.response_mask & ~chosen].max()
    leaf = policy.score(batch).logprobs.detach().requires_grad_()
    weighted = replace(fixed, token_weights=grpo.compute_token_weights(batch, OneProcessRuntime(), cfg))
    loss, _ = compute_loss(Scores(leaf, entropy), weighted, cfg)
    moving = torch.autograd.grad(loss, leaf)[0] != 0
    assert torch.equal(moving, chosen & (batch.advantages != 0))
    assert float(weighted.token_weights.sum()) == pytest.approx(1.0), "the other tokens still count in the denominator"


def test_sampler_correction_scales_the_gradient_and_is_counted():
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    batch.sampler_logprobs[:] = policy.score(batch).logprobs.detach() - math.log(1.5)
    plain, _ = gradients_of(policy, batch, GRPOConfig())
    corrected, metrics = gradients_of(policy, batch, GRPOConfig(correction="token", correction_cap=1.25))
    assert distance({name: 1.25 * g for name, g in plain.items()}, corrected) < 1e-6
    assert metrics["sampler/corrected"] == 1.0
    assert "sampler/corrected" not in gradients_of(policy, batch, GRPOConfig())[1]


def test_metrics_compare_the_right_pair_of_policies():
    """One token has probability .5 under pi, .25 under the old policy, .2 in the sampler and .8 under the reference.

    k3 is .8 / .5 - 1 - log(.8 / .5).
    """
    pi, old, sampler, ref = (torch.tensor([[p]], dtype=F64).log() for p in (0.5, 0.25, 0.2, 0.8))
    cfg = GRPOConfig(epochs=2, kl="k2", kl_in="loss", kl_coef=0.1)
    ones = torch.ones(1, 1, dtype=F64)
    batch = replace(
        batch_of(ones.bool(), old_logprobs=old, ref_logprobs=ref, advantages=ones, token_weights=ones),
        sampler_logprobs=sampler,
    )
    _, metrics = compute_loss(Scores(pi, torch.zeros_like(pi)), batch, cfg)
    assert float(metrics["ratio/mean"]) == pytest.approx(2.0)
    assert float(metrics["sampler/gap_mean"]) == pytest.approx(math.log(1.25))
    assert float(metrics["kl"]) == pytest.approx(0.6 - math.log(1.6))
    measured = compute_loss(Scores(pi, torch.zeros_like(pi), torch.full_like(pi, 0.3)), batch, replace(cfg, kl="exact"))
    assert float(measured[1]["kl"]) == pytest.approx(0.3)


# ---------------------------------------------------------------- several inner steps


def test_off_policy_steps_read_the_old_policy():
    """They do not use the reference, which is so far away that every token would be clipped at once."""
    policy, reference = make_policy(dtype=F64), make_policy(dtype=F64, seed=3)
    cfg = GRPOConfig(epochs=3, clip_low=0.01, clip_high=0.01, kl="k3", kl_in="loss", kl_coef=1e-6)
    batch = grpo.add_old_and_reference_logprobs(rollouts(policy), policy, reference, OneProcessRuntime(), cfg)
    still = update_policy(policy, batch, OneProcessRuntime(policy), replace(cfg, epochs=1))
    assert still["ratio/mean"] == 1.0
    assert still["kl"] > 0.1
    metrics = update_policy(policy, batch, OneProcessRuntime(policy, lr=0.5), cfg)
    assert metrics["clip/low"] + metrics["clip/high"] > 0.05


def test_minibatches_are_whole_groups_and_each_takes_a_step():
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    batch = replace(batch, advantages=torch.ones_like(batch.advantages))
    cfg = GRPOConfig(minibatches=2, prompts_per_step=4)
    runtime = OneProcessRuntime(policy, lr=0.1)
    seen = []
    runtime.accumulate = lambda micro_batches: seen.append([len(m) for m in micro_batches]) or iter(micro_batches)
    update_policy(
        policy, grpo.add_old_and_reference_logprobs(batch, policy, None, OneProcessRuntime(), cfg), runtime, cfg
    )
    assert seen == [[12], [12]]


# ---------------------------------------------------------------- replay


def test_rollouts_are_replayed_with_their_own_logprobs_until_stale():
    policy = make_policy()
    cfg = GRPOConfig(steps=5, group_size=4, max_staleness=3)
    seen = []

    def spy(policy, batch, runtime, cfg, update=update_policy):
        seen.append(batch)
        return update(policy, batch, runtime, cfg)

    state = TrainingState()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "update_policy", spy)
        steps = list(
            train(
                CountDigits(),
                NativeSampler(),
                policy,
                OneProcessRuntime(policy, lr=0.5),
                cfg,
                state=state,
                sampling=Sampling(max_tokens=6),
            )
        )
    assert [len(batch) for batch in seen] == [16, 32, 48, 48, 48]
    assert [then for then, _ in state.replay_buffer] == [4, 3, 2]
    first, second = seen[0], seen[1]
    width = first.response_mask.shape[1]
    assert torch.equal(second.old_logprobs[16:, :width], first.old_logprobs), "as they were sampled under"
    assert torch.equal(second.advantages[16:], first.advantages)
    assert second.prompt_ids[4:] == first.prompt_ids
    assert second.prompt_indices[16:].tolist() == (first.prompt_indices + 4).tolist()
    assert steps[0].metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert abs(steps[1].metrics["ratio/mean"] - 1.0) > 1e-4, "the policy has moved since"


def test_staleness_of_one_keeps_nothing():
    state = TrainingState()
    batch = rollouts(make_policy())
    assert grpo.append_replayed_batches(state, 0, batch, GRPOConfig()) is batch
    assert state.replay_buffer == []


def test_joined_batches_score_like_separate_batches():
    policy = make_policy(dtype=F64)
    one, two = rollouts(policy, n=2), rollouts(policy, n=3)
    joined = policy.score(concat_batches([one, two]))
    for part, rows in ((one, slice(0, 12)), (two, slice(12, 30))):
        alone = policy.score(part).logprobs
        torch.testing.assert_close(joined.logprobs[rows, : alone.shape[1]], alone, rtol=0, atol=1e-12)
        assert joined.logprobs[rows, alone.shape[1] :].abs().sum() == 0.0


# ---------------------------------------------------------------- dynamic sampling


class Coin:
    """Gives all completions of a prompt the same reward if `dead` selects the prompt."""

    seed, split = 0, "train"

    def __init__(self, dead):
        self.dead = dead

    def sample(self, step, n):
        return [Prompt(f"{step}/{i}", "1+1?", columns={"dead": self.dead(step, i)}) for i in range(n)]

    def reward(self, prompt, completion):
        return Reward(0.1 + 0.2 if prompt.columns["dead"] else float(sum(completion.token_ids)))


def run_rollout(task, **settings):
    cfg, sampling = GRPOConfig(group_size=4, **settings), Sampling(max_tokens=8)
    return collect_rollouts(
        task, NativeSampler(policy=make_policy()), sampling, OneProcessRuntime(), 3, cfg, StageClock()
    )


def test_dead_groups_are_replaced_to_keep_the_batch_size_constant():
    groups, drawn = run_rollout(Coin(lambda step, i: i % 2 == 0), max_rounds=5, steps=10)
    assert [g.prompt.id for g in groups] == ["3/1", "3/3", f"{3 + ROUND_STRIDE}/1", f"{3 + ROUND_STRIDE}/3"]
    kept = sum(len(completion.token_ids) for group in groups for completion in group.completions)
    assert drawn.pop("tokens") > 1.2 * kept, "what is thrown away was sampled too"
    assert drawn == {"groups/drawn": 8, "groups/drawn_dead": 0.5}


def test_dynamic_sampling_counts_tokens_of_all_sequences():
    """A conversation whose history was rewritten has several. With one round, reporting counts them too."""

    class Branching(NativeSampler):
        def generate(self, prompts, sampling):
            groups = super().generate(prompts, sampling)
            return [
                replace(group, completions=tuple(replace(c, branches=(c, c)) for c in group.completions))
                for group in groups
            ]

    cfg, sampling = GRPOConfig(group_size=4, max_rounds=2), Sampling(max_tokens=8)
    task, sampler = Coin(lambda step, i: False), Branching(policy=make_policy())
    groups, drawn = collect_rollouts(task, sampler, sampling, OneProcessRuntime(), 3, cfg, StageClock())
    assert drawn["groups/drawn"] == 4
    tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
    assert drawn["tokens"] == 3 * tokens == compute_group_metrics(groups)["tokens"]


def test_groups_within_min_reward_range_are_replaced():
    """A small brevity term makes rewards differ by about 1e-4."""

    class Brief(Coin):
        def reward(self, prompt, completion):
            return Reward(sum(completion.token_ids) * (1e-6 if prompt.columns["dead"] else 1.0))

    half = Brief(lambda step, i: i % 2 == 0)
    groups, drawn = run_rollout(half, max_rounds=5, steps=10, min_reward_range=0.01)
    assert [g.prompt.columns["dead"] for g in groups] == [False] * 4
    assert drawn["groups/drawn_dead"] == 0.5
    groups, drawn = run_rollout(half, max_rounds=5, steps=10)
    assert [g.prompt.columns["dead"] for g in groups] == [True, False] * 2
    assert drawn["groups/drawn_dead"] == 0.0


@pytest.mark.parametrize(("rounds", "seen"), [(1, 4), (5, 8)])
def test_task_observes_every_sampled_group(rounds, seen):
    class Watching(Coin):
        def observe(self, step, groups):
            return {"seen": len(groups), "step": step}

        def state(self):
            return {}

        def load_state(self, state):
            pass

    _, drawn = run_rollout(Watching(lambda step, i: i % 2 == 0), max_rounds=rounds, steps=10)
    assert (drawn["seen"], drawn["step"]) == (seen, 3)


@pytest.mark.parametrize("rounds", [1, 2])
def test_curriculum_rests_prompts_of_groups_within_min_reward_range(rounds):
    """A small brevity term makes rewards differ by about 1e-4, which teaches nothing."""

    @dataclass(frozen=True)
    class Brief:
        seed: int = 0
        split: str = "train"

        def sample(self, step, n):
            return [Prompt(f"{step}/{i}", f"{i}+{i}?") for i in range(n)]

        def reward(self, prompt, completion):
            scale = 1e-6 if prompt.id.endswith(("1", "3")) else 1.0
            return Reward(sum(completion.token_ids) * scale)

    settings = {"prompts_per_step": 4, "steps": 10, "max_rounds": rounds}
    _, drawn = run_rollout(Curriculum(Brief(), pool=4), min_reward_range=0.01, **settings)
    assert drawn["curriculum/resting"] == 0.5
    _, drawn = run_rollout(Curriculum(Brief(), pool=4), **settings)
    assert drawn["curriculum/resting"] == 0.0


def test_observing_task_without_state_methods_is_refused():
    class Forgetful(Coin):
        def observe(self, step, groups):
            return {}

    with pytest.raises(UserError, match=r"state\(\) and load_state\(\)"):
        run_rollout(Forgetful(lambda step, i: False))


def test_round_samples_only_as_many_prompts_as_needed():
    cfg = GRPOConfig(prompts_per_step=16)
    assert count_missing_prompts(0, 0, 2, cfg) == 16
    assert count_missing_prompts(14, 2, 1, cfg) == 3  # two groups are missing, and seven of eight are live
    assert count_missing_prompts(14, 2, 2, cfg) == 4  # rounded up to a multiple of the two processes
    assert count_missing_prompts(0, 16, 2, cfg) == 16
    assert count_missing_prompts(8, 8, 2, cfg) == 16


def test_max_rounds_bounds_sampling_and_dead_groups_fill_the_batch():
    groups, drawn = run_rollout(Coin(lambda step, i: i > 0), max_rounds=2, steps=10)
    assert [g.prompt.id for g in groups] == ["3/0", f"{3 + ROUND_STRIDE}/0", "3/1", "3/2"]
    assert (drawn["groups/drawn"], drawn["groups/drawn_dead"]) == (8, 0.75)


def test_differences_below_min_reward_range_are_no_signal():
    """A length term of .004 among all-wrong answers would otherwise be standardized to full size."""
    policy = make_policy()
    nearly = [0.0, -0.004, -0.002, 0.0]
    groups = [
        replace(g, rewards=tuple(map(Reward, v)))
        for g, v in zip(four_groups(policy)[:2], (nearly, [1.0, 0.0, 0.996, 0.0]), strict=True)
    ]
    batch = collate(groups)
    arguments = (collect_grades(groups), batch, policy, OneProcessRuntime())
    plain, _ = grpo.compute_advantages(*arguments, GRPOConfig(group_size=4))
    floored, _ = grpo.compute_advantages(*arguments, GRPOConfig(group_size=4, min_reward_range=0.01))
    assert plain[0].abs().max() > 1.0
    assert floored[0].abs().max() == 0.0
    assert torch.equal(floored[1], plain[1])


def four_groups(policy):
    sampling = Sampling(4, max_tokens=8, seed="0/0")
    return NativeSampler(policy=policy).generate(CountDigits().sample(0, 4), sampling)


def test_sampling_rounds_never_reuse_the_prompts_of_other_steps():
    """In a run of 40 steps resumed with 80, round 1 of step 0 used to have the prompts of step 40."""

    class Asked(Coin):
        def __init__(self):
            super().__init__(lambda step, i: True)
            self.steps = []

        def sample(self, step, n):
            self.steps.append(step)
            return super().sample(step, n)

    task = Asked()
    sampler, sampling = NativeSampler(policy=make_policy()), Sampling(max_tokens=1)
    for steps, finished in ((40, 0), (80, 40)):
        cfg = GRPOConfig(steps=steps, group_size=2, prompts_per_step=2, max_rounds=3)
        collect_rollouts(task, sampler, sampling, OneProcessRuntime(), finished, cfg, StageClock())
    assert len(set(task.steps)) == len(task.steps) == 6
    assert task.steps[0] == 0
    assert task.steps[3] == 40


def test_single_round_keeps_dead_groups_and_reports_no_metrics():
    groups, drawn = run_rollout(Coin(lambda step, i: True))
    assert [g.prompt.id for g in groups] == ["3/0", "3/1", "3/2", "3/3"]
    assert drawn == {}


# ---------------------------------------------------------------- the reference


def kl_run(policy, reference, **settings):
    cfg = GRPOConfig(steps=4, group_size=4, kl="k2", kl_in="loss", kl_coef=0.1, **settings)
    state = TrainingState(kl_coef=cfg.kl_coef)
    runtime = OneProcessRuntime(policy, lr=0.5)
    return list(
        train(CountDigits(), NativeSampler(), policy, runtime, cfg, reference, state, sampling=Sampling(max_tokens=6))
    ), state


def test_reference_is_updated_every_n_steps():
    policy, reference = make_policy(), make_policy()
    steps, _ = kl_run(policy, reference, reference_every=2)
    assert [step.metrics["kl"] > 1e-6 for step in steps] == [False, True, False, True]
    for mine, theirs in zip(reference.weights().values(), policy.weights().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_update_weights_computes_a_moving_average():
    policy, reference = make_policy(seed=1), make_policy(seed=2)
    before = {name: p.clone() for name, p in reference.weights().items()}
    reference.update_weights(policy.weights(), 0.9)
    for name, p in reference.weights().items():
        torch.testing.assert_close(p, 0.9 * before[name] + 0.1 * policy.weights()[name])


def test_frozen_reference_does_not_change():
    policy, reference = make_policy(), make_policy()
    before = {name: p.clone() for name, p in reference.weights().items()}
    kl_run(policy, reference)
    assert all(torch.equal(p, before[name]) for name, p in reference.weights().items())


def test_kl_coef_adapts_to_kl_target():
    cfg = GRPOConfig(kl_coef=0.1, kl_target=0.5)
    assert kl.adapt_kl_coef(0.1, 5.0, cfg) == pytest.approx(0.102)
    assert kl.adapt_kl_coef(0.1, 0.55, cfg) == pytest.approx(0.101)
    assert kl.adapt_kl_coef(0.1, 0.0, cfg) == pytest.approx(0.098)
    assert kl.adapt_kl_coef(0.1, 5.0, GRPOConfig(kl_coef=0.1)) == 0.1
    steps, state = kl_run(make_policy(), make_policy(), kl_target=1e-6)
    coefficients = [step.metrics["kl_coef"] for step in steps]
    assert coefficients == pytest.approx([0.1, 0.098, 0.09996, 0.1019592])
    assert state.kl_coef == pytest.approx(0.1019592 * 1.02)


def test_non_finite_kl_leaves_kl_coef_unchanged():
    cfg = GRPOConfig(kl_coef=0.1, kl_target=0.5)
    assert [kl.adapt_kl_coef(0.1, kl_now, cfg) for kl_now in (math.nan, math.inf, -math.inf)] == [0.1] * 3

    class Broken:
        """A reference whose scores are NaN in the second step."""

        def __init__(self):
            self.reference, self.calls = make_policy(seed=3), 0

        def score(self, batch):
            self.calls += 1
            scores = self.reference.score(batch)
            return scores._replace(logprobs=scores.logprobs * math.nan) if self.calls == 2 else scores

    policy = make_policy()
    cfg = GRPOConfig(steps=4, group_size=4, kl="k2", kl_in="loss", kl_coef=0.1, kl_target=1e-6)
    runtime = Runtime(policy, AdamWConfig(), total_updates=4)
    steps = list(train(CountDigits(), NativeSampler(), policy, runtime, cfg, Broken(), sampling=Sampling(max_tokens=6)))
    assert [math.isnan(step.metrics["kl"]) for step in steps] == [False, True, False, False], "it stays to be seen"
    assert [step.metrics["kl_coef"] for step in steps] == pytest.approx([0.1, 0.102, 0.102, 0.10404])


def test_state_without_kl_coef_uses_the_settings():
    policy, reference = make_policy(), make_policy(seed=3)
    cfg = GRPOConfig(steps=2, group_size=4, kl="k2", kl_in="loss", kl_coef=0.1, kl_target=1e-6)
    runtime, state = OneProcessRuntime(policy), TrainingState(step=1)
    [step] = train(
        CountDigits(), NativeSampler(), policy, runtime, cfg, reference, state, sampling=Sampling(max_tokens=6)
    )
    assert step.metrics["kl"] > 0
    assert step.metrics["kl_coef"] == 0.1
    assert state.kl_coef == pytest.approx(0.102)


def test_the_exact_kl_is_the_sum_over_the_vocabulary():
    policy, reference = (make_policy(dtype=F64, seed=seed, engine="transformers") for seed in (0, 3))
    policy.set_kl_reference(reference)
    batch = rollouts(policy)
    scores = policy.score(batch)
    ids = torch.tensor([batch.prompt_ids[0] + tuple(batch.response_ids[0].tolist())])
    start, length = len(batch.prompt_ids[0]), int(batch.response_mask[0].sum())
    mine, other = (m.model(ids).logits[0, start - 1 : start - 1 + length].log_softmax(-1) for m in (policy, reference))
    torch.testing.assert_close(
        scores.kl[0, :length], torch.nn.functional.kl_div(other, mine, reduction="none", log_target=True).sum(-1)
    )
    assert scores.kl[0, length:].abs().sum() == 0.0


def test_training_on_the_exact_kl_reduces_it():
    policy, reference = make_policy(), make_policy(seed=3)
    policy.set_kl_reference(reference)
    cfg = GRPOConfig(steps=12, group_size=4, kl="exact", kl_in="loss", kl_coef=5.0)
    runtime = OneProcessRuntime(policy, lr=0.05)
    sampling = Sampling(max_tokens=6)
    steps = list(train(CountDigits(), NativeSampler(), policy, runtime, cfg, reference, sampling=sampling))
    assert steps[-1].metrics["kl"] < 0.7 * steps[0].metrics["kl"]


@pytest.mark.parametrize("kl_in", ["reward", "raw_reward", "loss"])
def test_kl_cost_is_reported_only_when_rewards_are_charged(kl_in):
    """The expected cost comes from the sampler's log-probs, which equal the policy's, and the reference's scores."""
    policy, reference = make_policy(), make_policy(seed=3)
    cfg = GRPOConfig(steps=1, group_size=4, kl="k1" if kl_in != "loss" else "k2", kl_in=kl_in, kl_coef=0.3)
    [step] = train(
        CountDigits(),
        NativeSampler(),
        policy,
        OneProcessRuntime(policy),
        cfg,
        reference,
        sampling=Sampling(max_tokens=6),
    )
    assert ("reward/kl" in step.metrics) == (kl_in != "loss")
    if kl_in != "loss":
        batch = collate(step.groups)
        gap = (batch.sampler_logprobs - reference.score(batch).logprobs.detach())[batch.response_mask].sum() / len(
            batch
        )
        assert step.metrics["reward/kl"] == pytest.approx(-0.3 * float(gap), abs=1e-4)


# ---------------------------------------------------------------- similarity


def test_similarity_reads_the_hidden_states_of_the_responses():
    policy = make_policy()
    batch = rollouts(policy)
    whole = policy.embed(batch, -1)
    assert whole.shape == (24, 32)
    torch.testing.assert_close(
        torch.cat([policy.embed(part, -1) for part in batch.split_into_chunks(5)]), whole, rtol=0, atol=1e-5
    )
    ids = torch.tensor([batch.prompt_ids[0] + tuple(batch.response_ids[0][batch.response_mask[0]].tolist())])
    with torch.no_grad():
        hidden = policy.model.model(ids, output_hidden_states=True).hidden_states[1][0, len(batch.prompt_ids[0]) :]
    torch.testing.assert_close(policy.embed(batch, 1)[0], hidden.mean(0), rtol=0, atol=1e-5)


# ---------------------------------------------------------------- between the stages


def group_of(values):
    completions = tuple(Completion((i, EOS), (-1.0, -1.0), str(i), True) for i in range(len(values)))
    return Group(Prompt("p", "q"), (1, 2), completions), values


class Scripted:
    seed, split = 0, "train"

    def __init__(self, values):
        self.values = values

    def reward(self, prompt, completion):
        return Reward(self.values[completion.token_ids[0]])


def test_a_failed_reward_is_neutral_not_zero():
    group, values = group_of([1.0, math.nan, 0.0, 0.5])
    graded = grade_groups(Scripted(values), [group])
    assert collect_task_rewards(graded).tolist() == [[1.0, 0.5, 0.0, 0.5]]
    assert math.isnan(graded[0].rewards[1].value), "the record keeps what happened"
    assert ADVANTAGES["grpo"](collect_grades(graded), GRPOConfig())[0, 1] == 0.0
    all_failed = grade_groups(Scripted([math.nan] * 2), [group_of([0, 0])[0]])
    assert ADVANTAGES["grpo"](collect_grades(all_failed), GRPOConfig()).abs().max() == 0.0


def test_grades_hold_the_terms_of_a_composite_reward_and_their_weights():
    group, _ = group_of([0, 0])
    rewards = (
        Reward(1.1, {"numeric": 1.0, "length": 0.2}, weights={"length": 0.5}, correct=True),
        Reward(0.0, {"numeric": 0.0}),
    )
    grades = collect_grades([replace(group, rewards=rewards)])
    assert grades.parts.tolist() == [[[1.0, 0.2], [0.0, 0.2]]]
    assert grades.weights.tolist() == [[1.0, 0.5]]
    assert grades.correct.tolist() == [[1.0, 0.0]]
    assert grades.lengths.tolist() == [[2.0, 2.0]]


def test_reward_terms_are_collected_from_all_completions():
    """The first reward failed and has no terms; the other group has one more term."""
    group, _ = group_of([0, 0])
    failed, weighed = Reward(math.nan), Reward(0.5, {"a": 1.0}, weights={"a": 0.5})
    both = Reward(3.0, {"a": 1.0, "b": 2.0}, weights={"a": 0.5})
    grades = collect_grades([replace(group, rewards=r) for r in ((failed, weighed), (both, both))])
    assert grades.parts.tolist() == [[[1.0, 0.0], [1.0, 0.0]], [[1.0, 2.0], [1.0, 2.0]]]
    assert grades.weights.tolist() == [[0.5, 1.0], [0.5, 1.0]]


def test_collate_builds_masks_from_lengths():
    short, long = Completion((EOS,), (-0.5,), "", True), Completion((4, EOS, 5), (-1.0, -2.0, -3.0), "x", False)
    batch = collate([Group(Prompt("p", "q"), (1, 2), (short, long))])
    assert batch.response_mask.tolist() == [[True, False, False], [True, True, True]]
    assert batch.prompt_indices.tolist() == [0, 0]
    assert batch.finished.tolist() == [True, False]
    assert batch.sampler_logprobs[1].tolist() == [-1.0, -2.0, -3.0]


def test_selected_rows_keep_their_prompts_and_advantages():
    policy = make_policy()
    batch = rollouts(policy)
    part = batch.select_rows(slice(5, 7))
    assert part.response_mask.shape == (2, int(batch.response_mask[5:7].sum(-1).max()))
    assert part.prompt_indices.tolist() == [0, 1]
    torch.testing.assert_close(part.advantages, batch.advantages[5:7])
    torch.testing.assert_close(
        policy.score(part).logprobs, policy.score(batch).logprobs[5:7, : part.response_mask.shape[1]]
    )


# ---------------------------------------------------------------- the loop


@pytest.mark.slow
def test_training_raises_the_rewards_of_a_tiny_model():
    policy = make_policy()
    cfg = GRPOConfig(steps=30, prompts_per_step=4, group_size=8)
    runtime = OneProcessRuntime(policy, lr=0.5)
    rewards = [
        sum(r.value for g in groups for r in g.rewards) / 32
        for _, _, groups in train(
            CountDigits(), NativeSampler(), policy, runtime, cfg, sampling=Sampling(max_tokens=12)
        )
    ]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


def test_every_step_reports_the_promised_metrics():
    policy = make_policy()
    reference = make_policy()
    cfg = GRPOConfig(steps=1, group_size=4, kl="k2", kl_in="loss", kl_coef=0.1)
    [(step, metrics, groups)] = train(
        CountDigits(),
        NativeSampler(),
        policy,
        OneProcessRuntime(policy),
        cfg,
        reference,
        sampling=Sampling(max_tokens=6),
    )
    assert step == 1
    promised = {"kl", "entropy", "clip/low", "clip/high", "ratio/mean", "sampler/gap_mean", "sampler/gap_max"}
    promised |= {"grad_norm", "lr", "loss", "skipped", "idle", "kl_coef", "kl/overflow", "ratio/overflow", "effect/kl"}
    promised |= {"update/kl"}
    promised |= {f"time/{stage}" for stage in ("generate", "reward", "score", "update", "step")}
    assert metrics.keys() == promised
    assert abs(metrics["kl"]) < 1e-12, "the reference is the policy itself"
    assert metrics["sampler/gap_max"] < 1e-4
    advantages = [a for g in groups for a in g.advantages]
    assert len(advantages) == 16
    assert abs(sum(advantages)) < 1e-9


@pytest.mark.parametrize(
    ("wrong", "mend"),
    [
        ({"group_size": 1}, "at least 2"),
        ({"minibatches": 3}, "must divide"),
        ({"objective": "reinforce", "epochs": 2}, "epochs, minibatches"),
        ({"objective": "reinforce", "max_staleness": 2}, "max_staleness"),
        ({"kl": "k3_weighted"}, 'kl_in = "loss"'),
        ({"kl_target": 0.1}, "kl_coef"),
        ({"kl_coef": 0.1, "reference_decay": 0.9}, "reference_every"),
        ({"dual_clip": 1.1}, "1 \\+ clip_high"),
        ({"entropy_share": 0.0}, "above 0"),
        ({"dual_clip": 3.0, "objective": "cispo"}, "no use"),
        ({"advantage": "gdpo", "overlong_cache": 4}, "another advantage"),
        ({"kl_coef": 0.1, "reference_every": 2, "max_staleness": 2}, "reference_every = 0"),
        ({"similarity_mix": 1.0}, "below 1"),
        ({"correction_cap": 1.0}, "above 1"),
        ({"clip_low": -0.1}, "negative"),
        ({"steps": 0}, "at least 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong, mend):
    with pytest.raises(ValueError, match=mend):
        GRPOConfig(**wrong)

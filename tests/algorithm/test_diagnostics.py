"""Tests for `effect/` metrics against counts by hand, and for warnings about settings without an effect."""

from __future__ import annotations

import pytest
import torch

from conftest import OneProcessRuntime
from pellucid.algorithm import grpo, metrics
from pellucid.algorithm.advantages import Grades, compute_advantages_from_grades
from pellucid.algorithm.batch import collate, collect_grades
from pellucid.algorithm.objectives import (
    ObjectiveInputs,
    compute_clip_metrics,
    compute_clip_ranges_by_difficulty,
    dcpo,
    ppo_clip,
)
from pellucid.algorithm.settings import GRPOConfig
from pellucid.types import Completion, Group, Prompt, Reward

F64 = torch.float64


def grades(rewards):
    rewards = torch.tensor(rewards, dtype=F64)
    return Grades(rewards, rewards, torch.ones_like(rewards), rewards[..., None], torch.ones(len(rewards), 1))


def on_advantages(rewards, shaped, **settings):
    cfg = GRPOConfig(**settings)
    measured, shaped = grades(rewards), torch.tensor(shaped, dtype=F64)
    return metrics.compute_advantage_effects(
        measured, shaped, compute_advantages_from_grades(measured, shaped, cfg), cfg
    )


def test_plain_grpo_reports_no_effect():
    assert on_advantages([[1.0, 0.0]], [[1.0, 0.0]]) == {}


def test_difficulty_changes_the_advantages_of_groups_off_the_mean():
    """Group means are .5, .5, .75 and .25: the first two are at the mean of the batch and keep a factor of 1."""
    rewards = [[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    assert on_advantages(rewards, rewards, advantage="difficulty") == {"effect/advantage": 0.5}
    alike = [rewards[0], rewards[1]]
    assert on_advantages(alike, alike, advantage="difficulty") == {"effect/advantage": 0.0}
    assert on_advantages(rewards, rewards, advantage_difficulty=1.0) == {"effect/difficulty": 0.5}
    both = on_advantages(rewards, rewards, advantage="centered", advantage_difficulty=1.0)
    assert both == {"effect/advantage": 1.0, "effect/difficulty": 0.5}


def test_effect_of_min_reward_range_is_not_attributed_to_the_advantage():
    """The group's spread is .1, so both advantages are 0 if min_reward_range covers it."""
    rewards = [[1.0, 0.9, 1.0, 0.9]]
    assert on_advantages(rewards, rewards, advantage="rloo") == {"effect/advantage": 1.0}
    assert on_advantages(rewards, rewards, advantage="rloo", min_reward_range=0.1) == {"effect/advantage": 0.0}


def test_length_groups_of_tied_lengths_have_an_effect():
    """Five of eight answers are equally short and form a cell of five for any number of buckets."""
    rewards = torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]], dtype=F64)
    lengths = torch.tensor([[2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 4.0, 5.0]], dtype=F64)
    measured = grades(rewards.tolist())._replace(lengths=lengths)
    cfg = GRPOConfig(advantage="length_grouped", length_buckets=4)
    changed = metrics.compute_advantage_effects(
        measured, rewards, compute_advantages_from_grades(measured, rewards, cfg), cfg
    )
    assert changed == {"effect/advantage": 0.625}
    assert metrics.find_inert_settings(cfg) == []


def test_shaping_that_is_affine_in_a_group_has_no_effect():
    """Smoothing is affine if all siblings have the same weight."""
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]
    affine = [[0.9, 0.1, 0.1, 0.1], [0.9, 0.9, 0.1, 0.1]]
    one_changed = [[0.9, 0.5, 0.1, 0.1], [0.9, 0.9, 0.1, 0.1]]
    settings = {"similarity": "smooth"}
    assert on_advantages(rewards, affine, **settings) == {"effect/shaping": 0.0}
    assert on_advantages(rewards, one_changed, **settings) == {"effect/shaping": 0.5}


def test_kl_penalty_has_an_effect_only_if_it_changes_an_advantage():
    penalty = torch.tensor([[0.5, -0.5, 0.001, 0.0]])
    assert metrics.compute_kl_penalty_effect(penalty, list) == {"effect/kl": 0.5}
    assert metrics.compute_kl_penalty_effect(0.0, list) == {}


def test_effect_of_kl_in_the_loss_depends_on_its_gradient_factor():
    cfg = GRPOConfig(kl="k3", kl_in="loss", kl_coef=0.1)
    logprobs = torch.tensor([[-1.0, -1.0, -1.0, -1.0]])
    reference = torch.tensor([[-1.0, -1.09, -1.11, -0.5]])
    assert metrics.compute_kl_loss_effect(logprobs, reference, None, cfg)["effect/kl"].tolist() == [
        [False, False, True, True]
    ]
    exact = torch.tensor([[0.0, 0.004, 0.006]])  # log-ratios of about 0, .089 and .110
    assert metrics.compute_kl_loss_effect(logprobs, None, exact, cfg)["effect/kl"].tolist() == [[False, False, True]]
    assert metrics.compute_kl_loss_effect(logprobs, reference, None, GRPOConfig(kl_coef=0.1)) == {}


def test_dcpo_bounds_have_an_effect_where_fixed_bounds_clip_otherwise():
    """The bounds of dcpo are .5 and 5 at q = .01, and .8 and 1.17 at q = 1; the fixed bounds are .84 and 1.2."""
    cfg = GRPOConfig(objective="dcpo", clip_low=0.16, clip_high=0.2)
    old = torch.tensor([[0.01, 0.01, 1.0, 1.0, 0.01]], dtype=F64).log()
    ratio = torch.tensor([[3.0, 6.0, 1.1, 1.19, 0.6]], dtype=F64)
    mask = torch.ones(1, 5, dtype=torch.bool)
    for advantage, changed in ((1.0, [True, False, False, True, False]), (-1.0, [False, False, False, False, True])):
        tokens = ObjectiveInputs(old + ratio.log(), old, torch.tensor([[advantage]], dtype=F64), mask)
        measured = compute_clip_metrics(dcpo(tokens, cfg), mask)
        assert measured["effect/clip"].tolist() == [changed]


# ---------------------------------------------------------------- clipping by difficulty


def test_hard_groups_get_wider_clip_bounds_than_easy_groups():
    """The mean is .5. With strength 1, 0 of 4 right widen the bound by 1.5 and 4 of 4 right halve it. The upper and the
    lower bound have separate strengths.
    """
    correct = torch.tensor([[0.0] * 4, [1.0] * 4, [1.0, 1.0, 0.0, 0.0]], dtype=F64)

    def ranges(**settings):
        cfg = GRPOConfig(clip_low=0.1, clip_high=0.2, **settings)
        return {
            name: x[:, 0].tolist()
            for name, x in compute_clip_ranges_by_difficulty(correct, correct.mean(), cfg).items()
        }

    assert ranges(clip_difficulty=1.0) == {"clip_high": pytest.approx([0.3, 0.1, 0.2])}
    assert ranges(clip_difficulty=10.0) == {"clip_high": pytest.approx([0.4, 0.1, 0.2])}
    assert ranges(clip_difficulty=1.0, clip_difficulty_low=0.4) == {
        "clip_high": pytest.approx([0.3, 0.1, 0.2]),
        "clip_low": pytest.approx([0.12, 0.08, 0.1]),
    }


def test_each_row_is_clipped_at_its_own_bound():
    """Beyond a bound the value is that at the bound, and its gradient is 0."""
    old = torch.zeros(2, 2, dtype=F64)
    logprobs = torch.tensor([[1.25, 1.35], [1.25, 1.05]], dtype=F64).log().requires_grad_()
    width = torch.tensor([[0.3], [0.1]], dtype=F64)
    mask, advantages = torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 1, dtype=F64)
    outcome = ppo_clip(ObjectiveInputs(logprobs, old, advantages, mask, width), GRPOConfig(clip_difficulty=1.0))
    value = outcome.value
    assert value.detach().tolist() == [pytest.approx([1.25, 1.3]), pytest.approx([1.1, 1.05])]
    value.sum().backward()
    assert logprobs.grad.tolist() == [pytest.approx([1.25, 0.0]), pytest.approx([0.0, 1.05])]
    measured = compute_clip_metrics(outcome, mask)
    assert measured["clip/high"].tolist() == [[False, True], [True, False]]
    # The fixed bound of 1.2 clips 1.25 and 1.35 in the first row and 1.25 in the second.
    assert measured["effect/clip"].tolist() == [[True, False], [False, False]]


def test_each_row_is_clipped_below_at_its_own_bound():
    """The lower bounds (A < 0) are 1 - .3 and 1 - .1; the upper bound of all rows is the fixed 1.2."""
    old = torch.zeros(2, 2, dtype=F64)
    logprobs = torch.tensor([[0.75, 0.65], [0.85, 1.3]], dtype=F64).log().requires_grad_()
    mask, advantages = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[-1.0, -1.0], [-1.0, 1.0]], dtype=F64)
    width = torch.tensor([[0.3], [0.1]], dtype=F64)
    tokens = ObjectiveInputs(logprobs, old, advantages, mask, clip_low=width)
    outcome = ppo_clip(tokens, GRPOConfig(clip_difficulty_low=1.0))
    assert outcome.value.detach().tolist() == [pytest.approx([-0.75, -0.7]), pytest.approx([-0.9, 1.2])]
    outcome.value.sum().backward()
    assert logprobs.grad.tolist() == [pytest.approx([-0.75, 0.0]), pytest.approx([0.0, 0.0])]
    measured = compute_clip_metrics(outcome, mask)
    # The fixed bound of .8 clips .75 and .65 in the first row, but not .85 in the second.
    assert measured["effect/clip"].tolist() == [[True, False], [True, False]]


def test_dynamic_bounds_widen_with_difficulty():
    """At q = 1/2 the bounds of the ratio r solve |(r - 1) r| / 2 = clip, with the clip of the row."""
    old = torch.full((2, 2), 0.5, dtype=F64).log()
    mask, cfg = torch.ones(2, 2, dtype=torch.bool), GRPOConfig(objective="dcpo", clip_difficulty=1.0)
    low, high = torch.tensor([[0.12], [0.05]], dtype=F64), torch.tensor([[0.3], [0.1]], dtype=F64)
    bounds = dcpo(ObjectiveInputs(old, old, old, mask, high, low), cfg).bounds
    assert bounds is not None
    torch.testing.assert_close((1 - bounds[0]) * bounds[0] / 2, low.expand(2, 2), rtol=0, atol=1e-12)
    torch.testing.assert_close((bounds[1] - 1) * bounds[1] / 2, high.expand(2, 2), rtol=0, atol=1e-12)


def test_clip_bound_is_wide_for_groups_below_the_mean_accuracy():
    """0 of 2 and 1 of 2 are right in the two groups: the mean is .25, so bounds are .2 (1 + .25) and .2 (1 - .25)."""
    answer = Completion((1,), (0.0,), "", True)
    groups = [Group(Prompt(str(p), "?"), (0,), (answer, answer), (Reward(float(p)), Reward(0.0))) for p in (0, 1)]
    cfg = GRPOConfig(group_size=2, clip_difficulty=1.0, clip_low=0.1, clip_difficulty_low=2.0)
    batch = collate(groups)
    judged = grpo.attach_advantages(batch, collect_grades(groups), torch.zeros(2, 2), OneProcessRuntime(), cfg)
    assert judged.clip_high.tolist() == pytest.approx([0.25, 0.25, 0.15, 0.15])
    assert judged.clip_low.tolist() == pytest.approx([0.15, 0.15, 0.05, 0.05])
    assert (
        grpo.attach_advantages(
            batch, collect_grades(groups), torch.zeros(2, 2), OneProcessRuntime(), GRPOConfig(group_size=2)
        ).clip_high
        is None
    )


def test_clip_difficulty_compares_with_groups_of_all_processes():
    """1 of 2 is right here and 0 of 2 in the other process: the mean is .25 and the bound .2 (1 - .25)."""
    answer = Completion((1,), (0.0,), "", True)
    mine, other = (
        Group(Prompt(name, "?"), (0,), (answer, answer), (Reward(value), Reward(0.0)))
        for name, value in (("mine", 1.0), ("other", 0.0))
    )

    class OneOfTwo(OneProcessRuntime):
        def shard(self, items):
            return items[::2]

    cfg = GRPOConfig(group_size=2, clip_difficulty=1.0)
    batch = collate([mine])
    judged = grpo.attach_advantages(batch, collect_grades([mine, other]), torch.zeros(1, 2), OneOfTwo(), cfg)
    assert judged.clip_high.tolist() == pytest.approx([0.15, 0.15])


def test_clip_difficulty_is_refused_for_gspo():
    for name in ("clip_difficulty", "clip_difficulty_low"):
        with pytest.raises(ValueError, match=f"{name} has no use"):
            GRPOConfig(objective="gspo", **{name: 1.0})


# ---------------------------------------------------------------- warnings


@pytest.mark.parametrize(
    ("inert", "said", "mended"),
    [
        ({"objective": "dcpo"}, "epochs", {"objective": "dcpo", "epochs": 2}),
        ({"clip_difficulty": 1.0}, "minibatches", {"clip_difficulty": 1.0, "minibatches": 2}),
        ({"clip_difficulty_low": 1.0}, "minibatches", {"clip_difficulty_low": 1.0, "minibatches": 2}),
        ({"advantage_difficulty": 1.0, "prompts_per_step": 1}, "prompts_per_step", {"advantage_difficulty": 1.0}),
        ({"kl_coef": 0.1, "kl": "k1", "kl_in": "loss"}, "k2", {"kl_coef": 0.1, "kl": "k2", "kl_in": "loss"}),
        ({"advantage": "difficulty", "prompts_per_step": 1}, "prompts_per_step", {"advantage": "difficulty"}),
    ],
)
def test_settings_without_an_effect_are_reported_with_a_fix(inert, said, mended):
    [line] = metrics.find_inert_settings(GRPOConfig(**inert))
    assert said in line
    assert metrics.find_inert_settings(GRPOConfig(**mended)) == []


def test_defaults_have_no_inert_settings():
    assert metrics.find_inert_settings(GRPOConfig()) == []


def test_zero_effect_is_reported_once_and_only_if_it_was_never_positive():
    watch = metrics.InertSettingWatcher(GRPOConfig())
    said = [
        watch.observe_step({"effect/kl": 0.0, "effect/clip": 0.1 if step == 2 else 0.0, "clip/low": 0.0})
        for step in range(8)
    ]
    assert [len(notes) for notes in said] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert said[4][0].startswith("effect/kl was 0")


def test_prefixes_that_fit_no_question_are_reported():
    """The report is one line, with and without prefix_coef."""
    for cfg in (GRPOConfig(), GRPOConfig(prefix_coef=1.0)):
        watch = metrics.InertSettingWatcher(cfg)
        [line] = [watch.observe_step({"prefix/share": 0.0}) for _ in range(5)][-1]
        assert "no question had a prefix in 5 steps" in line


def test_prefix_coef_without_prefixes_is_reported():
    idle, busy = (
        metrics.InertSettingWatcher(GRPOConfig(prefix_coef=1.0)),
        metrics.InertSettingWatcher(GRPOConfig(prefix_coef=1.0)),
    )
    said = [idle.observe_step({"loss": 0.0}) for _ in range(5)][-1]
    assert "prefixed" in said[0]
    assert [busy.observe_step({"prefix/nll": 2.0}) for _ in range(5)][-1] == []


def test_only_kl_in_the_raw_reward_counts_as_shaping():
    rewards, charged = [[1.0, 0.0, 0.0, 0.0]], [[1.0, 0.5, 0.0, 0.0]]
    assert on_advantages(rewards, charged, kl_coef=0.1, kl_in="raw_reward") == {"effect/shaping": 1.0}
    assert on_advantages(rewards, rewards, kl_coef=0.1, kl_in="reward") == {}


def test_exact_kl_rounded_below_zero_has_no_effect():
    cfg = GRPOConfig(kl="exact", kl_in="loss", kl_coef=0.1)
    exact = torch.tensor([[-0.006, 0.006]])
    assert metrics.compute_kl_loss_effect(exact, None, exact, cfg)["effect/kl"].tolist() == [[False, True]]

"""Tests of the metrics of a step's groups, and of the predicted share of dead groups."""

import itertools
from math import comb, isnan, nan

import pytest

from pellucid.reporting.eval_metrics import make_metrics_consistent
from pellucid.reporting.loggers import compute_group_metrics, predict_zero_variance_share
from pellucid.types import Completion, Group, Prompt, Reward


def group(*rewards: Reward, lengths: tuple[int, ...] = (), finished: bool = True) -> Group:
    lengths = lengths or (1,) * len(rewards)
    completions = tuple(Completion((7,) * n, (-0.5,) * n, "x", finished) for n in lengths)
    return Group(Prompt("train/1/0", "2 + 2 ="), (1,), completions, rewards, (0.0,) * len(rewards))


def right(value: float = 1.0, **parts: float) -> Reward:
    return Reward(value, parts, correct=True)


def wrong(value: float = 0.0, **parts: float) -> Reward:
    return Reward(value, parts, correct=False)


def test_reward_mean_and_std_are_over_all_completions_not_over_groups():
    metrics = compute_group_metrics([group(right(1.0), right(2.0)), group(wrong(3.0), wrong(6.0))])
    assert metrics["reward/mean"] == 3.0
    assert metrics["reward/std"] == pytest.approx(3.5**0.5)  # (4 + 1 + 0 + 9) / 4


def test_terms_are_averaged_over_the_rewards_that_have_them():
    metrics = compute_group_metrics([group(right(1.0, numeric=1.0, length=-0.5), right(1.0, numeric=0.0))])
    assert metrics["reward/numeric"] == 0.5
    assert metrics["reward/length"] == -0.5


def test_a_term_named_mean_does_not_replace_the_mean():
    assert compute_group_metrics([group(right(1.0, mean=9.0))])["reward/mean"] == 1.0


DEGREES = [Reward(0.8), Reward(0.8), Reward(0.0), Reward(0.3, correct=False, is_continuous=True), Reward(nan)]


def calls(metrics) -> list[str]:
    """Return the metrics that call answers right or wrong."""
    return [name for name in metrics if name.endswith(("right", "wrong", "correct"))]


def test_continuous_rewards_give_no_right_or_wrong_metrics():
    """Rewards differ in the group of five and are equal in the other, so half of the groups are dead."""
    metrics = compute_group_metrics([group(*DEGREES), group(Reward(0.8), Reward(0.8))])
    assert metrics["groups/dead_equal"] == 0.5
    assert metrics["reward/mean"] == pytest.approx((0.8 + 0.8 + 0.0 + 0.3 + 0.8 + 0.8) / 6)
    assert calls(metrics) == []
    assert len(calls(compute_group_metrics([group(right(), wrong())]))) == 5


def test_one_continuous_step_removes_right_or_wrong_metrics_from_all():
    judged, graded = (compute_group_metrics(groups) for groups in ([group(wrong(), wrong())], [group(*DEGREES)]))
    assert make_metrics_consistent([judged]) == [judged]
    first, second = make_metrics_consistent([judged, graded])
    assert (first["groups/dead_equal"], second["groups/dead_equal"]) == (1.0, 0.0)
    assert calls(first) == []


def test_failed_rewards_are_counted_and_kept_out_of_the_means():
    failed = (Reward(nan, error="ValueError: no"), Reward(5.0, error="timed out"), Reward(float("inf")))
    metrics = compute_group_metrics([group(right(1.0), wrong(0.0), *failed)])
    assert metrics["reward/failed"] == 3
    assert metrics["reward/mean"] == 0.5
    assert metrics["completion/correct"] == 0.5
    assert metrics["tokens"] == 5


def test_terms_that_failed_are_shown_by_name_and_share():
    lost = Reward(nan, {"exact": 1.0}, error="judge: no", failures={"judge": "no"})
    metrics = compute_group_metrics(
        [group(right(1.0), lost), group(lost, Reward(nan, failures={"judge": "no", "exact": "late"}))]
    )
    assert (metrics["failed/judge"], metrics["failed/exact"]) == (0.75, 0.25)
    assert "failed/judge" not in compute_group_metrics([group(right(1.0))])


def test_logged_values_are_averaged_over_the_rewards_that_have_them():
    logged = (Reward(1.0, logged={"tokens": 4.0, "cached": 1.0}), Reward(nan, error="no", logged={"tokens": 2.0}))
    metrics = compute_group_metrics([group(right(1.0), *logged)])
    assert (metrics["logged/tokens"], metrics["logged/cached"]) == (3.0, 1.0)
    assert (
        compute_group_metrics([group(Reward(0.0, logged={"x": 1.0}), Reward(0.0, logged={"x": 0.0}))])["logged/x"]
        == 0.5
    )


def test_all_failed_rewards_give_no_mean_and_no_dead_group():
    metrics = compute_group_metrics([group(Reward(nan), Reward(nan))])
    assert isnan(metrics["reward/mean"])
    assert isnan(metrics["reward/std"])
    assert metrics["groups/dead_all_right"] == metrics["groups/dead_all_wrong"] == 0


def test_dead_groups_are_split_by_whether_the_answers_are_right():
    live = group(right(1.0), wrong(0.0))
    all_right = group(right(1.0), right(1.0))
    all_wrong = group(wrong(0.0), wrong(0.0))
    some_credit = group(wrong(0.5), wrong(0.5))
    metrics = compute_group_metrics([live, all_right, all_wrong, some_credit])
    assert metrics["groups/dead_all_right"] == 0.25
    assert metrics["groups/dead_all_wrong"] == 0.5


def test_a_dead_group_with_a_wrong_answer_in_it_is_not_all_right():
    metrics = compute_group_metrics([group(right(0.5), wrong(0.5))])
    assert metrics["groups/dead_all_right"] == 0
    assert metrics["groups/dead_all_wrong"] == 1


def test_small_difference_makes_a_group_live_but_rounding_does_not():
    assert compute_group_metrics([group(right(1.0), right(1.0 + 1e-6))])["groups/dead_all_right"] == 0
    assert compute_group_metrics([group(right(0.3), right(0.1 + 0.2))])["groups/dead_all_right"] == 1
    assert compute_group_metrics([group(right(1.0), right(1.004))], min_reward_range=0.01)["groups/dead_all_right"] == 1
    assert compute_group_metrics([group(right(1.0), right(1.0), Reward(nan))])["groups/dead_all_right"] == 1


def test_lengths_of_right_and_wrong_answers():
    metrics = compute_group_metrics([group(right(), right(), wrong(), lengths=(2, 4, 9))])
    assert metrics["completion/length_mean"] == 5
    assert metrics["completion/length_right"] == 3
    assert metrics["completion/length_wrong"] == 9
    assert metrics["tokens"] == 15


def test_length_metric_without_completions_is_left_out():
    assert "completion/length_wrong" not in compute_group_metrics([group(right())])
    assert "completion/length_right" not in compute_group_metrics([group(wrong())])


def test_prefix_length_counts_only_prefix_tokens():
    """Tokens given between the turns of a conversation are not part of the prefix."""
    talk = Completion(tuple(range(12)), (0.0,) * 12, "x", True, given_spans=((0, 3), (5, 10)))
    alone = Completion(tuple(range(6)), (0.0,) * 6, "x", True, given_spans=((0, 5),))
    without = Completion(tuple(range(6)), (0.0,) * 6, "x", True, given_spans=((2, 4),))
    groups = [Group(Prompt("p", "?"), (1,), (c,), (Reward(1.0),), (), (7, 8)) for c in (talk, alone, without)]
    assert compute_group_metrics(groups)["prefix/length_mean"] == 4.0
    assert "prefix/length_mean" not in compute_group_metrics(groups[2:])


def test_finished_is_a_share_of_completions():
    metrics = compute_group_metrics([group(right(), finished=True), group(right(), right(), right(), finished=False)])
    assert metrics["completion/finished"] == 0.25


def test_predicted_dead_share_by_hand():
    assert predict_zero_variance_share([[1, 1, 1, 1], [0, 0, 0, 0]], group_size=4) == 1.0
    assert predict_zero_variance_share([[1, 0, 1, 1]], group_size=4) == 0.0  # n == G: the observed share
    assert predict_zero_variance_share([[1, 0, 1, 0]], group_size=2) == pytest.approx(
        2 / 6
    )  # two of six pairs are equal
    assert predict_zero_variance_share([[1, 0, 1, 0], [1, 1, 1, 1]], group_size=2) == pytest.approx((2 / 6 + 1) / 2)
    assert predict_zero_variance_share([[0.1, 0.2, 0.3, 0.4]], group_size=2) == 0.0  # all wrong, but not equal
    assert predict_zero_variance_share([[0.1, 0.2, 0.3, 0.4]], 2, min_reward_range=0.11) == pytest.approx(
        3 / 6
    )  # neighbors count as equal
    assert predict_zero_variance_share([[0.4, 0.1, 0.3, 0.2]], 3, min_reward_range=0.2) == pytest.approx(2 / 4)


def test_failed_reward_does_not_make_a_group_live():
    """The expected value counts all groups that could be drawn; one is dead if its graded rewards are equal."""
    samples = [1.0, 0.0, nan, 1.0, nan]
    for size in range(1, 6):
        groups = list(itertools.combinations(samples, size))
        dead = sum(len({reward for reward in group if not isnan(reward)}) < 2 for group in groups)
        assert predict_zero_variance_share([samples], size) == pytest.approx(dead / len(groups)), size
    assert predict_zero_variance_share([[nan] * 4, [1.0, nan, 1.0, 1.0]], 4) == 1.0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_predicted_dead_share_is_unbiased(p: float):
    n, size = 6, 4
    chances = [comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    expected = sum(
        chance * predict_zero_variance_share([[1] * c + [0] * (n - c)], size) for c, chance in enumerate(chances)
    )
    assert expected == pytest.approx(p**size + (1 - p) ** size, rel=1e-12)


def test_fewer_samples_than_the_group_size_raise():
    with pytest.raises(ValueError, match="draw at least 8"):
        predict_zero_variance_share([[0, 0, 1, 1]], group_size=8)


def test_one_prompt_with_too_few_samples_raises():
    with pytest.raises(ValueError, match="3 samples per prompt"):
        predict_zero_variance_share([[0, 0, 1, 1], [0, 1, 1]], group_size=4)

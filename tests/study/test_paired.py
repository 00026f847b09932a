"""Tests for paired differences: values by hand, and intervals against the fully enumerated bootstrap distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from statistics import fmean

import numpy as np
import pytest

from pellucid.study.bootstrap import (
    RESAMPLE_COUNT,
    classify_difference,
    compute_false_positive_odds,
    estimate_interval,
    resample_means,
    resample_shared_questions,
)
from pellucid.types import Estimate

TABLES = {
    "two seeds": [[1.0, 0.0], [-1.0, 1.0]],
    "one seed": [[1.0, 0.0, -1.0]],
    "seeds of other sizes": [[1.0], [0.0, -1.0]],
}


def every_resample(table):
    """Return the probability of the mean of every possible resample of a table."""
    chances = Counter()
    for rows in itertools.product(table, repeat=len(table)):
        for drawn in itertools.product(*(itertools.product(row, repeat=len(row)) for row in rows)):
            chance = len(table) ** -len(table) * np.prod([len(row) ** -len(row) for row in rows])
            chances[round(fmean(map(fmean, drawn)), 9)] += float(chance)
    return chances


def every_resample_of_both(table):
    """Return the same probabilities if all seeds of a table share one draw of questions."""
    chances, columns = Counter(), range(len(table[0]))
    for rows in itertools.product(table, repeat=len(table)):
        for drawn in itertools.product(columns, repeat=len(columns)):
            mean = fmean(row[q] for row in rows for q in drawn)
            chances[round(mean, 9)] += len(table) ** -len(table) * len(columns) ** -len(columns)
    return chances


def quantile(chances, share):
    """Return the smallest value that at least this share of the resamples does not exceed."""
    reached = 0.0
    for value in sorted(chances):
        reached += chances[value]
        if reached >= share:
            return value
    raise AssertionError


SHARED = {
    "questions alike": [[1.0, 0.0, 1.0], [-1.0, 1.0, -1.0]],
    "all different": [[1.0, 0.0, -1.0, 1.0], [1.0, 1.0, -1.0, 0.0]],
    "one seed": [[1.0, 0.0, -1.0]],
}
DRAWS = [
    *(pytest.param(table, resample_means, every_resample, id=name) for name, table in TABLES.items()),
    *(
        pytest.param(t, resample_shared_questions, every_resample_of_both, id=f"{name}, shared")
        for name, t in SHARED.items()
    ),
]


@pytest.mark.parametrize(("table", "resample", "enumerate_all"), DRAWS)
def test_resamples_follow_the_enumerated_distribution(table, resample, enumerate_all):
    chances = enumerate_all(table)
    assert sum(chances.values()) == pytest.approx(1.0)
    drawn = Counter(np.round(resample(table, np.random.default_rng(1)), 9).tolist())
    assert {value + 0.0 for value in drawn} <= {value + 0.0 for value in chances}
    for value, chance in chances.items():
        error = (chance * (1 - chance) / RESAMPLE_COUNT) ** 0.5
        assert drawn[value] / RESAMPLE_COUNT == pytest.approx(chance, abs=4 * error), value


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_interval_has_the_ends_of_the_exact_interval(table):
    chances = every_resample(table)
    measured = estimate_interval(table)
    assert measured.value == pytest.approx(fmean(map(fmean, table)))
    assert (measured.low, measured.high) == pytest.approx((quantile(chances, 0.025), quantile(chances, 0.975)))


def test_seeds_have_equal_weight_for_any_number_of_questions():
    assert estimate_interval([[1.0], [0.0] * 9]).value == 0.5


def test_interval_that_ends_at_zero_contains_zero():
    """Sums of tenths over three seeds: by rounding, this interval ends at 5.6e-17, which was "above"."""
    table = [[1.0] * 6 + [-1.0] * 3 + [0.0], [1.0] * 6 + [0.0] * 4, [1.0] * 6 + [0.0] * 4]
    assert np.quantile(resample_shared_questions(table, np.random.default_rng(0)), 0.025) == pytest.approx(
        0.0, abs=1e-9
    )
    assert estimate_interval(table, same_questions=True).low == 0.0
    assert classify_difference(estimate_interval(table, same_questions=True)) == "cannot tell"


def test_zero_difference_has_no_sign():
    tenths = [[1.0] + [0.0] * 9, [-1.0] * 3 + [0.0] * 7, [1.0] * 2 + [0.0] * 8]
    assert str(estimate_interval(tenths).value) == "0.0"


def test_the_same_data_give_the_same_interval():
    table = np.random.default_rng(3).integers(-1, 2, size=(3, 50)).tolist()
    assert estimate_interval(table) == estimate_interval(table) != estimate_interval(table, seed=1)


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.01, 0.2, "above"), (-0.2, -0.01, "below"), (0.0, 0.2, "cannot tell"), (-0.2, 0.0, "cannot tell")],
)
def test_conclusion_requires_an_interval_without_zero(low, high, said):
    assert classify_difference(Estimate(0.0, low, high)) == said


def coverage(seeds, questions, spread, of_questions=0.0, shared=False, trials=100):
    """Return how often the interval contains the true difference.

    The effect of a variant varies by `spread` between seeds and by `of_questions` between questions, which all seeds
    share.
    """
    rng, held = np.random.default_rng(5), 0
    for _ in range(trials):
        effects = 0.1 + rng.normal(0, spread, size=(seeds, 1)) + rng.normal(0, of_questions, size=questions)
        uniform, above = rng.random((seeds, questions)), 0.3 + effects / 2
        table = np.where(uniform < above, 1.0, np.where(uniform < above + 0.4, 0.0, -1.0))
        measured = estimate_interval(table, shared)
        held += measured.low <= 0.1 <= measured.high
    return held / trials


@pytest.mark.slow
def test_interval_covers_the_truth_at_its_nominal_rate():
    assert coverage(seeds=1, questions=100, spread=0.0) == pytest.approx(0.95, abs=0.05)
    assert coverage(seeds=8, questions=100, spread=0.1) == pytest.approx(0.95, abs=0.05)


@pytest.mark.slow
def test_shared_questions_are_not_counted_as_more_questions():
    alike = {"seeds": 8, "questions": 48, "spread": 0.0, "of_questions": 0.5}
    assert coverage(**alike, shared=True) > 0.92
    assert coverage(**alike, shared=False) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3, 4, 6])
def test_false_positive_rate_of_few_seeds_matches_the_stated_odds(seeds):
    missed = 1 - coverage(seeds, questions=20_000, spread=0.1, trials=400)
    assert missed == pytest.approx(1 / compute_false_positive_odds(seeds), abs=0.06)

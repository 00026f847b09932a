"""The difference of two policies on the same questions, with a bootstrap interval that fits any distribution.

A table has a row for each seed and a number for each question in it: 1 or 0 for right or wrong, or the difference of
two such numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pellucid.types import Estimate

RESAMPLE_COUNT = 10_000
Table = Sequence[Sequence[float]]


def estimate_interval(table: Table, same_questions: bool = False, seed: int = 0) -> Estimate:
    """Return the mean over seeds of the mean over questions, with its 95% bootstrap interval.

    Seeds are sampled with replacement, then questions within each sampled seed, since runs of two seeds differ by more
    than their questions account for. With one seed, only the questions vary. With few seeds the interval can be too
    narrow: see `compute_false_positive_odds`.

    `same_questions` says that all seeds have the same questions, column by column. A second seed then adds no
    questions, so all sampled seeds share one sample of questions: the pigeonhole bootstrap (Owen 2007, doi
    10.1214/07-AOAS122), which is somewhat too wide.
    """
    rng = np.random.default_rng(seed)
    means = resample_shared_questions(table, rng) if same_questions else resample_means(table, rng)
    measures = [np.mean([np.mean(row) for row in table]), *np.quantile(means, (0.025, 0.975))]
    # Without the rounding errors of sums, and without -0.0: an interval that ends at 0 contains 0.
    return Estimate(*(round(float(value), 12) + 0.0 for value in measures))


def compute_false_positive_odds(seeds: int) -> int:
    """Return N such that at worst one of N comparisons between equal variants looks like a difference.

    The worst case is that runs of different seeds differ by far more than their questions account for. With two or
    three seeds the interval then spans the seeds' lowest to highest mean: it lies on one side of 0 in
    2 * (1/2)^seeds of all cases. With more seeds N is about seeds + 1, as tests/study/test_paired.py simulates.
    """
    return 2 if seeds == 2 else seeds + 1


def resample_shared_questions(table: Table, rng: np.random.Generator) -> np.ndarray:
    """Return means [RESAMPLE_COUNT] as `resample_means` does, but with one sample of questions for all seeds.

    Questions with equal columns are merged into one pattern, weighted by their number.
    """
    patterns, counts = np.unique(np.asarray(table, dtype=float), axis=1, return_counts=True)
    seeds = rng.multinomial(len(table), np.full(len(table), 1 / len(table)), size=RESAMPLE_COUNT) / len(table)
    questions = rng.multinomial(counts.sum(), counts / counts.sum(), size=RESAMPLE_COUNT) / counts.sum()
    return ((seeds @ patterns) * questions).sum(axis=1)


def resample_means(table: Table, rng: np.random.Generator) -> np.ndarray:
    """Return the means [RESAMPLE_COUNT] of resampled tables: seeds are sampled, then questions within each seed."""
    seeds = rng.integers(len(table), size=(RESAMPLE_COUNT, len(table)))
    means = np.empty(seeds.shape)
    for i, row in enumerate(table):
        # A mean depends only on how often each value is sampled, so that one multinomial sample is enough.
        values, counts = np.unique(np.asarray(row, dtype=float), return_counts=True)
        samples = rng.multinomial(len(row), counts / len(row), size=int((seeds == i).sum()))
        means[seeds == i] = samples @ values / len(row)
    return means.mean(axis=1)


def classify_difference(difference: Estimate) -> str:
    """Return the conclusion that an interval allows."""
    return "above" if difference.low > 0 else "below" if difference.high < 0 else "cannot tell"

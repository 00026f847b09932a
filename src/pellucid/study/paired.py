"""Two policies on the same questions: how far they are apart, and how sure that is. Resampling, no assumption of shape.

A table holds a row of numbers for each seed, one number a question: 1 or 0, or the difference of two such.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pellucid.types import Estimate

RESAMPLES = 10_000
Table = Sequence[Sequence[float]]


def interval(table: Table, seed: int = 0) -> Estimate:
    """The mean over seeds of the mean over questions, with its 95% bootstrap interval.

    Seeds are drawn with replacement, then within each drawn seed its questions: a run differs from the next one more
    than its questions would have it. With one seed the questions are all that varies. Three seeds are few: where they
    differ much, the interval covers the truth in four of five cases, not in nineteen of twenty.
    """
    means = resampled(table, np.random.default_rng(seed))
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(float(np.mean([np.mean(row) for row in table])), float(low), float(high))


def resampled(table: Table, rng: np.random.Generator) -> np.ndarray:
    """The means of RESAMPLES tables drawn from this one."""
    seeds = rng.integers(len(table), size=(RESAMPLES, len(table)))
    means = np.empty(seeds.shape)
    for i, row in enumerate(table):
        means[seeds == i] = resampled_means(row, int((seeds == i).sum()), rng)
    return means.mean(axis=1)


def resampled_means(row: Sequence[float], times: int, rng: np.random.Generator) -> np.ndarray:
    """Means of as many questions drawn from a row as it has; they depend on how often each value is drawn alone."""
    values, counts = np.unique(np.asarray(row, dtype=float), return_counts=True)
    return rng.multinomial(len(row), counts / len(row), size=times) @ values / len(row)


def differences(ours: Sequence[int], theirs: Sequence[int]) -> list[float]:
    """Question by question: 1 where only we are right, -1 where only they are."""
    return [float(mine - other) for mine, other in zip(ours, theirs, strict=True)]


def conclusion(difference: Estimate) -> str:
    """What the interval allows to say."""
    return "above" if difference.low > 0 else "below" if difference.high < 0 else "cannot tell"

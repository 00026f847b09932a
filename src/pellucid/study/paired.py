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
    than its questions would have it. With one seed the questions are all that varies.
    """
    means = resampled(table, np.random.default_rng(seed))
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(float(np.mean([np.mean(row) for row in table])), float(low), float(high))


def resampled(table: Table, rng: np.random.Generator) -> np.ndarray:
    """The means of RESAMPLES tables drawn from this one."""
    draws = (RESAMPLES, len(table))
    of_seeds = np.stack([resampled_means(row, draws, rng) for row in table])
    drawn = rng.integers(len(table), size=(1, *draws))
    return np.take_along_axis(of_seeds, drawn, axis=0)[0].mean(axis=1)


def resampled_means(row: Sequence[float], draws: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Means of as many questions drawn from a row as it has; they depend on how often each value is drawn alone."""
    values, counts = np.unique(np.asarray(row, dtype=float), return_counts=True)
    return rng.multinomial(len(row), counts / len(row), size=draws) @ values / len(row)


def differences(ours: Table, theirs: Table) -> list[list[float]]:
    """Question by question: 1 where only we are right, -1 where only they are."""
    return [[a - b for a, b in zip(mine, other, strict=True)] for mine, other in zip(ours, theirs, strict=True)]


def conclusion(difference: Estimate) -> str:
    """What the interval allows to say."""
    return "above" if difference.low > 0 else "below" if difference.high < 0 else "cannot tell"

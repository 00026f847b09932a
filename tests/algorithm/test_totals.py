"""Tests for the totals of a step over micro-batches, optimizer steps and processes, against values by hand."""

from __future__ import annotations

import pytest
import torch

from pellucid.algorithm import metrics
from pellucid.algorithm.metrics import MetricTotals, StageClock


def totals_of(*micro_batches, steps=({"grad_norm": 1.0, "lr": 0.1, "skipped": 0.0, "idle": 0.0},)):
    """Return the totals of micro-batches, each given as the gaps and the losses of its three tokens."""
    measured = MetricTotals()
    for gap, loss in micro_batches:
        measured.add_tokens({"sampler/gap_mean": torch.tensor(gap), "loss": torch.tensor(loss)})
    measured.step_metrics = list(steps)
    return measured


def test_means_cover_tokens_of_all_micro_batches_and_gap_max_is_per_token():
    """The third micro-batch has no sampled tokens."""
    means = totals_of(([0.1, 0.8, 0.3], [1.0, 2.0, 3.0]), ([0.2] * 3, [0.0, 0.0, -2.0]), ([], [])).compute_means(list)
    assert means["sampler/gap_mean"] == pytest.approx(1.8 / 6)
    assert means["sampler/gap_max"] == pytest.approx(0.8)
    assert means["loss"] == pytest.approx(4.0), "shares of a sum: they add up"


def test_optimizer_steps_average_losses_count_skips_and_keep_the_last_lr():
    names = ("grad_norm", "lr", "skipped", "idle")
    steps = [dict(zip(names, step, strict=True)) for step in ((0, 0.4, 0, 1), (2, 0.3, 1, 0), (4, 0.2, 0, 0))]
    means = totals_of(([0.0] * 3, [1.0] * 3), ([0.0] * 3, [2.0] * 3), steps=steps).compute_means(list)
    assert means["loss"] == pytest.approx(9.0 / 3)
    assert [means[name] for name in names] == [2.0, 0.2, 1, 1]
    assert not means.keys() & {"loss_scale", "skipped/overflow"}


def test_fp16_counts_overflows_and_reports_the_last_loss_scale():
    names = ("grad_norm", "lr", "skipped", "skipped/overflow", "loss_scale", "idle")
    steps = [dict(zip(names, step, strict=True)) for step in ((0, 0.4, 0, 1, 8.0, 0), (2, 0.3, 1, 1, 4.0, 0))]
    means = totals_of(([0.0] * 3, [1.0] * 3), steps=steps).compute_means(list)
    assert [means[name] for name in names] == [1.0, 0.3, 1, 2, 4.0, 0]


def test_means_and_largest_gap_cover_all_processes():
    """The other of the two processes has more tokens and also prefixes."""

    class Other:
        def __init__(self, measured):
            self.shares = [measured.sums, measured.counts, measured.gap_max]

        def __call__(self, items):
            return [*items, self.shares.pop(0)]

    mine = totals_of(([0.1] * 3, [1.0] * 3))
    other = totals_of(([0.4] * 3, [1.0] * 3), ([0.4] * 3, [2.0] * 3))
    other.add_tokens({"prefix/nll": torch.full((2,), 5.0), "sampler/gap_mean": torch.zeros(0)})
    means = mine.compute_means(Other(other))
    assert means["sampler/gap_mean"] == pytest.approx((3 * 0.1 + 6 * 0.4) / 9)
    assert means["sampler/gap_max"] == pytest.approx(0.4)
    assert means["loss"] == pytest.approx(12.0)
    assert means["prefix/nll"] == pytest.approx(5.0)


def test_laps_with_the_same_name_add_up_and_step_time_is_their_total(monkeypatch):
    """Each round of dynamic sampling adds a lap for generation and one for rewards."""
    now = iter([10.0, 11.0, 13.0, 17.0, 25.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(now))
    clock = StageClock()
    for name in ("generate", "reward", "generate", "update"):
        clock.record_lap(name)
    assert clock.get_times() == {"time/generate": 5.0, "time/reward": 2.0, "time/update": 8.0, "time/step": 15.0}

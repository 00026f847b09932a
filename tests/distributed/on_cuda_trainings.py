"""Test training on a simulated device of type CUDA against the CPU. test_pretended_cuda.py runs this file."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from accelerate.state import AcceleratorState

from conftest import records
from runs import at_home, same_weights, train, untimed, weights
from simulated_device import Device

BRIEF = ("--algorithm.steps", 3, "--evaluate.every", 3, "--checkpoint.every", 0)
TRAININGS = {
    "whole weights, four updates a step": ("--algorithm.minibatches", 2, "--algorithm.epochs", 2),
    "an adapter": ("--policy.lora", 4),
    "micro-batches with an exact KL": (
        *("--algorithm.micro-batch", 3, "--algorithm.kl", "exact", "--algorithm.kl-in", "loss"),
        *("--algorithm.kl-coef", 0.1, "--algorithm.reference-every", 2),
    ),
}


@pytest.mark.parametrize("settings", TRAININGS.values(), ids=TRAININGS)
def test_training_has_the_metrics_and_weights_of_the_cpu(settings, pretended, recipe, tmp_path, monkeypatch):
    """In fp32 the tokens are the same, and everything else differs only by the order of summation."""
    at_home(monkeypatch)
    there, here = tmp_path / "cuda", tmp_path / "cpu"
    for run in (there, here):
        AcceleratorState._reset_state(reset_partial_state=True)  # otherwise it refuses another type of device
        words = ("--policy.device", run.name, "--policy.dtype", "float32", "--optimizer.lr", 1e-3, *BRIEF, *settings)
        with Device() if run is there else nullcontext():
            assert train(recipe, "--run", run, *words) == 0
    assert pretended.replayed > 0
    for name, relative in (("metrics", 2e-4), ("evals", 2e-4), ("rollouts", 1e-4)):
        found, expected = (list(map(untimed, records(run / f"{name}.jsonl"))) for run in (there, here))
        assert len(found) == len(expected) > 0
        for one, other in zip(found, expected, strict=True):
            assert_same_values(one, other, relative)
    assert {row["grad_norm"] > 0 for row in records(here / "metrics.jsonl")} == {True}
    same_weights(weights(there), weights(here), atol=2e-6)


def assert_same_values(found, expected, relative):
    """Assert that floats agree to a relative tolerance or to 1e-5, and that everything else is equal."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_values(one, other, relative)
    else:
        assert found == (pytest.approx(expected, rel=relative, abs=1e-5) if isinstance(expected, float) else expected)

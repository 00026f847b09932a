"""The weight check detects an engine whose weights are not the pushed ones, even if they differ by one bit."""

from __future__ import annotations

import pytest
import torch

from pellucid.rollout.weight_check import MAX_COLUMNS, WeightCheck, compute_column_sums
from pellucid.types import UserError

IDS = (1, 2, 3)
SCORED = torch.tensor([-1.0, -2.0])


class Copies:
    """An engine double. It stores pushed weights, "table" twice. Tests set its log-probs and its cached tokens."""

    def __init__(self):
        self.weights, self.head = {}, None
        self.logprobs, self.cached = SCORED, 0
        self.asked = []

    def push(self, weights, without=(), head=True):
        self.weights |= {name: x.clone() for name, x in weights.items() if name not in without}
        if head or self.head is None:
            self.head = weights["table"].clone()

    def read_columns(self, name, at):
        self.asked.append((name, at))
        held = [self.weights[name], *([self.head] if name == "table" else [])]
        return [x[:, at] if x.dim() > 1 else x[:, None] for x in held]

    def score_tokens(self, ids):
        assert ids == IDS
        return self.logprobs, self.cached


def weights_of(dtype=torch.float32):
    torch.manual_seed(0)
    names = {"table": (40, 16), "first": (12, 16), "second": (12, 16), "norm": (16,)}
    return {name: torch.randn(shape).to(dtype) for name, shape in names.items()}


def moved(weights, places):
    """Return the weights with one entry of each named weight moved to the next number of its dtype."""
    new = {name: x.clone() for name, x in weights.items()}
    for name in places:
        flat = new[name].view(-1)
        flat[7] = flat[7].nextafter(torch.tensor(9.0, dtype=flat.dtype))
    return new


def begun(dtype=torch.float32):
    engine, freshness, weights = Copies(), WeightCheck(), weights_of(dtype)
    engine.push(weights)
    freshness.check(engine, weights, IDS, SCORED)
    engine.asked.clear()
    return engine, freshness, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["table", "first", "second", "norm"])
def test_missed_one_bit_update_of_a_weight_is_detected(name, dtype):
    engine, freshness, weights = begun(dtype)
    new = moved(weights, weights)
    engine.push(new, without=[name])
    with pytest.raises(UserError, match=f"old weights: {name} "):
        freshness.check(engine, new, IDS, SCORED)


def test_missed_update_of_a_tied_head_is_detected():
    engine, freshness, weights = begun()
    new = moved(weights, ["table"])
    engine.push(new, head=False)
    with pytest.raises(UserError, match="old weights: table "):
        freshness.check(engine, new, IDS, SCORED)


def test_missed_push_is_detected_again():
    """The weights of a refused push do not count as weights of the engine."""
    engine, freshness, weights = begun()
    new = moved(weights, ["first"])
    for _ in range(2):
        with pytest.raises(UserError, match="old weights: first "):
            freshness.check(engine, new, IDS, SCORED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_complete_pushes_of_tiny_updates_pass(dtype):
    engine, freshness, weights = begun(dtype)
    for i in range(200):
        weights = moved(weights, list(weights)[: i % 5])
        engine.push(weights)
        freshness.check(engine, weights, IDS, SCORED)


def test_check_reads_only_a_few_changed_columns():
    engine, freshness, weights = begun()
    new = moved(weights, ["first"])
    engine.push(new)
    freshness.check(engine, new, IDS, SCORED)
    assert engine.asked == [("first", [7])]
    new = {name: x + 1 for name, x in new.items()}
    engine.push(new)
    freshness.check(engine, new, IDS, SCORED)
    assert {name: len(set(at)) for name, at in engine.asked[1:]} == dict.fromkeys(new, MAX_COLUMNS) | {"norm": 1}


def test_check_text_from_the_prefix_cache_is_detected():
    engine, freshness, weights = begun()
    engine.cached = 64
    with pytest.raises(UserError, match="prefix cache"):
        freshness.check(engine, weights, IDS, SCORED)


@pytest.mark.parametrize(
    ("dtype", "first", "then", "fires"),
    [
        (torch.float32, 1e-5, 9e-5, False),
        (torch.float32, 1e-5, 1.1e-4, True),
        (torch.float32, 0.0, 1.9e-5, False),
        (torch.bfloat16, 1e-2, 9e-2, False),
        (torch.bfloat16, 1e-2, 0.11, True),
        (torch.bfloat16, 1e-1, 0.21, True),
        (torch.float32, 1e-5, float("nan"), True),
    ],
)
def test_logprob_gap_may_grow_at_most_tenfold(dtype, first, then, fires):
    engine, freshness, weights = Copies(), WeightCheck(), weights_of(dtype)
    engine.push(weights)
    engine.logprobs = SCORED + first
    freshness.check(engine, weights, IDS, SCORED)
    engine.logprobs = SCORED + then
    if fires:
        with pytest.raises(UserError, match="off the scorer's"):
            freshness.check(engine, weights, IDS, SCORED)
    else:
        freshness.check(engine, weights, IDS, SCORED)


def test_different_model_is_detected_at_the_first_push():
    engine, weights = Copies(), weights_of()
    engine.push(weights)
    engine.logprobs = SCORED + 3e-3
    with pytest.raises(UserError, match="another model"):
        WeightCheck().check(engine, weights, IDS, SCORED)


def test_non_finite_weights_raise_user_error():
    engine, freshness, weights = begun()
    new = weights | {"first": weights["first"] * torch.nan}
    engine.push(new)
    with pytest.raises(UserError, match=r"no longer finite: lower optimizer\.lr"):
        freshness.check(engine, new, IDS, SCORED)


def test_subnormal_numbers_may_be_flushed_to_zero():
    engine, freshness, weights = begun()
    new = weights | {"first": weights["first"].clone()}
    new["first"][:, 3] = 1e-40
    engine.push(new)
    engine.weights["first"][:, 3] = 0.0
    freshness.check(engine, new, IDS, SCORED)


def test_column_sums_do_not_depend_on_the_chunk_size(monkeypatch):
    x = torch.randn(100, 8)
    whole = compute_column_sums(x)
    monkeypatch.setattr("pellucid.rollout.weight_check.MAX_ENTRIES_SUMMED", 24)
    assert torch.equal(compute_column_sums(x), whole)
    assert len(set(whole.tolist())) == 8


def test_column_sums_depend_on_the_order_of_rows():
    x = torch.randn(10, 4)
    assert not (compute_column_sums(x) == compute_column_sums(x.flip(0))).any()

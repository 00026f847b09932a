"""Tests of `--profile`: the phase and the kind that an operator counts for, and the file that a run writes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

from architectures import batch_of, model_of
from conftest import character_tokenizer, make_policy, records
from pellucid import cli
from pellucid.models import attention, fused_check, linear, native
from pellucid.models.attention import PackedSequences, attend_packed
from pellucid.models.decode import DecodeBatch
from pellucid.models.linear import compute_weight_gradient
from pellucid.policy.policy import Policy
from pellucid.training import doctor
from pellucid.training.doctor import (
    FlopCounter,
    MemorySample,
    PhaseProfile,
    classify_operator,
    format_profile,
    group_by_phase,
)

METRICS = {"time/generate": 2.0, "time/reward": 0.5, "time/score": 0.0, "time/update": 1.5}


def event(name, start, seconds):
    """Return an event as torch.profiler does, in microseconds. A collective takes no time of its thread."""
    own = 0.0 if name.startswith(doctor.COLLECTIVE_PREFIXES) else seconds
    lasting = SimpleNamespace(start=start * 1e6, end=(start + seconds) * 1e6)
    return SimpleNamespace(name=name, time_range=lasting, self_cpu_time_total=own * 1e6)


def test_operator_counts_for_the_phase_in_which_it_started():
    events = [
        event("mkldnn::_linear_pointwise", 7.0, 1.0),
        event("aten::bmm", 8.9, 0.5),
        event("aten::exp2_", 9.2, 0.1),
        event("aten::mm", 9.6, 0.4),
        event("aten::mm", 10.9, 0.05),
    ]
    memory = [MemorySample(100.1, 1.0), MemorySample(101.9, 3.0), MemorySample(103.0, 2.5), MemorySample(104.2, 2.0)]
    stages = group_by_phase(events, memory, start=100.0, metrics=METRICS)
    assert {name: stage.seconds for name, stage in stages.items()} == {k.split("/")[1]: v for k, v in METRICS.items()}
    assert stages["generate"].seconds_by_kind == pytest.approx({"matrix products": 1.5})
    assert stages["reward"].seconds_by_kind == pytest.approx({"softmax, exp, log": 0.1})
    assert stages["score"].seconds_by_kind == {}
    assert stages["update"].seconds_by_kind == pytest.approx({"matrix products": 0.45})
    assert [stage.memory_gb for stage in stages.values()] == [[1.0, 3.0], [], [], [2.5, 2.0]]


def test_overlapping_collectives_are_counted_once():
    events = [
        event("aten::mm", 0.0, 0.1),
        event("gloo:all_gather", 1.0, 0.25),
        event("gloo:all_reduce", 3.0, 0.5),
        event("gloo:all_reduce", 3.125, 0.125),
        event("nccl:reduce_scatter", 3.25, 0.5),
    ]
    stages = group_by_phase(events, [], start=0.0, metrics=METRICS)
    text = format_profile(stages, dict.fromkeys(stages, 0.0), 0.5, "bfloat16")
    [shown] = [line[26:].split() for line in text.splitlines() if line.startswith("between processes")]
    assert shown == ["0.25", "0.00", "0.00", "0.75", "1.00"]
    assert stages["update"].seconds_by_kind["the rest"] == 0.0


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 warns
def test_collective_prefixes_match_the_event_names_of_torch():
    dist = torch.distributed
    if alone := not dist.is_initialized():  # an earlier test may have left a process group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
            dist.all_reduce(torch.ones(2))
    finally:
        if alone:
            dist.destroy_process_group()
    assert any(e.name.startswith(doctor.COLLECTIVE_PREFIXES) for e in profiler.events())


def test_counted_operations_equal_those_of_torch():
    policy = Policy(model_of("llama, untied"), character_tokenizer())

    def work():
        policy.score(batch_of()).logprobs.sum().backward()

    with FlopCounterMode(display=False) as counter:
        work()
    with FlopCounter() as operations:
        work()
    counted = counter.get_flop_counts()["Global"]
    products = counted[torch.ops.aten.mm] + counted[torch.ops.aten.bmm]
    assert sum(n for _, n in operations.operations) == products


def test_operations_with_packed_weights_are_counted_too():
    weight = torch.ops.mkldnn._reorder_linear_weight(torch.randn(7, 5), 3)
    with FlopCounter() as operations:
        torch.ops.mkldnn._linear_pointwise(torch.randn(3, 5), weight, None, "none", [], "")
        torch.addmm(torch.randn(7), torch.randn(3, 5), torch.randn(5, 7))
        torch.randn(3, 5) + 1
    assert [n for _, n in operations.operations] == [2 * 3 * 5 * 7, 2 * 3 * 5 * 7]


def test_fused_steps_are_counted_and_named(monkeypatch):
    if not fused_check.load_fused_kernel()[0]:
        pytest.skip("decoding is not fused here")
    decoder = fused_check.build_self_check_decoder()
    batch = DecodeBatch(decoder, 4, fused_check.select_fused_decoder(decoder))
    head, seen = fused_check.SELF_CHECK_CONFIG.vocab_size * 576, []
    layers = 576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1088
    with monkeypatch.context() as patched:
        patched.setattr(native.OperationCounter, "entries", seen)
        batch.admit([[1, 2, 3]], 4)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            batch.step(torch.arange(4))
    batch.step(torch.arange(4))
    done = [2 * (3 * layers + head), 2 * 4 * (layers + head)]
    assert [n for _, n in seen] == pytest.approx(done, rel=0.01), "the head is filled up to blocks"
    assert "tokens, fused" in {classify_operator(event.name) for event in profiler.events()}


def test_cpp_kernels_of_an_update_are_counted_and_named(monkeypatch):
    if not attention.load_attention_kernel()[0]:
        pytest.skip("attention is not computed in C++ here")
    heads = [torch.randn(5, n, 64).bfloat16().requires_grad_() for n in (2, 1, 1)]
    line = PackedSequences(torch.tensor([3, 5]), torch.tensor([0]))
    x, grad, weight, seen = *(torch.ones(*sizes).bfloat16() for sizes in ((40, 32), (40, 64), (64, 32))), []
    linear.apply_linear(x, weight)  # the first call runs the self-check, whose products would be counted too
    monkeypatch.setattr(native.OperationCounter, "entries", seen)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        attend_packed(*heads, line, attention.load_attention_kernel()[0]).sum().backward()
        compute_weight_gradient(grad, x, torch.float32)
        linear.apply_linear(x, weight)
        linear.compute_input_gradient(grad, weight)
    kinds = [classify_operator(event.name) for event in profiler.events()]
    assert kinds.count("attention") == 2
    assert kinds.count("matrix products") >= 3
    assert [n for _, n in seen] == [2 * 40 * 64 * 32] * 3 * attention.load_attention_kernel()[0].uses_amx


def test_profile_table_shows_seconds_shares_and_peak_memory():
    stages = {
        "generate": PhaseProfile(4.0, Counter({"matrix products": 1.0, "attention": 2.0}), [1.0, 2.0], []),
        "update": PhaseProfile(6.0, Counter({"matrix products": 5.0}), [3.0], []),
    }
    text = format_profile(stages, {"generate": 0.5, "update": 2.0}, 0.5, "bfloat16")
    rows = {line[:26].strip(): line[26:].split() for line in text.splitlines()}
    assert rows["seconds"] == ["4.00", "6.00", "10.00"]
    assert rows["attention"] == ["2.00", "0.00", "2.00"]
    assert rows["Python and dispatch"] == ["1.00", "1.00", "2.00"]
    assert rows["at this machine's speed"] == ["1.00", "4.00", "5.00"]
    assert rows["share of that speed"] == ["25%", "67%", "50%"]
    assert "between processes" not in rows
    assert rows["peak memory, GB"] == ["2.00", "3.00", "3.00"]


def test_operator_kinds_match_the_names_of_torch_operators():
    """The kinds list prefixes of operator names. A misspelled prefix would count its operators as the rest."""
    policy = make_policy("llama")
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        hidden = torch.randn(8, policy.model.config.hidden_size, requires_grad=True)
        (hidden @ hidden.T).softmax(-1).exp().log().sum().backward()
        torch.nn.functional.scaled_dot_product_attention(*[torch.randn(1, 2, 4, 8)] * 3)
        torch.cat([hidden, hidden]).to(torch.bfloat16).index_select(0, torch.tensor([0]))
        torch.optim.AdamW([hidden], fused=True).step()
    kinds = {classify_operator(event.name) for event in profiler.events() if event.name.startswith("aten::")}
    assert kinds == set(doctor.OPERATOR_KINDS) - {"embedding", "tokens, fused"}


@pytest.mark.slow
def test_a_profiled_run_takes_the_same_steps_and_writes_one_file(recipe, tmp_path, capsys, undisturbed):
    runs = [undisturbed(recipe, "--algorithm.steps", "4"), tmp_path / "profiled"]
    with pytest.raises(SystemExit) as exit_:
        cli.main(["train", str(recipe), "--run", str(runs[1]), "--algorithm.steps", "4", "--profile"])
    assert exit_.value.code == 0
    losses = [[r["loss"] for r in records(run_dir / "metrics.jsonl")] for run_dir in runs]
    assert losses[0] == losses[1]
    assert not (runs[0] / "profile.txt").exists()
    text = (runs[1] / "profile.txt").read_text()
    assert text in capsys.readouterr().out
    seconds = next(line for line in text.splitlines() if line.startswith("seconds")).split()[1:]
    third = records(runs[1] / "metrics.jsonl")[2]
    for shown, name in zip(seconds, doctor.STEP_PHASES, strict=False):
        assert float(shown) == pytest.approx(third[f"time/{name}"], abs=0.006)
    products = next(line for line in text.splitlines() if line.startswith("matrix products, TFLOP")).split()[3:]
    assert len(products) == len(doctor.STEP_PHASES) + 1


def test_run_of_fewer_than_three_steps_has_no_profile(tmp_path):
    steps = iter([SimpleNamespace(step=i, metrics=METRICS, groups=[]) for i in (1, 2)])
    assert len(list(doctor.profile_steps(steps, tmp_path / "profile.txt", torch.float32))) == 2
    assert not (tmp_path / "profile.txt").exists()

"""Test whole commands on a simulated device of type CUDA. test_pretended_cuda.py runs this file in a separate process.

This file, test_waits.py, test_graphs.py and models/on_cuda_counts.py take every branch of the package for a device of
type "cuda", except the one of vLLM (rollout/test_vllm.py).
"""

from __future__ import annotations

import pytest
import torch

import pretended_cuda
from conftest import records
from pellucid.config import load_config
from pellucid.distributed import process_group
from pellucid.models import attention, native
from pellucid.training import checkpoint, doctor
from pretended_graph import REFUSED
from runs import at_home, train
from simulated_device import DEVICE, STAGED_BYTES, Device

BRIEF = ("--algorithm.steps", 3, "--evaluate.every", 3, "--checkpoint.every", 2)


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Install a compiler that must not be called and an empty cache. Return a path that exists if it was called."""
    asked, program = tmp_path / "asked", tmp_path / "compiler"
    program.write_text(f"#!/bin/sh\necho $@ >> {asked}\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.load_library.cache_clear()
    return asked


def test_run_trains_from_the_first_step_to_the_report(gpu, pretended, compiler, recipe, tmp_path, monkeypatch, capfd):
    """The run uses bf16, graphs and flash attention, and none of the C++ for CPUs."""
    at_home(monkeypatch)
    assert train(recipe, "--run", tmp_path / "run", "--policy.device", "auto", "--policy.dtype", "auto", *BRIEF) == 0
    said = capfd.readouterr()
    assert f"in bfloat16 on {DEVICE}" in said.out
    assert "CUDA graph" not in said.err
    assert (tmp_path / "run/report.html").stat().st_size > 10_000
    assert (tmp_path / "run/model/model.safetensors").exists()
    rows = records(tmp_path / "run/metrics.jsonl")
    assert len(rows) == 3
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(row["sampler/gap_mean"] < 0.05 for row in rows)
    assert pretended.captured > 3
    assert pretended.replayed > pretended.captured
    names = {str(func) for func in gpu.operators}
    assert {"aten._flash_attention_forward.default", "aten._flash_attention_backward.default"} <= names
    assert not compiler.exists()
    assert not (tmp_path / "cache").exists()
    compiled = ("models/native.py", "models/attention.py", "models/fused_decode.py", "distributed/optimizer.py")
    assert not [line for line in gpu.addresses if line.startswith(compiled)], "C++ runs on the host"


def test_report_is_written_after_a_resume(gpu, recipe, tmp_path, monkeypatch):
    at_home(monkeypatch)
    run = tmp_path / "run"
    settings = ("--policy.device", "cuda", "--policy.deterministic", "--policy.dtype", "float16")
    assert train(recipe, "--run", run, *settings, *BRIEF, "--algorithm.steps", 1) == 0
    assert train("--resume", run, "--algorithm.steps", 2) == 0
    assert len(records(run / "metrics.jsonl")) == 2
    assert (run / "report.html").exists()


WAYS = {
    "offload": ("--optimizer.offload",),
    "generate()": ("--sampler.name", "hf"),
    "fp16": ("--policy.dtype", "float16"),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_training_settings_work_on_cuda(way, gpu, recipe, tmp_path, monkeypatch):
    at_home(monkeypatch)
    assert train(recipe, "--run", tmp_path / "run", "--policy.device", "cuda", *BRIEF, *way) == 0
    assert all(row["grad_norm"] > 0 for row in records(tmp_path / "run/metrics.jsonl"))
    assert not gpu.pending_copies


@pytest.mark.usefixtures("gpu")
def test_random_state_of_the_gpu_is_saved_and_restored():
    state = checkpoint.get_random_state()
    torch.cuda.set_rng_state(torch.full((16,), 7, dtype=torch.uint8))
    checkpoint.restore_random_state(state)
    assert torch.cuda.get_rng_state().tolist() == [0] * 16


def test_run_out_of_memory_halves_its_micro_batches(pretended, recipe, tmp_path, monkeypatch, capfd):
    """Its numbers equal those of a run with enough memory, up to rounding."""
    at_home(monkeypatch)
    settings = ("--policy.device", "cuda", *BRIEF, "--algorithm.steps", 1, "--algorithm.micro-batch", 16)
    with Device() as gpu:
        assert train(recipe, "--run", tmp_path / "ample", *settings) == 0
        peak = gpu.memory.peak
    assert "memory ran out" not in capfd.readouterr().out
    with Device(memory_bytes=peak * 9 // 10) as gpu:
        assert train(recipe, "--run", tmp_path / "scarce", *settings) == 0
        assert gpu.memory.peak < peak
    assert "memory ran out with 8 rows in a forward pass" in capfd.readouterr().out
    ample, scarce = (records(tmp_path / name / "metrics.jsonl")[0] for name in ("ample", "scarce"))
    assert ample["memory/peak_gb"] == pytest.approx(peak / 1e9)
    assert scarce["grad_norm"] == pytest.approx(ample["grad_norm"], rel=1e-4)


def test_copies_from_pinned_memory_do_not_wait_and_copies_to_it_arrive_later(gpu):
    large = torch.ones(STAGED_BYTES)
    assert not large.is_pinned()
    x = large.pin_memory().to(DEVICE, non_blocking=True)
    torch.empty(3, pin_memory=True).copy_(x[:3], non_blocking=True)
    on_host = x[:3].to("cpu", non_blocking=True)
    assert not gpu.waits
    assert on_host.isnan().all(), "nobody has waited for it"
    torch.cuda.synchronize()
    assert on_host.tolist() == [1.0] * 3
    assert gpu.waits.total() == 1


def test_launched_process_joins_over_nccl(gpu, monkeypatch):
    joined = []
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(process_group.dist, "init_process_group", lambda backend, timeout: joined.append(backend))
    monkeypatch.setattr(process_group, "PartialState", lambda **_: None)
    process_group.join_process_group(torch.device(DEVICE), 1.0)
    assert joined == ["cpu:gloo,cuda:nccl"]


def test_memory_plan_is_compared_with_the_memory_of_the_gpu(recipe, capsys):
    with Device(memory_bytes=24 * 10**9):
        assert doctor.print_memory_plan(load_config(recipe, ["--policy.device", "cuda"])) == 0
        assert "Verdict for this GPU: fits" in capsys.readouterr().out


def test_doctor_reports_how_the_gpu_decodes(gpu, compiler):
    said = dict(doctor.collect_findings())
    assert said["gpus"] == "a pretended GPU"
    assert said["auto"] == f"device {DEVICE}, dtype bfloat16"
    assert said["decoding"] == "by CUDA graphs of torch's operators: Triton is not installed"
    assert said["attention"] == "flash attention"
    assert not compiler.exists()


def test_doctor_reports_why_the_gpu_decodes_without_graphs(gpu, pretended):
    pretended.refuse_from = 1
    said = dict(doctor.collect_findings())
    assert said["decoding"] == f"by torch's operators: tokens are decoded without a CUDA graph: {REFUSED}"


def test_gpu_without_flash_attention_uses_the_operators(gpu, monkeypatch):
    """An old GPU raises this error."""
    forward = torch.ops.aten._flash_attention_forward.default

    def refusing(*about, **how):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    monkeypatch.setitem(pretended_cuda.BY_HAND, forward, refusing)
    attention.find_flash_fault.cache_clear()
    assert not attention.uses_flash(torch.device(DEVICE), torch.float16)
    said = dict(doctor.collect_findings())["attention"]
    attention.find_flash_fault.cache_clear()
    assert said == "by torch's operators, without flash attention: FlashAttention only supports Ampere GPUs or newer."

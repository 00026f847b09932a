"""Whole commands on a device that says it is CUDA. test_pretended_cuda.py runs this file in a process of its own."""

from __future__ import annotations

import pytest
import torch

import pretended_cuda
from conftest import records
from pellucid.models import attention, native
from pellucid.training import doctor
from pretended_graph import REFUSED
from runs import at_home, train
from simulated_device import WHERE

BRIEF = ("--algorithm.steps", 3, "--evaluate.every", 3, "--checkpoint.every", 2)


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that must not be asked: the file exists if it was. Nothing compiled is found in the cache."""
    asked, program = tmp_path / "asked", tmp_path / "compiler"
    program.write_text(f"#!/bin/sh\necho $@ >> {asked}\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.load_library.cache_clear()
    return asked


def test_a_run_trains_from_the_first_step_to_the_report(gpu, pretended, compiler, recipe, tmp_path, monkeypatch, capfd):
    """In bf16, with graphs and flash attention, and without the C++ that a CPU runs."""
    at_home(monkeypatch)
    assert train(recipe, "--run", tmp_path / "run", "--policy.device", "auto", "--policy.dtype", "auto", *BRIEF) == 0
    said = capfd.readouterr()
    assert f"in bfloat16 on {WHERE}" in said.out
    assert "CUDA graph" not in said.err
    assert (tmp_path / "run/report.html").stat().st_size > 10_000
    assert (tmp_path / "run/model/model.safetensors").exists()
    rows = records(tmp_path / "run/metrics.jsonl")
    assert len(rows) == 3
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(row["sampler/gap_mean"] < 0.05 for row in rows)
    assert pretended.recorded > 3
    assert pretended.replayed > pretended.recorded
    names = {str(func) for func in gpu.operators}
    assert {"aten._flash_attention_forward.default", "aten._flash_attention_backward.default"} <= names
    assert not compiler.exists()
    assert not (tmp_path / "cache").exists()


def test_the_report_of_a_run_is_made_after_a_resume(gpu, recipe, tmp_path, monkeypatch):
    at_home(monkeypatch)
    run = tmp_path / "run"
    settings = ("--policy.device", "cuda", "--policy.deterministic", "--policy.dtype", "float16")
    assert train(recipe, "--run", run, *settings, *BRIEF, "--algorithm.steps", 1) == 0
    assert train("--resume", run, "--algorithm.steps", 2) == 0
    assert len(records(run / "metrics.jsonl")) == 2
    assert (run / "report.html").exists()


def test_doctor_says_how_the_gpu_decodes(gpu, compiler):
    said = dict(doctor.collect_findings())
    assert said["gpus"] == "a pretended GPU"
    assert said["auto"] == f"device {WHERE}, dtype bfloat16"
    assert said["decoding"] == "by CUDA graphs"
    assert said["attention"] == "flash attention"
    assert not compiler.exists()


def test_doctor_says_why_the_gpu_decodes_without_graphs(gpu, pretended):
    pretended.refuse_from = 2
    said = dict(doctor.collect_findings())
    assert said["decoding"] == f"by torch's operators: tokens are decoded without a CUDA graph: {REFUSED}"


def test_a_gpu_that_refuses_flash_attention_goes_another_way(gpu, monkeypatch):
    """As one that is too old."""
    forward = torch.ops.aten._flash_attention_forward.default

    def refusing(*about, **how):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    monkeypatch.setitem(pretended_cuda.BY_HAND, forward, refusing)
    attention.find_flash_fault.cache_clear()
    assert not attention.uses_flash(torch.device(WHERE), torch.float16)
    said = dict(doctor.collect_findings())["attention"]
    attention.find_flash_fault.cache_clear()
    assert said == "by torch's operators, without flash attention: FlashAttention only supports Ampere GPUs or newer."

"""Test `benchmarks/gpu.py` on a simulated GPU: each of its rows, and rows that fail."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from simulated_device import HAS_REAL_DEVICE

pytestmark = pytest.mark.skipif(HAS_REAL_DEVICE, reason="there is a real one")

BENCHMARKS = Path("benchmarks").absolute()
FINDINGS = {
    "machine": ["gpu memory_gb", "copied_tb_s", "bf16_tflops"],
    "kernels": ["update decoding warnings", *["kernel triton_us operators_us"] * 12],
    "sample": ["way floor_s", *["way seconds tokens_per_s peak_gb"] * 2, "way tokens ms busy_ms kernels allocations"],
    "steps": [*["micro_batch time/generate"] * 6, *["profile ms busy_ms kernels"] * 3],
    "tests": ["test outcome seconds"] * 3,
    "generate": [*["work contender seconds tokens"] * 2, "work contender peak_gb"],
    "batching": [*["work contender seconds tokens"] * 2, "work contender peak_gb"],
    "trl": [*["work contender seconds reward generate update"] * 2, "work contender peak_gb"],
    "lora": [*["work contender seconds generate update reward"] * 2, "work contender peak_gb"],
    "push": [*["way server seconds gb"] * 2, "way left_out"],
    "accuracy": [*["work contender seconds step mean greedy"] * 2, "work contender peak_gb"],
}
"""The first keys of the findings of each kind of row. The number of steps and tests is not checked."""
SPOILT = f"""
import sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
import gpu, types

def raises(folder, report):
    report(finding="one | two")
    raise ValueError("what is wrong\\nat length")

def hangs(folder, report):
    time.sleep(60)

def dies(folder, report):
    import os
    os.kill(os.getpid(), 9)

def works(folder, report):
    report(finding="fine")

gpu.preload = lambda: None
gpu.pretend_gpu = lambda folder: None
rows = types.ModuleType("gpu_rows")
rows.make_rows = lambda simulated: {{work.__name__: work for work in (raises, hangs, dies, works)}}
sys.modules["gpu_rows"] = rows
gpu.main()
"""


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu")


def run(program, *options):
    """Run a program to its end, and return the process and its findings."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, program, "--simulated", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Run in the folder of the test, to show that the script does not depend on the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_row_reports_on_a_simulated_gpu(gpu, tmp_path):
    done, findings = run(BENCHMARKS / "gpu.py", "--within", "800", "--limit", "300", "--output", "gpu.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "gpu.jsonl").read_text() == done.stdout
    assert findings[0]["row"] == "facts"
    rows = {}
    for finding in findings[1:]:
        rows.setdefault(finding.pop("row"), []).append(" ".join(finding))
    assert {name.partition("-")[0] for name in rows} == FINDINGS.keys()
    for name, (*keys, last) in rows.items():
        expected = FINDINGS[name.partition("-")[0]]
        assert last == "row_seconds"
        assert len(keys) == len(expected) or name.startswith(("steps", "tests")), (name, keys)
        assert all(one.startswith(other) for one, other in zip(keys[-3:], expected[-3:], strict=True)), (name, keys)
    [checks] = [f for f in findings if f.get("decoding")][:1]
    assert (checks["update"], checks["decoding"], checks["warnings"]) == ("right", "right", [])
    table = gpu.make_tables(map(json.loads, done.stdout.splitlines()))
    assert "| row | copied_tb_s |\n|---|---|\n| machine |" in table


@pytest.mark.slow
def test_row_that_fails_is_reported_and_the_others_run(tmp_path):
    (tmp_path / "spoilt.py").write_text(SPOILT)
    done, findings = run(tmp_path / "spoilt.py", "--limit", "6")
    assert done.returncode == 1
    found = [{key: x for key, x in f.items() if key != "row_seconds"} for f in findings[1:]]
    assert found == [
        {"row": "raises", "finding": "one | two"},
        {"row": "raises", "fault": "ValueError: what is wrong"},
        {"row": "hangs", "fault": "not done after 6 s"},
        {"row": "dies", "fault": "no output"},
        {"row": "works", "finding": "fine"},
        {"row": "works"},
    ]
    assert "in raises" in done.stderr


@pytest.mark.slow
def test_row_ends_at_the_deadline_and_the_next_is_left_out(gpu, tmp_path):
    report, deadline = gpu.Report(tmp_path / "gpu.jsonl"), time.monotonic() + 1.1 * gpu.LEAST_SECONDS
    for name in ("hangs", "next"):
        gpu.run_row(name, lambda folder, report: time.sleep(60), tmp_path, report, 100.0, deadline)
    findings = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [list(finding) for finding in findings] == [["row", "fault", "row_seconds"], ["row", "left_out"]]
    assert findings[0]["fault"].startswith("not done after")
    assert report.has_fault
    report.stdout.close()


def test_table_has_a_row_for_each_finding_of_a_kind(gpu):
    findings = [
        {"row": "a", "x": 1, "y": [["k", 2], ["l", 3]]},
        {"row": "b", "z": "p|q"},
        {"row": "c", "x": 4, "y": []},
    ]
    one, other = gpu.make_tables(findings).split("\n\n")
    assert one.splitlines() == ["| row | x | y |", "|---|---|---|", "| a | 1 | k 2<br>l 3 |", "| c | 4 |  |"]
    assert other.splitlines()[-1] == "| b | p/q |"


def test_library_that_uses_cuda_on_import_is_refused(gpu, monkeypatch):
    """Rows run in forks, and CUDA cannot be used in a fork of a process that has used it."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(SystemExit, match="used CUDA while it was imported"):
        gpu.preload()


def test_gpu_is_detected_without_initializing_cuda(gpu):
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


@pytest.mark.parametrize(
    ("words", "line"), [((), "--simulated"), (("--simulated", "--only", "row"), "there is no row row")]
)
def test_invalid_options_exit_with_one_line(gpu, words, line, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    monkeypatch.setattr(gpu, "pretend_gpu", lambda folder: None)
    monkeypatch.setitem(sys.modules, "gpu_rows", SimpleNamespace(make_rows=lambda simulated: {"machine": None}))
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert line in capsys.readouterr().err.splitlines()[-1]

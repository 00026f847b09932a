"""`benchmarks/gpu.py` on what stands in for a GPU: each of its rows, and rows that fail."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

import forked
from simulated_device import A_REAL_ONE

pytestmark = pytest.mark.skipif(A_REAL_ONE, reason="there is a real one")

BENCHMARKS = Path("benchmarks").absolute()
SAYS = {
    "device": "the same tokens, weights .*e-0[5-9] apart",
    "resume": "the same weights, rollouts, metrics and evaluations",
    "kernels": r"AdamW fused; attention math \d",
    "fsdp2": "over gloo: .* apart",
    "arithmetic": "greedy .* before, .* after 1 steps",
    "step": r"s, trl-autocast \d.*GB",
    "sample": r"tokens/s, generate \d.*GB",
    "graphs": r"tokens/s, without-graphs \d.*GB",
    "plan": r"planned \d.* GB, measured [\d.]*[1-9]",
}
"""What a row says where all is well."""
AS_THE_SMALLER_ONE = ("step-1.5B", "sample-1.5B", "graphs-1.5B")
"""But for the shape, which plan-1.5B sees."""
SPOILT = f"""
import sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
import gpu
from gpu_rows import Outcome, Row

def raises(place):
    raise ValueError("what | is wrong\\nat length")

def hangs(place):
    place.apart(time.sleep, 60)

def dies(place):
    import os
    os.kill(os.getpid(), 9)

def fails_apart(place):
    place.apart(raises, place)

gpu.preload = lambda: None
gpu.ROWS.clear()
for work in (raises, hangs, dies, fails_apart, lambda place: Outcome("fine", "pass")):
    gpu.ROWS[work.__name__] = Row(work, "nothing")
gpu.main()
"""


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu")


def ran(program, *options):
    """What a process said, and the rows of its table by name."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = forked.ran(program, "--simulated", *options, env=environment)
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    return done, {name: cells for name, *cells in lines[1:]}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """In a folder of the test's: all is found from anywhere."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_every_row_is_well_where_a_gpu_is_simulated(gpu, tmp_path):
    names = [name for name in gpu.ROWS if name not in AS_THE_SMALLER_ONE]
    done, rows = ran(BENCHMARKS / "gpu.py", "--repeats", "1", "--output", "gpu.md", "--only", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "gpu.md").read_text() == done.stdout
    facts, *objects = map(json.loads, (tmp_path / "gpu.jsonl").read_text().splitlines())
    assert facts["heading"] in done.stdout
    assert [[each["row"], each["result"], each["verdict"]] for each in objects] == [
        [name, result, verdict] for name, (_, result, verdict, _) in rows.items()
    ]
    assert list(rows) == names
    assert {name.partition("-")[0] for name in names} == SAYS.keys()
    for name, (on, result, verdict, _) in rows.items():
        assert "simulated" in on
        assert re.search(SAYS[name.partition("-")[0]], result), (name, result)
        assert re.match(r"pass|\d+\.\d\dx", verdict), (name, verdict)


@pytest.mark.slow
def test_a_row_that_fails_is_told_and_ends_no_other(tmp_path):
    (tmp_path / "spoilt.py").write_text(SPOILT)
    done, rows = ran(tmp_path / "spoilt.py", "--limit", "2")
    assert done.returncode == 1
    said = {name: (result, verdict) for name, (_, result, verdict, _) in rows.items()}
    assert said == {
        "raises": ("ValueError: what / is wrong", "fail"),
        "hangs": ("not done after 2 s", "fail"),
        "dies": ("nothing was said", "fail"),
        "fails_apart": ("ValueError: what / is wrong", "fail"),
        "<lambda>": ("fine", "pass"),
    }
    assert "in raises" in done.stderr


@pytest.mark.slow
def test_a_row_for_which_no_time_is_left_is_left_out_and_what_is_known_is_kept(tmp_path):
    """The one that hangs takes all of the time."""
    (tmp_path / "spoilt.py").write_text(SPOILT)
    done, rows = ran(
        tmp_path / "spoilt.py", "--within", "20", "--output", "gpu.md", "--only", "<lambda>", "hangs", "dies"
    )
    assert done.returncode == 1
    verdicts = {name: verdict for name, (_, _, verdict, _) in rows.items()}
    assert verdicts == {"<lambda>": "pass", "hangs": "fail", "dies": "left out"}
    assert len((tmp_path / "gpu.jsonl").read_text().splitlines()) == 4


def test_a_library_that_uses_cuda_while_it_is_imported_is_refused(gpu, monkeypatch):
    """Rows are forks, and CUDA cannot be used in a fork of a process that has used it."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(SystemExit, match="used CUDA while it was imported"):
        gpu.preload()


def test_whether_there_is_a_gpu_is_asked_without_using_it(gpu):
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


def test_without_a_gpu_it_is_refused_in_a_line(gpu, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert "--simulated" in capsys.readouterr().err.splitlines()[-1]

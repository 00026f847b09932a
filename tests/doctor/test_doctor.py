"""`pellucid doctor`: a line for each thing that may be missing, and none of them ends it."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest
import torch

from pellucid import __version__, cli
from pellucid.training import doctor
from pellucid.types import UserError
from pellucid.utils import hardware


@pytest.fixture
def machine(monkeypatch):
    """One whose speed is known: 1.5 and 3 TFLOP/s."""
    speeds = {torch.float32: 1.5, torch.bfloat16: 3.0}
    monkeypatch.setattr(hardware, "measure_matmul_tflops", speeds.get)
    monkeypatch.setattr(hardware, "keep_freed_memory", lambda: False)
    return monkeypatch


def reported(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_it_says_what_the_machine_is_and_does(machine, capsys):
    report = reported(capsys)
    for said in (f"pellucid {__version__}", f"torch {torch.__version__.partition('+')[0]}", "bf16 3.00 TFLOP/s"):
        assert said in report
    assert "fp32 1.50" in report
    assert f"{hardware.describe_hardware()['threads']} threads" in report
    assert "GB free here" in report


def test_an_extra_that_is_missing_is_named_with_its_command(machine, capsys):
    find = importlib.util.find_spec
    machine.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    report = reported(capsys)
    assert "serve missing: pip install 'pellucid[serve]'" in report
    assert "lora installed" in report


def test_every_extra_of_the_package_is_looked_for():
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert doctor.EXTRAS.keys() == extras.keys() - {"all", "docs", "dev"}
    for extra, modules in doctor.EXTRAS.items():
        wanted = [requirement.partition(">")[0].replace("-", "_") for requirement in extras[extra]]
        assert modules == wanted


def test_a_default_model_that_is_not_there_is_one_line_of_many(machine, capsys):
    def missing(name):
        raise UserError(f"{name} is not installed: make setup")

    machine.setattr(doctor, "find_pieces", missing)
    report = reported(capsys)
    assert "smollm2-135m is not installed: make setup" in report
    assert "plots" in report, "the lines after it are there, too"


def test_what_is_found_is_printed_as_it_stands(machine, capsys):
    """Brackets are markup to rich."""
    machine.setattr(hardware, "get_cpu_name", lambda: "Core [bold]5[/bold]")
    assert "Core [bold]5[/bold]" in reported(capsys)

"""Tests of `pellucid doctor`: it prints one line per check, and a missing part does not make it fail."""

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
    """Return a monkeypatch on a machine that multiplies at 1.5 TFLOP/s in fp32 and 3 TFLOP/s in bf16."""
    speeds = {torch.float32: 1.5, torch.bfloat16: 3.0}
    monkeypatch.setattr(hardware, "measure_matmul_tflops", speeds.get)
    monkeypatch.setattr(hardware, "keep_freed_memory", lambda: False)
    return monkeypatch


def reported(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_report_shows_versions_speed_threads_and_free_disk_space(machine, capsys):
    report = reported(capsys)
    for said in (f"pellucid {__version__}", f"torch {torch.__version__.partition('+')[0]}", "bf16 3.00 TFLOP/s"):
        assert said in report
    assert "fp32 1.50" in report
    assert f"{hardware.describe_hardware()['threads']} threads" in report
    assert "GB free here" in report


def test_missing_extra_is_reported_with_its_install_command(machine, capsys):
    find = importlib.util.find_spec
    machine.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    report = reported(capsys)
    assert "serve missing: pip install 'pellucid[serve]'" in report
    assert "lora installed" in report


def test_doctor_checks_every_extra_of_the_package():
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert doctor.EXTRAS.keys() == extras.keys() - {"all", "docs", "dev"}
    for extra, modules in doctor.EXTRAS.items():
        wanted = [requirement.partition(">")[0].replace("-", "_") for requirement in extras[extra]]
        assert modules == wanted


def test_missing_default_model_is_one_line_of_the_report(machine, capsys):
    def missing(name):
        raise UserError(f"{name} is not installed: make setup")

    machine.setattr(doctor, "find_pieces", missing)
    report = reported(capsys)
    assert "smollm2-135m is not installed: make setup" in report
    assert "plots" in report, "the lines after it are there, too"


def test_brackets_are_printed_literally(machine, capsys):
    """rich reads brackets as markup."""
    machine.setattr(hardware, "get_cpu_name", lambda: "Core [bold]5[/bold]")
    assert "Core [bold]5[/bold]" in reported(capsys)

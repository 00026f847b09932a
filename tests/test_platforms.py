"""Test other systems and devices: the package imports there, and unsupported features raise one-line errors."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import psutil
import pytest
import torch

from conftest import make_policy
from pellucid import cli
from pellucid.rollout.hf import HuggingFaceSampler
from pellucid.rollout.native import NativeSampler
from pellucid.types import Prompt, Sampling, UserError
from pellucid.utils import files, hardware

EVERYTHING = """
import pkgutil, psutil, sys
sys.modules.update(fcntl=None, resource=None)
from pellucid.utils.plugins import pause_garbage_collection
with pause_garbage_collection():
    import torch
    import pellucid.training.run
torch.ops.mkldnn, torch.backends.mkldnn.is_available = torch._ops._OpNamespace("absent"), lambda: False
import pellucid
for module in pkgutil.walk_packages(pellucid.__path__, "pellucid."):
    # that package itself needs them, and only Linux has Triton
    if not module.name.endswith(("__main__", "environments.verifiers", "triton_ops", "triton_decode", "triton_update")):
        __import__(module.name)
from pellucid import cli
cli.main(["--help"])
"""


@pytest.mark.slow
def test_all_modules_import_without_what_windows_and_macs_lack():
    """Missing are fcntl, resource and the operators of oneDNN."""
    done = subprocess.run([sys.executable, "-c", EVERYTHING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: pellucid")


def test_training_is_refused_without_file_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    with pytest.raises(UserError, match="on Windows, use WSL"), files.hold_lock(tmp_path / ".lock", "trains"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("action", ["start", "stop", "status", "restart"])
def test_background_service_is_refused_on_windows(action, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UserError, match=f"serve {action} needs Linux or macOS"):
        cli.parse_command_line(["serve", action])()


def test_bf16_on_a_cpu_without_onednn_uses_only_torch(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", torch._ops._OpNamespace("absent"))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    policy = make_policy(dtype=torch.bfloat16)
    [group] = NativeSampler(policy=policy).generate([Prompt("p", "12?")], Sampling(2, max_tokens=4))
    assert len(group.completions) == 2


def test_generate_forks_only_the_generators_of_its_own_device(monkeypatch):
    """For all GPUs torch would print a warning, and a process of torchrun uses only one."""
    asked, fork = [], torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices=None: asked.append(devices) or fork(devices))
    sampler = HuggingFaceSampler()
    sampler.sync(make_policy())
    sampler.generate([Prompt("p", "12?")], Sampling(2, max_tokens=2))
    assert asked == [[]]


class OfWindows(NamedTuple):
    rss: int = 2 * 10**9
    peak_wset: int = 3 * 10**9


def test_peak_memory_is_measured_without_getrusage(monkeypatch):
    monkeypatch.setattr(hardware, "resource", None)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: OfWindows())
    assert hardware.get_peak_memory_gb(torch.device("cpu")) == 3.0
    assert hardware.get_resident_gb() == 2.0


def test_memory_is_in_gigabytes():
    held = torch.ones(2**26)
    at_least = held.numel() * 4 / 1e9
    for gb in (hardware.get_peak_memory_gb(held.device), hardware.get_resident_gb()):
        assert at_least < gb < hardware.get_memory_gb() < 1e5


def test_cpu_memory_is_measured_on_the_cpu_of_a_machine_with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 0)
    assert hardware.get_peak_memory_gb(torch.device("cpu")) > 0


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_each_process_of_torchrun_has_its_own_gpu(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    asked = []
    monkeypatch.setattr(torch, "empty", lambda *_, device: asked.append(device) or torch.zeros(0))
    hardware.pick_device(name)
    assert asked == ["cuda:1"]


def test_process_without_its_own_gpu_raises_a_one_line_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=r'policy.device = "cuda:0": .*"cpu" always works'):
        hardware.pick_device("auto")


def test_gpu_that_only_emulates_bf16_computes_in_fp32(monkeypatch):
    """Turing and Volta emulate it, such as T4 and V100."""
    emulated = {True: True, False: False}
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: emulated[including_emulation])
    assert hardware.pick_dtype("auto", torch.device("cuda")) == torch.float32
    assert 'policy.dtype = "float16"' in hardware.describe_missing_bf16(torch.device("cuda"))
    assert hardware.describe_missing_bf16(torch.device("cpu")) == ""
    emulated[False] = True
    assert hardware.describe_missing_bf16(torch.device("cuda")) == ""
    assert hardware.pick_dtype("auto", torch.device("cuda")) == torch.bfloat16


def test_deterministic_mode_uses_a_repeatable_cublas_workspace(monkeypatch):
    monkeypatch.setenv(hardware.CUBLAS_WORKSPACE_VARIABLE, ":0:0")
    with pytest.raises(UserError, match="unset it"), hardware.use_deterministic_algorithms():
        pass
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.delenv(hardware.CUBLAS_WORKSPACE_VARIABLE)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with hardware.use_deterministic_algorithms():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert hardware.os.environ[hardware.CUBLAS_WORKSPACE_VARIABLE] == ":4096:8"
        assert not torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    assert hardware.CUBLAS_WORKSPACE_VARIABLE not in hardware.os.environ
    assert torch.backends.cudnn.benchmark

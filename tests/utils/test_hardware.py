"""Tests of the matrix product benchmark, and of available memory under the limits of control groups."""

from __future__ import annotations

import pytest
import torch

from pellucid.utils import hardware
from pellucid.utils.hardware import iterate_cgroup_memory, measure_matmul_tflops


def test_failed_measurement_restores_the_thread_count(monkeypatch):
    def refused(*_):
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(torch, "mm", refused)
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="Half"):
        measure_matmul_tflops(torch.float16, threads=before + 1)
    assert torch.get_num_threads() == before


FILES = {
    "v2": ("memory.max", "memory.current", "inactive_file"),
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def control_group(folder, version, limit, used, cached=0):
    folder.mkdir(parents=True, exist_ok=True)
    names = FILES[version]
    for name, text in {names[0]: limit, names[1]: used, "memory.stat": f"anon 1\n{names[2]} {cached}"}.items():
        (folder / name).write_text(f"{text}\n")


@pytest.mark.parametrize("version", FILES)
def test_memory_limits_of_a_control_group_and_its_parents_are_found(version, tmp_path):
    root, membership = tmp_path / "root", tmp_path / "cgroup"
    mount = root if version == "v2" else root / "memory"
    membership.write_text("0::/a/b\n" if version == "v2" else "5:cpu:/c\n4:memory:/a/b\n0::/a/b\n")
    control_group(mount, version, 100, 70)
    control_group(mount / "a", version, 50, 40, cached=15)
    control_group(mount / "a" / "b", version, 80, 10)
    control_group(mount / "c", version, 1, 1)
    assert sorted(iterate_cgroup_memory(root, membership)) == [(50, 25), (80, 10), (100, 70)]
    control_group(mount / "a", "v2", "max", 40)
    if version == "v2":
        assert sorted(iterate_cgroup_memory(root, membership)) == [(80, 10), (100, 70)]


def test_unmounted_control_group_falls_back_to_the_root(tmp_path):
    """In a container, the group of the host is not mounted."""
    membership = tmp_path / "cgroup"
    membership.write_text("0::/docker/1234\n")
    control_group(tmp_path / "root", "v2", 60, 20, cached=5)
    assert list(iterate_cgroup_memory(tmp_path / "root", membership)) == [(60, 15)]
    assert list(iterate_cgroup_memory(tmp_path / "root", tmp_path / "none")) == []


def test_available_memory_respects_limits_and_is_shared_by_processes(monkeypatch):
    cpu, own = torch.device("cpu"), hardware.get_resident_gb()
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    free = hardware.psutil.virtual_memory().available / 1e9
    assert hardware.get_available_memory_gb(cpu) == pytest.approx(free + own, rel=0.2)
    monkeypatch.setattr(hardware, "iterate_cgroup_memory", lambda: [(10**9, 4 * 10**8), (10**15, 0)])
    assert hardware.get_available_memory_gb(cpu) == pytest.approx(0.6 + own, rel=0.05)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert hardware.get_available_memory_gb(cpu) == pytest.approx((0.6 + own) / 2, rel=0.05)

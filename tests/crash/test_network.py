"""Test runs on two hosts with a cable between them, simulated by network namespaces. Run `make network` as root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest
from test_faults import complaint, steps_of, until

import sampler_process
from runs import same_run

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(
        "PELLUCID_NETWORK" not in os.environ or os.geteuid() != 0 or not shutil.which("ip"),
        reason="adds network interfaces: make network, as root",
    ),
]
HOSTS = {"pellucid-0": "10.213.7.1", "pellucid-1": "10.213.7.2"}
ENGINES = ["ddp", "fsdp2"]
PATIENCE = 0.5
"""Minutes of `runtime.timeout`: longer than a cut of ten seconds and the pause after which TCP retries."""


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts():
    for name in HOSTS:
        ip("netns", "add", name)
    try:
        ends = ["type", "veth", "peer", "name", "cable", "netns", "pellucid-1"]
        ip("-n", "pellucid-0", "link", "add", "cable", *ends)
        for name, address in HOSTS.items():
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")
        yield
    finally:
        for name in HOSTS:
            ip("netns", "del", name)


def cable(state):
    ip("-n", "pellucid-0", "link", "set", "cable", state)


@contextmanager
def on_both(folder, *arguments):
    """Start a process on each host, as two torchrun launchers do, each with its own error file."""
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": HOSTS["pellucid-0"], "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    processes = []
    for rank, name in enumerate(HOSTS):
        env = {**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "cable"}
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "pellucid", *map(str, arguments)]
        with (folder / f"errors-{rank}").open("w") as errors:
            processes.append(subprocess.Popen(command, env=env, stderr=errors))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def ranks_in(name, told, *arguments):
    """Start two processes of one run on the same host, each with its own output file."""
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(2):
        env = {**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "pellucid", *map(str, arguments)]
        with told.with_name(f"{told.name}-{rank}").open("w") as output:
            processes.append(subprocess.Popen(command, env={**env, "PYTHONUNBUFFERED": "1"}, stdout=output))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def errors_of(folder, rank):
    return complaint((folder / f"errors-{rank}").read_text())


@contextmanager
def in_host(name, *command, output=subprocess.DEVNULL):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, *map(str, command)], env=env, stdout=output
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    ("homes", "says"),
    [
        (("pellucid-1", "pellucid-1"), "no sampler server answers"),
        (("pellucid-0", "pellucid-1"), "rows go to the others"),
    ],
)
def test_run_survives_a_cable_cut_to_its_servers(homes, says, ahead, recipe, hosts, tmp_path):
    servers = [(name, HOSTS[name], 8001 + i) for i, name in enumerate(homes)]
    # With half a second per step, a run that continues without the server outlasts the cut.
    settings = ["--algorithm.steps", 80, "--evaluate.every", 0, "--sampler.name", "vllm", "--sampler.timeout", 2]
    settings += ["--sampler.ahead", ahead, "--sampler.urls", *(f"http://{host}:{port}" for _, host, port in servers)]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with ExitStack() as started, (tmp_path / "said").open("w") as said:
        for name, host, port in servers:
            started.enter_context(in_host(name, sampler_process.__file__, port, 1, host))
        time.sleep(20)  # the servers import torch
        with in_host("pellucid-0", "-m", "pellucid", "train", recipe, "--run", whole, *settings) as run:
            assert run.wait(timeout=200) == 0
        with in_host("pellucid-0", "-m", "pellucid", "train", recipe, "--run", cut, *settings, output=said) as run:
            until(lambda: steps_of(cut) >= 3, run)
            cable("down")
            time.sleep(15)
            cable("up")
            assert run.wait(timeout=300) == 0
    told = (tmp_path / "said").read_text()
    print(*(line for line in told.splitlines() if line.startswith("! http") or "no sampler" in line), sep="\n")
    assert says in told
    assert "is back with the current weights" in told
    same_run(whole, cut)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("engine", "ahead"), [("ddp", 0), ("fsdp2", 0), ("fsdp2", 1)])
@pytest.mark.parametrize(
    ("homes", "says"),
    [
        (("pellucid-1", "pellucid-1"), "no sampler server answers"),
        (("pellucid-0", "pellucid-1"), "rows go to the others"),
    ],
)
def test_run_with_two_ranks_survives_a_cable_cut_to_its_servers(homes, says, engine, ahead, recipe, hosts, tmp_path):
    """Both ranks sample from the servers, and rank 0 also pushes weights. Both continue when the cable is back."""
    servers = [(name, HOSTS[name], 8001 + i) for i, name in enumerate(homes)]
    settings = ["--algorithm.steps", 60, "--evaluate.every", 0, "--sampler.name", "vllm", "--sampler.timeout", 2]
    settings += ["--runtime.engine", engine, "--runtime.timeout", PATIENCE, "--sampler.ahead", ahead]
    settings += ["--sampler.urls", *(f"http://{host}:{port}" for _, host, port in servers)]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with ExitStack() as started:
        for name, host, port in servers:
            started.enter_context(in_host(name, sampler_process.__file__, port, 1, host))
        time.sleep(20)  # the servers import torch
        with ranks_in("pellucid-0", tmp_path / "told-whole", "train", recipe, "--run", whole, *settings) as run:
            assert [rank.wait(timeout=300) for rank in run] == [0, 0]
        with ranks_in("pellucid-0", tmp_path / "told-cut", "train", recipe, "--run", cut, *settings) as run:
            until(lambda: steps_of(cut) >= 3, *run)
            cable("down")
            time.sleep(15)
            cable("up")
            assert [rank.wait(timeout=300) for rank in run] == [0, 0]
    told = [(tmp_path / f"told-cut-{rank}").read_text() for rank in range(2)]
    lines = [line for text in told for line in text.splitlines() if "http://" in line and line.startswith("! ")]
    print(*lines, sep="\n")
    assert any(says in text for text in told)
    assert "is back with the current weights" in told[0]
    same_run(whole, cut)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ENGINES)
def test_short_cable_cut_is_survived_and_a_permanent_one_can_be_resumed(engine, recipe, hosts, tmp_path):
    settings = ["--algorithm.steps", 60, "--checkpoint.every", 1, "--evaluate.every", 0]
    settings += ["--runtime.engine", engine, "--runtime.timeout", PATIENCE]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    with on_both(tmp_path, "train", recipe, "--run", whole, *settings) as both:
        assert [process.wait(timeout=200) for process in both] == [0, 0]

    with on_both(tmp_path, "train", recipe, "--run", run_dir, *settings) as both:
        until(lambda: steps_of(run_dir) >= 3, *both)
        cable("down")
        time.sleep(1)
        cut = steps_of(run_dir)
        time.sleep(9)
        assert steps_of(run_dir) == cut
        cable("up")
        until(lambda: steps_of(run_dir) >= cut + 3, *both)

        cable("down")
        start = time.monotonic()
        assert [process.wait(timeout=200) for process in both] == [1, 1]
        print(f"{engine}: both ended {time.monotonic() - start:.0f} s after the cable was cut")
    assert "does not answer (rank 1)" in errors_of(tmp_path, 0)
    assert "does not answer (rank 0)" in errors_of(tmp_path, 1)

    cable("up")
    with on_both(tmp_path, "train", "--resume", run_dir) as both:
        done = steps_of(run_dir)
        until(lambda: steps_of(run_dir) >= done + 3, *both)
        both[1].send_signal(signal.SIGKILL)
        start = time.monotonic()
        assert both[0].wait(timeout=60) == 1
        print(f"{engine}: the other ended {time.monotonic() - start:.0f} s after one was killed")
    assert "(rank 1)" in errors_of(tmp_path, 0)

    with on_both(tmp_path, "train", "--resume", run_dir) as both:
        assert [process.wait(timeout=200) for process in both] == [0, 0]
    assert steps_of(run_dir) == 60
    same_run(whole, run_dir)

"""Test the scripts of recipes/launch unchanged, on one host even if they are for several.

Scripts for one host start every process. For the others, launchers and runs are forked from a process that has already
imported the package.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from forked import python
from runs import weights

LAUNCH = Path("recipes/launch").resolve()
SHORT = ["--algorithm.steps", "2", "--evaluate.every", "0", "--algorithm.micro_batch", "3", "--optimizer.eps", "1e-3"]
"""With this eps, AdamW takes no full steps for gradients that are only rounding errors."""
SERVER = Path(__file__).parents[1] / "sampler_process.py"
TOOLS = {"torchrun": "-m torch.distributed.run", "pellucid": "-m pellucid"}
SLURM = {
    # The pause makes a reader that stops after the first line miss the second.
    "scontrol": "echo localhost; sleep 0.3; echo other",
    # Like srun for this job: it runs the command once per node.
    "srun": 'SLURM_NODEID=0 "$@" & SLURM_NODEID=1 "$@" && wait $!',
}


def tools_of(python, folder):
    """Write the commands that the scripts call into this folder, and return it."""
    lines = {name: f'exec "{python}" {module} "$@"' for name, module in TOOLS.items()} | SLURM
    for name, line in lines.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    return tools_of(sys.executable, tmp_path_factory.mktemp("started"))


@pytest.fixture(scope="module")
def quick_tools(tmp_path_factory):
    return tools_of(python(), tmp_path_factory.mktemp("forked"))


@pytest.fixture
def sampling_tools(tmp_path):
    """Return the folder of the same commands, in which `pellucid sampler --port PORT` is a server without vLLM."""
    folder = tools_of(sys.executable, tmp_path)
    server = f'exec "{python()}" {SERVER} "$3" 1'
    train = f'exec "{sys.executable}" -m pellucid "$@"'
    (folder / "pellucid").write_text(f"#!/usr/bin/env bash\nif [[ $1 == sampler ]]; then {server}; fi\n{train}\n")
    return folder


def started(tools, script, *arguments, **environment):
    return subprocess.Popen(
        [LAUNCH / script, *map(str, arguments)],
        env={
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            "PROCESSES": "1",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process):
    _, errors = process.communicate(timeout=240)
    return process.returncode, errors


@pytest.mark.slow
def test_each_script_trains_the_model_of_one_process(tools, quick_tools, recipe, tmp_path):
    """The Slurm script starts one process on each of two nodes."""
    runs = {name: tmp_path / name for name in ("one_gpu", "eight_gpus", "slurm")}
    train = {name: [recipe, "--run", run_dir, *SHORT] for name, run_dir in runs.items()}
    job = {"SLURM_JOB_NODELIST": "localhost,other", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "1"}
    job |= {"SLURM_JOB_ID": str(os.getpid()), "PYTHON_EXEC": python()}  # read by torchrun
    launches = [
        lambda: [started(quick_tools, "one_gpu.sh", *train["one_gpu"])],
        lambda: [started(tools, "eight_gpus.sh", *train["eight_gpus"], PROCESSES="2")],
        lambda: [started(quick_tools, "slurm.sh", *train["slurm"], **job)],
    ]
    for launch in launches:
        for status, errors in map(ended, launch()):
            assert status == 0, errors
    alone = weights(runs["one_gpu"])
    for name, run_dir in runs.items():
        for parameter, tensor in weights(run_dir).items():
            torch.testing.assert_close(tensor, alone[parameter], rtol=0, atol=1e-6, msg=f"{name}: {parameter}")


@pytest.mark.parametrize(("environment", "complaint"), [({}, "HEAD="), ({"HEAD": "127.0.0.1"}, "NODE=")])
def test_missing_node_settings_are_named(tools, environment, complaint):
    status, errors = ended(started(tools, "two_nodes.sh", "recipes/arithmetic.toml", **environment))
    assert status != 0
    assert complaint in errors


def pick_free_ports():
    """Return the first of two consecutive free ports."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def is_served(port):
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_one_machine_trains_and_samples(sampling_tools, recipe, tmp_path):
    """Two processes train, two servers sample, and no server is left when the run is done."""
    port, run_dir = pick_free_ports(), tmp_path / "run"
    settings = [*SHORT, "--run", run_dir, "--runtime.engine", "fsdp2"]
    ports = {"PROCESSES": "2", "SERVERS": "2", "PORT": str(port)}
    status, errors = ended(started(sampling_tools, "train_and_sample.sh", recipe, *settings, **ports))
    assert status == 0, errors
    assert weights(run_dir)
    assert not is_served(port)
    assert not is_served(port + 1)


@pytest.mark.slow
def test_servers_that_do_not_start_end_the_run(sampling_tools, recipe, tmp_path):
    (sampling_tools / "pellucid").write_text("#!/usr/bin/env bash\necho out of memory >&2\nexit 1\n")
    ports = {"SERVERS": "1", "PORT": str(pick_free_ports())}
    status, errors = ended(started(sampling_tools, "train_and_sample.sh", recipe, "--run", tmp_path / "run", **ports))
    assert status != 0
    assert "out of memory" in errors


@pytest.mark.slow
def test_slurm_servers_are_printed_and_ended(sampling_tools):
    port = pick_free_ports()
    (sampling_tools / "srun").write_text('#!/usr/bin/env bash\nexec "$@"\n')
    job = {"SLURM_JOB_NODELIST": "localhost", "SLURM_GPUS_ON_NODE": "2", "PORT": str(port)}
    (sampling_tools / "scontrol").write_text("#!/usr/bin/env bash\necho localhost\n")
    servers = started(sampling_tools, "slurm_servers.sh", **job, PELLUCID_SAMPLER_TOKEN="secret")
    assert servers.stdout.readline() == f"--sampler.urls http://localhost:{port} http://localhost:{port + 1}\n"
    while not (is_served(port) and is_served(port + 1)):
        assert servers.poll() is None
        time.sleep(0.1)
    os.killpg(servers.pid, signal.SIGTERM)
    servers.wait(timeout=60)
    servers.stdout.close()
    servers.stderr.close()
    while is_served(port) or is_served(port + 1):  # srun's command ends after the script
        time.sleep(0.1)


def test_slurm_servers_need_a_secret(sampling_tools, monkeypatch):
    monkeypatch.delenv("PELLUCID_SAMPLER_TOKEN", raising=False)
    status, errors = ended(started(sampling_tools, "slurm_servers.sh", SLURM_JOB_NODELIST="localhost"))
    assert status != 0
    assert "PELLUCID_SAMPLER_TOKEN" in errors

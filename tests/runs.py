"""Runs through the command line's own path, and whether two of them are the same."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file

from conftest import records
from pellucid import cli

TIMED = ("time/", "memory/")


def train(*arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["train", *map(str, arguments)])
    return exit_.value.code


def untimed(record):
    return {key: value for key, value in record.items() if not key.startswith(TIMED)}


def weights(run_dir):
    [file] = (run_dir / "model").glob("*.safetensors")
    return load_file(file)


def same_run(one, two):
    for name, tensor in weights(one).items():
        assert torch.equal(weights(two)[name], tensor), name
    for name in ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl"):
        assert [untimed(r) for r in records(one / name)] == [untimed(r) for r in records(two / name)], name


def in_two_processes(*command):
    return in_processes(2, *command)


IMPORTED = """
import runpy
import sys

from pellucid.machine.imports import uncollected

with uncollected():
    import pellucid.training.run
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A script in a process that has imported what takes long."""


def in_processes(count, *command, fails=False):
    """A script, or `-m -- MODULE`, in so many processes as torchrun starts them; the store of their group is here.

    torchrun itself, which takes two seconds to import, is tested in test_launching.py.
    """
    command = [part for part in command if part != "--"]
    start = command if command[0] == "-m" else ["-c", IMPORTED, *command]
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with ExitStack() as files:
        said, processes = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)], []
        for rank in map(str, range(count)):
            env = {**os.environ, **where, "RANK": rank, "LOCAL_RANK": rank}
            arguments = [sys.executable, *map(str, start)]
            processes.append(subprocess.Popen(arguments, env=env, stdout=said[0], stderr=said[1]))
        status = ended_together(processes)
        out, errors = (file.seek(0) or file.read() for file in said)
    assert (status != 0) == fails, errors
    return subprocess.CompletedProcess(start, status, out, errors)


def ended_together(processes):
    """The first status that is not 0, else 0. Whoever is left behind one that has failed is asked to end."""
    running, status = list(processes), 0
    while running:
        running = [process for process in running if process.poll() is None]
        failed = [process.returncode for process in processes if process.returncode]
        if failed and not status:
            status = failed[0]
            for process in running:
                process.terminate()
        time.sleep(0.02)
    return status

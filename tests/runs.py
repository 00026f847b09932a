"""Runs through the command line's own path, and whether two of them are the same."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from conftest import records
from pellucid import cli

TIMED = ("time/", "memory/")
DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: make deepspeed")


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
    in_processes(2, *command)


def in_processes(count, *command, fails=False):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    finished = subprocess.run(
        [*torchrun, *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (finished.returncode != 0) == fails, finished.stderr
    return finished

"""Run the command line, and compare runs."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from conftest import records
from forked import ran
from pellucid import cli
from pellucid.policy import load
from pellucid.training import build, run

TIMED = ("time/", "memory/")


def answered(*words):
    """Return the exit status of a command line."""
    with pytest.raises(SystemExit) as exit_:
        cli.main([*map(str, words)])
    return exit_.value.code


def train(*arguments):
    return answered("train", *arguments)


@contextmanager
def asked_to_stop(monkeypatch, number=signal.SIGINT):
    """Send a signal at the beginning of each update within this context."""
    update = run.grpo.update_policy

    def signalled(*arguments):
        os.kill(os.getpid(), number)
        return update(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(run.grpo, "update_policy", signalled)
        yield


def at_home(monkeypatch):
    """Let runs use a simulated device like a real one, and compute rewards in this process."""
    save = PreTrainedModel.save_pretrained

    def saved(model, folder, **settings):  # the original asks for the memory addresses of tensors
        save(
            model,
            folder,
            **settings,
            state_dict={name: getattr(x, "cpu_data", x) for name, x in model.state_dict().items()},
        )

    def moved(model, device):  # a real device keeps tied weights as one tensor
        model.to(device).tie_weights()
        return model

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", saved)
    monkeypatch.setattr(load, "move_to_device", moved)
    monkeypatch.setattr(build, "isolate_task_rewards", lambda task, *_: task)


def untimed(record):
    return {key: value for key, value in record.items() if not key.startswith(TIMED)}


def weights(run_dir, name="model"):
    [file] = (run_dir / name).glob("*.safetensors")
    return load_file(file)


def same_run(one, two):
    for name, tensor in weights(one).items():
        assert torch.equal(weights(two)[name], tensor), name
    for name in ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl"):
        assert [untimed(r) for r in records(one / name)] == [untimed(r) for r in records(two / name)], name
    kept = [run_dir / "model-best" / "evaluation.json" for run_dir in (one, two)]
    assert kept[0].exists() == kept[1].exists()
    if kept[0].exists():
        assert kept[0].read_text() == kept[1].read_text()
        for name, tensor in weights(one, "model-best").items():
            assert torch.equal(weights(two, "model-best")[name], tensor), name


def same_weights(found, expected, atol):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def launch(processes, *arguments):
    """Run `pellucid train` in `processes` processes."""
    in_processes(processes, "-m", "pellucid", "train", *arguments)


def in_two_processes(*command):
    return in_processes(2, *command)


def in_processes(count, *command, fails=False):
    """Run a script, or `-m MODULE`, in `count` processes, with the store of their group in this process.

    torchrun, which imports for two seconds before its processes do, is tested in test_launching.py.
    """
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
    finished = ran(*command, count=count, env={**os.environ, **where})
    assert (finished.returncode != 0) == fails, finished.stderr
    return finished

"""Test that several processes train what one process trains, with replicated and sharded engines."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from engines import CASES, same_steps, tensors_of, trained
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conftest import VOCAB
from forked import ran
from pellucid.distributed.fsdp2 import make_device_mesh
from pellucid.distributed.settings import RuntimeConfig
from pellucid.types import UserError
from runs import in_processes, launch, same_run, same_weights, train, weights

FULL = """
import errno
import os

import torch.distributed as dist

from pellucid import cli
from pellucid.distributed import sharded_checkpoint
from pellucid.training import checkpoint

write = sharded_checkpoint.save_shards


def full(folder, state):
    if dist.get_rank() == 1:
        sharded_checkpoint.HuggingFaceStorageWriter.write_data = no_room
    return write(folder, state)


def no_room(self, plan, planner):
    raise OSError(errno.ENOSPC, "No space left on device")


checkpoint.save_shards = full
if __name__ == "__main__":
    cli.main()
"""
GONE = """
from pellucid import cli
from pellucid.policy.policy import Policy
from pellucid.types import UserError


def gone(*_):
    raise UserError("the base is gone")


Policy.build_merged_model = gone
if __name__ == "__main__":
    cli.main()
"""
ENGINES = {
    2: {"replicated": "ddp", "sharded": "fsdp2"},
    4: {"sharded": "fsdp2", "hybrid": "fsdp2/2"},
}


@cache
def alone(case):
    return tensors_of(*trained(RuntimeConfig(), **CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("processes", ENGINES)
def test_three_steps_equal_those_of_one_process(processes, tmp_path):
    named = [f"{name}={engine}" for name, engine in ENGINES[processes].items()]
    cases = {2: list(CASES), 4: ["llama", "llama, lora", "gpt2, k3"]}[processes]
    in_processes(processes, Path(__file__).with_name("engines.py"), tmp_path, ";".join(cases), *named)
    for engine in ENGINES[processes]:
        share = {"replicated": 1, "sharded": processes, "hybrid": 2}[engine]
        for case in cases:
            found = load_file(tmp_path / f"{engine}-{case}.safetensors")
            same_steps(found, alone(case), (share, share), (engine, case))
            if f"{case}, recomputed" in cases:
                recomputed = load_file(tmp_path / f"{engine}-{case}, recomputed.safetensors")
                assert all(torch.equal(recomputed[name], found[name]) for name in found), (engine, case)


@pytest.mark.slow
def test_runs_resume_exactly_on_two_processes_and_closely_on_one_or_four(recipe, tmp_path):
    """One and four processes read a checkpoint saved by two, and so does an engine that does not shard."""
    runs = {name: tmp_path / name for name in ("whole", "two", "one", "four", "ddp")}
    settings = ["--runtime.engine", "fsdp2", "--evaluate.every", 0, "--algorithm.prompts_per_step", 8]
    settings += ["--optimizer.schedule", "constant"]
    launch(2, recipe, "--run", runs["whole"], *settings, "--algorithm.steps", 4)
    launch(2, recipe, "--run", runs["two"], *settings, "--algorithm.steps", 2)
    for name in ("one", "four", "ddp"):
        shutil.copytree(runs["two"], runs[name])
    launch(2, "--resume", runs["two"], "--algorithm.steps", 4)
    launch(4, "--resume", runs["four"], "--algorithm.steps", 4)
    launch(1, "--resume", runs["one"], "--algorithm.steps", 4)
    assert train("--resume", runs["ddp"], "--algorithm.steps", 4, "--runtime.engine", "ddp") == 0
    same_run(runs["whole"], runs["two"])
    for name in ("one", "four", "ddp"):
        same_weights(weights(runs[name]), weights(runs["whole"]), 1e-5)
    folder = runs["whole"] / "checkpoints" / "step-000004"
    listed = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert {f"policy/shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)} <= listed
    assert not list(runs["whole"].rglob("*.pt")) + list(runs["whole"].rglob("*.distcp"))
    assert AutoModelForCausalLM.from_pretrained(runs["whole"] / "model").config.vocab_size == VOCAB


@pytest.mark.slow
def test_sharded_adapter_is_saved_alone_and_merged_into_its_base(recipe, tmp_path):
    settings = ["--policy.lora", 2, "--evaluate.every", 0, "--algorithm.steps", 2]
    launch(2, recipe, "--run", tmp_path / "two", *settings, "--runtime.engine", "fsdp2")
    assert train(recipe, "--run", tmp_path / "one", *settings) == 0
    for saved in ("model", "adapter"):
        same_weights(weights(tmp_path / "two", saved), weights(tmp_path / "one", saved), 1e-6)


@pytest.mark.slow
def test_full_disk_ends_all_processes_with_one_line(recipe, tmp_path):
    """Only one of the processes fails to write its shard."""
    (tmp_path / "full.py").write_text(FULL)
    settings = ["--runtime.engine", "fsdp2", "--evaluate.every", 0, "--checkpoint.every", 1]
    done = in_processes(2, tmp_path / "full.py", "train", recipe, "--run", tmp_path / "run", *settings, fails=True)
    [line] = {line for line in done.stderr.splitlines() if line.startswith("pellucid:")}
    assert "step 1 could not be saved" in line
    assert "No space left on device" in line
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


@pytest.mark.slow
def test_failed_merge_of_an_adapter_ends_all_processes_with_one_line(recipe, tmp_path):
    (tmp_path / "gone.py").write_text(GONE)
    settings = ["--policy.lora", 2, "--runtime.engine", "fsdp2", "--evaluate.every", 0, "--algorithm.steps", 1]
    done = in_processes(2, tmp_path / "gone.py", "train", recipe, "--run", tmp_path / "run", *settings, fails=True)
    [line] = {line for line in done.stderr.splitlines() if line.startswith("pellucid:")}
    assert "model could not be saved (the base is gone); the checkpoint is intact: fix that, then --resume" in line


@pytest.mark.slow
def test_single_process_without_a_launcher_may_use_fsdp2(recipe, tmp_path):
    """It runs in its own process, so that no other test sees its process group."""
    settings = ["--run", tmp_path / "run", "--algorithm.steps", 1, "--evaluate.every", 0, "--runtime.engine", "fsdp2"]
    done = ran("-m", "pellucid", "train", recipe, *settings)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-000001" / "policy").is_dir()


def test_shards_that_do_not_divide_the_processes_are_refused(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(UserError, match=r"runtime.shards = 3 must divide the number of processes, which is 4"):
        make_device_mesh(torch.device("cpu"), 4, 3)


ONCE = """
import sys
sys.path[:0] = {paths!r}
import torch
from engines import policy_of
from pellucid.algorithm.settings import AdamWConfig
from pellucid.distributed.runtime import Runtime
from pellucid.distributed.settings import RuntimeConfig
from pellucid.types import UserError

class Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("memory")

runtime = Runtime(policy_of(), AdamWConfig(), 3, RuntimeConfig("fsdp2"))
weight = next(iter(runtime.engine.parameters.values()))
try:
    runtime.compute_within_memory(lambda rows: Full.apply(weight.sum()).backward(), 4)
except UserError as error:
    print(error)
"""


@pytest.mark.slow
def test_run_that_exceeds_memory_with_fsdp2_ends_and_can_be_resumed(tmp_path):
    """FSDP2 computes no more gradients after a backward pass was interrupted."""
    (tmp_path / "once.py").write_text(ONCE.format(paths=[str(Path(__file__).parent), str(Path(__file__).parents[1])]))
    done = ran(tmp_path / "once.py")
    assert "continue with --resume and --algorithm.micro_batch 2" in done.stdout, done.stderr


def test_every_process_group_has_the_timeout_of_the_run(tmp_path):
    """Torch gives the groups of a mesh its own default of half an hour."""
    (tmp_path / "groups.py").write_text(GROUPS)
    in_processes(2, tmp_path / "groups.py")


GROUPS = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
import torch.distributed as dist
from engines import policy_of
from pellucid.algorithm.settings import AdamWConfig
from pellucid.distributed.runtime import Runtime
from pellucid.distributed.settings import RuntimeConfig
Runtime(policy_of(), AdamWConfig(), 3, RuntimeConfig("fsdp2", shards=1, timeout=0.7))
world = dist.distributed_c10d._world
assert len(world.pg_map) > 1
for group in world.pg_map:
    assert group._get_backend(__import__("torch").device("cpu")).options._timeout.total_seconds() == 42, group
"""

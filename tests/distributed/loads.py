"""Load models shard by shard and in full, and compare them.

Usage, with torchrun: python loads.py ENGINE/SHARDS CASE=FOLDER ...

A stand-in for safetensors counts the rows that are read.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.tensor import distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import CountDigits
from pellucid.algorithm import grpo
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed import deepspeed
from pellucid.distributed.process_group import join_process_group
from pellucid.distributed.runtime import Runtime
from pellucid.distributed.settings import RuntimeConfig
from pellucid.models.linear import gather_full_tensor
from pellucid.policy import stored_weights
from pellucid.policy.load import locate_model
from pellucid.policy.policy import load_frozen_policy, load_policy
from pellucid.rollout.native import NativeSampler
from pellucid.types import Sampling

CPU = torch.device("cpu")
CASES = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "lora": {"lora_rank": 2},
    "lora, bf16": {"lora_rank": 2, "dtype": torch.bfloat16},
}


class Counting:
    """Count the elements that are read of each tensor, over all files."""

    def __init__(self, monkey):
        self.read = Counter()
        monkey.safe_open = self.open

    def open(self, file, framework):
        return CountingFile(safe_open(file, framework=framework), self.read)


class CountingFile:
    def __init__(self, file, read):
        self.file, self.read, self.keys = file, read, file.keys

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def get_slice(self, key):
        return CountingSlice(self.file.get_slice(key), key, self.read)


class CountingSlice:
    def __init__(self, part, key, read):
        self.part, self.key, self.read, self.get_shape = part, key, read, part.get_shape

    def __getitem__(self, index):
        found = self.part[index]
        self.read[self.key] += found.numel()
        return found


def load(folder, in_files, lora_rank=0, dtype=torch.float32):
    torch.manual_seed(5)
    policy = load_policy(folder, CPU, dtype, 1.0, lora_rank=lora_rank, leave_weights_in_files=in_files)
    return policy, torch.get_rng_state()


def same_buffers(found, expected):
    for (name, one), (_, other) in zip(found.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(one, other), name
        assert one.device == other.device, name


def same_shards(engine, policy, whole, where):
    """Check that each parameter of this process is exactly its slice of the full one, with the same `requires_grad`."""
    expected, found = dict(whole.model.named_parameters()), dict(policy.model.named_parameters())
    assert found.keys() == expected.keys()
    for name, p in found.items():
        assert p.requires_grad == expected[name].requires_grad, (where, name)
        shard = distribute_tensor(expected[name].detach(), p.device_mesh, p.placements, src_data_rank=None).to_local()
        assert p.dtype == expected[name].dtype, (where, name)
        assert torch.equal(p.to_local(), shard), (where, name)
    assert policy.model.lm_head.weight is policy.model.get_output_embeddings().weight
    is_tied = whole.model.lm_head.weight is whole.model.model.embed_tokens.weight
    assert (policy.model.lm_head.weight is policy.model.model.embed_tokens.weight) == is_tied


def same_partitions(engine, policy, whole, where):
    """Check ZeRO-3: the flat partition, rounded to the compute dtype, and the masters, which are not rounded."""
    rank = torch.distributed.get_rank()
    expected = dict(whole.model.named_parameters())
    for name, p in policy.model.named_parameters():
        flat = expected[name].detach().flatten()
        share = p.ds_tensor.numel()
        part = flat[share * rank :][:share]  # behind it is DeepSpeed's padding, which is not initialized
        assert torch.equal(p.ds_tensor[: len(part)], part.to(policy.dtype)), (where, name)
    if engine is not None:
        masters = engine.masters()
        assert masters.keys() == whole.trainable().keys()
        for name, p in masters.items():
            assert torch.equal(gather_full_tensor(p), expected[name].detach().float()), (where, name)


def counted(policy, read, processes, where, reads):
    """Check that no process reads more than its share of a tensor, except for rows that do not divide evenly or are
    shared by two processes.
    """
    shapes = {name.replace(".base_layer", ""): p for name, p in policy.model.named_parameters() if "lora_" not in name}
    assert read.keys() <= shapes.keys(), where
    for name, p in shapes.items():
        shape = getattr(p, "ds_shape", p.shape)
        row = shape[1:].numel()
        assert read[name] <= reads * (-(-shape[0] // processes) + 1) * row, (where, name, read[name])


def main(named, *cases):
    deepspeed.PERSISTENCE_THRESHOLD_ELEMENTS = 0
    engine, _, number = named.partition("/")
    config = RuntimeConfig(engine, **{"zero_stage" if engine == "deepspeed" else "shards": int(number or 0)})
    join_process_group(CPU, 1)
    world = torch.distributed.get_world_size()
    processes = config.shards or world
    same = same_partitions if engine == "deepspeed" else same_shards
    counter = Counting(stored_weights)
    for case in cases:
        name, _, folder = case.partition("=")
        counter.read.clear()
        if torch.distributed.get_rank() == 0:
            locate_model(folder)  # transformers converts GGUF files only in the first process
        torch.distributed.barrier()
        policy, state = load(folder, True, **CASES[name])
        assert policy.stored_weights, (case, policy.stored_weights.reason)
        assert all(p.untyped_storage().nbytes() <= 4 for n, p in policy.weights().items() if n in policy.stored_weights)
        whole, expected_state = load(folder, False, **CASES[name])
        assert torch.equal(state, expected_state), case
        same_buffers(policy.model, whole.model)
        assert policy.eos_ids == whole.eos_ids
        assert not counter.read, "nothing is read before it is sharded"
        runtime = Runtime(policy, AdamWConfig(lr=1e-3, eps=1e-4), 3, config)
        assert not policy.stored_weights
        # ZeRO-3 reads masters and, if they differ, rounded weights.
        counted(policy, counter.read, processes, case, 2 if engine == "deepspeed" else 1)
        same(runtime.engine, policy, whole, case)
        if not folder.endswith(".gguf"):  # its tokens are bytes, which earn no reward
            same_training(runtime, policy, whole, config, case)
        if "lora" not in name:
            same_reference(runtime, folder, engine, same, case, **CASES[name])
    print("loaded", os.environ["RANK"])


def same_training(runtime, policy, whole, config, where):
    """Compare three steps exactly."""
    other = Runtime(whole, AdamWConfig(lr=1e-3, eps=1e-4), 3, config)
    cfg = GRPOConfig(steps=3, prompts_per_step=4, group_size=4, advantage="centered", max_length=12, micro_batch=3)
    for each in (runtime, other):
        norms = [
            step.metrics["grad_norm"]
            for step in grpo.train(
                CountDigits(), NativeSampler(), each.policy, each, cfg, sampling=Sampling(4, max_tokens=12)
            )
        ]
        assert min(norms) > 1e-4, where
    expected = other.engine.masters()
    for name, p in runtime.engine.masters().items():
        assert torch.equal(gather_full_tensor(p), gather_full_tensor(expected[name])), (where, name)


def same_reference(runtime, folder, engine, same, where, dtype=torch.float32):
    """Check a frozen reference, which FSDP2 shards in fp32 and ZeRO-3 in the compute dtype."""
    options = {"keep_fp32": engine == "fsdp2"}
    reference = load_frozen_policy(folder, CPU, dtype, 1.0, leave_weights_in_files=True, **options)
    whole = load_frozen_policy(folder, CPU, dtype, 1.0, **options)
    assert reference.stored_weights
    runtime.engine.shard_reference(reference)
    assert not reference.trainable()
    same(None, reference, whole, where)


if __name__ == "__main__":
    main(*sys.argv[1:])

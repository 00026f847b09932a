"""On a GPU: placement, a resumed run to the bit, and NCCL. Everything else about devices is in test_device.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from architectures import VANISHING, weighted
from conftest import make_policy, records
from pellucid.algorithm.settings import AdamWConfig
from pellucid.distributed.runtime import Runtime
from pellucid.models import attention
from pellucid.policy.load import move_to_device
from pellucid.rollout.native import NativeSampler
from pellucid.types import Prompt, Sampling
from pellucid.utils.hardware import pick_device
from runs import in_processes, same_run

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


def train(*arguments):
    """In a process of its own: cuBLAS reads its environment when it starts."""
    environment = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    command = [sys.executable, "-m", "pellucid", "train", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def untimed(path):
    rows = records(path)
    return [{key: x for key, x in row.items() if not key.startswith(("time/", "memory/"))} for row in rows]


TRAIN = ("-m", "pellucid", "train")
MORE = {
    "fp32": (),
    "bf16 lora": ("--policy.dtype", "bfloat16", "--policy.lora", 2),
    "fp16": ("--policy.dtype", "float16"),
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(recipe, tmp_path, more):
    settings = ("--policy.device", "cuda", "--policy.deterministic", "--optimizer.schedule", "constant", *more)
    settings += ("--evaluate.every", 1, "--checkpoint.every", 1)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(recipe, "--run", whole, *settings, "--algorithm.steps", 3)
    train(recipe, "--run", parted, *settings, "--algorithm.steps", 2)
    train("--resume", parted, "--algorithm.steps", 3)
    for name in ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl"):
        assert untimed(parted / name) == untimed(whole / name), name
    one, two = (load_file(run / "model" / "model.safetensors") for run in (whole, parted))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(0 < row["memory/peak_gb"] < 10 for row in records(whole / "metrics.jsonl"))


def test_fused_adamw_finds_its_state_on_the_gpu_after_a_resume():
    device = pick_device("cuda")
    policies = [make_policy(), make_policy(seed=3)]
    for policy in policies:
        move_to_device(policy.model, device)
    first, second = (Runtime(policy, AdamWConfig(lr=0.1), total_updates=3) for policy in policies)

    def step(runtime):
        for p in runtime.engine.parameters.values():
            p.grad = torch.ones_like(p)
        runtime.step()

    step(first)
    saved = {m: {name: x.cpu() for name, x in state.items()} for m, state in first.engine.moments().items()}
    policies[1].load_trainable(policies[0].trainable())
    second.engine.load_moments(saved)
    second.updates = 1
    places = {x.device for state in second.engine.moments().values() for x in state.values()}
    assert places == {device}
    step(first)
    step(second)
    assert all(torch.equal(p, second.engine.parameters[name]) for name, p in first.engine.parameters.items())


def test_in_fp16_the_scaled_gradients_of_the_gpu_are_those_of_fp32_on_the_cpu():
    """Of a loss whose gradients fp16 rounds to 0; and one that overflows lowers the scale."""
    gradients = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float16)):
        policy = make_policy()
        move_to_device(policy.model, pick_device(device))
        policy = type(policy)(policy.model, policy.tokenizer, dtype)
        runtime = Runtime(policy, AdamWConfig(), total_updates=2)
        runtime.backward(weighted(policy, VANISHING))
        runtime.engine.scaler.unscale_(runtime.engine.optimizer)
        gradients.append(torch.cat([p.grad.cpu().flatten() for p in policy.trainable().values()]) / VANISHING)
    exact, measured = gradients
    assert (measured - exact).norm() < 0.01 * exact.norm()
    runtime.engine.scaler.update()
    runtime.backward(weighted(policy, 1e5))
    assert runtime.step()["skipped/overflow"] == 1
    assert runtime.engine.scaler.get_scale() == 2.0**15


def test_what_is_sampled_on_the_gpu_is_what_the_cpu_samples():
    """The same random numbers; logits differ by rounding."""
    said = []
    for device in ("cpu", "cuda"):
        policy = make_policy()
        move_to_device(policy.model, pick_device(device))
        policy = type(policy)(policy.model, policy.tokenizer)
        sampler = NativeSampler(policy=policy)
        prompts = [Prompt("p", "a12?"), Prompt("q", "12")]
        groups = sampler.generate(prompts, Sampling(16, max_tokens=8, seed="seed"))
        said.append([c.token_ids for group in groups for c in group.completions])
    assert said[0] == said[1]


def test_a_graph_says_what_is_said_without():
    """Tokens and log-probs of rows that end one after the other, in bf16."""
    drawn = []
    for recordable in (None, False):
        policy = make_policy()
        move_to_device(policy.model, pick_device("cuda"))
        policy = type(policy)(policy.model, policy.tokenizer, torch.bfloat16)
        assert policy.decoder
        policy.decoder.uses_cuda_graphs = recordable
        groups = NativeSampler(policy=policy).generate(
            [Prompt("p", "a12?"), Prompt("q", "12")], Sampling(16, max_tokens=80, seed="seed")
        )
        assert policy.decoder.uses_cuda_graphs is (recordable is None)
        drawn.append([(c.token_ids, c.logprobs) for group in groups for c in group.completions])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_of_rollouts_is_read_by_flash_attention(dtype):
    """The trial compares what it reads, and its gradients; a kernel that fails it is not taken."""
    assert attention.uses_flash(pick_device("cuda"), dtype)


def test_one_rank_over_nccl_trains_with_fsdp2_what_it_trains_with_ddp(tmp_path):
    """fp32, every parameter and norm of three steps."""
    case, engines = "llama, cuda", ("replicated=ddp", "sharded=fsdp2")
    done = in_processes(1, Path(__file__).with_name("engines.py"), tmp_path, case, *engines)
    assert "nccl" in done.stdout
    replicated, sharded = (load_file(tmp_path / f"{name.partition('=')[0]}-{case}.safetensors") for name in engines)
    assert replicated["grad_norm"].min() > 1e-3
    del replicated["cast"]  # the number of cast weights: sharded weights have none
    for name in replicated:
        torch.testing.assert_close(
            sharded[name], replicated[name], rtol=0, atol=1e-6, msg=lambda m, at=name: f"{at}: {m}"
        )


def test_what_fsdp2_saves_over_nccl_it_resumes_to_the_same_bits(recipe, tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    settings = ("--policy.device", "cuda", "--policy.deterministic", "--runtime.engine", "fsdp2")
    settings += ("--optimizer.schedule", "constant", "--evaluate.every", 0, "--checkpoint.every", 1)
    for run, steps in ((whole, 3), (parted, 2)):
        in_processes(1, *TRAIN, recipe, "--run", run, *settings, "--algorithm.steps", steps)
    in_processes(1, *TRAIN, "--resume", parted, "--algorithm.steps", 3)
    same_run(whole, parted)

"""Test placement, exact resumption and NCCL on a GPU. Other tests of devices are in test_device.py."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from architectures import VANISHING, batch_of, model_of, weighted
from conftest import CountDigits, character_tokenizer, make_policy, records, tiny_llama
from forked import ran
from pellucid.algorithm import grpo
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed.runtime import Runtime
from pellucid.models import attention, cuda_graphs, native, ops, sampling, triton_check
from pellucid.models.cuda_graphs import measure_error_share
from pellucid.models.decode import CACHE_GROWTH_TOKENS, DecodeBatch
from pellucid.models.decoder import Decoder
from pellucid.policy import policy as policy_module
from pellucid.policy.load import move_to_device
from pellucid.policy.policy import Policy
from pellucid.rollout.native import NativeSampler
from pellucid.types import Prompt, Sampling
from pellucid.utils.hardware import pick_device
from runs import in_processes, same_run, same_weights, weights

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


def train(*arguments):
    """Train in a separate process, because cuBLAS reads its environment when it starts."""
    environment = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    done = ran(*TRAIN, *arguments, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def untimed(path):
    rows = records(path)
    return [{key: x for key, x in row.items() if not key.startswith(("time/", "memory/"))} for row in rows]


TRAIN = ("-m", "pellucid", "train")
MORE = {
    "fp32": (),
    "bf16": ("--policy.dtype", "bfloat16"),
    "bf16 lora": ("--policy.dtype", "bfloat16", "--policy.lora", 2),
    "fp16": ("--policy.dtype", "float16"),
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_resumed_run_equals_an_uninterrupted_run_exactly(recipe, tmp_path, more):
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


def test_run_on_the_gpu_has_the_numbers_of_the_cpu(recipe, tmp_path):
    """The tokens are the same. Metrics and weights differ by rounding."""
    # With this eps, AdamW takes no full steps for gradients that are only rounding errors.
    settings = ("--algorithm.steps", 2, "--evaluate.every", 0, "--optimizer.lr", 1e-3, "--optimizer.eps", 1e-4)
    runs = [tmp_path / device for device in ("cpu", "cuda")]
    for run in runs:
        train(recipe, "--run", run, "--policy.device", run.name, "--policy.dtype", "float32", *settings)
    on_cpu, on_gpu = ([row["tokens"] for row in records(run / "rollouts.jsonl")] for run in runs)
    assert on_gpu == on_cpu
    for one, other in zip(*(untimed(run / "metrics.jsonl") for run in runs), strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-4)
        assert other["grad_norm"] > 0
    same_weights(*(weights(run) for run in runs), atol=1e-5)


def test_fused_adamw_state_is_on_the_gpu_after_a_resume():
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


def test_scaled_fp16_gradients_on_the_gpu_match_fp32_on_the_cpu():
    """Without scaling, fp16 would round these gradients to 0. A loss that overflows lowers the scale."""
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


def test_gpu_samples_the_same_tokens_as_the_cpu():
    """The random numbers are the same. Logits differ by rounding."""
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


def test_cuda_graph_gives_the_same_tokens_as_no_graph(monkeypatch):
    """Compares the tokens and log-probs of rows that end one after another, in bf16, with PyTorch's operators."""
    monkeypatch.setattr(policy_module, "select_triton_decoder", lambda decoder: None)
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


def policy_on_gpu(model, dtype, seed=0):
    torch.manual_seed(seed)
    policy = Policy(model().to(pick_device("cuda")), character_tokenizer(), dtype)
    policy.eos_ids = (*range(4), *policy.eos_ids)  # rows end at different times
    assert policy.decoder
    return policy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["qwen2.5, heads of 64", "qwen3, biases, a window above", "mistral, a window"])
def test_triton_decode_steps_match_the_operators(name, dtype):
    """Rows are added, dropped, paused and outgrow the cache. Steps run as single kernels and as graphs."""
    model = model_of(name).to(pick_device("cuda"))
    decoder = Decoder(model.config, model, dtype)
    assert not triton_check.find_decoder_fault(decoder)
    by_kernels = DecodeBatch(decoder, 8, triton_decoder=triton_check.select_triton_decoder(decoder))
    decoder = Decoder(model.config, model, dtype)
    decoder.uses_cuda_graphs = False
    pair = by_kernels, DecodeBatch(decoder, 8)
    tolerance = {torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7, torch.float32: 2.0**-10}[dtype]  # logits are near 0

    def both(act):
        one, other = (act(batch) for batch in pair)
        assert measure_error_share(one.float(), other.float()) < tolerance

    def steps(count):
        for i in range(count):
            tokens = (torch.arange(len(by_kernels.generated_lengths), device="cuda") * 5 + i) % 11
            both(lambda batch, tokens=tokens: batch.step(tokens))

    both(lambda batch: batch.admit([[3, 1, 4, 1, 5, 9, 2] * 30, [6, 5, 3]], 3))
    steps(4)
    for batch in pair:
        batch.keep_rows(torch.tensor([0, 2, 3, 5]))
    steps(CACHE_GROWTH_TOKENS)
    both(lambda batch: batch.admit([[7, 8]], 3))
    speaks = torch.tensor([True, False] * 3 + [True])
    both(lambda batch: batch.step(torch.arange(7, device="cuda"), speaks)[speaks])
    steps(3)
    assert by_kernels.decoder.uses_cuda_graphs is True


def test_triton_graph_is_kept_across_calls_and_training_steps(monkeypatch):
    """In fp32, tokens equal those of the operators and log-probs differ by rounding, also after an update of the
    weights.
    """
    captures, capture = [], cuda_graphs.capture_step
    monkeypatch.setattr(cuda_graphs, "capture_step", lambda *about: captures.append(about) or capture(*about))
    results = []
    for uses_cuda_graphs in (None, False):
        policy = policy_on_gpu(tiny_llama, torch.float32)
        policy.decoder.uses_cuda_graphs = uses_cuda_graphs
        runtime = Runtime(policy, AdamWConfig(lr=1e-2), total_updates=2)
        cfg = GRPOConfig(steps=2, prompts_per_step=4, group_size=4)
        settings = {"sampling": Sampling(max_tokens=60)}
        steps = list(grpo.train(CountDigits(), NativeSampler(rows=16), policy, runtime, cfg, **settings))
        results.append([c for step in steps for group in step.groups for c in group.completions])
        assert len(captures) <= 5, "for 16, 8, 4 and 2 rows"
        assert bool(policy.decoder.triton_decoder) == (uses_cuda_graphs is None)
    for one, other in zip(*results, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


def test_triton_samples_the_same_tokens_as_the_operators():
    logits = 4 * torch.randn(64, 151_936, device="cuda")
    uniforms = torch.rand(64, dtype=torch.float64, device="cuda")
    assert sampling._load_triton_sampler(logits.device)
    for temperature in (1.0, 0.7, 0.0):
        tokens, logprobs = sampling.sample_tokens(logits, uniforms, temperature)
        expected, mass, total = ops.sample_with_masses(logits, uniforms, temperature)
        assert torch.equal(tokens, expected)
        torch.testing.assert_close(logprobs, mass.log() - total.log(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_of_rollouts_uses_flash_attention(dtype):
    """The check compares outputs and gradients. A kernel that fails it is not used."""
    assert attention.uses_flash(pick_device("cuda"), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_gates_and_log_probs_use_triton(dtype):
    """The check compares each kernel with the operators. A kernel that differs is not used."""
    assert native.load_triton_kernels(pick_device("cuda"), dtype)
    assert dtype == torch.float32 or ops._can_add_fp32_product(pick_device("cuda"), dtype)


PLACES = [(device, dtype) for device in ("cuda", "cpu") for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("name", ["qwen2.5, heads of 64", "qwen3 0.6b", "mistral, a window"])
def test_micro_batches_have_the_gradient_of_the_cpu_and_do_not_wait(name):
    """In fp32 the gradients agree, and in bf16 the error is about as large as on the CPU. PyTorch raises an error if
    the host waits for the GPU.
    """
    batch, gradients = batch_of(), {}
    ones = batch.action_mask.float()
    batch = replace(batch, token_weights=ones, advantages=ones)
    for place in PLACES:
        device, dtype = pick_device(place[0]), place[1]
        policy = Policy(move_to_device(model_of(name), device), character_tokenizer(), dtype)
        runtime = Runtime(policy, AdamWConfig(), total_updates=1) if place[0] == "cuda" else None
        backward = runtime.backward if runtime else torch.Tensor.backward
        for i in range(3):
            torch.cuda.set_sync_debug_mode("error" if i and place[0] == "cuda" else "default")  # the first runs checks
            backward(policy.score(batch).logprobs.sum())
        torch.cuda.set_sync_debug_mode("default")
        gradients[place] = torch.cat([p.grad.cpu().flatten() for p in policy.trainable().values()])
    exact = gradients["cpu", torch.float32]
    errors = {place: float((g - exact).norm() / exact.norm()) for place, g in gradients.items()}
    assert errors["cuda", torch.float32] < 1e-4
    assert errors["cuda", torch.bfloat16] < 1.5 * errors["cpu", torch.bfloat16]


def test_fsdp2_over_nccl_on_one_rank_trains_what_ddp_trains(tmp_path):
    """Compares every parameter and gradient norm of three steps in fp32."""
    case, engines = "llama, cuda", ("replicated=ddp", "sharded=fsdp2")
    done = in_processes(1, Path(__file__).with_name("engines.py"), tmp_path, case, *engines)
    assert "nccl" in done.stdout
    replicated, sharded = (load_file(tmp_path / f"{name.partition('=')[0]}-{case}.safetensors") for name in engines)
    assert replicated["grad_norm"].min() > 1e-3
    del replicated["cast"]  # the number of cast weights, which is 0 for sharded weights
    for name in replicated:
        torch.testing.assert_close(
            sharded[name], replicated[name], rtol=0, atol=1e-6, msg=lambda m, at=name: f"{at}: {m}"
        )


def test_fsdp2_over_nccl_resumes_exactly(recipe, tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    settings = ("--policy.device", "cuda", "--policy.deterministic", "--runtime.engine", "fsdp2")
    settings += ("--optimizer.schedule", "constant", "--evaluate.every", 0, "--checkpoint.every", 1)
    for run, steps in ((whole, 3), (parted, 2)):
        in_processes(1, *TRAIN, recipe, "--run", run, *settings, "--algorithm.steps", steps)
    in_processes(1, *TRAIN, "--resume", parted, "--algorithm.steps", 3)
    same_run(whole, parted)

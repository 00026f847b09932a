"""Tests of an update on a simulated CUDA device, with Triton's interpreter. test_pretended_cuda.py runs this file."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from architectures import batch_of, model_of
from conftest import character_tokenizer
from pellucid.algorithm.grpo import Scores, compute_loss
from pellucid.algorithm.metrics import MetricTotals
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed.runtime import Runtime
from pellucid.models import linear, native, ops
from pellucid.models.linear import accumulate_in_place
from pellucid.policy import logprobs
from pellucid.policy.load import move_to_device
from pellucid.policy.logprobs import LMHead, compute_token_logprobs
from pellucid.policy.policy import Policy
from simulated_device import DEVICE

F32, BF16 = torch.float32, torch.bfloat16
BATCH = batch_of(lengths=((2, 1), (3, 4)), prompts=(3, 2))
FAMILIES = ("llama, biases everywhere", "qwen3, biases, a window above")


def policy_of(name, device, dtype=F32, **settings):
    model = model_of(name)
    move_to_device(model, torch.device(device))
    model.tie_weights()
    return Policy(model, character_tokenizer(), dtype, **settings)


def loss_of(policy, weight):
    """Return a loss over a few tokens, since Triton's interpreter is slow."""
    torch.manual_seed(2)
    weights = weight * torch.randn(BATCH.response_mask.shape) * BATCH.response_mask
    logprobs = policy.score(BATCH).logprobs
    return (logprobs * weights.to(logprobs.device)).sum()


def gradients_of(policy, **to):
    return {name: p.grad.cpu().to(**to) for name, p in policy.trainable().items()}


def compare(found, expected, share):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= share * expected[name].norm(), name


def accumulate(policy, times=2):
    runtime = Runtime(policy, AdamWConfig(), total_updates=1)
    for _ in range(times):
        runtime.backward(loss_of(policy, 1.0))


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_of_two_micro_batches_matches_the_cpu(name, gpu):
    there, here = policy_of(name, DEVICE), policy_of(name, "cpu")
    accumulate(there)
    (2 * loss_of(here, 1.0)).backward()
    kernels = {"add_norm_kernel", "norm_backward_kernel", "rotate_kernel", "swiglu_kernel", "swiglu_backward_kernel"}
    assert kernels | {"statistics_kernel", "product_gradient_kernel"} <= set(gpu.kernels)
    compare(gradients_of(there), gradients_of(here), 1e-5)


def test_bf16_gradients_are_as_close_to_fp32_as_those_of_the_cpu(gpu):
    """Attention is flash attention, and gradients of weights are accumulated without rounding."""
    places = (DEVICE, BF16), ("cpu", BF16), ("cpu", F32)
    there, here, exact = (policy_of("qwen2", *place) for place in places)
    accumulate(there, 1)
    for policy in (here, exact):
        loss_of(policy, 1.0).backward()
    expected = gradients_of(exact)
    errors = [
        sum((g - expected[name]).square().sum() for name, g in gradients_of(policy).items()) for policy in (there, here)
    ]
    assert 0 < errors[0] < 1.2 * errors[1]
    assert "_flash_attention_backward" in gpu.kernels


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}], ids=["", "with layers recomputed"])
def test_gradients_are_accumulated_in_place_in_a_single_process(settings, gpu):
    """They equal the gradients that autograd accumulates, and no kernel adds a matrix."""
    policies = [policy_of("qwen2", DEVICE, BF16, **settings) for _ in range(2)]
    accumulate(policies[0])
    for _ in range(2):
        loss_of(policies[1], 1.0).backward()
    matrices = {name for name, p in policies[0].trainable().items() if p.dim() == 2}
    places = {name: policies[0].trainable()[name].grad for name in matrices}
    added = gpu.kernels["add_"], gpu.kernels["addmm"]
    accumulate(policies[0], 1)
    in_place = gpu.kernels["add_"] - added[0], gpu.kernels["addmm"] - added[1]
    loss_of(policies[1], 1.0).backward()
    by_autograd = gpu.kernels["add_"] - added[0] - in_place[0]
    assert all(policies[0].trainable()[name].grad is place for name, place in places.items())
    assert by_autograd - in_place[0] >= len(matrices) - 1  # the embedding is tied
    assert in_place[1] >= 4 * len(policies[0].decoder.layers)
    compare(*(gradients_of(policy) for policy in policies), 1e-6)


def test_a_frozen_matrix_gets_no_gradient(gpu):
    policy = policy_of("llama, untied", DEVICE, BF16)
    frozen = policy.model.model.layers[0].self_attn.q_proj.weight, policy.model.lm_head.weight
    for p in frozen:
        p.requires_grad_(False)
    with accumulate_in_place(True):
        loss_of(policy, 1.0).backward()
    assert all(p.grad is None for p in frozen)
    assert all(p.grad is not None for p in policy.model.parameters() if p.requires_grad)
    assert not linear.has_gradient_in_place(policy.model.model.norm.weight), "only in that context"


def test_products_are_added_afterwards_if_addmm_cannot_add_them(gpu, monkeypatch):
    x, y = torch.randn(9, 32).bfloat16(), torch.randn(9, 16).bfloat16()
    for can_add in (True, False):
        monkeypatch.setattr(ops, "_can_add_fp32_product", lambda *_, can=can_add: can)
        before = gpu.kernels["addmm"]
        total = torch.ones(32, 16).to(DEVICE)
        found = linear.compute_weight_gradient(x.to(DEVICE), y.to(DEVICE), F32, total)
        assert found is total
        assert gpu.kernels["addmm"] == before + can_add
        torch.testing.assert_close(found.cpu(), 1 + x.float().T @ y.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("has_reference", [False, True])
def test_log_probs_and_gradients_of_the_head_match_float64(has_reference, chunk, dtype, gpu, monkeypatch):
    """With and without a KL, in chunks and at once. Only the gradient of the product is rounded."""
    monkeypatch.setattr(logprobs, "MAX_GPU_LOGITS", 64 * chunk)
    monkeypatch.setattr(logprobs, "MAX_GPU_ELEMENTWISE_LOGITS", 64 * max(1, chunk // 2))
    hidden, weight, tokens, upstream = torch.randn(13, 32), torch.randn(64, 32), torch.arange(13), torch.randn(3, 13)
    ref_hidden, ref_weight = torch.randn(13, 32).to(dtype), torch.randn(64, 32).to(dtype)
    upstream[:, 2:5] = 0.0
    hidden, weight, count = hidden.to(dtype), weight.to(dtype), 2 + has_reference
    x, master = hidden.to(DEVICE).requires_grad_(), weight.float().to(DEVICE).requires_grad_()
    reference = LMHead(ref_weight.to(DEVICE), ref_weight.to(DEVICE))
    found = compute_token_logprobs(
        *(x, LMHead(weight.to(DEVICE), master), tokens.to(DEVICE), 0.7, True),
        reference=(ref_hidden.to(DEVICE), reference) if has_reference else None,
        trained_tokens=(upstream != 0).any(0),
    )
    gradients = torch.autograd.grad((torch.stack(found) * upstream[:count].to(DEVICE)).sum(), (x, master))
    assert {"statistics_kernel", "product_gradient_kernel"} <= set(gpu.kernels)
    leaves = [t.double().requires_grad_() for t in (hidden, weight)]
    log_probs = (leaves[0] @ leaves[1].T / 0.7).log_softmax(-1)
    other = (ref_hidden.double() @ ref_weight.double().T / 0.7).log_softmax(-1)
    exact = (
        log_probs[torch.arange(13), tokens],
        -(log_probs.exp() * log_probs).sum(-1),
        (log_probs.exp() * (log_probs - other)).sum(-1),
    )[:count]
    expected = torch.autograd.grad((torch.stack(exact) * upstream[:count]).sum(), leaves)
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.detach().cpu().double(), theirs.detach(), rtol=0, atol=3e-5)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert (ours.cpu() - theirs).norm() < (4e-3 if dtype == BF16 else 1e-5) * theirs.norm()


def test_head_with_a_softcap_uses_operators(gpu):
    hidden, weight, found = torch.randn(5, 32), torch.randn(64, 32), []
    for device in (DEVICE, "cpu"):
        head = LMHead(weight.to(device), weight.to(device), softcap=2.0)
        found.append(compute_token_logprobs(hidden.to(device), head, torch.arange(5).to(device))[0].cpu())
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
    assert "statistics_kernel" not in gpu.kernels


def test_backward_pass_of_the_head_skips_tokens_without_weight(gpu, monkeypatch):
    """The weights decide: reading the gradients would make the host wait."""
    policy, batch = policy_of("llama", DEVICE), BATCH
    weights = torch.ones(batch.response_mask.shape) * batch.response_mask
    weights[::2] = 0.0
    scores = policy.score(replace(batch, token_weights=weights, advantages=-weights))
    rows, compute = [], logprobs.compute_input_gradient
    monkeypatch.setattr(logprobs, "compute_input_gradient", lambda grad, w: rows.append(len(grad)) or compute(grad, w))
    weights_there, before = weights.to(DEVICE), gpu.waits.total()
    (scores.logprobs * weights_there).sum().backward()
    assert gpu.waits.total() == before
    assert sum(rows) == int((weights != 0).sum()) < int(batch.response_mask.sum())
    here = policy_of("llama", "cpu")
    (here.score(batch).logprobs * weights).sum().backward()
    compare(gradients_of(policy), gradients_of(here), 1e-5)


def test_device_without_triton_uses_operators(gpu, monkeypatch):
    policies = [policy_of("llama", DEVICE), policy_of("llama", "cpu")]
    monkeypatch.setattr(native, "load_triton_kernels", lambda *_: None)
    for policy in policies:
        loss_of(policy, 1.0).backward()
    assert not any(name.endswith("_kernel") for name in gpu.kernels)
    compare(*map(gradients_of, policies), 1e-5)


def test_kernels_of_the_head(gpu, monkeypatch):
    """Count 40 tokens minus 32: the forward pass takes 4 at once, as it saves as many logits; the backward pass takes
    8."""
    monkeypatch.setattr(logprobs, "MAX_GPU_LOGITS", 64 * 8)
    weight = torch.randn(64, 32).bfloat16().to(DEVICE)
    ones = torch.ones(16, 16, dtype=BF16).to(DEVICE)
    linear.compute_weight_gradient(ones, ones, F32, ones.float())  # the first call checks the operator
    counts = []
    for tokens in (8, 32, 40):  # the first also checks the kernels
        x, master = torch.randn(tokens, 32).bfloat16().to(DEVICE).requires_grad_(), weight.float().requires_grad_()
        ids, is_trained = torch.arange(tokens).to(DEVICE), torch.ones(tokens, dtype=torch.bool)
        before = gpu.kernels.total()
        found, _ = compute_token_logprobs(x, LMHead(weight, master), ids, trained_tokens=is_trained)
        between = gpu.kernels.total()
        found.sum().backward()
        counts.append((between - before, gpu.kernels.total() - between))
    (_, _), *counts = counts
    forward, backward = (more - fewer for fewer, more in zip(*counts, strict=True))
    assert (forward, backward) == (2 * 5, 14)


# ---------------------------------------------------------------- the loss

LOSSES = {
    "plain": {},
    "sequences": {"objective": "gspo", "correction": "sequence"},
    "bounds of each token": {"objective": "dcpo", "correction": "token", "entropy_coef": 0.1},
    "a KL": {"kl_coef": 0.1, "kl_in": "loss", "correction": "geometric", "dual_clip": 3.0},
}


@pytest.mark.parametrize("settings", LOSSES.values(), ids=LOSSES)
def test_loss_equals_the_cpu_bit_for_bit_and_does_not_wait(settings, gpu):
    batch, cfg = batch_of(), GRPOConfig(**settings)
    shape, mask = batch.response_mask.shape, batch.action_mask
    batch = replace(
        batch,
        token_weights=torch.rand(shape) * mask,
        advantages=torch.randn(shape) * mask,
        old_logprobs=-torch.rand(shape),
        ref_logprobs=-torch.rand(shape),
        loss_mask=mask & (torch.rand(shape) > 0.2),
        likelihood_weights=(torch.rand(shape) > 0.8) * mask,
        clip_high=torch.rand(len(batch)),
    )
    numbers, results = (-torch.rand(shape), torch.rand(shape)), []
    for device in (DEVICE, "cpu"):
        leaves = [x.to(device).requires_grad_() for x in numbers]
        before = gpu.waits.total()
        loss, metrics = compute_loss(Scores(*leaves), batch, cfg)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        totals = MetricTotals()
        totals.add_tokens(metrics)
        assert gpu.waits.total() == before
        totals.step_metrics.append({"grad_norm": 1.0})
        means = totals.compute_means(list)
        assert gpu.waits.total() == before + (device == DEVICE)
        results.append([means, *(None if x is None else x.detach().cpu().tolist() for x in (loss, *gradients))])
    assert results[0] == results[1]

"""Tests of training settings at a shape that the compiled kernels compute: heads of 64, in bfloat16.

Most other tests use smaller heads, which torch's operators compute. Here a setting without arithmetic must not change
any bit of a run, gradients are compared with those in float32, and each kernel of this processor must run.
"""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pellucid
from conftest import AT_KERNEL_SHAPE, CountDigits, OneProcessRuntime, make_policy, mostly_slow, records
from digits_task import Digits
from pellucid.algorithm import grpo
from pellucid.algorithm.advantages import ADVANTAGES
from pellucid.algorithm.batch import collate, collect_grades
from pellucid.algorithm.settings import GRPOConfig
from pellucid.distributed import optimizer
from pellucid.models import attention, fused_check, native
from pellucid.rollout.native import NativeSampler
from pellucid.training import build
from pellucid.types import Sampling, grade_groups
from runs import launch, train, untimed, weights

SMALL = {
    "dtype": "bfloat16",
    "steps": 2,
    "prompts_per_step": 2,
    "group_size": 4,
    "max_tokens": 10,
    "evaluate_every": 0,
    "checkpoint_every": 0,
    "lr": 1e-2,
}
LLAMA = "llama, heads of 64"
WAYS = {
    "plain": {},
    "Qwen2.5": {"model": "qwen2.5, heads of 64"},
    "LoRA": {"lora": 2},
    "LoRA, exact KL to the base": {"lora": 2, "kl": "exact", "kl_in": "loss", "kl_coef": 0.1},
    "a frozen reference": {"kl": "k3", "kl_in": "loss", "kl_coef": 0.1},
    "exact KL": {"kl": "exact", "kl_in": "loss", "kl_coef": 0.1},
    "a reference that follows": {"kl_coef": 0.1, "reference_every": 1},
    "entropy": {"entropy_coef": 0.01, "temperature": 0.8},
    "similarity": {"similarity": "smooth", "similarity_layer": 1},
    "offload": {"offload": True},
    "micro-batches": {"micro_batch": 3, "minibatches": 2, "epochs": 2},
    "replay": {"max_staleness": 2},
    "truncated": {"sampler_top_k": 9},
    "microscope": {"log_tokens": 1},
    "transformers": {"policy_engine": "transformers"},
}
"""Ways of training, each tried with and without gradient checkpointing."""
SAME_BITS = {
    "fewer rows at once": {"sampler_rows": 4},
    "microscope": {"log_tokens": 1},
    "a reference on the CPU": {"kl_coef": 0.1, "reference": "cpu"},
    "deterministic": {"deterministic": True},
    "checkpoints": {"checkpoint_every": 1},
    "evaluations": {"evaluate_every": 1, "evaluate_n": 2, "evaluate_k": 2},
}
"""Settings that change no bit of the trained weights."""
OF_OPERATORS = {"softmax_rows", "softmax_backward"}
"""Kernels of attention by operators, which handles head sizes other than 64, 128, 192 and 256."""
OF_AMX = {"multiply_rows", "sum_over_tokens"}


@pytest.fixture
def run(kernel_dirs, model_dir, tmp_path, monkeypatch):
    """Return a function that trains two steps, and returns their metrics and the trained weights."""
    monkeypatch.setattr(build, "isolate_task_rewards", lambda task, *_: task)  # no process for rewards
    dirs = {**kernel_dirs, "heads of 8": model_dir}

    def trained(model=LLAMA, **settings):
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        pellucid.train(model=dirs[model], task=Digits(), run=folder, **SMALL | settings).finish()
        return [untimed(row) for row in records(folder / "metrics.jsonl")], weights(folder)

    return trained


def same(one, other):
    """Assert that two runs have the same metrics and weights, bit for bit."""
    (metrics, tensors), (other_metrics, other_tensors) = one, other
    assert metrics == other_metrics
    assert tensors.keys() == other_tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, other_tensors[name]), name


@pytest.mark.parametrize("name", mostly_slow(list(WAYS), every=5))
def test_recomputing_activations_changes_no_bit(name, run):
    plain = run(**WAYS[name])
    assert any(row["grad_norm"] > 0 for row in plain[0]), "nothing was trained"
    same(run(**WAYS[name], gradient_checkpointing=True), plain)


EMBEDDED = {
    "plain": {},
    "LoRA": {"policy.lora": 4},
    "a frozen reference": {"algorithm.kl": "k3", "algorithm.kl_in": "loss", "algorithm.kl_coef": 0.1},
    "FSDP2 on two ranks": {"runtime.engine": "fsdp2"},
}


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EMBEDDED)
def test_gradient_checkpointing_changes_no_bit_for_the_embedded_model(name, tmp_path):
    """Trains `recipes/arithmetic.toml` for one step with few tokens."""
    small = {
        "task.name": f"{Path(__file__).parents[1]}/digits_task.py:Digits",
        "algorithm.steps": 1,
        "algorithm.prompts_per_step": 2,
        "algorithm.group_size": 2,
        "sampler.max_tokens": 8,
        "evaluate.every": 0,
        "checkpoint.every": 0,
        "log.tokens": 0,
    }
    found = []
    for more in ({}, {"policy.gradient_checkpointing": True}):
        folder = tmp_path / f"run-{len(found)}"
        flags = [word for k, v in (small | EMBEDDED[name] | more).items() for word in (f"--{k}", v)]
        arguments = ["recipes/arithmetic.toml", "--run", folder, *flags]
        if "runtime.engine" in EMBEDDED[name]:
            launch(2, *arguments)
        else:
            assert train(*arguments) == 0
        found.append(([untimed(row) for row in records(folder / "metrics.jsonl")], weights(folder)))
        shutil.rmtree(folder)
    assert found[0][0][0]["grad_norm"] > 0
    same(found[1], found[0])


@pytest.mark.parametrize("name", SAME_BITS)
def test_settings_without_arithmetic_change_no_bit(name, run):
    settings = SAME_BITS[name]
    without = {key: value for key, value in settings.items() if key == "kl_coef"}
    (metrics, tensors), plain = run(**settings), run(**without)
    same(([{k: v for k, v in row.items() if k in plain[0][0]} for row in metrics], tensors), plain)


# ---------------------------------------------------------------- gradients against float32


GRADIENTS = {
    "plain": {},
    "micro-batches": {"micro_batch": 3},
    "entropy": {"entropy_coef": 0.1},
    "a reference": {"kl": "k3", "kl_in": "loss", "kl_coef": 0.5},
    "exact KL": {"kl": "exact", "kl_in": "loss", "kl_coef": 0.5},
    "tokens of high entropy": {"entropy_share": 0.5},
}


@pytest.fixture(scope="module")
def batch():
    """Return rollouts of the fp32 policy, with advantages."""
    groups = NativeSampler(policy=make_policy(LLAMA)).generate(
        CountDigits().sample(0, 3), Sampling(4, max_tokens=12, seed="0/0")
    )
    groups = grade_groups(CountDigits(), groups)
    found = collate(groups)
    return replace(
        found, advantages=found.broadcast_to_tokens(ADVANTAGES["grpo"](collect_grades(groups), GRPOConfig()).flatten())
    )


def gradients(batch, dtype, model, **settings):
    """Return the gradients of one update."""

    def policy_of(seed):
        return make_policy(model, dtype, seed=seed, entropy_grad="entropy_coef" in settings)

    policy, cfg = policy_of(0), GRPOConfig(group_size=4, prompts_per_step=3, **settings)
    runtime, reference = OneProcessRuntime(policy), policy_of(1) if cfg.kl_coef else None
    if cfg.kl == "exact":
        policy.set_kl_reference(reference)
    batch = grpo.add_old_and_reference_logprobs(batch, policy, reference, runtime, cfg)
    grpo.update_policy(policy, batch, runtime, cfg)
    return runtime.gradients


def distance(found, expected):
    """Return the norm of the difference, relative to the norm of what is expected."""
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    return math.sqrt(sum(float((found[name] - expected[name]).square().sum()) for name in expected)) / norm


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("model", AT_KERNEL_SHAPE)
def test_gradients_of_kernels_match_those_of_operators(name, model, batch, monkeypatch):
    """Both match up to rounding. Those of kernels are at most 10% further from float32."""
    exact = gradients(batch, torch.float32, model, **GRADIENTS[name])
    ours = gradients(batch, torch.bfloat16, model, **GRADIENTS[name])
    monkeypatch.setattr(native, "load_kernels", lambda: (None, "switched off"))
    theirs = gradients(batch, torch.bfloat16, model, **GRADIENTS[name])
    assert distance(ours, theirs) < 0.02
    assert distance(ours, exact) < 1.1 * distance(theirs, exact)


# ---------------------------------------------------------------- each kernel


def functions_of_the_library():
    """Return the names of the functions that the sources export."""
    sources = (path.read_text() for path in sorted(native.CPP_FOLDER.glob("*.cpp")))
    return {name for text in sources for name in re.findall(r'^extern "C" (?:void|int) (\w+)\(', text, re.MULTILINE)}


@pytest.mark.skipif(native.load_kernels()[0] is None, reason=f"no compiled kernels: {native.load_kernels()[1]}")
def test_every_kernel_of_this_processor_runs(run):
    for ready in (
        native.load_kernels,
        attention.load_attention_kernel,
        fused_check.load_fused_kernel,
        optimizer.load_one_pass,
    ):
        ready()  # these run trials, which also call kernels
    native.call_counts.clear()
    run()
    assert not OF_OPERATORS & set(native.call_counts), "heads of 64 are computed by operators"
    run(model="heads of 8")
    exported = functions_of_the_library()
    assert exported >= OF_OPERATORS | OF_AMX | {"step", "attention_backward"}
    absent = set() if attention.load_attention_kernel()[0].uses_amx else OF_AMX
    assert exported - set(native.call_counts) - absent == set()

"""Train three steps on engines.

Usage, with torchrun: python engines.py FOLDER CASE;CASE NAME=ENGINE/SHARDS ...

Prints the backend of the process group, "gloo" or "nccl".
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import ARCHITECTURES, AT_KERNEL_SHAPE, CountDigits, character_tokenizer
from pellucid.algorithm import grpo
from pellucid.algorithm.batch import collate
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed import deepspeed
from pellucid.distributed.runtime import Runtime
from pellucid.distributed.settings import RuntimeConfig
from pellucid.models.linear import gather_full_tensor
from pellucid.policy.load import add_adapter, move_to_device
from pellucid.policy.policy import LoraReference, Policy
from pellucid.rollout.hf import HuggingFaceSampler
from pellucid.rollout.native import NativeSampler
from pellucid.types import Completion, Group, Prompt, Sampling
from pellucid.utils.hardware import pick_device

CASES = {
    "llama": {},
    "llama, recomputed": {"gradient_checkpointing": True},
    "llama by transformers": {"engine": "transformers"},
    "llama, lora": {"lora": 2},
    "gpt2": {"architecture": "gpt2"},
    "gemma": {"architecture": "gemma"},
    "gemma, lora": {"architecture": "gemma", "lora": 2},
    "llama, exact": {"kl": "exact"},
    "gpt2, k3": {"architecture": "gpt2", "kl": "k3"},
    "llama, lora, k3": {"lora": 2, "kl": "k3"},
    "llama, similar": {"similarity": "smooth"},
    "llama, generate()": {"sampler": HuggingFaceSampler()},
    "llama, bf16": {"architecture": "llama, heads of 64", "dtype": torch.bfloat16},
    "llama, bf16, recomputed": {
        "architecture": "llama, heads of 64",
        "dtype": torch.bfloat16,
        "gradient_checkpointing": True,
    },
}
ON_A_GPU = {"llama, cuda": {"device": "cuda"}}


APART = ("llama, bf16", "llama, bf16, recomputed", "llama, generate()")
"""Cases whose parameters are not compared: the first two round norms in a layer, and the draws of the last depend on
the rows beside them.
"""


def policy_of(
    architecture="llama", lora=0, engine="auto", gradient_checkpointing=False, dtype=torch.float32, device="cpu"
):
    torch.manual_seed(3)
    model = move_to_device((ARCHITECTURES | AT_KERNEL_SHAPE)[architecture](), pick_device(device))
    adapter = add_adapter(model, lora) if lora else None
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.1)
    return Policy(
        model,
        character_tokenizer(size=model.config.vocab_size),
        dtype,
        adapter=adapter,
        engine=engine,
        gradient_checkpointing=gradient_checkpointing,
    )


def trained(runtime_config, kl=None, similarity="none", sampler=None, **facts):
    """Return the runtime after three steps, and the metrics of the steps."""
    policy = policy_of(**facts)
    cfg = GRPOConfig(
        steps=3,
        prompts_per_step=4,
        group_size=4,
        micro_batch=3,
        minibatches=1,
        advantage="centered",
        kl=kl or "k1",
        kl_in="loss",
        kl_coef=0.1 if kl else 0.0,
        similarity=similarity,
        max_length=12,
    )
    reference = None
    if kl:
        reference = LoraReference(policy) if facts.get("lora") else policy_of(**facts)
        if isinstance(reference, Policy):
            reference.model.requires_grad_(False)
        if kl == "exact":
            policy.set_kl_reference(reference)
    runtime = Runtime(policy, AdamWConfig(lr=1e-3, eps=1e-4), 3, runtime_config)
    if isinstance(reference, Policy):
        runtime.engine.shard_reference(reference)
    steps = grpo.train(
        CountDigits(), sampler or NativeSampler(), policy, runtime, cfg, reference, sampling=Sampling(4, max_tokens=12)
    )
    metrics = [result.metrics for result in steps]
    return runtime, metrics


def rough_steps(config, world):
    """Return the trained parameters after a normal step, a step with gradient 0, a step with gradient NaN, and another
    normal step, with the metrics of these steps. Each of `world` processes has the same batch.
    """
    policy = policy_of()
    runtime = Runtime(policy, AdamWConfig(lr=1e-2, eps=1e-4), 8, config)
    completions = tuple(Completion((1 + g, 2, 3 + g), (-1.0,) * 3, "", True) for g in range(2))
    batch = collate([Group(Prompt("p", "?"), (4, 5, 6), completions)])
    told = []
    for factor in (1.0, 0.0, float("nan"), 1.0):
        for micro_batch in runtime.accumulate([batch]):
            runtime.backward(policy.score(micro_batch).logprobs.sum() * factor / world)
        told.append(runtime.step())
    said = {name: torch.tensor([step[name] for step in told]) for name in ("idle", "skipped")}
    return said | {name: gather_full_tensor(p.detach()).clone() for name, p in runtime.engine.masters().items()}


def tensors_of(runtime, metrics):
    """Return the unsharded trained parameters, the norms of gradients, the gap between sampled and scored log-probs,
    and how many elements of weights, moments and cast weights this process keeps.
    """
    engine, decoder = runtime.engine, runtime.policy.decoder
    tensors = {name: gather_full_tensor(p.detach()).clone() for name, p in engine.masters().items()}
    moments = engine.optimizer.state.values()
    gaps, norms = (torch.tensor([m[name] for m in metrics]) for name in ("sampler/gap_mean", "grad_norm"))
    cast = [part.cast_copy for part in decoder.list_cast_weights() if part.cast_copy is not None] if decoder else []
    kept = [numbers(runtime.policy.weights().values()), numbers(state["exp_avg"] for state in moments)]
    counts = {"kept": torch.tensor(kept), "cast": torch.tensor(numbers(cast))}
    return tensors | {"gap": gaps, "grad_norm": norms, **counts}


def numbers(tensors):
    """Return how many elements of these tensors this process keeps."""
    local = [x.to_local() if isinstance(x, DTensor) else getattr(x, "ds_tensor", x) for x in tensors]
    return sum(x.numel() for x in local)


def same_steps(found, expected, shares, where):
    """Compare every parameter in fp32. Also check that each process keeps its share of weights and moments, except for
    the last few rows, and no weights that are gathered only temporarily.

    The matrices of an adapter have too few rows for the check of moments.
    """
    assert found.keys() == expected.keys()
    assert expected["grad_norm"].min() > 1e-3
    assert found["gap"].max() <= 1.5 * expected["gap"].max() + 1e-6, where
    first, then = found["grad_norm"][0], expected["grad_norm"][0]
    assert "bf16" not in where[1] or abs(first - then) < 0.01 * then, where
    if where[1] not in APART:
        for name in expected.keys() - {"gap", "kept", "cast"}:
            torch.testing.assert_close(
                found[name], expected[name], rtol=0, atol=1e-6, msg=lambda m, name=name: f"{where}, {name}: {m}"
            )
    of_weights, of_moments = found["kept"] * torch.tensor(shares) / expected["kept"]
    assert 1 <= of_weights < 1.1, where
    assert "lora" in where[1] or 1 <= of_moments < 1.1, where
    assert found["cast"] == (0 if shares[0] > 1 else expected["cast"]), where


def main(folder, cases, *engines):
    deepspeed.PERSISTENCE_THRESHOLD_ELEMENTS = 0  # models this small would not be sharded otherwise
    for named in engines:
        label, _, engine = named.partition("=")
        engine, _, number = engine.partition("/")
        config = RuntimeConfig(engine, **{"zero_stage" if engine == "deepspeed" else "shards": int(number or 0)})
        for name in cases.split(";"):
            tensors = tensors_of(*trained(config, **(CASES | ON_A_GPU)[name]))
            if torch.distributed.get_rank() == 0:
                save_file(tensors, Path(folder) / f"{label}-{name}.safetensors")
    if torch.distributed.get_rank() == 0:
        print(torch.distributed.get_backend())


if __name__ == "__main__":
    main(*sys.argv[1:])

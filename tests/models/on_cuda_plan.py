"""Tests of the memory plan of an update on a GPU against the bytes that a simulated CUDA device allocates.

test_pretended_cuda.py runs this file without Triton. Triton's kernels keep as many bytes and have a lower peak.
"""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from conftest import character_tokenizer
from counting import count_micro_batch
from pellucid.algorithm.batch import collate
from pellucid.algorithm.settings import GRPOConfig
from pellucid.config import Config, PolicyConfig, SamplerConfig
from pellucid.distributed.settings import RuntimeConfig
from pellucid.policy.load import add_adapter
from pellucid.policy.policy import Policy
from pellucid.training import memory
from pellucid.types import Completion, Group, Prompt
from simulated_device import DEVICE

GROUP_SIZE = 3
SHORT, LONG = (16, 32), (64, 128)
"""Tokens of prompts and of responses. No row is padded, and no allocation is rounded up."""
WIDTHS = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
CASES = {
    "bf16": {},
    "fp16": {"dtype": "float16"},
    "norms of heads": {"architecture": "qwen3"},
    "fp32, without flash attention": {"dtype": "float32"},
    "fp32, a narrow MLP": {"dtype": "float32", "inner": 32},
    "heads that flash attention does not take": {"head_size": 36},
    "an adapter": {"lora": 16},
    "an adapter of some layers": {"lora": 24, "lora_targets": ("k_proj", "v_proj", "down_proj")},
    "FSDP2": {"engine": "fsdp2"},
    "FSDP2, norms of heads": {"engine": "fsdp2", "architecture": "qwen3"},
    "FSDP2, an adapter": {"engine": "fsdp2", "lora": 16},
    "layers recomputed": {"gradient_checkpointing": True},
    "layers recomputed, fp32": {"gradient_checkpointing": True, "dtype": "float32"},
}


def create_model(layers, architecture, **shape):
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[architecture]
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "num_hidden_layers": layers, "tie_word_embeddings": True}
    return model_class(config_class(**sizes, **WIDTHS, **shape))


def make_batch(prompt_tokens, response_tokens):
    """Return a batch of two groups. The last token of a response is not an input, so responses have one token more."""
    prompt = tuple(i % 50 for i in range(prompt_tokens))
    ids = tuple(i % 50 for i in range(response_tokens + 1))
    completions = tuple(Completion(ids[g:] + ids[:g], (-1.0,) * len(ids), "", False) for g in range(GROUP_SIZE))
    return collate([Group(Prompt(name, "?"), prompt, completions) for name in "ab"])


def measure(gpu, layers, tokens, architecture, head_size, inner, engine, **settings):
    """Return the kept bytes, the peak and the planned bytes of the activations of a micro-batch."""
    dtype, rank, targets = (settings.get(name) for name in ("dtype", "lora", "lora_targets"))
    model = create_model(layers, architecture, head_dim=head_size, intermediate_size=inner)
    config, adapter = model.config, add_adapter(model, rank, targets=targets or ()) if rank else None
    if engine == "fsdp2":  # FSDP2 gathers weights in the compute dtype
        model = model.to(getattr(torch, dtype))
    policy = Policy(
        model.to(DEVICE),
        character_tokenizer(size=config.vocab_size),
        getattr(torch, dtype),
        gradient_checkpointing=settings.get("gradient_checkpointing", False),
        adapter=adapter,
    )
    if engine == "fsdp2":
        policy.decoder.disable_cast_copies()
    cfg = Config(
        policy=PolicyConfig(device="cuda", **settings),
        sampler=SamplerConfig(max_tokens=tokens[1]),
        algorithm=GRPOConfig(prompts_per_step=2, group_size=GROUP_SIZE),
        runtime=RuntimeConfig(engine),
    )
    facts = memory.ModelFacts(config, *[sum(p.numel() for p in model.parameters())] * 2, prompt_tokens=tokens[0])
    found = count_micro_batch(gpu, policy, make_batch(*tokens))
    return found.kept_bytes, found.peak_bytes, 1e9 * memory.estimate_parts(facts, cfg)["activations"]


@pytest.mark.parametrize("case", CASES)
def test_plan_matches_kept_bytes_and_covers_the_peak(case, gpu):
    defaults = {"architecture": "qwen2", "head_size": 64, "inner": 704, "engine": "auto", "dtype": "bfloat16"}
    settings = defaults | CASES[case]
    runs = {(layers, tokens): measure(gpu, layers, tokens, **settings) for layers in (1, 3) for tokens in (SHORT, LONG)}

    def subtract(i):
        """Return the part that depends on both layers and tokens. The rest, such as weights, cancels out."""
        (few, many), (deep_few, deep_many) = ([runs[layers, n][i] for n in (SHORT, LONG)] for layers in (1, 3))
        return deep_many - deep_few - (many - few)

    assert subtract(0) == pytest.approx(subtract(2), rel=1e-3)
    peak, planned = (runs[3, LONG][i] - runs[3, SHORT][i] for i in (1, 2))
    assert 0.85 * planned < peak < 1.01 * planned

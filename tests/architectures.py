"""Small models of every architecture that our decoder supports, a ragged batch, and log-probs from full logits."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from conftest import EOS, VOCAB, character_tokenizer, kernel_llama, kernel_qwen
from pellucid.algorithm.batch import Batch, collate
from pellucid.policy.load import add_adapter
from pellucid.policy.policy import Policy
from pellucid.types import Completion, Group, Prompt

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": EOS,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILY = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "llama, untied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False)),
    "llama, heads of 64": kernel_llama,
    "llama, one key head": lambda: LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_key_value_heads": 1})),
    "llama 3.1": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=LLAMA3)),
    "llama, stretched": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0})
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None)),
    "mistral, a window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)),
    "llama, biases": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True)),
    "llama, biases everywhere": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False)),
    "qwen2.5, heads of 64": kernel_qwen,
    "qwen2.5 0.5b": lambda: qwen(14, 2, 4, tied=True, use_sliding_window=False, sliding_window=32768),
    "qwen2.5 7b": lambda: qwen(28, 4, 4, tied=False, use_sliding_window=False, max_window_layers=28),
    "qwen2, a window above": lambda: qwen(4, 2, 8, tied=True, **WINDOW),
    "qwen2.5, a window above, untied": lambda: qwen(14, 2, 4, tied=False, **WINDOW),
    "qwen3 0.6b": lambda: qwen(8, 4, 16, tied=True, newer=True),
    "qwen3, biases, untied": lambda: qwen(8, 2, 16, tied=False, newer=True, attention_bias=True),
    "qwen3, biases, a window above": lambda: qwen(8, 4, 16, tied=True, newer=True, attention_bias=True, **WINDOW),
}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
"""The window is shorter than two of the three prompts of `batch_of`, and the first of the three layers has none."""


def qwen(heads, key_heads, head_size, tied, newer=False, **settings):
    """Return a model like the checkpoints of that size, with smaller dimensions. Qwen2.5 is Qwen2, and from Qwen3 on
    heads are wider than the hidden size divided by their number.
    """
    shape = {
        **SMALL,
        "hidden_size": 64 if newer else heads * head_size,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
    }
    if newer:
        return Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=head_size, **settings))
    return Qwen2ForCausalLM(Qwen2Config(**shape, **settings))


def model_of(name):
    """Return a model whose parameters are all random: initializers leave biases at 0 and norms at 1."""
    torch.manual_seed(0)
    model = FAMILY[name]().eval()
    model.model.embed_tokens.padding_idx = None  # otherwise transformers drops the gradient of the padding token
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn_like(p))
    return model


def adapted(name, dtype, **how):
    """Return a policy as `policy.load` does: base in the compute dtype, adapter in fp32, and no part of the adapter is
    0.
    """
    model = model_of(name).to(dtype)
    adapter = add_adapter(model, 4)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(0.1 * torch.randn_like(p))
    return Policy(model, character_tokenizer(), dtype, adapter=adapter, **how)


def batch_of(lengths=((7, 1, 12), (1, 1, 1), (3, 12, 5)), prompts=(5, 9, 2)) -> Batch:
    """Return a ragged batch: prompts and completions of many lengths, one of them a single token."""
    generator = torch.Generator().manual_seed(1)

    def ids(n):
        return tuple(torch.randint(VOCAB, (n,), generator=generator).tolist())

    groups = [
        Group(Prompt(str(p), "?"), ids(length), tuple(Completion(ids(n), (0.0,) * n, "", True) for n in row))
        for p, (length, row) in enumerate(zip(prompts, lengths, strict=True))
    ]
    return collate(groups)


VANISHING = 1e-7
"""The size of a loss whose gradients fp16 rounds to 0."""


def weighted(policy, size):
    """Return a loss with a gradient of that size."""
    torch.manual_seed(2)
    batch = batch_of()
    weights = size * torch.randn(batch.response_mask.shape) * batch.response_mask
    logprobs = policy.score(batch).logprobs
    return (logprobs * weights.to(logprobs.device)).sum()


def sequences(batch):
    """Return whole token sequences, and where each response starts."""
    rows = zip(batch.prompt_indices.tolist(), batch.response_ids, batch.response_mask.sum(-1).tolist(), strict=True)
    return [(list(batch.prompt_ids[p]) + ids[:n].tolist(), len(batch.prompt_ids[p])) for p, ids, n in rows]


def plain_logprobs(model, batch) -> Tensor:
    """Return [N] log-probs, computed row by row from full logits."""
    logprobs = []
    for ids, start in sequences(batch):
        tokens = torch.tensor(ids)
        log_probs = model(tokens[None]).logits[0].log_softmax(-1)
        logprobs.append(log_probs[start - 1 : -1].gather(-1, tokens[start:, None])[:, 0])
    return torch.cat(logprobs)

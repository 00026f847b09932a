"""Make a tiny random checkpoint of each family of causal language models, and of some other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import architectures
from conftest import EOS, character_tokenizer

SMALL: dict[str, Any] = architectures.SMALL | {"bos_token_id": EOS, "initializer_range": 0.2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
NEAR = {"head_dim": 8, "sliding_window": 4}
"""The window is shorter than any prompt."""
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SEES = {**VISION, "image_size": 28, "patch_size": 14}
LONGER = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "ministral3": {"head_dim": 8},
    "smollm3": {},
    "granite": {"logits_scaling": 2.0},
    "gemma": {"head_dim": 8},
    "gemma2": NEAR,
    "gemma3_text": NEAR,
    "gemma3": {"text_config": {**SMALL, **NEAR}, "vision_config": SEES, "mm_tokens_per_image": 4},
    "vaultgemma": NEAR,
    "phi": {},
    "phi3": {"original_max_position_embeddings": 64, "rope_parameters": LONGER},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 8},
    "gpt_oss": {**NEAR, "num_local_experts": 4, "num_experts_per_tok": 2},
    "openai-gpt": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "biogpt": {},
    "xglm": {"ffn_dim": 48},
    "ctrl": {"dff": 48},
    "codegen": {"rotary_dim": 8, "n_head": 4, "n_embd": 64},
    "modernbert-decoder": {"local_attention": 4},
    "bloom": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "falcon": {},
    "stablelm": {},
    "persimmon": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": NEAR,
    "cohere": {},
    "cohere2": NEAR,
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "starcoder2": {},
    "nemotron": {},
    "apertus": {},
    "arcee": {},
    "ernie4_5": {"head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "nanochat": {},
    "exaone4": NEAR,
    "diffllama": {},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4},
    "deepseek_v2": {**ROUTED, **LATENT, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 8},
    "deepseek_v3": {**ROUTED, **LATENT, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "falcon_mamba": {"state_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_d_state": 8},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3, "head_dim": 8},
    "llama4_text": {"num_local_experts": 2, "head_dim": 8},
    "minimax": {"num_local_experts": 4, "head_dim": 8},
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "xlstm": {"num_heads": 4},
    "bert": {"is_decoder": False},
}
"""model_type, and after a comma the variant -> settings in addition to SMALL."""
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", "T5Config", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1}),
    "clip_text": ("CLIPTextModel", "CLIPTextConfig", {}),
    "llama, a reward model": ("LlamaForSequenceClassification", "LlamaConfig", {}),
    "llama, without its head": ("LlamaModel", "LlamaConfig", {}),
}
"""Models that are not causal language models: class names of model and config in transformers, and settings."""


def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name in OTHERS:
        kind, configuration, settings = OTHERS[name]
        return getattr(transformers, kind)(getattr(transformers, configuration)(**{**SMALL, **settings}))
    config = AutoConfig.for_model(name.partition(",")[0], **{**SMALL, **FAMILIES[name]})
    return AutoModelForCausalLM.from_config(config).eval()


def checkpoint(name: str, folder: Path) -> Path:
    """Return the folder, with the model and a tokenizer with one token per character."""
    model_of(name).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder

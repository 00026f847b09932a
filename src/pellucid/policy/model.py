"""What is read from a model, or changed in it, before it becomes a policy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME

from pellucid.machine.extras import extra
from pellucid.models.masters import on_cpu
from pellucid.models.trial import said
from pellucid.policy.quantized import is_quantized
from pellucid.types import UserError


def silence_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Off for good: with dropout the ratio of a policy to itself is not 1."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def has_own_code(model: PreTrainedModel) -> bool:
    """Whether its class is of the checkpoint's folder, not of transformers."""
    return type(model).__module__.startswith(f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}.")


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every end-of-sequence id that the checkpoint names, wherever it names it."""
    sources = (model.generation_config, model.config, model.config.get_text_config(), tokenizer)
    named = [getattr(source, "eos_token_id", None) for source in sources]
    ids = {i for entry in named if entry is not None for i in (entry if isinstance(entry, list) else [entry])}
    if not ids:
        raise UserError("policy.model names no end-of-sequence token: no completion could ever end")
    return tuple(sorted(ids))


def end_of_answer(tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int]) -> int:
    """Of several end-of-sequence tokens the one that the chat template puts behind an answer; else the tokenizer's."""
    exchange = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    encoded: Any = tokenizer.apply_chat_template(exchange, return_dict=True) if tokenizer.chat_template else {}
    said = [token for token in encoded.get("input_ids", []) if token in eos_ids]
    own = [token for token in eos_ids if token == tokenizer.eos_token_id]
    return [*said[::-1], *own, *eos_ids][0]


@torch.no_grad()
def narrowed(model: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Rounds the matrices of a model but those of an adapter; what is trained as it was, for steps on `device`."""
    masters = {name: on_cpu(p, device) for name, p in model.named_parameters() if p.requires_grad}
    for name, p in model.named_parameters():
        p.data = p.data.to(torch.float32 if p.ndim < 2 or "lora_" in name else dtype)
    return masters


def copied(
    model: PreTrainedModel, dtype: torch.dtype, share: bool = True, device: torch.device | None = None
) -> PreTrainedModel:
    """Copy a model with its parameters in this dtype, on the device of the model unless another is given.

    share: use frozen parameters that already have this dtype as they are.

    Buffers keep their dtype: rotary frequencies in bf16 would move every position.
    """
    twins: dict[int, Any] = {}
    for p in model.parameters():
        same = is_quantized(p) or (share and not p.requires_grad and p.dtype == dtype)
        twins[id(p)] = (
            p if same else nn.Parameter(p.detach().to(device or p.device, dtype, copy=True), requires_grad=False)
        )
    for module in model.modules():  # a state that a layer has kept of its last pass
        kept = [x for x in vars(module).values() if isinstance(x, Tensor) and x.grad_fn is not None]
        twins |= {id(x): x.detach() for x in kept}
    return copy.deepcopy(model, memo=twins)


def describe(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Save what is needed besides the weights to load a model: configuration, and code of its own.

    dtype: the dtype of the saved weights, which the configuration names; None keeps the one it names.
    """
    config = copy.deepcopy(model.config)
    if dtype:
        config.dtype = dtype
    if has_own_code(model):
        custom_object_save(model, folder, config=cast(Any, config))
    config.save_pretrained(folder)
    if model.generation_config:
        model.generation_config.save_pretrained(folder)


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """transformers types its own `to` for quantised models only."""
    return model.to(device)


def add_adapter(model: PreTrainedModel, rank: int, alpha: float = 0.0, targets: Sequence[str] = ()) -> Any:
    """An adapter on the layers of these names, or on every linear one but those whose weights a state-space layer's
    kernels read past their module. `alpha` 0 is twice the rank.
    """
    peft = extra("peft", "lora", "policy.lora")
    beside = [
        f"{name}.{past}"
        for name, module in model.named_modules()
        if hasattr(module, "A_log") and hasattr(module, "D")
        for past in ("dt_proj", "out_proj")
    ]
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha or 2 * rank,
        target_modules=list(targets) or "all-linear",
        exclude_modules=beside or None,
    )
    check_targets(model, targets)
    try:
        return peft.get_peft_model(model, settings)
    except (NotImplementedError, ValueError) as error:
        raise UserError(f"policy.lora: peft has no adapter for {type(model).__name__}: {said(error)}") from error


def check_targets(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Raise UserError where an adapter cannot be on the layers of these names."""
    known = {
        name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)
    }
    if unknown := sorted(set(targets) - known):
        raise UserError(
            f"policy.lora_targets: no linear layer is called {unknown[0]}; there are {', '.join(sorted(known))}"
        )
    head = model.get_output_embeddings()
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if module is head}
    if of_head := names & set(targets):
        raise UserError(
            f"policy.lora_targets: {of_head.pop()} is the output layer, which is read without its module: leave it out"
        )


def merge_adapter(model: nn.Module) -> None:
    """Adds an adapter to its base, and puts the layers of the base in their own places.

    Fused experts have an adapter around an adapter, a parameter each: all are added before the outermost is replaced.
    """
    layers = [(path, module) for path, module in model.named_modules() if hasattr(module, "lora_A")]
    for _, module in layers:
        cast(Any, module).merge()
    for path, module in layers:
        parent, _, name = path.rpartition(".")
        if name != "base_layer":
            setattr(model.get_submodule(parent), name, cast(Any, module).get_base_layer())

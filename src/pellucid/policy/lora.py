"""LoRA adapters: merged into the base, or saved separately for `PeftModel.from_pretrained(base, folder)`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from pellucid.models.decoder import ADAPTABLE_LAYERS
from pellucid.policy.packaged import PACKAGED_MODELS
from pellucid.utils.plugins import import_extra


def find_adapter_fault(model: nn.Module) -> str:
    """Return why our decoder cannot compute a model with this adapter; empty if it can, or there is none."""
    adapted: dict[str, Any] = {path: module for path, module in model.named_modules() if hasattr(module, "lora_A")}
    matrices = {id(p) for layer in adapted.values() for x in (layer.lora_A, layer.lora_B) for p in x.parameters()}
    for path, layer in adapted.items():
        name = path.rpartition(".")[2]
        reasons = {
            f"an adapter of {name}": name not in ADAPTABLE_LAYERS or type(layer.base_layer) is not nn.Linear,
            "several adapters": len(layer.lora_A) != 1,
            "an adapter that is not plain LoRA": bool(layer.lora_variant),
            "an adapter with biases": any(layer.lora_bias.values()),
        }
        if fault := next((reason for reason, applies in reasons.items() if applies), ""):
            return fault
    is_partial = bool(adapted) and any(p.requires_grad and id(p) not in matrices for p in model.parameters())
    return "weights that are trained beside an adapter" if is_partial else ""


def set_base_name(adapter: Any, name: str, revision: str) -> None:
    """Set the base name in the configuration of an adapter: as the user wrote it, but absolute for a local path."""
    settings, path = adapter.peft_config["default"], os.path.expanduser(name)
    is_local = name not in PACKAGED_MODELS and os.path.exists(path)
    settings.base_model_name_or_path = os.path.abspath(path) if is_local else name
    settings.revision = revision or None


def add_matching_adapter(base: PreTrainedModel, adapter: Any) -> PreTrainedModel:
    """Add a new adapter with the same settings to another copy of the base."""
    return import_extra("peft", "lora", "policy.lora").inject_adapter_in_model(adapter.peft_config["default"], base)


def merge_adapter_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """Load these weights, by name, into the adapter of an fp32 model, and merge it into the base."""
    for name, p in model.named_parameters():
        if name in weights:
            p.data = weights[name].detach().to(p.device)
    # Fused experts have nested adapters, one for each parameter. Only the outermost is replaced by the base.
    layers = [(path, module) for path, module in model.named_modules() if hasattr(module, "lora_A")]
    for _, layer in layers:
        cast(Any, layer).merge()
    for path, layer in layers:
        parent, _, name = path.rpartition(".")
        if name != "base_layer":
            setattr(model.get_submodule(parent), name, cast(Any, layer).get_base_layer())
    return model


def separate_adapter(model: PreTrainedModel, folder: Path) -> Any:
    """Subtract a saved adapter from the fp32 model into which it was merged, and add it as a separate one.

    The base is restored up to rounding in fp32. If it was in half precision before, casting it again restores its bits.

    Returns:
        The peft model.
    """
    peft = import_extra("peft", "lora", "policy.lora")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft reads it
        adapter = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True)  # `Policy.masters` finds it
    for module in model.modules():
        if hasattr(module, "lora_A"):
            layer = cast(Any, module)
            layer.merged_adapters.append("default")
            layer.unmerge()
    return adapter


def save_adapter(adapter: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Save unrounded weights of an adapter, by their names in the model, in the format of peft."""
    named = {f"base_model.model.{name}": p.detach().cpu().contiguous() for name, p in weights.items()}
    # By default peft asks the Hub whether the model has other embeddings than the base.
    adapter.save_pretrained(str(folder), state_dict=named, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # peft's template, which names a folder of this machine

"""What becomes of an adapter: merged into its base, or by itself, for `PeftModel.from_pretrained(base, folder)`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from pellucid.policy.load import PACKAGED_MODELS, merge_adapter
from pellucid.utils.plugins import import_extra


def set_base_name(adapter: Any, name: str, revision: str) -> None:
    """Let its configuration name the base as the user does, what is a file or a folder by its absolute path."""
    settings, path = adapter.peft_config["default"], os.path.expanduser(name)
    lies_here = name not in PACKAGED_MODELS and os.path.exists(path)
    settings.base_model_name_or_path = os.path.abspath(path) if lies_here else name
    settings.revision = revision or None


def add_matching_adapter(base: PreTrainedModel, adapter: Any) -> PreTrainedModel:
    """Give another copy of its base a new adapter like this one."""
    return import_extra("peft", "lora", "policy.lora").inject_adapter_in_model(adapter.peft_config["default"], base)


def merge_adapter_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """Give the adapter of a model in fp32 these weights, by their names in it, and merge it into its base."""
    for name, p in model.named_parameters():
        if name in weights:
            p.data = weights[name].detach().to(p.device)
    merge_adapter(model)
    return model


def save_adapter(adapter: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Save these weights, whole and unrounded, by their names in the model."""
    named = {f"base_model.model.{name}": p.detach().cpu().contiguous() for name, p in weights.items()}
    # Left open, peft asks the Hub whether the base has other embeddings than the model.
    adapter.save_pretrained(str(folder), state_dict=named, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a form of peft's that names a folder of this machine

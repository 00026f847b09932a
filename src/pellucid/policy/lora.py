"""What becomes of an adapter: merged into its base, or by itself, for `PeftModel.from_pretrained(base, folder)`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from pellucid.machine.extras import extra
from pellucid.policy.model import merge_adapter
from pellucid.policy.pretrained import EMBEDDED


def name_base(adapter: Any, name: str, revision: str) -> None:
    """Let its configuration name the base as the user does, what is a file or a folder by its absolute path."""
    settings, path = adapter.peft_config["default"], os.path.expanduser(name)
    lies_here = name not in EMBEDDED and os.path.exists(path)
    settings.base_model_name_or_path = os.path.abspath(path) if lies_here else name
    settings.revision = revision or None


def put_on(base: PreTrainedModel, adapter: Any) -> PreTrainedModel:
    """Give another copy of its base a new adapter like this one."""
    return extra("peft", "lora", "policy.lora").inject_adapter_in_model(adapter.peft_config["default"], base)


def merged(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """Give the adapter of a model in fp32 these weights, by their names in it, and merge it into its base."""
    for name, p in model.named_parameters():
        if name in weights:
            p.data = weights[name].detach().to(p.device)
    merge_adapter(model)
    return model


def save(adapter: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Save these weights, whole and unrounded, by their names in the model."""
    named = {f"base_model.model.{name}": p.detach().cpu().contiguous() for name, p in weights.items()}
    # Left open, peft asks the Hub whether the base has other embeddings than the model.
    adapter.save_pretrained(str(folder), state_dict=named, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a form of peft's that names a folder of this machine

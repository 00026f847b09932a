"""An adapter by itself, as peft saves it: for `PeftModel.from_pretrained(base, folder)`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pellucid.policy.pretrained import EMBEDDED


def name_base(adapter: Any, name: str, revision: str) -> None:
    """Let its configuration name the base as the user does, what is a file or a folder by its absolute path."""
    settings, path = adapter.peft_config["default"], os.path.expanduser(name)
    lies_here = name not in EMBEDDED and os.path.exists(path)
    settings.base_model_name_or_path = os.path.abspath(path) if lies_here else name
    settings.revision = revision or None


def save(adapter: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Save these weights, whole and unrounded, by their names in the model."""
    named = {f"base_model.model.{name}": p.contiguous() for name, p in weights.items()}
    # Left open, peft asks the Hub whether the base has other embeddings than the model.
    adapter.save_pretrained(str(folder), state_dict=named, save_embedding_layers=False)

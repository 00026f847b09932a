"""An adapter by itself, as vLLM takes it beside weights that stay: of each layer A [rank, in] and B [out, rank].

B is multiplied by the scale of the adapter in fp32 and then rounded, and vLLM is told a scale of 1, so that what it
multiplies by has the bits of what was pushed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from pellucid.policy.quantized import is_quantized
from pellucid.types import UserError

if TYPE_CHECKING:
    pass

A, B = ".lora_A", ".lora_B"
"""Behind the path of a layer, the names of its two matrices."""
PEFT = ".default.weight"
"""What peft has behind these."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM has room for; a smaller one is padded with zeros."""


class RefusedError(UserError):
    """vLLM does not take an adapter by itself."""


class Form(NamedTuple):
    """What vLLM must know of an adapter before there are weights."""

    rank: int
    layers: dict[str, tuple[int, int]]
    """How many inputs and outputs each layer with an adapter has, by its path in the checkpoint."""

    @property
    def padded_rank(self) -> int:
        """The rank that an engine for it is made with."""
        return next(rank for rank in RANKS if rank >= self.rank)

    def create_zeros(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """An adapter of this form that changes nothing."""
        first = {layer + A: torch.zeros(self.rank, n, dtype=dtype) for layer, (n, _) in self.layers.items()}
        return first | {layer + B: torch.zeros(m, self.rank, dtype=dtype) for layer, (_, m) in self.layers.items()}


def is_of_adapter(name: str) -> bool:
    return name.endswith((A, B))


def form_of(policy: Any) -> Form:
    """RefusedError where the adapter of a policy is more than two matrices of each of some linear layers."""
    trained = policy.trainable()
    for name in trained:
        layer, _, matrix = name.removesuffix(PEFT).rpartition(".")
        if not name.endswith((A + PEFT, B + PEFT)):
            raise RefusedError(f"{name} is trained besides")
        module = policy.model.get_submodule(layer)
        if type(module.get_base_layer()) is not nn.Linear or module.lora_variant:
            raise RefusedError(f"{layer} is not a plain linear layer with a plain adapter")
        if matrix == A[1:] and len(trained[name]) > RANKS[-1]:
            raise RefusedError(f"policy.lora is above {RANKS[-1]}")
    if any(is_quantized(p) for p in policy.model.parameters()):
        raise RefusedError("its base is in 4 bits")
    paths = [name.removesuffix(A + PEFT) for name in trained if name.endswith(A + PEFT)]
    matrices = {path: (trained[path + A + PEFT], trained[path + B + PEFT]) for path in paths}
    rank = max(len(first) for first, _ in matrices.values())
    return Form(rank, {path: (first.shape[1], len(second)) for path, (first, second) in matrices.items()})


@torch.no_grad()
def adapter_of(policy: Any) -> dict[str, Tensor]:
    """Copies of the matrices of an adapter that has a form, in the dtype of computing, B multiplied by its scale."""
    found: dict[str, Tensor] = {}
    for name, p in policy.masters().items():
        path = name.removesuffix(PEFT)
        scale = policy.model.get_submodule(path[: -len(B)]).scaling["default"] if path.endswith(B) else 1.0
        found[path] = (p.detach().float() * scale).to(policy.device, policy.dtype)
    return found


def base_of(policy: Any) -> dict[str, Tensor]:
    """The frozen weights below an adapter by their names in a checkpoint, in the dtype of computing."""
    trained = policy.trainable()
    frozen = {name: p for name, p in policy.model.named_parameters() if name not in trained}
    return {name.replace(".base_layer.", "."): p.detach().to(policy.dtype) for name, p in frozen.items()}


def write(adapter: Mapping[str, Tensor], folder: Path) -> None:
    """Save an adapter as peft does, with a scale of 1."""
    rank = max(len(x) for name, x in adapter.items() if name.endswith(A))
    settings = {"r": rank, "lora_alpha": rank, "bias": "none", "target_modules": []}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    named = {f"base_model.model.{name}.weight": x.detach().cpu().contiguous() for name, x in adapter.items()}
    safetensors.torch.save_file(named, folder / "adapter_model.safetensors")

"""The head of a model: what hidden states say of the next token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.models import products
from pellucid.models.operators import widened, widens


class Head(NamedTuple):
    """Hidden state -> logits. D hidden size, V vocabulary."""

    weight: Tensor
    """[V, D] to compute with, without gradient."""
    master: Tensor
    """[V, D] the parameter that it is a copy of, or the same: it gets the gradient, in its own dtype."""
    bias: Tensor | None = None
    """[V]"""
    scale: float = 1.0
    """Logits are multiplied by it (Cohere's logit_scale, Granite's 1 / logits_scaling)."""
    softcap: float = 0.0
    """Logits become softcap * tanh(logits / softcap) (Gemma 2); 0 is off."""

    def project(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V] in the dtype of the weight, or in fp32 where a GPU gives it."""
        if not widens(hidden):
            return products.linear(hidden, self.weight, self.bias)
        product = widened(hidden, self.weight)
        return product if self.bias is None else product + self.bias

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V]"""
        return self.to_logits(self.project(hidden))

    def to_logits(self, product: Tensor) -> Tensor:
        """Logits [N, V] from the product; reduced precision ends here: fp32 from now on."""
        logits = product if product.dtype == torch.float64 else product.float()
        logits = logits * self.scale if self.scale != 1.0 else logits
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

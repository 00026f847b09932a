"""Protocols of the parts that the training loop is given: the policy, its reference, and the processes of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from pellucid.algorithm.batch import Batch

T = TypeVar("T")


class Scores(NamedTuple):
    """Log-probs and entropies of the response tokens of a batch, in nats."""

    logprobs: Tensor
    """[B, T] log-prob of each token."""
    entropy: Tensor
    """[B, T] entropy of the distribution that the token was sampled from."""
    kl: Tensor | None = None
    """[B, T] KL(policy, reference) of that distribution, summed over the vocabulary. Only if cfg.kl = "exact"."""


class Policy(Protocol):
    """The model that is trained."""

    @property
    def device(self) -> torch.device: ...

    def score(self, batch: Batch) -> Scores:
        """Return the scores of the response tokens, with gradient where gradients are enabled."""
        ...

    def embed(self, batch: Batch, layer: int) -> Tensor:
        """Return the output of a layer, averaged over the response tokens. [B, D]"""
        ...

    def weights(self) -> Mapping[str, Tensor]: ...


class Reference(Protocol):
    """The frozen model from which the KL divergence is measured."""

    def score(self, batch: Batch) -> Scores: ...

    def update_weights(self, weights: Mapping[str, Tensor], decay: float) -> None:
        """Set the weights to decay * own + (1 - decay) * weights."""
        ...


class Runtime(Protocol):
    """The processes of a run, and the optimizer that they share."""

    @property
    def world_size(self) -> int:
        """The number of processes."""
        ...

    def for_thread(self) -> Runtime:
        """Return a runtime for another thread, whose exchanges do not mix with those of this one."""
        ...

    def shard(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return this process's part of a list that is the same in all processes. The inverse of `gather`."""
        ...

    def gather(self, items: Sequence[Any]) -> list[Any]:
        """Return the concatenated lists of all processes, in the order of the processes."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""
        ...

    def compute_within_memory(self, compute: Callable[[int], T], rows: int) -> T:
        """Return compute(rows). If memory runs out, drop the gradients and repeat with micro-batches of fewer rows."""
        ...

    def accumulate(self, micro_batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yield the micro-batches of one optimizer step. The last one also combines the gradients of all processes."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss and add them to those that are accumulated."""
        ...

    def step(self) -> dict[str, float]:
        """Take an optimizer step, clear the gradients and return metrics: `grad_norm`, `lr`, `skipped` and `idle`.

        `skipped` is 1 if a gradient was not finite, `idle` is 1 if the gradient was 0; in both cases no weight changes.
        In fp16 also `loss_scale`, and `skipped/overflow`, which is 1 if a gradient was too large for that scale.
        """
        ...

    def adapt_lr(self, update_kl: float) -> None:
        """Change the learning rate of the next steps if updates move the policy too far or not far enough.

        `update_kl` is KL(old policy, new policy) of the last update per token, in nats.
        """
        ...

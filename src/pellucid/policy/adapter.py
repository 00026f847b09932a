"""The reference of a policy that trains an adapter."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pellucid.algorithm.batch import Batch
from pellucid.algorithm.grpo import Scores
from pellucid.policy.head import Head
from pellucid.policy.policy import Policy
from pellucid.types import UserError

BASE_STAYS = "algorithm.reference_every: the reference of a LoRA policy is its base, which stays as it is: set 0"


class AdapterOff:
    """The reference of a LoRA policy: the same model without its adapter, frozen by nature."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.device = policy, policy.device

    def score(self, batch: Batch) -> Scores:
        with self.policy.adapter.disable_adapter():
            return self.policy.score(batch)

    def update_weights(self, weights: Mapping[str, Tensor], decay: float) -> None:
        raise UserError(BASE_STAYS)

    def compute_hidden_states(self, batch: Batch) -> tuple[Tensor, Head]:
        with self.policy.adapter.disable_adapter():
            return self.policy.scorer.compute_hidden_states(batch)  # asked from within the policy's own forward pass

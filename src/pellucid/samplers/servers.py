"""vLLM on other machines: rows spread over servers, each push of weights proved for every one of them.

A server that comes back is given what was pushed last: the policy's weights, or a copy where those change while rows
are drawn (`ahead`); of an adapter that is pushed by itself the base before it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pellucid.samplers.adapters import RefusedError
from pellucid.samplers.fleet import Fleet
from pellucid.samplers.freshness import Freshness
from pellucid.samplers.remote import Remote, described
from pellucid.samplers.vllm import VLLM, fixed_text, length_of_text, pushed_dtype, scored
from pellucid.types import Group, Prompt, Sampling

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

READ = 513
"""Tokens of the fixed text at most: more than a block of the cache, for blocks of up to 512."""


@dataclass
class Servers(VLLM):
    """vLLM's rows and conversations, by servers."""

    urls: Sequence[str] = ()
    timeout: float = 120.0
    """Seconds without an answer after which a server hangs."""
    ahead: bool = False
    """Whether the policy changes while rows are drawn."""
    pool: Fleet | None = None

    def __post_init__(self) -> None:
        self.policy_lock = threading.Lock()
        """One thread at a time reads the policy."""
        self.model_description = b""
        self.pushed_weights: dict[str, Tensor] | None = None
        """What was pushed last, where it is kept."""
        self.text_ids: list[int] = []
        """The fixed text, as long as any server reads it."""
        self.text_logprobs = torch.empty(0)
        """The scorer's log-probs of it, by what was pushed last."""

    def sync(self, policy: Any, version: int = 0) -> None:
        """UserError where a server does not compute with the weights that were pushed."""
        try:
            self._sync(policy, version)
        except RefusedError as error:
            self._fall_back_to_merged(error)
            self._sync(policy, version)

    def _sync(self, policy: Policy, version: int) -> None:
        self.policy, self.version, self.model_description = policy, version, self._describe_model(policy)
        self.pool = self.pool or Fleet(self.urls, self.timeout, self._update_server)
        self.pushed_weights = None  # before there are others
        self.pushed_weights = self._get_pushed_weights(policy, copy=self.ahead)
        self.text_ids = fixed_text(policy, min(READ, policy.context_length - 1))
        self.text_logprobs = scored(policy, self.text_ids)
        try:
            self.pool.update_weights()
        finally:
            if not self.ahead:
                self.pushed_weights = None

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        self._engine.group_size = sampling.n
        return super().generate(prompts, sampling)

    @property
    def _engine(self) -> Fleet:
        assert self.pool
        return self.pool

    def _describe_model(self, policy: Policy) -> bytes:
        form = self._get_adapter_shape(policy)
        return described(policy, form, pushed_dtype(policy, form))

    def _update_server(self, client: Remote) -> None:
        """Give a server what was pushed last, and prove that it computes with that."""
        held = client.version
        client.load_model(self.model_description)
        self._engine.check_max_length(client)
        if not held or client.version != held:  # another process, or somebody else's weights
            client.weight_check = Freshness()
        with self.policy_lock:
            weights = self.pushed_weights or self._get_pushed_weights(self.policy)
            base = self._get_base_weights(self.policy, client.weight_check)
        ids = self.text_ids[: length_of_text(client)]
        if client.version:
            client.score_tokens(ids)  # so that it would be in a cache which is not cleared
        client.push(base | weights)
        client.weight_check.check(client, base | weights, ids, self.text_logprobs[: len(ids) - 1], self.policy.dtype)
        client.is_verified = True

"""vLLM on other machines: rows spread over servers, each push of weights proved for every one of them.

A server that comes back is given what was pushed last: the policy's weights, or a copy where those change while rows
are drawn (`ahead`); of an adapter that is pushed by itself the base before it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    fleet: Fleet | None = None

    def __post_init__(self) -> None:
        self.alone = threading.Lock()
        """One thread at a time reads the policy."""
        self.model = b""
        self.weights: dict[str, Tensor] | None = None
        """What was pushed last, where it is kept."""
        self.text: list[int] = []
        """The fixed text, as long as any server reads it."""
        self.right = torch.empty(0)
        """The scorer's log-probs of it, by what was pushed last."""

    def sync(self, policy: Policy, version: int = 0) -> None:
        """UserError where a server does not compute with the weights that were pushed."""
        try:
            self._sync(policy, version)
        except RefusedError as error:
            self._merge(error)
            self._sync(policy, version)

    def _sync(self, policy: Policy, version: int) -> None:
        self.policy, self.version, self.model = policy, version, self._described(policy)
        self.fleet = self.fleet or Fleet(self.urls, self.timeout, self._bring)
        self.weights = None  # before there are others
        self.weights = self._trained(policy, copy=self.ahead)
        self.text = fixed_text(policy, min(READ, policy.context_length - 1))
        self.right = scored(policy, self.text)
        try:
            self.fleet.renew()
        finally:
            if not self.ahead:
                self.weights = None

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        self._engine.size = sampling.n
        return super().generate(prompts, sampling)

    @property
    def _engine(self) -> Fleet:
        assert self.fleet
        return self.fleet

    def _described(self, policy: Policy) -> bytes:
        form = self._form(policy)
        return described(policy, form, pushed_dtype(policy, form))

    def _bring(self, remote: Remote) -> None:
        """Give a server what was pushed last, and prove that it computes with that."""
        held = remote.version
        remote.load(self.model)
        self._engine.check_room(remote)
        if not held or remote.version != held:  # another process, or somebody else's weights
            remote.freshness = Freshness()
        with self.alone:
            weights = self.weights or self._trained(self.policy)
            base = self._base(self.policy, remote.freshness)
        ids = self.text[: length_of_text(remote)]
        if remote.version:
            remote.read(ids)  # so that it would be in a cache which is not cleared
        remote.push(base | weights)
        remote.freshness.check(remote, base | weights, ids, self.right[: len(ids) - 1], self.policy.dtype)
        remote.proved = True

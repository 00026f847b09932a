"""vLLM as the sampler, in this process: continuous batching and a cache of prefixes, in an arithmetic of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from pellucid.algorithm.batch import collate
from pellucid.machine.harmless import harmless
from pellucid.policy.logprobs import token_logprobs
from pellucid.protocols import World
from pellucid.samplers.adapters import Form, RefusedError, adapter_of, base_of, form_of
from pellucid.samplers.freshness import Freshness
from pellucid.samplers.rollout import check_lengths, completed_groups, row_seed
from pellucid.samplers.talks import PAUSE, Row, Talks
from pellucid.samplers.vllm_engine import Engine, Said, fixed_chance
from pellucid.types import Completion, Group, Prompt, Sampling, UserError

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

TEXT = (
    "On the 3rd of May, at half past seven, the old mill by the river began to turn again. Two boys had mended its"
    ' wheel: 17 boards, 42 nails, and a rope of 9 yards. "Will it hold?" asked the miller. Nobody knew; it held.\n'
)
"""Read by the engine and by the scorer at every push."""
NO_MASKS = (
    'sampler.name = "vllm" does not say which tokens top_k, top_p and min_p have left: set them to 0, 1 and 0, those of'
    ' [evaluate] too, or sampler.name = "native"'
)


class Limited(Protocol):
    """Whoever reads a text."""

    longest: int
    """The most tokens of a text."""
    block: int
    """Tokens that are cached together."""


class Answering(Protocol):
    """Whoever samples rows: an engine, or those of servers."""

    @property
    def longest(self) -> int: ...

    @property
    def asked(self) -> Collection[Any]: ...

    def ask(self, key: Any, ids: Sequence[int], most: int, temperature: float, seed: int) -> None: ...

    def step(self) -> list[Said]: ...

    def drop(self) -> None: ...


@dataclass
class VLLM:
    rows: int = 256
    """How many completions are decoded at once."""
    cache_gb: float = 4.0
    """Memory of keys and values, in GB."""
    policy: Policy = None
    version: int = 0
    world: World | None = None
    """Those whom the policy talks with, where its answers are conversations."""
    patient: bool = False
    """Whether all rows wait for every reply, so that the same seed gives the same bits."""
    adapter: Literal["merged", "request"] = "merged"
    """How an adapter comes to the engine: with its base, as whole weights, or by itself, where vLLM takes it."""
    engine: Engine | None = None
    freshness: Freshness = field(default_factory=Freshness)

    @property
    def in_flight(self) -> bool:
        """As in `InFlight`. Of conversations, each with a process of its own, twice as many as rows would be begun."""
        return not self.world

    def sync(self, policy: Policy, version: int = 0) -> None:
        """UserError where the engine does not compute with the weights that were pushed."""
        if self.engine is None or not self.engine.open:
            self.engine, self.freshness = self._made(policy), Freshness()
        ids = fixed_text(policy, length_of_text(self.engine))
        weights = self._base(policy, self.freshness) | self._trained(policy)
        with fixed_chance():
            self.engine.read(ids)  # so that it would be in a cache which is not cleared
            self.engine.push(weights)
            self.freshness.check(self.engine, weights, ids, scored(policy, ids), policy.dtype)
        self.policy, self.version = policy, version

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Sample a group for each prompt. Each row has random numbers of its own, so that its neighbours do not matter,
        but for the rounding of matrix products.
        """
        if sampling.truncates:
            raise UserError(NO_MASKS)
        try:
            with fixed_chance():
                if self.world:
                    return self._conversations(Talks(self.policy, self.version, self.world, prompts, sampling))
                return self._answers(prompts, sampling)
        finally:
            self._engine.drop()

    def _made(self, policy: Policy) -> Engine:
        try:
            form = self._form(policy)
            return Engine(policy, pushed_dtype(policy, form), self.rows, self.cache_gb, form)
        except RefusedError as error:
            self._merge(error)
            return Engine(policy, pushed_dtype(policy), self.rows, self.cache_gb)

    def _form(self, policy: Policy) -> Form | None:
        """Of the adapter that is pushed by itself, if one is. RefusedError where it cannot be."""
        return form_of(policy) if policy.adapter and self.adapter == "request" else None

    def _merge(self, error: RefusedError) -> None:
        self.adapter = "merged"
        print(harmless(f"! sampler.adapter: merged instead of request ({error})"), flush=True)

    def _base(self, policy: Policy, freshness: Freshness) -> dict[str, Tensor]:
        """The base of an adapter that is pushed by itself, for an engine that has not proved yet that it has it."""
        return {} if freshness.sums or not self._form(policy) else base_of(policy)

    def _trained(self, policy: Policy, copy: bool = False) -> dict[str, Tensor]:
        """What an engine is given at every push. copy: whether it stays as it is when the policy changes."""
        return adapter_of(policy) if self._form(policy) else weights_of(policy, copy)

    @property
    def _engine(self) -> Answering:
        assert self.engine
        return self.engine

    def _answers(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        contexts = [self.policy.encode(prompt) for prompt in prompts]
        check_lengths(contexts, self._engine.longest - sampling.max_tokens)
        for p, (prompt, context) in enumerate(zip(prompts, contexts, strict=True)):
            for g in range(sampling.n):
                seed = row_seed(sampling.seed, prompt, g)
                self._engine.ask(p * sampling.n + g, context, sampling.max_tokens, sampling.temperature, seed)
        said: dict[int, Said] = {}
        while self._engine.asked:
            said |= {answer.key: answer for answer in self._engine.step()}
        rows = [said[row] for row in range(len(said))]
        tokens, logprobs = [row.tokens for row in rows], [row.logprobs for row in rows]
        return completed_groups(self.policy, self.version, prompts, contexts, tokens, logprobs, [()] * len(rows))

    def _conversations(self, talks: Talks) -> list[Group]:
        """A row that was answered goes on beside those that speak; the engine has what it said in its cache."""
        while not talks.over:
            talks.begin(2 * max(self.rows, talks.sampling.n))
            talks.listen(0.0 if self._engine.asked else PAUSE)
            while self.patient and talks.unheard:
                talks.listen(PAUSE)
            for row in [*(row for alike in talks.next_groups(len(talks.rows)) for row in alike), *talks.ready]:
                self._ask(talks, row)
            talks.ready = []
            for said in self._engine.step() if self._engine.asked else []:
                spoken = zip(said.tokens, said.logprobs, strict=True)
                while not talks.add(said.key, *next(spoken), None):
                    pass
                talks.spoken(said.key)
        return talks.groups()

    def _ask(self, talks: Talks, row: Row) -> None:
        sampling, prompt, most = talks.sampling, talks.prompts[row.number // talks.sampling.n], talks.limit(row)
        check_lengths([row.context], self._engine.longest - most)
        seed = row_seed(f"{sampling.seed}/{row.drawn}", prompt, row.number % sampling.n)
        self._engine.ask(row, row.context, most, sampling.temperature, seed)


def pushed_dtype(policy: Policy, form: Form | None = None) -> torch.dtype:
    """Return the dtype in which weights are pushed, and the engine computes.

    It is that of the policy, except for an adapter that is merged into its base: bf16 and fp16 would round most of its
    update away, so that the engine would sample from almost the base model. form: of an adapter pushed by itself.
    """
    return torch.float32 if policy.adapter and not form else policy.dtype


def weights_of(policy: Policy, copy: bool = False) -> dict[str, Tensor]:
    """Return the weights in `pushed_dtype` by their names in a checkpoint, an adapter merged into its base.

    copy: whether they stay as they are when the policy's change.
    """
    model = policy.merged(policy.masters()) if policy.adapter else policy.model
    dtype, copy = pushed_dtype(policy), copy and not policy.adapter  # the merged model is a copy already
    return {name: p.detach().to(dtype, copy=copy) for name, p in model.named_parameters()}


def length_of_text(engine: Limited) -> int:
    """So many tokens fill more than two blocks of the cache, where the context has room for them."""
    return min(2 * engine.block + 1, engine.longest - 1)


def fixed_text(policy: Policy, length: int) -> list[int]:
    """Token ids of a text that is always the same."""
    ids = list(policy.tokenizer(TEXT)["input_ids"])
    return (ids * (1 + length // len(ids)))[:length]


@torch.no_grad()
def scored(policy: Policy, ids: Sequence[int]) -> Tensor:
    """The scorer's log-probs of ids[1:], at temperature 1."""
    response = tuple(ids[1:])
    text = Completion(response, (0.0,) * len(response), "", False)
    batch = collate([Group(Prompt("", ""), tuple(ids[:1]), (text,))])
    hidden, head = policy.hidden(batch)
    return token_logprobs(hidden, head, batch.response_ids[0].to(hidden.device))[0]

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

    max_length: int
    """The most tokens of a text."""
    block_size: int
    """Tokens that are cached together."""


class Answering(Protocol):
    """Whoever samples rows: an engine, or those of servers."""

    @property
    def max_length(self) -> int: ...

    @property
    def unfinished(self) -> Collection[Any]: ...

    def add_request(self, key: Any, ids: Sequence[int], max_tokens: int, temperature: float, seed: int) -> None: ...

    def step(self) -> list[Said]: ...

    def abort_all(self) -> None: ...


@dataclass
class VLLM:
    rows: int = 256
    """How many completions are decoded at once."""
    cache_gb: float = 4.0
    """Memory of keys and values, in GB."""
    policy: Any = None
    version: int = 0
    environments: World | None = None
    """Those whom the policy talks with, where its answers are conversations."""
    deterministic: bool = False
    """Whether all rows wait for every reply, so that the same seed gives the same bits."""
    adapter: Literal["merged", "request"] = "merged"
    """How an adapter comes to the engine: with its base, as whole weights, or by itself, where vLLM takes it."""
    engine: Engine | None = None
    weight_check: Freshness = field(default_factory=Freshness)

    @property
    def batches_continuously(self) -> bool:
        """As in `InFlight`. Of conversations, each with a process of its own, twice as many as rows would be begun."""
        return not self.environments

    def sync(self, policy: Any, version: int = 0) -> None:
        """UserError where the engine does not compute with the weights that were pushed."""
        if self.engine is None or not self.engine.is_open:
            self.engine, self.weight_check = self._create_engine(policy), Freshness()
        ids = fixed_text(policy, length_of_text(self.engine))
        weights = self._get_base_weights(policy, self.weight_check) | self._get_pushed_weights(policy)
        with fixed_chance():
            self.engine.score_tokens(ids)  # so that it would be in a cache which is not cleared
            self.engine.push(weights)
            self.weight_check.check(self.engine, weights, ids, scored(policy, ids), policy.dtype)
        self.policy, self.version = policy, version

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Sample a group for each prompt. Each row has random numbers of its own, so that its neighbours do not matter,
        but for the rounding of matrix products.
        """
        if sampling.truncates:
            raise UserError(NO_MASKS)
        try:
            with fixed_chance():
                if self.environments:
                    return self._generate_conversations(
                        Talks(self.policy, self.version, self.environments, prompts, sampling)
                    )
                return self._generate_completions(prompts, sampling)
        finally:
            self._engine.abort_all()

    def _create_engine(self, policy: Policy) -> Engine:
        try:
            form = self._get_adapter_shape(policy)
            return Engine(policy, pushed_dtype(policy, form), self.rows, self.cache_gb, form)
        except RefusedError as error:
            self._fall_back_to_merged(error)
            return Engine(policy, pushed_dtype(policy), self.rows, self.cache_gb)

    def _get_adapter_shape(self, policy: Policy) -> Form | None:
        """Of the adapter that is pushed by itself, if one is. RefusedError where it cannot be."""
        return form_of(policy) if policy.adapter and self.adapter == "request" else None

    def _fall_back_to_merged(self, error: RefusedError) -> None:
        self.adapter = "merged"
        print(harmless(f"! sampler.adapter: merged instead of request ({error})"), flush=True)

    def _get_base_weights(self, policy: Policy, weight_check: Freshness) -> dict[str, Tensor]:
        """The base of an adapter that is pushed by itself, for an engine that has not proved yet that it has it."""
        return {} if weight_check.column_sums or not self._get_adapter_shape(policy) else base_of(policy)

    def _get_pushed_weights(self, policy: Policy, copy: bool = False) -> dict[str, Tensor]:
        """What an engine is given at every push. copy: whether it stays as it is when the policy changes."""
        return adapter_of(policy) if self._get_adapter_shape(policy) else weights_of(policy, copy)

    @property
    def _engine(self) -> Answering:
        assert self.engine
        return self.engine

    def _generate_completions(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        contexts = [self.policy.encode(prompt) for prompt in prompts]
        check_lengths(contexts, self._engine.max_length - sampling.max_tokens)
        for p, (prompt, context) in enumerate(zip(prompts, contexts, strict=True)):
            for g in range(sampling.n):
                seed = row_seed(sampling.seed, prompt, g)
                self._engine.add_request(p * sampling.n + g, context, sampling.max_tokens, sampling.temperature, seed)
        said: dict[int, Said] = {}
        while self._engine.unfinished:
            said |= {answer.key: answer for answer in self._engine.step()}
        rows = [said[row] for row in range(len(said))]
        tokens, logprobs = [row.tokens for row in rows], [row.logprobs for row in rows]
        return completed_groups(self.policy, self.version, prompts, contexts, tokens, logprobs, [()] * len(rows))

    def _generate_conversations(self, conversations: Talks) -> list[Group]:
        """A row that was answered goes on beside those that speak; the engine has what it said in its cache."""
        while not conversations.is_done:
            conversations.start(2 * max(self.rows, conversations.sampling.n))
            conversations.poll_replies(0.0 if self._engine.unfinished else PAUSE)
            while self.deterministic and conversations.pending_replies:
                conversations.poll_replies(PAUSE)
            for row in [
                *(row for alike in conversations.take_prefill_groups(len(conversations.rows)) for row in alike),
                *conversations.extend_queue,
            ]:
                self._add_turn_request(conversations, row)
            conversations.extend_queue = []
            for said in self._engine.step() if self._engine.unfinished else []:
                spoken = zip(said.tokens, said.logprobs, strict=True)
                while not conversations.add_token(said.key, *next(spoken), None):
                    pass
                conversations.finish_turn(said.key)
        return conversations.collect_groups()

    def _add_turn_request(self, conversations: Talks, row: Row) -> None:
        sampling, prompt, most = (
            conversations.sampling,
            conversations.prompts[row.number // conversations.sampling.n],
            conversations.get_turn_limit(row),
        )
        check_lengths([row.context], self._engine.max_length - most)
        seed = row_seed(f"{sampling.seed}/{row.sampled_count}", prompt, row.number % sampling.n)
        self._engine.add_request(row, row.context, most, sampling.temperature, seed)


def pushed_dtype(policy: Policy, adapter_shape: Form | None = None) -> torch.dtype:
    """Return the dtype in which weights are pushed, and the engine computes.

    It is that of the policy, except for an adapter that is merged into its base: bf16 and fp16 would round most of its
    update away, so that the engine would sample from almost the base model. form: of an adapter pushed by itself.
    """
    return torch.float32 if policy.adapter and not adapter_shape else policy.dtype


def weights_of(policy: Policy, copy: bool = False) -> dict[str, Tensor]:
    """Return the weights in `pushed_dtype` by their names in a checkpoint, an adapter merged into its base.

    copy: whether they stay as they are when the policy's change.
    """
    model = policy.build_merged_model(policy.masters()) if policy.adapter else policy.model
    dtype, copy = pushed_dtype(policy), copy and not policy.adapter  # the merged model is a copy already
    return {name: p.detach().to(dtype, copy=copy) for name, p in model.named_parameters()}


def length_of_text(engine: Limited) -> int:
    """So many tokens fill more than two blocks of the cache, where the context has room for them."""
    return min(2 * engine.block_size + 1, engine.max_length - 1)


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
    hidden, head = policy.compute_hidden_states(batch)
    return token_logprobs(hidden, head, batch.response_ids[0].to(hidden.device))[0]

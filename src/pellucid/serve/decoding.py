"""The served model with its limits, and the way of a request into the engine and of its completions back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import SystemRandom
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from pellucid.algorithm.settings import GRPOConfig
from pellucid.models.drawing import Truncation
from pellucid.protocols import Task
from pellucid.serve.engine import Engine, RefusedError
from pellucid.serve.errors import RequestError
from pellucid.serve.gate import LOOPBACK
from pellucid.serve.messages import Sampling
from pellucid.serve.rows import Drawn, Piece, Request
from pellucid.tasks.wrappers import question_like
from pellucid.types import Message, Prompt, UserError

if TYPE_CHECKING:
    pass

SHORT = 10_000
"""Prompts of up to this many characters are tokenized at once, which takes milliseconds; longer ones in a thread."""


def one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


@dataclass(frozen=True)
class Served:
    """The served model and the limits of its service."""

    name: str
    """The name by which clients call the model."""
    policy: Any
    engine: Engine
    task: Task | None = None
    """The task that taught the model: `/group` asks its held-out questions and grades by it."""
    algorithm: GRPOConfig = field(default_factory=GRPOConfig)
    """The settings by which `/group` computes advantages."""
    system: str = ""
    """The system message before questions of clients' own, for a model that is not served from a run."""
    max_tokens: int = 512
    """The longest completion in tokens, where a request does not say."""
    group_tokens: int = 0
    """The same for the completions of `/group`, as in training; 0 for `max_tokens`."""
    timeout: float = 120.0
    """How many seconds an answer may take, from the arrival of the whole request to its end."""
    body_bytes: int = 1_000_000
    body_seconds: float = 30.0
    send_seconds: float = 30.0
    """How many seconds a client has to take a piece of its answer."""
    hosts: Sequence[str] = LOOPBACK
    """Host names that the service may be reached by; addresses in digits are always let in."""
    token: str = ""
    """The token that clients must show; empty for none."""
    instance: str = ""
    """The number by which `serve start` recognizes its own service."""
    tokenizer_pool: ThreadPoolExecutor = field(default_factory=one_thread)
    grading_pool: ThreadPoolExecutor = field(default_factory=one_thread)
    """Grades one group at a time: in the sandbox, the rewards of several threads would wait for one another anyway."""


@dataclass
class Answer:
    """One completion of a request, put together from its pieces."""

    text: str = ""
    tokens: tuple[Drawn, ...] = ()
    finish_reason: str = ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(drawn.token_id for drawn in self.tokens)

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(drawn.logprob for drawn in self.tokens)

    def append_chunk(self, chunk: Piece) -> None:
        self.text += chunk.text
        self.tokens += chunk.tokens
        self.finish_reason = chunk.finish_reason


class Decoding:
    """A submitted request: an async iterator over the pieces of its completions. Leaving it early frees its rows."""

    def __init__(
        self, served: Served, prompt_ids: tuple[int, ...], sampling: Sampling, max_tokens: int, deadline: float
    ) -> None:
        """Submit a request, to be answered by `until` on the event loop's clock. RequestError where it is refused."""
        self.served, self.prompt_ids, self.deadline = served, prompt_ids, deadline
        self.events: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(news: Piece | Exception | None) -> None:
            loop.call_soon_threadsafe(self.events.put_nowait, news)

        self.request = Request(
            prompt_ids=prompt_ids,
            notify=tell,
            n=sampling.n,
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            truncation=Truncation(sampling.top_k, sampling.top_p, sampling.min_p),
            stop=[stop for stop in sampling.stop if stop],
            seed=SystemRandom().randrange(2**31) if sampling.seed is None else sampling.seed,
            top_logprob_count=sampling.top_logprob_count or 0,
        )
        try:
            served.engine.submit(self.request)
        except RefusedError as error:
            raise RequestError(503, str(error), "overloaded") from error

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            while (piece := await self._next_event()) is not None:
                if isinstance(piece, RefusedError):
                    raise RequestError(503, str(piece), "overloaded") from piece
                if isinstance(piece, Exception):
                    raise RequestError(500, f"decoding failed: {piece}", "internal_error") from piece
                yield piece
        finally:
            self.cancel()

    async def _next_event(self) -> Piece | Exception | None:
        async with in_time(self.served, self.deadline):
            return await self.events.get()

    async def collect_completions(self) -> list[Answer]:
        done = [Answer() for _ in range(self.request.n)]
        async for piece in self:
            done[piece.row_index].append_chunk(piece)
        return done

    def cancel(self) -> None:
        """Cancel the request: its rows are free after the token that is being decoded."""
        self.request.cancelled = True


def asked(served: Served, question: str) -> str | tuple[Message, ...]:
    """Return a question of a client's own as the run asks its own: with its system message and template."""
    if served.task is not None:
        return question_like(getattr(served.task, "task", served.task), question)
    system = ({"role": "system", "content": served.system},) if served.system else ()
    return (*system, {"role": "user", "content": question})


async def begun(
    served: Served,
    prompt: Prompt | Sequence[int],
    sampling: Sampling,
    max_tokens: int | None,
    default_max_tokens: int = 0,
) -> Decoding:
    """Check and submit a request about a prompt, or the token ids of one.

    Args:
        max_tokens: the longest completion that the request asks for; RequestError where the context has no room for it.
        usual: the longest one where the request does not say; 0 for that of the service.

    Raises:
        RequestError: the model cannot do what is asked, or the queue is full.
    """
    until = asyncio.get_running_loop().time() + served.timeout
    if sampling.n > served.engine.max_rows:
        raise RequestError(400, f"n = {sampling.n} must be at most {served.engine.max_rows}")
    async with in_time(served, until):
        prompt_ids = await encoded(served, prompt)
    room = served.policy.context_length - len(prompt_ids)
    wanted = max_tokens or min(default_max_tokens or served.max_tokens, room)
    if room < 1 or wanted > room:
        raise RequestError(
            400,
            f"{len(prompt_ids)} tokens of prompt and {wanted} of answer are more than the context of"
            f" {served.policy.context_length}",
            "context_length_exceeded",
        )
    return Decoding(served, prompt_ids, sampling, wanted, until)


async def encoded(served: Served, prompt: Prompt | Sequence[int]) -> tuple[int, ...]:
    """Return the token ids of a prompt. RequestError where it cannot be encoded, or the model does not know them."""
    ids = await tokenized(served, prompt) if isinstance(prompt, Prompt) else tuple(prompt)
    if max(ids) >= (known := served.policy.model.get_input_embeddings().num_embeddings):
        raise RequestError(400, f"the prompt has a token that the model does not know: it has {known}")
    return ids


async def tokenized(served: Served, prompt: Prompt) -> tuple[int, ...]:
    """A megabyte takes a second: long texts are tokenized in a thread, so that other requests go on."""
    texts = [prompt.text] if isinstance(prompt.text, str) else [str(part) for part in (*prompt.text, *prompt.tools)]
    try:
        if sum(map(len, texts)) + SHORT // 100 * len(texts) <= SHORT:
            return served.policy.encode(prompt)
        return await asyncio.get_running_loop().run_in_executor(served.tokenizer_pool, served.policy.encode, prompt)
    except (UserError, TemplateError, TypeError) as error:
        raise RequestError(400, str(error)) from error


@asynccontextmanager
async def in_time(served: Served, deadline: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as error:
        raise RequestError(504, f"not done within {served.timeout:g} seconds", "timeout") from error


def usage(prompt_ids: Sequence[int], completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": completion_tokens,
        "total_tokens": len(prompt_ids) + completion_tokens,
    }

"""The served model with its limits, and the way of a request into the engine and of its completions back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import SystemRandom
from typing import TYPE_CHECKING

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
    from pellucid.policy.policy import Policy

SHORT = 10_000
"""Prompts of up to this many characters are tokenized at once, which takes milliseconds; longer ones in a thread."""


def one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


@dataclass(frozen=True)
class Served:
    """The served model and the limits of its service."""

    name: str
    """The name by which clients call the model."""
    policy: Policy
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
    tokenizing: ThreadPoolExecutor = field(default_factory=one_thread)
    grading: ThreadPoolExecutor = field(default_factory=one_thread)
    """Grades one group at a time: in the sandbox, the rewards of several threads would wait for one another anyway."""


@dataclass
class Answer:
    """One completion of a request, put together from its pieces."""

    text: str = ""
    tokens: tuple[Drawn, ...] = ()
    reason: str = ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(drawn.token for drawn in self.tokens)

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(drawn.logprob for drawn in self.tokens)

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.reason = piece.reason


class Decoding:
    """A submitted request: an async iterator over the pieces of its completions. Leaving it early frees its rows."""

    def __init__(
        self, served: Served, prompt_ids: tuple[int, ...], settings: Sampling, tokens: int, until: float
    ) -> None:
        """Submit a request, to be answered by `until` on the event loop's clock. RequestError where it is refused."""
        self.served, self.prompt_ids, self.until = served, prompt_ids, until
        self.news: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(news: Piece | Exception | None) -> None:
            loop.call_soon_threadsafe(self.news.put_nowait, news)

        self.request = Request(
            prompt_ids=prompt_ids,
            tell=tell,
            n=settings.n,
            max_tokens=tokens,
            temperature=settings.temperature,
            truncation=Truncation(settings.top_k, settings.top_p, settings.min_p),
            stop=[stop for stop in settings.stop if stop],
            seed=SystemRandom().randrange(2**31) if settings.seed is None else settings.seed,
            likeliest=settings.likeliest or 0,
        )
        try:
            served.engine.submit(self.request)
        except RefusedError as error:
            raise RequestError(503, str(error), "overloaded") from error

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            while (piece := await self._next()) is not None:
                if isinstance(piece, RefusedError):
                    raise RequestError(503, str(piece), "overloaded") from piece
                if isinstance(piece, Exception):
                    raise RequestError(500, f"decoding failed: {piece}", "internal_error") from piece
                yield piece
        finally:
            self.leave()

    async def _next(self) -> Piece | Exception | None:
        async with in_time(self.served, self.until):
            return await self.news.get()

    async def answers(self) -> list[Answer]:
        done = [Answer() for _ in range(self.request.n)]
        async for piece in self:
            done[piece.row].add(piece)
        return done

    def leave(self) -> None:
        """Cancel the request: its rows are free after the token that is being decoded."""
        self.request.cancelled = True


def asked(served: Served, question: str) -> str | tuple[Message, ...]:
    """Return a question of a client's own as the run asks its own: with its system message and template."""
    if served.task is not None:
        return question_like(getattr(served.task, "task", served.task), question)
    system = ({"role": "system", "content": served.system},) if served.system else ()
    return (*system, {"role": "user", "content": question})


async def begun(
    served: Served, prompt: Prompt | Sequence[int], settings: Sampling, max_tokens: int | None, usual: int = 0
) -> Decoding:
    """Check and submit a request about a prompt, or the token ids of one.

    Args:
        max_tokens: the longest completion that the request asks for; RequestError where the context has no room for it.
        usual: the longest one where the request does not say; 0 for that of the service.

    Raises:
        RequestError: the model cannot do what is asked, or the queue is full.
    """
    until = asyncio.get_running_loop().time() + served.timeout
    if settings.n > served.engine.rows:
        raise RequestError(400, f"n = {settings.n} must be at most {served.engine.rows}")
    async with in_time(served, until):
        prompt_ids = await encoded(served, prompt)
    room = served.policy.context_length - len(prompt_ids)
    wanted = max_tokens or min(usual or served.max_tokens, room)
    if room < 1 or wanted > room:
        raise RequestError(
            400,
            f"{len(prompt_ids)} tokens of prompt and {wanted} of answer are more than the context of"
            f" {served.policy.context_length}",
            "context_length_exceeded",
        )
    return Decoding(served, prompt_ids, settings, wanted, until)


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
        return await asyncio.get_running_loop().run_in_executor(served.tokenizing, served.policy.encode, prompt)
    except (UserError, TemplateError, TypeError) as error:
        raise RequestError(400, str(error)) from error


@asynccontextmanager
async def in_time(served: Served, until: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(until):
            yield
    except TimeoutError as error:
        raise RequestError(504, f"not done within {served.timeout:g} seconds", "timeout") from error


def usage(prompt_ids: Sequence[int], tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": tokens,
        "total_tokens": len(prompt_ids) + tokens,
    }

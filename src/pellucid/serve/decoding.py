"""What is served, and a request on its way through the engine."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from random import SystemRandom
from typing import Any

from pellucid.models.drawing import Truncation
from pellucid.serve import engine as engines
from pellucid.serve.engine import Engine, Piece
from pellucid.serve.messages import Sampling
from pellucid.settings import GRPOConfig
from pellucid.types import Prompt, Task, UserError


@dataclass(frozen=True)
class Served:
    """What is served, and within which bounds."""

    name: str
    """As clients call the model."""
    policy: Any
    engine: Engine
    task: Task | None = None
    """That the model was taught by: `/group` asks its held-out questions and grades by it."""
    algorithm: GRPOConfig = field(default_factory=GRPOConfig)
    """Compares the answers of a group."""
    system: str = ""
    """Of `/solve_question`."""
    max_tokens: int = 512
    """Of a completion, where a request does not say."""
    body_bytes: int = 1_000_000
    timeout: float = 120.0
    """Seconds, of a whole request."""
    grading: threading.Lock = field(default_factory=threading.Lock)


class RequestError(Exception):
    """A request that is not served; becomes OpenAI's form of an error."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Answer:
    """A row as it grows."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    reason: str = ""

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.reason = piece.reason


class Decoding:
    """A request on its way: an async iterator of its pieces. Leaving it early frees its rows."""

    def __init__(self, served: Served, prompt: Prompt, settings: Sampling, max_tokens: int | None) -> None:
        try:
            self.served, self.prompt_ids = served, served.policy.encode(prompt)
        except UserError as error:
            raise RequestError(400, str(error)) from error
        room = served.policy.context_length - len(self.prompt_ids)
        wanted = max_tokens or min(served.max_tokens, room)
        if room < 1 or wanted > room:
            raise RequestError(
                400,
                f"{len(self.prompt_ids)} tokens of prompt and {wanted} of answer are more than the context of"
                f" {served.policy.context_length}",
                "context_length_exceeded",
            )
        if settings.n > served.engine.rows:
            raise RequestError(400, f"n = {settings.n} must be at most {served.engine.rows}")
        self.news: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(news: Piece | Exception | None) -> None:
            loop.call_soon_threadsafe(self.news.put_nowait, news)

        self.request = engines.Request(
            prompt_ids=self.prompt_ids,
            tell=tell,
            n=settings.n,
            max_tokens=wanted,
            temperature=settings.temperature,
            truncation=Truncation(settings.top_k, settings.top_p, settings.min_p),
            stop=settings.stops(),
            seed=SystemRandom().randrange(2**31) if settings.seed is None else settings.seed,
        )
        self.deadline = loop.time() + served.timeout
        try:
            served.engine.submit(self.request)
        except queue.Full as error:
            raise RequestError(503, "too many requests are waiting: try again in a moment", "overloaded") from error

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            while (piece := await self._next()) is not None:
                if isinstance(piece, Exception):
                    raise RequestError(500, f"decoding failed: {piece}", "internal_error")
                yield piece
        finally:
            self.request.cancelled = True

    async def _next(self) -> Piece | Exception | None:
        try:
            async with asyncio.timeout_at(self.deadline):
                return await self.news.get()
        except TimeoutError as error:
            raise RequestError(504, f"not done within {self.served.timeout:g} seconds", "timeout") from error

    async def answers(self) -> list[Answer]:
        done = [Answer() for _ in range(self.request.n)]
        async for piece in self:
            done[piece.row].add(piece)
        return done


def usage(prompt_ids: Sequence[int], tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": tokens,
        "total_tokens": len(prompt_ids) + tokens,
    }

"""The service: OpenAI's completions, `/solve_question`, and a group of answers with its advantages."""

from __future__ import annotations

import asyncio
import json
import queue
import re
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import SystemRandom
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from pellucid.advantages import ADVANTAGES, Grades
from pellucid.models.drawing import Truncation
from pellucid.serve import engine as engines
from pellucid.serve.engine import Engine, Piece
from pellucid.serve.messages import ChatRequest, CompletionRequest, GroupRequest, Question, Sampling
from pellucid.settings import GRPOConfig
from pellucid.tasks.answers import reasoning_and_answer
from pellucid.types import Completion, Prompt, Reward, Task

PATIENCE = 100
"""Times the limit that a body is read for: beyond, the connection is closed."""
PAGE = Path(__file__).with_name("page.html")


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


# ---------------------------------------------------------------- decoding


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
        self.served, self.prompt_ids = served, served.policy.encode(prompt)
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


# ---------------------------------------------------------------- OpenAI's forms


def not_served(served: Served, name: str) -> RequestError:
    return RequestError(404, f'the model "{name}" is not served here; "{served.name}" is', "model_not_found")


async def complete(served: Served, request: Sampling, prompt: Prompt, chat: bool, limit: int | None) -> Response:
    if request.model not in ("", served.name):
        raise not_served(served, request.model)
    decoding = Decoding(served, prompt, request, limit)
    id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
    head = {"id": id, "created": int(time.time()), "model": served.name}
    if request.stream:
        with_usage = request.stream_options is not None and request.stream_options.include_usage
        return StreamingResponse(streamed(decoding, head, chat, with_usage), media_type="text/event-stream")
    answers = await decoding.answers()
    choices = [
        {"index": i, "finish_reason": a.reason, "logprobs": None}
        | ({"message": {"role": "assistant", "content": a.text}} if chat else {"text": a.text})
        for i, a in enumerate(answers)
    ]
    used = usage(decoding.prompt_ids, sum(len(a.token_ids) for a in answers))
    kind = "chat.completion" if chat else "text_completion"
    return JSONResponse(head | {"object": kind, "choices": choices, "usage": used})


async def streamed(decoding: Decoding, head: dict[str, Any], chat: bool, with_usage: bool) -> AsyncIterator[str]:
    """Server-sent events. What goes wrong after the first byte is an event of its own."""
    head |= {"object": "chat.completion.chunk" if chat else "text_completion"}
    tokens = 0
    if chat:
        for i in range(decoding.request.n):
            yield event(head | {"choices": [choice(i, {"delta": {"role": "assistant", "content": ""}})]})
    try:
        async for piece in decoding:
            tokens += len(piece.token_ids)
            body = {"delta": {"content": piece.text} if piece.text else {}} if chat else {"text": piece.text}
            yield event(head | {"choices": [choice(piece.row, body, piece.reason)]})
    except RequestError as refusal:
        yield event({"error": {"message": str(refusal), "type": refusal.code, "code": refusal.code}})
    if with_usage:
        yield event(head | {"choices": [], "usage": usage(decoding.prompt_ids, tokens)})
    yield "data: [DONE]\n\n"


def choice(index: int, body: dict[str, Any], reason: str = "") -> dict[str, Any]:
    return {"index": index, "finish_reason": reason or None, "logprobs": None} | body


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


# ---------------------------------------------------------------- the first system's form


async def solve(served: Served, question: str) -> dict[str, Any]:
    """Greedy, so that the same question has the same answer."""
    start = time.perf_counter()
    system = ({"role": "system", "content": served.system},) if served.system else ()
    prompt = Prompt("solve", (*system, {"role": "user", "content": question}))
    [answer] = await Decoding(served, prompt, Sampling(temperature=0.0), None).answers()
    reasoning, final = reasoning_and_answer(answer.text)
    data = {
        "assistant_response": answer.text,
        "reasoning_process": reasoning,
        "final_answer": final,
        "clean_response": re.sub(r"</?(?:think|answer)>", "", answer.text).strip(),
    }
    elapsed = round(1000 * (time.perf_counter() - start))
    return {"code": 0, "elapsed_milliseconds": elapsed, "data": data, "message": "success"}


# ---------------------------------------------------------------- a group, side by side


async def group(served: Served, request: GroupRequest) -> dict[str, Any]:
    """G answers to one prompt as training would see them: rewards and advantages where they can be graded."""
    prompt = group_prompt(served, request)
    settings = Sampling(n=request.group_size, temperature=request.temperature, seed=request.seed)
    decoding = Decoding(served, prompt, settings, request.max_tokens)
    answers = await decoding.answers()
    completions = [Completion(a.token_ids, a.logprobs, a.text, a.reason == "stop") for a in answers]
    rewards = await asyncio.to_thread(graded, served, prompt, completions) if gradable(served, request) else []
    values = [reward.value for reward in rewards]
    compared = advantages(served.algorithm, rewards, completions) if rewards else [None] * len(answers)
    return {
        "question": prompt.question,
        "answer": prompt.answer,
        "prompt": served.policy.decode(decoding.prompt_ids, special=True),
        "completions": [
            {
                "text": a.text,
                "tokens": len(a.token_ids),
                "finished": a.reason == "stop",
                "logprob": sum(a.logprobs),
                "reward": values[i] if rewards else None,
                "parts": dict(rewards[i].parts) if rewards else {},
                "advantage": compared[i],
            }
            for i, a in enumerate(answers)
        ],
    }


def gradable(served: Served, request: GroupRequest) -> bool:
    return served.task is not None and bool(request.answer or not request.question)


def graded(served: Served, prompt: Prompt, completions: Sequence[Completion]) -> list[Reward]:
    """One group at a time: rewards of several threads would wait for one worker anyway."""
    assert served.task is not None
    with served.grading:
        return [served.task.reward(prompt, completion) for completion in completions]


def group_prompt(served: Served, request: GroupRequest) -> Prompt:
    if request.question:
        return Prompt("group", ({"role": "user", "content": request.question},), request.answer)
    if served.task is None:
        raise RequestError(400, "give a question: this model was not served from a run, so there is no task to ask")
    return served.task.sample(request.number, 1)[0]


def advantages(cfg: GRPOConfig, rewards: Sequence[Reward], completions: Sequence[Completion]) -> list[float]:
    values = torch.tensor([[reward.value for reward in rewards]], dtype=torch.float64)
    right = torch.tensor([[float(reward.is_correct) for reward in rewards]], dtype=torch.float64)
    lengths = torch.tensor([[len(c.token_ids) for c in completions]], dtype=torch.float64)
    grades = Grades(values, right, lengths, values[..., None], torch.ones(1, len(rewards), 1, dtype=torch.float64))
    return ADVANTAGES[cfg.advantage](grades, cfg)[0].tolist()


# ---------------------------------------------------------------- the application


def application(served: Served) -> FastAPI:
    app = FastAPI(title="pellucid", docs_url="/docs", redoc_url=None)
    started, answered = time.time(), count()

    @app.middleware("http")
    async def bounded(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        """No body above the limit is kept; it is read to its end all the same, or its sender would hear no answer."""
        body, size = b"", 0
        async for chunk in request.stream():
            size += len(chunk)
            body += chunk if size <= served.body_bytes else b""
            if size > PATIENCE * served.body_bytes:
                break
        if size > served.body_bytes:
            too_large = f"the body is larger than {served.body_bytes} bytes"
            return refused(RequestError(413, too_large, "body_too_large"))
        request._body = body  # as Starlette keeps it, for those who read it next
        next(answered)
        return await call_next(request)

    @app.exception_handler(RequestError)
    async def refusal(_: Request, error: RequestError) -> JSONResponse:
        return refused(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        return refused(RequestError(400, "; ".join(map(said, error.errors()))))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {
            "status": "ok",
            "model": served.name,
            "seconds": round(time.time() - started),
            "requests": next(answered),
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": served.name, "object": "model", "created": int(started), "owned_by": "pellucid"}
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != served.name:
            raise not_served(served, name)
        return {"id": served.name, "object": "model", "created": int(started), "owned_by": "pellucid"}

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest) -> Response:
        prompt = Prompt("chat", tuple(message.model_dump() for message in request.messages))
        return await complete(served, request, prompt, True, request.max_completion_tokens or request.max_tokens)

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest) -> Response:
        return await complete(served, request, Prompt("text", request.prompt), False, request.max_tokens)

    @app.post("/solve_question")
    async def solve_question(request: Question) -> dict[str, Any]:
        return await solve(served, request.question)

    @app.post("/group")
    async def draw_group(request: GroupRequest) -> dict[str, Any]:
        return await group(served, request)

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text().replace("{{model}}", served.name))

    return app


def refused(refusal: RequestError) -> JSONResponse:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    headers = {"Retry-After": "1"} if refusal.status == 503 else None
    body = {"error": {"message": str(refusal), "type": kind, "code": refusal.code, "param": None}}
    return JSONResponse(body, refusal.status, headers)


def said(error: dict[str, Any]) -> str:
    """Example: "messages.0.role: Input should be 'system', 'user' or 'assistant'" """
    place = ".".join(str(part) for part in error["loc"] if part != "body")
    return f"{place}: {error['msg']}" if place else str(error["msg"])

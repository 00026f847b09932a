"""The service: OpenAI's completions, `/solve_question`, and a group of answers with its advantages."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response

from pellucid.serve.completions import complete, not_served
from pellucid.serve.decoding import Decoding, RequestError, Served
from pellucid.serve.group import group
from pellucid.serve.messages import ChatRequest, CompletionRequest, GroupRequest, Question, Sampling
from pellucid.tasks.answers import reasoning_and_answer
from pellucid.types import Prompt

PATIENCE = 100
"""Times the limit that a body is read for: beyond, the connection is closed."""
PAGE = Path(__file__).with_name("page.html")


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

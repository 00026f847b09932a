"""The HTTP application: OpenAI's completions, `/solve_question`, and `/group`, completions with their advantages."""

from __future__ import annotations

import html
import re
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp

from pellucid.rewards.answers import reasoning_and_answer
from pellucid.samplers.rollout import begins_in_thought
from pellucid.serve.completions import complete, not_served
from pellucid.serve.decoding import Served, asked, begun
from pellucid.serve.errors import refuse_in_form
from pellucid.serve.exchange import Exchanges
from pellucid.serve.gate import Gate
from pellucid.serve.group import group
from pellucid.serve.messages import ChatRequest, CompletionRequest, GroupRequest, Question, Sampling
from pellucid.types import Prompt

PAGE = Path(__file__).with_name("page.html")


async def until_answered() -> AsyncIterator[ExitStack]:
    """Yield a stack of clean-ups, which run when the answer is sent or its client has left."""
    with ExitStack() as leaving:
        yield leaving


Leaving = Annotated[ExitStack, Depends(until_answered)]


def application(served: Served) -> ASGIApp:
    app = FastAPI(title="pellucid", docs_url="/docs", redoc_url=None)
    started = time.time()
    exchanges = Exchanges(app, served.body_bytes, served.body_seconds, served.send_seconds)

    refuse_in_form(app)

    @app.get("/health")
    async def health() -> JSONResponse:
        ending = served.engine.closed
        facts = {
            "status": "ending" if ending else "ok",
            "model": served.name,
            "instance": served.instance,
            "seconds": round(time.time() - started),
            "requests": exchanges.request_count,
        }
        return JSONResponse(facts | served.engine.describe_state(), 503 if ending else 200)

    card = {"id": served.name, "object": "model", "created": int(started), "owned_by": "pellucid"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != served.name:
            raise not_served(served, name)
        return card

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest, leaving: Leaving) -> Response:
        limit = request.max_completion_tokens or request.max_tokens
        return await complete(served, request, request.prompt, True, limit, leaving)

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest, leaving: Leaving) -> Response:
        prompt = Prompt("text", request.prompt) if isinstance(request.prompt, str) else request.prompt
        return await complete(served, request, prompt, False, request.max_tokens, leaving)

    @app.post("/solve_question")
    async def solve_question(request: Question) -> dict[str, Any]:
        return await solve(served, request.question)

    @app.post("/group")
    async def draw_group(request: GroupRequest) -> dict[str, Any]:
        return await group(served, request)

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text().replace("{{model}}", html.escape(served.name)))

    return Gate(exchanges, served.hosts, served.token)


async def solve(served: Served, question: str) -> dict[str, Any]:
    """Answer a question by greedy decoding, without random numbers.

    The answer does not depend on the other requests with `serve --batch-invariant`, or where the processor computes
    that way by itself.
    """
    start = time.perf_counter()
    decoding = await begun(served, Prompt("solve", asked(served, question)), Sampling(temperature=0.0), None)
    [answer] = await decoding.collect_completions()
    thinking = begins_in_thought(served.policy, decoding.prompt_ids)
    reasoning, final = reasoning_and_answer("<think>" + answer.text if thinking else answer.text)
    data = {
        "assistant_response": answer.text,
        "reasoning_process": reasoning,
        "final_answer": final,
        "clean_response": re.sub(r"</?(?:think|answer)>", "", answer.text).strip(),
    }
    elapsed = round(1000 * (time.perf_counter() - start))
    return {"code": 0, "elapsed_milliseconds": elapsed, "data": data, "message": "success"}

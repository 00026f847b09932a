"""OpenAI's completions, whole or as a stream of events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse

from pellucid.serve.decoding import Decoding, Served, begun, usage
from pellucid.serve.errors import RequestError
from pellucid.serve.messages import Sampling
from pellucid.types import Prompt


def not_served(served: Served, name: str) -> RequestError:
    return RequestError(404, f'the model "{name}" is not served here; "{served.name}" is', "model_not_found")


async def complete(
    served: Served, request: Sampling, prompt: Prompt, chat: bool, limit: int | None, leaving: ExitStack
) -> Response:
    """Return the completions of a prompt, at most `limit` tokens each. RequestError where they cannot be made.

    `leaving` cancels the decoding when the answer is sent or the client has left, even where a stream has not begun.
    """
    if request.model not in ("", served.name):
        raise not_served(served, request.model)
    decoding = await begun(served, prompt, request, limit)
    leaving.callback(decoding.leave)
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
    """Yield the answer as server-sent events. An error is an event, too, since the status has been sent by then."""
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

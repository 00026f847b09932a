"""OpenAI's completions, whole or as a stream of events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from itertools import starmap
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse

from pellucid.serve.choices import Choices
from pellucid.serve.decoding import Answer, Served, begun, usage
from pellucid.serve.errors import RequestError
from pellucid.serve.messages import Sampling
from pellucid.types import Prompt


def not_served(served: Served, name: str) -> RequestError:
    return RequestError(404, f'the model "{name}" is not served here; "{served.name}" is', "model_not_found")


async def complete(
    served: Served,
    request: Sampling,
    prompt: Prompt | Sequence[int],
    is_chat: bool,
    max_tokens: int | None,
    cleanup: ExitStack,
) -> Response:
    """Return the completions of a prompt, at most `limit` tokens each. RequestError where they cannot be made.

    `leaving` cancels the decoding when the answer is sent or the client has left, even where a stream has not begun.
    """
    if request.model not in ("", served.name):
        raise not_served(served, request.model)
    decoding = await begun(served, prompt, request, max_tokens)
    cleanup.callback(decoding.cancel)
    tools = prompt.tools if isinstance(prompt, Prompt) else ()
    choices = Choices(decoding, is_chat, tools, request.top_logprob_count is not None, request.return_token_ids)
    id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
    head = {"id": id, "created": int(time.time()), "model": served.name}
    if request.stream:
        with_usage = request.stream_options is not None and request.stream_options.include_usage
        return StreamingResponse(streamed(choices, head, with_usage), media_type="text/event-stream")
    answers = await decoding.collect_completions()
    used = usage(decoding.prompt_ids, sum(len(a.tokens) for a in answers))
    told = {"object": "chat.completion" if is_chat else "text_completion", "usage": used}
    return JSONResponse(
        head | choices.build_head() | told | {"choices": list(starmap(choices.build_choice, enumerate(answers)))}
    )


async def streamed(choices: Choices, head: dict[str, Any], with_usage: bool) -> AsyncIterator[str]:
    """Yield the answer as server-sent events. An error is an event, too, since the status has been sent by then."""
    decoding, once = choices.stream, choices.build_head()
    head |= {"object": "chat.completion.chunk" if choices.is_chat else "text_completion"}
    answers = [Answer() for _ in range(decoding.request.n)]
    if choices.is_chat:
        for i in range(decoding.request.n):
            yield event(head | once | {"choices": [choices.build_opening_chunk(i)]})
            once = {}
    try:
        async for piece in decoding:
            row = piece.row_index
            answers[row].append_chunk(piece)
            if choices.tools and not piece.finish_reason:
                continue
            choice = choices.build_final_chunk(row, answers[row]) if choices.tools else choices.build_chunk(piece)
            yield event(head | once | {"choices": [choice]})
            once = {}
    except RequestError as refusal:
        yield event({"error": {"message": str(refusal), "type": refusal.code, "code": refusal.code}})
    if with_usage:
        yield event(head | {"choices": [], "usage": usage(decoding.prompt_ids, sum(len(a.tokens) for a in answers))})
    yield "data: [DONE]\n\n"


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"

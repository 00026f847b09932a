"""Choices in OpenAI's form: what was said, the calls of tools in it, its log-probs and its token ids."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pellucid.policy import tool_calls
from pellucid.policy.token_bytes import REPLACEMENT
from pellucid.serve.decoding import Answer, Decoding
from pellucid.serve.rows import Drawn, Piece

LEAST = -9999.0
"""Told in place of a smaller log-prob, as OpenAI does: JSON has no infinity."""


@dataclass(frozen=True)
class Choices:
    """How the choices of a request are told."""

    decoding: Decoding
    chat: bool
    tools: Sequence[Mapping[str, Any]] = ()
    logprobs: bool = False
    token_ids: bool = False

    def head(self) -> dict[str, Any]:
        """Return what an answer has once, or the first event of a stream."""
        return {"prompt_token_ids": list(self.decoding.prompt_ids)} if self.token_ids else {}

    def whole(self, index: int, answer: Answer) -> dict[str, Any]:
        body, reason = self.said(answer)
        # vLLM has the prompt in the answer to a chat, and in each choice of a text.
        body = {"message": body} if self.chat else body | self.head()
        return self.choice(index, body, reason, answer.tokens)

    def opening(self, index: int) -> dict[str, Any]:
        return self.choice(index, {"delta": {"role": "assistant", "content": ""}}, "", ())

    def piece(self, piece: Piece) -> dict[str, Any]:
        """Return a piece of a choice."""
        body = {"delta": {"content": piece.text} if piece.text else {}} if self.chat else {"text": piece.text}
        return self.choice(piece.row, body, piece.reason, piece.tokens)

    def last(self, index: int, answer: Answer) -> dict[str, Any]:
        """Return a whole choice as the only piece of one: until the end nobody knows which text is a call."""
        body, reason = self.said(answer)
        calls = [{"index": i, **call} for i, call in enumerate(body.get("tool_calls", ()))]
        delta = ({"content": body["content"]} if body["content"] else {}) | ({"tool_calls": calls} if calls else {})
        return self.choice(index, {"delta": delta}, reason, answer.tokens)

    def said(self, answer: Answer) -> tuple[dict[str, Any], str]:
        """Return the message, or the text, and why it ended. A call that cannot be read remains text."""
        if not self.chat:
            return {"text": answer.text}, answer.reason
        policy, ids = self.policy, answer.token_ids
        cut = max(0, len(policy.decode(ids)) - len(answer.text)) if self.tools else 0
        prompt_ids = self.decoding.prompt_ids
        message = tool_calls.read(policy.tokenizer, ids, prompt_ids, self.tools, policy.eos_ids, cut).message
        if not (calls := message.get("tool_calls")):
            return {"role": "assistant", "content": answer.text}, answer.reason
        told = {"role": "assistant", "content": message["content"] or None, "tool_calls": list(map(told_call, calls))}
        return told, "tool_calls" if answer.reason == "stop" else answer.reason

    def choice(self, index: int, body: dict[str, Any], reason: str, tokens: Sequence[Drawn]) -> dict[str, Any]:
        told = {"index": index, "finish_reason": reason or None, "logprobs": None} | body
        if self.logprobs and tokens:
            told["logprobs"] = self.of_chat(tokens) if self.chat else self.of_text(tokens)
        return told | ({"token_ids": [drawn.token for drawn in tokens]} if self.token_ids else {})

    def of_chat(self, tokens: Sequence[Drawn]) -> dict[str, Any]:
        content = [
            self.entry(drawn.token, drawn.logprob, drawn.added)
            | {
                "top_logprobs": [
                    self.entry(token, logprob, self.added(token, drawn)) for token, logprob in drawn.likeliest
                ]
            }
            for drawn in tokens
        ]
        return {"content": content, "refusal": None}

    def entry(self, token: int, logprob: float, added: bytes) -> dict[str, Any]:
        return {"token": self.name(token), "logprob": max(logprob, LEAST), "bytes": list(added)}

    def added(self, token: int, drawn: Drawn) -> bytes:
        """Return the bytes that a token would have added to the text in place of the one that was drawn."""
        if token == drawn.token:
            return drawn.added
        first = self.policy.decode([token]) if drawn.offset == 0 else REPLACEMENT
        return self.policy.token_bytes.of(token) if REPLACEMENT in first else first.encode()

    def of_text(self, tokens: Sequence[Drawn]) -> dict[str, Any]:
        return {
            "tokens": [self.name(drawn.token) for drawn in tokens],
            "token_logprobs": [max(drawn.logprob, LEAST) for drawn in tokens],
            "top_logprobs": [
                # Where two tokens have the same name, the likelier one is told.
                {self.name(token): max(logprob, LEAST) for token, logprob in (drawn[:2], *reversed(drawn.likeliest))}
                for drawn in tokens
            ],
            "text_offset": [drawn.offset for drawn in tokens],
        }

    @property
    def policy(self) -> Any:
        return self.decoding.served.policy

    def name(self, token: int) -> str:
        return self.policy.token_bytes.name(token)


def told_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call as OpenAI has it: its arguments as text, and with an id that no other call has."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }

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

    stream: Decoding
    is_chat: bool
    tools: Sequence[Mapping[str, Any]] = ()
    with_logprobs: bool = False
    with_token_ids: bool = False

    def build_head(self) -> dict[str, Any]:
        """Return what an answer has once, or the first event of a stream."""
        return {"prompt_token_ids": list(self.stream.prompt_ids)} if self.with_token_ids else {}

    def build_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        body, reason = self.build_content(answer)
        # vLLM has the prompt in the answer to a chat, and in each choice of a text.
        body = {"message": body} if self.is_chat else body | self.build_head()
        return self.assemble_choice(index, body, reason, answer.tokens)

    def build_opening_chunk(self, index: int) -> dict[str, Any]:
        return self.assemble_choice(index, {"delta": {"role": "assistant", "content": ""}}, "", ())

    def build_chunk(self, chunk: Piece) -> dict[str, Any]:
        """Return a piece of a choice."""
        body = {"delta": {"content": chunk.text} if chunk.text else {}} if self.is_chat else {"text": chunk.text}
        return self.assemble_choice(chunk.row_index, body, chunk.finish_reason, chunk.tokens)

    def build_final_chunk(self, index: int, answer: Answer) -> dict[str, Any]:
        """Return a whole choice as the only piece of one: until the end nobody knows which text is a call."""
        body, reason = self.build_content(answer)
        calls = [{"index": i, **call} for i, call in enumerate(body.get("tool_calls", ()))]
        delta = ({"content": body["content"]} if body["content"] else {}) | ({"tool_calls": calls} if calls else {})
        return self.assemble_choice(index, {"delta": delta}, reason, answer.tokens)

    def build_content(self, answer: Answer) -> tuple[dict[str, Any], str]:
        """Return the message, or the text, and why it ended. A call that cannot be read remains text."""
        if not self.is_chat:
            return {"text": answer.text}, answer.finish_reason
        policy, ids = self.policy, answer.token_ids
        cut = max(0, len(policy.decode(ids)) - len(answer.text)) if self.tools else 0
        prompt_ids = self.stream.prompt_ids
        message = tool_calls.read(policy.tokenizer, ids, prompt_ids, self.tools, policy.eos_ids, cut).message
        if not (calls := message.get("tool_calls")):
            return {"role": "assistant", "content": answer.text}, answer.finish_reason
        told = {"role": "assistant", "content": message["content"] or None, "tool_calls": list(map(told_call, calls))}
        return told, "tool_calls" if answer.finish_reason == "stop" else answer.finish_reason

    def assemble_choice(
        self, index: int, body: dict[str, Any], finish_reason: str, tokens: Sequence[Drawn]
    ) -> dict[str, Any]:
        told = {"index": index, "finish_reason": finish_reason or None, "logprobs": None} | body
        if self.with_logprobs and tokens:
            told["logprobs"] = self.build_chat_logprobs(tokens) if self.is_chat else self.build_text_logprobs(tokens)
        return told | ({"token_ids": [drawn.token_id for drawn in tokens]} if self.with_token_ids else {})

    def build_chat_logprobs(self, tokens: Sequence[Drawn]) -> dict[str, Any]:
        content = [
            self.build_logprob_entry(drawn.token_id, drawn.logprob, drawn.text_bytes)
            | {
                "top_logprobs": [
                    self.build_logprob_entry(token, logprob, self.get_text_bytes(token, drawn))
                    for token, logprob in drawn.top_logprobs
                ]
            }
            for drawn in tokens
        ]
        return {"content": content, "refusal": None}

    def build_logprob_entry(self, token: int, logprob: float, text_bytes: bytes) -> dict[str, Any]:
        return {"token": self.get_token_name(token), "logprob": max(logprob, LEAST), "bytes": list(text_bytes)}

    def get_text_bytes(self, token: int, drawn: Drawn) -> bytes:
        """Return the bytes that a token would have added to the text in place of the one that was drawn."""
        if token == drawn.token_id:
            return drawn.text_bytes
        first = self.policy.decode([token]) if drawn.text_offset == 0 else REPLACEMENT
        return self.policy.token_bytes.of(token) if REPLACEMENT in first else first.encode()

    def build_text_logprobs(self, tokens: Sequence[Drawn]) -> dict[str, Any]:
        return {
            "tokens": [self.get_token_name(drawn.token_id) for drawn in tokens],
            "token_logprobs": [max(drawn.logprob, LEAST) for drawn in tokens],
            "top_logprobs": [
                # Where two tokens have the same name, the likelier one is told.
                {
                    self.get_token_name(token): max(logprob, LEAST)
                    for token, logprob in (drawn[:2], *reversed(drawn.top_logprobs))
                }
                for drawn in tokens
            ],
            "text_offset": [drawn.text_offset for drawn in tokens],
        }

    @property
    def policy(self) -> Any:
        return self.stream.served.policy

    def get_token_name(self, token: int) -> str:
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

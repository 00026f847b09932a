"""Messages to tokens: chat templates, special tokens in texts, tools for templates without tools, and bridge tokens.

The template and the variables from the settings are written into the tokenizer's template. It is saved with the model,
so the model is served as it was trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from pellucid.types import Message, Prompt, UserError
from pellucid.utils.text import describe_searched_folders, format_one_line

_TemplateValue = bool | int | float | str
_TemplateTools = list[Any] | None
"""Tools for `apply_chat_template`."""
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError)
"""Errors that templates raise for features that they do not support."""
RENDER_ERRORS = (*TEMPLATE_ERRORS, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors that templates raise for messages that they cannot render."""
_PROBE_QUESTION = {"role": "user", "content": "?"}
PROBE = "probed"
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": PROBE, "description": "", "parameters": {"type": "object", "properties": {}}},
}


class ChatTemplate(NamedTuple):
    """The settings of a chat template."""

    file: str = ""
    """A file with a chat template in Jinja; empty means the template of the checkpoint."""
    variables: Mapping[str, _TemplateValue] = {}
    """Values of its variables, such as enable_thinking."""

    def apply_to_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Put the template and its variables into a tokenizer.

        Raise UserError if the file cannot be read or rendered, or does not use one of the variables.
        """
        if not self.file and not self.variables:
            return
        text = _read_template(self.file) if self.file else tokenizer.chat_template
        if not isinstance(text, str):
            raise UserError(
                "policy.template_kwargs: this tokenizer has no chat template of its own: give policy.template"
            )
        for name in self.variables:
            if not re.search(rf"\b{re.escape(name)}\b", text):
                raise UserError(f"policy.template_kwargs: the chat template does not use {name}")
        # A variable that is set at the start of the template overrides the value that the caller gives.
        settings = "".join(f"{{% set {n} = {json.dumps(v)} %}}" for n, v in self.variables.items())
        tokenizer.chat_template = settings + text
        _check_template(tokenizer, self.file or "the checkpoint's own")


def encode_question(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Return the token ids of a prompt, up to where the answer begins. Raise UserError if it is a string with tools.

    Without a chat template, only the contents of messages are used, each on a line of its own.
    """
    if isinstance(prompt.text, str) or not prompt.escape_special_tokens:
        [ids] = encode_prompt_texts(tokenizer, [render_question(tokenizer, prompt)])
        return ids
    messages, tools = prepare_messages(tokenizer, prompt.text, prompt.tools)
    before = () if tokenizer.chat_template else _get_leading_ids(tokenizer)
    return (*before, *encode_messages_literally(tokenizer, lambda marked: _render(tokenizer, marked, tools), messages))


class PromptText(NamedTuple):
    """The text of a prompt, before it is tokenized."""

    text: str
    has_special_tokens: bool
    """Whether the text already has its special tokens, since a chat template writes them."""


def render_question(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> PromptText:
    """Return the text up to where the answer begins. Raise UserError if the prompt is a string with tools."""
    if isinstance(prompt.text, str):
        if prompt.tools:
            raise UserError(f"prompt {prompt.id} has tools, and its text is a string: give messages, or no tools")
        return PromptText(prompt.text, has_special_tokens=False)
    messages, tools = prepare_messages(tokenizer, prompt.text, prompt.tools)
    return PromptText(_render(tokenizer, messages, tools), has_special_tokens=bool(tokenizer.chat_template))


def encode_prompt_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[PromptText]) -> list[tuple[int, ...]]:
    """Return the token ids of texts that a model continues.

    A text without special tokens gets those that the tokenizer puts before a text, such as BOS, unless it begins with
    them. Tokens that the tokenizer appends to a text, such as EOS, are left out, since the model continues the text.
    """
    if not texts:
        return []
    encoded = tokenizer([each.text for each in texts], add_special_tokens=False)["input_ids"]
    before = () if all(each.has_special_tokens for each in texts) else _get_leading_ids(tokenizer)
    return [
        tuple(ids) if each.has_special_tokens or tuple(ids[: len(before)]) == before else (*before, *ids)
        for each, ids in zip(texts, encoded, strict=True)
    ]


def _get_leading_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that the tokenizer puts before a text."""
    probe = "a"
    ids, bare = (tuple(tokenizer(probe, add_special_tokens=special)["input_ids"]) for special in (True, False))
    return ids[: next((i for i in range(len(ids)) if ids[i : i + len(bare)] == bare), 0)]


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: _TemplateTools = None,
    begins_answer: bool = True,
) -> str:
    """Return the text of messages from `prepare_messages`, with the beginning of the answer if `begins_answer`."""
    if not tokenizer.chat_template:
        return "".join(message["content"] + "\n" for message in messages)
    conversation: Any = messages
    return str(
        tokenizer.apply_chat_template(conversation, tools=tools, add_generation_prompt=begins_answer, tokenize=False)
    )


def prepare_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[dict[str, Any]], _TemplateTools]:
    """Return messages and tools for the chat template. If it does not support tools, write them into the messages."""
    copies = [dict(message) for message in messages]
    if not tools and not any(message["role"] == "tool" or message.get("tool_calls") for message in copies):
        return copies, None
    if _is_probe_rendered(tokenizer, [_PROBE_QUESTION], [_PROBE_TOOL]):
        return copies, [dict(tool) for tool in tools] or None
    plain = _convert_to_plain_messages(copies)
    if not tools:
        return plain, None
    has_system_role = _is_probe_rendered(tokenizer, [{"role": "system", "content": PROBE}, _PROBE_QUESTION])
    text = _TOOLS_PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    return _add_system_text(plain, text, has_system_role), None


def _is_probe_rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: _TemplateTools = None
) -> bool:
    """Return whether the rendered text contains PROBE, a word in the messages or tools."""
    try:
        return PROBE in _render(tokenizer, messages, tools)
    except TEMPLATE_ERRORS:
        return False


def _read_template(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"policy.template = {file!r} cannot be read ({getattr(error, 'strerror', None) or error})"
            + (describe_searched_folders(Path(file)) if isinstance(error, FileNotFoundError) else "")
        ) from error


def _check_template(tokenizer: PreTrainedTokenizerBase, file: str) -> None:
    """Raise UserError if the template does not render a question."""
    try:
        text = _render(tokenizer, [_PROBE_QUESTION])
    except TEMPLATE_ERRORS as error:
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise UserError(f"policy.template: {file}{line}: {format_one_line(error)}") from error
    if "?" not in text:
        raise UserError(f"policy.template: {file} leaves the question out")


def format_template_error(error: BaseException) -> str:
    """Return an error of a chat template in one line."""
    return f"the chat template raises {type(error).__name__}: {format_one_line(error, 200)}"


def find_token_fault(ids: Sequence[int], vocabulary: int) -> str:
    """Return why a model with this many embeddings cannot continue these tokens; empty if it can."""
    if not ids:
        return "it is empty, and this tokenizer puts no token before a text: write a question"
    if (last := max(ids)) >= vocabulary:
        return f"token {last} of the tokenizer is beyond the {vocabulary} tokens that the model has"
    return ""


def encode_prefix(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Return the token ids of the prefix. It is tokenized separately, so the last prompt token does not change."""
    return tuple(tokenizer(prompt.prefix, add_special_tokens=False)["input_ids"]) if prompt.prefix else ()


# ---------------------------------------------------------------- special tokens that are written in messages


_MARK_START, _MARK_END = "\ue000", "\ue001"
"""Private-use characters around the number that replaces a special token while a template is rendered."""
_SEPARATOR = "\n"
"""Put before a text that is tokenized separately, since some tokenizers put a space before every text."""


def encode_messages_literally(
    tokenizer: PreTrainedTokenizerBase, render: Callable[[Sequence[Message]], str], messages: Sequence[Message]
) -> list[int]:
    """Return the token ids of rendered messages. Special tokens that are written in messages become plain characters.

    Without any, the whole text is tokenized at once; otherwise it is split at them and tokenized in parts.
    """
    special = get_special_tokens(tokenizer)
    found: list[str] = []
    longest_first = sorted((*special, _MARK_START, _MARK_END), key=len, reverse=True)
    marked = _mark_special_tokens(messages, re.compile("|".join(map(re.escape, longest_first))), found)
    if special.isdisjoint(found):
        return _encode_text(tokenizer, render(messages))
    first, *pieces = re.split(f"{_MARK_START}(\\d+){_MARK_END}", render(marked))
    ids = _encode_text(tokenizer, first)
    for i, piece in enumerate(pieces):
        ids += _encode_continuation(tokenizer, piece) if i % 2 else _encode_as_characters(tokenizer, found[int(piece)])
    return ids


def get_special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the texts of all special tokens."""
    added = tokenizer.added_tokens_decoder.values()
    return {*tokenizer.all_special_tokens, *(str(token.content) for token in added if token.special)} - {""}


def _encode_text(tokenizer: PreTrainedTokenizerBase, text: str, literal: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=literal)["input_ids"])


def _mark_special_tokens(value: Any, special: re.Pattern[str], found: list[str]) -> Any:
    """Return the value with every special token in its strings replaced by a mark, and append the token to `found`."""

    def mark(match: re.Match[str]) -> str:
        found.append(match[0])
        return f"{_MARK_START}{len(found) - 1}{_MARK_END}"

    if isinstance(value, str):
        return special.sub(mark, value)
    if isinstance(value, dict):
        return {key: _mark_special_tokens(inner, special, found) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mark_special_tokens(inner, special, found) for inner in value]
    return value


def _encode_continuation(tokenizer: PreTrainedTokenizerBase, text: str, literal: bool = False) -> list[int]:
    """Return the token ids of a text that follows another text."""
    before = _encode_text(tokenizer, _SEPARATOR)
    both = _encode_text(tokenizer, _SEPARATOR + text, literal)
    return both[len(before) :] if both[: len(before)] == before else _encode_text(tokenizer, text, literal)


def _encode_as_characters(tokenizer: PreTrainedTokenizerBase, token: str) -> list[int]:
    """Return the ids of a special token as plain text; of its characters, if tokenizing yields the token itself."""
    ids = _encode_continuation(tokenizer, token, literal=True)
    if tokenizer.convert_tokens_to_ids(token) not in ids:
        return ids
    return [id for character in token for id in _encode_continuation(tokenizer, character, literal=True)]


# ---------------------------------------------------------------- tools in the text of messages
# This is the format of Hermes, for chat templates without tools.


_TOOLS_PROMPT = """\
You can call tools. Each line describes one of them:
{tools}
To call one, write its name and its arguments in one JSON object, as in
<tool_call>{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}</tool_call>
You may call several, one after the other. Their results are between <tool_response> and </tool_response>."""


def _convert_to_plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages of system, user and assistant only, with tool calls and responses in their texts.

    Consecutive responses are joined in one user message, since some templates require that roles alternate.
    """
    out: list[dict[str, Any]] = []
    for are_responses, group in groupby(messages, lambda message: message["role"] == "tool"):
        if are_responses:
            responses = (f"<tool_response>\n{message['content']}\n</tool_response>" for message in group)
            out.append({"role": "user", "content": "\n".join(responses)})
        else:
            out += map(_inline_calls, group)
    return out


def _inline_calls(message: Message) -> dict[str, Any]:
    """Return a message with its tool calls in its text."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [{"name": function["name"], "arguments": function["arguments"]} for function in functions]
    texts = [f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>" for call in calls]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return plain | {"content": "\n".join(filter(None, [message.get("content"), *texts]))} if calls else plain


def _add_system_text(messages: Sequence[Message], text: str, has_system_role: bool) -> list[dict[str, Any]]:
    """Append a text to the system message or a new one; without a system role, put it before the first text."""
    first, *rest = map(dict, messages)
    if first["role"] == "system":
        return [first | {"content": f"{first['content']}\n\n{text}"}, *rest]
    if has_system_role:
        return [{"role": "system", "content": text}, first, *rest]
    return [first | {"content": f"{text}\n\n{first['content']}"}, *rest]


# ---------------------------------------------------------------- bridge tokens
# Sampled tokens are never tokenized again. Only the bridge between two turns is: the end of a turn as the chat template
# writes it, the messages that follow, and the beginning of the next turn. It is cut out of a short conversation with
# the same messages, so its cost does not depend on the length of the conversation.


_ASSISTANT_MARKER = "a7c1"
"""The turn of the policy in the short conversation."""
_OBSERVATION_MARKER = "b2d9"


class _BridgeTokens(NamedTuple):
    """Token ids between two turns of the policy."""

    end: tuple[int, ...]
    """The EOS token, which the policy has usually sampled already; empty if the template writes none."""
    rest: tuple[int, ...]


def encode_bridge(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], eos_ids: Sequence[int]
) -> _BridgeTokens:
    """Return the bridge tokens between two turns of the policy, which contain the messages of the environment.

    Raise UserError if the chat template cannot render these messages after a turn.
    """
    if not tokenizer.chat_template:
        text = "\n" + "".join(f"{message['content']}\n" for message in messages)
        return _BridgeTokens((), tuple(_encode_text(tokenizer, text, literal=True)))
    messages, _ = prepare_messages(tokenizer, messages)

    def render(marked: Sequence[Message]) -> str:
        # The tool call before these messages uses the marked name, too, since a name may contain the EOS text.
        try:
            return _render_after_turn(tokenizer, marked, eos_ids)
        except TEMPLATE_ERRORS as error:
            raise UserError(f"policy.template: {format_one_line(error)}") from error

    ids = tuple(encode_messages_literally(tokenizer, render, messages))
    return _BridgeTokens(ids[:1], ids[1:]) if ids[0] in eos_ids else _BridgeTokens((), ids)


def _render_after_turn(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], eos_ids: Sequence[int]) -> str:
    """Return the text that the template writes between two turns, beginning with the EOS token of the first."""
    # A short conversation that these messages can follow, with a tool call before responses of tools.
    names = [message.get("name", "tool") for message in messages if message["role"] == "tool"]
    calls = [{"id": "call_0", "type": "function", "function": {"name": name, "arguments": {}}} for name in names[:1]]
    turn = {"role": "assistant", "content": _ASSISTANT_MARKER, **({"tool_calls": calls} if calls else {})}
    preceding = [_PROBE_QUESTION, turn]
    text = _render(tokenizer, [*preceding, *messages])
    turn_start = text.find(_ASSISTANT_MARKER)
    eos_texts = [str(tokenizer.decode([token])) for token in eos_ids]
    if ends := [end for eos in eos_texts if (end := text.find(eos, turn_start)) >= 0]:
        return text[min(ends) :]
    start = _render(tokenizer, preceding, begins_answer=False)
    if not text.startswith(start):
        raise ValueError("the chat template writes no end of a turn, and changes the turn when a message follows")
    return text[len(start) :]


def check_bridge(tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int]) -> str:
    """Return a notice if the chat template changes earlier turns; empty if it does not.

    Raise UserError if it leaves out the messages that follow a turn.
    """
    if not tokenizer.chat_template:
        return ""
    reply = {"role": "user", "content": _OBSERVATION_MARKER}
    for observation in (reply, {"role": "tool", "name": "f", "content": _OBSERVATION_MARKER}):
        bridge = encode_bridge(tokenizer, [observation], eos_ids)
        if _OBSERVATION_MARKER not in str(tokenizer.decode([*bridge.end, *bridge.rest])):
            raise UserError(f"policy.template: the chat template leaves out messages of the role {observation['role']}")
    before = [
        _PROBE_QUESTION,
        {"role": "assistant", "content": f"<think>\n{_OBSERVATION_MARKER}\n</think>\n\n{_ASSISTANT_MARKER}"},
    ]
    start, text = (_render(tokenizer, messages, begins_answer=False) for messages in (before, [*before, reply]))
    if text.startswith(start[: start.find(_ASSISTANT_MARKER) + len(_ASSISTANT_MARKER)]):
        return ""
    return (
        "policy.template: the chat template changes earlier turns when a message follows, such as by removing thoughts:"
        " the policy is trained on the turns as sampled; to serve it in the same way, give a template that keeps them"
    )

"""How messages become a prompt, where it is not as the checkpoint has it: another chat template, or values in it.

Both are written into the tokenizer's template, which is saved with the model: whoever serves it asks as it was trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from pellucid.machine.nearby import looked_for
from pellucid.policy.hermes import offer, preceded, spelled_out
from pellucid.policy.literal import tokenized
from pellucid.types import Message, Prompt, UserError

Value = bool | int | float | str
Tools = list[Any] | None
"""As `apply_chat_template` takes them."""
FAULTS = (TemplateError, TypeError, ValueError)
"""What templates raise for what they do not know."""
RAISED = (*FAULTS, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What templates raise for messages that they cannot render; UserError is none of it."""
QUESTION = {"role": "user", "content": "?"}
MOST_SHOWN = 200
"""How many characters of an error are shown."""
PROBE = "probed"
PROBE_TOOL = {"name": PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}


class Template(NamedTuple):
    file: str = ""
    """A chat template in Jinja; empty is the checkpoint's own."""
    variables: Mapping[str, Value] = {}
    """Of variables that it reads, such as enable_thinking."""

    def apply_to_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """UserError where the file cannot be read or rendered, or a variable is not in it."""
        if not self.file and not self.variables:
            return
        text = read(self.file) if self.file else tokenizer.chat_template
        if not isinstance(text, str):
            raise UserError(
                "policy.template_kwargs: this tokenizer has no chat template of its own: give policy.template"
            )
        for name in self.variables:
            if not re.search(rf"\b{re.escape(name)}\b", text):
                raise UserError(f"policy.template_kwargs: the chat template reads no {name}")
        # A variable that is set where the template begins is what the caller of the template would have given.
        tokenizer.chat_template = (
            "".join(f"{{% set {n} = {json.dumps(v)} %}}" for n, v in self.variables.items()) + text
        )
        check(tokenizer, self.file or "the checkpoint's own")


def question_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Token ids up to where the answer begins. Messages without a chat template are their contents, a line each.

    UserError for a string with tools, which stand in messages.
    """
    if isinstance(prompt.text, str) or not prompt.escape_special_tokens:
        [ids] = text_ids(tokenizer, [question_text(tokenizer, prompt)])
        return ids
    messages, tools = shown(tokenizer, prompt.text, prompt.tools)
    before = () if tokenizer.chat_template else ids_before(tokenizer)
    return (*before, *tokenized(tokenizer, lambda marked: rendered(tokenizer, marked, tools), messages))


class Text(NamedTuple):
    """What a model reads, before it is tokenized."""

    text: str
    has_special_tokens: bool
    """Whether it has all of its special tokens, as a chat template writes them; else the tokenizer adds those that
    stand before a text."""


def question_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Text:
    """Return the text up to where the answer begins. UserError for a string with tools, which stand in messages."""
    if isinstance(prompt.text, str):
        if prompt.tools:
            raise UserError(f"prompt {prompt.id} has tools, and its text is a string: give messages, or no tools")
        return Text(prompt.text, has_special_tokens=False)
    messages, tools = shown(tokenizer, prompt.text, prompt.tools)
    return Text(rendered(tokenizer, messages, tools), has_special_tokens=bool(tokenizer.chat_template))


def text_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> list[tuple[int, ...]]:
    """Return the token ids of texts that a model is to go on with.

    A text that is not whole gets the tokens that the tokenizer puts before a text, such as the beginning of sequence,
    once: not where it is written there already. What the tokenizer puts behind a text, such as the end of sequence, is
    left out: the model would take the text for ended.
    """
    if not texts:
        return []
    encoded = tokenizer([each.text for each in texts], add_special_tokens=False)["input_ids"]
    before = () if all(each.has_special_tokens for each in texts) else ids_before(tokenizer)
    return [
        tuple(ids) if each.has_special_tokens or tuple(ids[: len(before)]) == before else (*before, *ids)
        for each, ids in zip(texts, encoded, strict=True)
    ]


def ids_before(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that the tokenizer puts before a text."""
    probe = "a"
    whole, bare = (tuple(tokenizer(probe, add_special_tokens=special)["input_ids"]) for special in (True, False))
    starts = (i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare)
    return whole[: next(starts, 0)]


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools = None) -> str:
    """The text of messages that `shown` has returned, up to where the answer begins."""
    if not tokenizer.chat_template:
        return "".join(message["content"] + "\n" for message in messages)
    conversation: Any = messages
    return str(tokenizer.apply_chat_template(conversation, tools=tools, add_generation_prompt=True, tokenize=False))


def shown(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[dict[str, Any]], Tools]:
    """Messages, and tools for the chat template, as it can show them: in Hermes' form where it knows of no tools."""
    ours = [dict(message) for message in messages]
    if not tools and not any(message["role"] == "tool" or message.get("tool_calls") for message in ours):
        return ours, None
    if shows(tokenizer, [QUESTION], [{"type": "function", "function": PROBE_TOOL}]):
        return ours, [dict(tool) for tool in tools] or None
    ours = spelled_out(ours)
    by_system = shows(tokenizer, [{"role": "system", "content": PROBE}, QUESTION])
    return preceded(ours, offer(tools), by_system) if tools else ours, None


def shows(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools = None) -> bool:
    """Whether the word PROBE, which is somewhere in them, comes through the chat template."""
    try:
        return PROBE in rendered(tokenizer, messages, tools)
    except FAULTS:
        return False


def read(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"policy.template = {file!r} cannot be read ({getattr(error, 'strerror', None) or error})"
            + (looked_for(Path(file)) if isinstance(error, FileNotFoundError) else "")
        ) from error


def check(tokenizer: PreTrainedTokenizerBase, file: str) -> None:
    """UserError where one question is not rendered."""
    try:
        text = rendered(tokenizer, [QUESTION])
    except FAULTS as error:
        line = getattr(error, "lineno", None)
        raise UserError(
            f"policy.template: {file}{f', line {line}' if line else ''}: {' '.join(str(error).split())}"
        ) from error
    if "?" not in text:
        raise UserError(f"policy.template: {file} leaves the question out")


def raised(error: BaseException) -> str:
    """Return in one line what a chat template has raised."""
    return f"the chat template raises {type(error).__name__}: {' '.join(str(error).split())[:MOST_SHOWN]}"


def ids_fault(ids: Sequence[int], vocabulary: int) -> str:
    """Return why a model with so many embeddings cannot go on with these tokens; empty where it can."""
    if not ids:
        return "it is empty, and this tokenizer puts no token before a text: ask something"
    if (last := max(ids)) >= vocabulary:
        return f"token {last} of the tokenizer is beyond the {vocabulary} tokens that the model has"
    return ""


def prefix_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of the prefix, tokenized on its own as if generated: the question's last token stays as it is."""
    return tuple(tokenizer(prompt.prefix, add_special_tokens=False)["input_ids"]) if prompt.prefix else ()

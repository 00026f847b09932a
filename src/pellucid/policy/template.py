"""How messages become a prompt, where it is not as the checkpoint has it: another chat template, or values in it.

Both are written into the tokenizer's template, which is saved with the model: whoever serves it asks as it was trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from pellucid.types import Prompt, UserError

Value = bool | int | float | str


class Template(NamedTuple):
    file: str = ""
    """A chat template in Jinja; empty is the checkpoint's own."""
    values: Mapping[str, Value] = {}
    """Of variables that it reads, such as enable_thinking."""

    def put_into(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """UserError where the file cannot be read or rendered, or a variable is not in it."""
        if not self.file and not self.values:
            return
        text = read(self.file) if self.file else tokenizer.chat_template
        if not isinstance(text, str):
            raise UserError(
                "policy.template_kwargs: this tokenizer has no chat template of its own: give policy.template"
            )
        for name in self.values:
            if not re.search(rf"\b{re.escape(name)}\b", text):
                raise UserError(f"policy.template_kwargs: the chat template reads no {name}")
        # A variable that is set where the template begins is what the caller of the template would have given.
        tokenizer.chat_template = "".join(f"{{% set {n} = {json.dumps(v)} %}}" for n, v in self.values.items()) + text
        check(tokenizer, self.file or "the checkpoint's own")


def question_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Token ids up to where the answer begins. Messages without a chat template are their contents, a line each."""
    if not isinstance(prompt.text, str) and tokenizer.chat_template:
        messages = [dict(message) for message in prompt.text]
        encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return tuple(encoded["input_ids"])
    text = prompt.text if isinstance(prompt.text, str) else "".join(m["content"] + "\n" for m in prompt.text)
    return tuple(tokenizer(text)["input_ids"])


def read(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"policy.template = {file!r} cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from error


def check(tokenizer: PreTrainedTokenizerBase, file: str) -> None:
    """UserError where one question is not rendered."""
    question: Any = [{"role": "user", "content": "?"}]
    try:
        rendered = str(tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False))
    except (TemplateError, TypeError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise UserError(
            f"policy.template: {file}{f', line {line}' if line else ''}: {' '.join(str(error).split())}"
        ) from error
    if "?" not in rendered:
        raise UserError(f"policy.template: {file} leaves the question out")


def prefix_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of the prefix, tokenized on its own as if generated: the question's last token stays as it is."""
    return tuple(tokenizer(prompt.prefix, add_special_tokens=False)["input_ids"]) if prompt.prefix else ()

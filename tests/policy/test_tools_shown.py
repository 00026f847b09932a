"""Tests of tools in the prompt: rendered by the chat template, or in the Hermes format if it does not support them."""

from __future__ import annotations

import json

import pytest
from trl import chat_template_utils as trl

from conftest import byte_tokenizer
from pellucid.policy.chat_template import encode_question
from pellucid.policy.tool_calls import parse_turn
from pellucid.types import Prompt, UserError

ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds. é", "parameters": {"type": "object", "properties": {}}},
}
LOOK = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
QUESTION = {"role": "user", "content": "1 + 1?"}
CALLS = [
    {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": {"a": 1}}}
    for i, name in enumerate(("add", "look_up"))
]
TURNS = (
    {"role": "assistant", "content": "Well.", "tool_calls": CALLS},
    {"role": "tool", "name": "add", "tool_call_id": "call_0", "content": "2"},
    {"role": "tool", "name": "look_up", "tool_call_id": "call_1", "content": "3"},
)
CHATML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
DROPS_SYSTEM = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")


def text_of(template, *messages, tools=(ADD, LOOK), literal=False):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer.decode(
        encode_question(tokenizer, Prompt("p", messages, tools=tools, escape_special_tokens=literal))
    )


def test_template_that_supports_tools_renders_them():
    """The reference is transformers' own rendering."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = trl.qwen2_5_chat_template
    messages = [QUESTION, *TURNS]
    theirs = tokenizer.apply_chat_template(messages, tools=[ADD, LOOK], add_generation_prompt=True, tokenize=False)
    for literal in (False, True):
        assert text_of(tokenizer.chat_template, *messages, literal=literal) == theirs
    without = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text_of(tokenizer.chat_template, *messages, tools=()) == without


@pytest.mark.parametrize("literal", [False, True])
def test_other_templates_get_tools_in_the_system_message(literal):
    text = text_of(CHATML, QUESTION, *TURNS, literal=literal)
    system, rest = text.split("\n[user]", 1)
    assert system.startswith("[system]You can call tools")
    assert [json.loads(line) for line in system.splitlines() if line.startswith('{"type"')] == [ADD, LOOK]
    assert "Adds. é" in system
    assert '<tool_call>{"name": ' in system
    assert rest == (
        '1 + 1?\n[assistant]Well.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "look_up", "arguments": {"a": 1}}</tool_call>\n'
        "[user]<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>\n[assistant]"
    )


def test_tools_follow_the_system_message_of_the_prompt():
    own = {"role": "system", "content": "Be brief."}
    assert text_of(CHATML, own, QUESTION).startswith("[system]Be brief.\n\nYou can call tools")
    assert text_of(CHATML, own, QUESTION).count("[system]") == 1


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM])
def test_tools_go_into_the_first_message_without_system_messages(template):
    text = text_of(template, QUESTION)
    assert text.startswith("[user]You can call tools")
    assert text.endswith("</tool_response>.\n\n1 + 1?\n[assistant]")


def test_tools_are_plain_lines_without_a_template():
    text = text_of(None, QUESTION, *TURNS)
    assert text.startswith("You can call tools")
    lines = text_of(CHATML, QUESTION, *TURNS).partition("[user]1 + 1?")[2]
    assert text.endswith("1 + 1?" + lines.replace("[assistant]", "").replace("[user]", ""))


def test_rendered_calls_can_be_parsed_back():
    tokenizer = byte_tokenizer()
    spoken = text_of(CHATML, QUESTION, TURNS[0]).split("[assistant]")[1].rstrip("\n")
    assert parse_turn(tokenizer, tokenizer(spoken)["input_ids"], [], [ADD]).message == TURNS[0]


def test_calls_of_removed_tools_are_rendered_without_a_tool_list():
    template = "{% if tools is not none %}{{ tools }}{% endif %}" + CHATML
    assert "[tool]2" in text_of(template, QUESTION, *TURNS, tools=())
    assert "None" not in text_of(template, QUESTION, *TURNS, tools=())
    assert "[]" not in text_of(template, QUESTION, *TURNS, tools=())


def test_prompt_without_tools_is_unchanged():
    assert text_of(CHATML, QUESTION, tools=()) == "[user]1 + 1?\n[assistant]"


def test_string_prompt_with_tools_is_refused():
    with pytest.raises(UserError, match="prompt p has tools, and its text is a string: give messages"):
        encode_question(byte_tokenizer(), Prompt("p", "1 + 1?", tools=(ADD,)))

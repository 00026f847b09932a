"""Tests of parsing tool calls: every format, unreadable calls, prose, and agreement with TRL."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AddedToken
from trl import chat_template_utils as trl

from conftest import byte_tokenizer
from pellucid.policy import load
from pellucid.policy.tool_calls import parse_turn
from pellucid.types import PolicyTurn

TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("add", "look_up", "web.search")
)
ADD, LOOK = '{"name": "add", "arguments": {"a": 1, "b": 2}}', '{"name": "look_up", "arguments": {"what": "é 猫 🐈"}}'
SUM, CAT = ("add", {"a": 1, "b": 2}), ("look_up", {"what": "é 猫 🐈"})
DEEP = '{"name": "add", "arguments": {"a": {"b": [{"c": "}"}], "text": "<tool_call>{</tool_call>"}}}'
READ = {
    f"<tool_call>{ADD}</tool_call>": ("", [SUM]),
    f"<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{LOOK}\n</tool_call>": ("", [SUM, CAT]),
    f"Let me see.\n<tool_call>{LOOK}</tool_call> Done.": ("Let me see.\nDone.", [CAT]),
    f"<tool_call>{DEEP}</tool_call>": (
        "",
        [("add", {"a": {"b": [{"c": "}"}], "text": "<tool_call>{</tool_call>"}})],
    ),
    f"<tool_call>{ADD}": ("", [SUM]),
    f"<tool_call>{ADD}\nI wait.": ("I wait.", [SUM]),
    '{"name": "add", "arguments": {"text": "<tool_call>x</tool_call>"}}': (
        "",
        [("add", {"text": "<tool_call>x</tool_call>"})],
    ),
    f"<tool_call>[{ADD}, {LOOK}]</tool_call>": ("", [SUM, CAT]),
    '<tool_call>{"name": "add"}</tool_call>': ("", [("add", {})]),
    '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>': ("", [("add", {"a": 1})]),
    f'<tool_call>{{"type": "function", "function": {ADD}}}</tool_call>': ("", [SUM]),
    f"<think>I call <tool_call>{LOOK}</tool_call></think><tool_call>{ADD}</tool_call>": (
        f"<think>I call <tool_call>{LOOK}</tool_call></think>",
        [SUM],
    ),
    ADD: ("", [SUM]),
    f" {ADD}\n": ("", [SUM]),
    '{"name": "add", "parameters": {"a": 1}}': ("", [("add", {"a": 1})]),
    '{"name": "unknown", "parameters": {}}': ("", [("unknown", {})]),
    f"```json\n{ADD}\n```": ("", [SUM]),
    f"[{ADD}, {LOOK}]": ("", [SUM, CAT]),
    f"{ADD}; {LOOK}": ("", [SUM, CAT]),
    f"<|python_tag|>{ADD}": ("", [SUM]),
    '<|python_tag|>{"type": "function", "name": "add", "parameters": {}}; {"name": "look_up"}': (
        "",
        [("add", {}), ("look_up", {})],
    ),
    '[add(a=1, b="x"), web.search(q=[true, None], deep={"k": (-1.5, null)})]': (
        "",
        [("add", {"a": 1, "b": "x"}), ("web.search", {"q": [True, None], "deep": {"k": [-1.5, None]}})],
    ),
    "[unknown(a='\\d')]": ("", [("unknown", {"a": "\\d"})]),
    f"[TOOL_CALLS][{ADD}, {LOOK}]": ("", [SUM, CAT]),
    f"First. [TOOL_CALLS] [{ADD}]": ("First.", [SUM]),
}
PROSE = [
    "",
    "  The set {1, 2} holds [1].\n",
    '{"name": "Ann"}',
    '{"name": "Ann", "parameters": 3}',
    '{"name": "add", "arguments": {}, "because": "it is data"}',
    f"It would be {ADD}.",
    f"{ADD} is what I would call.",
    '{"answer": 3}',
    "[1, 2]",
    "[]",
    "[sin(x)]",
    "[f(**x)]",
    "[x for x in add(1)]",
    '{"name": "bob", "arguments": {',
    "{not JSON}",
    f"<think>I could call <tool_call>{ADD}</tool_call>",
]
UNREADABLE = {
    "<tool_call>{bad}</tool_call>": ("", ["not JSON: Expecting property name"]),
    "<tool_call>add</tool_call> So.": ("So.", ["not JSON: add"]),
    "<tool_call>": ("", ["not JSON: nothing"]),
    '<tool_call>{"name": "add", "arguments": {"a": 1': ("", ["not JSON: Expecting ',' delimiter"]),
    f"<tool_call>{ADD}}}</tool_call>": ("", ["not JSON: followed by }"]),
    '<tool_call>{"arguments": {}}</tool_call>': ("", ["no name"]),
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>': ("", ["no name"]),
    '<tool_call>{"name": "", "arguments": {}}</tool_call>': ("", ["no name"]),
    "<tool_call>[3]</tool_call>": ("", ["not an object: 3"]),
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>': ("", ["add: arguments are not an object: [1]"]),
    '<tool_call>{"name": "add", "arguments": "a=1"}</tool_call>': (
        "",
        ["add: arguments are not JSON: Expecting value"],
    ),
    '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>': (
        "",
        ["add: arguments are not JSON: Out of range"],
    ),
    '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>': ("", ["add: arguments are not JSON"]),
    '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>': (
        "",
        ["add: arguments are not JSON: 'utf-8'"],
    ),
    '{"name": "add", "parameters": {"a": ': ("", ["not JSON: Expecting value"]),
    "[add(1)]": ("", ["not a call: add(1) has arguments without names"]),
    "[add(a=1, b=)]": ("", ["not a call: "]),
    "[add(a=b)]": ("", ["not a call: b is not a literal"]),
    "<|python_tag|>print(1)": ("", ["not JSON: print(1)"]),
    "<tool_call>" + "[" * 100_000: ("", [("not JSON: maximum recursion depth", "not JSON: Stack overflow")]),
}


def ids_of(tokenizer, text):
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


@pytest.fixture(scope="module")
def marks():
    """Return tokenizers that spell the marks, or have them as special or as plain added tokens."""
    words = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"]
    made = {"spelled": byte_tokenizer(), "special": byte_tokenizer(), "added": byte_tokenizer()}
    made["special"].add_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    made["added"].add_tokens([AddedToken(word, normalized=False) for word in words])
    return made


def called(said):
    calls = said.message.get("tool_calls", [])
    assert [call["id"] for call in calls] == [f"call_{i}" for i in range(len(calls))]
    assert all(call["type"] == "function" for call in calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("kind", ["spelled", "special", "added"])
@pytest.mark.parametrize("text", READ)
def test_calls_are_read_in_every_form(text, kind, marks):
    said = parse_turn(marks[kind], ids_of(marks[kind], text), [], TOOLS)
    content, calls = READ[text]
    assert said.message["role"] == "assistant"
    assert (said.message["content"], called(said), said.unreadable_calls) == (content, calls, ())


@pytest.mark.parametrize("text", PROSE)
def test_prose_becomes_content_unchanged(text, marks):
    said = parse_turn(marks["spelled"], ids_of(marks["spelled"], text), [], TOOLS)
    assert said == PolicyTurn({"role": "assistant", "content": text})


@pytest.mark.parametrize("text", UNREADABLE)
def test_unreadable_calls_are_reported_in_one_line_and_never_raise(text, marks):
    for tokenizer in marks.values():
        said = parse_turn(tokenizer, ids_of(tokenizer, text), [], TOOLS)
        content, reasons = UNREADABLE[text]
        assert (said.message, len(said.unreadable_calls)) == ({"role": "assistant", "content": content}, len(reasons))
        for fault, reason in zip(said.unreadable_calls, reasons, strict=True):
            assert fault.startswith(reason)
            assert "\n" not in fault


N = 200_000
LONG = {
    "newlines in a fence": "```" + "\n" * N + "x",
    "newlines between fences": "```json" + "\n" * N + "```",
    "spaces behind a call": "[add(" + ")" + " " * N + "x]",
    "many ends of a call": "[add(" + ") " * (N // 2) + "]x",
    "marks": "<tool_call>" * (N // 11),
    "calls": f"<tool_call>{ADD}</tool_call>" * (N // 100),
    "begun calls": '<tool_call>{"name"' * (N // 18),
    "marks and newlines": "[TOOL_CALLS] [] \n" * (N // 17),
    "names": '{"name" ' * (N // 8),
}


@pytest.mark.parametrize("name", LONG)
def test_long_turns_are_parsed_in_linear_time(name, marks):
    """Quadratic time for 200,000 characters would exceed the time limit of a test."""
    tokenizer = marks["spelled"]
    said = parse_turn(tokenizer, ids_of(tokenizer, LONG[name]), [], TOOLS)
    assert len(said.unreadable_calls) <= 100
    assert len(called(said)) == (N // 100 if name == "calls" else 0)


@pytest.mark.slow
def test_deeply_nested_calls_are_not_parsed_and_never_raise(marks):
    """The depths lie around Python's recursion limit."""
    for depth in (100, 300, *range(900, 1010, 3)):
        for text in (
            '{"function": ' * depth + ADD + "}" * depth,
            '<tool_call>{"name": "add", "arguments": ' + "[" * depth + "]" * depth + "}</tool_call>",
            "<tool_call>" + '{"a": ' * depth + "1" + "}" * depth + "</tool_call>",
        ):
            assert called(parse_turn(marks["spelled"], ids_of(marks["spelled"], text), [], TOOLS)) == []


def test_valid_calls_are_kept_beside_unreadable_ones(marks):
    text = f"<tool_call>{{bad <tool_call>{ADD}</tool_call><tool_call>[]x</tool_call><tool_call>{LOOK}</tool_call>"
    said = parse_turn(marks["spelled"], ids_of(marks["spelled"], text), [], TOOLS)
    assert called(said) == [SUM, CAT]
    assert len(said.unreadable_calls) == 2


def test_text_is_not_parsed_without_tools(marks):
    for text in READ:
        said = parse_turn(marks["added"], ids_of(marks["added"], text), [], ())
        assert said == PolicyTurn({"role": "assistant", "content": text})


def test_calls_in_a_thought_opened_by_the_prompt_are_ignored(marks):
    tokenizer, thought = marks["added"], f"I could <tool_call>{LOOK}</tool_call>"
    context = tokenizer("Think!\n<think>\n")["input_ids"]
    said = parse_turn(tokenizer, ids_of(tokenizer, f"{thought}</think>\n{ADD}"), context, TOOLS)
    assert (said.message["content"], called(said)) == (f"{thought}</think>", [SUM])
    assert parse_turn(tokenizer, ids_of(tokenizer, thought), context, TOOLS).message["content"] == thought


ASKED = [{"role": "user", "content": "?"}]
QWEN = [
    f"<tool_call>\n{ADD}\n</tool_call>",
    f"<think>\nHm. {ADD}\n</think>\n\nI ask.\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{LOOK}\n</tool_call>",
    "Just text with {braces}.",
    "<think>\nNever done.",
]
LLAMA = ['{"name": "add", "parameters": {"a": [{"b": 1}]}}', "It is 3."]


@pytest.fixture(scope="module")
def smollm2():
    return load.load_pretrained("smollm2-135m", torch.float32)[1]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(("template", "texts"), [("qwen3", QWEN), ("llama3_1", LLAMA)])
def test_tokenizer_with_a_response_schema_is_parsed_as_in_trl(template, texts, smollm2):
    """The reference is TRL's `add_response_schema` and `parse_response`."""
    smollm2.chat_template = getattr(trl, f"{template}_chat_template")
    end = "<|im_end|>" if template == "qwen3" else "<|eot_id|>"
    tokenizer = trl.add_response_schema(smollm2)
    context = tokenizer.apply_chat_template(ASKED, tools=list(TOOLS), add_generation_prompt=True)["input_ids"]
    for text in texts:
        ids = tokenizer(text + end)["input_ids"]
        said = parse_turn(tokenizer, ids, context, TOOLS)
        theirs = trl.parse_response(tokenizer, list(ids), list(context), list(TOOLS))
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in theirs.pop("tool_calls", [])]
        ours = {key: value for key, value in said.message.items() if key != "tool_calls"}
        assert (ours, called(said), said.unreadable_calls) == (theirs, calls, ())
    assert any(
        "tool_calls" in parse_turn(tokenizer, tokenizer(text + end)["input_ids"], context, TOOLS).message
        for text in texts
    )


@pytest.mark.model
def test_calls_that_transformers_cannot_parse_are_read_or_reported(smollm2):
    smollm2.chat_template = trl.qwen3_chat_template
    tokenizer = trl.add_response_schema(smollm2)
    bad = tokenizer(f"<tool_call>{{bad}}</tool_call><tool_call>{ADD}</tool_call><|im_end|>")["input_ids"]
    said = parse_turn(tokenizer, bad, [], TOOLS)
    assert called(said) == [SUM]
    assert said.unreadable_calls[0].startswith("not JSON")
    nameless = tokenizer('<tool_call>{"arguments": {}}</tool_call><|im_end|>')["input_ids"]
    assert parse_turn(tokenizer, nameless, [], TOOLS).unreadable_calls == ("no name",)


def test_response_template_sees_the_end_of_the_prompt():
    tokenizer = byte_tokenizer()
    tokenizer.response_template = trl.qwen3_template
    context = tokenizer("<|im_start|>assistant\n<think>\n")["input_ids"]
    said = parse_turn(tokenizer, ids_of(tokenizer, "Hm.\n</think>\n\nYes."), context, TOOLS)
    assert said.message == {"role": "assistant", "reasoning_content": "Hm.", "content": "Yes."}


@pytest.mark.parametrize("cut", [0, 1, 5])
def test_stop_string_is_cut_before_the_response_template_is_applied(cut):
    tokenizer = byte_tokenizer()
    tokenizer.response_template = trl.qwen3_template
    ids = ids_of(tokenizer, f"See.<tool_call>{ADD}</tool_call>" + "STOP!"[:cut])[:-1]
    assert called(parse_turn(tokenizer, ids, [], TOOLS, cut_characters=cut)) == [SUM]
    assert parse_turn(tokenizer, ids, [], TOOLS, cut_characters=cut).message["content"] == "See."


def test_end_token_is_not_content_if_the_response_template_omits_it():
    tokenizer = byte_tokenizer()
    fields = {"content": {"content": "text"}}
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "start_anchor": "a", "fields": fields}
    assert parse_turn(tokenizer, ids_of(tokenizer, "Yes."), [], TOOLS).message["content"] == "Yes."
    assert parse_turn(tokenizer, ids_of(tokenizer, "Yes.")[:-1], [], TOOLS).message["content"] == "Yes."


def test_message_survives_a_json_round_trip():
    tokenizer = byte_tokenizer()
    message = parse_turn(tokenizer, ids_of(tokenizer, "[add(a=(1, 2), b={3: 4})]"), [], TOOLS).message
    assert json.loads(json.dumps(message)) == message

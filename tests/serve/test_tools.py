"""Test tool calls over HTTP with the official client and a model whose answers are given."""

from __future__ import annotations

import json
from contextlib import contextmanager

import openai
import pytest

from conftest import byte_tokenizer
from pellucid.policy.chat_template import encode_question
from pellucid.serve.schemas import ChatRequest
from serving import chat, post, running, saying_tokens

TEMPLATE = (
    "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.name %}{{ m.name }}={% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}:{{ c.function.arguments.a }}{% endfor %}{% endfor %}[!]"
)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "look")]
ADD, LOOK = '{"name": "add", "arguments": {"a": 1, "b": ["é"]}}', '{"name": "look", "arguments": {}}'
BOTH = f"I see.\n<tool_call>{ADD}</tool_call><tool_call>{LOOK}</tool_call>"
EXPECTED = [("add", {"a": 1, "b": ["é"]}), ("look", {})]


def speaker(body, text):
    """Return a policy that answers this request with `text`."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    asked = encode_question(tokenizer, ChatRequest(**body).prompt)
    return saying_tokens(tokenizer, asked, [*tokenizer(text)["input_ids"], tokenizer.eos_token_id])


@contextmanager
def saying(text, **settings):
    """Serve a model that answers a request with `text`. Yield a client and that request, which has `settings`."""
    body = chat("1 + 1?", temperature=0, max_tokens=200, model="tiny", **settings)
    with (
        running(policy=speaker(body, text)) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, body


def calls_of(message):
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    assert all(call.type == "function" for call in message.tool_calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


@pytest.mark.slow
def test_calls_have_the_format_of_openai():
    with saying(BOTH, tools=TOOLS, tool_choice="auto") as (client, body):
        [choice] = client.chat.completions.create(**body).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I see.")
        assert calls_of(choice.message) == EXPECTED
        [other] = client.chat.completions.create(**body).choices
        assert not {c.id for c in choice.message.tool_calls} & {c.id for c in other.message.tool_calls}


@pytest.mark.slow
def test_streamed_calls_add_up_to_the_same():
    """The official client joins the chunks."""
    with saying(BOTH, tools=TOOLS, n=2) as (client, body):
        with client.chat.completions.stream(**body) as stream:
            choices = stream.get_final_completion().choices
        for choice in choices:
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I see.")
            assert calls_of(choice.message) == EXPECTED
        chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        whole = client.chat.completions.create(**body)
        assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("text", ["Two, {really}.", " <tool_call>{bad}</tool_call>"])
def test_an_answer_without_calls_is_text(text):
    with saying(text, tools=TOOLS) as (client, body):
        [choice] = client.chat.completions.create(**body).choices
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", text, None)
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == text
        assert chunks[-1].finish_reason == "stop"


@pytest.mark.slow
def test_lone_call_has_no_content_and_reports_length_at_the_limit():
    with saying(ADD, tools=TOOLS) as (client, body):
        [choice] = client.chat.completions.create(**body).choices
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        cut = client.chat.completions.create(**body | {"max_tokens": len(ADD.encode())})
        assert (calls_of(cut.choices[0].message), cut.choices[0].finish_reason) == (EXPECTED[:1], "length")


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["STOP", "OP!", "}</tool_call>STO", "oo"])
def test_stop_string_cuts_the_text_after_a_call_or_the_call_itself(stop):
    """The expected calls are those left in the text after it is cut by hand."""
    said = f"I see.<tool_call>{LOOK}</tool_call>STOP!"
    cut = said[: said.index(stop)]
    called = cut.endswith(("</tool_call>", "ST"))
    content = {"STOP": "I see.", "OP!": "I see.\nST"}.get(stop, cut)
    with saying(said, tools=TOOLS, stop=[stop]) as (client, body):
        [whole] = client.chat.completions.create(**body).choices
        with client.chat.completions.stream(**body) as stream:
            [streamed] = stream.get_final_completion().choices
    for choice in (whole, streamed):
        assert choice.message.content == content
        assert choice.finish_reason == ("tool_calls" if called else "stop")
        assert [call.function.name for call in choice.message.tool_calls or ()] == ["look"] * called


@pytest.mark.parametrize(
    "arguments", ['"arguments": ""', '"arguments": " "', '"arguments": null', '"parameters": null', ""]
)
@pytest.mark.parametrize("form", ["<tool_call>{}</tool_call>", "{}"])
def test_call_without_arguments_has_an_empty_object(arguments, form):
    said = form.replace("{}", ", ".join(filter(None, ['{"name": "look"', arguments])) + "}")
    with saying(said, tools=TOOLS) as (client, body):
        [choice] = client.chat.completions.create(**body).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert calls_of(choice.message) == [("look", {})]


@pytest.mark.slow
def test_tool_choice_none_hides_tools_and_parses_no_calls():
    with saying(BOTH, tools=TOOLS, tool_choice="none") as (client, body):
        [choice] = client.chat.completions.create(**body).choices
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", BOTH, None)
        told = client.chat.completions.create(**body, extra_body={"return_token_ids": True})
        assert bytes_of(told.prompt_token_ids) == "[user]1 + 1?[!]"


def bytes_of(ids):
    return byte_tokenizer().decode(ids)


@pytest.mark.slow
def test_calls_and_their_answers_can_be_sent_back_as_messages():
    with saying(BOTH, tools=TOOLS) as (client, body):
        message = client.chat.completions.create(**body).choices[0].message
        answers = [
            {"role": "tool", "tool_call_id": call.id, "content": f"<{i}>"} for i, call in enumerate(message.tool_calls)
        ]
        again = {**body, "messages": [*body["messages"], message, *answers]}
        told = client.chat.completions.create(**again, extra_body={"return_token_ids": True})
        assert bytes_of(told.prompt_token_ids) == (
            "(add)(look)[user]1 + 1?[assistant]I see.add:1look:[tool]add=<0>[tool]look=<1>[!]"
        )


@pytest.mark.parametrize("arguments", [{}, {"arguments": ""}, {"arguments": None}, {"arguments": "{}"}])
def test_a_call_without_arguments_can_be_sent_back(service, arguments):
    asked = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "a"} | arguments}],
    }
    assert ChatRequest(**chat() | {"messages": [asked]}).prompt.text[0]["tool_calls"][0]["function"]["arguments"] == {}
    messages = [{"role": "user", "content": "1"}, asked, {"role": "tool", "tool_call_id": "c", "content": "2"}]
    assert post(f"{service[1]}/v1/chat/completions", {"messages": messages})[0] == 200


def call(**changes):
    return {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"} | changes}


REFUSED = {
    "tool_choice: Input should be 'auto' or 'none'": {"tools": TOOLS, "tool_choice": "required"},
    "tool_choice: Input should be 'auto'": {"tool_choice": {"type": "function", "function": {"name": "add"}}},
    "tools.0.function.name": {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    "tools.0.type": {"tools": [{"type": "code", "function": {"name": "a"}}]},
    "surrogates not allowed": {
        "tools": [{"type": "function", "function": {"name": "a", "parameters": {"t": "\ud800"}}}]
    },
    "messages.0: Value error, content is missing": {"messages": [{"role": "user"}]},
    "arguments: Value error, Expecting value": {
        "messages": [{"role": "assistant", "tool_calls": [call(arguments="a=1")]}]
    },
    "arguments: Input should be a valid dictionary": {
        "messages": [{"role": "assistant", "tool_calls": [call(arguments="[1]")]}]
    },
    "arguments: Value error, nested too deeply": {
        "messages": [{"role": "assistant", "tool_calls": [call(arguments="[" * 100_000)]}]
    },
    "Value error, nested too deeply": {
        "messages": [
            {"role": "assistant", "tool_calls": [call(arguments='{"a":' * 55_000 + "1" + "}" * 55_000)]},
        ]
    },
    "only a message of the role assistant has tool_calls": {
        "messages": [{"role": "user", "content": "?", "tool_calls": [call()]}]
    },
    "only a message of the role tool has tool_call_id": {
        "messages": [{"role": "user", "content": "?", "tool_call_id": "c"}]
    },
    "top_logprobs needs logprobs = true": {"top_logprobs": 2},
    "top_logprobs: Input should be less than or equal to 20": {"logprobs": True, "top_logprobs": 21},
    "parallel_tool_calls: not supported here: leave it out, or send true": {"parallel_tool_calls": False},
}


@pytest.fixture(scope="module")
def service():
    with running() as (served, url):
        yield served, url


@pytest.mark.parametrize("complaint", REFUSED)
def test_unsupported_requests_are_refused_in_one_line(complaint, service):
    status, answer = post(f"{service[1]}/v1/chat/completions", chat() | REFUSED[complaint])
    assert status == 400
    assert complaint in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]

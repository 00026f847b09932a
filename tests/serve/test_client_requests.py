"""Test requests as OpenAI's client, LangChain and LiteLLM send them, and fields that are refused."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import cast

import openai
import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel

from conftest import CountDigits, byte_tokenizer, tiny_llama_of
from pellucid.policy.policy import Policy
from pellucid.serve.agent_endpoint import AgentEndpoint, make_agent_app
from pellucid.serve.api import stream_completion
from pellucid.serve.engine import ChoiceFormatter
from pellucid.serve.middleware import RequestError, build_error_body
from pellucid.serve.vllm_server import EngineHost
from serving import chat, post, running, saying_tokens


class Add(BaseModel):
    a: int


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "2+3="}
PLAIN = {"temperature": 0, "max_tokens": 5}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}, "strict": None}}]
CALLS = [
    {
        "id": "call_1",
        "index": 0,
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}},
    }
]
SENT_BACK = {
    "role": "assistant",
    "content": "5",
    "refusal": None,
    "audio": None,
    "function_call": None,
    "tool_calls": None,
    "annotations": [],
    "parsed": None,
}


@pytest.fixture(scope="module")
def service():
    with running(task=CountDigits()) as (served, url):
        yield served, url


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


# Fields that change nothing, added to a request whose answer is known.
NOTHING = {
    "nulls": dict.fromkeys([
        "n", "stop", "seed", "logprobs", "top_logprobs", "user", "tools", "tool_choice", "stream", "stream_options",
        "response_format", "logit_bias", "frequency_penalty", "presence_penalty", "parallel_tool_calls", "store",
        "metadata", "modalities", "audio", "prediction", "reasoning_effort", "service_tier", "web_search_options",
        "function_call", "functions", "max_completion_tokens", "top_p", "extra_of_a_later_version",
    ]),
    "defaults": {
        "n": 1, "top_p": 1, "stop": [], "stream": False, "logprobs": False, "frequency_penalty": 0,
        "presence_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}, "store": False,
        "parallel_tool_calls": True, "modalities": ["text"], "tools": [], "service_tier": "auto", "verbosity": "medium",
    },
    "for the provider": {
        "metadata": {"trace": "1"}, "safety_identifier": "u", "prompt_cache_key": "k", "service_tier": "flex",
        "prompt_cache_retention": "24h", "user": "u", "stream_options": {"include_obfuscation": False},
    },
    "vllm": {
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "min_tokens": 0,
        "ignore_eos": False, "stop_token_ids": [], "skip_special_tokens": True, "add_generation_prompt": True,
        "chat_template_kwargs": {}, "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
    },
    "parts": {"messages": [USER | {"content": parts("2+", "3=")}]},
    "cached parts": {"messages": [USER | {"content": [*parts("2+3="), ][:1]}]},
    "a name": {"messages": [USER | {"name": "Ann"}]},
}  # fmt: skip
NOTHING["cached parts"]["messages"][0]["content"][0]["cache_control"] = {"type": "ephemeral"}


@pytest.mark.parametrize("case", NOTHING)
def test_chat_ignores_fields_that_change_nothing(service, case):
    url = service[1] + CHAT
    status, told = post(url, {"messages": [USER], "model": "tiny", **PLAIN, **NOTHING[case]})
    assert status == 200, told
    assert told["choices"] == post(url, {"messages": [USER], **PLAIN})[1]["choices"]


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(["suffix", "best_of", "echo", "logprobs", "stop", "logit_bias", "user", "stream_options", "n"]),
        {"best_of": 1, "echo": False, "suffix": "", "frequency_penalty": 0, "logit_bias": {}, "logprobs": False},
        {"prompt": ["2+3="]},
    ],
)
def test_text_completions_ignore_fields_that_change_nothing(service, fields):
    url = service[1] + TEXT
    status, told = post(url, {"prompt": "2+3=", "model": "tiny", **PLAIN, **fields})
    assert status == 200, told
    assert told["choices"] == post(url, {"prompt": "2+3=", **PLAIN})[1]["choices"]


def test_every_form_of_a_message_reaches_the_template_alike():
    """The chat template of this test prints each message in full, as JSON."""
    tokenizer = byte_tokenizer()
    policy = Policy(tiny_llama_of(tokenizer), tokenizer)
    tokenizer.chat_template = (
        "{{ tools }}{% for m in messages %}{{ m | tojson if m.tool_calls else m | tojson }};{% endfor %}"
    )
    answer = {"role": "tool", "content": "3", "tool_call_id": "call_1"}
    sent = [
        {"role": "developer", "content": parts("Be ", "brief.")},
        USER | {"content": parts("2+3="), "name": None},
        SENT_BACK,
        SENT_BACK | {"content": None, "tool_calls": CALLS, "provider_specific_fields": {"refusal": None}, "images": []},
        answer | {"content": parts("3")},
    ]
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    plain = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "5"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        answer | {"name": "add"},
    ]
    with running(policy=policy) as (_, url):
        body = {"max_tokens": 1, "return_token_ids": True}
        status, told = post(url + CHAT, body | {"messages": sent})
    assert status == 200, told
    shown = tokenizer.decode(told["prompt_token_ids"])
    assert [json.loads(message) for message in shown.removeprefix("None").split(";")[:-1]] == plain


@pytest.mark.slow
@pytest.mark.parametrize("tools", [[], [openai.pydantic_function_tool(Add, name="add")]])
def test_messages_of_the_official_client_can_be_sent_back(tools):
    """Every form in which the official client returns an answer can be sent again."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ tools[0].function.name if tools }}{{ messages[-1].content }}"
    answer = [*tokenizer('{"name": "add", "arguments": {"a": 1}}')["input_ids"], tokenizer.eos_token_id]
    asked = {"model": "tiny", "messages": [USER], "temperature": 0, "max_tokens": 99} | (
        {"tools": tools} if tools else {}
    )
    prompt = tokenizer("add" * len(tools) + USER["content"])["input_ids"]
    with (
        running(policy=saying_tokens(tokenizer, prompt, answer)) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = client.chat.completions.create(**asked, response_format={"type": "text"})
        with client.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion()
        for message in (whole.choices[0].message, final.choices[0].message):
            assert bool(message.tool_calls) == bool(tools)
            for form in (message, message.model_dump(), message.to_dict()):
                again = client.chat.completions.create(**asked | {"messages": [USER, form, USER]})
                assert again.usage.prompt_tokens == whole.usage.prompt_tokens


# ---------------------------------------------------------------- refused fields


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "response_format", {"type": "json_object"}),
        (CHAT, "frequency_penalty", 0.5),
        (CHAT, "presence_penalty", -1),
        (CHAT, "logit_bias", {"3": 5}),
        (CHAT, "parallel_tool_calls", False),
        (CHAT, "store", True),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "reasoning_effort", "high"),
        (CHAT, "functions", TOOLS),
        (CHAT, "verbosity", "low"),
        (CHAT, "repetition_penalty", 1.1),
        (CHAT, "chat_template_kwargs", {"enable_thinking": False}),
        (CHAT, "stop_token_ids", [1]),
        (CHAT, "temprature", 0.5),
        (TEXT, "echo", True),
        (TEXT, "suffix", "."),
        (TEXT, "best_of", 4),
        (TEXT, "tool_choice", "required"),
    ],
)
def test_field_that_would_change_the_answer_is_refused_by_name(service, path, field, value):
    body = {"messages": [USER]} if path == CHAT else {"prompt": "2+3="}
    status, told = post(service[1] + path, body | {field: value})
    assert status == 400
    assert field in told["error"]["message"]
    assert "\n" not in told["error"]["message"]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (SENT_BACK | {"audio": {"id": "a"}}, "messages.0.audio"),
        (SENT_BACK | {"refusal": "no"}, "messages.0.refusal"),
        (SENT_BACK | {"function_call": {"name": "a", "arguments": ""}}, "messages.0.function_call"),
        (SENT_BACK | {"reasoning_content": "hm"}, "messages.0.reasoning_content"),
        (
            USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages.0.content: Value error, part 0 is",
        ),
        (USER | {"content": [*parts("a"), {"type": "text", "text": None}]}, "part 1"),
        (USER | {"content": parts("a\ud800")}, "surrogates not allowed"),
        (USER | {"content": None}, "content is missing"),
    ],
)
def test_unsupported_message_content_is_refused(service, message, says):
    status, told = post(service[1] + CHAT, {"messages": [message]})
    assert status == 400
    assert says in told["error"]["message"]
    assert "\n" not in told["error"]["message"]


# ---------------------------------------------------------------- token limits and error messages


@pytest.mark.slow
def test_group_has_the_token_limit_of_the_run_unless_requested(service):
    served, _ = service
    with running(policy=served.policy, task=CountDigits(), max_tokens=24, group_tokens=7) as (own, url):
        own.policy.eos_ids = (-1,)
        lengths = lambda **body: {row["tokens"] for row in post(f"{url}/group", body)[1]["completions"]}  # noqa: E731
        assert lengths() == {7}
        assert lengths(max_tokens=3) == {3}
        assert len(post(f"{url}{CHAT}", chat(return_token_ids=True))[1]["choices"][0]["token_ids"]) == 24
    with running(policy=served.policy, group_tokens=1000) as (_, url):  # limited by the context that the prompt leaves
        asked = post(f"{url}/group", {"question": "2+3="})[1]["completions"]
        assert {row["tokens"] for row in asked} == {served.policy.context_length - 4}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (5, "Input should be a valid string"),
        ([{"type": "text", "text": 5}], "Value error, part 0 is not of the form"),
    ],
)
def test_agent_error_message_names_the_field_but_no_internal_type(content, complaint):
    endpoint = SimpleNamespace(check_rollout=lambda _: None)
    client = TestClient(make_agent_app(cast(AgentEndpoint, endpoint)))
    body = {"messages": [{"role": "user", "content": content}]}
    message = client.post("/rollout/a/v1/chat/completions", json=body).json()["error"]["message"]
    assert message.startswith(f"messages.0.content: {complaint}")


def test_invalid_model_error_is_one_line_without_internal_types():
    with pytest.raises(RequestError) as refused:
        EngineHost(lambda _: None).load_model(b'{"config": {}, "dtype": "int4", "ends": []}')
    assert str(refused.value) == "dtype: Input should be 'float32', 'bfloat16' or 'float16'"


def test_stream_error_has_the_format_of_other_errors():
    async def collect():
        return [event async for event in stream_completion(cast(ChoiceFormatter, Choices()), {}, with_usage=False)]

    class Choices:
        """Fake choices whose stream fails at once."""

        is_chat, stream = False, failing()
        build_head = dict

    event, end = asyncio.run(collect())
    assert json.loads(event.removeprefix("data: ")) == build_error_body(RequestError(503, "full", "overloaded"))
    assert end == "data: [DONE]\n\n"


def failing():
    class Stream:
        request, prompt_ids = SimpleNamespace(n=1), ()

        async def __aiter__(self):
            raise RequestError(503, "full", "overloaded")
            yield

    return Stream()

"""The bodies of requests: the part of OpenAI's API that is supported. Other fields are refused by name.

Clients send fields that are not supported. A field that is null, or has a value that changes nothing, is dropped before
a body is checked. Every other field has bounds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from pellucid.types import Prompt

_MIN_POSITIVE_VALUE = 1e-6
"""The smallest temperature above 0, and the smallest top_p. 1 / temperature and top_p times a sum must be numbers of
float32. Smaller values would change nothing anyway: different logits differ by more than that, and in a vocabulary of
less than a million, the likeliest token is more probable."""
_MAX_INTEGER = 2**31 - 1
PROMPT_KINDS = ("a text", "token ids")
"""The kinds of prompts. Pydantic adds these names to the locations of its errors, among field names."""
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "annotations": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "ignore_eos": (False,),
    "images": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"], []),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "priority": (0,),
    "refusal": ("",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "thinking_blocks": ([],),
    "tool_choice": ("auto",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
"""Fields of OpenAI and of vLLM that are not supported, and the values of each that leave an answer as it is."""
_IGNORED_FIELDS = {
    "cache_control",
    "continuous_usage_stats",
    "include_obfuscation",
    "index",
    "metadata",
    "parsed_arguments",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "provider_specific_fields",
    "safety_identifier",
    "service_tier",
}
"""Fields that concern billing, caches or the client, and never an answer."""


def _check_unicode(text: str) -> str:
    """Return the text. Raises ValueError for a lone surrogate, which no file or answer can hold."""
    text.encode()
    return text


def _check_temperature(temperature: float) -> float:
    if 0.0 < temperature < _MIN_POSITIVE_VALUE:
        raise ValueError(f"must be 0, for the likeliest token, or at least {_MIN_POSITIVE_VALUE:g}")
    return temperature


_TOO_DEEP = "nested too deeply"


def _check_object(value: dict[str, Any]) -> dict[str, Any]:
    try:
        _check_unicode(json.dumps(value, ensure_ascii=False))
    except RecursionError as error:  # Python 3.14 reads deeper objects than it writes
        raise ValueError(_TOO_DEEP) from error
    return value


def _parse_arguments(value: Any) -> Any:
    """Parse arguments, which OpenAI sends as JSON text. Empty text means none. Raises ValueError for other text."""
    try:
        return json.loads(value.strip() or "{}") if isinstance(value, str) else value
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


def _join_text_parts(content: Any) -> Any:
    """Return the text of a message that was sent in parts. Raises ValueError if a part is not text."""
    if not isinstance(content, list):
        return content
    for i, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError(f'part {i} is not of the form {{"type": "text", "text": "..."}}: send text alone')
    return "".join(part["text"] for part in content)


def _unwrap_single_prompt(prompts: Any) -> Any:
    """Return the prompt of a list of one, as LangChain and evaluation tools send it."""
    single = isinstance(prompts, list) and len(prompts) == 1 and isinstance(prompts[0], str | list)
    return prompts[0] if single else prompts


# Pydantic refuses lone surrogates by itself where a text has a bound.
Text = Annotated[str, AfterValidator(_check_unicode)]
_NonEmptyText = Annotated[str, Field(min_length=1)]
_ShortText = Annotated[str, Field(max_length=256)]
_StopStrings = Annotated[
    list[_ShortText],
    Field(max_length=4),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
TokenCount = Annotated[int, Field(ge=1, le=_MAX_INTEGER)]
_Temperature = Annotated[float, Field(ge=0.0, le=10.0), AfterValidator(_check_temperature)]
_Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_JsonObject = Annotated[dict[str, Any], AfterValidator(_check_object)]
_TopLogprobCount = Annotated[int, Field(ge=0, le=20)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=_MAX_INTEGER, strict=True)]], Field(min_length=1)]
_TextOrIds = Annotated[
    Annotated[_NonEmptyText, Tag(PROMPT_KINDS[0])] | Annotated[_TokenIds, Tag(PROMPT_KINDS[1])],
    Discriminator(lambda prompt: PROMPT_KINDS[isinstance(prompt, list)]),
    BeforeValidator(_unwrap_single_prompt),
]


class RequestBody(BaseModel, extra="forbid"):
    """An object in a body, without fields that are null or change nothing. Other unknown fields are refused."""

    @model_validator(mode="before")
    @classmethod
    def drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            name: value
            for name, value in data.items()
            if value is not None and (name in cls.model_fields or not _is_neutral(name, value))
        }


def _is_neutral(name: str, value: Any) -> bool:
    return name in _IGNORED_FIELDS or value in NEUTRAL_VALUES.get(name, ())


class _CalledFunction(RequestBody):
    name: _ShortText
    arguments: Annotated[_JsonObject, BeforeValidator(_parse_arguments)] = {}


class ToolCall(RequestBody):
    id: _ShortText = ""
    type: Literal["function"] = "function"
    function: _CalledFunction


class ChatMessage(RequestBody):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text | None, BeforeValidator(_join_text_parts)] = None
    tool_calls: list[ToolCall] | None = None
    name: _ShortText | None = None
    """The name of the speaker, for templates that show it. By default, a tool has the name in the call with its id."""
    tool_call_id: _ShortText | None = None

    @model_validator(mode="after")
    def check_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only a message of the role assistant has tool_calls")
        if self.tool_call_id and self.role != "tool":
            raise ValueError("only a message of the role tool has tool_call_id")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self


def format_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages for a chat template."""
    names = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
    formatted = list[dict[str, Any]]()
    for message in messages:
        fields = {"content": ""} | message.model_dump(exclude_none=True)
        if message.role == "developer":  # which chat templates do not know
            fields["role"] = "system"
        if message.role == "tool" and (name := message.name or names.get(message.tool_call_id or "")):
            fields["name"] = name
        formatted.append(fields)
    return formatted


class FunctionSchema(RequestBody):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: _JsonObject | None = None
    strict: bool | None = None


class ToolSchema(RequestBody):
    type: Literal["function"]
    function: FunctionSchema


class StreamOptions(RequestBody):
    include_usage: bool = False


class SamplingParams(RequestBody):
    """The fields of chat completions and of text completions."""

    model: _ShortText = ""
    """The name of the model; empty for the one that is served."""
    max_tokens: TokenCount | None = None
    temperature: _Temperature = 1.0
    top_p: float = Field(default=1.0, ge=_MIN_POSITIVE_VALUE, le=1.0)
    top_k: Annotated[int, Field(ge=0, le=_MAX_INTEGER), BeforeValidator(lambda value: 0 if value == -1 else value)] = 0
    """0 or, as in vLLM, -1 for no limit."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    n: int = Field(default=1, ge=1, le=_MAX_INTEGER)
    seed: _Seed | None = None
    stop: _StopStrings = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: _ShortText = ""
    """The client's user; ignored."""
    return_token_ids: bool = False
    """Whether the answer has the token ids of the prompt and of each choice, as in vLLM."""

    @property
    def top_logprob_count(self) -> int | None:
        """How many of the likeliest tokens are listed for each token; None without log-probs."""
        return None


class ChatRequest(SamplingParams):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: TokenCount | None = None
    tools: list[ToolSchema] = Field(default=[], max_length=128)
    tool_choice: Literal["auto", "none"] = "auto"
    logprobs: bool = False
    top_logprobs: _TopLogprobCount = 0

    @model_validator(mode="after")
    def check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        return self

    @property
    def top_logprob_count(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def prompt(self) -> Prompt:
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools] if self.tool_choice == "auto" else []
        return Prompt("chat", tuple(format_messages(self.messages)), tools=tuple(tools))


class CompletionRequest(SamplingParams):
    prompt: _TextOrIds
    """A text, or the token ids of one."""
    best_of: int | None = None
    logprobs: Annotated[_TopLogprobCount | None, BeforeValidator(lambda value: None if value is False else value)] = (
        None
    )

    @model_validator(mode="after")
    def check_best_of(self) -> Self:
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of = {self.best_of} must be n = {self.n}, since all completions are returned")
        return self

    @property
    def top_logprob_count(self) -> int | None:
        return self.logprobs


class QuestionRequest(RequestBody):
    question: _NonEmptyText


class GroupRequest(RequestBody):
    """A request for `group_size` completions of one prompt: `question`, or if it is empty, a held-out one."""

    question: Text = ""
    answer: Text = ""
    """The gold answer to `question`; if it is empty, there are no rewards."""
    number: int = Field(default=0, ge=0, le=_MAX_INTEGER)
    """The number of the task's held-out prompt if `question` is empty."""
    group_size: int = Field(default=8, ge=2, le=64)
    temperature: _Temperature = Field(default=1.0, gt=0.0)
    max_tokens: TokenCount | None = None
    seed: _Seed = 0

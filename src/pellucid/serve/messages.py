"""The bodies of requests: the part of OpenAI's API that a small model can honor. Other fields are refused by name.

Clients send fields that they were not asked to send. A field that is null, or that has the value which changes nothing,
is left out before a body is checked. Every other field is bounded, so that no value can do harm in the code behind.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from pellucid.types import Prompt

SMALLEST = 1e-6
"""The smallest temperature above 0, and the smallest top_p. 1 / temperature and top_p times a sum must be numbers of
float32, as they are from 1e-38 on. Values below 1e-6 would change nothing anyway: logits differ by more where they
differ at all, and where a vocabulary has less than a million tokens, the likeliest alone has a greater probability.
"""
STOPS, STOP_CHARACTERS = 4, 256
TOOLS, LIKELIEST = 128, 20
KINDS = ("a text", "token ids")
"""What a prompt may be; pydantic has these words among the places of its errors."""
LARGEST = 2**31 - 1
NEUTRAL: dict[str, tuple[Any, ...]] = {
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
IGNORED = {
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


def whole(value: Any) -> Any:
    """Return the value. ValueError for text with a lone surrogate, which JSON can spell and no file or answer can."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"character {error.start} is half a character, a surrogate without its other half"
            ) from error
    return value


def listed(value: Any) -> Any:
    """Return one string, several or none as a list."""
    return [value] if isinstance(value, str) else [] if value is None else value


def safe(temperature: float) -> float:
    if 0.0 < temperature < SMALLEST:
        raise ValueError(f"must be 0, for the likeliest token, or at least {SMALLEST:g}")
    return temperature


def sound(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object of JSON. ValueError where `whole` would find fault with a text in it."""
    whole(json.dumps(value, ensure_ascii=False))
    return value


def parsed(value: Any) -> Any:
    """Return arguments, which OpenAI has as a text of JSON; an empty text has none. ValueError for other texts."""
    try:
        return json.loads(value.strip() or "{}") if isinstance(value, str) else value
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def joined(content: Any) -> Any:
    """Return the text of a message that was sent in parts. ValueError where a part is not text."""
    if not isinstance(content, list):
        return content
    for place, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError(f'part {place} is not of the form {{"type": "text", "text": "..."}}: send text alone')
    return "".join(part["text"] for part in content)


def only(prompts: Any) -> Any:
    """Return the prompt of a list of one, as LangChain and evaluation tools send it."""
    single = isinstance(prompts, list) and len(prompts) == 1 and isinstance(prompts[0], str | list)
    return prompts[0] if single else prompts


def unlimited(top_k: Any) -> Any:
    """Return 0 for the -1 by which vLLM says that there is no limit."""
    return 0 if top_k == -1 else top_k


def count_or_none(logprobs: Any) -> Any:
    return None if logprobs is False else logprobs


def kind_of(prompt: Any) -> str:
    return KINDS[isinstance(prompt, list)]


Text = Annotated[str, BeforeValidator(whole)]
Something = Annotated[str, Field(min_length=1), BeforeValidator(whole)]
Name = Annotated[str, Field(max_length=256), BeforeValidator(whole)]
Stop = Annotated[str, Field(max_length=STOP_CHARACTERS), BeforeValidator(whole)]
Stops = Annotated[list[Stop], Field(max_length=STOPS), BeforeValidator(listed)]
Tokens = Annotated[int, Field(ge=1, le=LARGEST)]
Temperature = Annotated[float, Field(ge=0.0, le=10.0), AfterValidator(safe)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Object = Annotated[dict[str, Any], AfterValidator(sound)]
Likeliest = Annotated[int, Field(ge=0, le=LIKELIEST)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST, strict=True)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
TextOrIds = Annotated[
    Annotated[Something, Tag(KINDS[0])] | Annotated[TokenIds, Tag(KINDS[1])],
    Discriminator(kind_of),
    BeforeValidator(only),
]


class WithoutNulls(BaseModel):
    """An object in a body whose null fields count as missing."""

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class Body(WithoutNulls):
    """The same, without neutral fields either. Fields that are not its own are refused."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name in cls.model_fields or not is_neutral(name, value)}


def is_neutral(name: str, value: Any) -> bool:
    """Return whether a field that is not supported can be left out without a difference to the answer."""
    return name in IGNORED or value in NEUTRAL.get(name, ())


class Called(Body):
    name: Name
    arguments: Annotated[Object, BeforeValidator(parsed)] = {}


class Call(Body):
    id: Name = ""
    type: Literal["function"] = "function"
    function: Called


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text | None, BeforeValidator(joined)] = None
    tool_calls: list[Call] | None = None
    name: Name | None = None
    """Who speaks, for templates that show it. For a tool that gives none, the name in the call with its id."""
    tool_call_id: Name | None = None

    @model_validator(mode="after")
    def check_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only a message of the role assistant has tool_calls")
        if self.tool_call_id and self.role != "tool":
            raise ValueError("only a message of the role tool has tool_call_id")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class StreamOptions(Body):
    include_usage: bool = False


class Sampling(Body):
    """The fields that both kinds of completion share."""

    model: Name = ""
    """The name of the model; empty for the one that is served."""
    max_tokens: Tokens | None = None
    temperature: Temperature = 1.0
    top_p: float = Field(default=1.0, ge=SMALLEST, le=1.0)
    top_k: Annotated[int, Field(ge=0, le=LARGEST), BeforeValidator(unlimited)] = 0
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    n: int = Field(default=1, ge=1, le=LARGEST)
    seed: Seed | None = None
    stop: Stops = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Name = ""
    """Whose request it is; ignored."""
    return_token_ids: bool = False
    """Whether the answer has the token ids of the prompt and of each choice, as vLLM gives them."""

    @property
    def top_logprob_count(self) -> int | None:
        """How many of the likeliest tokens are told beside each; None where no log-probs are."""
        return None


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Tokens | None = None
    tools: list[Tool] = Field(default=[], max_length=TOOLS)
    tool_choice: Literal["auto", "none"] = "auto"
    logprobs: bool = False
    top_logprobs: Likeliest = 0

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
        names = {call.id: call.function.name for message in self.messages for call in message.tool_calls or ()}
        messages = [
            {"content": ""} | message.model_dump(exclude_none=True) | role_of(message) | named(message, names)
            for message in self.messages
        ]
        return Prompt("chat", tuple(messages), tools=tuple(tools))


def role_of(message: Message) -> dict[str, str]:
    """Chat templates know the newer name of the system role only as the older one."""
    return {"role": "system"} if message.role == "developer" else {}


def named(message: Message, names: dict[str, str]) -> dict[str, str]:
    name = message.name or (names.get(message.tool_call_id or "") if message.role == "tool" else "")
    return {"name": name} if name else {}


class CompletionRequest(Sampling):
    prompt: TextOrIds
    """A text, or the token ids of one."""
    best_of: int | None = None
    logprobs: Annotated[Likeliest | None, BeforeValidator(count_or_none)] = None

    @model_validator(mode="after")
    def check_best_of(self) -> Self:
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of = {self.best_of} must be n = {self.n}, since all completions are returned")
        return self

    @property
    def top_logprob_count(self) -> int | None:
        return self.logprobs


class Question(Body):
    question: Something


class GroupRequest(Body):
    """A request for `group_size` completions of one prompt: of `question`, or without it of a held-out one."""

    question: Text = ""
    answer: Text = ""
    """The gold answer to a question of one's own; without it there are no rewards."""
    number: int = Field(default=0, ge=0, le=LARGEST)
    """The number of the task's held-out prompt, where there is no question."""
    group_size: int = Field(default=8, ge=2, le=64)
    temperature: Temperature = Field(default=1.0, gt=0.0)
    max_tokens: Tokens | None = None
    seed: Seed = 0

"""The bodies of requests: the part of OpenAI's API that a small model can honour. Other fields are refused by name.

Every field is bounded, so that no value can do harm in the code behind.
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
    """Return arguments, which OpenAI has as a text of JSON. ValueError where they are none."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


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
TextOrIds = Annotated[Annotated[Something, Tag(KINDS[0])] | Annotated[TokenIds, Tag(KINDS[1])], Discriminator(kind_of)]


class Called(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Name
    arguments: Annotated[Object, BeforeValidator(parsed)]


class Call(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: Name = ""
    type: Literal["function"] = "function"
    function: Called


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    tool_calls: list[Call] | None = None
    name: Name | None = None
    """The tool that answers; where it is not said, that of the call with this id."""
    tool_call_id: Name | None = None

    @model_validator(mode="after")
    def fits_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only a message of the role assistant has tool_calls")
        if (self.name or self.tool_call_id) and self.role != "tool":
            raise ValueError("only a message of the role tool has name and tool_call_id")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self


class Function(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: Function


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class Sampling(BaseModel):
    """The fields that both kinds of completion share."""

    model_config = ConfigDict(extra="forbid")

    model: Name = ""
    """The name of the model; empty for the one that is served."""
    max_tokens: Tokens | None = None
    temperature: Temperature = 1.0
    top_p: float = Field(default=1.0, ge=SMALLEST, le=1.0)
    top_k: int = Field(default=0, ge=0, le=LARGEST)
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
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are told beside each; None where no log-probs are."""
        return None


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Tokens | None = None
    tools: list[Tool] = Field(default=[], min_length=1, max_length=TOOLS)
    tool_choice: Literal["auto", "none"] = "auto"
    logprobs: bool = False
    top_logprobs: Likeliest = 0

    @model_validator(mode="after")
    def asks_for_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        return self

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def asked(self) -> Prompt:
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools] if self.tool_choice == "auto" else []
        names = {call.id: call.function.name for message in self.messages for call in message.tool_calls or ()}
        messages = [
            {"content": ""} | message.model_dump(exclude_none=True) | named(message, names) for message in self.messages
        ]
        return Prompt("chat", tuple(messages), tools=tuple(tools))


def named(message: Message, names: dict[str, str]) -> dict[str, str]:
    name = message.name or names.get(message.tool_call_id or "")
    return {"name": name} if name else {}


class CompletionRequest(Sampling):
    prompt: TextOrIds
    """A text, or the token ids of one."""
    logprobs: Likeliest | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


class Question(BaseModel):
    model_config = ConfigDict(extra="forbid")

    question: Something


class GroupRequest(BaseModel):
    """A request for `group_size` completions of one prompt: of `question`, or without it of a held-out one."""

    model_config = ConfigDict(extra="forbid")

    question: Text = ""
    answer: Text = ""
    """The gold answer to a question of one's own; without it there are no rewards."""
    number: int = Field(default=0, ge=0, le=LARGEST)
    """The number of the task's held-out prompt, where there is no question."""
    group_size: int = Field(default=8, ge=2, le=64)
    temperature: Temperature = Field(default=1.0, gt=0.0)
    max_tokens: Tokens | None = None
    seed: Seed = 0

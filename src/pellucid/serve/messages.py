"""The bodies of requests: the part of OpenAI's API that a small model can honour. Other fields are refused by name.

Every field is bounded, so that no value can do harm in the code behind.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

SMALLEST = 1e-6
"""The smallest temperature above 0, and the smallest top_p. 1 / temperature and top_p times a sum must be numbers of
float32, as they are from 1e-38 on. Values below 1e-6 would change nothing anyway: logits differ by more where they
differ at all, and where a vocabulary has less than a million tokens, the likeliest alone has a greater probability.
"""
STOPS, STOP_CHARACTERS = 4, 256
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


Text = Annotated[str, BeforeValidator(whole)]
Something = Annotated[str, Field(min_length=1), BeforeValidator(whole)]
Name = Annotated[str, Field(max_length=256), BeforeValidator(whole)]
Stop = Annotated[str, Field(max_length=STOP_CHARACTERS), BeforeValidator(whole)]
Stops = Annotated[list[Stop], Field(max_length=STOPS), BeforeValidator(listed)]
Tokens = Annotated[int, Field(ge=1, le=LARGEST)]
Temperature = Annotated[float, Field(ge=0.0, le=10.0), AfterValidator(safe)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: Text


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


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Tokens | None = None


class CompletionRequest(Sampling):
    prompt: Something


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

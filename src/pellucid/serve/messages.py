"""What goes over the wire: the part of OpenAI's API that a small model can honour; the rest is refused by name."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class Sampling(BaseModel):
    """What both kinds of completion share."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    """Empty: the one that is served."""
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=10.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    n: int = Field(default=1, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str = ""
    """Whose request it is; not looked at."""

    def stops(self) -> list[str]:
        listed = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in listed if stop]


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)


class CompletionRequest(Sampling):
    prompt: str


class Question(BaseModel):
    model_config = ConfigDict(extra="forbid")

    question: str = Field(min_length=1)


class GroupRequest(BaseModel):
    """One prompt, `group_size` answers side by side. Without a question, the task's next held-out one."""

    model_config = ConfigDict(extra="forbid")

    question: str = ""
    answer: str = ""
    """The gold answer to a question of one's own; without it there are no rewards."""
    number: int = Field(default=0, ge=0)
    """Which of the task's prompts."""
    group_size: int = Field(default=8, ge=2, le=64)
    temperature: float = Field(default=1.0, gt=0.0, le=10.0)
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int = 0

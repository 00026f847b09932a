"""A teacher behind an OpenAI-compatible endpoint. The official client does backoff, jitter and Retry-After."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import arg

from pellucid.types import Message, Prompt, UserError
from pellucid.utils import endpoint as endpoints
from pellucid.utils.endpoint import SettingNames, describe_unreachable, find_first_cause
from pellucid.utils.plugins import import_extra

INSTRUCTION = (
    "Write only the first one or two sentences of your thinking about this question. Do not solve it, do not give the"
    " answer, and write no labels and no headings."
)
TEACHER_SETTING_NAMES = SettingNames("--base-url", "--teacher", "--key-env")


class UnansweredError(Exception):
    """One request failed permanently; others may succeed."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """How a model is asked for prefixes."""

    teacher: Annotated[str, arg(metavar="MODEL")] = ""
    """The model's name at the endpoint."""
    base_url: Annotated[str, arg(metavar="URL")] = "https://api.openai.com/v1"
    """An OpenAI-compatible endpoint."""
    key_env: Annotated[str, arg(metavar="NAME")] = "OPENAI_API_KEY"
    """The environment variable that holds the key."""
    per_minute: float = 0
    """The maximum number of requests started per minute, including retries; 0 is no limit."""
    timeout: float = 60
    """Seconds that the endpoint may be silent."""
    retries: int = 6
    """The maximum number of retries of a failed request."""
    temperature: float = 1.2
    """The temperature of sampling."""
    max_tokens: int = 200
    """The longest answer, in tokens."""


def build_messages(prompt: Prompt) -> tuple[Message, ...]:
    """Return the messages of a prompt, with the instruction after the question."""
    messages = prompt.text if not isinstance(prompt.text, str) else ({"role": "user", "content": prompt.text},)
    *earlier, last = messages
    return (*earlier, {**last, "content": f"{last['content']}\n\n{INSTRUCTION}"})


class Teacher:
    """A teacher that many threads can ask.

    If `extract_prefix`, which returns the prefix in an answer, returns an empty text, the model is asked again.

    Raises:
        UserError: A remote endpoint has no key, or an endpoint on the loopback does not answer.
    """

    def __init__(self, options: RequestOptions, extract_prefix: Callable[[str], str]) -> None:
        self.options, self.extract_prefix = options, extract_prefix
        self.key = endpoints.get_api_key(options.base_url, options.key_env)
        self.openai = import_extra("openai", "teacher", "--teacher")
        self.rate_limiter = _RateLimiter(options.per_minute)
        if endpoints.is_loopback(options.base_url):
            endpoints.check_reachable(options.base_url, TEACHER_SETTING_NAMES)
        self.client = self.openai.OpenAI(
            api_key=self.key,
            base_url=options.base_url,
            timeout=options.timeout,
            max_retries=options.retries,
            http_client=self.openai.DefaultHttpxClient(
                event_hooks={
                    "request": [self.rate_limiter.wait_for_turn],
                    "response": [self.rate_limiter.check_stopped, endpoints.limit_answer],
                }
            ),
            default_headers=endpoints.UNCOMPRESSED_HEADERS,
        )

    def ask(self, prompt: Prompt) -> str:
        """Return a prefix. Raises UnansweredError if this request fails permanently, UserError if every one would."""
        messages, complaint = build_messages(prompt), ""
        for _ in range(self.options.retries + 1):
            try:
                if text := self.extract_prefix(self.request_answer(messages)):
                    return text
                complaint = "the answer is empty"
            except self.openai.APIStatusError as error:
                address = self.options.base_url, self.options.teacher, self.options.key_env
                if refusal := endpoints.find_permanent_refusal(error, *address, TEACHER_SETTING_NAMES):
                    raise UserError(refusal) from None
                raise UnansweredError(endpoints.describe_error(error, self.key)) from None
            except self.openai.APIConnectionError as error:
                raise self.make_connection_error(error) from None
            except RecursionError:
                complaint = "the answer is JSON that is nested too deeply"
            except (ValueError, OverflowError):
                complaint = "the answer is not JSON"
        raise UnansweredError(complaint)

    def request_answer(self, messages: Sequence[Message]) -> str:
        answer = self.client.chat.completions.create(
            model=self.options.teacher,
            messages=messages,
            temperature=self.options.temperature,
            max_tokens=self.options.max_tokens,
        )
        try:
            return endpoints.remove_key(endpoints.extract_message_text(answer.choices[0].message.content), self.key)
        except (AttributeError, IndexError, KeyError, TypeError):  # the client returns any JSON that it received
            return ""

    def make_connection_error(self, error: Exception) -> Exception:
        if isinstance(error, self.openai.APITimeoutError):
            return UnansweredError(f"no answer within {self.options.timeout:g} s")
        cause = find_first_cause(error)
        if isinstance(cause, endpoints.RefusedAnswerError):
            reason = endpoints.redact_and_shorten(str(cause), self.key)
            return UserError(reason) if cause.is_permanent else UnansweredError(reason)
        if isinstance(cause, ConnectionRefusedError | socket.gaierror):
            return UserError(describe_unreachable(self.options.base_url, cause, TEACHER_SETTING_NAMES))
        return UnansweredError("the connection was dropped")

    def close(self) -> None:
        """Abort the requests in progress."""
        self.rate_limiter.stopped.set()
        self.client.close()


class _RateLimiter:
    """Spaces the starts of requests evenly. Once stopped, no request starts or waits."""

    def __init__(self, per_minute: float) -> None:
        self.interval_seconds = 60 / per_minute if per_minute else 0.0
        self.next_start, self.lock, self.stopped = 0.0, threading.Lock(), threading.Event()

    def wait_for_turn(self, _request: Any) -> None:
        with self.lock:
            now = time.monotonic()
            start = max(now, self.next_start)
            self.next_start = start + self.interval_seconds
        self.wait(start - now)

    def check_stopped(self, _response: Any) -> None:
        """Drop a response that arrives after the stop, since nothing else would close its connection."""
        if self.stopped.is_set():
            raise UnansweredError("stopped")

    def wait(self, seconds: float) -> None:
        if self.stopped.wait(seconds):
            raise UnansweredError("stopped")

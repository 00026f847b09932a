"""Requests to a judge: many at once, made again where a failure may pass, and no longer than a step may take."""

from __future__ import annotations

import asyncio
import email.utils
import random
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pellucid.machine.endpoint import (
    RefusedAnswerError,
    complaint_of,
    first_cause,
    redacted,
    refusal_of_all,
    text_of,
    unreachable,
    without_key,
)
from pellucid.rewards.judgements import Answer
from pellucid.rewards.settings import NAMES, JudgeSettings

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""The seconds before the first repetition, doubled with each one, and the most there are."""
LONGEST_ASKED = 120.0
"""The most seconds that we wait where an endpoint asks for it with Retry-After."""
PASSING = (408, 409, 425, 429)
"""The statuses below 500 after which the same request may succeed."""
LONGEST_TEXT = 2**20
"""The most characters of what a judge says; a longer text is no answer."""
MOST_TOKENS = 2**53
"""The first number of tokens that a float64 does not hold exactly; nobody sells as many."""
_JITTER = random.Random()
"""Not the generator of the module, whose draws belong to the run."""


class UnansweredError(Exception):
    """A request has no answer, for good."""


class PassingError(Exception):
    """A request has failed in a way that may pass, after `wait` seconds where the endpoint says how long it takes."""

    def __init__(self, message: str, wait_seconds: float | None = None) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds


class Asking:
    """The requests of one step, within its time limit. The client makes none again by itself: here each is counted."""

    def __init__(self, settings: JudgeSettings, openai: Any, client: Any) -> None:
        self.settings, self._openai, self._client = settings, openai, client
        self._semaphore = asyncio.Semaphore(settings.concurrency)
        self._deadline = time.monotonic() + settings.step_timeout
        self._refusal = ""
        """Why every request is refused, once one was."""

    @property
    def remaining_seconds(self) -> float:
        """The seconds that are left of the step's."""
        return self._deadline - time.monotonic()

    async def request_answer(self, body: Mapping[str, Any], faults: list[str]) -> Answer:
        """Return the answer to a request. UnansweredError where there is none; `faults` gets what failed on the way."""
        while True:
            try:
                return await self._send_once(body)
            except PassingError as fault:
                faults.append(str(fault))
                if len(faults) > self.settings.retries:
                    raise UnansweredError(f"{fault}, after {len(faults)} requests") from None
                await asyncio.sleep(max(0.0, min(self.compute_wait(fault, len(faults)), self.remaining_seconds)))

    def compute_wait(self, fault: PassingError, failure_count: int) -> float:
        """Return the seconds to wait after the n-th failure: what the endpoint asks for, or twice as long each time.

        They are a quarter more at random, so that requests which failed together do not come back together.
        """
        asked = (
            fault.wait_seconds
            if fault.wait_seconds is not None
            else min(FIRST_WAIT * 2 ** (failure_count - 1), LONGEST_WAIT)
        )
        return min(asked, LONGEST_ASKED) * _JITTER.uniform(1.0, 1.25)

    async def _send_once(self, body: Mapping[str, Any]) -> Answer:
        async with self._semaphore:
            if self._refusal:
                raise UnansweredError(self._refusal)
            seconds = min(self.settings.timeout, self.remaining_seconds)
            if seconds <= 0:
                raise UnansweredError(f"no answer within step_timeout = {self.settings.step_timeout:g} s")
            try:
                async with asyncio.timeout(seconds):
                    return self._remove_key(answer_in(await self._create_completion(body)))
            except TimeoutError:
                raise PassingError(f"no answer within {seconds:.3g} s") from None
            except self._openai.APIStatusError as error:
                raise self._build_status_error(error) from None
            except self._openai.APIConnectionError as error:
                raise self._build_connection_error(error) from None
            except RecursionError:
                raise PassingError("the answer is JSON that is nested too deeply") from None
            except (ValueError, self._openai.APIError):
                raise PassingError("the answer is no JSON") from None

    async def _create_completion(self, body: Mapping[str, Any]) -> Any:
        others = {name: value for name, value in body.items() if name not in ("model", "messages")}
        # The client refuses fields that it does not know, unless they come this way.
        return await self._client.chat.completions.create(
            model=body["model"], messages=body["messages"], extra_body=others
        )

    def _remove_key(self, answer: Answer) -> Answer:
        """Return an answer without the key, which an endpoint may repeat: it goes to disk and into rollouts.jsonl."""
        return replace(answer, text=without_key(answer.text, self._client.api_key))

    def _build_status_error(self, error: Any) -> Exception:
        judge = self.settings
        self._refusal = self._refusal or refusal_of_all(error, judge.base_url, judge.model, judge.key, NAMES)
        if self._refusal:
            return UnansweredError(self._refusal)
        complaint = complaint_of(error, self._client.api_key)
        if error.status_code in PASSING or error.status_code >= 500:
            return PassingError(complaint, seconds_of(error.response.headers.get("retry-after", "")))
        return UnansweredError(complaint)

    def _build_connection_error(self, error: Exception) -> Exception:
        cause = first_cause(error)
        if isinstance(cause, RefusedAnswerError):
            why = redacted(str(cause), self._client.api_key)  # a header of the endpoint may repeat the key
            if not cause.is_permanent:
                return PassingError(why)
            self._refusal = self._refusal or why
            return UnansweredError(self._refusal)
        if isinstance(cause, ConnectionRefusedError | socket.gaierror):
            return PassingError(unreachable(self.settings.base_url, cause, NAMES))
        return PassingError("the connection was dropped")


def answer_in(completion: Any) -> Answer:
    """Return the answer that a completion of the client holds. PassingError where it holds none.

    The client hands over whatever JSON it was sent.
    """
    try:
        choice = completion.choices[0]
        text, cut = text_of(choice.message.content), choice.finish_reason == "length"
        tokens = getattr(completion.usage, "total_tokens", 0)
    except (AttributeError, IndexError, KeyError, TypeError):
        raise PassingError("the answer holds no completion") from None
    if len(text) > LONGEST_TEXT:
        raise PassingError(f"the answer is longer than {LONGEST_TEXT:,} characters")
    return Answer(text, cut, tokens if isinstance(tokens, int) and 0 <= tokens < MOST_TOKENS else 0)


def seconds_of(retry_after: str) -> float | None:
    """Return the seconds of a Retry-After, which may be a date; None where it says nothing."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            when = email.utils.parsedate_tz(retry_after)
            seconds = email.utils.mktime_tz(when) - time.time() if when else -1.0
        except (ValueError, OverflowError):  # of a year that no calendar has
            seconds = -1.0
    return seconds if 0 <= seconds < float("inf") else None

"""A reward by a judge: a language model behind an OpenAI-compatible endpoint, which grades completions by a rubric."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import regex

from pellucid.rewards.answers import split_thought, strip_thought
from pellucid.rewards.parts import PromptCompletion, RewardPart
from pellucid.rewards.settings import ENDPOINT_NAMES, JudgeSettings
from pellucid.types import Completion, Message, Prompt
from pellucid.utils.endpoint import (
    UNCOMPRESSED_HEADERS,
    RefusedAnswerError,
    check_reachable,
    describe_error,
    describe_unreachable,
    extract_message_text,
    find_first_cause,
    find_permanent_refusal,
    get_api_key,
    is_loopback,
    limit_answer_async,
    redact_and_shorten,
    remove_key,
)
from pellucid.utils.plugins import did_you_mean, import_extra
from pellucid.utils.text import escape_controls, fill_placeholders

_MAX_LOGGED_CHARACTERS = 500
"""The most characters of an answer in rollouts.jsonl."""


@dataclass
class _JudgeRequest:
    """A request of a step, and its outcome."""

    body: Mapping[str, Any]
    digest: str
    answer: JudgeAnswer | None = None
    value: float | None = None
    """The reward that the answer states."""
    error: str = ""
    """Why there is no reward."""
    faults: list[str] = field(default_factory=list)
    """One message for each failed attempt."""
    seconds: float = 0.0
    cached: bool = False


class Judge:
    """The judge of one reward term, for all completions of a step at once. It stores answers in the folder `cache`.

    The key is read from the environment variable when it is used, and stored nowhere. Raises UserError if it is
    missing, or if nothing listens at an address of this machine.
    """

    def __init__(self, settings: JudgeSettings, cache: Path | None) -> None:
        self.settings = settings
        self._cancel: Callable[[], Any] = lambda: None
        """Cancels the requests under way, from another thread."""
        self._openai = import_extra("openai", "teacher", 'the reward "judge"')
        self._cache = JudgeCache(cache) if cache is not None and settings.cache else None
        get_api_key(settings.base_url, settings.key)
        if is_loopback(settings.base_url):
            check_reachable(settings.base_url, ENDPOINT_NAMES)

    def grade(self, pairs: Sequence[PromptCompletion]) -> list[RewardPart]:
        """Return one part per completion, in their order, with a grade or an error. Equal requests are sent once.

        `extra` has the judge's answer; `logged` has tokens, seconds, retries, and whether the answer was known already.
        """
        # Use a separate thread: the caller's may run an event loop, as in a notebook.
        with ThreadPoolExecutor(1, "judge") as executor:
            future = executor.submit(asyncio.run, self._grade(pairs))
            try:
                return future.result()
            except BaseException:  # such as Ctrl-C
                self.stop()
                raise

    def stop(self) -> None:
        """Cancel a `grade` call in another thread, which then raises."""
        with suppress(RuntimeError):  # the event loop has ended already
            self._cancel()

    async def _grade(self, pairs: Sequence[PromptCompletion]) -> list[RewardPart]:
        task = asyncio.current_task()
        assert task is not None
        self._cancel = lambda: task.get_loop().call_soon_threadsafe(task.cancel)
        requests = [self._build_request(*pair) for pair in pairs]
        first: dict[str, _JudgeRequest] = {}
        for each in requests:
            if isinstance(each, _JudgeRequest):
                first.setdefault(each.digest, each)
        async with self._create_client() as client:
            judge_client = JudgeClient(self.settings, self._openai, client)
            with self._cache.open() if self._cache else nullcontext():
                await asyncio.gather(*(self._resolve(each, judge_client) for each in first.values()))
        return [
            each if isinstance(each, RewardPart) else self._build_part(each, first[each.digest]) for each in requests
        ]

    def _create_client(self) -> Any:
        base_url, key = self.settings.base_url, get_api_key(self.settings.base_url, self.settings.key)
        # Bypass proxies of the environment for an endpoint on this machine. `JudgeClient` enforces the time limits.
        http = self._openai.DefaultAsyncHttpxClient(
            trust_env=not is_loopback(base_url), event_hooks={"response": [limit_answer_async]}
        )
        settings = {"max_retries": 0, "timeout": None, "default_headers": UNCOMPRESSED_HEADERS, "http_client": http}
        return self._openai.AsyncOpenAI(api_key=key, base_url=base_url, **settings)

    def _build_request(self, prompt: Prompt, completion: Completion) -> _JudgeRequest | RewardPart:
        """Return the request for a completion, or a part whose error says why it cannot be built."""
        s = self.settings
        values = {
            "prompt": format_question(prompt),
            "completion": format_completion(completion),
            "answer": " or ".join(prompt.gold_answers),
            "rubric": s.rubric,
        }
        try:
            system, user = (fill_template(text, values, prompt.columns) for text in (s.system, s.template))
        except NoGradeError as error:
            return RewardPart(error=str(error))
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": user})
        limit = {} if "max_completion_tokens" in s.body else {"max_tokens": s.max_tokens}
        body = {"model": s.model, "messages": messages, "temperature": 0.0, **limit, **s.body}
        return _JudgeRequest(body, _compute_request_digest(s.base_url, body))

    async def _resolve(self, request: _JudgeRequest, judge_client: JudgeClient) -> None:
        """Take the answer from the cache or ask the judge for it, and store it or the error in the request."""
        start = time.monotonic()
        try:
            request.answer = self._cache.find(request.digest) if self._cache else None
            request.cached = request.answer is not None
            if request.answer is None:
                request.answer = await judge_client.request_answer(request.body, request.faults)
            # In a thread, so that a slow pattern does not block other requests.
            request.value = await asyncio.to_thread(self.compute_reward, request.answer)
            if self._cache and not request.cached:
                self._cache.store(request.digest, request.answer)
        except NoGradeError as error:
            request.error = str(error)
        request.seconds = time.monotonic() - start

    def _build_part(self, own: _JudgeRequest, first: _JudgeRequest) -> RewardPart:
        """Return the part of a completion whose request is `own`. `first` is the equal request that was sent."""
        answer, repeated = first.answer, own is not first
        cached = float(repeated or first.cached)
        logged = {
            "judge/tokens": float(answer.tokens) if answer and not cached else 0.0,
            "judge/seconds": 0.0 if repeated else first.seconds,
            "judge/cached": cached,
            "judge/retries": 0.0 if repeated else float(min(len(first.faults), self.settings.retries)),
        }
        extra: dict[str, Any] = {"judge": answer.text[:_MAX_LOGGED_CHARACTERS]} if answer else {}
        extra |= {"judge_failures": first.faults} if first.faults else {}
        return RewardPart(first.value, first.error, extra, logged)

    def compute_reward(self, answer: JudgeAnswer) -> float:
        """Return the reward that an answer states. Raises NoGradeError if it states none."""
        s, (low, high) = self.settings, self.settings.range
        text = "" if s.json_field else extract_grade(answer.text, s.pattern, answer.is_cut) or ""
        if s.words:
            rewards = {word.casefold(): reward for word, reward in s.words.items()}
            value = rewards.get(text.removesuffix(".").casefold())
        else:
            grade = parse_json_number(answer.text, s.json_field) if s.json_field else parse_number(text)
            value = (grade - low) / (high - low) if grade is not None and low <= grade <= high else None
        if value is not None:
            return value
        problem = f"none of {', '.join(s.words)}" if s.words else f"no number from {low:g} to {high:g}"
        line = " ".join(answer.text.split())
        quote = line if len(line) <= 60 else f"{line[:57]}..."
        cut = f", cut at max_tokens = {s.max_tokens}" if answer.is_cut else ""
        raise NoGradeError(f'{problem} in "{quote}"{cut}')


# ---------------------------------------------------------------- requests and retries


FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.5, 30.0
"""The wait before the first retry, which doubles with each retry, and the longest wait."""
MAX_RETRY_AFTER_SECONDS = 120.0
"""The longest wait if an endpoint asks for more with Retry-After."""
_TRANSIENT_STATUSES = (408, 409, 425, 429)
"""The statuses below 500 after which the same request may succeed."""
MAX_ANSWER_CHARACTERS = 2**20
"""The most characters of a judge's answer; a longer one is an error."""
_MAX_TOKEN_COUNT = 2**53
"""Token counts from here on are not exact in float64, and not plausible."""
_JITTER = random.Random()
"""A separate generator, so that the random numbers of the run do not depend on retries."""


class NoGradeError(Exception):
    """A completion gets no grade; the message says why."""


class TransientError(Exception):
    """A request failed, but a retry may succeed. `wait_seconds` is the wait that the endpoint asks for, if any."""

    def __init__(self, message: str, wait_seconds: float | None = None) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds


class JudgeClient:
    """Sends the requests of one step within its time limit. It retries itself, so the OpenAI client does not."""

    def __init__(self, settings: JudgeSettings, openai: Any, client: Any) -> None:
        self.settings, self._openai, self._client = settings, openai, client
        self._semaphore = asyncio.Semaphore(settings.concurrency)
        self._deadline = time.monotonic() + settings.step_timeout
        self._refusal = ""
        """Why a request was refused, if all others would be, too; else empty."""

    async def request_answer(self, body: Mapping[str, Any], faults: list[str]) -> JudgeAnswer:
        """Return the answer to a request, or raise NoGradeError. Each failed attempt is appended to `faults`."""
        while True:
            try:
                return await self._send_once(body)
            except TransientError as fault:
                faults.append(str(fault))
                if len(faults) > self.settings.retries:
                    raise NoGradeError(f"{fault}, after {len(faults)} requests") from None
                remaining = max(0.0, self._deadline - time.monotonic())
                await asyncio.sleep(min(compute_wait(fault, len(faults)), remaining))

    async def _send_once(self, body: Mapping[str, Any]) -> JudgeAnswer:
        async with self._semaphore:
            if self._refusal:
                raise NoGradeError(self._refusal)
            seconds = min(self.settings.timeout, self._deadline - time.monotonic())
            if seconds <= 0:
                raise NoGradeError(f"no answer within step_timeout = {self.settings.step_timeout:g} s")
            # The client rejects unknown fields unless they are in `extra_body`.
            arguments = {"model": body["model"], "messages": body["messages"], "extra_body": body}
            try:
                async with asyncio.timeout(seconds):
                    answer = parse_answer(await self._client.chat.completions.create(**arguments))
                # Remove the key, which an endpoint may repeat: the cache and rollouts.jsonl store the answer.
                return answer._replace(text=remove_key(answer.text, self._client.api_key))
            except TimeoutError:
                raise TransientError(f"no answer within {seconds:.3g} s") from None
            except self._openai.APIStatusError as error:
                raise self._build_status_error(error) from None
            except self._openai.APIConnectionError as error:
                raise self._build_connection_error(error) from None
            except RecursionError:
                raise TransientError("the answer is JSON that is nested too deeply") from None
            except (ValueError, self._openai.APIError):
                raise TransientError("the answer is not JSON") from None

    def _build_status_error(self, error: Any) -> Exception:
        judge = self.settings
        self._refusal = self._refusal or find_permanent_refusal(
            error, judge.base_url, judge.model, judge.key, ENDPOINT_NAMES
        )
        if self._refusal:
            return NoGradeError(self._refusal)
        description = describe_error(error, self._client.api_key)
        if error.status_code in _TRANSIENT_STATUSES or error.status_code >= 500:
            return TransientError(description, parse_retry_after(error.response.headers.get("retry-after", "")))
        return NoGradeError(description)

    def _build_connection_error(self, error: Exception) -> Exception:
        cause = find_first_cause(error)
        if isinstance(cause, RefusedAnswerError):
            why = redact_and_shorten(str(cause), self._client.api_key)  # a header of the endpoint may repeat the key
            if not cause.is_permanent:
                return TransientError(why)
            self._refusal = self._refusal or why
            return NoGradeError(self._refusal)
        if isinstance(cause, ConnectionRefusedError | socket.gaierror):
            return TransientError(describe_unreachable(self.settings.base_url, cause, ENDPOINT_NAMES))
        return TransientError("the connection was dropped")


def parse_answer(completion: Any) -> JudgeAnswer:
    """Return the answer in a response of the client, which may be any JSON. Raises TransientError if it has none."""
    try:
        choice = completion.choices[0]
        text, cut = extract_message_text(choice.message.content), choice.finish_reason == "length"
        tokens = getattr(completion.usage, "total_tokens", 0)
    except (AttributeError, IndexError, KeyError, TypeError):
        raise TransientError("the answer holds no completion") from None
    if len(text) > MAX_ANSWER_CHARACTERS:
        raise TransientError(f"the answer is longer than {MAX_ANSWER_CHARACTERS:,} characters")
    return JudgeAnswer(text, cut, tokens if isinstance(tokens, int) and 0 <= tokens < _MAX_TOKEN_COUNT else 0)


def parse_retry_after(retry_after: str) -> float | None:
    """Return the seconds in a Retry-After header; None for anything else, such as a date."""
    try:
        seconds = float(retry_after)
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def compute_wait(fault: TransientError, failure_count: int) -> float:
    """Return the seconds to wait after the n-th failure: what the endpoint asks for, or twice as long each time.

    Up to a quarter is added at random, so that requests which failed together do not come back together.
    """
    asked = fault.wait_seconds
    if asked is None:
        asked = min(FIRST_WAIT_SECONDS * 2 ** (failure_count - 1), MAX_WAIT_SECONDS)
    return min(asked, MAX_RETRY_AFTER_SECONDS) * _JITTER.uniform(1.0, 1.25)


# ---------------------------------------------------------------- the answers on disk


class JudgeAnswer(NamedTuple):
    """The answer of a judge to one request."""

    text: str
    is_cut: bool
    """Whether it was cut off at its maximum length."""
    tokens: int
    """The number of tokens in prompt and answer."""


def _compute_request_digest(base_url: str, body: Mapping[str, Any]) -> str:
    """Return the sha256 of all that determines the answer to a request."""
    return hashlib.sha256(json.dumps([base_url, body], sort_keys=True).encode()).hexdigest()


_BUSY_TIMEOUT_SECONDS = 10.0
"""Seconds to wait while another process writes to the database."""


class JudgeCache:
    """Answers keyed by the digest of their request, in a SQLite database that the processes of a run share.

    If the database cannot be used, they are kept in memory only.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "answers.sqlite3"
        self._answers: dict[str, JudgeAnswer] = {}
        self._connection: sqlite3.Connection | None = None
        self._has_reported = False

    @contextmanager
    def open(self) -> Iterator[JudgeCache]:
        """Open the database within the block, for the current thread."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self.path, timeout=_BUSY_TIMEOUT_SECONDS, isolation_level=None)
            # Without syncs, a killed process loses nothing; only a power failure can damage the file.
            self._connection.execute("PRAGMA synchronous = OFF")
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS answers (request TEXT PRIMARY KEY, text TEXT, cut INTEGER, tokens INTEGER)"
                " WITHOUT ROWID"
            )
        except (OSError, sqlite3.Error) as error:
            self._report(error)
        try:
            yield self
        finally:
            if self._connection:
                self._connection.close()
            self._connection = None

    def find(self, digest: str) -> JudgeAnswer | None:
        """Return the answer to a request; None if it is not stored."""
        if digest not in self._answers and self._connection:
            with suppress(sqlite3.Error):
                query = "SELECT text, cut, tokens FROM answers WHERE request = ?"
                for text, cut, tokens in self._connection.execute(query, (digest,)):
                    self._answers[digest] = JudgeAnswer(text, bool(cut), tokens)
        return self._answers.get(digest)

    def store(self, digest: str, answer: JudgeAnswer) -> None:
        """Store an answer. If the database cannot be written, keep it in memory only, and report that once."""
        self._answers[digest] = answer
        values = (digest, answer.text.encode(errors="replace").decode(), answer.is_cut, answer.tokens)
        try:
            if self._connection:
                self._connection.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", values)
        except sqlite3.Error as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        if not self._has_reported:
            self._has_reported = True
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            print(
                escape_controls(f"! {self.path} cannot be written ({reason}): the judge goes on without it"), flush=True
            )


# ---------------------------------------------------------------- the text of a request, and the grade in an answer


_NUMBER = re.compile(r"[+-]?[0-9]{1,15}(?:\.[0-9]{0,15})?")
PATTERN_TIMEOUT_SECONDS = 1.0
"""Seconds that the pattern of a recipe may take on one answer. Some answers would make it run for hours."""


def fill_template(template: str, values: Mapping[str, str], columns: Mapping[str, Any]) -> str:
    """Replace each {name} by its text in `values` or in the columns of the row, and {{...}} by {...}.

    Braces in an inserted text are kept. Raises NoGradeError for a name that is in neither.
    """

    def get_text(name: str) -> str:
        if name in values:
            return values[name]
        if name in columns:
            return _format_column(columns[name])
        hint = did_you_mean(name, [*values, *columns])
        raise NoGradeError(f"the template has {{{name}}}, and the row has no such column{hint}")

    # Replace lone surrogates, which JSON can contain and UTF-8 cannot encode.
    return fill_placeholders(template, get_text).encode(errors="replace").decode()


def _format_column(value: Any) -> str:
    """Return the text of a column: nothing for None, JSON for lists and objects."""
    if isinstance(value, list | Mapping):
        return json.dumps(value, ensure_ascii=False, default=str)
    return "" if value is None else str(value)


def format_question(prompt: Prompt) -> str:
    """Return the prompt as text: its one message, or each message of a conversation after its role."""
    if isinstance(prompt.text, str) or len(prompt.text) == 1:
        return prompt.question
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt.text)


def format_completion(completion: Completion) -> str:
    """Return the answer; for a conversation, the messages that follow the prompt, each with its role in front."""
    if len(completion.messages) < 2:
        return completion.full_text
    return "\n\n".join(map(_format_message, completion.messages))


def _format_message(message: Message) -> str:
    """Return a message after its role, with its tool calls as JSON objects below."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return f"{message['role']}: " + "\n".join(filter(None, (message["content"], *calls)))


def extract_grade(answer: str, pattern: str, is_cut: bool) -> str | None:
    """Return the first group of a pattern's last match, or the whole answer if the pattern is ""; None if none matches.

    Thinking is ignored, and so is a grade at the end of a cut answer: more digits may have followed. Raises
    NoGradeError if the pattern takes longer than `PATTERN_TIMEOUT_SECONDS`.

    Example: extract_grade("3, no: Grade: 8.", "Grade: ([0-9]+)", False) == "8"
    """
    text = split_thought(answer)[1]
    if text is None:
        return None
    if not pattern:
        return None if is_cut and not text[-1:].isspace() else text.strip()
    try:  # `regex` has a timeout, and releases the interpreter lock for other threads
        matches = list(regex.finditer(pattern, text, timeout=PATTERN_TIMEOUT_SECONDS, concurrent=True))
    except TimeoutError:
        raise NoGradeError(
            f'pattern = "{pattern}" took more than {PATTERN_TIMEOUT_SECONDS:g} s on an answer of {len(text):,}'
            " characters: write one that backtracks less"
        ) from None
    last = matches[-1] if matches else None
    return None if last is None or (is_cut and last.end(1) == len(text)) else last[1]


def parse_number(text: str) -> float | None:
    """Return the value of a decimal number; None for any other text, such as 7/10."""
    return float(text) if _NUMBER.fullmatch(text) else None


def parse_json_number(answer: str, field_name: str) -> float | None:
    """Return the number in this field of a JSON object; None if the answer is not such an object.

    Example: parse_json_number('{"why": "polite", "score": 7}', "score") == 7.0
    """
    try:
        found = json.loads(strip_thought(answer))
        value = found.get(field_name) if isinstance(found, dict) else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except (ValueError, RecursionError, OverflowError):
        return None

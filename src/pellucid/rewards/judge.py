"""A reward by a judge: a language model behind an OpenAI-compatible endpoint, which grades completions by a rubric."""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import json
import os
import random
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import regex

from pellucid.rewards.answers import split_thought, strip_thought
from pellucid.rewards.parts import PromptCompletion, RewardPart
from pellucid.rewards.settings import ENDPOINT_NAMES, JudgeSettings
from pellucid.types import Completion, Message, Prompt
from pellucid.utils import text as braces
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
from pellucid.utils.text import escape_controls

MAX_LOGGED_CHARACTERS = 500
"""The most characters of an answer in rollouts.jsonl."""
POLL_INTERVAL_SECONDS = 0.02
"""Seconds between two looks whether another process has an answer."""


@dataclass
class JudgeRequest:
    """A request of a step, and what has become of it."""

    body: Mapping[str, Any]
    digest: str
    answer: JudgeAnswer | None = None
    value: float | None = None
    """The reward that the answer states; None if it states none."""
    error: str = ""
    faults: list[str] = field(default_factory=list)
    """What failed before it was answered, or given up."""
    seconds: float = 0.0
    cached: bool = False


class Judge:
    """The judge of one term, for all completions of a step at once.

    The key is read from the environment when it is used, and kept nowhere. UserError where it is missing, or where
    nobody listens on the loopback. `cache` is the folder of the answers; None keeps them for a step.
    """

    def __init__(self, settings: JudgeSettings, cache: Path | None) -> None:
        self.settings = settings
        self._cancel: Callable[[], Any] = lambda: None
        """Ends what is under way, from another thread."""
        self._openai = import_extra("openai", "teacher", 'the reward "judge"')
        self._cache = JudgeCache(cache) if cache is not None and settings.cache else None
        get_api_key(settings.base_url, settings.key)
        if is_loopback(settings.base_url):
            check_reachable(settings.base_url, ENDPOINT_NAMES)

    def grade(self, pairs: Sequence[PromptCompletion]) -> list[RewardPart]:
        """Return the grade of each completion as a reward, in their order; a Part with an error where there is none.

        `extra` has what the judge said; `logged` has tokens, seconds, repetitions, and whether the answer was there
        already. Equal requests are made once.
        """
        # In a thread of its own: that of the caller may have an event loop, as in a notebook.
        with ThreadPoolExecutor(1, "judge") as beside:
            running = beside.submit(asyncio.run, self._grade(pairs))
            try:
                return running.result()
            except BaseException:  # such as Ctrl-C
                self.stop()
                raise

    def stop(self) -> None:
        """Give up what is under way in another thread: `parts` raises there."""
        with suppress(RuntimeError):  # it has ended by itself
            self._cancel()

    async def _grade(self, pairs: Sequence[PromptCompletion]) -> list[RewardPart]:
        task = asyncio.current_task()
        assert task is not None
        self._cancel = lambda: task.get_loop().call_soon_threadsafe(task.cancel)
        requests = [self._build_request(*pair) for pair in pairs]
        first: dict[str, JudgeRequest] = {}
        for each in requests:
            if isinstance(each, JudgeRequest):
                first.setdefault(each.digest, each)
        claims = self._cache.open_locks() if self._cache else nullcontext(RequestLocks(None))
        async with self._create_client() as client:
            asking = JudgeClient(self.settings, self._openai, client)
            with claims as held:
                await asyncio.gather(*(self._resolve(each, asking, held) for each in first.values()))
        return [
            each if isinstance(each, RewardPart) else self._build_part(each, first[each.digest]) for each in requests
        ]

    def _create_client(self) -> Any:
        s = self.settings
        # A proxy of the environment is not asked for what is on this machine. Time limits are those of `Asking`.
        http = self._openai.DefaultAsyncHttpxClient(
            trust_env=not is_loopback(s.base_url), event_hooks={"response": [limit_answer_async]}
        )
        return self._openai.AsyncOpenAI(
            api_key=get_api_key(s.base_url, s.key),
            base_url=s.base_url,
            max_retries=0,
            timeout=None,
            default_headers=UNCOMPRESSED_HEADERS,
            http_client=http,
        )

    def _build_request(self, prompt: Prompt, completion: Completion) -> JudgeRequest | RewardPart:
        """Return what is asked about a completion, or the Part that says why it cannot be asked."""
        s = self.settings
        known = {
            "prompt": format_question(prompt),
            "completion": format_completion(completion),
            "answer": " or ".join(prompt.gold_answers),
            "rubric": s.rubric,
        }
        try:
            system, user = (fill_template(text, known, prompt.columns) for text in (s.system, s.template))
        except UnknownPlaceholderError as error:
            return RewardPart(error=str(error))
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": user})
        limit = {} if "max_completion_tokens" in s.body else {"max_tokens": s.max_tokens}
        body = {"model": s.model, "messages": messages, "temperature": 0.0, **limit, **s.body}
        return JudgeRequest(body, compute_request_digest(s.base_url, body))

    async def _resolve(self, request: JudgeRequest, judge_client: JudgeClient, locks: RequestLocks) -> None:
        """Find the answer to a request, or ask for it, or note why there is none."""
        start = time.monotonic()
        while not locks.acquire(request.digest) and judge_client.remaining_seconds > 0:
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        try:
            request.answer = self._cache.find(request.digest) if self._cache else None
            request.cached = request.answer is not None
            if request.answer is None:
                request.answer = await judge_client.request_answer(request.body, request.faults)
            request.value = await asyncio.to_thread(self.compute_reward, request.answer)  # other answers come meanwhile
            if self._cache and not request.cached and request.value is not None:
                self._cache.store(request.digest, request.answer)
        except (UnansweredError, SlowPatternError) as error:
            request.error = str(error)
        finally:
            locks.release(request.digest)
            request.seconds = time.monotonic() - start

    def _build_part(self, own: JudgeRequest, first: JudgeRequest) -> RewardPart:
        """Return the part of a completion whose request was `own`, and was made as `first`."""
        answer, repeated = first.answer, own is not first
        cached = float(repeated or first.cached)
        logged = {
            "judge/tokens": float(answer.tokens) if answer and not cached else 0.0,
            "judge/seconds": 0.0 if repeated else first.seconds,
            "judge/cached": cached,
            "judge/retries": 0.0 if repeated else float(min(len(first.faults), self.settings.retries)),
        }
        if answer is None or first.error:
            return RewardPart(error=first.error, extra=build_extra(first), logged=logged)
        unreadable = self._describe_unreadable(answer) if first.value is None else ""
        return RewardPart(first.value, unreadable, build_extra(first), logged)

    def compute_reward(self, answer: JudgeAnswer) -> float | None:
        """Return the reward that an answer states; None where it states none. Raises SlowPatternError."""
        s = self.settings
        if s.json_field:
            grade = parse_json_number(answer.text, s.json_field)
        else:
            said = extract_grade(answer.text, s.pattern, answer.cut) or ""
            if s.words:
                rewards = {word.casefold(): reward for word, reward in s.words.items()}
                return rewards.get(said.removesuffix(".").casefold())
            grade = parse_number(said)
        low, high = s.range
        return (grade - low) / (high - low) if grade is not None and low <= grade <= high else None

    def _describe_unreadable(self, answer: JudgeAnswer) -> str:
        s = self.settings
        wanted = f"none of {', '.join(s.words)}" if s.words else f"no number from {s.range[0]:g} to {s.range[1]:g}"
        line = " ".join(answer.text.split())
        said = line if len(line) <= 60 else f"{line[:57]}..."
        cut = f", cut at max_tokens = {s.max_tokens}" if answer.cut else ""
        return f'{wanted} in "{said}"{cut}'


def build_extra(request: JudgeRequest) -> dict[str, Any]:
    """Return what rollouts.jsonl has of a request: what the judge said, and what failed before."""
    said = {"judge": request.answer.text[:MAX_LOGGED_CHARACTERS]} if request.answer else {}
    return said | ({"judge_failures": request.faults} if request.faults else {})


# ---------------------------------------------------------------- asking
# Requests to a judge: many at once, made again where a failure may pass, and no longer than a step may take.


FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.5, 30.0
"""The seconds before the first repetition, doubled with each one, and the most there are."""
MAX_RETRY_AFTER_SECONDS = 120.0
"""The most seconds that we wait where an endpoint asks for it with Retry-After."""
TRANSIENT_STATUSES = (408, 409, 425, 429)
"""The statuses below 500 after which the same request may succeed."""
MAX_ANSWER_CHARACTERS = 2**20
"""The most characters of what a judge says; a longer text is no answer."""
MAX_TOKEN_COUNT = 2**53
"""The first number of tokens that a float64 does not hold exactly; nobody sells as many."""
_JITTER = random.Random()
"""Not the generator of the module, whose draws belong to the run."""


class UnansweredError(Exception):
    """A request has no answer, for good."""


class TransientError(Exception):
    """A request has failed in a way that may pass, after `wait` seconds where the endpoint says how long it takes."""

    def __init__(self, message: str, wait_seconds: float | None = None) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds


class JudgeClient:
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

    async def request_answer(self, body: Mapping[str, Any], faults: list[str]) -> JudgeAnswer:
        """Return the answer to a request. UnansweredError where there is none; `faults` gets what failed on the way."""
        while True:
            try:
                return await self._send_once(body)
            except TransientError as fault:
                faults.append(str(fault))
                if len(faults) > self.settings.retries:
                    raise UnansweredError(f"{fault}, after {len(faults)} requests") from None
                await asyncio.sleep(max(0.0, min(self.compute_wait(fault, len(faults)), self.remaining_seconds)))

    def compute_wait(self, fault: TransientError, failure_count: int) -> float:
        """Return the seconds to wait after the n-th failure: what the endpoint asks for, or twice as long each time.

        They are a quarter more at random, so that requests which failed together do not come back together.
        """
        asked = (
            fault.wait_seconds
            if fault.wait_seconds is not None
            else min(FIRST_WAIT_SECONDS * 2 ** (failure_count - 1), MAX_WAIT_SECONDS)
        )
        return min(asked, MAX_RETRY_AFTER_SECONDS) * _JITTER.uniform(1.0, 1.25)

    async def _send_once(self, body: Mapping[str, Any]) -> JudgeAnswer:
        async with self._semaphore:
            if self._refusal:
                raise UnansweredError(self._refusal)
            seconds = min(self.settings.timeout, self.remaining_seconds)
            if seconds <= 0:
                raise UnansweredError(f"no answer within step_timeout = {self.settings.step_timeout:g} s")
            try:
                async with asyncio.timeout(seconds):
                    return self._remove_key(parse_answer(await self._create_completion(body)))
            except TimeoutError:
                raise TransientError(f"no answer within {seconds:.3g} s") from None
            except self._openai.APIStatusError as error:
                raise self._build_status_error(error) from None
            except self._openai.APIConnectionError as error:
                raise self._build_connection_error(error) from None
            except RecursionError:
                raise TransientError("the answer is JSON that is nested too deeply") from None
            except (ValueError, self._openai.APIError):
                raise TransientError("the answer is no JSON") from None

    async def _create_completion(self, body: Mapping[str, Any]) -> Any:
        others = {name: value for name, value in body.items() if name not in ("model", "messages")}
        # The client refuses fields that it does not know, unless they come this way.
        return await self._client.chat.completions.create(
            model=body["model"], messages=body["messages"], extra_body=others
        )

    def _remove_key(self, answer: JudgeAnswer) -> JudgeAnswer:
        """Return an answer without the key, which an endpoint may repeat: it goes to disk and into rollouts.jsonl."""
        return replace(answer, text=remove_key(answer.text, self._client.api_key))

    def _build_status_error(self, error: Any) -> Exception:
        judge = self.settings
        self._refusal = self._refusal or find_permanent_refusal(
            error, judge.base_url, judge.model, judge.key, ENDPOINT_NAMES
        )
        if self._refusal:
            return UnansweredError(self._refusal)
        complaint = describe_error(error, self._client.api_key)
        if error.status_code in TRANSIENT_STATUSES or error.status_code >= 500:
            return TransientError(complaint, parse_retry_after(error.response.headers.get("retry-after", "")))
        return UnansweredError(complaint)

    def _build_connection_error(self, error: Exception) -> Exception:
        cause = find_first_cause(error)
        if isinstance(cause, RefusedAnswerError):
            why = redact_and_shorten(str(cause), self._client.api_key)  # a header of the endpoint may repeat the key
            if not cause.is_permanent:
                return TransientError(why)
            self._refusal = self._refusal or why
            return UnansweredError(self._refusal)
        if isinstance(cause, ConnectionRefusedError | socket.gaierror):
            return TransientError(describe_unreachable(self.settings.base_url, cause, ENDPOINT_NAMES))
        return TransientError("the connection was dropped")


def parse_answer(completion: Any) -> JudgeAnswer:
    """Return the answer that a completion of the client holds. PassingError where it holds none.

    The client hands over whatever JSON it was sent.
    """
    try:
        choice = completion.choices[0]
        text, cut = extract_message_text(choice.message.content), choice.finish_reason == "length"
        tokens = getattr(completion.usage, "total_tokens", 0)
    except (AttributeError, IndexError, KeyError, TypeError):
        raise TransientError("the answer holds no completion") from None
    if len(text) > MAX_ANSWER_CHARACTERS:
        raise TransientError(f"the answer is longer than {MAX_ANSWER_CHARACTERS:,} characters")
    return JudgeAnswer(text, cut, tokens if isinstance(tokens, int) and 0 <= tokens < MAX_TOKEN_COUNT else 0)


def parse_retry_after(retry_after: str) -> float | None:
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


# ---------------------------------------------------------------- judgements
# The answers of a judge on disk, in a folder that the processes of a run share, so that nothing is asked twice.
#
# Each process appends lines to a file of its own, since not every file system lets two write one, and reads those of all.
# A line that was torn by the end of its process is skipped. While a process asks, it holds a lock on the byte of the file
# `claims` whose place is the digest of the request; the system frees it when the process dies.


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@dataclass(frozen=True)
class JudgeAnswer:
    """What a judge said to one request."""

    text: str
    cut: bool
    """Whether it ended at its longest length, not by itself."""
    tokens: int
    """What it cost, prompt and answer."""


def compute_request_digest(base_url: str, body: Mapping[str, Any]) -> str:
    """Return the sha256 of a request, with all that decides its answer, as hexadecimal digits."""
    return hashlib.sha256(json.dumps([base_url, body], sort_keys=True).encode()).hexdigest()


class JudgeCache:
    """The answers by the digests of their requests, in memory and in the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._file_name = folder, f"{secrets.token_hex(4)}.jsonl"
        self._answers: dict[str, JudgeAnswer] = {}
        self._read_bytes: dict[Path, int] = {}
        """How many bytes of each file are known."""
        self._is_unwritable = False

    def find(self, digest: str) -> JudgeAnswer | None:
        """Return the answer to a request, also one that another process has had in the meantime."""
        if digest not in self._answers:
            self._read_new_answers()
        return self._answers.get(digest)

    def store(self, digest: str, answer: JudgeAnswer) -> None:
        """Add an answer. Where the disk takes no more it is kept in memory alone, which is said once."""
        self._answers.setdefault(digest, answer)
        if self._is_unwritable:
            return
        line = json.dumps({"request": digest, **asdict(answer)}, ensure_ascii=False) + "\n"
        path = self.folder / f"{os.getpid()}-{self._file_name}"  # after a fork, another file
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(line.encode(errors="replace"))
        except OSError as error:
            self._is_unwritable = True
            text = f"! {path} cannot be written ({error.strerror}): the judge goes on without it"
            print(escape_controls(text), flush=True)

    @contextmanager
    def open_locks(self) -> Iterator[RequestLocks]:
        """Yield the claims of this process, which are given up at the end."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / "claims", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            yield RequestLocks(None)
            return
        try:
            yield RequestLocks(descriptor)
        finally:
            os.close(descriptor)

    def _read_new_answers(self) -> None:
        for path in sorted(self.folder.glob("*.jsonl")):
            with suppress(OSError):
                self._read_new_lines(path)

    def _read_new_lines(self, path: Path) -> None:
        start = self._read_bytes.get(path, 0)
        if path.stat().st_size <= start:
            return
        with path.open("rb") as file:
            file.seek(start)
            whole = file.read().rpartition(b"\n")[0]
        self._read_bytes[path] = start + len(whole) + (1 if whole else 0)
        for line in whole.split(b"\n"):
            with suppress(
                ValueError, KeyError, TypeError, OverflowError, RecursionError
            ):  # damaged: what it held is asked again
                entry = json.loads(line)
                answer = JudgeAnswer(str(entry["text"]), bool(entry["cut"]), int(entry["tokens"]))
                self._answers.setdefault(entry["request"], answer)


class RequestLocks:
    """Which requests this process is about to make; where the file system has no locks, all that it asks for."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def acquire(self, digest: str) -> bool:
        """Claim a request. False where another process has claimed it."""
        if fcntl is None or self._descriptor is None:
            return True
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, compute_lock_offset(digest))
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            return True
        return True

    def release(self, digest: str) -> None:
        if fcntl is not None and self._descriptor is not None:
            with suppress(OSError):
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, compute_lock_offset(digest))


def compute_lock_offset(digest: str) -> int:
    return int(digest[:15], 16)


# ---------------------------------------------------------------- rubric
# What a judge is asked, and how its answer becomes a number: strictly, or not at all.


_NUMBER = re.compile(r"[+-]?[0-9]{1,15}(?:\.[0-9]{0,15})?")


PATTERN_TIMEOUT_SECONDS = 1.0
"""Seconds that the pattern of a recipe may take on one answer. A judge can write what makes it take hours."""


class SlowPatternError(Exception):
    """A pattern took too long on an answer."""


class UnknownPlaceholderError(Exception):
    """A template names what the prompt does not have."""


def fill_template(template: str, values: Mapping[str, str], columns: Mapping[str, Any]) -> str:
    """Replace each {name} by its text in `known` or in the columns of the row, and {{...}} by {...}.

    Braces in what is put in are text. UnfilledError for a name that is in neither.
    """

    def text_of(name: str) -> str:
        if name in values:
            return values[name]
        if name in columns:
            return format_column(columns[name])
        hint = did_you_mean(name, [*values, *columns])
        raise UnknownPlaceholderError(f"the template has {{{name}}}, and the row has no such column{hint}")

    # Half a surrogate pair, which JSON can spell, is in no text that can be sent.
    return braces.fill_placeholders(template, text_of).encode(errors="replace").decode()


def format_column(value: Any) -> str:
    """Return the text of a column: nothing for None, JSON for lists and objects."""
    if isinstance(value, list | Mapping):
        return json.dumps(value, ensure_ascii=False, default=str)
    return "" if value is None else str(value)


def format_question(prompt: Prompt) -> str:
    """Return what the policy was asked: the one message, or each message of a conversation behind its role."""
    if isinstance(prompt.text, str) or len(prompt.text) == 1:
        return prompt.question
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt.text)


def format_completion(completion: Completion) -> str:
    """Return the answer, or all that was said after the question of a conversation, each message behind its role.

    Calls of tools are JSON objects below the message that they were made in.
    """
    if len(completion.messages) < 2:
        return completion.full_text
    return "\n\n".join(map(format_message, completion.messages))


def format_message(message: Message) -> str:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    said = "\n".join(filter(None, (message["content"], *calls)))
    return f"{message['role']}: {said}"


def extract_grade(answer: str, pattern: str, is_cut: bool) -> str | None:
    """Return the first group of the last match of a pattern, or for "" the whole answer; None where there is none.

    Thinking does not count, nor does the end of an answer that was cut: more digits may have followed. SlowPatternError
    if the pattern takes longer than PATTERN_SECONDS.

    Example: stated_in("3, no: Grade: 8.", "Grade: ([0-9]+)", False) == "8"; stated_in("<think>3?</think> 8", "", False)
    """
    text = split_thought(answer)[1]
    if text is None:
        return None
    if not pattern:
        return None if is_cut and not text[-1:].isspace() else text.strip()
    try:  # of `regex`, which can be timed, and releases the interpreter for other threads
        matches = list(regex.finditer(pattern, text, timeout=PATTERN_TIMEOUT_SECONDS, concurrent=True))
    except TimeoutError:
        raise SlowPatternError(
            f'pattern = "{pattern}" took more than {PATTERN_TIMEOUT_SECONDS:g} s on an answer of {len(text):,} characters:'
            " write one that tries fewer ways"
        ) from None
    last = matches[-1] if matches else None
    return None if last is None or (is_cut and last.end(1) == len(text)) else last[1]


def parse_number(text: str) -> float | None:
    """Return the number that a text is, in digits; None where it is anything else, such as 7/10."""
    return float(text) if _NUMBER.fullmatch(text) else None


def parse_json_number(answer: str, field: str) -> float | None:
    """Return the number that a JSON object has under this name; None where the answer is no such object.

    Example: number_of('{"why": "polite", "score": 7}', "score") == 7.0; number_of('{"score": "7"}', "score") is None
    """
    try:
        found = json.loads(strip_thought(answer))
        value = found.get(field) if isinstance(found, dict) else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except (ValueError, RecursionError, OverflowError):
        return None

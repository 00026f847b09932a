"""The serving engine: requests to sampled tokens, tokens to text, and text to choices in the format of OpenAI."""

from __future__ import annotations

import asyncio
import codecs
import json
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby, starmap
from random import SystemRandom
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jinja2 import TemplateError
from torch import Tensor

from pellucid.algorithm.settings import GRPOConfig
from pellucid.models.decode import RunningBatch
from pellucid.models.sampling import NO_TRUNCATION, Truncation, find_top_tokens, sample_tokens
from pellucid.policy import tool_calls
from pellucid.policy.text import REPLACEMENT
from pellucid.rollout.groups import generate_uniforms
from pellucid.rollout.scheduler import RowState, Scheduler
from pellucid.serve.middleware import LOOPBACK_HOSTS, RequestError
from pellucid.serve.schemas import SamplingParams
from pellucid.tasks.wrappers import format_question_for_task
from pellucid.types import Message, Prompt, Task, UserError
from pellucid.utils import hardware

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

MAX_CACHED_PROMPT_TOKENS = 65_536
"""Maximum prompt tokens in the KV cache: prompts * the longest prompt, since all are padded to its length."""
MAX_PREFILL_SCORES = 2**24
"""Maximum attention scores per head in one prefill, prompts * length^2: 64 prompts of 512 tokens, or one of 4096."""


class ThroughputMeter:
    """Counts the tokens of each second, for the mean rate of the last ten seconds."""

    def __init__(self) -> None:
        self.counts: deque[tuple[int, int]] = deque(maxlen=11)

    def add(self, count: int, now: float) -> None:
        """Count tokens that were sampled at `now`, in seconds."""
        second, before = self.counts[-1] if self.counts else (-1, 0)
        if second == int(now):
            self.counts[-1] = second, before + count
        else:
            self.counts.append((int(now), count))

    def compute_rate(self, now: float) -> float:
        """The mean count per second over the last ten whole seconds."""
        return sum(count for second, count in tuple(self.counts) if int(now) - 10 <= second < int(now)) / 10


class ServingEngine:
    """Decodes the requests that threads `submit`, and sends chunks of text through `GenerationRequest.notify`.

    Call `run` in the thread that loaded the model: OpenMP starts a pool of workers for each thread that computes, and
    with two pools on two cores, a token takes twice as long.
    """

    def __init__(self, policy: Policy, max_rows: int = 64, max_waiting: int = 256) -> None:
        """Create an engine with `max_rows` slots and a queue of `max_waiting` requests."""
        self.policy, self.max_rows, self.max_waiting = policy, max_rows, max_waiting
        self.waiting: list[GenerationRequest] = []
        """Requests that the scheduler has not received yet."""
        self.closed = False
        self.queue_changed = threading.Condition()
        """Guards `waiting` and `closed`, and wakes `run` when they change."""
        self.scheduler = self._create_scheduler()
        self.meter, self.error_count, self.last_error = ThroughputMeter(), 0, ""
        self.heap = hardware.HeapTrimmer()

    def _create_scheduler(self) -> Scheduler[GenerationRow]:
        return Scheduler(self.policy, self.max_rows, self._sample_tokens, self._append_tokens, self._finish_rows)

    @property
    def running(self) -> RunningBatch[GenerationRow]:
        """The rows that are being decoded."""
        return self.scheduler.running

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: the queue is full, the engine is closed, or the request has more rows than the engine.
        """
        if request.n > self.max_rows:
            raise RequestError(400, f"n = {request.n} must be at most {self.max_rows}")
        with self.queue_changed:
            self.waiting = [each for each in self.waiting if not each.cancelled]
            if self.closed:
                raise _make_ending_error()
            if len(self.waiting) >= self.max_waiting:
                raise RequestError(503, "too many requests are waiting: try again in a moment", "overloaded")
            self.waiting.append(request)
            self.queue_changed.notify()

    def close(self) -> None:
        """End `run`, which sends a RequestError to all unfinished requests."""
        with self.queue_changed:
            self.closed = True
            self.queue_changed.notify()

    def run(self) -> None:
        """Decode until the engine is closed."""
        try:
            while self._wait_for_work():
                try:
                    self.step()
                    self.heap.trim_after_step()
                except Exception as error:  # noqa: BLE001 - the service goes on after any error
                    self._reset_batch(error)
        finally:
            self.close()
            for request in (*self._get_active_requests(), *self.waiting):
                self._end_request(request, _make_ending_error())

    def step(self) -> None:
        """Admit waiting requests, and decode one token for each row."""
        self._admit()
        self.scheduler.step()

    def describe_state(self) -> dict[str, Any]:
        """Return the state of the engine, for `/health`."""
        return {
            "rows": len(self.running.requests),
            "rows_at_most": self.max_rows,
            "waiting": len(self.waiting),
            "waiting_at_most": self.max_waiting,
            "tokens_per_second": self.meter.compute_rate(time.monotonic()),
            "errors": self.error_count,
            "last_error": self.last_error,
        }

    def _wait_for_work(self) -> bool:
        """Wait for requests. Return False when the engine is closed."""
        if not self.running.requests and not self.waiting:
            self.heap.trim()  # the memory of finished prompts' caches
        with self.queue_changed:
            self.queue_changed.wait_for(lambda: self.closed or self.running.requests or self.waiting)
            return not self.closed

    def _get_active_requests(self) -> set[GenerationRequest]:
        """Return the requests that are being decoded."""
        return {row.request for row in self.running.requests}

    def _admit(self) -> None:
        """Prefill waiting requests while there are slots and memory, in order of arrival."""
        while joining := self._take_admissible():
            for request in joining:
                seeds = [(request.seed * 1_000_003 + i) % 2**63 for i in range(request.n)]
                rows = [GenerationRow(request, i, generate_uniforms(seed)) for i, seed in enumerate(seeds)]
                self.scheduler.add_request(list(request.prompt_ids), rows)
            self.scheduler.admit()

    def _take_admissible(self) -> list[GenerationRequest]:
        """Remove the first requests from the queue, as many as fit into one prefill and the free slots."""
        with self.queue_changed:
            self.waiting = [request for request in self.waiting if not request.cancelled]
            active = [len(request.prompt_ids) for request in self._get_active_requests()]
            count = 0
            while count < len(self.waiting) and self._is_admissible(active, self.waiting[: count + 1]):
                count += 1
            joining, self.waiting = self.waiting[:count], self.waiting[count:]
            return joining

    def _is_admissible(self, active: list[int], joining: Sequence[GenerationRequest]) -> bool:
        """Return whether requests can join active prompts of these lengths. An idle engine admits any one request."""
        lengths = [len(request.prompt_ids) for request in joining]
        if len(lengths) > 1 and _count_padded_tokens(lengths) * max(lengths) > MAX_PREFILL_SCORES:
            return False
        if len(active + lengths) > 1 and _count_padded_tokens(active + lengths) > MAX_CACHED_PROMPT_TOKENS:
            return False
        return sum(request.n for request in joining) <= self.running.count_free_slots()

    def _sample_tokens(self, rows: Sequence[GenerationRow], logits: Tensor, uniforms: Tensor) -> _Sampled:
        """Sample a token for each row; adjacent rows with the same settings are sampled together."""
        self.meter.add(len(rows), time.monotonic())
        return self._sample_groups(
            lambda row: (row.request.temperature, row.request.truncation), rows, logits, uniforms
        )

    def _sample_groups(
        self, key: Callable[[GenerationRow], Any], rows: Sequence[GenerationRow], logits: Tensor, uniforms: Tensor
    ) -> _Sampled:
        groups = [list(group) for _, group in groupby(rows, key)]
        sizes = [len(group) for group in groups]
        parts = zip(groups, logits.split(sizes), uniforms.split(sizes), strict=True)
        tokens, logprobs, top_logprobs = zip(*starmap(self._sample_rows, parts), strict=True)
        return torch.cat(tokens), torch.cat(logprobs), list(chain.from_iterable(top_logprobs))

    def _sample_rows(self, rows: Sequence[GenerationRow], logits: Tensor, uniforms: Tensor) -> _Sampled:
        """Sample tokens for rows with the same settings. An error fails only the requests that cause it."""
        requests = {row.request for row in rows}
        if len(requests) > 1:
            with suppress(Exception):
                return _sample_with_shared_settings(rows, logits, uniforms)
            return self._sample_groups(lambda row: row.request, rows, logits, uniforms)
        with self._fail_on_error(requests):
            return _sample_with_shared_settings(rows, logits, uniforms)
        zeros = torch.zeros(len(rows), device=logits.device)
        return torch.full_like(zeros, -1, dtype=torch.long), zeros, [()] * len(rows)

    def _append_tokens(
        self, row: GenerationRow, ids: list[int], logprobs: list[float], top_logprobs: list[_TopLogprobs]
    ) -> RowState:
        """Add a token to a row, and send the chunk that is ready. The row of a canceled request finishes."""
        with self._fail_on_error([row.request]):
            if not row.request.cancelled:
                chunk = row.append_token(SampledToken(ids[0], logprobs[0], top_logprobs[0]), self.policy)
                if chunk:
                    row.request.notify(chunk)
                if not (chunk and chunk.finish_reason):
                    return RowState.DECODING
        return RowState.FINISHED

    def _finish_rows(self, rows: Sequence[GenerationRow]) -> None:
        """Send the end to requests whose last rows have finished."""
        for request in {row.request for row in rows} - self._get_active_requests():
            self._end_request(request, None)

    def _end_request(self, request: GenerationRequest, error: Exception | None) -> None:
        """Send an error, or None for the end. The slots of the request become free at the end of the step."""
        if not request.cancelled:
            request.cancelled = True
            with suppress(Exception):  # the event loop may be closed
                request.notify(error)

    @contextmanager
    def _fail_on_error(self, requests: Iterable[GenerationRequest]) -> Iterator[None]:
        """Send an error that the block raises to these requests; other requests go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - as in `run`
            self._fail_requests(requests, error)

    def _fail_requests(self, requests: Iterable[GenerationRequest], error: Exception) -> None:
        self.error_count += 1
        self.last_error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        for request in requests:
            self._end_request(request, error)

    def _reset_batch(self, error: Exception) -> None:
        """Fail all requests that are being decoded, since the step is incomplete, and start a new batch."""
        requests = self._get_active_requests()
        try:
            self.scheduler = self._create_scheduler()  # first, since `notify` may read the state
        finally:
            self._fail_requests(requests, error)


_TopLogprobs = tuple[tuple[int, float], ...]
"""The likeliest tokens and their log-probs."""
_Sampled = tuple[Tensor, Tensor, list[_TopLogprobs]]
"""Tokens [n], their log-probs [n], and the likeliest tokens of each row."""


def _make_ending_error() -> RequestError:
    return RequestError(503, "the service is shutting down", "overloaded")


def _sample_with_shared_settings(rows: Sequence[GenerationRow], logits: Tensor, uniforms: Tensor) -> _Sampled:
    request = rows[0].request
    tokens, logprobs = sample_tokens(logits, uniforms, request.temperature, request.truncation)
    return tokens, logprobs, _compute_top_logprobs(rows, logits)


def _compute_top_logprobs(rows: Sequence[GenerationRow], logits: Tensor) -> list[_TopLogprobs]:
    """Return the likeliest tokens of each row, as many as its request wants. All rows have the same temperature."""
    counts = [row.request.top_logprob_count for row in rows]
    if not any(counts):
        return [()] * len(rows)
    tokens, logprobs = find_top_tokens(logits, rows[0].request.temperature, max(counts))
    pairs = [list(zip(*both, strict=True)) for both in zip(tokens.tolist(), logprobs.tolist(), strict=True)]
    return [tuple(row[:count]) for row, count in zip(pairs, counts, strict=True)]


def _count_padded_tokens(lengths: Sequence[int]) -> int:
    """Return the number of tokens of prompts in the KV cache, where each prompt is padded to the longest."""
    return len(lengths) * max(lengths)


# ---------------------------------------------------------------- requests and rows: tokens to text


_MAX_CHARACTER_TOKENS = 16
"""Maximum tokens to wait for the end of a character. It has at most four bytes, so a longer wait would not complete it,
and the text is sent as it is."""


class SampledToken(NamedTuple):
    token_id: int
    logprob: float
    top_logprobs: _TopLogprobs = ()
    """The likeliest tokens, as many as the request wants."""
    text_bytes: bytes = b""
    """The bytes that the token adds to the text of its row; a special token adds none."""
    text_offset: int = 0
    """The index of the token's first character in the text of its row."""


class _TokenSpan(NamedTuple):
    """Tokens that were decoded together, and their text: one token, or several that form a character."""

    tokens: tuple[SampledToken, ...]
    text: str
    offset: int
    """The number of characters before the span in the text of its row."""

    @property
    def end(self) -> int:
        return self.offset + len(self.text)

    def cut_tokens_at(self, end: int) -> Iterator[SampledToken]:
        """Yield the tokens without the bytes of the characters from `end` on, the index where a stop string begins."""
        if end >= self.end:
            yield from self.tokens
            return
        left = len(self.text[: max(0, end - self.offset)].encode())
        for token in self.tokens:
            yield token._replace(text_bytes=token.text_bytes[:left], text_offset=min(token.text_offset, end))
            left -= min(left, len(token.text_bytes))


def _make_span(tokens: Sequence[SampledToken], text: str, offset: int, policy: Policy) -> _TokenSpan:
    """Return a span of tokens and their text; each token gets its share of the bytes."""
    if len(tokens) == 1 and REPLACEMENT not in text:
        return _TokenSpan((tokens[0]._replace(text_bytes=text.encode(), text_offset=offset),), text, offset)
    shares = [policy.token_bytes.get_bytes(token.token_id) for token in tokens]
    if len(tokens) == 1 and shares[0].decode(errors="replace") != text:
        shares = [text.encode()]
    decoder, spanned, before = codecs.getincrementaldecoder("utf-8")("replace"), list[SampledToken](), 0
    for token, share in zip(tokens, shares, strict=True):
        spanned.append(token._replace(text_bytes=share, text_offset=offset + min(before, len(text))))
        before += len(decoder.decode(share))
    return _TokenSpan(tuple(spanned), text, offset)


class CompletionChunk(NamedTuple):
    """A chunk of the completion of a row."""

    row_index: int
    """The index of the row in its request, from 0."""
    text: str
    tokens: tuple[SampledToken, ...]
    finish_reason: str = ""
    """`stop` or `length` in the last chunk of a row."""


@dataclass(eq=False)
class GenerationRequest:
    """A request for n completions of a prompt. Each completion is a row.

    The engine calls `notify` in its own thread: with each chunk, with None when all rows have finished, or with an
    error.
    """

    prompt_ids: Sequence[int]
    notify: Callable[[CompletionChunk | Exception | None], object]
    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    truncation: Truncation = NO_TRUNCATION
    stop: Sequence[str] = ()
    seed: int = 0
    top_logprob_count: int = 0
    """The number of likeliest tokens that are returned with each token."""
    cancelled: bool = False
    """Set when all rows have finished, when the client has left, or after an error."""


@dataclass(eq=False)
class GenerationRow:
    request: GenerationRequest
    index: int
    uniforms: Iterator[float]
    token_ids: list[int] = field(default_factory=list)
    undecoded_tokens: list[SampledToken] = field(default_factory=list)
    """Tokens that were not decoded to text yet."""
    unsent_spans: list[_TokenSpan] = field(default_factory=list)
    """Spans whose text is not fully sent yet."""
    sent_characters: int = 0
    unsent_text: str = ""
    """Decoded text that is not sent yet, since a stop string may begin in it."""
    decoded_range: tuple[int, int] = (0, 0)
    """The range of tokens that were decoded last."""

    def append_token(self, token: SampledToken, policy: Policy) -> CompletionChunk | None:
        """Add a token. Return the chunk that can be sent now, if any; the last one has a finish reason."""
        self.token_ids.append(token.token_id)
        self.undecoded_tokens.append(token)
        full = len(self.token_ids) >= self.request.max_tokens
        ended = token.token_id in policy.eos_ids
        before = len(self.unsent_text)
        if not self.decode_text(policy, ended or full):
            return None
        span = _make_span(self.undecoded_tokens, self.unsent_text[before:], self.sent_characters + before, policy)
        self.unsent_spans.append(span)
        self.undecoded_tokens = []
        stop_at = min((at for stop in self.request.stop if (at := self.unsent_text.find(stop)) >= 0), default=-1)
        reason = "stop" if ended or stop_at >= 0 else "length" if full else ""
        count = stop_at if stop_at >= 0 else len(self.unsent_text) - (0 if reason else self._count_held_back())
        return self._take_chunk(count, reason) if count or reason else None

    def decode_text(self, policy: Policy, is_last: bool) -> bool:
        """Add the text of new tokens. Return False if a character is incomplete and more tokens may come.

        New tokens are decoded together with those before them, since the first token of a text may lose its space.
        """
        first, end = self.decoded_range
        before, now = policy.decode(self.token_ids[first:end]), policy.decode(self.token_ids[first:])
        if now.endswith(REPLACEMENT) and not is_last and len(self.token_ids) - end < _MAX_CHARACTER_TOKENS:
            return False
        text = now[len(before) :]
        self.unsent_text += text
        # A special token has no text, so a token that is decoded after it alone would lose its space again.
        start = first if not text and len(self.token_ids) - first < _MAX_CHARACTER_TOKENS else end
        self.decoded_range = start, len(self.token_ids)
        return True

    def _count_held_back(self) -> int:
        """Return the number of characters at the end of `unsent_text` that may begin a stop string."""
        prefixes = (stop[:n] for stop in self.request.stop for n in range(1, len(stop)))
        return max((len(prefix) for prefix in prefixes if self.unsent_text.endswith(prefix)), default=0)

    def _take_chunk(self, characters: int, finish_reason: str) -> CompletionChunk:
        """Return the next characters as a chunk, with the tokens whose text it completes; the last has the rest."""
        text, self.unsent_text = self.unsent_text[:characters], self.unsent_text[characters:]
        self.sent_characters += characters
        spans = [span for span in self.unsent_spans if finish_reason or span.end <= self.sent_characters]
        del self.unsent_spans[: len(spans)]
        tokens = tuple(token for span in spans for token in span.cut_tokens_at(self.sent_characters))
        return CompletionChunk(self.index, text, tokens, finish_reason)


# ---------------------------------------------------------------- submitting requests, streaming completions


_MAX_INLINE_CHARACTERS = 10_000
"""Prompts of up to this many characters are tokenized directly, within milliseconds; longer ones in a thread. Each
message counts as 100 more."""


@dataclass(frozen=True)
class ServedModel:
    """A served model and the limits of its service."""

    name: str
    policy: Any
    engine: ServingEngine
    task: Task | None = None
    """The task that the model was trained on: `/group` uses its held-out prompts and its rewards."""
    algorithm: GRPOConfig = field(default_factory=GRPOConfig)
    """The settings by which `/group` computes advantages."""
    system: str = ""
    """The system message before clients' own questions, for a model that is not served from a run."""
    max_tokens: int = 512
    """The maximum tokens of a completion, if a request sets no limit."""
    group_tokens: int = 0
    """The maximum tokens of a completion of `/group`, as in training; 0 means `max_tokens`."""
    timeout: float = 120.0
    """Seconds that a response may take, from the arrival of the complete request to the end of the response."""
    body_bytes: int = 1_000_000
    body_seconds: float = 30.0
    send_seconds: float = 30.0
    """Seconds that a client has to receive a chunk."""
    hosts: Sequence[str] = LOOPBACK_HOSTS
    """Host names that requests may use; IP addresses are always allowed."""
    token: str = ""
    """The token that clients must send; empty if they need none."""
    instance_id: str = ""
    """The id by which `serve start` recognizes its service."""
    tokenizer_pool: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))
    grading_pool: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))
    """Grades one group at a time, since the sandbox computes rewards one after the other anyway."""


@dataclass
class ServedCompletion:
    """A completion of a request, joined from its chunks."""

    text: str = ""
    tokens: tuple[SampledToken, ...] = ()
    finish_reason: str = ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(sampled.token_id for sampled in self.tokens)

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(sampled.logprob for sampled in self.tokens)

    def append_chunk(self, chunk: CompletionChunk) -> None:
        self.text += chunk.text
        self.tokens += chunk.tokens
        self.finish_reason = chunk.finish_reason


class _GenerationStream:
    """A submitted request: an async iterator over the chunks of its completions.

    It is canceled when the asyncio task that created it ends: the answer was sent, or the client has left.
    """

    def __init__(
        self,
        served: ServedModel,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        max_tokens: int,
        deadline: float,
    ) -> None:
        """Submit a request with a deadline on the clock of the event loop. Raise RequestError if it is refused."""
        self.served, self.prompt_ids, self.deadline = served, prompt_ids, deadline
        self.events: asyncio.Queue[CompletionChunk | Exception | None] = asyncio.Queue()
        self.request = GenerationRequest(
            prompt_ids=prompt_ids,
            notify=partial(asyncio.get_running_loop().call_soon_threadsafe, self.events.put_nowait),
            n=sampling.n,
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            truncation=Truncation(sampling.top_k, sampling.top_p, sampling.min_p),
            stop=[stop for stop in sampling.stop if stop],
            seed=SystemRandom().randrange(2**31) if sampling.seed is None else sampling.seed,
            top_logprob_count=sampling.top_logprob_count or 0,
        )
        served.engine.submit(self.request)
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(self._cancel)

    def _cancel(self, _: asyncio.Task[Any]) -> None:
        self.request.cancelled = True

    async def __aiter__(self) -> AsyncIterator[CompletionChunk]:
        while True:
            async with enforce_deadline(self.served, self.deadline):
                event = await self.events.get()
            if event is None:
                return
            if isinstance(event, RequestError):
                raise event
            if isinstance(event, Exception):
                raise RequestError(500, f"decoding failed: {event}", "internal_error") from event
            yield event

    async def collect_completions(self) -> list[ServedCompletion]:
        completions = [ServedCompletion() for _ in range(self.request.n)]
        async for chunk in self:
            completions[chunk.row_index].append_chunk(chunk)
        return completions


def format_question(served: ServedModel, question: str) -> str | tuple[Message, ...]:
    """Return a client's own question with the system message and the template of the run."""
    if served.task is not None:
        return format_question_for_task(getattr(served.task, "task", served.task), question)
    system = ({"role": "system", "content": served.system},) if served.system else ()
    return (*system, {"role": "user", "content": question})


async def start_generation(
    served: ServedModel,
    prompt: Prompt | Sequence[int],
    sampling: SamplingParams,
    max_tokens: int | None,
    default_max_tokens: int = 0,
) -> _GenerationStream:
    """Check and submit a request for completions of a prompt, or of its token ids.

    Without `max_tokens`, the limit is `default_max_tokens`, or that of the service if this is 0.

    Raises:
        RequestError: the context is too short, the prompt cannot be encoded, or the queue is full.
    """
    deadline = asyncio.get_running_loop().time() + served.timeout
    async with enforce_deadline(served, deadline):
        prompt_ids = await _encode_prompt(served, prompt)
    room = served.policy.context_length - len(prompt_ids)
    wanted = max_tokens or max(1, min(default_max_tokens or served.max_tokens, room))
    if wanted > room:
        raise RequestError(
            400,
            f"{len(prompt_ids)} prompt tokens and {wanted} answer tokens exceed the context length of"
            f" {served.policy.context_length}",
            "context_length_exceeded",
        )
    return _GenerationStream(served, prompt_ids, sampling, wanted, deadline)


async def _encode_prompt(served: ServedModel, prompt: Prompt | Sequence[int]) -> tuple[int, ...]:
    """Return the token ids of a prompt. Raise RequestError if it cannot be encoded, or the model has no such tokens."""
    ids = await _tokenize_prompt(served, prompt) if isinstance(prompt, Prompt) else tuple(prompt)
    if max(ids) >= (count := served.policy.model.get_input_embeddings().num_embeddings):
        raise RequestError(400, f"the prompt has a token that the model does not know: the model has {count} tokens")
    return ids


async def _tokenize_prompt(served: ServedModel, prompt: Prompt) -> tuple[int, ...]:
    """Return the token ids of a prompt. A megabyte takes a second, so long texts are tokenized in a thread."""
    texts = [prompt.text] if isinstance(prompt.text, str) else [str(part) for part in (*prompt.text, *prompt.tools)]
    try:
        if sum(100 + len(text) for text in texts) <= _MAX_INLINE_CHARACTERS:
            return served.policy.encode(prompt)
        return await asyncio.get_running_loop().run_in_executor(served.tokenizer_pool, served.policy.encode, prompt)
    except (UserError, TemplateError, TypeError) as error:
        raise RequestError(400, str(error)) from error


@asynccontextmanager
async def enforce_deadline(served: ServedModel, deadline: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as error:
        raise RequestError(504, f"not done within {served.timeout:g} seconds", "timeout") from error


# ---------------------------------------------------------------- choices in the format of OpenAI


_MIN_SENT_LOGPROB = -9999.0
"""Sent in place of smaller log-probs, as OpenAI does, since JSON has no infinity."""


@dataclass(frozen=True)
class ChoiceFormatter:
    """Formats the completions of a request."""

    stream: _GenerationStream
    is_chat: bool
    tools: Sequence[Mapping[str, Any]] = ()
    with_logprobs: bool = False
    with_token_ids: bool = False

    def build_head(self) -> dict[str, Any]:
        """Return the fields that occur once in a response, or in the first event of a stream."""
        return {"prompt_token_ids": list(self.stream.prompt_ids)} if self.with_token_ids else {}

    def build_choice(self, index: int, answer: ServedCompletion) -> dict[str, Any]:
        content, reason = self.build_content(answer)
        # As in vLLM, a chat response has the prompt ids once; a text completion has them in each choice.
        body = {"message": content} if self.is_chat else content | self.build_head()
        return self.assemble_choice(index, body, reason, answer.tokens)

    def build_chunk(self, chunk: CompletionChunk) -> dict[str, Any]:
        """Return a chunk of a choice."""
        body = {"delta": {"content": chunk.text} if chunk.text else {}} if self.is_chat else {"text": chunk.text}
        return self.assemble_choice(chunk.row_index, body, chunk.finish_reason, chunk.tokens)

    def build_final_chunk(self, index: int, answer: ServedCompletion) -> dict[str, Any]:
        """Return a complete choice as a single chunk, since only the complete text shows which part is a tool call."""
        message, reason = self.build_content(answer)
        delta = {name: value for name, value in number_tool_calls(message).items() if name != "role" and value}
        return self.assemble_choice(index, {"delta": delta}, reason, answer.tokens)

    def build_content(self, answer: ServedCompletion) -> tuple[dict[str, Any], str]:
        """Return the message, or the text, and the finish reason. A call that cannot be parsed remains text."""
        if not self.is_chat:
            return {"text": answer.text}, answer.finish_reason
        policy, ids = self.policy, answer.token_ids
        cut_characters = max(0, len(policy.decode(ids)) - len(answer.text)) if self.tools else 0
        prompt_ids = self.stream.prompt_ids
        message = tool_calls.parse_turn(
            policy.tokenizer, ids, prompt_ids, self.tools, policy.eos_ids, cut_characters
        ).message
        if not (calls := message.get("tool_calls")):
            return build_message(answer.text, ()), answer.finish_reason
        reason = "tool_calls" if answer.finish_reason == "stop" else answer.finish_reason
        return build_message(message["content"], [{**call, "id": f"call_{uuid.uuid4().hex}"} for call in calls]), reason

    def assemble_choice(
        self, index: int, body: dict[str, Any], finish_reason: str, tokens: Sequence[SampledToken]
    ) -> dict[str, Any]:
        choice = {"index": index, "finish_reason": finish_reason or None, "logprobs": None} | body
        if self.with_logprobs and tokens:
            choice["logprobs"] = self.build_chat_logprobs(tokens) if self.is_chat else self.build_text_logprobs(tokens)
        return choice | ({"token_ids": [sampled.token_id for sampled in tokens]} if self.with_token_ids else {})

    def build_chat_logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        content = list[dict[str, Any]]()
        for sampled in tokens:
            top = [self.build_logprob_entry(token, logprob, sampled) for token, logprob in sampled.top_logprobs]
            content.append(self.build_logprob_entry(*sampled[:2], sampled) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def build_logprob_entry(self, token: int, logprob: float, sampled: SampledToken) -> dict[str, Any]:
        text_bytes = list(self.get_text_bytes(token, sampled))
        return {"token": self.get_token_name(token), "logprob": max(logprob, _MIN_SENT_LOGPROB), "bytes": text_bytes}

    def get_text_bytes(self, token: int, sampled: SampledToken) -> bytes:
        """Return the bytes that a token would have added to the text in place of the sampled one."""
        if token == sampled.token_id:
            return sampled.text_bytes
        first = self.policy.decode([token]) if sampled.text_offset == 0 else REPLACEMENT
        return self.policy.token_bytes.get_bytes(token) if REPLACEMENT in first else first.encode()

    def build_text_logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        top_logprobs = list[dict[str, float]]()
        for sampled in tokens:
            pairs = (sampled[:2], *reversed(sampled.top_logprobs))  # a likelier token replaces one of the same name
            top_logprobs.append({self.get_token_name(token): max(value, _MIN_SENT_LOGPROB) for token, value in pairs})
        return {
            "tokens": [self.get_token_name(sampled.token_id) for sampled in tokens],
            "token_logprobs": [max(sampled.logprob, _MIN_SENT_LOGPROB) for sampled in tokens],
            "top_logprobs": top_logprobs,
            "text_offset": [sampled.text_offset for sampled in tokens],
        }

    @property
    def policy(self) -> Any:
        return self.stream.served.policy

    def get_token_name(self, token: int) -> str:
        return self.policy.token_bytes.format_token(token)


def build_usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def build_message(content: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a message of the policy. The arguments of its tool calls are JSON text."""
    if not calls:
        return {"role": "assistant", "content": content}
    formatted = list[dict[str, Any]]()
    for call in calls:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        formatted.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {"role": "assistant", "content": content or None, "tool_calls": formatted}


def number_tool_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message for a stream, in which each tool call has its index."""
    calls = message.get("tool_calls")
    return message | {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]} if calls else message

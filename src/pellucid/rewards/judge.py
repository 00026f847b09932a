"""A reward by a judge: a language model behind an OpenAI-compatible endpoint, which grades completions by a rubric."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid.machine.endpoint import UNCOMPRESSED, guard_async, is_loopback, key_of, reach
from pellucid.machine.extras import extra
from pellucid.rewards import rubric
from pellucid.rewards.asking import Asking, UnansweredError
from pellucid.rewards.judgements import Answer, Claims, Judgements, digest_of
from pellucid.rewards.parts import Pair, Part
from pellucid.rewards.settings import NAMES, JudgeSettings
from pellucid.types import Completion, Prompt

SHOWN = 500
"""The most characters of an answer in rollouts.jsonl."""
POLL = 0.02
"""Seconds between two looks whether another process has an answer."""


@dataclass
class Asked:
    """A request of a step, and what has become of it."""

    body: Mapping[str, Any]
    digest: str
    answer: Answer | None = None
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
        self._openai = extra("openai", "teacher", 'the reward "judge"')
        self._cache = Judgements(cache) if cache is not None and settings.cache else None
        key_of(settings.base_url, settings.key)
        if is_loopback(settings.base_url):
            reach(settings.base_url, NAMES)

    def grade(self, pairs: Sequence[Pair]) -> list[Part]:
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

    async def _grade(self, pairs: Sequence[Pair]) -> list[Part]:
        task = asyncio.current_task()
        assert task is not None
        self._cancel = lambda: task.get_loop().call_soon_threadsafe(task.cancel)
        requests = [self._build_request(*pair) for pair in pairs]
        first: dict[str, Asked] = {}
        for each in requests:
            if isinstance(each, Asked):
                first.setdefault(each.digest, each)
        claims = self._cache.open_locks() if self._cache else nullcontext(Claims(None))
        async with self._create_client() as client:
            asking = Asking(self.settings, self._openai, client)
            with claims as held:
                await asyncio.gather(*(self._resolve(each, asking, held) for each in first.values()))
        return [each if isinstance(each, Part) else self._build_part(each, first[each.digest]) for each in requests]

    def _create_client(self) -> Any:
        s = self.settings
        # A proxy of the environment is not asked for what is on this machine. Time limits are those of `Asking`.
        http = self._openai.DefaultAsyncHttpxClient(
            trust_env=not is_loopback(s.base_url), event_hooks={"response": [guard_async]}
        )
        return self._openai.AsyncOpenAI(
            api_key=key_of(s.base_url, s.key),
            base_url=s.base_url,
            max_retries=0,
            timeout=None,
            default_headers=UNCOMPRESSED,
            http_client=http,
        )

    def _build_request(self, prompt: Prompt, completion: Completion) -> Asked | Part:
        """Return what is asked about a completion, or the Part that says why it cannot be asked."""
        s = self.settings
        known = {
            "prompt": rubric.asked_text(prompt),
            "completion": rubric.answered_text(completion),
            "answer": " or ".join(prompt.gold_answers),
            "rubric": s.rubric,
        }
        try:
            system, user = (rubric.filled(text, known, prompt.columns) for text in (s.system, s.template))
        except rubric.UnfilledError as error:
            return Part(error=str(error))
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": user})
        limit = {} if "max_completion_tokens" in s.body else {"max_tokens": s.max_tokens}
        body = {"model": s.model, "messages": messages, "temperature": 0.0, **limit, **s.body}
        return Asked(body, digest_of(s.base_url, body))

    async def _resolve(self, request: Asked, judge_client: Asking, locks: Claims) -> None:
        """Find the answer to a request, or ask for it, or note why there is none."""
        start = time.monotonic()
        while not locks.acquire(request.digest) and judge_client.remaining_seconds > 0:
            await asyncio.sleep(POLL)
        try:
            request.answer = self._cache.find(request.digest) if self._cache else None
            request.cached = request.answer is not None
            if request.answer is None:
                request.answer = await judge_client.request_answer(request.body, request.faults)
            request.value = await asyncio.to_thread(self.compute_reward, request.answer)  # other answers come meanwhile
            if self._cache and not request.cached and request.value is not None:
                self._cache.store(request.digest, request.answer)
        except (UnansweredError, rubric.SlowPatternError) as error:
            request.error = str(error)
        finally:
            locks.release(request.digest)
            request.seconds = time.monotonic() - start

    def _build_part(self, own: Asked, first: Asked) -> Part:
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
            return Part(error=first.error, extra=told(first), logged=logged)
        unreadable = self._describe_unreadable(answer) if first.value is None else ""
        return Part(first.value, unreadable, told(first), logged)

    def compute_reward(self, answer: Answer) -> float | None:
        """Return the reward that an answer states; None where it states none. Raises SlowPatternError."""
        s = self.settings
        if s.json_field:
            grade = rubric.number_of(answer.text, s.json_field)
        else:
            said = rubric.stated_in(answer.text, s.pattern, answer.cut) or ""
            if s.words:
                rewards = {word.casefold(): reward for word, reward in s.words.items()}
                return rewards.get(said.removesuffix(".").casefold())
            grade = rubric.number_in(said)
        low, high = s.range
        return (grade - low) / (high - low) if grade is not None and low <= grade <= high else None

    def _describe_unreadable(self, answer: Answer) -> str:
        s = self.settings
        wanted = f"none of {', '.join(s.words)}" if s.words else f"no number from {s.range[0]:g} to {s.range[1]:g}"
        line = " ".join(answer.text.split())
        said = line if len(line) <= 60 else f"{line[:57]}..."
        cut = f", cut at max_tokens = {s.max_tokens}" if answer.cut else ""
        return f'{wanted} in "{said}"{cut}'


def told(request: Asked) -> dict[str, Any]:
    """Return what rollouts.jsonl has of a request: what the judge said, and what failed before."""
    said = {"judge": request.answer.text[:SHOWN]} if request.answer else {}
    return said | ({"judge_failures": request.faults} if request.faults else {})

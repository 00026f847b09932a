"""Compute rewards, in a worker process or in this one. An exception becomes an answer with an error."""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import fields
from functools import partial
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from pellucid.rewards import functions
from pellucid.rewards.functions import TrainerState
from pellucid.rewards.parts import TASK_REWARD, Answer, PromptCompletion, RewardPart, make_failure, validate_answer
from pellucid.rewards.terms import compute_term_parts, get_reward_terms, is_function_term
from pellucid.sandbox.values import InvalidResultError, describe_error
from pellucid.sandbox.worker import ErrorLog, call_user_code, log_error, receive_request, start_watchdog, stop_watchdog
from pellucid.types import Reward, has_batch_rewards
from pellucid.utils.plugins import load_function

NumberedPairs = Mapping[int, PromptCompletion]
"""Completions of a call by their numbers, siblings next to each other."""


class RewardCall(NamedTuple):
    """A request for some terms of a task's reward, for some completions."""

    limits: Mapping[int, float]
    """The terms, by their indices in task.rewards or TASK_REWARD, each with its time limit in seconds."""
    pairs: NumberedPairs
    state: TrainerState
    is_batch: bool = True
    """Whether the call is about many completions, which terms may compare."""


class CallEvent(NamedTuple):
    """The start of a term, or answers of a term by the numbers of their completions."""

    term: int
    answers: Mapping[int, Answer]

    @property
    def is_start(self) -> bool:
        return not self.answers


# ---------------------------------------------------------------- the worker process


def load_task(task: bytes) -> Callable[[Connection], None]:
    """Return a function that serves calls. The files of the task's functions are imported before a call is timed."""
    loaded = pickle.loads(task)
    for term in get_reward_terms(loaded):
        if is_function_term(term.name):
            load_function(term.name, "reward")
    return partial(_serve_calls, loaded)


def _serve_calls(task: Any, connection: Connection) -> None:
    """Answer calls until the parent closes its end of the connection."""
    while True:
        call: RewardCall
        groups: list[tuple[bytes, list[int]]]
        call, groups = receive_request(connection)
        pairs, errors = _unpickle_groups(groups)
        for term in call.limits if errors else ():
            failures = {number: make_failure(term, error) for number, error in errors.items()}
            connection.send_bytes(_encode_event(CallEvent(term, failures)))
        for event in run_call(task, call._replace(pairs=pairs), log_error):
            if event.is_start:
                start_watchdog(max(call.limits.values()))
            connection.send_bytes(_encode_event(event))
        stop_watchdog()


def _unpickle_groups(groups: Sequence[tuple[bytes, list[int]]]) -> tuple[NumberedPairs, dict[int, str]]:
    """Return the completions of pickled groups, and the errors of those that cannot be read here, by their numbers."""
    pairs: dict[int, PromptCompletion] = {}
    errors: dict[int, str] = {}
    for data, numbers in groups:
        try:
            pairs |= zip(numbers, pickle.loads(data), strict=True)
        except BaseException as error:  # noqa: BLE001 - any exception of user code is an answer
            description = f"it cannot be read in another process: {describe_error(error)}"
            errors |= dict.fromkeys(numbers, description)
    return pairs, errors


def _encode_event(event: CallEvent) -> bytes:
    """Return an event as JSON, which its receiver can read without running code of the user's."""
    answers = [
        (number, {field.name: getattr(answer, field.name) for field in fields(answer)})
        for number, answer in event.answers.items()
    ]
    return json.dumps({"term": event.term, "answers": answers}).encode()


def decode_event(data: bytes) -> CallEvent:
    """Return the event. Raises ValueError, TypeError, KeyError or RecursionError for anything else."""
    values = json.loads(data)
    kind = Reward if values["term"] == TASK_REWARD else RewardPart
    return CallEvent(values["term"], {number: kind(**answer) for number, answer in values["answers"]})


# ---------------------------------------------------------------- the computation


def run_call(task: Any, call: RewardCall, log_error: ErrorLog) -> Iterator[CallEvent]:
    """Compute a call and yield its events. One term follows the other, then the asynchronous ones run together.

    A term that raises is computed again for each group, so that other groups get answers; siblings stay together, since
    a function may compare them. All of that counts towards the term's time limit.
    """
    if not call.pairs:
        return
    concurrent = [term for term in call.limits if term != TASK_REWARD and _is_async_term(task, term)]
    for term in call.limits:
        if term not in concurrent:
            yield CallEvent(term, {})
            yield from _run_term(task, term, call, log_error)
    yield from (CallEvent(term, {}) for term in concurrent)
    yield from _run_async_terms(task, concurrent, call, log_error)


def _run_term(task: Any, term: int, call: RewardCall, log_error: ErrorLog) -> Iterator[CallEvent]:
    deadline = time.monotonic() + call.limits[term]
    waiting = deque([call.pairs])
    while waiting:
        pairs = waiting.popleft()
        compute = partial(_compute_answers, task, term, list(pairs.values()), call.state)
        is_late = time.monotonic() >= deadline
        answers, error = ([], _make_timeout_error(term, call)) if is_late else call_user_code(compute)
        if error is not None and _may_be_group_error(error, pairs):
            waiting += split_into_groups(pairs)
            continue
        if error is not None:
            answers = _make_failures(term, error, len(pairs), log_error)
        # Each group's answers count, even if the next group takes too long.
        yield CallEvent(term, dict(zip(pairs, answers, strict=True)))


def _compute_answers(task: Any, term: int, pairs: Sequence[PromptCompletion], state: TrainerState) -> list[Answer]:
    if term != TASK_REWARD:
        return [validate_answer(part) for part in compute_term_parts(task.rewards[term], pairs, state)]
    if not has_batch_rewards(task):
        return [validate_answer(task.reward(prompt, completion)) for prompt, completion in pairs]
    prompts, completions = zip(*pairs, strict=True)
    rewards = list(task.rewards(list(prompts), list(completions)))
    if len(rewards) != len(pairs):
        raise InvalidResultError(
            f"the task returned {len(rewards)} rewards for {len(pairs)} completions: return one reward per completion"
        )
    return [validate_answer(reward) for reward in rewards]


def _run_async_terms(task: Any, terms: Sequence[int], call: RewardCall, log_error: ErrorLog) -> Iterator[CallEvent]:
    running = [
        functions.submit_coroutine(_run_async_term(term, task.rewards[term].name, call, log_error)) for term in terms
    ]
    try:
        for future in as_completed(running):
            yield future.result()
    finally:
        for future in running:  # those that an interrupt has left
            future.cancel()


async def _run_async_term(term: int, spec: str, call: RewardCall, log_error: ErrorLog) -> CallEvent:
    """Return the answers of an asynchronous function as `_run_term` does, all of it within the term's time limit."""
    deadline = asyncio.get_running_loop().time() + call.limits[term]

    async def attempt(pairs: NumberedPairs, may_split: bool = False) -> list[Answer]:
        clock = asyncio.timeout_at(deadline)
        try:
            async with clock:
                parts = await functions.call_async_function(spec, list(pairs.values()), call.state)
                return [validate_answer(part) for part in parts]
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            this_task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and this_task and this_task.cancelling():
                raise
            raised = _make_timeout_error(term, call) if clock.expired() else error
        if not (may_split and _may_be_group_error(raised, pairs)):
            return _make_failures(term, raised, len(pairs), log_error)
        return [answer for part in await asyncio.gather(*map(attempt, split_into_groups(pairs))) for answer in part]

    return CallEvent(term, dict(zip(call.pairs, await attempt(call.pairs, may_split=True), strict=True)))


def merge_answers(answered: Iterable[tuple[int, Mapping[int, Answer]]]) -> dict[int, dict[int, Answer]]:
    """Return the answers of each term by the numbers of their completions."""
    merged: defaultdict[int, dict[int, Answer]] = defaultdict(dict)
    for term, answers in answered:
        merged[term] |= answers
    return merged


def _is_async_term(task: Any, term: int) -> bool:
    spec = task.rewards[term].name
    return is_function_term(spec) and functions.is_async_function(spec)


def split_into_groups(pairs: NumberedPairs) -> list[NumberedPairs]:
    return [dict(group) for _, group in groupby(pairs.items(), key=lambda numbered: numbered[1][0].id)]


def _may_be_group_error(error: BaseException, pairs: NumberedPairs) -> bool:
    """Return whether an error may be due to one of several groups. A wrong number of answers is not."""
    return len(split_into_groups(pairs)) > 1 and not isinstance(error, InvalidResultError)


def _make_timeout_error(term: int, call: RewardCall) -> InvalidResultError:
    return InvalidResultError(f"no reward within {call.limits[term]:g} s")


def _make_failures(term: int, error: BaseException, count: int, log_error: ErrorLog) -> list[Answer]:
    return [make_failure(term, log_error(error))] * count

"""The computation of rewards, with whatever they raise as an answer: the same in a worker process and in this one."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from functools import partial
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from pellucid.rewards import functions
from pellucid.rewards.functions import TrainerState
from pellucid.rewards.parts import (
    TASK_REWARD,
    Answer,
    PromptCompletion,
    decode_answer,
    encode_answer,
    make_failure,
    validate_answer,
)
from pellucid.rewards.terms import compute_term_parts, get_reward_terms, is_function_term
from pellucid.sandbox.values import InvalidResultError, describe_error
from pellucid.sandbox.worker import (
    ErrorLogger,
    exit_forked_copies,
    log_error,
    receive_request,
    start_watchdog,
    stop_watchdog,
)
from pellucid.types import has_batch_rewards
from pellucid.utils.plugins import load_function


class RewardCall(NamedTuple):
    """What is to be computed: some terms of a task's reward, for some completions."""

    limits: Mapping[int, float | None]
    """The terms, by their indices in task.rewards or TASK_REWARD, each with its time limit in seconds; None is none."""
    pairs: Sequence[PromptCompletion]
    state: TrainerState
    is_batch: bool = True
    """Whether the call is about many completions, which terms may compare."""


class TermsStarted(NamedTuple):
    """These terms are computed from now on."""

    terms: list[int]


class TermAnswered(NamedTuple):
    """A term has answers: all of them if it is done, else the next ones, for the completions that had none yet."""

    term: int
    answers: list[Answer]
    is_done: bool


CallEvent = TermsStarted | TermAnswered


# ---------------------------------------------------------------- the worker process


def load_task(task: bytes) -> Callable[[Connection], None]:
    """Return what serves calls of a pickled task. The files of its functions are imported before a call is timed."""
    loaded = pickle.loads(task)
    for term in get_reward_terms(loaded):
        if is_function_term(term.name):
            load_function(term.name, "reward")
    return partial(_serve_calls, loaded)


def _serve_calls(task: Any, connection: Connection) -> None:
    """Answer calls until the parent closes its end of the connection."""
    while True:
        call: RewardCall
        groups: list[tuple[bytes, int]]
        call, groups = receive_request(connection)
        pairs, errors = _unpickle_groups(groups)
        for event in run_call(task, call._replace(pairs=pairs), log_error):
            if isinstance(event, TermsStarted):
                start_watchdog(max(limit or 0.0 for limit in call.limits.values()))
            elif errors:
                if not event.is_done:
                    continue  # its answers are not those of the first completions: some could not be read
                event = event._replace(answers=insert_failures(event.term, event.answers, errors))  # noqa: PLW2901
            connection.send_bytes(_encode_event(event))
        stop_watchdog()


def _unpickle_groups(groups: Sequence[tuple[bytes, int]]) -> tuple[list[PromptCompletion], dict[int, str]]:
    """Return the completions of pickled groups, and the errors of those that cannot be read here, by their indices.

    groups: a pickled prompt with its completions, and how many these are.
    """
    pairs: list[PromptCompletion] = []
    errors: dict[int, str] = {}
    for data, count in groups:
        try:
            prompt, completions = pickle.loads(data)
        except BaseException as error:  # noqa: BLE001 - whatever code of the user's raises is an answer
            first = len(pairs) + len(errors)
            description = f"it cannot be read in another process: {describe_error(error)}"
            errors |= dict.fromkeys(range(first, first + count), description)
        else:
            pairs += [(prompt, completion) for completion in completions]
    return pairs, errors


def insert_failures(term: int, answers: Sequence[Answer], errors: Mapping[int, str]) -> list[Answer]:
    """Return the answers with failures in between, at these indices of the result."""
    others = iter(answers)
    count = len(answers) + len(errors)
    return [make_failure(term, errors[i]) if i in errors else next(others) for i in range(count)]


def _encode_event(event: CallEvent) -> bytes:
    """Return an event as JSON, which its receiver can read without running code of the user's."""
    if isinstance(event, TermsStarted):
        return json.dumps({"started": event.terms}).encode()
    answers = [encode_answer(answer) for answer in event.answers]
    return json.dumps({"term": event.term, "answers": answers, "is_done": event.is_done}).encode()


def decode_event(data: bytes) -> CallEvent:
    """Return the event. Raises ValueError, TypeError, KeyError or RecursionError for anything else."""
    values = json.loads(data)
    if "started" in values:
        return TermsStarted(values["started"])
    term = values["term"]
    return TermAnswered(term, [decode_answer(term, answer) for answer in values["answers"]], values["is_done"])


# ---------------------------------------------------------------- the computation


def run_call(task: Any, call: RewardCall, log_error: ErrorLogger) -> Iterator[CallEvent]:
    """Compute a call and yield its events. One term follows the other, then the asynchronous ones run together.

    A term that raises is computed again for each group, so that the others get answers; siblings stay together, since a
    function may compare them. All of that counts towards the one time limit of the term.
    """
    if not call.pairs:
        yield from (TermAnswered(term, [], is_done=True) for term in call.limits)
        return
    concurrent = [term for term in call.limits if term != TASK_REWARD and _is_async_term(task, term)]
    for term in call.limits:
        if term not in concurrent:
            yield from _run_term(task, term, call, log_error)
    if concurrent:
        yield TermsStarted(concurrent)
        yield from _run_async_terms(task, concurrent, call, log_error)


def _run_term(task: Any, term: int, call: RewardCall, log_error: ErrorLogger) -> Iterator[CallEvent]:
    answers: list[Answer] = []
    waiting = deque([call.pairs])
    limit = call.limits[term]
    yield TermsStarted([term])
    deadline = time.monotonic() + limit if limit else math.inf
    while waiting:
        pairs = waiting.popleft()
        if time.monotonic() < deadline:
            outcome = _try_term(task, term, pairs, call.state)
        else:
            outcome = InvalidResultError(f"no reward within {limit:g} s")
        if isinstance(outcome, BaseException) and may_be_group_error(outcome, pairs):
            waiting += split_into_groups(pairs)
            continue
        if isinstance(outcome, BaseException):
            outcome = _make_failures(term, outcome, len(pairs), log_error)
        answers += outcome
        if waiting:  # these answers count even if the next group takes too long
            yield TermAnswered(term, outcome, is_done=False)
    yield TermAnswered(term, answers, is_done=True)


def _try_term(
    task: Any, term: int, pairs: Sequence[PromptCompletion], state: TrainerState
) -> list[Answer] | BaseException:
    """Return the answers of a term, or what it raised."""
    try:
        with exit_forked_copies():
            return _compute_answers(task, term, pairs, state)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever code of the user's raises is an answer
        return error


def _compute_answers(task: Any, term: int, pairs: Sequence[PromptCompletion], state: TrainerState) -> list[Answer]:
    if term != TASK_REWARD:
        return [validate_answer(part) for part in compute_term_parts(task.rewards[term], pairs, state)]
    if not has_batch_rewards(task):
        return [validate_answer(task.reward(prompt, completion)) for prompt, completion in pairs]
    prompts, completions = zip(*pairs, strict=True)
    rewards = list(task.rewards(list(prompts), list(completions)))
    if len(rewards) != len(pairs):
        raise InvalidResultError(f"the task returned {len(rewards)} rewards for {len(pairs)} completions: one for each")
    return [validate_answer(reward) for reward in rewards]


def _run_async_terms(task: Any, terms: Sequence[int], call: RewardCall, log_error: ErrorLogger) -> Iterator[CallEvent]:
    running = {
        functions.submit_coroutine(run_async_term(term, task.rewards[term].name, call, log_error)): term
        for term in terms
    }
    try:
        for future in as_completed(running):
            yield TermAnswered(running[future], future.result(), is_done=True)
    finally:
        for future in running:  # those that an interrupt has left
            future.cancel()


async def run_async_term(term: int, spec: str, call: RewardCall, log_error: ErrorLogger) -> list[Answer]:
    """Return the answers of an asynchronous function as `run_term` does, all of it within the term's time limit."""
    limit = call.limits[term]
    deadline = None if limit is None else asyncio.get_running_loop().time() + limit

    async def attempt(pairs: Sequence[PromptCompletion], may_split: bool = False) -> list[Answer]:
        clock = asyncio.timeout_at(deadline)
        try:
            async with clock:
                return [validate_answer(part) for part in await functions.call_async_function(spec, pairs, call.state)]
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            this_task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and this_task and this_task.cancelling():
                raise
            raised = InvalidResultError(f"no reward within {limit:g} s") if clock.expired() else error
        if not (may_split and may_be_group_error(raised, pairs)):
            return _make_failures(term, raised, len(pairs), log_error)
        return [answer for part in await asyncio.gather(*map(attempt, split_into_groups(pairs))) for answer in part]

    return await attempt(call.pairs, may_split=True)


def _is_async_term(task: Any, term: int) -> bool:
    spec = task.rewards[term].name
    return is_function_term(spec) and functions.is_async_function(spec)


def split_into_groups(pairs: Sequence[PromptCompletion]) -> list[list[PromptCompletion]]:
    return [list(group) for _, group in groupby(pairs, key=lambda pair: pair[0].id)]


def may_be_group_error(error: BaseException, pairs: Sequence[PromptCompletion]) -> bool:
    """Return whether an error may be due to one of several groups. A wrong number of answers is not."""
    return len(split_into_groups(pairs)) > 1 and not isinstance(error, InvalidResultError)


def _make_failures(term: int, error: BaseException, count: int, log_error: ErrorLogger) -> list[Answer]:
    description = describe_error(error)
    if not isinstance(error, InvalidResultError):
        log_error(description, error)
    return [make_failure(term, description)] * count

"""Calls of rewards, with whatever they raise as an answer: the same in a reward process and in this one."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from itertools import groupby
from typing import Any, NamedTuple

from pellucid.rewards import functions
from pellucid.rewards.functions import (
    InvalidRewardError,
    PromptCompletion,
    RewardPart,
    TrainerState,
    describe_error,
    validate_part,
    validate_reward,
)
from pellucid.rewards.terms import compute_term_parts, is_function_term
from pellucid.types import has_batch_rewards
from pellucid.utils.files import exit_if_forked

TASK_REWARD = -1
"""Stands for the reward of a task that has no terms."""
AnswerFields = dict[str, Any]
"""The fields of a Part, or for OWN of a Reward: JSON values."""
ErrorLogger = Callable[[str, BaseException], None]
"""Takes what was said of an error, and the error."""


class RewardCall(NamedTuple):
    """What is to be computed: some terms of a task's reward, of some completions."""

    terms: tuple[int, ...]
    """Their places in task.rewards, or OWN."""
    pairs: Sequence[PromptCompletion]
    state: TrainerState
    limits: tuple[float | None, ...]
    """The time limit of each term in seconds; None is no limit."""
    is_batch: bool = True
    """Whether it is about many completions, which terms may compare."""


class TermsStarted(NamedTuple):
    """These terms are computed from now on."""

    terms: list[int]


class TermProgress(NamedTuple):
    """The first of the completions of a call have these answers of a term, after those that it had already."""

    term: int
    answers: list[AnswerFields]
    more: bool = True


class TermFinished(NamedTuple):
    """A term has an answer for each completion of the call."""

    term: int
    answers: list[AnswerFields]


CallEvent = TermsStarted | TermProgress | TermFinished


def run_call(task: Any, call: RewardCall, log_error: ErrorLogger) -> Iterator[CallEvent]:
    """Compute a call and yield its events. One term follows the other, then the asynchronous ones run together.

    A term that raises begins anew for each group, so that the others have their answers; siblings stay together, since
    a function may compare them. All of that counts towards the one time limit of the term.
    """
    if not call.pairs:
        yield from (TermFinished(term, []) for term in call.terms)
        return
    later = [term for term in call.terms if term != TASK_REWARD and is_async_term(task, term)]
    for term in call.terms:
        if term not in later:
            yield from run_term(task, term, call, log_error)
    if later:
        yield TermsStarted(later)
        yield from run_async_terms(task, later, call, log_error)


def run_term(task: Any, term: int, call: RewardCall, log_error: ErrorLogger) -> Iterator[CallEvent]:
    found: list[AnswerFields] = []
    waiting = deque([call.pairs])
    limit = dict(zip(call.terms, call.limits, strict=True))[term]
    yield TermsStarted([term])
    until = time.monotonic() + limit if limit else math.inf
    while waiting:
        pairs = waiting.popleft()
        if time.monotonic() < until:
            outcome = try_term(task, term, pairs, call.state)
        else:
            outcome = InvalidRewardError(f"no reward within {limit:g} s")
        if not isinstance(outcome, BaseException):
            answers = outcome
        elif may_be_group_error(outcome, pairs):
            waiting += split_into_groups(pairs)
            continue
        else:
            answers = build_failures(outcome, len(pairs), log_error)
        found += answers
        if waiting:  # what there is counts if the next group takes too long
            yield TermProgress(term, answers)
    yield TermFinished(term, found)


def run_async_terms(task: Any, terms: Sequence[int], call: RewardCall, log_error: ErrorLogger) -> Iterator[CallEvent]:
    limits = dict(zip(call.terms, call.limits, strict=True))
    running = {
        functions.submit_coroutine(run_async_term(task.rewards[term].name, call, limits[term], log_error)): term
        for term in terms
    }
    try:
        for future in as_completed(running):
            yield TermFinished(running[future], future.result())
    finally:
        for future in running:  # those that an interrupt has left
            future.cancel()


def try_term(
    task: Any, term: int, pairs: Sequence[PromptCompletion], state: TrainerState
) -> list[AnswerFields] | BaseException:
    """Return the answers of a term, or what it raised."""
    owner = os.getpid()
    try:
        answers = compute_answers(task, term, pairs, state)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever code of the user's raises is an answer
        exit_if_forked(owner, error)
        return error
    exit_if_forked(owner)
    return answers


async def run_async_term(
    spec: str, call: RewardCall, limit: float | None, log_error: ErrorLogger
) -> list[AnswerFields]:
    """Return the answers of an asynchronous function as `run` does, all of it within `limit` seconds."""
    end = None if limit is None else asyncio.get_running_loop().time() + limit

    async def attempt(pairs: Sequence[PromptCompletion], again: bool = False) -> list[AnswerFields]:
        clock = asyncio.timeout_at(end)
        try:
            async with clock:
                return [validate_answer(part) for part in await functions.call_async_function(spec, pairs, call.state)]
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            own = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and own and own.cancelling():
                raise
            raised = InvalidRewardError(f"no reward within {limit:g} s") if clock.expired() else error
        if not (again and may_be_group_error(raised, pairs)):
            return build_failures(raised, len(pairs), log_error)
        return [answer for part in await asyncio.gather(*map(attempt, split_into_groups(pairs))) for answer in part]

    return await attempt(call.pairs, again=True)


def insert_errors(answers: Sequence[AnswerFields], errors: Mapping[int, str]) -> list[AnswerFields]:
    """Return the answers with those errors in between, at their places in the whole."""
    others = iter(answers)
    n = len(answers) + len(errors)
    return [{"error": errors[place]} if place in errors else next(others) for place in range(n)]


def split_into_groups(pairs: Sequence[PromptCompletion]) -> list[list[PromptCompletion]]:
    return [list(group) for _, group in groupby(pairs, key=lambda pair: pair[0].id)]


def may_be_group_error(error: BaseException, pairs: Sequence[PromptCompletion]) -> bool:
    """Return whether an error may be due to one of several groups. A wrong number of answers is not."""
    return len(split_into_groups(pairs)) > 1 and not isinstance(error, InvalidRewardError)


def compute_answers(task: Any, term: int, pairs: Sequence[PromptCompletion], state: TrainerState) -> list[AnswerFields]:
    if term != TASK_REWARD:
        return [validate_answer(part) for part in compute_term_parts(task.rewards[term], pairs, state)]
    if not has_batch_rewards(task):
        return [validate_answer(task.reward(prompt, completion)) for prompt, completion in pairs]
    prompts, completions = zip(*pairs, strict=True)
    rewards = list(task.rewards(list(prompts), list(completions)))
    if len(rewards) != len(pairs):
        raise InvalidRewardError(f"the task returned {len(rewards)} rewards for {len(pairs)} completions: one for each")
    return [validate_answer(reward) for reward in rewards]


def validate_answer(answer: Any) -> AnswerFields:
    """Return a Part or a Reward as plain data; what is no valid one, as an error of this completion alone."""
    try:
        return validate_part(answer) if isinstance(answer, RewardPart) else validate_reward(answer)
    except InvalidRewardError as error:
        return {"error": str(error)}


def build_failures(error: BaseException, n: int, log_error: ErrorLogger) -> list[AnswerFields]:
    told = describe_error(error)
    if not isinstance(error, InvalidRewardError):
        log_error(told, error)
    return [{"error": told} for _ in range(n)]


def is_async_term(task: Any, term: int) -> bool:
    spec = task.rewards[term].name
    return is_function_term(spec) and functions.is_async_function(spec)

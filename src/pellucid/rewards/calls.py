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

from pellucid.machine.copies import end_copy
from pellucid.protocols import grades_together
from pellucid.rewards import functions
from pellucid.rewards.parts import Pair, Part
from pellucid.rewards.plain import NoRewardError, described, of_part, of_reward
from pellucid.rewards.terms import is_function, part_of
from pellucid.rewards.trainer_state import TrainerState

OWN = -1
"""Stands for the reward of a task that has no terms."""
Answer = dict[str, Any]
"""The fields of a Part, or for OWN of a Reward: JSON values."""
Note = Callable[[str, BaseException], None]
"""Takes what was said of an error, and the error."""


class Call(NamedTuple):
    """What is to be computed: some terms of a task's reward, of some completions."""

    terms: tuple[int, ...]
    """Their places in task.rewards, or OWN."""
    pairs: Sequence[Pair]
    state: TrainerState
    limits: tuple[float | None, ...]
    """The time limit of each term in seconds; None is no limit."""
    is_batch: bool = True
    """Whether it is about many completions, which terms may compare."""


class Began(NamedTuple):
    """These terms are computed from now on."""

    terms: list[int]


class Partly(NamedTuple):
    """The first of the completions of a call have these answers of a term, after those that it had already."""

    term: int
    answers: list[Answer]
    more: bool = True


class Answered(NamedTuple):
    """A term has an answer for each completion of the call."""

    term: int
    answers: list[Answer]


Event = Began | Partly | Answered


def run(task: Any, call: Call, log_error: Note) -> Iterator[Event]:
    """Compute a call and yield its events. One term follows the other, then the asynchronous ones run together.

    A term that raises begins anew for each group, so that the others have their answers; siblings stay together, since
    a function may compare them. All of that counts towards the one time limit of the term.
    """
    if not call.pairs:
        yield from (Answered(term, []) for term in call.terms)
        return
    later = [term for term in call.terms if term != OWN and is_async(task, term)]
    for term in call.terms:
        if term not in later:
            yield from in_turn(task, term, call, log_error)
    if later:
        yield Began(later)
        yield from awaited(task, later, call, log_error)


def in_turn(task: Any, term: int, call: Call, log_error: Note) -> Iterator[Event]:
    found: list[Answer] = []
    waiting = deque([call.pairs])
    limit = dict(zip(call.terms, call.limits, strict=True))[term]
    yield Began([term])
    until = time.monotonic() + limit if limit else math.inf
    while waiting:
        pairs = waiting.popleft()
        if time.monotonic() < until:
            outcome = attempted(task, term, pairs, call.state)
        else:
            outcome = NoRewardError(f"no reward within {limit:g} s")
        if not isinstance(outcome, BaseException):
            answers = outcome
        elif may_be_one_group_s(outcome, pairs):
            waiting += groups_of(pairs)
            continue
        else:
            answers = failures(outcome, len(pairs), log_error)
        found += answers
        if waiting:  # what there is counts if the next group takes too long
            yield Partly(term, answers)
    yield Answered(term, found)


def awaited(task: Any, terms: Sequence[int], call: Call, log_error: Note) -> Iterator[Event]:
    limits = dict(zip(call.terms, call.limits, strict=True))
    running = {
        functions.on_loop(tried_within(task.rewards[term].name, call, limits[term], log_error)): term for term in terms
    }
    try:
        for future in as_completed(running):
            yield Answered(running[future], future.result())
    finally:
        for future in running:  # those that an interrupt has left
            future.cancel()


def attempted(task: Any, term: int, pairs: Sequence[Pair], state: TrainerState) -> list[Answer] | BaseException:
    """Return the answers of a term, or what it raised."""
    owner = os.getpid()
    try:
        answers = answers_of(task, term, pairs, state)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever code of the user's raises is an answer
        end_copy(owner, error)
        return error
    end_copy(owner)
    return answers


async def tried_within(spec: str, call: Call, limit: float | None, log_error: Note) -> list[Answer]:
    """Return the answers of an asynchronous function as `run` does, all of it within `limit` seconds."""
    end = None if limit is None else asyncio.get_running_loop().time() + limit

    async def attempt(pairs: Sequence[Pair], again: bool = False) -> list[Answer]:
        clock = asyncio.timeout_at(end)
        try:
            async with clock:
                return [valid(part) for part in await functions.awaited_parts_of(spec, pairs, call.state)]
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            own = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and own and own.cancelling():
                raise
            raised = NoRewardError(f"no reward within {limit:g} s") if clock.expired() else error
        if not (again and may_be_one_group_s(raised, pairs)):
            return failures(raised, len(pairs), log_error)
        return [answer for part in await asyncio.gather(*map(attempt, groups_of(pairs))) for answer in part]

    return await attempt(call.pairs, again=True)


def with_errors(answers: Sequence[Answer], errors: Mapping[int, str]) -> list[Answer]:
    """Return the answers with those errors in between, at their places in the whole."""
    others = iter(answers)
    n = len(answers) + len(errors)
    return [{"error": errors[place]} if place in errors else next(others) for place in range(n)]


def groups_of(pairs: Sequence[Pair]) -> list[list[Pair]]:
    return [list(group) for _, group in groupby(pairs, key=lambda pair: pair[0].id)]


def may_be_one_group_s(error: BaseException, pairs: Sequence[Pair]) -> bool:
    """Return whether an error may be due to one of several groups. A wrong number of answers is not."""
    return len(groups_of(pairs)) > 1 and not isinstance(error, NoRewardError)


def answers_of(task: Any, term: int, pairs: Sequence[Pair], state: TrainerState) -> list[Answer]:
    if term != OWN:
        return [valid(part) for part in part_of(task.rewards[term], pairs, state)]
    if not grades_together(task):
        return [valid(task.reward(prompt, completion)) for prompt, completion in pairs]
    prompts, completions = zip(*pairs, strict=True)
    rewards = list(task.rewards(list(prompts), list(completions)))
    if len(rewards) != len(pairs):
        raise NoRewardError(f"the task returned {len(rewards)} rewards for {len(pairs)} completions: one for each")
    return [valid(reward) for reward in rewards]


def valid(answer: Any) -> Answer:
    """Return a Part or a Reward as plain data; what is no valid one, as an error of this completion alone."""
    try:
        return of_part(answer) if isinstance(answer, Part) else of_reward(answer)
    except NoRewardError as error:
        return {"error": str(error)}


def failures(error: BaseException, n: int, log_error: Note) -> list[Answer]:
    told = described(error)
    if not isinstance(error, NoRewardError):
        log_error(told, error)
    return [{"error": told} for _ in range(n)]


def is_async(task: Any, term: int) -> bool:
    spec = task.rewards[term].name
    return is_function(spec) and functions.is_async(spec)

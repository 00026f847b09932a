"""Calls of rewards, with whatever they raise as an answer: the same in a reward process and in this one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from itertools import groupby
from typing import Any, NamedTuple

from pellucid.protocols import grades_together
from pellucid.rewards import functions
from pellucid.rewards.parts import Pair, Part
from pellucid.rewards.plain import NoRewardError, described, of_part, of_reward
from pellucid.rewards.terms import is_function, part_of
from pellucid.types import Progress

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
    progress: Progress
    limits: tuple[float, ...]
    """The time limit of each term in seconds."""
    together: bool = True
    """Whether it is about many completions, which terms may compare."""


class Event(NamedTuple):
    """What happens to a call: these terms begin; or, with answers, this term has one for each completion."""

    terms: list[int]
    answers: list[Answer] | None = None


def run(task: Any, call: Call, note: Note) -> Iterator[Event]:
    """Compute a call and yield its events. One term follows the other, then the asynchronous ones run together."""
    later = [term for term in call.terms if term != OWN and is_async(task, term)]
    for term in call.terms:
        if term not in later:
            yield Event([term])
            yield Event([term], tried(task, term, call.pairs, call.progress, note))
    if later:
        yield Event(later)
        yield from awaited(task, later, call, note)


def awaited(task: Any, terms: Sequence[int], call: Call, note: Note) -> Iterator[Event]:
    limits = dict(zip(call.terms, call.limits, strict=True))
    running = {
        functions.on_loop(tried_within(task.rewards[term].name, call.pairs, call.progress, limits[term], note)): term
        for term in terms
    }
    try:
        for future in as_completed(running):
            yield Event([running[future]], future.result())
    finally:
        for future in running:  # those that an interrupt has left
            future.cancel()


def tried(task: Any, term: int, pairs: Sequence[Pair], progress: Progress, note: Note) -> list[Answer]:
    """Return the answers of a term. Where it raises, it is asked again for each group, so that the others have theirs.

    Siblings stay together, since a function may compare them.
    """
    try:
        return answers_of(task, term, pairs, progress)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever code of the user's raises is an answer
        raised = error
    groups = worth_asking_again(pairs, raised)
    if not groups:
        return failures(raised, len(pairs), note)
    return [answer for group in groups for answer in tried(task, term, group, progress, note)]


async def tried_within(spec: str, pairs: Sequence[Pair], progress: Progress, limit: float, note: Note) -> list[Answer]:
    """Return the answers of an asynchronous function as `tried` does, within `limit` seconds."""
    clock = asyncio.timeout(limit)
    try:
        async with clock:
            return [valid(part) for part in await functions.awaitable_parts_of(spec, pairs, progress)]
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:  # noqa: BLE001 - as above
        raised = NoRewardError(f"no reward within {limit:g} s") if clock.expired() else error
    groups = worth_asking_again(pairs, raised)
    if not groups:
        return failures(raised, len(pairs), note)
    again = await asyncio.gather(*(tried_within(spec, group, progress, limit, note) for group in groups))
    return [answer for answers in again for answer in answers]


def worth_asking_again(pairs: Sequence[Pair], error: BaseException) -> list[list[Pair]]:
    """Return the groups, where there are several and the error may be that of one of them alone; else nothing."""
    groups = [list(group) for _, group in groupby(pairs, key=lambda pair: pair[0].id)]
    return groups if len(groups) > 1 and not isinstance(error, NoRewardError) else []


def answers_of(task: Any, term: int, pairs: Sequence[Pair], progress: Progress) -> list[Answer]:
    if term != OWN:
        return [valid(part) for part in part_of(task.rewards[term], pairs, progress)]
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


def failures(error: BaseException, n: int, note: Note) -> list[Answer]:
    told = described(error)
    if not isinstance(error, NoRewardError):
        note(told, error)
    return [{"error": told} for _ in range(n)]


def is_async(task: Any, term: int) -> bool:
    spec = task.rewards[term].name
    return is_function(spec) and functions.is_async(spec)

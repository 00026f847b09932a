"""The terms of a reward. Each `[[task.rewards]]` table names one, from exact match to a function of the user's own.

`exact`, `numeric` and `math` compare the answer with the gold answer. The answer is the content of an
`<answer>` tag that ends the completion, otherwise what follows `</think>`, or the whole completion; if that contains a
`\\boxed{}`, the answer is the content of the last one.

A function of the user's own has TRL's signature and needs no change: `def reward(completions, **columns)`, plain or
`async`, returns one number for each completion, or None where it does not apply. It is called for one completion at a
time. Each of these keywords is a list of length 1: prompts, completions, completion_ids, and every column of the data
row except prompt, completion and completion_ids. As in TRL, prompts and completions are strings for a plain prompt, and
lists of messages for a conversation. TRL's trainer_state is None here, and log_extra and log_metric do nothing: to log
a value without training on it, make it a term of weight 0.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pellucid.machine.plugins import did_you_mean, function_of
from pellucid.rewards.answers import answered, last_number, only_number, tagged
from pellucid.rewards.formulas import math_verify, states_formula
from pellucid.rewards.settings import JudgeSettings, RewardModelSettings
from pellucid.types import Completion, Prompt

MODEL = "model:"
"""What the name of a term begins with that is a reward model: a folder or an id of the Hub follows."""
NOT_COLUMNS = ("prompt", "completion", "completion_ids")


@dataclass(frozen=True)
class RewardTerm:
    """One term of the weighted sum that is the reward.

    Example: RewardTerm("length", weight=0.1, limit=512); RewardTerm("rewards.py:brevity")
    """

    name: str
    """exact, numeric, math, tagged, regex, length, "path/to/file.py:function", or "model:FOLDER_OR_HUB_ID"."""
    weight: float = 1.0
    """The weight of the term in the sum; at 0 it is only logged."""
    pattern: str = ""
    """For `regex`: the reward is 1 where this pattern is found in the completion."""
    limit: int = 0
    """For `length`: the number of tokens at which the reward is -1."""
    judge: JudgeSettings | None = None
    """For `judge`: its table, `[task.rewards.judge]`."""
    reward_model: RewardModelSettings | None = None
    """For `model:FOLDER_OR_HUB_ID`: its table, `[task.rewards.reward_model]`; without one, its defaults."""

    def __post_init__(self) -> None:
        if self.name == MODEL:
            raise ValueError(f'reward "{MODEL}" names no model: write "{MODEL}FOLDER_OR_HUB_ID"')
        is_model = self.name.startswith(MODEL)
        if ":" in self.name and not is_model:
            function_of(self.name, "reward")
        elif not is_model and self.name not in TERMS:
            known = f'{", ".join(TERMS)}, your own as "path/to/file.py:function", or a "{MODEL}FOLDER_OR_HUB_ID"'
            raise ValueError(f'reward "{self.name}" is unknown{did_you_mean(self.name, TERMS)}; there are {known}')
        if bool(self.pattern) != (self.name == "regex"):
            raise ValueError(f'reward "{self.name}" has pattern = "{self.pattern}": regex needs one, no other has one')
        if (self.limit > 0) != (self.name == "length") or self.limit < 0:
            raise ValueError(
                f'reward "{self.name}" has limit = {self.limit}: length needs one above 0, no other has one'
            )
        if self.reward_model and not is_model:
            raise ValueError(f'reward "{self.name}" has a table reward_model: only "{MODEL}FOLDER_OR_HUB_ID" has one')
        compiled(self.pattern)
        if self.name == "math":
            math_verify()


def grade(term: RewardTerm, prompt: Prompt, completion: Completion) -> float | None:
    """Return the value of a term before weighting; None where it does not apply to this prompt."""
    if ":" in term.name:
        return call_user_function(term.name, prompt, completion)
    return TERMS[term.name](term, prompt, completion)


TERMS: dict[str, Callable[[RewardTerm, Prompt, Completion], float | None]] = {
    "exact": lambda _, prompt, completion: exact(completion.text, prompt.answer),
    "numeric": lambda _, prompt, completion: numeric(completion.text, prompt.answer),
    "math": lambda _, prompt, completion: math(completion.text, prompt.answer),
    "tagged": lambda _term, _prompt, completion: has_tags(completion.text),
    "regex": lambda term, _, completion: regex(completion.text, term.pattern),
    "length": lambda term, _, completion: length(completion.length, term.limit),
}
COMPARE_WITH_GOLD = ("exact", "numeric", "math")


def exact(text: str, gold: str) -> float:
    """Return 1 if the answers agree up to letter case and white space, else 0."""
    return float(folded(answered(text)) == folded(gold))


def numeric(text: str, gold: str) -> float:
    """Return 1 if the last number of the answer equals the gold answer (1,080 = 1080 = 1080.0), else 0."""
    found = last_number(answered(text))
    return float(found is not None and found == only_number(gold))


def math(text: str, gold: str) -> float | None:
    """Return 1 if the answer states the gold formula or words, else 0; None where the gold answer cannot be read."""
    stated = states_formula(text, gold)
    return None if stated is None else float(stated)


def has_tags(text: str) -> float:
    """Return 1 if the text is only `<think>...</think> <answer>...</answer>`, each tag once, else 0."""
    return float(tagged(text) is not None)


def regex(text: str, pattern: str) -> float:
    """Return 1 if the pattern is found in the text, else 0."""
    return float(compiled(pattern).search(text) is not None)


def length(tokens: int, limit: int) -> float:
    """Return minus the share of `limit` that was used, at least -1."""
    return max(-1.0, -tokens / limit)


def folded(text: str) -> str:
    return " ".join(text.split()).casefold()


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f'pattern = "{pattern}" is no regular expression: {error}') from error


def call_user_function(spec: str, prompt: Prompt, completion: Completion) -> float | None:
    columns = {name: [value] for name, value in prompt.columns.items() if name not in NOT_COLUMNS}
    rewards = function_of(spec, "reward")(**(columns | trl_arguments(prompt, completion)))
    if inspect.iscoroutine(rewards):
        rewards = awaited(rewards)
    if len(rewards) != 1:
        raise ValueError(f"{spec} returned {len(rewards)} rewards for 1 completion")
    return None if rewards[0] is None else float(rewards[0])


def awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return its result. The thread of a notebook has a running event loop: there another thread waits for it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as beside:
        return beside.submit(asyncio.run, coroutine).result()


def trl_arguments(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    if isinstance(prompt.text, str):
        texts = {"prompts": [prompt.text], "completions": [completion.text]}
    else:
        messages = [dict(message) for message in prompt.text]
        texts = {"prompts": [messages], "completions": [[{"role": "assistant", "content": completion.text}]]}
    others = {"trainer_state": None, "log_extra": drop, "log_metric": drop}
    return texts | {"completion_ids": [list(completion.token_ids)]} | others


def drop(name: str, value: Any) -> None:
    """Do nothing. Passed in place of TRL's loggers."""


def labels(terms: Sequence[RewardTerm]) -> list[str]:
    """Return the names under which terms are logged. A function and a model go by their own name, without a folder;
    repeated names are numbered.

    Example: labels of regex, regex and rewards.py:brevity == ["regex", "regex-2", "brevity"]
    """
    names = [Path(term.name.rpartition(":")[2]).name for term in terms]
    counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [name if count == 1 else f"{name}-{count}" for name, count in zip(names, counts, strict=True)]

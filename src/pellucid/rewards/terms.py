"""The terms of a reward. Each `[[task.rewards]]` table names one, from exact match to a user-defined function.

`exact`, `numeric` and `math` compare the answer with the gold answers, any of which is right. answers.py extracts the
answer: the content of an `<answer>` tag that ends the completion, otherwise what follows `</think>`, or the whole
completion; if that contains a box, the answer is the content of the last one. User-defined functions are called in
functions.py, a judge in judge.py, and a reward model in reward_model.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import inf
from pathlib import Path
from typing import Any

from pellucid.rewards import functions
from pellucid.rewards.answers import (
    extract_answer,
    extract_gold_answer,
    extract_tagged_answer,
    find_last_number,
    parse_only_number,
)
from pellucid.rewards.functions import TrainerState
from pellucid.rewards.math import is_sentence, is_words, load_math_verify, states_formula, strip_answer_sentence
from pellucid.rewards.parts import PromptCompletion, RewardPart
from pellucid.rewards.settings import JudgeSettings, RewardModelSettings
from pellucid.types import Completion, Prompt
from pellucid.utils.plugins import did_you_mean, load_function

ENVIRONMENT_TERM = "environment"
"""The term whose value is the reward that the environment of a conversation gives."""
JUDGE_TERM = "judge"
"""The term that a judge computes."""
REWARD_MODEL_PREFIX = "model:"
"""The prefix of the name of a reward model."""


@dataclass(frozen=True)
class RewardTerm:
    """One term of the weighted sum that is the reward.

    Example: RewardTerm("length", weight=0.1, limit=512); RewardTerm("rewards.py:brevity")
    """

    name: str
    """exact, numeric, math, tagged, regex, length, environment, judge, "path/to/file.py:function", or
    "model:FOLDER_OR_HUB_ID"."""
    weight: float = 1.0
    """The weight of the term in the sum; at 0 it is only logged."""
    pattern: str = ""
    """For `regex`: the reward is 1 if this pattern is found in the completion."""
    limit: int = 0
    """For `length`: the number of tokens at which the reward is -1."""
    timeout: float = 0.0
    """For a function: seconds that it may take for all completions of a step; 0 is reward.step_timeout."""
    judge: JudgeSettings | None = None
    """For `judge`: the settings from the table `[task.rewards.judge]`."""
    reward_model: RewardModelSettings | None = None
    """For `model:FOLDER_OR_HUB_ID`: the settings from the table `[task.rewards.reward_model]`; None: the defaults."""

    def __post_init__(self) -> None:
        named, is_model = (*BUILTIN_TERMS, JUDGE_TERM), self.name.startswith(REWARD_MODEL_PREFIX)
        if is_function_term(self.name):
            load_function(self.name, "reward")
        elif self.name == REWARD_MODEL_PREFIX or not (self.name in named or is_model):
            others = f'"{REWARD_MODEL_PREFIX}FOLDER_OR_HUB_ID", or your own as "path/to/file.py:function"'
            known = f"{', '.join(named)}, {others}"
            raise ValueError(f'reward "{self.name}" is unknown{did_you_mean(self.name, named)}; there are {known}')
        if bool(self.pattern) != (self.name == "regex"):
            raise ValueError(
                f'reward "{self.name}" has pattern = "{self.pattern}": only regex takes one, and requires it'
            )
        if (self.limit > 0) != (self.name == "length") or self.limit < 0:
            raise ValueError(
                f'reward "{self.name}" has limit = {self.limit}: only length takes one, and requires it to be above 0'
            )
        if (self.judge is not None) != (self.name == JUDGE_TERM):
            raise ValueError(
                f'reward "{self.name}": only {JUDGE_TERM} takes a table [task.rewards.judge], and requires it'
            )
        if not 0 <= self.timeout < inf or (self.timeout and not is_function_term(self.name)):
            raise ValueError(f'reward "{self.name}" has timeout = {self.timeout}: a function may have one above 0')
        if self.reward_model and not is_model:
            raise ValueError(
                f'reward "{self.name}" has a table reward_model: only "{REWARD_MODEL_PREFIX}FOLDER_OR_HUB_ID" has one'
            )
        compile_pattern(self.pattern)
        if self.name == "math":
            load_math_verify()


def compute_term_parts(term: RewardTerm, pairs: Sequence[PromptCompletion], state: TrainerState) -> list[RewardPart]:
    """Return the parts of a term, one for each completion. Raises what the user's function raises.

    The terms of a judge or a reward model fail here, since GradedTask computes them in the process of the run.
    """
    if is_function_term(term.name):
        return functions.call_function(term.name, pairs, state)
    if term.name not in BUILTIN_TERMS:
        return [RewardPart(error="only GradedTask computes it, within a run") for _ in pairs]
    if term.name == ENVIRONMENT_TERM:
        outcomes = [completion.outcome for _, completion in pairs]
        return [RewardPart(outcome.reward, outcome.error) if outcome else RewardPart() for outcome in outcomes]
    return [RewardPart(BUILTIN_TERMS[term.name](term, prompt, completion)) for prompt, completion in pairs]


def get_reward_terms(task: Any) -> Sequence[RewardTerm]:
    """Return the terms whose weighted sum is the reward of a task with `combine_parts`; else nothing.

    If a subclass overrides `reward` of the class that defines `combine_parts`, its reward is not such a sum.
    """
    owner = next((cls for cls in type(task).__mro__ if callable(vars(cls).get("combine_parts"))), None)
    terms = getattr(task, "rewards", None)
    if owner is None or not isinstance(terms, tuple) or getattr(type(task), "reward", None) is not owner.reward:
        return ()
    return terms if all(isinstance(term, RewardTerm) for term in terms) else ()


def is_function_term(name: str) -> bool:
    """Return whether a term is a function of the user's own, by its name."""
    return ":" in name and not name.startswith(REWARD_MODEL_PREFIX)


def gives_degrees(name: str) -> bool:
    """Return whether a term may give values between right and wrong."""
    return is_batch_term(name) or name == ENVIRONMENT_TERM


def is_batch_term(name: str) -> bool:
    """Return whether a term grades all completions of a step in one call, so it can compare them."""
    return name not in BUILTIN_TERMS


BUILTIN_TERMS: dict[str, Callable[[RewardTerm, Prompt, Completion], float | None]] = {
    "exact": lambda _, prompt, completion: grade_best_gold(grade_exact, completion.full_text, prompt.gold_answers),
    "numeric": lambda _, prompt, completion: grade_best_gold(grade_numeric, completion.full_text, prompt.gold_answers),
    "math": lambda _, prompt, completion: grade_best_gold(grade_math, completion.full_text, prompt.gold_answers),
    "tagged": lambda _term, _prompt, completion: grade_tags(completion.full_text),
    "regex": lambda term, _, completion: grade_regex(completion.full_text, term.pattern),
    "length": lambda term, _, completion: grade_length(completion.length, term.limit),
    "environment": lambda _term, _prompt, completion: get_environment_reward(completion),
}


def grade_best_gold(grade: Callable[[str, str], float | None], text: str, golds: Sequence[str]) -> float | None:
    """Return the highest grade of a text over several gold answers; None if none of them can be read."""
    return max((value for gold in golds if (value := grade(text, gold)) is not None), default=None)


def get_environment_reward(completion: Completion) -> float | None:
    """Return the reward of a conversation as the environment's get_reward() gives it; else None."""
    return completion.outcome.reward if completion.outcome else None


def grade_exact(text: str, gold: str) -> float:
    """Return 1 if the answers agree up to letter case and white space, else 0."""
    return float(_fold_case(extract_answer(text)) == _fold_case(extract_gold_answer(gold)))


def grade_numeric(text: str, gold: str) -> float:
    """Return 1 if the last number of the answer equals the gold answer (1,080 = 1080 = 1080.0), else 0."""
    found = find_last_number(extract_answer(text))
    return float(found is not None and found == parse_only_number(extract_gold_answer(gold)))


def grade_math(text: str, gold: str) -> float | None:
    """Return 1 if the answer states the gold formula or words, else 0; None if the gold answer cannot be read."""
    stated = states_formula(text, gold)
    return None if stated is None else float(stated)


@lru_cache(maxsize=256)
def find_gold_fault(name: str, gold: str) -> str | None:
    """Return why a term cannot grade by a gold answer, as a clause that follows "the answer ...", or None.

    The term must read the gold answer, credit it in a box, and refuse another number if the gold answer is a number.

    Example: find_gold_fault("numeric", "1,080") is None; find_gold_fault("numeric", "seven")[:15] == "holds no number"
    """
    number = parse_only_number(extract_gold_answer(gold))
    if name == "numeric" and number is None:
        cut_out = "is not a single number: cut it out by answer_pattern, or"
        return f"{cut_out if re.search(r'[0-9]', gold) else 'holds no number:'} use the reward exact or math"
    grade, read = GOLD_GRADERS[name], strip_answer_sentence(extract_gold_answer(gold))
    if name == "math" and is_sentence(read) and not is_words(read):
        return "is a sentence, not an answer: cut the answer out by answer_pattern, or use the reward exact"
    credited = grade(f"\\boxed{{{extract_gold_answer(gold)}}}", gold)
    fault = ""
    if credited is None:
        fault = "cannot be read by the reward {}: correct it, or cut the answer out by answer_pattern"
    elif credited < 1 and name != "exact":  # exact compares any text, also text with braces that no box can hold
        fault = "is not credited by the reward {} where a completion repeats it in a box: correct it"
    elif number is not None and grade(f"\\boxed{{{number + 1}}}", gold):
        fault = "is credited by the reward {} for another number: correct it"
    return fault.format(name) or None


GOLD_GRADERS: dict[str, Callable[[str, str], float | None]] = {
    "exact": grade_exact,
    "numeric": grade_numeric,
    "math": grade_math,
}
"""The terms that compare an answer with the gold answer."""


def grade_tags(text: str) -> float:
    """Return 1 if the text is only `<think>...</think> <answer>...</answer>`, each tag once, else 0."""
    return float(extract_tagged_answer(text) is not None)


def grade_regex(text: str, pattern: str) -> float:
    """Return 1 if the pattern is found in the text, else 0."""
    return float(compile_pattern(pattern).search(text) is not None)


def grade_length(tokens: int, limit: int) -> float:
    """Return minus the share of `limit` that was used, at least -1."""
    return max(-1.0, -tokens / limit)


def _fold_case(text: str) -> str:
    return " ".join(text.split()).casefold()


@cache
def compile_pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f'pattern = "{pattern}" is not a valid regular expression: {error}') from error


def label_terms(terms: Sequence[RewardTerm]) -> list[str]:
    """Return the log name of each term: without its folder, and numbered if it repeats.

    Example: the labels of regex, regex and rewards.py:brevity are ["regex", "regex-2", "brevity"]
    """
    names = [Path(term.name.rpartition(":")[2]).name for term in terms]
    counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [name if count == 1 else f"{name}-{count}" for name, count in zip(names, counts, strict=True)]

"""Your own questions, from a file or a Hugging Face data set, with the columns and reward terms that you choose."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from statistics import fmean
from typing import Literal, NamedTuple

from pellucid.machine.braces import filled, placeholders
from pellucid.rewards.answers import gold_in
from pellucid.rewards.parts import Part
from pellucid.rewards.terms import (
    COMPARE_WITH_GOLD,
    RewardTerm,
    compiled,
    gives_degrees,
    gold_fault,
    labels,
    part_of,
)
from pellucid.rewards.trainer_state import state_of
from pellucid.tasks.columns import chat, column_text, column_value, has_column
from pellucid.tasks.rows import READERS, Row, Rows
from pellucid.tasks.sources import Source, is_file_name, rows_of, shown
from pellucid.types import ROUND, Completion, DataError, Message, Progress, Prompt, Reward, UserError

MOST_SCANS = 8
"""How many sources are kept as they were read."""
MOST_NAMED = 5
"""How many bad rows a message names with their reasons."""


@dataclass(frozen=True)
class Dataset:
    """Prompts made from data rows; the reward is the weighted sum of the reward terms that apply to the row.

    Example: Dataset(data="openai/gsm8k", subset="main", test_data="test", answer_pattern="#### (.+)")
    """

    name: Literal["dataset"] = "dataset"
    """This task."""
    seed: int = 0
    """The seed of the order of the rows."""
    split: Literal["train", "test"] = "train"
    """`train` or `test`."""
    data: Source = ""
    """A .jsonl, .json, .csv, .tsv or .parquet file, several of them, or all that match a pattern ("parts/*.jsonl"); or
    the id of a data set on the Hugging Face Hub, whose split `train` is used."""
    subset: str = ""
    """The configuration of the Hub data set, such as "main"."""
    test_data: Source = ""
    """The held-out rows, which are not trained on: files, or a split of the Hub data set. Empty: a share of `data`."""
    test_share: float = 0.1
    """The share of questions that is held out where there is no `test_data`, whatever the seed. 0 holds none out, for a
    run without evaluations (evaluate.every = 0)."""
    question: str = "question"
    """The column that {question} stands for in the template. Any column may be nested: "extra_info.question"."""
    messages: str = ""
    """A column of chat messages ({"role": ..., "content": ...}), in place of question, system and template. A content
    may be a list of texts, [{"type": "text", "text": ...}]."""
    system: str = ""
    """The system message, if any."""
    template: str = "{question}"
    """The user's message: {column} is replaced by the text of that column, and {{...}} by {...}."""
    chat: bool = True
    """False: the filled-in template reaches the model as it stands, without a chat template."""
    answer: str = "answer"
    """The column of the gold answer, such as "answer", or "reward_model.ground_truth" where it is nested."""
    answer_pattern: str = ""
    """A regular expression whose first group is the gold answer within its column, such as "#### (.+)"."""
    rewards: tuple[RewardTerm, ...] = (RewardTerm("numeric"),)
    """The terms of the reward; on the command line their names, with --task.rewards.0.weight 0.5 for a weight."""
    skip_bad_rows: bool = False
    """Leave out the rows that the model cannot be asked or whose answer cannot be read, and say which. False: such rows
    end the run before it begins."""
    correct: str = ""
    """The reward term by which evaluation counts an answer as correct: where it is 1. Empty: the first; where that is a
    function of your own which gives other numbers than 0 and 1, evaluation speaks of the mean reward instead."""

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError(f'data = "" must be files ({", ".join(READERS)}) or a Hugging Face Hub id')
        if not 0 <= self.test_share < 1:
            raise ValueError(f"test_share = {self.test_share} must be at least 0 and below 1")
        if self.messages and (self.system or self.template != "{question}" or not self.chat):
            raise ValueError(f'messages = "{self.messages}" is the whole chat: leave out system, template and chat')
        if self.system and not self.chat:
            raise ValueError("system needs chat = true: a plain prompt has no system message")
        if self.answer != self.question and self.answer in placeholders(self.template):
            raise ValueError(f"template shows {{{self.answer}}}, the gold answer; {{{{...}}}} keeps braces as braces")
        if self.answer_pattern and compiled(self.answer_pattern).groups < 1:
            raise ValueError(f'answer_pattern = "{self.answer_pattern}" needs a group around the answer: "#### (.+)"')
        if not self.rewards:
            raise ValueError("rewards must have at least one term")
        if not any(term.weight for term in self.rewards):
            raise ValueError("rewards: every weight is 0, which is only logged: give a weight to one of them")
        if self.correct and self.correct not in labels(self.rewards):
            raise ValueError(f'correct = "{self.correct}" must name a reward: {", ".join(labels(self.rewards))}')
        if self.correctness_term.name == "length":
            raise ValueError("length is never 1: name another reward in correct")

    @property
    def correctness_term(self) -> RewardTerm:
        """The reward term that decides which answers are correct."""
        names = labels(self.rewards)
        return self.rewards[names.index(self.correct or names[0])]

    @property
    def needs_gold(self) -> bool:
        """Whether any reward term needs a gold answer."""
        return any(term.name in COMPARE_WITH_GOLD for term in self.rewards)

    @property
    def question_count(self) -> int:
        """The number of rows of the split, without those that are left out."""
        return len(split_prompts(self))

    def as_dataset(self) -> Dataset:
        """Return the data set that the questions are from: this one."""
        return self

    def sample(self, step: int, n: int) -> list[Prompt]:
        """Return the prompts of the next n rows, as `shuffled` has them."""
        rows = split_prompts(self)
        chosen = (rows[place] for place in shuffled(f"{self.seed}/{self.split}", step, n, len(rows)))
        return [replace(prompt, id=f"{self.split}/{step}/{i}") for i, prompt in enumerate(chosen)]

    def format_question(self, question: str) -> str | tuple[Message, ...]:
        """Return the text of a prompt with this question; the template is used if it needs no other column."""
        if self.messages:
            first = split_prompts(self)[0].text
            system = [message for message in first if not isinstance(message, str) and message["role"] == "system"]
            return (*system, {"role": "user", "content": question})
        if set(placeholders(self.template)) <= {"question", self.question}:
            question = filled(self.template, lambda _: question)
        if not self.chat:
            return question
        system = ({"role": "system", "content": self.system},) if self.system else ()
        return (*system, {"role": "user", "content": question})

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        """Grade a completion alone, in this process."""
        alone = state_of(Progress(), None)
        return self.combine_parts([part_of(term, [(prompt, completion)], alone)[0] for term in self.rewards])

    def combine_parts(self, parts: Sequence[Part]) -> Reward:
        """Add up what each term says of a completion. A term that failed fails the reward: the rest is no grade.

        A term of weight 0 is only logged: it neither fails the reward, unless it decides what is correct, nor makes the
        reward apply to a completion of which every term with a weight returned None. If the deciding term returned
        None, the completion is neither right nor wrong.
        `parts` of the reward holds the values before weighting; `value` is NaN where no term with a weight applies.
        """
        names = labels(self.rewards)
        values = {name: part.value for name, part in zip(names, parts, strict=True) if part.value is not None}
        failed = {name: part.error for name, part in zip(names, parts, strict=True) if part.error}
        weights = {name: term.weight for name, term in zip(names, self.rewards, strict=True)}
        deciding = self.correct or names[0]
        decided = values.get(deciding)
        is_degree = not self.correct and gives_degrees(self.correctness_term.name) and decided not in (None, 0.0, 1.0)
        fatal = {name: error for name, error in failed.items() if weights[name] or name == deciding}
        error = "; ".join(f"{name}: {error}" for name, error in fatal.items())
        applies = bool(fatal) or any(weights[name] for name in values)
        if not applies:
            error = "no reward applies to this row: every term that has a weight returned None"
        return Reward(
            math.nan if error else sum(weights[name] * value for name, value in values.items()),
            values,
            correct=None if decided is None else decided >= 1.0,
            error=error,
            weights=weights,
            applies=applies,
            is_decided=deciding in values or deciding in failed,
            is_continuous=is_degree,
            failures=failed,
            extra={column: value for part in parts for column, value in part.extra.items()},
            logged=means([part.logged for part in parts]),
        )

    def solution(self, prompt: Prompt) -> str:
        """Return a correct completion, with the worked answer where the data has one."""
        known = has_column(prompt.columns, self.answer)
        worked = column_text(prompt.columns, self.answer, prompt.id) if known else prompt.answer
        if any(term.name == "tagged" for term in self.rewards):
            return f"<think>{worked}</think> <answer>{prompt.answer}</answer>"
        if self.correctness_term.name == "math" and r"\boxed" not in worked:
            return f"{worked}\n\\boxed{{{prompt.answer}}}"
        return prompt.answer if self.correctness_term.name == "exact" else worked


def means(logged: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number over those that have one of its name."""
    names = {name: None for numbers in logged for name in numbers}
    return {name: fmean(numbers[name] for numbers in logged if name in numbers) for name in names}


class BadRow(NamedTuple):
    """A row that cannot be trained on or evaluated."""

    location: str
    """Its file and line."""
    reason: str
    """Why, in a few words."""


class Prompts(Sequence[Prompt]):
    """The prompts of some rows. Each is made when it is accessed, since the data may be larger than memory."""

    def __init__(self, task: Dataset, rows: Rows, indices: Sequence[int]) -> None:
        self.task, self.rows, self.indices = task, rows, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Prompt:  # pyright: ignore[reportIncompatibleMethodOverride]
        return make_prompt(self.task, *self.rows[self.indices[index]])


class Scan(NamedTuple):
    """The rows of one source of a task, which were all read once."""

    prompts: Prompts
    """One for each row; to access that of a bad row may raise UserError."""
    fingerprints: array[int]
    """The fingerprint of each prompt; 0 for rows of which no prompt can be made."""
    bad_rows: dict[int, BadRow]
    """The rows of which no prompt can be made, by their places."""


ScanKey = tuple[Dataset, Source, str]
SCANS: dict[ScanKey, Scan] = {}
"""Scans by task, source and split on the Hub, where the task has the seed 0 and the split train."""
MARKED: dict[ScanKey, dict[int, str]] = {}
"""Why rows were marked as bad, by their places."""


def scan(key: ScanKey) -> Scan:
    """Read every row of a source, unless that was done since the source was last read."""
    task, source, hub_split = key
    rows = rows_of(source, task.subset, hub_split)
    if key in SCANS and SCANS[key].prompts.rows is rows:
        return SCANS[key]
    fingerprints, bad = array("Q"), dict[int, BadRow]()
    for place in range(len(rows)):
        where, row = rows[place]
        try:
            fingerprints.append(fingerprint(make_prompt(task, where, row)))
        except UserError as error:
            fingerprints.append(0)
            bad[place] = BadRow(where, str(error).removeprefix(f"{where}: "))
    if len(SCANS) >= MOST_SCANS:
        del SCANS[next(iter(SCANS))]
    SCANS[key] = Scan(Prompts(task, rows, range(len(rows))), fingerprints, bad)
    return SCANS[key]


def scan_keys(task: Dataset) -> list[ScanKey]:
    """Return by which keys `scan` knows the sources of a task: `data`, and behind it `test_data`, if it has any."""
    whole = replace(task, seed=0, split="train")
    return [(whole, task.data, "train"), *([(whole, *held_out_source(task))] if task.test_data else [])]


def mark_bad(key: ScanKey, bad: Mapping[int, str]) -> None:
    """Note why rows of a source cannot be used, by their places, in place of what was noted before.

    From now on the rows of the task are without them where it has skip_bad_rows; else to access them is a UserError.
    """
    MARKED[key] = dict(bad)
    split_prompts.cache_clear()


def bad_of(key: ScanKey) -> dict[int, BadRow]:
    """Return the bad rows of a source that are known so far, by their places in order."""
    scanned = scan(key)
    marked = {place: BadRow(scanned.prompts.rows[place][0], why) for place, why in MARKED.get(key, {}).items()}
    return dict(sorted((scanned.bad_rows | marked).items()))


def bad_rows(task: Dataset) -> list[BadRow]:
    """Return the bad rows of a task that are known so far, in the order of the data."""
    return [row for key in scan_keys(task) for row in bad_of(key).values()]


def forget() -> None:
    """Drop what is kept of sources that were read before."""
    rows_of.cache_clear()
    split_prompts.cache_clear()
    SCANS.clear()
    MARKED.clear()


def listed(bad: Sequence[BadRow]) -> str:
    """Return the first bad rows with their reasons in one line, and how many more there are."""
    if len(bad) > MOST_NAMED and len({row.reason for row in bad}) == 1:
        return f"{bad[0].location}, and {len(bad) - 1} more rows: {bad[0].reason}"
    named = "; ".join(f"{row.location}: {row.reason}" for row in bad[:MOST_NAMED])
    return named + (f"; and {len(bad) - MOST_NAMED} more bad rows" if len(bad) > MOST_NAMED else "")


@lru_cache(maxsize=8)
def split_prompts(task: Dataset) -> Prompts:
    """Return the prompts of the split, in the order of the data, without bad rows where they are to be skipped.

    Every row is read. UserError where none is left, and for bad rows that are not to be skipped.
    """
    keys = scan_keys(task)
    own, *test = map(scan, keys)
    if not task.skip_bad_rows and (bad := bad_rows(task)):
        raise DataError(listed(bad))
    held_out = set(test[0].fingerprints) if test else lowest_share(own.fingerprints, task.test_share)
    if test and task.split == "test":
        chosen_from, bad, places = test[0], bad_of(keys[1]), range(len(test[0].fingerprints))
    else:
        chosen_from, bad = own, bad_of(keys[0])
        places = (i for i, known in enumerate(own.fingerprints) if (known in held_out) == (task.split == "test"))
    chosen = Prompts(task, chosen_from.prompts.rows, array("q", (i for i in places if i not in bad)))
    if not chosen and task.split == "test" and not task.test_data and not task.test_share:
        raise UserError(
            f"{shown(task.data)}: test_share = 0 holds no row out for evaluations: set evaluate.every = 0, a test_share"
            " above 0, or test_data"
        )
    if not chosen:
        left_out = f", without bad rows ({listed(bad_rows(task))})" if bad_rows(task) else ""
        what = f"no row is left for the {task.split} split{left_out}; add rows or name another test_data"
        raise UserError(f"{shown(task.data)}: {what}")
    return chosen


def held_out_source(task: Dataset) -> tuple[Source, str]:
    """Return source and Hub split of the held-out rows: a split of the same Hub data set, or all of `test_data`."""
    if isinstance(task.test_data, str) and not is_file_name(task.data) and not is_file_name(task.test_data):
        return task.data, task.test_data
    return task.test_data, "train"


def fingerprint(prompt: Prompt) -> int:
    """Return a hash of what the model is asked, so that equal questions fall into the same split. It is not 0."""
    text = prompt.text if isinstance(prompt.text, str) else [dict(message) for message in prompt.text]
    return int.from_bytes(hashlib.sha256(json.dumps(text, sort_keys=True).encode()).digest()[:8], "big") or 1


def lowest_share(fingerprints: Iterable[int], share: float) -> set[int]:
    """Return the lowest share of the distinct fingerprints but 0; of two or more, at least one and not all. A share of
    0 is none.
    """
    distinct = sorted({*fingerprints} - {0})
    if not share:
        return set()
    return set(distinct[: min(max(1, round(share * len(distinct))), len(distinct) - 1)])


def shuffled(seed: str, step: int, n: int, row_count: int) -> Iterator[int]:
    """Yield the n places that a step takes among so many rows. Each epoch is a new shuffle of all.

    Another round of the step starts elsewhere in the same epoch, so as not to repeat its rows.
    """
    number, walked = divmod(step, ROUND)
    jump = number * round(0.618 * row_count)  # multiples of the golden ratio: any number of rounds stay apart
    for i in range(walked * n, walked * n + n):
        epoch, place = divmod(i, row_count)
        yield permutation(f"{seed}/{epoch}", row_count)[(place + jump) % row_count]


@lru_cache(maxsize=4)
def permutation(seed: str, n: int) -> Sequence[int]:
    return array("q", Random(f"dataset/{seed}").sample(range(n), n))


def make_prompt(task: Dataset, where: str, row: Row) -> Prompt:
    """Make the prompt of a row; `where` names the row in error messages."""
    if task.messages:
        text = chat(column_value(row, task.messages, where), task.messages, where)
    else:
        text = rendered(task, where, row)
    answer, *others = gold_answers(task, where, row)
    return Prompt("", text, answer, row, alternatives=tuple(others))


def rendered(task: Dataset, where: str, row: Row) -> str | tuple[Message, ...]:
    question = fill(task.template, task.question, where, row)
    if not question.strip():
        raise UserError(f"{where}: the question is empty")
    if not task.chat:
        return question
    system = ({"role": "system", "content": task.system},) if task.system else ()
    return (*system, {"role": "user", "content": question})


def fill(template: str, question: str, where: str, row: Row) -> str:
    """Replace each {column} by the text of that column, and {{...}} by {...}; {} and braces in the data are kept."""
    return filled(template, lambda name: column_text(row, question if name == "question" else name, where))


def gold_answers(task: Dataset, where: str, row: Row) -> list[str]:
    """Return the gold answers of a row, any of which is right; an empty one where no reward term needs any.

    A column that holds a list has several. UserError where one that is needed is missing or cannot be read.
    """
    if not has_column(row, task.answer) and not task.needs_gold:
        return [""]
    value = column_value(row, task.answer, where)
    texts = ["" if each is None else str(each) for each in (value or [None] if isinstance(value, list) else [value])]
    return list(dict.fromkeys(gold_answer(task, where, text.strip()) for text in texts))


def gold_answer(task: Dataset, where: str, text: str) -> str:
    """Return the gold answer in the text of its column. UserError where one that is needed cannot be read."""
    if task.answer_pattern:
        match = compiled(task.answer_pattern).search(text)
        if match is None:
            raise UserError(f'{where}: answer_pattern "{task.answer_pattern}" is not found in {shortened(text)}')
        text = (match[1] or "").strip()
    if not task.needs_gold:
        return text
    text = gold_in(text)
    if not text:
        raise UserError(f"{where}: the answer is empty, and a reward compares with it")
    for name in dict.fromkeys(term.name for term in task.rewards if term.name in COMPARE_WITH_GOLD):
        if fault := gold_fault(name, text):
            raise UserError(f"{where}: the answer {shortened(text)} {fault}")
    return text


def shortened(text: str) -> str:
    """Shorten a text to one line of at most 60 characters, keeping its end, where an answer tends to be."""
    line = " ".join(text.split())
    return f'"{line}"' if len(line) <= 60 else f'"...{line[-57:]}"'

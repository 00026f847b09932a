"""Your own questions, from a file or a Hugging Face data set, with the columns and reward terms that you choose."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from random import Random
from statistics import fmean
from typing import Any, Literal, NamedTuple

from pellucid.rewards.answers import extract_gold_answer
from pellucid.rewards.functions import build_trainer_state
from pellucid.rewards.parts import RewardPart
from pellucid.rewards.terms import (
    GOLD_GRADERS,
    RewardTerm,
    compile_pattern,
    compute_term_parts,
    find_gold_fault,
    gives_degrees,
    label_terms,
)
from pellucid.tasks.data_files import (
    READERS,
    DataRow,
    DataRows,
    DataSource,
    format_source,
    get_column_text,
    get_column_value,
    has_column,
    is_file_source,
    load_rows,
    parse_chat,
)
from pellucid.tasks.prompts import build_chat
from pellucid.types import ROUND_STRIDE, Completion, DataError, Message, Progress, Prompt, Reward, UserError
from pellucid.utils.text import fill_placeholders, find_placeholders, format_setting

_MAX_LISTED_BAD_ROWS = 5


@dataclass(frozen=True)
class DatasetTask:
    """A task whose prompts and rewards are those of a Dataset with the same settings."""

    name: str = ""
    """The name of the task."""
    seed: int = 0
    """The seed for the order of the rows, and for random numbers in an environment or an agent."""
    split: Literal["train", "test"] = "train"
    """`train` or `test`."""
    data: DataSource = ""
    """A .jsonl, .json, .csv, .tsv or .parquet file, several of them, or all that match a pattern ("parts/*.jsonl"); or
    the id of a data set on the Hugging Face Hub, whose split `train` is used."""
    subset: str = ""
    """The configuration of the Hub data set, such as "main"."""
    test_data: DataSource = ""
    """The held-out rows, which are not trained on: files, or a split of the Hub data set. Empty: a share of `data`."""
    test_share: float = 0.1
    """The share of questions to hold out if there is no `test_data`; it does not depend on the seed. 0 holds none out,
    for a run without evaluations (evaluate.every = 0)."""
    question: str = "question"
    """The column of the question. Any column may be nested: "extra_info.question"."""
    messages: str = ""
    """A column of chat messages ({"role": ..., "content": ...}), in place of question, system and template. A content
    may be a list of texts, [{"type": "text", "text": ...}]."""
    answer: str = "answer"
    """The column of the gold answer, such as "answer", or "reward_model.ground_truth" where it is nested."""
    answer_pattern: str = ""
    """A regular expression whose first group is the gold answer within its column, such as "#### (.+)"."""
    rewards: tuple[RewardTerm, ...] = ()
    """The terms of the reward. The command line takes their names; --task.rewards.0.weight 0.5 sets a weight."""
    correct: str = ""
    """The reward term that decides correctness: an answer is correct if it is 1. Empty: the first term; if that is your
    own function with values other than 0 and 1, evaluation reports the mean reward instead."""

    def build_dataset(self) -> Dataset:
        return build_dataset(self)

    @property
    def question_count(self) -> int | None:
        return self.build_dataset().question_count

    def sample(self, step: int, n: int) -> list[Prompt]:
        return self.build_dataset().sample(step, n)

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        return self.build_dataset().reward(prompt, completion)

    def combine_parts(self, parts: Sequence[RewardPart]) -> Reward:
        return self.build_dataset().combine_parts(parts)


@dataclass(frozen=True)
class Dataset(DatasetTask):
    """Prompts made from data rows; the reward is the weighted sum of the reward terms that apply to the row.

    Example: Dataset(data="openai/gsm8k", subset="main", test_data="test", answer_pattern="#### (.+)")
    """

    name: Literal["dataset"] = "dataset"
    """The name of the task."""
    system: str = ""
    """The system message, if any."""
    template: str = "{question}"
    """The user's message: {question} is replaced by the question, {column} by the text of that column, and {{...}} by
    {...}."""
    chat: bool = True
    """False: the filled-in template reaches the model as it stands, without a chat template."""
    rewards: tuple[RewardTerm, ...] = (RewardTerm("numeric"),)
    """The terms of the reward. The command line takes their names; --task.rewards.0.weight 0.5 sets a weight."""
    skip_bad_rows: bool = False
    """Skip and list rows with an unusable question or answer. False: such rows end the run before it begins."""

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError(f'data = "" must be files ({", ".join(READERS)}) or a Hugging Face Hub id')
        if not 0 <= self.test_share < 1:
            raise ValueError(f"test_share = {self.test_share} must be at least 0 and below 1")
        if self.messages and (self.system or self.template != "{question}" or not self.chat):
            raise ValueError(f'messages = "{self.messages}" is the whole chat: leave out system, template and chat')
        if self.system and not self.chat:
            raise ValueError("system needs chat = true: a plain prompt has no system message")
        if self.answer != self.question and self.answer in find_placeholders(self.template):
            raise ValueError(f"template shows {{{self.answer}}}, the gold answer; write {{{{...}}}} for literal braces")
        if self.answer_pattern and compile_pattern(self.answer_pattern).groups < 1:
            raise ValueError(f'answer_pattern = "{self.answer_pattern}" needs a group around the answer: "#### (.+)"')
        if not self.rewards:
            raise ValueError("rewards must have at least one term")
        if not any(term.weight for term in self.rewards):
            raise ValueError("rewards: every weight is 0, so none counts: give one of them a weight")
        if self.correct and self.correct not in label_terms(self.rewards):
            raise ValueError(f'correct = "{self.correct}" must name a reward: {", ".join(label_terms(self.rewards))}')
        if self.correctness_term.name == "length":
            raise ValueError("correct: length is never 1: name another reward")

    @property
    def correctness_term(self) -> RewardTerm:
        """The reward term that decides which answers are correct."""
        names = label_terms(self.rewards)
        return self.rewards[names.index(self.correct or names[0])]

    @property
    def needs_gold(self) -> bool:
        """Whether any reward term needs a gold answer."""
        return any(term.name in GOLD_GRADERS for term in self.rewards)

    @property
    def question_count(self) -> int:
        """The number of rows of the split, without bad rows."""
        return len(load_split_prompts(self))

    def as_dataset(self) -> Dataset:
        """Return the data set of the questions: this one."""
        return self

    def sample(self, step: int, n: int) -> list[Prompt]:
        """Return the prompts of the next n rows, in the order of `iter_shuffled_indices`."""
        return sample_prompts(self, load_split_prompts(self), step, n)

    def format_question(self, question: str) -> str | tuple[Message, ...]:
        """Return the text of a prompt with this question. The template is used if it needs no other column."""
        if self.messages:
            first = load_split_prompts(self)[0].text
            system = [message for message in first if not isinstance(message, str) and message["role"] == "system"]
            return (*system, {"role": "user", "content": question})
        if set(find_placeholders(self.template)) <= {"question", self.question}:
            question = fill_placeholders(self.template, lambda _: question)
        return build_chat(self.system, question) if self.chat else question

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        """Grade a completion alone, in this process."""
        alone = build_trainer_state(Progress(), None)
        return self.combine_parts([compute_term_parts(term, [(prompt, completion)], alone)[0] for term in self.rewards])

    def combine_parts(self, parts: Sequence[RewardPart]) -> Reward:
        """Add up the parts of a reward, one for each reward term in order; NaN if no term with a weight applies.

        A failed term fails the whole reward, since the other terms alone are not a valid grade. A term of weight 0 is
        only logged. If it fails, the reward fails only if the term decides which answers are correct. If all terms
        with a weight returned None, the reward does not apply. If the deciding term returned None, the completion is
        neither right nor wrong.
        """
        names = label_terms(self.rewards)
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
            logged=_average_by_name([part.logged for part in parts]),
        )


def build_dataset(task: Any, **settings: Any) -> Dataset:
    """Return a Dataset with the fields that a task shares with it, and with `settings`, which take precedence."""
    names = {field.name for field in fields(Dataset)} & {field.name for field in fields(task)} - {"name"}
    return Dataset(**{name: getattr(task, name) for name in names} | settings)


def _average_by_name(logged: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number over the mappings that have it."""
    names = {name: None for numbers in logged for name in numbers}
    return {name: fmean(numbers[name] for numbers in logged if name in numbers) for name in names}


class BadRow(NamedTuple):
    """A row that cannot be used for training or evaluation."""

    location: str
    """The file and the line of the row."""
    reason: str


class _LazyPrompts(Sequence[Prompt]):
    """The prompts of some rows. Each is made when it is accessed, since the data can be larger than memory."""

    def __init__(self, task: Dataset, rows: DataRows, indices: Sequence[int]) -> None:
        self.task, self.rows, self.indices = task, rows, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Prompt:  # pyright: ignore[reportIncompatibleMethodOverride]
        return make_prompt(self.task, *self.rows[self.indices[index]])


class SourceScan(NamedTuple):
    """The rows of one source of a task, all of which were read once."""

    prompts: _LazyPrompts
    """A prompt for each row. Accessing the prompt of a bad row can raise UserError."""
    fingerprints: array[int]
    """The fingerprint of each prompt; 0 for a row from which no prompt can be made."""
    bad_rows: dict[int, BadRow]
    """The rows from which no prompt can be made, by their indices."""


ScanKey = tuple[Dataset, DataSource, str]
"""A task with seed=0 and split="train", a source, and its split on the Hub."""
_MARKED_BAD_ROWS: dict[ScanKey, dict[int, str]] = {}
"""The reasons why rows were marked as bad, by the indices of the rows."""


@lru_cache(maxsize=8)
def scan_source(key: ScanKey) -> SourceScan:
    """Read every row of a source."""
    task, source, hub_split = key
    rows = load_rows(source, task.subset, hub_split)
    fingerprints, bad = array("Q"), dict[int, BadRow]()
    for index, (location, row) in enumerate(rows):
        try:
            fingerprints.append(_hash_prompt(make_prompt(task, location, row)))
        except UserError as error:
            fingerprints.append(0)
            bad[index] = BadRow(location, str(error).removeprefix(f"{location}: "))
    return SourceScan(_LazyPrompts(task, rows, range(len(rows))), fingerprints, bad)


def list_scan_keys(task: Dataset) -> list[ScanKey]:
    """Return the keys of the sources of a task: that of `data`, then that of `test_data` if there is any."""
    normalized = replace(task, seed=0, split="train")
    return [(normalized, task.data, "train"), *([(normalized, *get_held_out_source(task))] if task.test_data else [])]


def mark_bad_rows(key: ScanKey, bad: Mapping[int, str]) -> None:
    """Mark rows of a source as bad, with a reason for each index. This replaces earlier marks of the source.

    From now on a task with skip_bad_rows skips these rows; another task raises DataError when it loads its rows.
    """
    _MARKED_BAD_ROWS[key] = dict(bad)
    load_split_prompts.cache_clear()


def _list_source_bad_rows(key: ScanKey) -> dict[int, BadRow]:
    """Return the bad rows of a source that are known so far, by their indices in order."""
    scan = scan_source(key)
    marked = {i: BadRow(scan.prompts.rows[i][0], reason) for i, reason in _MARKED_BAD_ROWS.get(key, {}).items()}
    return dict(sorted((scan.bad_rows | marked).items()))


def list_bad_rows(task: Dataset) -> list[BadRow]:
    """Return the bad rows of a task that are known so far, in the order of the data."""
    return [row for key in list_scan_keys(task) for row in _list_source_bad_rows(key).values()]


def clear_dataset_caches() -> None:
    """Clear every cache of rows and prompts, so that files are read again."""
    load_rows.cache_clear()
    load_split_prompts.cache_clear()
    scan_source.cache_clear()
    _MARKED_BAD_ROWS.clear()


def format_bad_rows(bad: Sequence[BadRow]) -> str:
    """Return one line with the first bad rows, their reasons, and the number of other bad rows."""
    if len(bad) > _MAX_LISTED_BAD_ROWS and len({row.reason for row in bad}) == 1:
        return f"{bad[0].location}, and {len(bad) - 1} more rows: {bad[0].reason}"
    named = "; ".join(f"{row.location}: {row.reason}" for row in bad[:_MAX_LISTED_BAD_ROWS])
    return named + (f"; and {len(bad) - _MAX_LISTED_BAD_ROWS} more bad rows" if len(bad) > _MAX_LISTED_BAD_ROWS else "")


@lru_cache(maxsize=8)
def load_split_prompts(task: Dataset) -> _LazyPrompts:
    """Return the prompts of a task's split, in the order of the data. Every row is read.

    Raise UserError if no row is left, and DataError if there are bad rows and the task has no skip_bad_rows.
    """
    keys, is_test = list_scan_keys(task), task.split == "test"
    own, *test = map(scan_source, keys)
    if not task.skip_bad_rows and (bad := list_bad_rows(task)):
        raise DataError(format_bad_rows(bad))
    if test and is_test:
        scan, bad, indices = test[0], _list_source_bad_rows(keys[1]), range(len(test[0].fingerprints))
    else:
        scan, bad = own, _list_source_bad_rows(keys[0])
        held_out = set(test[0].fingerprints) if test else select_held_out(own.fingerprints, task.test_share)
        indices = (i for i, fingerprint in enumerate(own.fingerprints) if (fingerprint in held_out) == is_test)
    chosen = _LazyPrompts(task, scan.prompts.rows, array("q", (i for i in indices if i not in bad)))
    if chosen:
        return chosen
    if is_test:
        check_held_out_share(task)
    left_out = f", without bad rows ({format_bad_rows(list_bad_rows(task))})" if list_bad_rows(task) else ""
    problem = f"no row is left for the {task.split} split{left_out}; add rows or name another test_data"
    raise UserError(f"{format_source(task.data)}: {problem}")


def check_held_out_share(task: DatasetTask) -> None:
    """Raise UserError if a task holds no row out for evaluations."""
    if not task.test_data and not task.test_share:
        raise UserError(
            f"{format_setting('test_share', 0)} holds no row out for evaluations: set"
            f" {format_setting('evaluate.every', 0)}, a test_share above 0, or test_data",
            page="how-to/data",
        )


def get_held_out_source(task: Dataset) -> tuple[DataSource, str]:
    """Return the source and the Hub split of the held-out rows: a split of the same data set, or all of `test_data`."""
    if isinstance(task.test_data, str) and not is_file_source(task.data) and not is_file_source(task.test_data):
        return task.data, task.test_data
    return task.test_data, "train"


def _hash_prompt(prompt: Prompt) -> int:
    """Return a hash of the prompt's text, by which equal questions fall into the same split. It is never 0."""
    text = prompt.text if isinstance(prompt.text, str) else [dict(message) for message in prompt.text]
    return int.from_bytes(hashlib.sha256(json.dumps(text, sort_keys=True).encode()).digest()[:8], "big") or 1


def select_held_out(fingerprints: Iterable[int], share: float) -> set[int]:
    """Return the fingerprints that are held out: the lowest ones among the distinct fingerprints other than 0.

    If the share is above 0 and there are two or more fingerprints, at least one is held out, and not all are.
    """
    distinct = sorted({*fingerprints} - {0})
    if not share:
        return set()
    return set(distinct[: min(max(1, round(share * len(distinct))), len(distinct) - 1)])


def sample_prompts(task: Any, prompts: Sequence[Prompt], step: int, n: int) -> list[Prompt]:
    """Return the prompts of a step of a task, by its seed and split, in the order of `iter_shuffled_indices`."""
    indices = iter_shuffled_indices(f"{task.seed}/{task.split}", step, n, len(prompts))
    return [replace(prompts[index], id=f"{task.split}/{step}/{i}") for i, index in enumerate(indices)]


def iter_shuffled_indices(seed: str, step: int, n: int, row_count: int) -> Iterator[int]:
    """Yield the n row indices of a step. Each epoch is a new shuffle of all `row_count` rows.

    `step` is ROUND_STRIDE * round + step in the round. Another round begins elsewhere in the same epoch, so that it
    does not repeat the rows.
    """
    round_number, step_in_round = divmod(step, ROUND_STRIDE)
    # Multiples of the golden ratio keep any number of rounds apart.
    offset = round_number * round(0.618 * row_count)
    for i in range(step_in_round * n, step_in_round * n + n):
        epoch, position = divmod(i, row_count)
        yield _make_permutation(f"{seed}/{epoch}", row_count)[(position + offset) % row_count]


@lru_cache(maxsize=4)
def _make_permutation(seed: str, n: int) -> Sequence[int]:
    return array("q", Random(f"dataset/{seed}").sample(range(n), n))


def make_prompt(task: Dataset, location: str, row: DataRow) -> Prompt:
    """Make the prompt of a row; `location` names the row in error messages."""
    if task.messages:
        text = parse_chat(get_column_value(row, task.messages, location), task.messages, location)
    else:
        text = fill_placeholders(
            task.template, lambda name: get_column_text(row, task.question if name == "question" else name, location)
        )
        if not text.strip():
            raise UserError(f"{location}: the question is empty")
        text = build_chat(task.system, text) if task.chat else text
    answer, *others = _parse_gold_answers(task, location, row)
    return Prompt("", text, answer, row, alternatives=tuple(others))


def _parse_gold_answers(task: Dataset, location: str, row: DataRow) -> list[str]:
    """Return the gold answers of a row, several if the column is a list; [""] if it is missing and not needed."""
    if not has_column(row, task.answer) and not task.needs_gold:
        return [""]
    value = get_column_value(row, task.answer, location)
    texts = ["" if each is None else str(each) for each in (value or [None] if isinstance(value, list) else [value])]
    return list(dict.fromkeys(_parse_gold_answer(task, location, text.strip()) for text in texts))


def _parse_gold_answer(task: Dataset, location: str, text: str) -> str:
    """Return the gold answer in its column's text. UserError if the pattern or a reward term cannot read it."""
    if task.answer_pattern:
        match = compile_pattern(task.answer_pattern).search(text)
        if match is None:
            raise UserError(
                f'{location}: answer_pattern "{task.answer_pattern}" is not found in {_shorten_to_line(text)}'
            )
        text = (match[1] or "").strip()
    if not task.needs_gold:
        return text
    text = extract_gold_answer(text)
    if not text:
        raise UserError(f"{location}: the answer is empty, but a reward needs it")
    for name in dict.fromkeys(term.name for term in task.rewards if term.name in GOLD_GRADERS):
        if fault := find_gold_fault(name, text):
            raise UserError(f"{location}: the answer {_shorten_to_line(text)} {fault}")
    return text


def _shorten_to_line(text: str) -> str:
    """Shorten a text to one line of at most 60 characters. The end is kept, since answers tend to be there."""
    line = " ".join(text.split())
    return f'"{line}"' if len(line) <= 60 else f'"...{line[-57:]}"'

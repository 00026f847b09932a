"""`pellucid prefixes`: find which prefixes are missing, and ask a teacher or a student for them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from rich.progress import Progress
from tyro.conf import Positional, Suppress, arg

from pellucid import config
from pellucid.config import Config
from pellucid.prefixes.cleaning import clean_text, extract_thinking, take_first_sentences, take_first_tokens
from pellucid.prefixes.journal import Journal
from pellucid.prefixes.teacher import (
    TEACHER_SETTING_NAMES,
    RequestOptions,
    Teacher,
    UnansweredError,
    build_messages,
)
from pellucid.tasks.prefixed import PREFIX_SOURCES
from pellucid.tasks.wrappers import get_innermost_task, with_seed
from pellucid.training.evaluate import sample_held_out_prompts
from pellucid.types import Prompt, Sampling, UserError, with_split
from pellucid.utils.endpoint import find_address_mistake
from pellucid.utils.files import hold_lock
from pellucid.utils.plugins import pause_garbage_collection
from pellucid.utils.signals import INTERRUPTED_EXIT_STATUS
from pellucid.utils.text import escape_controls

STUDENT_BATCH_ROWS = 64
"""The number of prefixes that a student decodes between two writes to the file."""
_PROGRESS_INTERVAL_SECONDS = 10
"""Seconds between two lines of progress if the output is not a terminal."""
_MIN_VALUES = {
    "n": 1,
    "per_question": 1,
    "workers": 1,
    "per_minute": 0,
    "retries": 0,
    "temperature": 0,
    "max_tokens": 1,
    "sentences": 1,
    "truncate_tokens": 0,
}
_PrefixExtractor = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class Prefixes(RequestOptions):
    """Ask a teacher or a student for the first sentences of its reasoning."""

    recipe: Positional[Annotated[str, arg(metavar="RECIPE")]]
    """The recipe whose questions are asked."""
    output: Annotated[Path, arg(metavar="FILE.jsonl")] = Path("prefixes.jsonl")
    """The file for the prefixes; missing ones are added to an existing file."""
    n: int = 100
    """Number of questions."""
    per_question: int = 5
    """Number of prefixes per question from each source."""
    student: Annotated[str, arg(metavar="MODEL")] = ""
    """The student: a model as --policy.model takes it."""
    workers: int = 10
    """Requests at once."""
    sentences: int = 2
    """How many sentences of an answer are kept."""
    truncate_tokens: int = 0
    """How many tokens of an answer are kept, instead of sentences."""
    settings: Suppress[tuple[str, ...]] = ()

    def __call__(self) -> int:
        _check_options(self)
        cfg = config.load_config(config.find_recipe(self.recipe), self.settings)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        lock = hold_lock(self.output.with_name(f".{self.output.name}.lock"), f"writes {self.output}")
        try:
            with lock:
                return _collect_prefixes(cfg, self)
        except KeyboardInterrupt:
            print(escape_controls(f"stopped; run the same command to continue with {self.output}"), flush=True)
            os._exit(INTERRUPTED_EXIT_STATUS)  # a normal exit would wait for the requests in progress


def _check_options(options: Prefixes) -> None:
    for name, minimum in _MIN_VALUES.items():
        if not minimum <= getattr(options, name) < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least {minimum}")
    if not 0 < options.timeout < float("inf"):
        raise UserError(f"--timeout {options.timeout} must be a positive number of seconds")
    if not options.teacher and not options.student:
        raise UserError("no source: pass --teacher MODEL, --student MODEL, or both")
    if options.output.is_dir():
        raise UserError(f"--output {options.output} is a folder: name a file in it")
    if mistake := find_address_mistake(options.base_url, TEACHER_SETTING_NAMES):
        raise UserError(mistake)


def _collect_prefixes(cfg: Config, options: Prefixes) -> int:
    sources = [source for source in PREFIX_SOURCES if getattr(options, source)]
    prompts = sample_questions(with_seed(cfg.task, cfg.algorithm.seed), options.n)
    journal = Journal(options.output, _get_prefix_settings(cfg, options))
    missing, reasons = journal.list_missing(prompts, sources, options.per_question), list[str]()
    if not missing and journal.is_complete:
        message = f"{options.output} is complete: nothing to do; for other prefixes choose another --output"
        print(escape_controls(message))
        return 0
    if missing:
        extract_prefix = _make_prefix_extractor(cfg, options)
        # Both are prepared before either is asked, since an error found later would cost the time of the first.
        teacher = Teacher(options, extract_prefix) if options.teacher else None
        student = _load_student(cfg, options.student) if options.student else None
        print(
            f"asks for {len(missing)} prefixes of {len(prompts)} questions, {len(journal.entries)} already exist",
            flush=True,
        )
        with journal.open(), _show_progress(len(missing)) as advance:
            requests = _Requests(options, prompts, journal, extract_prefix, advance)
            reasons += requests.ask_teacher(teacher) if teacher else []
            reasons += requests.ask_student(student) if student else []
    if missing := journal.list_missing(prompts, sources, options.per_question):
        raise UserError(
            f"{len(missing)} prefixes are missing ({reasons[0]}); {options.output} holds the others: the same"
            " command asks only for the missing ones"
        )
    journal.finish(prompts)
    print(escape_controls(f"prefixes {options.output}"))
    return 0


def sample_questions(task: Any, n: int) -> list[Prompt]:
    """Return up to n different questions from the train split of the innermost task."""
    return sample_held_out_prompts(with_split(get_innermost_task(task), "train"), n)


def _get_prefix_settings(cfg: Config, options: Prefixes) -> dict[str, Any]:
    """Return the settings on which the text of a prefix depends.

    The number of prefixes and the endpoint's address may change between two runs with the same output.
    """
    names = ["teacher", "student", "temperature", "max_tokens", "truncate_tokens"]
    settings = {name: getattr(options, name) for name in names}
    if options.truncate_tokens:
        settings["tokenizer"] = options.student or cfg.policy.model
    else:
        settings["sentences"] = options.sentences
    return {"recipe": str(options.recipe), "task": config.dump_config(cfg)["task"], **settings}


def _make_prefix_extractor(cfg: Config, options: Prefixes) -> _PrefixExtractor:
    """Return a function that cuts a prefix from a model's answer. It returns "" if the answer has no thinking."""
    if not options.truncate_tokens:
        return lambda text: take_first_sentences(clean_text(extract_thinking(text)), options.sentences)
    with pause_garbage_collection():
        from pellucid.policy import load  # noqa: PLC0415 - torch takes seconds: not every run needs it

    name = options.student or cfg.policy.model
    _print_warning(cfg.policy.get_access(name).format_warning(name))
    tokenizer = load.load_tokenizer(name, cfg.policy.get_access(name))
    return lambda text: take_first_tokens(clean_text(extract_thinking(text)), options.truncate_tokens, tokenizer)


def _load_student(cfg: Config, name: str) -> Any:
    """Return a sampler of a local model, which is asked with the same messages as a teacher."""
    with pause_garbage_collection():  # they import torch
        from pellucid.policy import policy  # noqa: PLC0415
        from pellucid.rollout.select import choose_sampler  # noqa: PLC0415
        from pellucid.utils import hardware  # noqa: PLC0415

    hardware.keep_freed_memory()
    device = hardware.pick_device(cfg.policy.device)
    dtype = hardware.pick_dtype(cfg.policy.dtype, device)
    access = cfg.policy.get_access(name)
    _print_warning(access.format_warning(name))
    frozen = policy.load_frozen_policy(name, device, dtype, cfg.sampler.temperature, cfg.policy.engine, access=access)
    sampler, note = choose_sampler("native", cfg.sampler.rows, frozen)
    _print_warning(note)
    sampler.sync(frozen, 0)
    return sampler


def _print_warning(note: str) -> None:
    if note:
        print(escape_controls(f"! {note}"), flush=True)


class _Requests(NamedTuple):
    """Asks a teacher and a student for prefixes. Both methods return the reasons why some are still missing."""

    options: Prefixes
    prompts: Sequence[Prompt]
    journal: Journal
    extract_prefix: _PrefixExtractor
    advance: Callable[[], None]
    """Counts one prefix as done."""

    def ask_teacher(self, teacher: Teacher) -> list[str]:
        by_question = {prompt.key: prompt for prompt in self.prompts}
        missing = self.journal.list_missing(self.prompts, ["teacher"], self.options.per_question)
        reasons = list[str]()

        def ask(question: str, index: int) -> None:
            text = teacher.ask(by_question[question])
            self.journal.add((question, "teacher", index), by_question[question].answer, text)

        pool = ThreadPoolExecutor(self.options.workers)
        try:
            for future in as_completed([pool.submit(ask, question, index) for question, _, index in missing]):
                try:
                    future.result()
                except UnansweredError as error:
                    reasons.append(str(error))
                self.advance()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            teacher.close()
        return reasons

    def ask_student(self, student: Any) -> list[str]:
        """Random numbers per question and fixed batches give the same prefixes in every run."""
        group_size = self.options.per_question
        sampling = Sampling(group_size, self.options.temperature, self.options.max_tokens)
        limit = student.policy.context_length - sampling.max_tokens
        fitting, reasons = list[Prompt](), list[str]()
        for prompt in self.prompts:
            length = len(student.policy.encode(replace(prompt, text=build_messages(prompt))))
            if length <= limit:
                fitting.append(prompt)
            else:
                advice = "lower --max-tokens, or name another"
                reasons += [f"a question of {length} tokens is too long for the student: {advice}"] * group_size
        batch_size = max(1, STUDENT_BATCH_ROWS // group_size)
        for start in range(0, len(fitting), batch_size):
            batch = fitting[start : start + batch_size]
            student_prompts = [replace(prompt, id=prompt.key, text=build_messages(prompt)) for prompt in batch]
            for attempt in range(self.options.retries + 1):
                missing = self.journal.list_missing(batch, ["student"], group_size)
                if not missing:
                    break
                groups = student.generate(student_prompts, replace(sampling, seed=f"prefixes/{attempt}"))
                texts = {
                    (prompt.key, "student", index): (prompt.answer, self.extract_prefix(completion.text))
                    for prompt, group in zip(batch, groups, strict=True)
                    for index, completion in enumerate(group.completions)
                }
                for key in missing:
                    answer, text = texts[key]
                    if text:
                        self.journal.add(key, answer, text)
                        self.advance()
            missing = self.journal.list_missing(batch, ["student"], group_size)
            reasons += ["the student's answers are empty"] * len(missing)
        return reasons


@contextmanager
def _show_progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal, or a line now and then in a file. Yield the function that counts one prefix."""
    if sys.stdout.isatty():
        with Progress() as bar:
            task = bar.add_task("prefixes", total=total)
            yield lambda: bar.advance(task)
        return
    done, shown = 0, time.monotonic()

    def advance() -> None:
        nonlocal done, shown
        done += 1
        if time.monotonic() - shown >= _PROGRESS_INTERVAL_SECONDS:
            shown = time.monotonic()
            print(f"{done} of {total}", flush=True)

    yield advance

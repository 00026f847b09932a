"""Which prompts a policy cannot be asked: all of a data set are tokenized before step 1, before a model is loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from pellucid import __version__
from pellucid.config import Config
from pellucid.machine import disk
from pellucid.models.family import longest
from pellucid.policy import pretrained
from pellucid.policy.template import RAISED, Template, Text, ids_fault, question_text, raised, text_ids
from pellucid.protocols import with_split
from pellucid.tasks.dataset import Dataset, Scan, ScanKey, bad_rows, listed, mark_bad, scan, scan_keys, split_prompts
from pellucid.tasks.wrappers import innermost
from pellucid.training.claim import first_process
from pellucid.training.evaluate import held_out
from pellucid.types import DataError, Prompt, UserError

BATCH = 1024
"""How many prompts are tokenized at once, in parallel where the tokenizer is a fast one."""
CACHED = 2048
"""From how many rows on the result is kept on disk."""
PROBED = 256
"""How many prompts of a task without an end are tried."""


class Limits(NamedTuple):
    """What a prompt must keep to."""

    max_prompt_tokens: int
    """The most tokens that leave room for a completion in the context of the model."""
    max_completion_tokens: int
    """sampler.max_tokens, which the completion may have."""
    vocabulary_size: int
    """The number of tokens that the model has embeddings of."""


def check_settings(cfg: Config, config: PreTrainedConfig) -> None:
    """Check the prompts of both splits against the tokenizer and the configuration of the policy, without its weights.

    DataError for bad rows that are not to be skipped. A tokenizer that cannot be found is left to whoever loads it.
    """
    config = config.get_text_config()
    try:
        words = pretrained.tokenizer(cfg.policy.model, cfg.policy.access)
    except UserError:
        return
    Template(cfg.policy.template, cfg.policy.template_kwargs).apply_to_tokenizer(words)
    splits = ("train", "test") if cfg.evaluate.every else ("train",)
    check(cfg, words, longest(config), config.vocab_size, splits)


def check(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, context_length: int, vocabulary_size: int, splits: Sequence[str]
) -> None:
    """Tokenize all prompts of a data set, or some of a task without an end, and mark or refuse those that are bad.

    context: the most tokens that the model reads. vocabulary: how many tokens it has embeddings of. splits: those of
    which bad rows are an error where they are not to be skipped.
    """
    limits = Limits(context_length - cfg.sampler.max_tokens, cfg.sampler.max_tokens, vocabulary_size)
    task = innermost(cfg.task)
    if limits.max_prompt_tokens < 1 or hasattr(
        task, "environment_spec"
    ):  # the world of a conversation says how it begins, later
        return
    if hasattr(task, "as_dataset"):
        check_rows(task.as_dataset(), tokenizer, limits, splits)
    else:
        check_some(cfg, tokenizer, limits, splits)


def check_rows(task: Dataset, tokenizer: PreTrainedTokenizerBase, limits: Limits, splits: Sequence[str]) -> None:
    """Mark the bad rows of a data set. DataError where they are not to be skipped, or no others are left."""
    found = {key: unfit(scan(key), tokenizer, limits) for key in scan_keys(task)}
    for key, bad in found.items():
        mark_bad(key, bad if task.skip_bad_rows or len(splits) > 1 else of_splits(task, key, bad, splits))
    if not task.skip_bad_rows and (bad := bad_rows(task)):
        raise DataError(f"{listed(bad)}; fix {'it' if len(bad) == 1 else 'them'}, or set task.skip_bad_rows = true")
    for split in splits:
        split_prompts(replace(task, split=split))
    if (bad := bad_rows(task)) and first_process():
        print(f"! task.skip_bad_rows leaves out {len(bad)} of {rows_in_all(task)} rows: {listed(bad)}", flush=True)


def of_splits(task: Dataset, key: ScanKey, bad: Mapping[int, str], splits: Sequence[str]) -> dict[int, str]:
    """Return those of the bad rows of a source that are in one of these splits."""
    chosen = [split_prompts(replace(task, split=split)) for split in splits]
    rows = scan(key).prompts.rows
    inside = {place for prompts in chosen if prompts.rows is rows for place in prompts.indices}
    return {place: reason for place, reason in bad.items() if place in inside}


def rows_in_all(task: Dataset) -> int:
    return sum(len(scan(key).prompts) for key in scan_keys(task))


def check_some(cfg: Config, tokenizer: PreTrainedTokenizerBase, limits: Limits, splits: Sequence[str]) -> None:
    """Raise DataError for a bad prompt among the first ones of a task that makes its questions."""
    for prompt, reason in zip(some := list(first_prompts(cfg, splits)), reasons(some, tokenizer, limits), strict=True):
        if reason:
            asked = " ".join(prompt.question.split())[:60]
            raise DataError(f'{cfg.task_name}: prompt {prompt.id}, "{asked}": {reason}')


def first_prompts(cfg: Config, splits: Sequence[str]) -> Iterator[Prompt]:
    """Yield the prompts of the first step of the user's own task, and of as many steps as needed of one of ours."""
    train, n = innermost(with_split(cfg.task, "train")), cfg.algorithm.prompts_per_step
    ours = type(train).__module__.startswith("pellucid.")
    for step in range(-(-PROBED // n) if ours else 1) if "train" in splits else ():
        yield from train.sample(step, n)
    if "test" in splits and cfg.evaluate.every:
        yield from held_out(innermost(with_split(cfg.task, "test")), cfg.evaluate.n)


# ---------------------------------------------------------------- reasons


def unfit(scanned: Scan, tokenizer: PreTrainedTokenizerBase, limits: Limits) -> dict[int, str]:
    """Return why rows of a source cannot be asked, by their places. Known from an earlier run where it can be."""
    if len(scanned.prompts) < CACHED:
        return tokenized(scanned, tokenizer, limits)
    path = cache_file(scanned, tokenizer, limits)
    with suppress(OSError, ValueError, AttributeError):  # a damaged file is written anew
        return {int(place): str(reason) for place, reason in json.loads(path.read_text(encoding="utf-8")).items()}
    found = tokenized(scanned, tokenizer, limits)
    with suppress(OSError):  # the next run tokenizes them again
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.write_whole(path, json.dumps(found))
    return found


def tokenized(scanned: Scan, tokenizer: PreTrainedTokenizerBase, limits: Limits) -> dict[int, str]:
    places = [place for place, known in enumerate(scanned.fingerprints) if known]
    found: dict[int, str] = {}
    for start in range(0, len(places), BATCH):
        batch = places[start : start + BATCH]
        faults = reasons([scanned.prompts[place] for place in batch], tokenizer, limits)
        found |= {place: fault for place, fault in zip(batch, faults, strict=True) if fault}
    return found


def reasons(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, limits: Limits) -> list[str]:
    """Return for each prompt why it cannot be asked; empty where it can."""
    faults: list[str] = [""] * len(prompts)
    texts: dict[int, Text] = {}
    for i, prompt in enumerate(prompts):
        try:
            texts[i] = question_text(tokenizer, prompt)
        except UserError as error:
            faults[i] = str(error)
        except RAISED as error:
            faults[i] = raised(error)
    for i, ids in zip(texts, text_ids(tokenizer, list(texts.values())), strict=True):
        faults[i] = ids_fault(ids, limits.vocabulary_size)
        if not faults[i] and len(ids) > limits.max_prompt_tokens:
            room = (
                f"{limits.max_prompt_tokens}, which leave room for sampler.max_tokens = {limits.max_completion_tokens}"
            )
            faults[i] = f"its prompt has {len(ids)} tokens, more than {room}"
    return faults


def cache_file(scanned: Scan, tokenizer: PreTrainedTokenizerBase, limits: Limits) -> Path:
    """Return where the result for these very prompts, this tokenizer and these limits is kept."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    facts = (
        __version__,
        type(tokenizer).__name__,
        str(tokenizer.chat_template),
        str(tokenizer.special_tokens_map),
        vocabulary,
    )
    digest = hashlib.sha256(scanned.fingerprints.tobytes())
    digest.update(json.dumps([*facts, *limits]).encode())
    cache = Path(os.environ.get("PELLUCID_CACHE") or Path.home() / ".cache" / "pellucid")
    return cache / "rows" / f"{digest.hexdigest()[:32]}.json"

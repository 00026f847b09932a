"""Prompts with a prefix: the beginning of an answer, which all completions of a group continue."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal

from pellucid.environments.agents import AgentSpec
from pellucid.tasks.wrappers import TaskWrapper, get_innermost_task, list_task_layers
from pellucid.types import ROUND_STRIDE, Completion, Group, Prompt, UserError, as_stateful_task, with_split

PREFIX_SOURCES = ("teacher", "student")
_TEXT_KEYS = ("question", "answer", "source", "text")
_UNSPACED_SCRIPTS = r"\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED_SCRIPTS}]|[^\s{_UNSPACED_SCRIPTS}]+")


@dataclass(frozen=True)
class Prefixed(TaskWrapper):
    """Prompts of another task, most with a prefix (mathgrpo's prefix training; UFT, arXiv 2505.16984, for schedules).

    The prefix is part of the prompt: the policy gradient is that of the completion alone, and exact without importance
    weights; algorithm.prefix_coef adds the likelihood of the prefix. The reward sees prefix and completion as one
    answer. Held-out questions never have a prefix.

    Example: Prefixed(Gsm8k(), file="prefixes.jsonl", dropout=0.5)
    """

    name: Literal["prefixed"] = "prefixed"
    """The name of the task."""
    file: str = ""
    """The file that `pellucid prefixes` wrote. Empty: prefixes come from the task's own method `working`."""
    opening: str = ""
    """Text before every prefix, such as "<think>" where answers begin with it: `pellucid prefixes` removes tags."""
    dropout: float = 0.2
    """The share of groups without a prefix."""
    teacher_share: float = 0.5
    """The probability of a teacher's prefix if a question has prefixes from both."""
    length: float = 1.0
    """The largest share of a prefix's words that is given."""
    shortest: float = 1.0
    """Each group gets a share of the words drawn between shortest * length and length."""
    schedule: Literal["constant", "cosine"] = "constant"
    """cosine: `length` falls to 0 over schedule_steps, and stays there."""
    schedule_steps: int = 0
    """The number of steps in which schedule = "cosine" falls to 0."""

    def __post_init__(self) -> None:
        for name in ("dropout", "teacher_share", "length", "shortest"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be from 0 to 1")
        if (self.schedule == "cosine") != (self.schedule_steps > 0):
            raise ValueError('schedule = "cosine" and schedule_steps above 0 go together')
        if any(isinstance(layer, Prefixed) for layer in list_task_layers(self.task)):
            raise ValueError("prefixed goes around a task once")
        if isinstance(getattr(get_innermost_task(self.task), "environment_spec", None), AgentSpec):
            raise ValueError(
                "prefixed does not work around agents: an agent asks the policy itself, and its questions are not those"
                " of the rows; leave prefixed out"
            )

    def with_split(self, split: str) -> Any:
        """Return the task on another split; for `test` the task inside, without prefixes.

        Raises UserError if there are no prefixes; not earlier, since `pellucid prefixes` reads recipes without any.
        """
        inside = with_split(self.task, split)
        if split == "test":
            return inside
        if self.file:
            load_prefixes(self.file)
        elif not hasattr(get_innermost_task(self.task), "working"):
            raise UserError(
                f"{type(get_innermost_task(self.task)).__name__} has no `working`: set task.file = prefixes.jsonl"
            )
        return replace(self, task=inside)

    def sample(self, step: int, n: int) -> list[Prompt]:
        return [self._add_prefix(step, prompt) for prompt in self.task.sample(step, n)]

    def transform_completion(self, prompt: Prompt, completion: Completion) -> Completion:
        """Return the completion that the task inside grades, in which the prefix is part of the answer.

        In a conversation of several turns the first turn already has the prefix.
        """
        if sum(message["role"] == "assistant" for message in completion.messages) > 1:
            return completion
        return replace(completion, text=prompt.prefix + completion.text)

    def observe(self, step: int, groups: Sequence[Group]) -> Mapping[str, float]:
        stateful_task = as_stateful_task(self.task)
        metrics = stateful_task.observe(step, groups) if stateful_task else {}
        return {"prefix/share": sum(bool(group.demonstration) for group in groups) / len(groups), **metrics}

    def state(self) -> dict[str, Any]:
        stateful_task = as_stateful_task(self.task)
        return stateful_task.state() if stateful_task else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if stateful_task := as_stateful_task(self.task):
            stateful_task.load_state(state)

    def compute_share(self, step: int) -> float:
        """Return the largest share of a prefix's words that is given in this step."""
        if self.schedule == "constant":
            return self.length
        return self.length * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.schedule_steps)))

    def _add_prefix(self, step: int, prompt: Prompt) -> Prompt:
        rng = Random(f"prefixed/{self.seed}/{step}/{prompt.id}")
        if rng.random() < self.dropout:
            return prompt
        share = self.compute_share(step % ROUND_STRIDE) * rng.uniform(self.shortest, 1.0)
        full_prefix = self._choose_full_prefix(prompt, rng)
        prefix = take_first_words(full_prefix, share)
        # A prefix from a file is only the beginning of an answer; a complete `working` is an answer.
        is_answer = bool(prefix) and prefix == full_prefix.rstrip() and not self.file
        return replace(prompt, prefix=prefix and self.opening + prefix, prefix_is_complete=is_answer)

    def _choose_full_prefix(self, prompt: Prompt, rng: Random) -> str:
        if not self.file:
            return get_innermost_task(self.task).working(prompt)
        sources = load_prefixes(self.file).get(prompt.key, {})
        source = "teacher" if rng.random() < self.teacher_share else "student"
        prefixes = sources.get(source) or next((sources[s] for s in PREFIX_SOURCES if sources.get(s)), ())
        return rng.choice(prefixes) if prefixes else ""


def take_first_words(text: str, share: float) -> str:
    """Return the first `share` of a text's words, rounded to the nearest number; inner white space is kept.

    A Chinese or Japanese character counts as a word.
    """
    ends = [match.end() for match in _WORD.finditer(text)]
    count = math.floor(share * len(ends) + 0.5)
    return text[: ends[count - 1]] if count else ""


@cache
def load_prefixes(file: str) -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Return the prefixes of each question, by source. Raises UserError if the file cannot be used."""
    try:
        _, entries = read_prefix_file(Path(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"task.file = {file}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"task.file = {file} is not what `pellucid prefixes` writes ({error})") from error
    found: dict[str, dict[str, list[str]]] = {}
    for entry in sorted(entries, key=lambda entry: entry["index"]):
        found.setdefault(entry["question"], {}).setdefault(entry["source"], []).append(entry["text"])
    return found


def read_prefix_file(path: Path) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """Return the header of a prefix file, which has its settings, and its other lines, each of which is a prefix.

    A last line without a newline was cut off when a process was killed; it is left out. Raises OSError,
    UnicodeDecodeError, KeyError, TypeError or ValueError if the file cannot be read, or has another format.
    """
    lines = path.read_bytes().rpartition(b"\n")[0].decode("utf-8").split("\n")
    header, *entries = map(json.loads, lines)
    if not isinstance(header["settings"], dict):
        raise TypeError("the first line must hold settings")
    for entry in entries:
        if entry["source"] not in PREFIX_SOURCES:
            raise ValueError(f"the source of a prefix is {entry['source']!r}, not {' or '.join(PREFIX_SOURCES)}")
        if not isinstance(entry["index"], int) or not all(isinstance(entry[name], str) for name in _TEXT_KEYS):
            raise TypeError("a prefix must have texts and an index")
    return header, entries

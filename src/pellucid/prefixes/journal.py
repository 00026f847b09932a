"""The journal beside the output: a file with a line for each prefix as it arrives. A killed run goes on from it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from pellucid.tasks.prefixed import PREFIX_SOURCES
from pellucid.types import Prompt, UserError
from pellucid.utils.files import write_file_atomically

PrefixKey = tuple[str, str, int]
"""The question, the source, and the number of a prefix."""


class Journal:
    """All prefixes so far, in memory and in a file of JSON lines, whose first line holds the settings.

    While that file exists it holds every prefix; the output may lack some.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self.output, self.path = output, output.with_name(f"{output.name}.partial.jsonl")
        self.settings = json.loads(json.dumps(settings))
        self.answers: dict[str, str] = {}
        """The gold answer to each question that has a prefix."""
        self.texts: dict[PrefixKey, str] = {}
        self.lock, self.file = threading.Lock(), None
        self.has_journal = self.load_journal()
        if not self.has_journal:
            self.load_output()

    def load_journal(self) -> bool:
        if not self.path.exists():
            return False
        # A line without its end was being written when the process was killed: it may break inside a character.
        *whole, torn = self.path.read_bytes().split(b"\n")
        if torn:
            os.truncate(self.path, self.path.stat().st_size - len(torn))
        if not whole:
            return False
        try:
            settings, *entries = [json.loads(line) for line in whole]
            self.check_settings(settings["settings"])
            for entry in entries:
                self.store((entry["question"], entry["source"], entry["index"]), entry["answer"], entry["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path} is damaged: remove it to ask anew, or choose another --output") from error
        return True

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        for name in {**settings, **self.settings}:
            then, now = settings.get(name), self.settings.get(name)
            if then != now:
                raise UserError(
                    f"{self.path} was begun with {name} = {json.dumps(then, ensure_ascii=False)}, now it is"
                    f" {json.dumps(now, ensure_ascii=False)}: finish it with its own settings, choose another --output,"
                    " or remove it"
                )

    def load_output(self) -> None:
        if not self.output.exists():
            return
        try:
            held = json.loads(self.output.read_text(encoding="utf-8"))
            recipe = held["recipe"]
            for row in held["questions"]:
                for source in PREFIX_SOURCES:
                    for index, text in enumerate(row[source]):
                        self.store((row["question"], source, index), row["answer"], text)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.output} is no file of prefixes: choose another --output") from error
        if recipe != self.settings["recipe"]:
            raise UserError(f"{self.output} holds the prefixes of {recipe}: choose another --output, or remove it")

    def store(self, key: PrefixKey, answer: str, text: str) -> None:
        self.answers[key[0]], self.texts[key] = answer, text

    def list_missing(self, prompts: Iterable[Prompt], sources: Sequence[str], n: int) -> list[PrefixKey]:
        wanted = ((p.key, source, index) for p in prompts for source in sources for index in range(n))
        return [slot for slot in wanted if slot not in self.texts]

    def open(self) -> TextIO:
        """Open the file for `add`. A new file begins with all prefixes of an earlier output, written as a whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.has_journal:
            lines = [{"settings": self.settings}, *(self.make_entry(slot) for slot in self.texts)]
            write_file_atomically(self.path, "".join(map(format_line, lines)))
        self.file = self.path.open("a", encoding="utf-8")
        return self.file

    def add(self, key: PrefixKey, answer: str, text: str) -> None:
        with self.lock:
            assert self.file is not None, "open the journal before adding to it"
            self.store(key, answer, text)
            self.file.write(format_line(self.make_entry(key)))
            self.file.flush()

    def make_entry(self, key: PrefixKey) -> dict[str, Any]:
        question, source, index = key
        answer, text = self.answers[question], self.texts[key]
        return {"question": question, "source": source, "index": index, "answer": answer, "text": text}

    def write_output(self, prompts: Sequence[Prompt]) -> None:
        """Write the output: first these questions in their order, then others that an earlier run asked."""
        answers = {prompt.key: prompt.answer for prompt in prompts}
        rows: dict[str, dict[str, Any]] = {
            question: {"question": question, "answer": answer, **{source: [] for source in PREFIX_SOURCES}}
            for question, answer in (answers | self.answers | answers).items()
        }
        for (question, source, _), text in sorted(self.texts.items(), key=lambda entry: entry[0][2]):
            rows[question][source].append(text)
        held = {"recipe": self.settings["recipe"], "questions": list(rows.values())}
        write_file_atomically(self.output, json.dumps(held, ensure_ascii=False, indent=1) + "\n")


def format_line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"

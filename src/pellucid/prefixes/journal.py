"""The file of prefixes: each prefix is appended as a JSON line when it arrives, so a killed run can continue."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from pellucid.tasks.prefixed import PREFIX_SOURCES, read_prefix_file
from pellucid.types import Prompt, UserError
from pellucid.utils.files import write_file_atomically

_PrefixKey = tuple[str, str, int]
"""The question, the source, and the number of a prefix."""


class Journal:
    """All prefixes so far, in memory and in the file, whose first line holds the settings that they were made with.

    That line also says whether the file is complete. If it is not, the settings must not change.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings))
        self.entries: dict[_PrefixKey, Mapping[str, Any]] = {}
        self.is_complete = False
        self.lock, self.file = threading.Lock(), None
        if path.exists():
            self.load()

    def load(self) -> None:
        try:
            header, entries = read_prefix_file(self.path)
            settings, self.is_complete = dict(header["settings"]), bool(header["complete"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path} is not a prefix file: remove it, or choose another --output") from error
        # A complete file of the same recipe may be extended with other settings; an incomplete one needs the same.
        for name in ["recipe"] if self.is_complete else {**settings, **self.settings}:
            then, now = settings.get(name), self.settings.get(name)
            if then != now:
                raise UserError(
                    f"{self.path} was begun with {name} = {json.dumps(then, ensure_ascii=False)}, now it is"
                    f" {json.dumps(now, ensure_ascii=False)}: finish it with its own settings, choose another --output,"
                    " or remove it"
                )
        for entry in entries:
            self.entries[entry["question"], entry["source"], entry["index"]] = entry

    def list_missing(self, prompts: Iterable[Prompt], sources: Sequence[str], n: int) -> list[_PrefixKey]:
        wanted = ((p.key, source, index) for p in prompts for source in sources for index in range(n))
        return [key for key in wanted if key not in self.entries]

    def open(self) -> TextIO:
        """Open the file for `add`. This removes a line that was cut off when a process was killed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.write(self.entries.values(), is_complete=False)
        self.file = self.path.open("a", encoding="utf-8")
        return self.file

    def add(self, key: _PrefixKey, answer: str, text: str) -> None:
        question, source, index = key
        entry = {"question": question, "answer": answer, "source": source, "index": index, "text": text}
        with self.lock:
            assert self.file is not None, "open the journal before adding to it"
            self.entries[key] = entry
            self.file.write(_format_line(entry))
            self.file.flush()

    def finish(self, prompts: Sequence[Prompt]) -> None:
        """Write the complete file: these questions in their order, then others that an earlier run asked."""
        questions = dict.fromkeys([*(prompt.key for prompt in prompts), *(question for question, *_ in self.entries)])
        order = {question: i for i, question in enumerate(questions)}
        keys = sorted(self.entries, key=lambda key: (order[key[0]], PREFIX_SOURCES.index(key[1]), key[2]))
        self.write(map(self.entries.__getitem__, keys), is_complete=True)

    def write(self, entries: Iterable[Mapping[str, Any]], is_complete: bool) -> None:
        lines = [{"settings": self.settings, "complete": is_complete}, *entries]
        write_file_atomically(self.path, "".join(map(_format_line, lines)))


def _format_line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"

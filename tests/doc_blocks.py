"""Read the code blocks of the documents, the markers before them, and the commands in them.

| marker | the block |
|---|---|
| `<!-- file: NAME -->` | is a file in the folder of the page |
| `<!-- needs: WHAT -->` | is not run; its command lines are parsed, its Python is compiled |
| `<!-- fragment -->` | is a part of a program, which is compiled |
| `<!-- continues -->` | continues the Python block before it, with its names |
| `<!-- from: PATH -->` | is an excerpt of that file |
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
USER_FOLDERS = ("tutorials", "how-to", "explanation", "reference")
USER_PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "docs/index.md",
        *(page for folder in USER_FOLDERS for page in (ROOT / "docs" / folder).glob("*.md")),
    ]
)
LANGUAGES = {
    "sh",
    "python",
    "toml",
    "text",
    "console",
    "json",
    "jsonl",
    "jinja",
    "sql",
    "html",
    "csv",
    "dockerfile",
    "yaml",
}
_FENCE = re.compile(r"^(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)[ ]*$", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"<!-- (?P<name>\w+)(?:: (?P<value>.+?))? -->")
MARKERS = ("", "file", "needs", "fragment", "continues", "from")


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    marker: str
    value: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        marker = _MARKER.fullmatch(before.rstrip().rpartition("\n")[2])
        name, value = (marker["name"], marker["value"] or "") if marker else ("", "")
        line = before.count("\n") + 1
        blocks.append(Block(page, line, match["language"].strip(), match["text"], name, value))
    return blocks


def drop_blocks(text: str) -> str:
    """Return a page without its code blocks."""
    return _FENCE.sub("", text)


def split_commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a shell script, without assignments, comments and redirections."""
    line = ""
    for part in script.replace("\\\n", " ").splitlines():
        line = f"{line}\n{part}" if line else part
        try:
            parts = list(_make_lexer(line))
        except ValueError:  # a quotation continues on the next line
            continue
        yield from _split_line(parts)
        line = ""
    assert not line, line


def _make_lexer(line: str) -> shlex.shlex:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    return lexer


def _split_line(parts: list[str]) -> Iterator[list[str]]:
    words: list[str] = []
    for word in [*parts, ";"]:
        if word and set(word) <= set("();<>|&"):
            if words:
                yield words
            words = ["> "] if ">" in word or "<" in word else []  # the next word is a file name
        elif words or not re.fullmatch(r"\w+=.*", word):
            words.append(word)


def is_placeholder(word: str) -> bool:
    """Return whether a word of a command is a placeholder, like RUN, RECIPE.toml or ..."""
    return bool(re.search(r"\.\.\.|…|(?<![\w.])[A-Z][A-Z_]+(?![a-z_])", word))

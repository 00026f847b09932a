"""Tests that the terminal output escapes control characters in text from models, rewards and data."""

from __future__ import annotations

import io
import sys
import unicodedata

import pytest
import rich

from conftest import make_policy
from pellucid import cli
from pellucid.cli import TrainCommand
from pellucid.reporting.console import ConsoleLogger, PlainLogger, find_first_error, make_verdict_table
from pellucid.training.preflight import show_first_completion
from pellucid.types import Completion, Group, Prompt, Reward, UserError
from pellucid.utils.text import escape_controls

HOSTILE = {
    "red": "\x1b[31mred",
    "the cursor goes up": "\x1b[2A",
    "the title of the window": "\x1b]0;title\x07",
    "a link": "\x1b]8;;http://evil\x1b\\here\x1b]8;;\x1b\\",
    "C1": "\x9b31m\x9d0;title\x9c",
    "a carriage return": "wrong\rright",
    "backspaces": "wrong\b\b\b\b\b",
    "right to left": "\u202etxt.exe\u202c\u2067x\u2069\u200f\u061c",
    "NUL": "a\0b",
    "DEL": "a\x7fb",
    "half an emoji": "\ud83d",
    "line separators": "a\u2028b\u2029c\x85",
}
FORBIDDEN = {chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in ("Cc", "Cs")}
FORBIDDEN |= {
    c
    for code in range(sys.maxunicode + 1)
    if unicodedata.bidirectional(c := chr(code)) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
}
FORBIDDEN |= {"\u200e", "\u200f", "\u061c", "\u2028", "\u2029"}
FORBIDDEN -= {"\n", "\t"}


@pytest.fixture(params=HOSTILE)
def hostile(request):
    return HOSTILE[request.param]


def group(text, error="", answer=""):
    completion = Completion((1, 2), (-1.0, -1.0), text, True)
    return Group(Prompt("p", text or "?", answer), (1, 2), (completion,), (Reward(0.0, error=error),), (0.0,))


@pytest.mark.slow
def test_control_characters_and_no_others_are_escaped():
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    assert not FORBIDDEN & set(escape_controls(everything))
    kept = set(everything) - FORBIDDEN
    assert set(escape_controls("".join(sorted(kept)))) == kept, "and no other is touched"


def test_escapes_show_the_original_characters():
    assert escape_controls("\x1b[31mred\0\u202e\ud83d") == r"\x1b[31mred\x00\u202e\ud83d"
    assert escape_controls("two\n\tlines, é, 漢字, 👩‍🔬, بيلوسيد") == "two\n\tlines, é, 漢字, 👩‍🔬, بيلوسيد"


def test_verdict_table_escapes_control_characters(hostile, capsys):
    for shown in (group(hostile, answer=hostile), group(f"<think>{hostile}</think> {hostile}", error=hostile)):
        rich.print(make_verdict_table(shown))
    said = capsys.readouterr().out
    assert "question" in said
    assert not FORBIDDEN & set(said)


def test_first_completion_escapes_control_characters(hostile, capsys, monkeypatch):
    policy = make_policy()
    monkeypatch.setattr(type(policy), "decode", lambda *_, **__: hostile)
    show_first_completion(policy, group("", error=hostile, answer=hostile))
    said = capsys.readouterr().out
    assert "prompt tokens" in said
    assert not FORBIDDEN & set(said)


def test_reward_errors_escape_control_characters(hostile, capsys):
    groups = [group("", error=f"ValueError: {hostile}")]
    assert not FORBIDDEN & set(find_first_error(groups))
    PlainLogger(3).log(1, {"reward/failed": 1.0}, groups)
    said = capsys.readouterr().out
    assert "the first failed reward says ValueError" in said
    assert not FORBIDDEN & set(said)
    screen = ConsoleLogger(3, screen=rich.console.Console(file=io.StringIO(), width=200))
    screen.log(1, {"reward/failed": 1.0}, groups)
    screen.close()
    paper = rich.console.Console(file=io.StringIO(), width=200)
    paper.print(screen.render())
    assert "ValueError" in paper.file.getvalue()
    assert not FORBIDDEN & set(paper.file.getvalue())


def test_user_errors_escape_control_characters(hostile, capsys, monkeypatch):
    def fail(*_):
        raise UserError(f'line 1: the answer "{hostile}"')

    monkeypatch.setattr(TrainCommand, "__call__", fail)
    with pytest.raises(SystemExit):
        cli.main(["train"])
    said = capsys.readouterr().err
    assert said.startswith("pellucid: line 1")
    assert not FORBIDDEN & set(said)

"""The command line as tyro reads it: commands with their options, and help that shows the settings, too."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import tyro

from pellucid import flags
from pellucid.commands import shown
from pellucid.commands.examining import Doctor
from pellucid.commands.studying import Compare, Study
from pellucid.commands.training import Eval, Train
from pellucid.config import SECTIONS
from pellucid.machine.plugins import did_you_mean
from pellucid.prefixes.command import Prefixes
from pellucid.serve.command import Serve
from pellucid.types import UserError

COMMANDS: Mapping[str, type[Any]] = {
    "train": Train,
    "eval": Eval,
    "serve": Serve,
    "study": Study,
    "compare": Compare,
    "prefixes": Prefixes,
    "doctor": Doctor,
}
ABOUT = """Group Relative Policy Optimization, clear enough to see through.

Settings are given as --section.key VALUE. `pellucid COMMAND --help` shows those that people change, --help-all has all
of them, with the values of a recipe or of a task that is named: pellucid train RECIPE --help-all."""
RULE = re.compile("[│ ]*─{3,}")
"""The line in a box of tyro's between what is wrong and its advice."""


def parsed(words: Sequence[str]) -> Callable[[], int]:
    """Return the command that the words describe, to be called. UserError, one line, where they describe none."""
    command = named(words[0])
    own, settings = flags.split(words[1:])
    takes = options(command)
    for word in own:
        if word.startswith("--") and word.partition("=")[0].replace("_", "-") not in takes:
            raise UserError(f"{command} has no option {word}{meant(word, takes)}")
    if settings and "--settings" not in takes:
        raise UserError(f"{command} takes no settings, got {' '.join(settings)}")
    given = {"settings": tuple(settings)} if settings else {}
    return dataclasses.replace(told([command, *own], COMMANDS), **given)


def named(word: str) -> str:
    if word not in COMMANDS:
        close = did_you_mean(word, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        raise UserError(f"no such command: {word}{close}")
    return word


def options(command: str) -> list[str]:
    """Return the flags of a command, and that of what tyro brings."""
    fields = [field.name.replace("_", "-") for field in dataclasses.fields(COMMANDS[command])]
    return [flag for name in fields for flag in (f"--{name}", f"--no-{name}")]


def meant(word: str, takes: Sequence[str]) -> str:
    """Return the setting of the same name, or else the option of a similar one."""
    key = word.removeprefix("--").partition("=")[0].replace("-", "_")
    settings = [f"--{name}.{key}" for name, cls in SECTIONS.items() if key in flags.fields_of(cls)]
    if settings and "--settings" in takes:
        return f"; did you mean {' or '.join(settings)}?"
    known = [flag for flag in takes if not flag.startswith("--no-") and flag != "--settings"]
    return did_you_mean(word, known) or "; there are " + ", ".join(known)


def told(words: Sequence[str], commands: Mapping[str, type[Any]]) -> Any:
    """Return what tyro makes of the words. UserError, with the first lines of its box in one, where it refuses them."""
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return tyro.extras.subcommand_cli_from_dict(dict(commands), args=words, prog="pellucid", description=ABOUT)
    except SystemExit as end:
        if not end.code:
            raise
        raise UserError(f"{in_one_line(box.getvalue())}; see pellucid {words[0]} --help") from None


def in_one_line(box: str) -> str:
    """Return what is wrong, of a box that says it with a heading and with advice."""
    said = []
    for row in box.splitlines()[1:]:
        if RULE.match(row) or not row.startswith("│"):
            break
        said.append(row.strip("│ "))
    return " ".join(" ".join(said).split()).rstrip(".")


# ---------------------------------------------------------------- help


def help_on(words: Sequence[str]) -> None:
    """Print the commands, or the options of one with the settings that it takes."""
    rest = [word for word in words if word not in ("-h", "--help", "--help-all")]
    commands = dict(COMMANDS)
    if rest:
        own, settings = flags.split(rest[1:])
        command = named(rest[0])
        if "--settings" in options(command):
            recipe = recipe_in(own) if command in ("train", "prefixes") else None
            commands[command] = shown.with_settings(COMMANDS[command], recipe, settings, "--help-all" in words)
    told([*rest[:1], "--help"], commands)


def recipe_in(words: Sequence[str]) -> Path | None:
    """Return the recipe that a command line begins with, if it does."""
    return Path(words[0]) if words and not words[0].startswith("-") else None

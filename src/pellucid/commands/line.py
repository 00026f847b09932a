"""The command line as tyro reads it: commands with their options, and help that shows the settings, too."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from typing import Any, Literal, get_args, get_type_hints

import tyro
from tyro.conf import Positional

from pellucid import config, flags, recipes
from pellucid.commands import shown
from pellucid.commands.around import Init, List, Push
from pellucid.commands.examining import Doctor
from pellucid.commands.looking import Look, Show
from pellucid.commands.sampler import Sampler
from pellucid.commands.studying import Compare, Study
from pellucid.commands.training import Eval, Export, Train
from pellucid.config import SECTIONS
from pellucid.machine import plugins
from pellucid.machine.harmless import harmless
from pellucid.machine.plugins import did_you_mean
from pellucid.prefixes.command import Prefixes
from pellucid.renames import of_trl
from pellucid.serve.command import Serve
from pellucid.types import UserError


@dataclass(frozen=True)
class Completion:
    """Print what makes a shell complete these commands and their settings."""

    shell: Positional[Literal["bash", "zsh", "fish", "tcsh"]]
    """The shell; bash reads it by: source <(pellucid completion bash)."""

    def __call__(self) -> int:
        whole = {
            name: shown.with_settings(cls, None, (), True) for name, cls in COMMANDS.items() if takes_settings(name)
        }
        told(["--tyro-write-completion", self.shell, "-"], {**COMMANDS, **whole})
        return 0


COMMANDS: Mapping[str, type[Any]] = {
    "init": Init,
    "train": Train,
    "eval": Eval,
    "serve": Serve,
    "sampler": Sampler,
    "export": Export,
    "push": Push,
    "study": Study,
    "compare": Compare,
    "look": Look,
    "show": Show,
    "prefixes": Prefixes,
    "list": List,
    "doctor": Doctor,
    "completion": Completion,
}
ABOUT = """Group Relative Policy Optimization, clear enough to see through.

Settings are given as --section.key VALUE. `pellucid COMMAND --help` shows those that people change, --help-all has all
of them, with the values of a recipe or of a task that is named: pellucid train RECIPE --help-all."""
FRAME = "│|╭╮╰╯─-+ "
"""What tyro draws a box of, with or without Unicode."""


def parsed(args: Sequence[str]) -> Callable[[], int]:
    """Return the command that the words describe, to be called. UserError, one line, where they describe none."""
    command = named(args[0])
    own, settings = flags.split(args[1:])
    takes = options(command)
    unknown = [flag for flag in flags_in(own) if flag.replace("_", "-") not in takes]
    if unknown:
        raise UserError(
            plugins.in_one_line(f"{command} has no option {flag}{meant(flag, command)}" for flag in unknown)
        )
    for word in own:
        flag, equals, value = word.partition("=")
        if equals and takes.get(flag.replace("_", "-")) is bool:
            raise UserError(f"{flag} takes no value, got {value}")
    if settings and not takes_settings(command):
        raise UserError(f"{command} takes no settings, got {' '.join(settings)}")
    given = {"settings": tuple(settings)} if settings else {}
    return dataclasses.replace(told([command, *own], COMMANDS), **given)


def flags_in(args: Sequence[str]) -> list[str]:
    """Return the flags among words, each once and without a value behind =."""
    return list(dict.fromkeys(word.partition("=")[0] for word in args if word.startswith("--")))


def flag_of(setting: str) -> str:
    """Return a setting as the command line has it. Example: flag_of("algorithm.group_size")"""
    return f"--{setting.replace('_', '-')}"


def named(word: str) -> str:
    if word not in COMMANDS:
        close = did_you_mean(word, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        raise UserError(f"no such command: {word}{close}")
    return word


def takes_settings(command: str) -> bool:
    return any(field.name == "settings" for field in dataclasses.fields(COMMANDS[command]))


def options(command: str) -> dict[str, Any]:
    """Return the flags of a command with their types, those of what it is without among them."""
    kinds = get_type_hints(COMMANDS[command], include_extras=True)
    named = {name.replace("_", "-"): kind for name, kind in kinds.items() if name != "settings"}
    flagged = {name: kind for name, kind in named.items() if Positional not in get_args(kind)}
    without = {f"--no-{name}": kind for name, kind in flagged.items() if kind is bool}
    return {f"--{name}": kind for name, kind in flagged.items()} | without


def meant(word: str, command: str) -> str:
    """Return the setting of the same name, or else the option of a similar one."""
    key = word.removeprefix("--").replace("-", "_")
    settings = [f"--{name}.{key}" for name, cls in SECTIONS.items() if key in flags.fields_of(cls)]
    if settings and takes_settings(command):
        return f"; did you mean {' or '.join(settings)}?"
    if hint := of_trl(key, flag_of):
        return hint
    known = [flag for flag in options(command) if not flag.startswith("--no-")]
    return did_you_mean(word, known) or "; there are " + ", ".join(known)


def told(args: Sequence[str], commands: Mapping[str, type[Any]]) -> Any:
    """Return what tyro makes of the words. UserError, with the first lines of its box in one, where it refuses them."""
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return tyro.extras.subcommand_cli_from_dict(dict(commands), args=args, prog="pellucid", description=ABOUT)
    except SystemExit as end:
        if not end.code:
            raise
        raise UserError(f"{in_one_line(box.getvalue())}; see pellucid {args[0]} --help") from None


def in_one_line(box: str) -> str:
    """Return what is wrong, of a box in which a heading stands above it and advice below, behind a rule."""
    rows = [row.strip(FRAME) for row in box.splitlines()[1:]]
    wrong = takewhile(bool, dropwhile(lambda row: not row, rows))
    return " ".join(" ".join(wrong).split()).rstrip(".")


# ---------------------------------------------------------------- help


def help_on(args: Sequence[str]) -> None:
    """Print the commands, or the options of one with the settings that it takes."""
    rest = [word for word in args if word not in ("-h", "--help", "--help-all")]
    commands = dict(COMMANDS)
    if rest:
        own, settings = flags.split(rest[1:])
        command = named(rest[0])
        if takes_settings(command):
            named_recipe = own[0] if command in ("train", "prefixes") and own and not own[0].startswith("-") else ""
            recipe = recipes.find(named_recipe) if named_recipe else None
            if recipe and (code := config.code_in(config.read(recipe))):
                named_code = ", ".join(code)
                note = f"! {recipe} names code, which help does not run: {named_code}. Its settings are not listed.\n"
                print(harmless(note))
            commands[command] = shown.with_settings(COMMANDS[command], recipe, settings, "--help-all" in args)
    with suppress(SystemExit):
        told([*rest[:1], "--help"], commands)

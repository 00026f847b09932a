"""Prints the pages on commands and on errors, from the help and the error messages that the commands print.

python benchmarks/transcript.py commands > docs/reference/commands.md
python benchmarks/transcript.py errors > docs/reference/errors.md
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import tomllib
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from pellucid import cli
from pellucid.cli import COMMANDS

WIDTH = "88"
COMMANDS_HEAD = """# Commands

This page lists the commands of `pellucid` and their options, printed by
`python benchmarks/transcript.py commands`. Start with:

```sh
pellucid train recipes/arithmetic.toml
```

## Settings on the command line

Every [setting](settings.md) is an option of `train`, `eval`, `prefixes` and `doctor`: `--section.key VALUE`, with
hyphens or underscores.

| value | how to write it |
|---|---|
| a number or a text | `--algorithm.group-size 16` |
| true or false | `--policy.deterministic`, `--policy.no-deterministic`, or the words `True` and `False` |
| a list | `--task.operators + -` |
| rewards | their names: `--task.rewards numeric rewards.py:brevity` |
| one entry of a list | its number: `--task.rewards.0.weight 0.5` |
| one entry of a table | its name: `--policy.template-kwargs.enable_thinking False` |
| the task | `--task.name countdown` |

The command line wins over the recipe, and the recipe over the defaults. All settings are checked before anything is
written. After a [mistake](errors.md), a command prints one line and exits with status 2.

* `pellucid COMMAND --help` shows the options and the common settings; `--help-all` shows every setting. Both show the
  values of the recipe that you name: `pellucid train gsm8k --help-all`.
* `pellucid train RECIPE --dry-run` prints all settings, the numbers that follow from them, an estimate of the time of
  the run, and a prompt as the model reads it.
* `pellucid completion bash` (zsh, fish, tcsh) prints a script that completes commands and settings:
  `source <(pellucid completion bash)`.

## Exit status

| status | meaning |
|--:|---|
| 0 | Done. |
| 2 | A mistake that you can correct: one line says what and where. |
| 1 | A bug in the package, or a process of the run that died. |
| 130 | You pressed Ctrl-C twice. Everything saved is kept. |
"""
ERRORS_HEAD = """# Errors

Find your message on this page to see what helps. An error is one line that starts with `pellucid:`. In Python it is a
`pellucid.UserError`, the last line of the traceback. Some lines end with the name of a page that helps, such as
`(docs/how-to/rewards.md)`.

`python benchmarks/transcript.py errors` runs the commands below and prints this page.
"""


def main() -> None:
    os.environ |= {"COLUMNS": WIDTH, "HF_HUB_OFFLINE": "1"}
    {"commands": print_commands, "errors": print_errors}[sys.argv[1]]()


def print_commands() -> None:
    print(COMMANDS_HEAD)
    print_help("pellucid", "--help")
    for command in COMMANDS:
        print_help(f"pellucid {command}", f"{command} --help")


def print_help(heading: str, words: str) -> None:
    """Print the help of a command without the settings, which have their own page."""
    lines = [line.rstrip() for line in capture(words).strip().splitlines()]
    settings = next((i for i, line in enumerate(lines) if line.strip() == "policy options"), None)
    text = "\n".join(lines[:settings]).rstrip()
    print(f"## {heading}\n\n```text\n{text}\n```\n")
    if settings is not None:
        print("It also takes every [setting](settings.md).\n")


def print_errors() -> None:
    print(ERRORS_HEAD)
    causes = tomllib.loads(Path(__file__).with_name("errors.toml").read_text(encoding="utf-8"))["cause"]
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        capture("init .")
        for cause in causes:
            print_cause(cause)
        names = {path.name for path in Path().iterdir()} - {"__pycache__"}  # made by the import of rewards.py
        assert names == {"data.jsonl", "recipe.toml", "rewards.py"}, names


def print_cause(cause: dict[str, Any]) -> None:
    """Print the section of a cause in errors.toml, with what its commands print."""
    print(f"## {cause['title']}\n\n{cause['help'].strip()}\n")
    if commands := cause.get("commands", ""):
        examples = [f"$ pellucid {words}\n{capture(words).strip()}" for words in commands.strip().splitlines()]
        print("```console\n" + "\n".join(examples) + "\n```\n")
    if messages := cause.get("messages", []):
        print("| message | what to do |\n|---|---|")
        for message, advice in messages:
            print(f"| `{message}` | {advice} |")
        print()


def capture(words: str) -> str:
    """Run a command of `pellucid` in this process, and return what it prints on stdout and stderr."""
    printed = StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            cli.main(shlex.split(words))
    except SystemExit:
        return printed.getvalue()
    raise AssertionError(words)


if __name__ == "__main__":
    main()

"""Print docs/command-line.md: what every command says of itself, and how mistakes are answered.

python benchmarks/transcript.py > docs/command-line.md
"""

from __future__ import annotations

import os
import shlex
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from pellucid import cli
from pellucid.cli import COMMANDS

WIDTH = "100"
HEAD = """# The command line

Printed by `python benchmarks/transcript.py`; a test compares this page with what the commands say.

Settings are given as `--section.key VALUE`, with hyphens or underscores: `--algorithm.group-size 16`. A truth value may
stand alone (`--policy.deterministic`, `--policy.no-deterministic`) or with `True` or `False`; a list is words
(`--task.operators + -`), rewards are their names (`--task.rewards numeric rewards.py:brevity`), and what stands inside
is reached by dots (`--task.rewards.0.weight 0.5`, `--policy.template-kwargs.enable_thinking False`). `--task.name`
chooses the task. The command line wins over the recipe, the recipe over the defaults, and all of it is checked in one
place: a mistake is one line, says whose it is, and nothing has been written.

`pellucid COMMAND --help` shows the options and the settings that people change, `--help-all` has every setting; both
with the values of the recipe and the settings that stand before it: `pellucid train gsm8k --help-all`.
`pellucid train RECIPE --dry-run` prints all settings as a recipe, the numbers that follow from them, an estimate of the
time of the run ([fast.md](fast.md#how-long-a-run-takes)), and a prompt as the model reads it. `pellucid completion
bash` (zsh, fish, tcsh) prints what makes a shell complete all this: `source <(pellucid completion bash)`.
"""
MISTAKES = """
trian recipe.toml
train --ruin here
train --steps 30
train --run
train recipe.toml another.toml
train recpie.toml
train arithmatic
train recipe.toml --algorithm.group-sise 8
train recipe.toml --algoritm.steps 3
train recipe.toml --algorithm.steps
train recipe.toml --algorithm.steps 3 4
train recipe.toml --algorithm.steps many
train recipe.toml --algorithm.steps 0
train recipe.toml --optimizer.lr nan
train recipe.toml --policy.dtype float8
train recipe.toml --algorithm.objective ppo_clp
train recipe.toml --task.name countdwn
train recipe.toml --task.data questions.jsonl
train recipe.toml --task.rewards numerc
train recipe.toml --task.rewards reward.py:wanted
train recipe.toml --policy.model smollm2-153m
train recipe.toml --policy.model ./models/mine
train --resume runs/mine
train --resume runs/mine recipe.toml
eval
eval smollm2-135m --show many
eval smollm2-135m --output answers.csv
serve
serve stpo
serve smollm2-135m --port http
serve smollm2-135m --algorithm.steps 3
compare
compare runs/mine
look
look runs/mine
show runs/mine --step last
study stduy.toml
push runs/mine me/mine
list rewrads
init .
doctor --paln recipe.toml
completion nosh
"""


def main() -> None:
    os.environ |= {"COLUMNS": WIDTH, "HF_HUB_OFFLINE": "1"}
    print(HEAD)
    print("## What every command says of itself\n")
    for words in ("--help", *(f"{command} --help" for command in COMMANDS)):
        shown(words)
    print("## Mistakes\n\nIn a folder that `pellucid init .` has filled. Each ends with exit status 2.\n")
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        said("init .")
        told = [f"$ pellucid {words}\n{said(words).strip()}" for words in MISTAKES.strip().splitlines()]
        left = {path.name for path in Path().iterdir()} - {"__pycache__"}  # of the rewards, where Python keeps it
        assert left == {"data.jsonl", "recipe.toml", "rewards.py"}, left
    print("```\n" + "\n".join(told) + "\n```")


def shown(words: str) -> None:
    text = "\n".join(row.rstrip() for row in said(words).strip().splitlines())
    print(f"```\n$ pellucid {words}\n{text}\n```\n")


def said(words: str) -> str:
    """Return what a command prints, on either stream."""
    heard = StringIO()
    try:
        with redirect_stdout(heard), redirect_stderr(heard):
            cli.main(shlex.split(words))
    except SystemExit:
        return heard.getvalue()
    raise AssertionError(words)


if __name__ == "__main__":
    main()

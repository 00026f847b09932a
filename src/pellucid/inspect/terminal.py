"""`pellucid show`: prints a group of a step in the terminal, in color if the terminal has colors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pellucid.inspect.run_reader import open_recorded_run
from pellucid.inspect.sentences import explain_token, format_sentence, format_significant
from pellucid.inspect.steps import StepTokens
from pellucid.reporting import token_files
from pellucid.reporting.charts import format_count
from pellucid.reporting.token_files import KIND_GIVEN, KIND_PROMPT
from pellucid.types import UserError
from pellucid.utils.text import escape_controls

_INCREASE_RGB, _DECREASE_RGB = (33, 102, 172), (217, 95, 2)
"""A pair of colors that color-blind people can tell apart."""
_SHADES = (0.25, 0.5, 0.75, 1.0)
_MAX_SHOWN_TOKENS = 2000
"""The maximum number of tokens of an answer that are shown."""
_MAX_EXPLAINED_TOKENS = 6
"""The number of tokens that are explained: those that carry most of the gradient."""


def show_group(run_dir: Path, step: int | None, group: int | None, by: str, console: Console | None = None) -> int:
    """Print a group of a step, with its tokens colored by a quantity. Return the exit status.

    `step` defaults to the last recorded step, `group` to the group with the largest sum of gradients.

    Raises:
        UserError: The step or the group is not recorded.
    """
    run, console = open_recorded_run(run_dir), console or Console(highlight=False)
    recorded = token_files.list_recorded_steps(run_dir)
    if not recorded:
        raise UserError(f"{run_dir} has no recorded step yet: wait until a step has ended")
    step = recorded[-1] if step is None else step
    if step not in recorded:
        steps = f"{format_count(len(recorded), 'step')} from {recorded[0]} to {recorded[-1]}"
        nearest = min(recorded, key=lambda other: abs(other - step))
        raise UserError(f"{run_dir} has no tokens of step {step}: it recorded {steps}, the nearest is {nearest}")
    tokens, summary = run.read_tokens(step), run.read_summary(step)
    rows: dict[int, Mapping[str, Any]] = {row["group"]: row for row in summary["groups"] if row["recorded"]}
    if group is None:
        group = max(rows, key=lambda j: rows[j]["gradient"] or 0.0)
    if group not in rows:
        raise UserError(f"step {step} has no tokens of group {group}: it recorded groups {', '.join(map(str, rows))}")
    title = f"{escape_controls(run.run_dir.resolve().name)}, step {step}, group {group}"
    gradient, signal = rows[group]["gradient"], format_sentence(f"signal.{rows[group]['signal']}")
    about = signal if gradient is None else f"{signal}, sum of gradients {format_significant(gradient)}"
    console.print(Text().append(title, "bold").append(f"\n{about}\n"))
    if silent := tokens.metadata.get("silent", {}).get(str(group)):
        console.print(Text(format_sentence("group.silent", n=", ".join(map(str, silent))) + "\n"))
    sequences = _merge_equal_answers(tokens, group)
    rows_of_group = (i for copies in sequences for i in range(copies[0]["start"], copies[0]["end"]))
    largest = max((abs(tokens.columns[by][i] or 0.0) for i in rows_of_group), default=0.0)
    for copies in sequences:
        console.print(_render_sequence(tokens, copies, by, largest))
    legend = f"colors: {format_sentence(f'by.{by}')}, blue above 0, orange below; underlined: no gradient"
    console.print(Text(legend, "dim"))
    console.print(_build_gradient_table(tokens, group, sequences))
    return 0


def _merge_equal_answers(tokens: StepTokens, group: int) -> list[list[Mapping[str, Any]]]:
    """Return the sequences of a group, equal answers together, as page/tokens.js does: prompt, answers, branches."""
    ids = tokens.columns["token"]
    sequences = [each for each in tokens.sequences if each["group"] == group]
    prompts = [[each] for each in sequences if each["completion"] < 0]
    answers: dict[tuple[tuple[int, ...], Any], list[Mapping[str, Any]]] = {}
    for each in sequences:
        if each["completion"] >= 0 and each["branch"] == 0:
            answers.setdefault((tuple(ids[each["start"] : each["end"]]), each["reward"]), []).append(each)
    by_tokens = sorted(answers.items(), key=lambda item: (item[0][0], item[1][0]["completion"]))
    return [*prompts, *(copies for _, copies in by_tokens), *([each] for each in sequences if each["branch"] > 0)]


def _render_sequence(tokens: StepTokens, copies: Sequence[Mapping[str, Any]], by: str, largest: float) -> Text:
    """Return a sequence and its copies under one heading, each token colored by a quantity."""
    sequence = copies[0]
    start, end = sequence["start"], min(sequence["end"], sequence["start"] + _MAX_SHOWN_TOKENS)
    rendered = Text().append(_format_sequence_title(tokens, copies) + "\n", "bold")
    text, columns = tokens.columns["text"], tokens.columns
    for style, rows in groupby(range(start, end), key=lambda i: _choose_style(columns, i, by, largest)):
        rendered.append(escape_controls("".join(text[i] or "" for i in rows)), style)
    if rest := sequence["end"] - end:
        rendered.append(f"\n[{format_count(rest, 'more token')}]", "dim")
    return rendered.append("\n")


def _format_sequence_title(tokens: StepTokens, copies: Sequence[Mapping[str, Any]]) -> str:
    sequence = copies[0]
    if sequence["completion"] < 0:
        return format_sentence("prompt")
    reward = "reward failed" if sequence["reward"] is None else f"reward {format_significant(sequence['reward'])}"
    verdict = {True: ", right", False: ", wrong"}.get(sequence["correct"], "")
    cut = "" if sequence["finished"] else ", cut off"
    branch = f", branch {sequence['branch']}" if sequence["branch"] else ""
    advantages = tokens.columns["advantage"][sequence["start"] : sequence["end"]]
    first = next((value for value in advantages if value is not None), None)
    advantage = "" if first is None else f", advantage {format_significant(first)}"
    several = f"{len(copies)} identical answers: " if len(copies) > 1 else ""
    numbers = ", ".join(str(each["completion"]) for each in copies)
    return f"[{numbers}] {several}{reward}{verdict}{cut}{branch}{advantage}"


def _choose_style(columns: Mapping[str, Sequence[Any]], i: int, by: str, largest: float) -> str:
    """Return the style of a token: dim if given, else colored by its value, and underlined if it has no gradient."""
    if columns["kind"][i] in (KIND_GIVEN, KIND_PROMPT):
        return "dim"
    value = columns[by][i] or 0.0
    share = abs(value) / largest if largest else 0.0
    background = ""
    if share > 0.05:
        shade = next((shade for shade in _SHADES if share <= shade), 1.0)
        red, green, blue = (round(shade * x) for x in (_INCREASE_RGB if value > 0 else _DECREASE_RGB))
        background = f"white on rgb({red},{green},{blue})"
    return f"underline {background}".strip() if columns["rule"][i] else background


def _build_gradient_table(tokens: StepTokens, group: int, sequences: Sequence[Sequence[Mapping[str, Any]]]) -> Table:
    """Return a table of the tokens that carry most of a group's gradient; copies of an answer are counted together."""
    heads = ("token", "share", "before", "after", "ratio", "what happened")
    table = Table(*heads, box=None, header_style="dim", pad_edge=False)
    row_shares = tokens.compute_gradient_shares(group)
    shares: dict[int, float] = {}
    for copies in sequences if row_shares else ():
        first = copies[0]["start"]
        for i in range(first, copies[0]["end"]):
            shares[i] = sum(row_shares[i - first + each["start"]] for each in copies)
    largest = sorted((i for i in shares if shares[i]), key=lambda i: -shares[i])[:_MAX_EXPLAINED_TOKENS]
    for i in largest:
        token = {name: values[i] for name, values in tokens.columns.items()}
        name = repr(token["text"] or "")[1:-1].replace(" ", "·")[:24]
        cells = (
            name,
            f"{shares[i]:.1%}",
            *(format_significant(token[key]) for key in ("before", "after", "ratio")),
            explain_token(token, metadata=tokens.metadata),
        )
        table.add_row(*(Text(escape_controls(cell)) for cell in cells))
    return table

"""An answer on the screen, and how it was graded: for `pellucid eval`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from pellucid.machine.harmless import harmless
from pellucid.reporting.console import first_line
from pellucid.reporting.conversations import counts, events_of, told, turns_of
from pellucid.rewards.answers import split_thought
from pellucid.types import Completion, Group, Reward

MOST_CHARACTERS = 2000
"""How much of a message of a conversation is shown."""


def verdict(group: Group, has_verdicts: bool = True) -> Table:
    """Question, reasoning and answer, or the conversation, and grade of the first completion of a group.

    verdicts: whether rewards say which answers are right (`state_correctness`).
    """
    table = Table.grid(padding=(0, 2))
    completion, reward = group.completions[0], group.rewards[0]
    gold = f", {'right is' if has_verdicts else 'gold answer'} {' or '.join(group.prompt.gold_answers)}"
    right = gold if group.prompt.answer and not (has_verdicts and reward.is_correct) else ""
    cut = "" if completion.finished else ", cut off at the limit"
    held = f"; {', '.join(counts(turns_of(completion), events_of(completion)))}" if completion.messages else ""
    shown = [
        ("question", group.prompt.question),
        *said(completion),
        ("verdict", f"{graded(reward, has_verdicts)}{right}{cut}{held}"),
    ]
    for name, text in shown:
        if text:
            table.add_row(Text(harmless(name), "dim"), Text(harmless(text), overflow="fold"))
    table.add_row()
    return table


def said(completion: Completion) -> Iterator[tuple[str, str]]:
    """What followed the question, by who or what it is."""
    if completion.messages:
        yield from told(completion.messages, MOST_CHARACTERS)
    else:
        reasoning, answer = split_thought(completion.full_text)
        yield from (("reasoning", reasoning), ("answer", (answer or "").strip()))


def graded(reward: Reward, has_verdicts: bool) -> str:
    if reward.failed:
        return f"not graded: {first_line(reward) or 'the reward failed'}"
    judged = f"{'right' if reward.is_correct else 'wrong'}, " if has_verdicts else ""
    return f"{judged}reward {reward.value:.2f}"

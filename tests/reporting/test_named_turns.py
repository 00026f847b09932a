"""Tests of the names of speakers and called tools at the spans of a conversation's tokens."""

from __future__ import annotations

import pytest

from pellucid.reporting.conversations import list_turn_names
from pellucid.types import Completion


def calls(*names):
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name}} for name in names]}


def answers(name):
    return {"role": "tool", "name": name, "content": "42"}


SAYS, ASKS = {"role": "assistant", "content": "so"}, {"role": "user", "content": "and?"}


@pytest.mark.parametrize(
    ("messages", "given", "told"),
    [
        (
            [calls("add", "double"), answers("add"), answers("double"), SAYS],
            [(1, 3)],
            [["add", "double"], ["tool add", "tool double"], []],
        ),
        (
            [SAYS, ASKS, calls("a" * 50), answers("add")],
            [(1, 2), (4, 5)],
            [[], ["environment"], ["a" * 40 + "…"], ["tool add"]],
        ),
        ([calls("add"), answers("add")], [], [["add"]]),  # the conversation ended with a tool result
        ([calls("add"), answers("add"), SAYS], [(0, 1), (2, 3)], [[], ["add"], ["tool add"], []]),  # after a prefix
        ([SAYS, SAYS], [], []),  # one span with two messages has no name
        ([], [(0, 2)], []),
    ],
)  # fmt: skip
def test_names_are_listed_for_the_spans_of_their_turns(messages, given, told):
    completion = Completion(tuple(range(5)), (0.0,) * 5, "", True, given_spans=tuple(given), messages=tuple(messages))
    assert list_turn_names(completion) == told

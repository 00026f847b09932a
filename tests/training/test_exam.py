"""What `pellucid eval --output` writes of an answer."""

from __future__ import annotations

from pellucid.training.run import make_answer_records
from pellucid.types import Completion, ConversationOutcome, Group, Prompt, Reward

TALK = (
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Higher."},
    {"role": "assistant", "content": "7"},
)


def test_a_conversation_is_written_with_all_that_was_said():
    left = ConversationOutcome(0.5, events={"calls": 1})
    talk = Completion((1, 2, 3), (0.0,) * 3, "7", True, given_spans=((1, 2),), messages=TALK, outcome=left)
    alone = Completion((1,), (0.0,), "7", True)
    group = Group(Prompt("p", "?", "7"), (1,), (talk, alone), (Reward(1.0), Reward(0.0)))
    held, answered = make_answer_records([group], "greedy", verdicts=True)
    assert held["messages"] == [dict(message) for message in TALK]
    assert (held["answer"], held["turns"], held["tokens"]) == ("7", 2, 2)
    assert (held["events"], held["environment_reward"]) == ({"calls": 1}, 0.5)
    assert "messages" not in answered

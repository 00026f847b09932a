"""Test the tasks whose answers are conversations: prompts, replies and rewards."""

from __future__ import annotations

import pytest

from pellucid.environments.pool import InProcessEnvironments
from pellucid.tasks.calculator import Calculator, multiply
from pellucid.tasks.guess import Game, Guess
from pellucid.types import Completion, ConversationOutcome, PolicyTurn, Prompt, with_split


def spoken(*messages):
    """Return a conversation of the policy's texts. A text that starts with a bar is the reply of a tool."""
    told = [
        {"role": "tool", "name": "multiply", "content": text[1:]}
        if text.startswith("|")
        else {"role": "assistant", "content": text}
        for text in messages
    ]
    return Completion((1,), (0.0,), messages[-1], True, messages=tuple(told), outcome=ConversationOutcome())


def played(number, *guesses, turns=4):
    """Return the game's replies to the guesses."""
    game = Game()
    game.reset(number, turns)
    return [game.reply([{"role": "assistant", "content": text}]) for text in guesses]


def test_the_game_says_higher_or_lower_until_it_is_over():
    assert played(7, "5", "8", "7") == ["Higher.", "Lower.", None]
    assert played(7, "1", "2", "3", "4") == ["Higher.", "Higher.", "Higher.", None]
    assert played(7, "seven?", "is it 3, or 9") == ["Say a number.", "Lower."]
    assert played(7, "7", turns=1) == [None]


@pytest.mark.parametrize(
    ("turns", "value", "found"),
    [
        (["5", "7"], 1.0, True),
        (["5", "8", "6", "7"], 1.0, True),
        (["5", "8", "6", "9", "7"], 0.2, False),
        (["I say 5", "7"], 0.9, True),
        (["5", "no"], 0.1, False),
        (["7 or 8"], 0.0, False),
        (["no"], 0.0, False),
    ],
)
def test_guess_reward(turns, value, found):
    task = Guess(largest=10, guesses=4)
    reward = task.reward(Prompt("p", (), "7"), spoken(*turns))
    assert reward.value == pytest.approx(value)
    assert reward.correct == found


def test_each_number_is_hidden_once_per_cycle_and_never_shown():
    task = Guess(largest=10, guesses=4)
    numbers = [int(p.answer) for step in range(4) for p in task.sample(step, 5)]
    assert sorted(numbers[:10]) == sorted(numbers[10:]) == list(range(1, 11))
    assert numbers[:10] != numbers[10:]
    assert len({p.text[0]["content"] for p in task.sample(0, 10)}) == 1
    assert [p.answer for p in with_split(task, "test").sample(0, 10)] != [p.answer for p in task.sample(0, 10)]


@pytest.mark.parametrize(
    ("turns", "value", "parts"),
    [
        (["call", "|408", "12 * 34 = 408"], 1.0, (1.0, 1.0)),
        (["12 * 34 = 408"], 0.7, (0.0, 1.0)),
        (["call", "|408", "It is 407."], 0.3, (1.0, 0.0)),
        (["call", "|46", "46"], 0.0, (0.0, 0.0)),
    ],
)
def test_calculator_reward(turns, value, parts):
    reward = Calculator(digits=2).reward(Prompt("p", (), "408"), spoken(*turns))
    assert reward.value == pytest.approx(value)
    assert (reward.parts["called"], reward.parts["right"]) == parts
    assert reward.logged == {"right_by_tool": float(parts == (1.0, 1.0))}


@pytest.mark.parametrize("digits", [1, 3, 6])
def test_product_prompts_have_worked_examples_and_splits_share_none(digits):
    task = Calculator(digits=digits, examples=2)
    train, test = ({p.text[-1]["content"] for p in with_split(task, s).sample(0, 200)} for s in ("train", "test"))
    assert not train & test
    for prompt in with_split(task, "test").sample(3, 20):
        asked, call, told, said = prompt.text[:4]
        a, b = (int(word) for word in asked["content"][8:-1].split(" * "))
        assert call["tool_calls"][0]["function"]["arguments"] == {"a": a, "b": b}
        assert told["content"] == str(multiply(a, b))
        assert said["content"] == f"{a} * {b} = {a * b}"
        a, b = (int(word) for word in prompt.text[-1]["content"][8:-1].split(" * "))
        assert prompt.answer == str(a * b)
        assert len(prompt.text) == 9


def test_calculator_tool_is_called():
    task = Calculator()
    world = InProcessEnvironments(task.environment_spec)
    [prompt] = task.sample(0, 1)
    world.start_conversation(0, prompt, 0)
    [(_, reply)] = world.receive_replies(0)
    assert reply.prompt.tools[0]["function"]["name"] == "multiply"
    call = {"id": "call_0", "type": "function", "function": {"name": "multiply", "arguments": {"a": 111, "b": 9}}}
    world.send_turn(0, PolicyTurn({"role": "assistant", "content": "", "tool_calls": [call]}))
    assert world.receive_replies(0)[0][1].messages == ({"role": "tool", "name": "multiply", "content": "999"},)


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        (Guess, {"largest": 1}, "largest = 1 must be at least 2"),
        (Guess, {"format_reward": 1.0}, "format_reward = 1.0 must be at least 0 and below 1"),
        (Calculator, {"digits": 7}, "digits = 7 must be from 1 to 6"),
        (Calculator, {"credit": 1.0}, "credit = 1.0 must be at least 0"),
        (Calculator, {"examples": 9}, "examples = 9 must be from 0 to 8"),
    ],
)
def test_invalid_settings_are_refused(kind, settings, told):
    with pytest.raises(ValueError, match=told):
        kind(**settings)

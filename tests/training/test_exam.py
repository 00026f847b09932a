"""Tests of `pellucid eval`: the records of its answers, and the end of the processes that it starts."""

from __future__ import annotations

import pytest

from pellucid import config
from pellucid.rewards.grading import GradedTask
from pellucid.training import run
from pellucid.training.build import pick_sampler
from pellucid.training.run import make_answer_records
from pellucid.types import Completion, ConversationOutcome, Group, Prompt, Reward, UserError

TALK = (
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Higher."},
    {"role": "assistant", "content": "7"},
)


def test_records_of_conversations_hold_all_messages():
    left = ConversationOutcome(0.5, events={"calls": 1})
    talk = Completion((1, 2, 3), (0.0,) * 3, "7", True, given_spans=((1, 2),), messages=TALK, outcome=left)
    alone = Completion((1,), (0.0,), "7", True)
    group = Group(Prompt("p", "?", "7"), (1,), (talk, alone), (Reward(1.0), Reward(0.0)))
    held, answered = make_answer_records([group], "greedy", verdicts=True)
    assert held["messages"] == [dict(message) for message in TALK]
    assert (held["answer"], held["turns"], held["tokens"]) == ("7", 2, 2)
    assert (held["events"], held["environment_reward"]) == ({"calls": 1}, 0.5)
    assert "messages" not in answered


@pytest.mark.parametrize("error", ["", "the sampler failed"])
def test_reward_and_environment_processes_end_with_an_evaluation(error, recipe, monkeypatch):
    closed = []

    class Environments:
        def close(self):
            closed.append("environments")

    def fail(*_):
        raise UserError(error)

    cfg = config.load_config(recipe)
    close = GradedTask.close
    monkeypatch.setattr(GradedTask, "close", lambda task: (closed.append("rewards"), close(task)))
    monkeypatch.setattr(run, "make_environments", lambda *_: Environments())
    monkeypatch.setattr(run, "pick_sampler", lambda cfg, policy, _: pick_sampler(cfg, policy, None))
    if error:
        monkeypatch.setattr(run, "evaluate", fail)
        with pytest.raises(UserError, match=error):
            run.evaluate_model(cfg, cfg.policy.model, cfg.policy.access, show=0)
    else:
        assert run.evaluate_model(cfg, cfg.policy.model, cfg.policy.access, show=0) == 0
    assert sorted(closed) == ["environments", "rewards"]

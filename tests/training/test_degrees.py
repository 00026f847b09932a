"""Tests of tasks with continuous rewards: no output, report or record calls an answer right or wrong."""

from __future__ import annotations

import json
import re

import pytest

from conftest import records
from pages import Page
from pellucid import cli
from pellucid.rewards.terms import RewardTerm
from pellucid.tasks.dataset import Dataset
from pellucid.types import Completion, Prompt
from runs import train

OWN = "def digits(completions, **_):\n    return [sum(c.isdigit() for c in text) / 20 for text in completions]\n"


@pytest.fixture
def own(tmp_path):
    path = tmp_path / f"tone_{abs(hash(str(tmp_path)))}.py"
    path.write_text(OWN)
    return f"{path}:digits"


@pytest.fixture
def degrees(recipe, tmp_path, own):
    (tmp_path / "tone.jsonl").write_text("".join(json.dumps({"question": f"say {n}"}) + "\n" for n in range(40)))
    section = f'name = "dataset"\ndata = "{tmp_path}/tone.jsonl"\nchat = false\ntest_share = 0.3\n'
    section += f'[[task.rewards]]\nname = "{own}"\n'
    text = re.sub(r"(?<=\[task\]\n)\s*name = .*\n", section, recipe.read_text())
    recipe.write_text(text.replace("steps = 6", "steps = 2"))
    return recipe


def ended(*arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(map(str, arguments)))
    return exit_.value.code


def test_custom_reward_gives_degrees_unless_a_reward_decides(own):
    said = Completion((1,), (0.0,), "12x", True)
    for names, named, degree, correct in (
        ((own,), "", True, False),
        ((own,), "digits", False, False),
        (("exact", own), "", False, False),
        ((own, "exact"), "", True, False),
    ):
        task = Dataset(data="a.jsonl", rewards=tuple(map(RewardTerm, names)), correct=named)
        reward = task.reward(Prompt("p", "say", answer="no"), said)
        assert (reward.is_continuous, reward.correct, reward.is_verdict) == (degree, correct, not degree)
    task = Dataset(data="a.jsonl", rewards=(RewardTerm(own),))
    whole = task.reward(Prompt("p", "say"), Completion((1,), (0.0,), "1234567890" * 2, True))
    assert (whole.value, whole.is_correct, whole.is_verdict) == (1.0, True, True)


@pytest.mark.slow
def test_output_and_report_show_rewards_without_verdicts(degrees, tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert train(degrees, "--run", run_dir) == 0
    out = capsys.readouterr().out
    assert re.search(r"The mean reward of \d+ samples of \d+ prompts is 0\.\d+; ", out)
    assert (
        len(re.findall(r"^eval step \d  reward 0\.\d\d .*\(too few prompts for an interval\)$", out, re.MULTILINE)) == 2
    )
    assert "greedy" not in out
    assert re.search(r"^ +reward +0\.\d+ +0\.\d+ .* no interval", out, re.MULTILINE), "before and after"
    for claim in (r"\bright\b", r"\bwrong\b", r"0\.\d+ \["):
        assert not re.search(claim, out), claim
    assert [row["verdicts"] for row in records(run_dir / "evals.jsonl")] == [False, False]
    page = Page((run_dir / "report.html").read_text())
    assert "reward of greedy answers on 6 held-out prompts" in page
    assert "Held-out accuracy" not in page
    assert "so it may be chance" in page or "stayed at" in page
    assert "right" not in page
    assert "wrong" not in page
    rows = records(run_dir / "metrics.jsonl")
    assert any("groups/dead_equal" in row for row in rows)


def test_eval_writes_every_answer_to_a_file(degrees, model_dir, tmp_path, capsys):
    path = tmp_path / "new" / "answers.jsonl"
    command = ["eval", model_dir, "--task", degrees, "--show", 0, "--output", path]
    assert ended(*command) == 0
    assert f"answers {path}" in capsys.readouterr().out
    rows = records(path)
    assert [row["drawn"] for row in rows] == ["greedy"] * 6 + ["sample"] * 12
    assert [row["sample"] for row in rows[6:]] == [0, 1] * 6
    for row in rows:
        digits = sum(c.isdigit() for c in row["answer"])
        assert row["reward"] == pytest.approx(digits / 20)
        assert row["correct"] is None, "where rewards are degrees, 0 is the lowest of them and not wrong"
        assert row["question"].startswith("say ")
    before = path.read_text()
    assert ended(*command) == 2
    assert "already exists: name another file" in capsys.readouterr().err
    assert path.read_text() == before
    assert ended(*command[:-1], tmp_path / "answers.txt") == 2
    assert "must end in .jsonl" in capsys.readouterr().err
    assert ended(*command[:-1], degrees / "answers.jsonl") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "choose another" in line

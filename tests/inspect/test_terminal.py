"""Test how `pellucid show` prints a group in the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from made_runs import CONFIG, add_step, prompt, row, run_folder, small_run, write_tokens
from pages import HOSTILE
from pellucid.inspect import terminal
from pellucid.types import UserError
from runs import answered


def shown(run, step=None, group=None, by="change", color=None):
    screen = Console(file=io.StringIO(), width=100, force_terminal=bool(color), color_system=color, highlight=False)
    assert terminal.show_group(run, step, group, by, screen) == 0
    return screen.file.getvalue()


def test_last_step_and_group_with_largest_gradient_are_the_default(tmp_path):
    run = run_folder(tmp_path / "run")
    (run / "metrics.jsonl").touch()
    for step in (1, 2):
        write_tokens(run, step, [row(0, 0, 0, "little", gradient=0.1), row(1, 0, 0, f"much{step}", gradient=0.4)])
    text = shown(run)
    assert "step 2, group 1" in text
    assert "much2" in text
    assert "little" not in text
    assert "little" in shown(run, 1, 0)


@pytest.mark.parametrize("step", [None, 3])
def test_run_without_recorded_steps_raises_user_error(tmp_path, step):
    run = run_folder(tmp_path / "run", {**CONFIG, "log": {"tokens": 4}})
    with pytest.raises(UserError, match="has no recorded step yet"):
        shown(run, step)


def test_increases_are_blue_and_decreases_orange(tmp_path):
    run = run_folder(tmp_path / "run")
    up, down = row(0, 0, 0, "up", logprob_after=-0.1), row(0, 0, 1, "down", logprob_after=-0.9)
    write_tokens(run, 1, [prompt(0, 0, "Q"), up, down, row(0, 0, 2, "took", rule="clip_high", logprob_after=-0.5)])
    text = shown(run, color="truecolor")
    assert "\x1b[97;48;2;33;102;172mup" in text or "48;2;33;102;172mup" in text
    assert "48;2;217;95;2mdown" in text
    assert "\x1b[4mtook" in text
    assert "\x1b" not in shown(run)


def test_shares_of_the_gradient_match_hand_computed_ones(tmp_path):
    run = run_folder(tmp_path / "run")
    write_tokens(run, 1, [row(0, 0, 0, "a", gradient=0.3), row(0, 0, 1, "b", gradient=0.1)])
    assert "75.0%" in shown(run)
    assert "25.0%" in shown(run)


def test_identical_answers_are_merged_and_their_shares_added(tmp_path):
    run = run_folder(tmp_path / "run")
    rows = [row(0, c, 0, "same", gradient=0.3, advantage=0.378) for c in (0, 2)]
    rows += [row(0, 1, 0, "other", gradient=0.4, advantage=-1.5, reward=0.0, correct=False)]
    write_tokens(run, 1, rows)
    text = shown(run)
    assert "[0, 2] 2 identical answers: reward 1, right, advantage 0.378" in text
    assert "[1] reward 0, wrong, advantage -1.5" in text
    assert "60.0%" in text
    assert "30.0%" not in text


def test_answers_without_tokens_are_listed(tmp_path):
    run = run_folder(tmp_path / "run")
    write_tokens(run, 1, [row(0, 0, 0, "a"), row(1, 0, 0, "b")], silent={"0": [1, 3]})
    assert "before the policy spoke: answer 1, 3." in shown(run, 1, 0)
    assert "before the policy spoke" not in shown(run, 1, 1)


def test_control_characters_of_an_answer_are_escaped(tmp_path):
    run = run_folder(tmp_path / "run")
    add_step(run, 1, said=[HOSTILE.replace("\ud800", ""), "\x1b[2J", "\u202ereversed"])
    text = shown(run, 1, 0)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\x1b[2J" in text


def test_missing_steps_and_groups_raise_user_error(tmp_path):
    run = small_run(tmp_path / "run", steps=3)
    with pytest.raises(UserError, match=r"3 steps from 1 to 3, the nearest is 3"):
        shown(run, 7)
    with pytest.raises(UserError, match=r"it recorded groups 0, 1"):
        shown(run, 1, 2)


def test_show_and_look_run_from_the_command_line(tmp_path, capsys):
    run = small_run(tmp_path / "run", steps=1)
    assert answered("show", run, "--group", 1) == 0
    assert "group 1" in capsys.readouterr().out
    assert answered("look", run, "--output", tmp_path / "page.html") == 0
    assert "works without network" in capsys.readouterr().out
    assert answered("look", tmp_path) == 2
    assert answered("look", run, run, run) == 2
    assert answered("show", run_folder(tmp_path / "bare")) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert "[log]" in told[2]

"""Runs whose rewards fail: they stop before anything is trained, or where it goes on too long, and lose nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import pellucid
from conftest import mostly_slow, records
from pellucid import cli
from pellucid.reporting import loggers
from pellucid.reporting.run_files import list_checkpoints
from pellucid.training import build, run
from pellucid.types import UserError
from pellucid.utils.files import BoundedLog
from runs import same_run, train

TASKS = Path(__file__).parents[1] / "failing_task.py"


def of(recipe, name, *settings):
    """The recipe with another task."""
    other = recipe.with_name("failing.toml")
    other.write_text(recipe.read_text().replace("digits_task.py:Digits", f"{TASKS.name}:{name}"))
    return [other, *settings]


@pytest.mark.parametrize("evaluated", mostly_slow([0, 2], every=2))
@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("name", "NameError: name 'undefined_name' is not defined (failing_task.py, line "),
        ("segfault", "the reward ended its process (SIGSEGV)"),
        ("exit", "SystemExit: 3 (failing_task.py, line "),
        ("nan", "the reward is nan"),
        ("huge", "the reward is beyond 3.4e+38"),
    ],
)
def test_where_every_reward_of_the_first_look_fails_nothing_is_trained(
    recipe, tmp_path, monkeypatch, capsys, how, error, evaluated
):
    """And the corrected command finds nothing in its way."""
    monkeypatch.setattr(run.grpo, "update_policy", None)
    run_dir, settings = tmp_path / "runs" / "one", ["--evaluate.every", evaluated, "--evaluate.n", 2]
    command = of(recipe, "Broken", "--run", run_dir, *settings, "--algorithm.prompts-per-step", 2)
    assert train(*command, "--task.how", how) == 2
    told = capsys.readouterr()
    [line] = [line for line in told.err.splitlines() if line.startswith("pellucid:")]
    assert line.startswith("pellucid: every reward of the first 8 samples failed, the first with ")
    assert error in line
    assert "enough contrast" not in told.out
    assert "looking at it" not in told.out
    assert not run_dir.exists()
    monkeypatch.undo()
    assert train(*command, "--task.how", "not", "--algorithm.steps", 1) == 0


def test_one_failed_answer_to_the_only_held_out_question_does_not_refuse_the_run(recipe, tmp_path):
    """It is tried on prompts of the training split, and on samples, too."""
    command = of(recipe, "Broken", "--task.how", "not held out", "--run", tmp_path / "run", "--evaluate.n", 1)
    assert train(*command, "--algorithm.prompts-per-step", 2, "--algorithm.steps", 1, "--evaluate.k", 0) == 0
    [before, _] = records(tmp_path / "run" / "evals.jsonl")
    assert (before["n"], before["failed"]) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("evaluated", [2, 0])
def test_rewards_that_all_hang_are_found_by_a_few(recipe, tmp_path, capsys, evaluated):
    """Here all of the first look would be 40 + 40 * 4 of them, or 40 * 4."""
    settings = ["--evaluate.every", evaluated, "--evaluate.n", 40, "--algorithm.prompts-per-step", 40]
    command = of(recipe, "Broken", "--run", tmp_path / "run", *settings)
    assert train(*command, "--task.how", "hang", "--reward.timeout", 0.2) == 2
    line = "pellucid: every reward of the first 8 samples failed, the first with no reward within 0.2 s"
    assert f"{line} (docs/how-to/rewards.md)\n" in capsys.readouterr().err


def test_an_evaluation_in_which_every_reward_fails_ends_in_one_line(recipe, model_dir, capsys):
    [broken] = of(recipe, "Broken")
    broken.write_text(broken.read_text().replace("[sampler]", 'how = "name"\n[sampler]'))
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", str(model_dir), "--task", str(broken), "--show", "0"])
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert "pellucid: every reward of the first 18 samples failed, the first with NameError" in told.err
    assert "greedy" not in told.out


@pytest.mark.slow
def test_a_folder_that_was_there_before_stays_and_is_not_in_the_way(recipe, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    assert train(*of(recipe, "Broken", "--run", run_dir)) == 2
    assert run_dir.is_dir()
    assert train(*of(recipe, "Broken", "--run", run_dir, "--task.how", "not", "--algorithm.steps", 1)) == 0


@pytest.mark.slow
def test_after_so_many_steps_without_a_reward_the_run_is_saved_and_can_go_on(recipe, tmp_path, capsys):
    """To the same bits as a run of these steps that bore with it."""
    judge, whole, stopped = (tmp_path / name for name in ("judge", "whole", "stopped"))
    judge.touch()
    command = of(recipe, "Judged", "--task.judge", judge, "--checkpoint.every", 0)
    settings = [*command, "--run", stopped, "--reward.patience", 2, "--evaluate.every", 0]

    def lost_after(step):
        log = loggers.JsonlLogger.log

        def logged(self, number, *rest):
            log(self, number, *rest)
            if number == step:
                judge.unlink()

        return logged

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loggers.JsonlLogger, "log", lost_after(1))
        assert train(*settings) == 2
    told = capsys.readouterr()
    [line] = [line for line in told.err.splitlines() if line.startswith("pellucid:")]
    assert line.startswith(
        "pellucid: every reward of the last 2 steps failed, the last with ConnectionError: the judge does not answer"
    )
    assert f"--resume {stopped}" in told.out
    steps = records(stopped / "metrics.jsonl")
    assert [row["reward/failed"] for row in steps] == [0, 16, 16]
    assert [path.name for path in list_checkpoints(stopped)] == ["step-000003"]

    judge.touch()
    assert train("--resume", stopped, "--reward.patience", 5) == 0
    assert [row["reward/failed"] for row in records(stopped / "metrics.jsonl")] == [0, 16, 16, 0, 0, 0]

    judge.touch()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loggers.JsonlLogger, "log", lost_and_found(judge))
        assert train(*command, "--run", whole, "--reward.patience", 0, "--evaluate.every", 0) == 0
    same_run(whole, stopped)


def lost_and_found(judge):
    """Away in the second step and the third."""
    log = loggers.JsonlLogger.log

    def logged(self, number, *rest):
        log(self, number, *rest)
        if number == 1:
            judge.unlink()
        if number == 3:
            judge.touch()

    return logged


@pytest.mark.slow
def test_patience_is_with_steps_in_a_row(recipe, tmp_path):
    """Two and one without a reward, and one with."""
    judge = tmp_path / "judge"
    judge.touch()
    log = loggers.JsonlLogger.log

    def logged(self, number, *rest):
        log(self, number, *rest)
        judge.touch() if number in (3, 5) else judge.unlink(missing_ok=True)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loggers.JsonlLogger, "log", logged)
        command = of(recipe, "Judged", "--task.judge", judge, "--run", tmp_path / "run", "--evaluate.every", 0)
        assert train(*command, "--reward.patience", 3) == 0
    failed = [row["reward/failed"] for row in records(tmp_path / "run" / "metrics.jsonl")]
    assert failed == [0, 16, 16, 0, 16, 0]


@pytest.mark.parametrize("evaluated", [2, 0])
def test_a_reward_that_is_none_for_every_completion_ends_the_run_before_its_first_step(
    recipe, tmp_path, monkeypatch, capsys, evaluated
):
    monkeypatch.setattr(run.grpo, "update_policy", None)
    command = of(recipe, "Broken", "--task.how", "never meant", "--run", tmp_path / "run")
    assert train(*command, "--evaluate.every", evaluated, "--evaluate.n", 3) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pellucid:")]
    assert re.fullmatch(r"pellucid: every reward of the first \d+ samples is None: no reward applies to .*", line)
    assert not (tmp_path / "run").exists()


def test_a_reward_that_becomes_none_for_every_completion_stops_the_run_later(model_dir, tmp_path, capsys):
    def at_first(completions, trainer_state, **_):
        return [float(len(text)) if trainer_state.global_step < 1 else None for text in completions]

    rows = [{"question": f"{n}?"} for n in range(20)]
    small = {"model": model_dir, "chat": False, "max_tokens": 4, "prompts_per_step": 2, "group_size": 2}
    run_dir, small = tmp_path / "run", {**small, "steps": 9, "evaluate_every": 0, "reward_patience": 2}
    mine = pellucid.train(data=rows, reward=at_first, run=run_dir, **small)
    with pytest.raises(
        UserError, match="every reward of the last 2 steps failed, the last with None, since no reward app"
    ):
        mine.finish()
    assert [row["reward/no_term"] for row in records(run_dir / "metrics.jsonl") if "reward/no_term" in row] == [4, 4]
    assert list_checkpoints(run_dir)


@pytest.mark.slow
def test_a_reward_that_is_not_meant_for_some_prompts_has_not_failed(recipe, tmp_path, capsys):
    command = of(recipe, "Broken", "--task.how", "seldom meant", "--run", tmp_path / "run", "--reward.patience", 1)
    assert train(*command, "--algorithm.steps", 2) == 0
    steps = records(tmp_path / "run" / "metrics.jsonl")
    assert [row["reward/failed"] for row in steps] == [0, 0]
    assert all(row["reward/no_term"] > 0 for row in steps)
    told = capsys.readouterr().out
    assert "completions to which no reward applies" in told


def test_what_rewards_print_stands_in_the_run_s_log(recipe, tmp_path, capfd):
    run_dir = tmp_path / "run"
    assert train(*of(recipe, "Broken", "--task.how", "not", "--run", run_dir, "--algorithm.steps", 1)) == 0
    assert "looking at it" in (run_dir / "rewards.log").read_text()
    told = capfd.readouterr()
    assert "looking at it" not in told.out + told.err


def test_the_log_of_rewards_keeps_its_beginning_and_its_end(recipe, tmp_path, monkeypatch):
    """Of some 300 kB for each completion."""
    monkeypatch.setattr(build, "MAX_REWARD_LOG_BYTES", 2**20)
    command = of(recipe, "Broken", "--task.how", "talks a lot", "--run", tmp_path / "run", "--evaluate.every", 0)
    assert train(*command, "--algorithm.steps", 1) == 0
    log = (tmp_path / "run" / "rewards.log").read_text()
    assert 2**19 < len(log) <= 2**20
    assert log.startswith("looking at it\nla la")
    assert log.count("[left out: this file keeps its beginning and its end, 1 MB at most]\n") == 1
    assert {line for line in log.splitlines() if line.startswith("la ")} == {"la " * 100}


def test_a_log_without_lines_is_bounded_too(tmp_path):
    path = tmp_path / "log"
    bounded = BoundedLog(path, 1000, interval_seconds=0.01)  # there is no file yet
    path.write_bytes(b"x" * 5000 + b"y")
    bounded.close()
    kept = path.read_bytes()
    assert len(kept) < 1000
    assert (kept[:500], kept[-250:]) == (b"x" * 500, b"x" * 249 + b"y")


@pytest.mark.slow
def test_the_number_of_workers_changes_no_reward(recipe, tmp_path):
    one, three = tmp_path / "one", tmp_path / "three"
    assert train(recipe, "--run", one) == 0
    assert train(recipe, "--run", three, "--reward.workers", 3) == 0
    same_run(one, three)


@pytest.mark.slow
def test_settings_of_rewards_may_change_at_a_resume(recipe, tmp_path):
    run_dir = tmp_path / "run"
    assert train(recipe, "--run", run_dir, "--algorithm.steps", 1, "--evaluate.every", 0) == 0
    settings = ["--reward.timeout", 5, "--reward.workers", 2, "--reward.memory-gb", 4, "--reward.patience", 0]
    assert train("--resume", run_dir, "--algorithm.steps", 2, *settings) == 0
    assert json.loads((run_dir / "config.json").read_text())["reward"]["workers"] == 2


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        (("timeout", 0), "timeout = 0.0 must be a positive number of seconds"),
        (("workers", 0), "workers = 0 must be at least 1"),
        (("memory_gb", -1), "memory_gb and patience must not be negative"),
        (("patience", -1), "memory_gb and patience must not be negative"),
    ],
)
def test_settings_of_rewards_that_cannot_be_are_refused(recipe, tmp_path, capsys, setting, complaint):
    recipe.write_text(recipe.read_text() + f"[reward]\n{setting[0]} = {setting[1]}\n")
    assert train(recipe, "--run", tmp_path / "run") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"reward: {complaint}") or complaint in line

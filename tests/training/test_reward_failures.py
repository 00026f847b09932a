"""Tests of runs whose rewards fail: they stop before step 1 or after too many failed steps, and lose nothing."""

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
    """Return the arguments for the recipe with another task."""
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
def test_run_is_refused_if_every_reward_of_the_first_samples_fails(
    recipe, tmp_path, monkeypatch, capsys, how, error, evaluated
):
    """The corrected command then works in the same folder."""
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


def test_run_is_not_refused_for_one_failed_held_out_answer(recipe, tmp_path):
    """Rewards are also tried on samples for training prompts."""
    command = of(recipe, "Broken", "--task.how", "not held out", "--run", tmp_path / "run", "--evaluate.n", 1)
    assert train(*command, "--algorithm.prompts-per-step", 2, "--algorithm.steps", 1, "--evaluate.k", 0) == 0
    [before, _] = records(tmp_path / "run" / "evals.jsonl")
    assert (before["n"], before["failed"]) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("evaluated", [2, 0])
def test_hanging_rewards_are_detected_with_few_samples(recipe, tmp_path, capsys, evaluated):
    """The complete first look would compute 40 + 40 * 4 rewards, or 40 * 4 without an evaluation."""
    settings = ["--evaluate.every", evaluated, "--evaluate.n", 40, "--algorithm.prompts-per-step", 40]
    command = of(recipe, "Broken", "--run", tmp_path / "run", *settings)
    assert train(*command, "--task.how", "hang", "--reward.timeout", 0.2) == 2
    line = "pellucid: every reward of the first 8 samples failed, the first with no reward within 0.2 s"
    assert f"{line} (docs/how-to/rewards.md)\n" in capsys.readouterr().err


def test_eval_exits_with_one_line_if_every_reward_fails(recipe, model_dir, capsys):
    [broken] = of(recipe, "Broken")
    broken.write_text(broken.read_text().replace("[sampler]", 'how = "name"\n[sampler]'))
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", str(model_dir), "--task", str(broken), "--show", "0"])
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert "pellucid: every reward of the first 18 samples failed, the first with NameError" in told.err
    assert "greedy" not in told.out


@pytest.mark.slow
def test_existing_folder_survives_a_refused_run_and_is_usable(recipe, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    assert train(*of(recipe, "Broken", "--run", run_dir)) == 2
    assert run_dir.is_dir()
    assert train(*of(recipe, "Broken", "--run", run_dir, "--task.how", "not", "--algorithm.steps", 1)) == 0


@pytest.mark.slow
def test_run_is_saved_when_reward_patience_ends_and_can_be_resumed(recipe, tmp_path, capsys):
    """The resumed run has the bits of a run that tolerates the same failures."""
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
    """Return a log method after which the judge is absent in the second and the third step."""
    log = loggers.JsonlLogger.log

    def logged(self, number, *rest):
        log(self, number, *rest)
        if number == 1:
            judge.unlink()
        if number == 3:
            judge.touch()

    return logged


@pytest.mark.slow
def test_patience_counts_consecutive_failed_steps(recipe, tmp_path):
    """Two steps fail, one succeeds and one fails."""
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
def test_run_is_refused_if_every_reward_is_none(recipe, tmp_path, monkeypatch, capsys, evaluated):
    monkeypatch.setattr(run.grpo, "update_policy", None)
    command = of(recipe, "Broken", "--task.how", "never meant", "--run", tmp_path / "run")
    assert train(*command, "--evaluate.every", evaluated, "--evaluate.n", 3) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pellucid:")]
    assert re.fullmatch(r"pellucid: every reward of the first \d+ samples is None: no reward applies to .*", line)
    assert not (tmp_path / "run").exists()


def test_run_stops_after_every_reward_becomes_none(model_dir, tmp_path, capsys):
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
def test_none_for_some_prompts_does_not_count_as_failed(recipe, tmp_path, capsys):
    command = of(recipe, "Broken", "--task.how", "seldom meant", "--run", tmp_path / "run", "--reward.patience", 1)
    assert train(*command, "--algorithm.steps", 2) == 0
    steps = records(tmp_path / "run" / "metrics.jsonl")
    assert [row["reward/failed"] for row in steps] == [0, 0]
    assert all(row["reward/no_term"] > 0 for row in steps)
    told = capsys.readouterr().out
    assert "completions to which no reward applies" in told


def test_output_of_rewards_goes_to_the_log_of_the_run(recipe, tmp_path, capfd):
    run_dir = tmp_path / "run"
    assert train(*of(recipe, "Broken", "--task.how", "not", "--run", run_dir, "--algorithm.steps", 1)) == 0
    assert "looking at it" in (run_dir / "rewards.log").read_text()
    told = capfd.readouterr()
    assert "looking at it" not in told.out + told.err


def test_reward_log_keeps_its_beginning_and_its_end(recipe, tmp_path, monkeypatch):
    """Each completion prints about 300 kB."""
    monkeypatch.setattr(build, "MAX_REWARD_LOG_BYTES", 2**20)
    command = of(recipe, "Broken", "--task.how", "talks a lot", "--run", tmp_path / "run", "--evaluate.every", 0)
    assert train(*command, "--algorithm.steps", 1) == 0
    log = (tmp_path / "run" / "rewards.log").read_text()
    assert 2**19 < len(log) <= 2**20
    assert log.startswith("looking at it\nla la")
    assert log.count("[left out: this file keeps its beginning and its end, 1 MB at most]\n") == 1
    assert {line for line in log.splitlines() if line.startswith("la ")} == {"la " * 100}


def test_log_without_newlines_is_bounded(tmp_path):
    path = tmp_path / "log"
    bounded = BoundedLog(path, 1000, interval_seconds=0.01)  # the file does not exist yet
    path.write_bytes(b"x" * 5000 + b"y")
    bounded.close()
    kept = path.read_bytes()
    assert len(kept) < 1000
    assert (kept[:500], kept[-250:]) == (b"x" * 500, b"x" * 249 + b"y")


@pytest.mark.slow
def test_number_of_workers_changes_no_reward(recipe, tmp_path):
    one, three = tmp_path / "one", tmp_path / "three"
    assert train(recipe, "--run", one) == 0
    assert train(recipe, "--run", three, "--reward.workers", 3) == 0
    same_run(one, three)


@pytest.mark.slow
def test_reward_settings_may_change_at_a_resume(recipe, tmp_path):
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
def test_invalid_reward_settings_are_refused(recipe, tmp_path, capsys, setting, complaint):
    recipe.write_text(recipe.read_text() + f"[reward]\n{setting[0]} = {setting[1]}\n")
    assert train(recipe, "--run", tmp_path / "run") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"reward: {complaint}") or complaint in line

"""Tests for `pellucid study` on a tiny model: whole, interrupted, killed, changed and failing studies.

Most runs are forked. Only the last run of the killed study and one that fails at its start are new processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from conftest import records, tiny_recipe
from forked import Forked, ran
from pellucid import cli
from pellucid.reporting.run_files import is_run_finished
from pellucid.study import runner
from pellucid.study.plan import StudyRun
from pellucid.types import UserError
from pellucid.utils.files import check_unlocked

FORKING = Path(__file__).with_name("forking_study.py")
STEPS = 20
TIMED = ("time/", "memory/")
STUDY = """
base = "tiny.toml"
seeds = [0, 1]
[common.algorithm]
steps = 20
epochs = 1
minibatches = 1
micro_batch = 0
[common.evaluate]
every = 10
[common.log]
tensorboard = false
[variants.grpo]
[variants.centered.algorithm]
advantage = "centered"
"""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """Use one thread, in the runs as well, because the number of threads may change rounding."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(runner.os, "cpu_count", lambda: 2)


@pytest.fixture(scope="module")
def study_file(tmp_path_factory, model_dir):
    folder = tmp_path_factory.mktemp("studies")
    tiny_recipe(folder / "tiny.toml", model_dir)
    (folder / "study.toml").write_text(STUDY)
    return folder / "study.toml"


@pytest.fixture(scope="module")
def whole(study_file):
    """Return the folder and the output of an uninterrupted study that runs both variants at once."""
    into = study_file.parent / "whole"
    done = ran(FORKING, study_file, "--into", into, "--jobs", "2", env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return into, done.stdout


def study(*arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["study", *map(str, arguments)])
    return exit_.value.code


def untimed(path):
    return [{key: value for key, value in row.items() if not key.startswith(TIMED)} for row in records(path)]


def until(condition, process):
    """Wait for a condition. The suite's time limit ends the wait for one that never holds."""
    while not condition():
        assert process.poll() is None
        time.sleep(0.02)


def started(study_file, into, said):
    with said.open("w") as stdout:
        return Forked(FORKING, study_file, "--into", into, stdout=stdout)


def has_steps(run_dir):
    return lambda: bool(list((run_dir / "checkpoints").glob("step-*[0-9]")))


@pytest.mark.slow
def test_study_runs_every_variant_with_every_seed(whole):
    into, printed = whole
    for variant in ("grpo", "centered"):
        for seed in (0, 1):
            run_dir = StudyRun(into, variant, seed).run_dir
            assert is_run_finished(run_dir)
            assert [row["step"] for row in records(run_dir / "metrics.jsonl")] == list(range(1, STEPS + 1))
            assert not (run_dir / "checkpoints").exists()
            assert not (run_dir / "model").exists()
            accuracy = [row["greedy"]["value"] for row in records(run_dir / "evals.jsonl")]
            assert f"{variant} seed {seed}: done in" in printed
            assert f"greedy accuracy {accuracy[0]:.3f} -> {accuracy[-1]:.3f}" in printed
    lines = printed.splitlines()
    assert lines[0] == f"4 runs in {into}: 0 done, 4 to go"
    assert [line.split(":")[0] for line in lines[1:3]] == ["grpo seed 0", "centered seed 0"], "seeds first"
    assert "4/4, none left" in lines[-1]


@pytest.mark.slow
def test_interrupted_and_killed_study_reaches_the_same_runs(study_file, whole, tmp_path, capfd):
    into = tmp_path / "into"
    first, second = (StudyRun(into, "grpo", seed) for seed in (0, 1))
    copies = [copied(StudyRun(whole[0], "centered", seed).run_dir, into) for seed in (0, 1)]
    before = [path.stat().st_mtime_ns for path in copies]

    process = started(study_file, into, tmp_path / "said")
    until(has_steps(first.run_dir), process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert "the same command continues" in (tmp_path / "said").read_text()
    assert "--resume" in first.log_path.read_text(), "the run saved itself"
    assert not second.run_dir.exists()

    process = started(study_file, into, tmp_path / "said")
    until(has_steps(second.run_dir), process)
    orphan = int((into / ".lock").read_text().split()[-1])
    os.kill(orphan, signal.SIGSTOP)
    process.kill()
    process.wait()
    assert study(study_file, "--into", into) == 2
    assert f"process {orphan} is at work" in capfd.readouterr().err
    os.kill(orphan, signal.SIGKILL)
    until_unlocked(into / ".lock")

    assert study(study_file, "--into", into) == 0
    assert f"4 runs in {into}: 3 done, 1 to go\ngrpo seed 1: resumed" in capfd.readouterr().out
    assert [path.stat().st_mtime_ns for path in copies] == before, "what is done is not done again"
    for cell in (first, second):
        other = StudyRun(whole[0], cell.variant, cell.seed).run_dir
        for name in ("metrics.jsonl", "evals.jsonl"):
            assert untimed(cell.run_dir / name) == untimed(other / name), cell


def copied(run_dir, into):
    """Copy the files of a finished run that are kept as data. Return the copy of its metrics."""
    copy = into / run_dir.parent.name / run_dir.name
    copy.mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl", "evals.jsonl"):
        shutil.copy(run_dir / name, copy)
    return copy / "metrics.jsonl"


def until_unlocked(path):
    """Wait for the lock of a killed orphan, which its last thread holds even after the main thread has ended."""
    while True:
        try:
            return check_unlocked(path, "is at work")
        except UserError:
            time.sleep(0.02)


@pytest.fixture
def changed(study_file, tmp_path):
    """Return the file of the same study with one variant changed."""
    path = tmp_path / "changed.toml"
    text = study_file.read_text().replace('base = "', f'base = "{study_file.parent}/')
    path.write_text(text.replace('"centered"', '"rloo"'))
    return path


def test_a_study_whose_settings_have_changed_is_refused(changed, whole, capsys):
    recipe = whole[0] / "centered" / "recipe.json"
    before = recipe.read_text()
    assert study(changed, "--into", whole[0]) == 2
    complaint = capsys.readouterr().err
    assert "centered/seed-0 was made with algorithm.advantage = 'centered', the study says 'rloo'" in complaint
    assert complaint.count("\n") == 1
    assert recipe.read_text() == before, "a refused study leaves everything as it was"


def test_recipes_of_variants_left_out_do_not_change(changed, whole):
    """They record the settings of their runs."""
    recipe = whole[0] / "centered" / "recipe.json"
    before = recipe.read_text()
    assert study(changed, "--into", whole[0], "--only", "grpo") == 0
    assert recipe.read_text() == before


def test_a_finished_study_has_nothing_to_do(study_file, whole, capsys):
    assert study(study_file, "--into", whole[0], "--only", "grpo") == 0
    assert capsys.readouterr().out == f"2 runs in {whole[0]}: 2 done, 0 to go\n"


def test_files_in_the_working_directory_do_not_shadow_python_modules(tmp_path, monkeypatch):
    """This includes a module that Python needs to find the package: the run ends with its own error message."""
    (tmp_path / "contextlib.py").write_text("raise SystemExit(7)")
    (tmp_path / "grpo").mkdir()
    monkeypatch.chdir(tmp_path)
    cell = StudyRun(tmp_path, "grpo", 0)
    with (tmp_path / "lock").open("w") as lock:
        assert runner.start_job(cell, 1, lock).process.wait() == 2
    assert "recipe.json: there is no such file" in cell.log_path.read_text()


STAND_IN = """#!/bin/sh
case "$*" in
  *grpo*) echo "pellucid: the disk is full"; echo; exit 2;;
  *) eval "cp -r {run_dir} \\${{$#}}";;
esac
"""


@pytest.mark.slow
def test_failing_run_is_named_and_does_not_stop_the_others(study_file, whole, tmp_path, capsys, monkeypatch):
    """A stand-in for Python fails for one variant and copies a finished run for the other."""
    program = tmp_path / "python"
    program.write_text(STAND_IN.format(run_dir=StudyRun(whole[0], "centered", 0).run_dir))
    program.chmod(0o755)
    monkeypatch.setattr(runner.sys, "executable", str(program))
    one_seed = study_file.with_name("one_seed.toml")
    one_seed.write_text(study_file.read_text().replace("[0, 1]", "[0]"))
    assert study(one_seed, "--into", tmp_path / "into") == 2
    printed = capsys.readouterr().out
    assert "failed (exit 2): grpo seed 0: pellucid: the disk is full\n" in printed
    assert f"to retry: pellucid train {tmp_path}/into/grpo/recipe.json --algorithm.seed 0 --run" in printed
    assert "centered seed 0: done" in printed


@pytest.mark.parametrize(("statuses", "verdict"), [([], 0), ([2, 2], 2), ([2, 1], 1), ([-9], 1), ([0], 1)])
def test_exit_status_follows_the_failed_runs(tmp_path, statuses, verdict):
    cells = [StudyRun(tmp_path, "grpo", seed) for seed in range(len(statuses))]
    (tmp_path / "grpo").mkdir()
    for cell in cells:
        cell.log_path.write_text("Traceback\nboom\n\n")
    assert runner.report_failures(dict(zip(cells, statuses, strict=True))) == verdict


def test_file_in_place_of_the_output_folder_exits_2(study_file, tmp_path, capsys):
    (tmp_path / "file").touch()
    for into in (tmp_path / "file", tmp_path / "file" / "into"):
        assert study(study_file, "--into", into) == 2
        assert "choose another path" in capsys.readouterr().err


def test_zero_jobs_exits_2(study_file, tmp_path, capsys):
    assert study(study_file, "--into", tmp_path / "into", "--jobs", "0") == 2
    assert "--jobs 0 must be at least 1" in capsys.readouterr().err

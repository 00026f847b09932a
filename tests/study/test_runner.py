"""Studies of a tiny model through the command line's own path: interrupted, killed, changed, failing.

Their runs are forked, but for the last of the one that was killed and one that fails at its start: those are started.
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
    """In the runs too: threads may round otherwise."""
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
    """A study that nothing interrupted, and what was printed; both its variants at once."""
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
    """A condition that never holds is for the suite's own time limit to tell."""
    while not condition():
        assert process.poll() is None
        time.sleep(0.02)


def started(study_file, into, said):
    with said.open("w") as stdout:
        return Forked(FORKING, study_file, "--into", into, stdout=stdout)


def has_steps(run_dir):
    return lambda: bool(list((run_dir / "checkpoints").glob("step-*[0-9]")))


@pytest.mark.slow
def test_a_study_is_the_runs_of_every_variant_with_every_seed(whole):
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
def test_a_study_interrupted_and_killed_comes_to_the_same_runs(study_file, whole, tmp_path, capfd):
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
    """What of a finished run is kept as data."""
    copy = into / run_dir.parent.name / run_dir.name
    copy.mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl", "evals.jsonl"):
        shutil.copy(run_dir / name, copy)
    return copy / "metrics.jsonl"


def until_unlocked(path):
    """The lock of an orphan that was killed is held until the last of its threads is gone, its main thread before."""
    while True:
        try:
            return check_unlocked(path, "is at work")
        except UserError:
            time.sleep(0.02)


@pytest.fixture
def changed(study_file, tmp_path):
    """The same study but for one variant."""
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


def test_recipes_of_variants_that_are_left_out_stay_as_they_are(changed, whole):
    """They are what their runs were made with."""
    recipe = whole[0] / "centered" / "recipe.json"
    before = recipe.read_text()
    assert study(changed, "--into", whole[0], "--only", "grpo") == 0
    assert recipe.read_text() == before


def test_a_finished_study_has_nothing_to_do(study_file, whole, capsys):
    assert study(study_file, "--into", whole[0], "--only", "grpo") == 0
    assert capsys.readouterr().out == f"2 runs in {whole[0]}: 2 done, 0 to go\n"


def test_no_file_of_the_working_directory_is_taken_for_a_module_of_python(tmp_path, monkeypatch):
    """Not even for one that Python needs to find the package: the run ends with a mistake of its own."""
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
def test_a_failing_run_is_named_and_does_not_stop_the_others(study_file, whole, tmp_path, capsys, monkeypatch):
    """Trained by a program that fails for one variant, and copies the run that the other asks for."""
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
def test_the_exit_status_is_that_of_what_failed(tmp_path, statuses, verdict):
    cells = [StudyRun(tmp_path, "grpo", seed) for seed in range(len(statuses))]
    (tmp_path / "grpo").mkdir()
    for cell in cells:
        cell.log_path.write_text("Traceback\nboom\n\n")
    assert runner.report_failures(dict(zip(cells, statuses, strict=True))) == verdict


def test_a_file_in_the_way_is_a_mistake(study_file, tmp_path, capsys):
    (tmp_path / "file").touch()
    for into in (tmp_path / "file", tmp_path / "file" / "into"):
        assert study(study_file, "--into", into) == 2
        assert "choose another path" in capsys.readouterr().err


def test_no_run_at_once_is_a_mistake(study_file, tmp_path, capsys):
    assert study(study_file, "--into", tmp_path / "into", "--jobs", "0") == 2
    assert "--jobs 0 must be at least 1" in capsys.readouterr().err

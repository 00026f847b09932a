"""Tests for what a study does with the folder of a run: finished, to be resumed, or in the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from study_data import STEPS, write_run

from pellucid import config
from pellucid.reporting.run_files import is_run_finished
from pellucid.study.plan import StudyRun
from pellucid.study.runner import (
    build_resume_arguments,
    check_run_dir,
    clear_unresumable_run,
    get_expected_settings,
    prune_finished_run,
)
from pellucid.training import run_dir as claim
from pellucid.training import run_dir as files
from pellucid.types import UserError


@pytest.fixture
def cell(tmp_path):
    return StudyRun(tmp_path / "study", "grpo", 3)


def checkpoint(run_dir, name="step-000002"):
    (run_dir / "checkpoints" / name).mkdir(parents=True)


def test_run_with_three_copied_files_is_finished(tmp_path):
    assert is_run_finished(write_run(tmp_path / "run", [1, 0]))


def test_run_without_its_last_step_or_evaluation_is_not_finished(tmp_path):
    assert not is_run_finished(tmp_path / "nowhere")
    assert not is_run_finished(write_run(tmp_path / "short", [1, 0], steps=STEPS - 1))
    run_dir = write_run(tmp_path / "run", [1, 0])
    first, _ = (run_dir / "evals.jsonl").read_text().splitlines()
    (run_dir / "evals.jsonl").write_text(first + "\n")
    assert not is_run_finished(run_dir)


def test_run_without_evaluations_is_finished_by_its_last_step(tmp_path):
    run_dir = write_run(tmp_path / "run", [1, 0])
    (run_dir / "evals.jsonl").unlink()
    settings = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps({**settings, "evaluate": {"every": 0}}))
    assert is_run_finished(run_dir)


def test_run_with_a_time_limit_is_finished_when_it_is_used_up(tmp_path):
    """Each step takes half a minute."""
    assert is_run_finished(write_run(tmp_path / "over", [1], steps=2, settings={"minutes": 1}))
    assert not is_run_finished(write_run(tmp_path / "under", [1], steps=1, settings={"minutes": 1}))


def test_run_with_a_checkpoint_but_no_model_is_resumed(tmp_path, cell):
    run_dir = write_run(cell.run_dir, [1, 0])
    checkpoint(run_dir, "step-000004.partial")
    assert is_run_finished(run_dir)
    assert not build_resume_arguments(cell)
    checkpoint(run_dir)
    assert not is_run_finished(run_dir)
    assert build_resume_arguments(cell) == ["train", "--resume", str(run_dir)]
    (run_dir / "model").mkdir()
    assert is_run_finished(run_dir)


@pytest.mark.parametrize("keep", [True, False])
def test_finished_run_stays_finished_when_pruned(tmp_path, keep):
    run_dir = write_run(tmp_path / "run", [1, 0])
    checkpoint(run_dir)
    for saved in ("model", "adapter"):
        (run_dir / saved).mkdir()
    prune_finished_run(run_dir, keep)
    assert not (run_dir / "checkpoints").exists()
    assert (run_dir / "model").exists() == (run_dir / "adapter").exists() == keep
    assert is_run_finished(run_dir)


# ---------------------------------------------------------------- runs of this cell or of other settings


def write_config(cell, *overrides):
    """Write config.json as a run does, which resolves its dtype, max_length and task seed itself."""
    settled = ["--policy.dtype", "bfloat16", "--algorithm.max-length", "64", "--task.seed", "3"]
    settings = config.dump_config(config.load_config(None, ["--algorithm.seed", str(cell.seed), *settled, *overrides]))
    cell.run_dir.mkdir(parents=True)
    (cell.run_dir / "config.json").write_text(json.dumps({**settings, "digests": {}, "versions": {"torch": "2"}}))


RECIPE = config.load_config(None)


def test_run_matches_its_recipe_despite_settings_it_resolved(cell):
    write_config(cell)
    check_run_dir(cell, RECIPE)


def test_seed_of_a_wrapped_task_is_set_on_the_inner_task(cell):
    """A seed that the inner task sets itself is kept."""
    path = cell.study_dir.parent / "prefixed.toml"
    for seed in (0, 7):
        path.write_text(f'[task]\nname = "prefixed"\n[task.task]\nname = "arithmetic"\nseed = {seed}\n')
        task = get_expected_settings(cell, config.load_config(path))["task"]
        assert (task["name"], task["task"]["seed"]) == ("prefixed", seed or 3)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["--optimizer.lr", "0.5"], "optimizer.lr = 0.5, the study says"),
        (["--task.digits", "3"], "task.digits = 3, the study says"),
        (["--algorithm.seed", "7"], "algorithm.seed = 7, the study says 3"),
        (["--task.seed", "7"], "task.seed = 7, the study says 3"),
        (["--algorithm.max-length", "16"], "algorithm.max_length = 16, the study says 64"),
    ],
)
def test_run_of_other_settings_is_refused(cell, overrides, complaint):
    write_config(cell, *overrides)
    with pytest.raises(UserError, match=complaint) as refused:
        check_run_dir(cell, RECIPE)
    assert "choose another --into, or delete that run" in str(refused.value)


def test_dtype_named_by_the_recipe_must_match(cell):
    write_config(cell)
    with pytest.raises(UserError, match=r"policy\.dtype"):
        check_run_dir(cell, config.load_config(None, ["--policy.dtype", "float32"]))


def test_folder_that_is_not_a_run_is_not_removed(cell):
    cell.run_dir.mkdir(parents=True)
    check_run_dir(cell, RECIPE)
    (cell.run_dir / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="is not a run"):
        check_run_dir(cell, RECIPE)
    assert (cell.run_dir / "thesis.tex").exists()


def test_run_without_a_checkpoint_is_removed(cell, tmp_path):
    """The files behind a symbolic link are removed as well, but not the link."""
    clear_unresumable_run(cell.run_dir)
    elsewhere = tmp_path / "larger disk"
    (elsewhere / "tensorboard").mkdir(parents=True)
    (elsewhere / "config.json").write_text('{"algorithm": {"st')
    cell.run_dir.parent.mkdir(parents=True)
    cell.run_dir.symlink_to(elsewhere)
    check_run_dir(cell, RECIPE)
    clear_unresumable_run(cell.run_dir)
    assert cell.run_dir.is_dir()
    assert not list(elsewhere.iterdir())


def test_run_killed_while_writing_its_first_file_is_not_in_the_way(cell):
    cell.run_dir.mkdir(parents=True)
    (cell.run_dir / "config.json.partial").write_text('{"algorithm": {"st')
    check_run_dir(cell, RECIPE)


def test_run_with_unreadable_settings_is_not_removed(cell):
    """It may be finished: somebody may have edited its config.json."""
    run_dir = write_run(cell.run_dir, [1, 0])
    (run_dir / "config.json").write_text('{"algorithm": {},}')
    with pytest.raises(UserError, match=r"config\.json cannot be read: fix it"):
        check_run_dir(cell, RECIPE)


def test_a_run_that_another_process_trains_is_left_alone(cell):
    write_config(cell)
    with claim.hold_run_dir(cell.run_dir):
        for touch in (lambda: check_run_dir(cell, RECIPE), lambda: clear_unresumable_run(cell.run_dir)):
            with pytest.raises(UserError, match=f"trains in {cell.run_dir}: wait for it"):
                touch()
    clear_unresumable_run(cell.run_dir)
    assert [path.name for path in cell.run_dir.iterdir()] == [".lock"]
    check_run_dir(cell, RECIPE)


def test_a_run_whose_task_was_edited_since_is_refused(cell, tmp_path):
    task = tmp_path / "edited_since_task.py"
    task.write_text((Path(__file__).parent.parent / "digits_task.py").read_text())
    path = tmp_path / "recipe.toml"
    path.write_text(f'[task]\nname = "{task}:Digits"\n')
    recipe = config.load_config(path)
    wanted = get_expected_settings(cell, recipe)
    cell.run_dir.mkdir(parents=True)
    (cell.run_dir / "config.json").write_text(json.dumps({**wanted, "digests": files.digest_named_files(wanted)}))
    check_run_dir(cell, recipe)
    task.write_text(task.read_text() + "\n")
    with pytest.raises(UserError, match=r"task\.name = 'a file of sha256"):
        check_run_dir(cell, recipe)


def test_run_with_defaults_that_change_no_number_is_accepted(cell):
    """Another version may have had another default of `keep_last`."""
    write_config(cell, "--checkpoint.keep-last", "1", "--log.rollouts", "0")
    check_run_dir(cell, RECIPE)

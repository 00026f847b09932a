"""What is there of a run: finished, to go on with, in the way."""

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


def test_a_copy_of_three_files_is_finished(tmp_path):
    assert is_run_finished(write_run(tmp_path / "run", [1, 0]))


def test_a_run_without_its_last_step_or_its_evaluation_is_not_finished(tmp_path):
    assert not is_run_finished(tmp_path / "nowhere")
    assert not is_run_finished(write_run(tmp_path / "short", [1, 0], steps=STEPS - 1))
    run_dir = write_run(tmp_path / "run", [1, 0])
    first, _ = (run_dir / "evals.jsonl").read_text().splitlines()
    (run_dir / "evals.jsonl").write_text(first + "\n")
    assert not is_run_finished(run_dir)


def test_a_run_that_is_never_evaluated_is_finished_by_its_last_step(tmp_path):
    run_dir = write_run(tmp_path / "run", [1, 0])
    (run_dir / "evals.jsonl").unlink()
    settings = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps({**settings, "evaluate": {"every": 0}}))
    assert is_run_finished(run_dir)


def test_a_run_of_minutes_is_finished_when_its_steps_took_them(tmp_path):
    """Each step takes half a minute."""
    assert is_run_finished(write_run(tmp_path / "over", [1], steps=2, settings={"minutes": 1}))
    assert not is_run_finished(write_run(tmp_path / "under", [1], steps=1, settings={"minutes": 1}))


def test_a_checkpoint_without_a_model_is_to_be_gone_on_from(tmp_path, cell):
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
def test_a_finished_run_stays_finished_when_it_is_tidied(tmp_path, keep):
    run_dir = write_run(tmp_path / "run", [1, 0])
    checkpoint(run_dir)
    for saved in ("model", "adapter"):
        (run_dir / saved).mkdir()
    prune_finished_run(run_dir, keep)
    assert not (run_dir / "checkpoints").exists()
    assert (run_dir / "model").exists() == (run_dir / "adapter").exists() == keep
    assert is_run_finished(run_dir)


# ---------------------------------------------------------------- is it this cell's


def write_config(cell, *overrides):
    """As a run writes it down, who settles these for itself."""
    settled = ["--policy.dtype", "bfloat16", "--algorithm.max-length", "64", "--task.seed", "3"]
    settings = config.dump_config(config.load_config(None, ["--algorithm.seed", str(cell.seed), *settled, *overrides]))
    cell.run_dir.mkdir(parents=True)
    (cell.run_dir / "config.json").write_text(json.dumps({**settings, "digests": {}, "versions": {"torch": "2"}}))


RECIPE = config.load_config(None)


def test_a_run_of_this_recipe_is_the_cell_s_whatever_it_settled_for_itself(cell):
    write_config(cell)
    check_run_dir(cell, RECIPE)


def test_the_seed_of_a_wrapped_task_is_settled_inside(cell):
    """With one of its own it stays."""
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
def test_a_run_of_other_settings_is_refused(cell, overrides, complaint):
    write_config(cell, *overrides)
    with pytest.raises(UserError, match=complaint) as refused:
        check_run_dir(cell, RECIPE)
    assert "choose another --into, or delete that run" in str(refused.value)


def test_a_dtype_that_a_recipe_names_is_not_open(cell):
    write_config(cell)
    with pytest.raises(UserError, match=r"policy\.dtype"):
        check_run_dir(cell, config.load_config(None, ["--policy.dtype", "float32"]))


def test_a_folder_that_is_no_run_is_not_removed(cell):
    cell.run_dir.mkdir(parents=True)
    check_run_dir(cell, RECIPE)
    (cell.run_dir / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="is not a run"):
        check_run_dir(cell, RECIPE)
    assert (cell.run_dir / "thesis.tex").exists()


def test_what_came_to_no_checkpoint_is_removed(cell, tmp_path):
    """What a link leads to as well, but not the link."""
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


def test_a_run_killed_while_it_wrote_its_first_file_is_not_in_the_way(cell):
    cell.run_dir.mkdir(parents=True)
    (cell.run_dir / "config.json.partial").write_text('{"algorithm": {"st')
    check_run_dir(cell, RECIPE)


def test_a_run_whose_settings_cannot_be_read_is_not_removed(cell):
    """It may be finished: somebody has edited its config.json."""
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


def test_a_run_of_other_defaults_that_change_no_number_is_the_cell_s(cell):
    """As a version with another `keep_last` wrote it down."""
    write_config(cell, "--checkpoint.keep-last", "1", "--log.rollouts", "0")
    check_run_dir(cell, RECIPE)

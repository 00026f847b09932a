"""Tests that run folders stay correct when processes share them, and runs are killed, edited or short of disk space."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import namedtuple
from pathlib import Path

import pytest

from conftest import records
from forked import Forked
from pellucid import config
from pellucid.models.decode import DecodeBatch
from pellucid.policy.policy import Policy
from pellucid.reporting.run_files import get_checkpoint_step, list_checkpoints
from pellucid.rollout.native import NativeSampler
from pellucid.training import checkpoint, memory, run
from pellucid.training.run_dir import CHANGEABLE_SETTINGS, is_first_process
from pellucid.types import UserError
from runs import asked_to_stop, same_run, train

TASK = Path(__file__).parents[1] / "digits_task.py"


def pellucid(*arguments, **kwargs):
    """Start the command in its own process."""
    command = [sys.executable, "-m", "pellucid", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)


def endless(recipe, run_dir):
    """Start a run that trains until it is killed."""
    command = ["train", recipe, "--run", run_dir, "--algorithm.steps", 10**6, "--checkpoint.every", 1]
    return Forked("-m", "pellucid", *command)


def until(there, process):
    while not there():
        assert process.poll() is None
        time.sleep(0.02)


SHORT = ("--algorithm.steps", 2, "--evaluate.every", 0)


def short(recipe, run_dir, *settings):
    return train(recipe, "--run", run_dir, *SHORT, *settings)


@pytest.fixture
def short_run(recipe, tmp_path, undisturbed):
    """Return the folder of a finished run of two steps, a copy that the test may change."""
    return shutil.copytree(undisturbed(recipe, *SHORT), tmp_path / "run")


def dying_in(monkeypatch, step):
    generate = NativeSampler.generate

    def dying(self, prompts, sampling):
        if sampling.seed == f"0/{step - 1}":
            raise KeyboardInterrupt
        return generate(self, prompts, sampling)

    monkeypatch.setattr(NativeSampler, "generate", dying)


# ---------------------------------------------------------------- one process at a time


@pytest.mark.slow
def test_second_process_is_refused_and_error_names_the_lock_holder(recipe, tmp_path, capsys):
    run_dir = tmp_path / "run"
    first = endless(recipe, run_dir)
    until(lambda: list_checkpoints(run_dir), first)
    for arguments in (["--resume", run_dir, "--algorithm.steps", 1], [recipe, "--run", run_dir]):
        assert train(*arguments) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert f"process {first.pid} trains in {run_dir}: wait for it, or stop it (since " in line
    first.kill()
    first.wait()
    assert train("--resume", run_dir, "--algorithm.steps", 1) == 0, "the lock died with its holder"
    steps = [row["step"] for row in records(run_dir / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_reward_process_does_not_hold_the_lock(recipe, tmp_path):
    """When its parent is killed, it may live on for a moment, or hang in a reward."""
    run_dir = tmp_path / "run"
    first = endless(recipe, run_dir)
    until(lambda: list_checkpoints(run_dir), first)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(first.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    holders = [pid for pid in children if str(run_dir / ".lock") in files_of(pid)]
    first.kill()
    first.wait()
    assert children
    assert not holders


def files_of(pid):
    return [os.readlink(link) for link in Path("/proc", pid, "fd").iterdir() if link.is_symlink()]


def test_only_rank_0_is_the_first_process(monkeypatch):
    assert is_first_process()
    for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "1")
            assert not is_first_process()
            patched.setenv(name, "0")
            assert is_first_process()


# ---------------------------------------------------------------- settings that may change at a resume


def test_resume_prints_and_records_changed_settings(short_run, capsys):
    run_dir = short_run
    assert train("--resume", run_dir, "--algorithm.steps", 4, "--optimizer.lr", "1e-3") == 0
    [said] = [line for line in capsys.readouterr().out.splitlines() if "goes on after step 2" in line]
    assert "algorithm.steps = 4 (was 2)" in said
    assert "optimizer.lr = 0.001 (was 0.01)" in said
    assert train("--resume", run_dir, "--algorithm.steps", 5) == 0
    first, second = json.loads((run_dir / "config.json").read_text())["resumes"]
    assert (first["step"], first["changed"]) == (2, {"algorithm.steps": [2, 4], "optimizer.lr": [0.01, 0.001]})
    assert (second["step"], second["changed"]) == (4, {"algorithm.steps": [4, 5]})
    assert {"time", "versions"} <= second.keys()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("algorithm.group-size", "8"),
        ("sampler.temperature", "0.5"),
        ("task.seed", "7"),
        ("algorithm.seed", "1"),
        ("evaluate.n", "3"),
        ("policy.lora", "2"),
        ("algorithm.kl-coef", "0.5"),
        ("algorithm.epochs", "1"),
    ],
)
def test_resume_refuses_settings_that_change_the_experiment(short_run, capsys, key, value):
    run_dir = short_run
    before = (run_dir / "config.json").read_bytes()
    assert train("--resume", run_dir, f"--{key}", value) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"was trained with {key.replace('-', '_')} = " in line
    assert f"--policy.model {run_dir / 'model'}" in line
    assert (run_dir / "config.json").read_bytes() == before


def own_files(tmp_path, recipe):
    """Write a custom task, its data file and a recipe, with paths relative to their folder."""
    home = tmp_path / "home"
    home.mkdir()
    name = f"own_{abs(hash(str(tmp_path)))}_task"
    own = TASK.read_text().replace("class Digits:", 'class Digits:\n    data: str = "data.jsonl"')
    own = own.replace("return [Prompt", "open(self.data).close()\n        return [Prompt", 1)
    (home / f"{name}.py").write_text(own)
    (home / "data.jsonl").write_text("{}\n")
    text = recipe.read_text().replace(str(TASK), f"{name}.py")
    (home / "own.toml").write_text(text)
    return home, home / f"{name}.py"


@pytest.mark.slow
def test_a_run_can_be_resumed_from_another_working_directory(recipe, tmp_path, monkeypatch):
    home, task = own_files(tmp_path, recipe)
    monkeypatch.chdir(home)
    assert short("own.toml", tmp_path / "run") == 0
    monkeypatch.chdir("/")
    assert train("--resume", tmp_path / "run", "--algorithm.steps", 3) == 0
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert settings["task"]["name"] == f"{task}:Digits"
    assert settings["task"]["data"] == str(home / "data.jsonl")
    assert settings["digests"].keys() == {"task.name", "task.data"}


@pytest.mark.parametrize("edited", ["task.name", "task.data"])
def test_an_edited_task_or_data_file_is_refused(recipe, tmp_path, monkeypatch, capsys, edited):
    home, task = own_files(tmp_path, recipe)
    monkeypatch.chdir(home)
    assert short("own.toml", tmp_path / "run") == 0
    path = {"task.name": task, "task.data": home / "data.jsonl"}[edited]
    before = path.read_text()
    path.write_text(before + "\n")
    capsys.readouterr()
    assert train("--resume", tmp_path / "run", "--algorithm.steps", 3) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"was trained with {edited} = a file of sha256 " in line
    path.write_text(before)
    assert train("--resume", tmp_path / "run", "--algorithm.steps", 3) == 0


@pytest.mark.slow
def test_resume_refuses_a_new_file_that_matches_the_data_pattern(recipe, tmp_path, monkeypatch, capsys):
    home, run_dir = tmp_path / "home", tmp_path / "run"
    (home / "parts").mkdir(parents=True)
    for name, first in (("a", 0), ("b", 10)):
        rows = [{"question": str(first + n), "answer": str(first + n)} for n in range(9)]
        (home / "parts" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = 'name = "dataset"\nchat = false\ndata = ["parts/*.jsonl"]\n'
    recipe.write_text(recipe.read_text().replace(f'name = "{TASK}:Digits"', section))
    monkeypatch.chdir(home)
    assert short(recipe, run_dir) == 0
    monkeypatch.chdir("/")
    assert json.loads((run_dir / "config.json").read_text())["task"]["data"] == [f"{home}/parts/*.jsonl"]
    assert train("--resume", run_dir, "--algorithm.steps", 3) == 0
    (home / "parts" / "c.jsonl").write_text('{"question": "77", "answer": "77"}\n')
    capsys.readouterr()
    assert train("--resume", run_dir, "--algorithm.steps", 4) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "was trained with task.data.0 = a file of sha256 " in line
    (home / "parts" / "c.jsonl").unlink()
    assert train("--resume", run_dir, "--algorithm.steps", 4) == 0


def test_steps_may_change_at_a_resume_and_the_experiment_may_not():
    assert "algorithm.steps".startswith(CHANGEABLE_SETTINGS)
    for key in ("task.digits", "algorithm.group_size", "sampler.temperature", "evaluate.n", "policy.model"):
        assert not key.startswith(CHANGEABLE_SETTINGS), key


# ---------------------------------------------------------------- before the first checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("again", ["train", "resume"])
def test_run_killed_before_its_first_checkpoint_starts_over(recipe, tmp_path, monkeypatch, undisturbed, again):
    whole, died = undisturbed(recipe), tmp_path / "died"
    with monkeypatch.context() as patched:
        dying_in(patched, 2)
        assert train(recipe, "--run", died) == 130
    assert records(died / "metrics.jsonl")
    assert not list_checkpoints(died)
    assert train(*([recipe, "--run", died] if again == "train" else ["--resume", died])) == 0
    same_run(whole, died)


def test_starting_over_with_other_settings_keeps_recorded_steps(recipe, tmp_path, monkeypatch, capsys):
    died = tmp_path / "died"
    with monkeypatch.context() as patched:
        dying_in(patched, 2)
        assert train(recipe, "--run", died) == 130
    before = (died / "metrics.jsonl").read_text()
    capsys.readouterr()
    assert train(recipe, "--run", died, "--optimizer.lr", "1e-4") == 2
    assert f"another optimizer.lr: start again with --resume {died}" in capsys.readouterr().err
    assert (died / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_folder_of_a_run_killed_before_step_1_can_be_reused(recipe, tmp_path, monkeypatch):
    died = tmp_path / "died"
    with monkeypatch.context() as patched:
        dying_in(patched, 1)
        assert train(recipe, "--run", died, "--evaluate.every", 0) == 130
    assert short(recipe, died, "--optimizer.lr", "1e-4") == 0


@pytest.mark.parametrize("file", ["metrics.jsonl", "thesis.tex", "config.json"])
def test_folder_with_foreign_files_is_refused(recipe, tmp_path, capsys, file):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / file).write_text('{"step": 7, "architectures": []}\n')
    assert train(recipe, "--run", folder) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{folder} holds {file}, not a run" in line
    assert [path.name for path in folder.iterdir()] == [file]
    assert (folder / file).read_text() == '{"step": 7, "architectures": []}\n'


@pytest.mark.parametrize("lost", ["digests", "algorithm"])
def test_resume_with_an_incomplete_config_exits_with_one_line(recipe, short_run, capsys, lost):
    path = short_run / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in settings.items() if name != lost}))
    assert train("--resume", short_run, "--algorithm.steps", 4) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{path} is damaged or not part of a run: restore it from a copy, or start in another folder")


def test_training_beside_an_incomplete_config_is_refused(recipe, short_run, capsys):
    """The checkpoints are absent, as after a run that was killed before its first one."""
    path = short_run / "config.json"
    for folder in ("checkpoints", "model"):
        shutil.rmtree(short_run / folder)
    settings = json.loads(path.read_text())
    settings["algorithm"]["steps"] = 9
    path.write_text(json.dumps({name: value for name, value in settings.items() if name != "digests"}))
    assert train(recipe, "--run", short_run, "--algorithm.steps", 9, "--evaluate.every", 0) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{path} is damaged or not part of a run: restore it from a copy, or start in another folder")


def test_finished_run_without_checkpoints_does_not_start_over(recipe, short_run, capsys):
    """`study` leaves such runs, and runs kept as data look the same."""
    run_dir = short_run
    shutil.rmtree(run_dir / "checkpoints")
    before = (run_dir / "metrics.jsonl").read_bytes()
    for arguments in (["--resume", run_dir], [recipe, "--run", run_dir]):
        assert train(*arguments) == 2
        assert str(run_dir) in capsys.readouterr().err
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def refused_before_the_model(recipe, run_dir, monkeypatch, capsys, *settings):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr(run, "build_components", never)
    capsys.readouterr()
    assert train(recipe, "--run", run_dir, *settings) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert not run_dir.exists()
    return line


def test_disk_space_is_checked_before_the_model_is_loaded(recipe, tmp_path, monkeypatch, capsys):
    usage = namedtuple("usage", "free")(200_000)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda _: usage)
    line = refused_before_the_model(recipe, tmp_path / "run", monkeypatch, capsys)
    assert "the best model and 3 checkpoints, and 0.0 GB are free: make room" in line
    assert "set checkpoint.keep_best = false" in line


LEFT = {
    "the newest": ([], ["step-000006"]),
    "all": (["--checkpoint.keep_finished", "all"], ["step-000004", "step-000006"]),
    "none": (["--checkpoint.keep_finished", "none"], []),
    "none were made": (["--checkpoint.every", "0"], []),
    "one step of six": (["--checkpoint.every", "9", "--checkpoint.keep_finished", "all"], ["step-000006"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", LEFT)
def test_finished_run_keeps_the_configured_checkpoints(recipe, tmp_path, monkeypatch, what):
    settings, names = LEFT[what]
    run_dir, most, save = tmp_path / "run", [], checkpoint.write_checkpoint

    def saved(*arguments):
        most.append(arguments[1])
        return save(*arguments)

    monkeypatch.setattr(checkpoint, "write_checkpoint", saved)
    cfg = config.resolve_config(config.load_config(recipe, settings))
    said = memory.plan_disk(cfg, memory.describe_model(cfg.policy), run_dir)
    assert train(recipe, "--run", run_dir, "--evaluate.every", 0, *settings) == 0
    assert [path.name for path in list_checkpoints(run_dir)] == names
    assert said.max_checkpoints == min(3, len(most))


@pytest.mark.parametrize("settings", [["--checkpoint.every", 0], ["--checkpoint.keep_finished", "none"]])
def test_resume_without_a_checkpoint_names_settings_that_keep_one(recipe, tmp_path, capsys, settings):
    run_dir = tmp_path / "run"
    assert short(recipe, run_dir, *settings) == 0
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert train("--resume", run_dir, "--algorithm.steps", 4) == 2
    [line] = capsys.readouterr().err.splitlines()
    for told in ("checkpoint.every above 0", 'checkpoint.keep_finished = "newest"', f"--policy.model {run_dir}/model"):
        assert told in line
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_checkpoints_of_a_finished_run_can_be_deleted_at_a_resume(recipe, tmp_path):
    run_dir = tmp_path / "run"
    assert short(recipe, run_dir) == 0
    model = (run_dir / "model" / "model.safetensors").read_bytes()
    assert train("--resume", run_dir, "--checkpoint.keep_finished", "none") == 0
    assert not list_checkpoints(run_dir)
    assert (run_dir / "model" / "model.safetensors").read_bytes() == model


@pytest.mark.slow
def test_checkpoint_of_a_stop_is_deleted_when_the_run_finishes(recipe, tmp_path, monkeypatch):
    """Otherwise the next resume would go back to the stop and cut the logs there. `checkpoint.every` is 0."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert train(recipe, "--run", whole, "--checkpoint.every", 0) == 0
    with asked_to_stop(monkeypatch):
        assert train(recipe, "--run", run_dir, "--checkpoint.every", 0) == 130
    assert [path.name for path in list_checkpoints(run_dir)] == ["step-000001"]
    assert train("--resume", run_dir) == 0
    assert not list_checkpoints(run_dir)
    same_run(whole, run_dir)


@pytest.mark.slow
def test_error_of_a_failed_model_save_tells_if_a_checkpoint_exists(recipe, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Policy, "save", full)
    for every, told in ((0, "there is no checkpoint"), (1, "the checkpoint is intact: make room, then --resume")):
        assert short(recipe, tmp_path / str(every), "--checkpoint.every", every) == 2
        assert told in capsys.readouterr().err


@pytest.mark.slow
def test_run_resumes_after_the_base_was_unreadable_for_the_merge(recipe, tmp_path, monkeypatch, capsys):
    """A 4-bit base is read again for the merge."""
    gone = "policy.model = 'base' cannot be loaded (no such file)"

    def unreadable(*_):
        raise UserError(gone)

    with monkeypatch.context() as patched:
        patched.setattr(Policy, "build_merged_model", unreadable)
        for every, told in ((0, "there is no checkpoint (checkpoint.every = 0)"), (1, "the checkpoint is intact")):
            run_dir = tmp_path / str(every)
            assert short(recipe, run_dir, "--policy.lora", 2, "--checkpoint.every", every) == 2
            [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pellucid:")]
            assert line.startswith(f"pellucid: {run_dir / 'model'} could not be saved ({gone}); {told}: fix that, then")
            assert not list(run_dir.glob("*.partial"))
    assert train("--resume", tmp_path / "1") == 0
    assert (tmp_path / "1" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_disk_usage_is_printed_before_the_first_step(recipe, tmp_path, monkeypatch, capsys):
    usage = namedtuple("usage", "free")(7e9)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda _: usage)
    assert short(recipe, tmp_path / "run", "--evaluate.every", 1) == 0
    before = " ".join(capsys.readouterr().out.partition("step 1/2")[0].split())
    assert "disk up to 0.0 GB of 7 GB free, 0.0 GB of it for model-best/" in before


def test_files_that_a_resume_replaces_need_no_free_space(recipe, tmp_path):
    cfg = config.resolve_config(config.load_config(recipe, []))
    model = memory.describe_model(cfg.policy)
    new = memory.plan_disk(cfg, model, tmp_path)
    checkpoints = 3 * memory.count_checkpoint_bytes(model, cfg)
    assert new.peak_gb * 1e9 == pytest.approx(2 * memory.count_model_bytes(model, cfg) + checkpoints)
    assert new.needed_gb == new.peak_gb
    for name in ("checkpoints/step-000002/policy.safetensors", "model/model.safetensors", "adapter/config.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(bytes(1000))
    assert memory.plan_disk(cfg, model, tmp_path).needed_gb == pytest.approx(new.needed_gb - 3e-6)
    (tmp_path / "model-best" / "adapter").mkdir(parents=True)
    (tmp_path / "model-best" / "adapter" / "adapter_model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "model-best" / "model.safetensors").hardlink_to(tmp_path / "model" / "model.safetensors")
    assert memory.plan_disk(cfg, model, tmp_path).needed_gb == pytest.approx(new.needed_gb - 4e-6)


@pytest.mark.parametrize("settings", [["--checkpoint.no-keep-best"], ["--evaluate.every", 0], ["--evaluate.every", 6]])
def test_disk_plan_omits_a_best_model_that_is_not_saved_separately(recipe, tmp_path, settings):
    cfg = config.resolve_config(config.load_config(recipe, list(map(str, settings))))
    model = memory.describe_model(cfg.policy)
    found = memory.plan_disk(cfg, model, tmp_path)
    assert found.best_model_gb == 0
    expected = memory.count_model_bytes(model, cfg) + 3 * memory.count_checkpoint_bytes(model, cfg)
    assert found.peak_gb * 1e9 == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [[], ["--optimizer.offload"], ["--policy.lora", "2"], ["--algorithm.reference-every", "2"]]
)
def test_disk_plan_matches_the_bytes_written(recipe, tmp_path, settings):
    run_dir = tmp_path / "run"
    assert train(recipe, "--run", run_dir, "--evaluate.every", 0, *settings) == 0
    cfg = config.resolve_config(config.load_config(recipe, settings))
    model = memory.describe_model(cfg.policy)
    written = sum(p.stat().st_size for p in list_checkpoints(run_dir)[-1].glob("*.safetensors"))
    headers = 8_000 * len(list(list_checkpoints(run_dir)[-1].glob("*.safetensors")))
    assert 0 <= written - memory.count_checkpoint_bytes(model, cfg) < headers
    saved = [p.stat().st_size for name in ("model", "adapter") for p in (run_dir / name).glob("*.safetensors")]
    assert 0 <= sum(saved) - memory.count_model_bytes(model, cfg) < 8_000 * len(saved)


@pytest.mark.parametrize(
    ("module", "settings"),
    [("wandb", ["--log.wandb", "offline"]), ("peft", ["--policy.lora", "2"]), ("tensorboard", [])],
)
def test_missing_extras_are_reported_before_the_model_is_loaded(
    recipe, tmp_path, monkeypatch, capsys, module, settings
):
    monkeypatch.setitem(sys.modules, module, None)
    assert "pip install" in refused_before_the_model(recipe, tmp_path / "run", monkeypatch, capsys, *settings)


def test_missing_data_is_reported_before_the_model_is_loaded(recipe, tmp_path, monkeypatch, capsys):
    text = recipe.read_text()
    head, tail = text[: text.index("[task]")], text[text.index("[sampler]") :]
    recipe.write_text(f'{head}[task]\nname = "dataset"\ndata = "nowhere.jsonl"\n{tail}')
    assert "nowhere.jsonl" in refused_before_the_model(recipe, tmp_path / "run", monkeypatch, capsys)


@pytest.mark.parametrize("place", ["/proc/x", "/proc/x/y", "/sys/x", "/dev/null", "/dev/null/x", "/tmp/" + 300 * "x"])
def test_unwritable_run_folder_exits_with_one_line(recipe, tmp_path, capsys, place, monkeypatch):
    monkeypatch.setattr(run, "train_run", lambda *_: pytest.fail("a model would be loaded"))
    assert train(recipe, "--run", place) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pellucid: {place} cannot be written to (")


# ---------------------------------------------------------------- failures of reports and output


@pytest.mark.slow
def test_model_is_saved_when_the_report_fails(recipe, tmp_path, monkeypatch, capsys):
    def failing(_):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(run, "write_report", failing)
    assert short(recipe, tmp_path / "run") == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert "! report.html could not be shown (ZeroDivisionError: division by zero)" in capsys.readouterr().out


def test_failed_model_save_keeps_the_previous_model(short_run, monkeypatch, capsys):
    run_dir = short_run
    before = (run_dir / "model" / "model.safetensors").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(Policy, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert train("--resume", run_dir, "--algorithm.steps", 3) == 2
    assert f"make room, then --resume {run_dir}" in capsys.readouterr().err
    assert (run_dir / "model" / "model.safetensors").read_bytes() == before
    assert train("--resume", run_dir) == 0
    assert (run_dir / "model" / "model.safetensors").read_bytes() != before


@pytest.mark.slow
def test_closed_output_pipe_does_not_end_the_run(recipe, tmp_path):
    run_dir, (heard, told) = tmp_path / "run", os.pipe()
    process = Forked("-m", "pellucid", "train", recipe, "--run", run_dir, stdout=told, stderr=told)
    os.close(told)
    os.read(heard, 1)
    os.close(heard)
    assert process.wait() == 0
    assert (run_dir / "model").is_dir()
    assert len(records(run_dir / "metrics.jsonl")) == 6


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", ">/dev/full 2>&1"])
def test_closed_or_full_output_does_not_end_the_run(recipe, tmp_path, closed):
    run_dir = tmp_path / "run"
    command = f"{sys.executable} -m pellucid train {recipe} --run {run_dir} --algorithm.steps 2 {closed}"
    assert subprocess.run(command, shell=True, check=False).returncode == 0
    assert len(records(run_dir / "metrics.jsonl")) == 2


# ---------------------------------------------------------------- requests to stop


@pytest.mark.slow
def test_stop_request_saves_first_and_the_resume_evaluates(recipe, tmp_path, monkeypatch, undisturbed):
    settings = ["--evaluate.every", 1, "--checkpoint.every", 4]
    whole, stopped = undisturbed(recipe, *settings), tmp_path / "stopped"
    with asked_to_stop(monkeypatch, signal.SIGTERM):
        assert train(recipe, "--run", stopped, *settings) == 130
    assert [row["step"] for row in records(stopped / "evals.jsonl")] == [0]
    assert [path.name for path in list_checkpoints(stopped)] == ["step-000001"]
    assert train("--resume", stopped) == 0
    same_run(whole, stopped)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4, 6])
def test_stop_request_interrupts_an_evaluation(recipe, tmp_path, monkeypatch, undisturbed, step):
    """Step 4 is due for a checkpoint, step 6 is the last, and step 1 is neither."""
    settings = ["--evaluate.every", 1, "--checkpoint.every", 4]
    whole, stopped = undisturbed(recipe, *settings), tmp_path / "stopped"
    evaluate, calls = run.evaluate, []

    def signalled(*arguments):
        calls.append(arguments)
        if len(calls) == step + 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)
        return evaluate(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(run, "evaluate", signalled)
        assert train(recipe, "--run", stopped, *settings) == 130
    assert [row["step"] for row in records(stopped / "evals.jsonl")] == list(range(step))
    assert get_checkpoint_step(list_checkpoints(stopped)[-1]) == step
    assert not (stopped / "model").exists()
    assert train("--resume", stopped) == 0
    same_run(whole, stopped)


@pytest.mark.slow
def test_stop_request_interrupts_evaluation_rows_in_flight(recipe, tmp_path, monkeypatch, undisturbed):
    """The request comes at the third token of the evaluation after step 4, while other rows wait for a slot."""
    settings = ["--evaluate.every", 1, "--checkpoint.every", 4, "--sampler.rows", 4]
    whole, stopped = undisturbed(recipe, *settings), tmp_path / "stopped"
    decode, step, calls = NativeSampler._decode, DecodeBatch.step, []

    def signalled(batch, *arguments):
        calls.append(batch)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)
        return step(batch, *arguments)

    with monkeypatch.context() as patched:

        def watched(sampler, contexts, sampling, seeds):
            if sampler.version == 4 and sampling.seed.startswith("evaluate"):
                assert len(seeds) > 4
                patched.setattr(DecodeBatch, "step", signalled)
            return decode(sampler, contexts, sampling, seeds)

        patched.setattr(NativeSampler, "_decode", watched)
        assert train(recipe, "--run", stopped, *settings) == 130
    assert len(calls) == 3
    assert [row["step"] for row in records(stopped / "evals.jsonl")] == list(range(4))
    assert train("--resume", stopped) == 0
    same_run(whole, stopped)


@pytest.mark.slow
def test_second_stop_request_during_a_save_keeps_old_checkpoints(recipe, tmp_path, monkeypatch, capsys, undisturbed):
    whole, stopped = undisturbed(recipe), tmp_path / "stopped"
    save_file, calls = checkpoint.save_file, []

    def signalled(tensors, path):
        calls.append(path)
        if path.parent.name == "step-000004.partial":
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
        save_file(tensors, path)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", signalled)
        assert train(recipe, "--run", stopped) == 130
    assert [path.name for path in list_checkpoints(stopped)] == ["step-000002"]
    assert f"continue with: pellucid train --resume {stopped}" in capsys.readouterr().err
    assert train("--resume", stopped) == 0
    same_run(whole, stopped)
    assert [path.name for path in (stopped / "checkpoints").iterdir() if path.suffix] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_request_before_step_1_exits_with_one_line(recipe, tmp_path, number):
    """The request comes in the first evaluation, when the reward process is running."""
    marker = tmp_path / "graded"
    own = tmp_path / "slow_rewards_task.py"
    source = TASK.read_text().replace("digits = sum", f"open({str(marker)!r}, 'w').close()\n        digits = sum")
    own.write_text(source.replace("return Reward(", "import time; time.sleep(0.2)\n        return Reward("))
    recipe.write_text(recipe.read_text().replace(str(TASK), str(own)))
    with (tmp_path / "errors").open("w+") as errors:
        process = Forked("-m", "pellucid", "train", recipe, "--run", tmp_path / "run", stderr=errors)
        until(marker.exists, process)
        process.send_signal(number)
        assert process.wait() == 130
        said = errors.seek(0) or errors.read()
    how = f"continue with: pellucid train --resume {tmp_path / 'run'}"
    assert said.splitlines() == [f"pellucid: stopped at once; saved files are kept; {how}"]
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not records(tmp_path / "run" / "metrics.jsonl")


SIGNALLED_BY_AN_IMPORT = """
import os, sys
from pellucid.__main__ import main

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Finder())
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["pellucid.cli", "pydantic", "torch", "transformers"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_request_during_imports_exits_with_one_line(recipe, tmp_path, module, number):
    code = SIGNALLED_BY_AN_IMPORT.format(module=module, number=int(number))
    command = [sys.executable, "-c", code, "train", recipe, "--run", tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "pellucid: stopped\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["--run {run}", "--resume {empty}", "--resume {run} --algorithm.group-size 7"])
def test_run_folder_errors_are_reported_before_torch_is_imported(short_run, tmp_path, arguments):
    named = arguments.format(run=short_run, empty=tmp_path).split()
    code = (
        "import sys; from pellucid import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, "train", *named], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n", done.stderr
    assert done.stderr.count("\n") == 1


NOT_PYTHON_S = ("tomllib", "signal", "argparse", "random", "typing")


@pytest.mark.slow
def test_local_files_do_not_shadow_the_standard_library(recipe, tmp_path):
    """`python -m` puts the working directory first on the path."""
    for name in NOT_PYTHON_S:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    (tmp_path / "beside.py").write_text(TASK.read_text())
    recipe.write_text(recipe.read_text().replace(str(TASK), "./beside.py"))
    process = pellucid(
        "train", recipe.name, "--run", "run", "--algorithm.steps", 1, "--evaluate.every", 0, cwd=tmp_path
    )
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert records(tmp_path / "run" / "metrics.jsonl")[0]["reward/failed"] == 0


def test_console_script_enters_through_the_main_module():
    """That module turns early requests to stop into one line, and tolerates closed output."""
    scripts = tomllib.loads(Path("pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"pellucid": "pellucid.__main__:main"}

"""A run folder that processes share, that is killed, edited, filled and moved: what stands in it stays true."""

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
    """The command in a process of its own."""
    command = [sys.executable, "-m", "pellucid", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)


def endless(recipe, run_dir):
    """A run that goes on until it is ended."""
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
    """A finished run of two steps, this test's own."""
    return shutil.copytree(undisturbed(recipe, *SHORT), tmp_path / "run")


def dying_in(monkeypatch, step):
    generate = NativeSampler.generate

    def dying(self, prompts, sampling):
        if sampling.seed == f"0/{step - 1}":
            raise KeyboardInterrupt
        return generate(self, prompts, sampling)

    monkeypatch.setattr(NativeSampler, "generate", dying)


# ---------------------------------------------------------------- one holder


@pytest.mark.slow
def test_of_two_processes_on_one_folder_the_second_names_the_first_and_touches_nothing(recipe, tmp_path, capsys):
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
def test_the_reward_process_does_not_keep_the_lock(recipe, tmp_path):
    """It may live on for a moment, or hang in a reward, when its parent is killed."""
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


def test_a_lock_is_asked_for_by_the_process_that_writes_alone(monkeypatch):
    assert is_first_process()
    for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "1")
            assert not is_first_process()
            patched.setenv(name, "0")
            assert is_first_process()


# ---------------------------------------------------------------- what may change at a resume


def test_what_a_resume_may_change_is_said_and_kept(short_run, capsys):
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
def test_what_would_make_the_log_a_lie_is_refused_with_the_mend(short_run, capsys, key, value):
    run_dir = short_run
    before = (run_dir / "config.json").read_bytes()
    assert train("--resume", run_dir, f"--{key}", value) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"was trained with {key.replace('-', '_')} = " in line
    assert f"--policy.model {run_dir / 'model'}" in line
    assert (run_dir / "config.json").read_bytes() == before


def own_files(tmp_path, recipe):
    """A task of the user's own with a data file, named from the folder that they lie in."""
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
def test_a_pattern_is_all_of_its_files_and_one_more_is_another_experiment(recipe, tmp_path, monkeypatch, capsys):
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


def test_every_setting_is_either_free_at_a_resume_or_not():
    assert "algorithm.steps".startswith(CHANGEABLE_SETTINGS)
    for key in ("task.digits", "algorithm.group_size", "sampler.temperature", "evaluate.n", "policy.model"):
        assert not key.startswith(CHANGEABLE_SETTINGS), key


# ---------------------------------------------------------------- before the first checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("again", ["train", "resume"])
def test_a_run_that_died_before_its_first_checkpoint_begins_again(recipe, tmp_path, monkeypatch, undisturbed, again):
    whole, died = undisturbed(recipe), tmp_path / "died"
    with monkeypatch.context() as patched:
        dying_in(patched, 2)
        assert train(recipe, "--run", died) == 130
    assert records(died / "metrics.jsonl")
    assert not list_checkpoints(died)
    assert train(*([recipe, "--run", died] if again == "train" else ["--resume", died])) == 0
    same_run(whole, died)


def test_steps_of_other_settings_are_not_forgotten(recipe, tmp_path, monkeypatch, capsys):
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
def test_a_run_that_died_before_its_first_step_leaves_its_folder_to_any_other(recipe, tmp_path, monkeypatch):
    died = tmp_path / "died"
    with monkeypatch.context() as patched:
        dying_in(patched, 1)
        assert train(recipe, "--run", died, "--evaluate.every", 0) == 130
    assert short(recipe, died, "--optimizer.lr", "1e-4") == 0


@pytest.mark.parametrize("file", ["metrics.jsonl", "thesis.tex", "config.json"])
def test_someone_s_files_are_left_alone(recipe, tmp_path, capsys, file):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / file).write_text('{"step": 7, "architectures": []}\n')
    assert train(recipe, "--run", folder) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{folder} holds {file}, not a run" in line
    assert [path.name for path in folder.iterdir()] == [file]
    assert (folder / file).read_text() == '{"step": 7, "architectures": []}\n'


@pytest.mark.parametrize("lost", ["digests", "algorithm"])
def test_a_config_of_which_a_part_is_gone_is_one_line(recipe, short_run, capsys, lost):
    path = short_run / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in settings.items() if name != lost}))
    assert train("--resume", short_run, "--algorithm.steps", 4) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{path} is damaged or not part of a run: restore it from a copy, or start in another folder")


def test_steps_beside_a_config_of_which_a_part_is_gone_are_left_alone(recipe, short_run, capsys):
    """As of a run that was killed before its first checkpoint."""
    path = short_run / "config.json"
    for folder in ("checkpoints", "model"):
        shutil.rmtree(short_run / folder)
    settings = json.loads(path.read_text())
    settings["algorithm"]["steps"] = 9
    path.write_text(json.dumps({name: value for name, value in settings.items() if name != "digests"}))
    assert train(recipe, "--run", short_run, "--algorithm.steps", 9, "--evaluate.every", 0) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{path} is damaged or not part of a run: restore it from a copy, or start in another folder")


def test_a_finished_run_without_checkpoints_is_not_begun_again(recipe, short_run, capsys):
    """As `study` leaves it, and as it is kept as data."""
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


def test_room_on_the_disk_is_checked_before_the_model_is_loaded(recipe, tmp_path, monkeypatch, capsys):
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
def test_a_finished_run_keeps_its_checkpoints_as_the_settings_say(recipe, tmp_path, monkeypatch, what):
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
def test_a_finished_run_without_a_checkpoint_says_what_would_have_kept_it(recipe, tmp_path, capsys, settings):
    run_dir = tmp_path / "run"
    assert short(recipe, run_dir, *settings) == 0
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert train("--resume", run_dir, "--algorithm.steps", 4) == 2
    [line] = capsys.readouterr().err.splitlines()
    for told in ("checkpoint.every above 0", 'checkpoint.keep_finished = "newest"', f"--policy.model {run_dir}/model"):
        assert told in line
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_a_finished_run_gives_its_room_back_later(recipe, tmp_path):
    run_dir = tmp_path / "run"
    assert short(recipe, run_dir) == 0
    model = (run_dir / "model" / "model.safetensors").read_bytes()
    assert train("--resume", run_dir, "--checkpoint.keep_finished", "none") == 0
    assert not list_checkpoints(run_dir)
    assert (run_dir / "model" / "model.safetensors").read_bytes() == model


@pytest.mark.slow
def test_what_a_stop_has_saved_goes_when_a_run_without_checkpoints_is_finished(recipe, tmp_path, monkeypatch):
    """Otherwise the next resume would go back to where it was stopped, and cut the logs to it."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert train(recipe, "--run", whole, "--checkpoint.every", 0) == 0
    with asked_to_stop(monkeypatch):
        assert train(recipe, "--run", run_dir, "--checkpoint.every", 0) == 130
    assert [path.name for path in list_checkpoints(run_dir)] == ["step-000001"]
    assert train("--resume", run_dir) == 0
    assert not list_checkpoints(run_dir)
    same_run(whole, run_dir)


@pytest.mark.slow
def test_a_model_that_cannot_be_saved_is_lost_where_there_is_no_checkpoint_and_that_is_said(
    recipe, tmp_path, monkeypatch, capsys
):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Policy, "save", full)
    for every, told in ((0, "there is no checkpoint"), (1, "the checkpoint is intact: make room, then --resume")):
        assert short(recipe, tmp_path / str(every), "--checkpoint.every", every) == 2
        assert told in capsys.readouterr().err


@pytest.mark.slow
def test_a_base_that_is_gone_when_the_adapter_is_merged_into_it_leaves_a_run_to_go_on_with(
    recipe, tmp_path, monkeypatch, capsys
):
    """That of 4-bit numbers is read anew."""
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
def test_the_room_that_a_run_takes_is_said_before_its_first_step(recipe, tmp_path, monkeypatch, capsys):
    usage = namedtuple("usage", "free")(7e9)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda _: usage)
    assert short(recipe, tmp_path / "run", "--evaluate.every", 1) == 0
    before = " ".join(capsys.readouterr().out.partition("step 1/2")[0].split())
    assert "disk up to 0.0 GB of 7 GB free, 0.0 GB of it for model-best/" in before


def test_the_room_that_a_resumed_run_replaces_need_not_be_free(recipe, tmp_path):
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
def test_no_room_is_asked_for_a_best_model_that_is_not_written_beside_the_last(recipe, tmp_path, settings):
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
def test_the_room_that_is_asked_for_is_what_is_written(recipe, tmp_path, settings):
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
def test_extras_are_missed_before_the_model_is_loaded(recipe, tmp_path, monkeypatch, capsys, module, settings):
    monkeypatch.setitem(sys.modules, module, None)
    assert "pip install" in refused_before_the_model(recipe, tmp_path / "run", monkeypatch, capsys, *settings)


def test_data_is_missed_before_the_model_is_loaded(recipe, tmp_path, monkeypatch, capsys):
    text = recipe.read_text()
    head, tail = text[: text.index("[task]")], text[text.index("[sampler]") :]
    recipe.write_text(f'{head}[task]\nname = "dataset"\ndata = "nowhere.jsonl"\n{tail}')
    assert "nowhere.jsonl" in refused_before_the_model(recipe, tmp_path / "run", monkeypatch, capsys)


@pytest.mark.parametrize("place", ["/proc/x", "/proc/x/y", "/sys/x", "/dev/null", "/dev/null/x", "/tmp/" + 300 * "x"])
def test_a_place_where_no_run_can_be_is_one_line(recipe, tmp_path, capsys, place, monkeypatch):
    monkeypatch.setattr(run, "train_run", lambda *_: pytest.fail("a model would be loaded"))
    assert train(recipe, "--run", place) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pellucid: {place} cannot be written to (")


# ---------------------------------------------------------------- nothing that only shows something ends a run


@pytest.mark.slow
def test_the_model_is_saved_whatever_the_report_does(recipe, tmp_path, monkeypatch, capsys):
    def failing(_):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(run, "write_report", failing)
    assert short(recipe, tmp_path / "run") == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert "! report.html could not be shown (ZeroDivisionError: division by zero)" in capsys.readouterr().out


def test_a_model_that_cannot_be_saved_leaves_the_former_one_and_is_said_in_one_line(short_run, monkeypatch, capsys):
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
def test_a_reader_that_goes_away_ends_no_run(recipe, tmp_path):
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
def test_no_output_at_all_ends_no_run(recipe, tmp_path, closed):
    run_dir = tmp_path / "run"
    command = f"{sys.executable} -m pellucid train {recipe} --run {run_dir} --algorithm.steps 2 {closed}"
    assert subprocess.run(command, shell=True, check=False).returncode == 0
    assert len(records(run_dir / "metrics.jsonl")) == 2


# ---------------------------------------------------------------- requests to stop


@pytest.mark.slow
def test_a_request_saves_before_any_evaluation_which_is_made_at_the_resume(recipe, tmp_path, monkeypatch, undisturbed):
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
def test_a_request_during_an_evaluation_does_not_wait_for_its_end(recipe, tmp_path, monkeypatch, undisturbed, step):
    """Whether the step was to be saved, or was the last."""
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
def test_a_request_while_rows_of_an_evaluation_are_in_flight_waits_for_none_of_them(
    recipe, tmp_path, monkeypatch, undisturbed
):
    """In the third token of the evaluation behind step 4, while other rows wait for a place."""
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
def test_a_second_request_during_a_save_leaves_what_was_there(recipe, tmp_path, monkeypatch, capsys, undisturbed):
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
def test_a_request_before_step_1_is_one_line_and_leaves_nothing_running(recipe, tmp_path, number):
    """In the first evaluation, when the reward process is there."""
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
def test_a_request_while_importing_ends_the_process_in_one_line(recipe, tmp_path, module, number):
    code = SIGNALLED_BY_AN_IMPORT.format(module=module, number=int(number))
    command = [sys.executable, "-c", code, "train", recipe, "--run", tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "pellucid: stopped\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["--run {run}", "--resume {empty}", "--resume {run} --algorithm.group-size 7"])
def test_what_a_folder_is_is_said_before_torch_is_imported(short_run, tmp_path, arguments):
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
def test_files_beside_a_run_are_no_modules_of_python(recipe, tmp_path):
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


def test_the_script_begins_where_the_module_does():
    """Where a request to stop is no traceback, and output may go nowhere."""
    scripts = tomllib.loads(Path("pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"pellucid": "pellucid.__main__:main"}

"""Test faults that are injected for real. docs/contributing/tests.md has a row for each."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from conftest import make_policy, mostly_slow, records, tiny_recipe
from forked import Forked
from pellucid.algorithm.settings import AdamWConfig
from pellucid.distributed.runtime import Runtime
from pellucid.policy.policy import Policy
from pellucid.reporting import loggers, token_files
from pellucid.reporting.run_files import get_checkpoint_step, list_checkpoints
from pellucid.training import checkpoint, run, token_recorder
from runs import same_run, train

PELLUCID = [sys.executable, "-m", "pellucid"]
SETTINGS = ["--checkpoint.every", 2, "--evaluate.every", 3]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model_dir):
    """Return an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(tiny_recipe(folder / "tiny.toml", model_dir), "--run", folder / "run", *SETTINGS) == 0
    return folder / "run"


def complaint(errors):
    """Return the only error line, ignoring the progress bars of libraries."""
    told = [line for line in errors.split("\n") if line and "it/s]" not in line]
    assert len(told) == 1, errors
    assert told[0].startswith("pellucid: ")
    return told[0]


@contextmanager
def largest_file(size):
    """Make the system refuse writes beyond `size` bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def during(monkeypatch, owner, name, call, fault):
    """Inject a fault into one call of a function, counted from 1."""
    function, calls = getattr(owner, name), []

    def called(*args, **settings):
        calls.append(args)
        if len(calls) != call:
            return function(*args, **settings)
        with fault(*args):
            return function(*args, **settings)

    monkeypatch.setattr(owner, name, called)


@contextmanager
def full_device(log, *_):
    """Put metrics.jsonl on a full device."""
    path = log.run_dir / "metrics.jsonl"
    kept = path.rename(path.with_name("kept"))
    path.symlink_to("/dev/full")
    try:
        yield
    finally:
        kept.replace(path)


def no_room(*_):
    return largest_file(100)


WRITES = {
    "config.json": (run, "start_run_dir", 1, no_room),
    "rollouts.jsonl": (loggers.JsonlLogger, "log", 4, no_room),
    "metrics.jsonl": (loggers.JsonlLogger, "log", 4, full_device),
    "evals.jsonl": (loggers.JsonlLogger, "log_evaluation", 2, no_room),
    **{f"file {n} of a checkpoint": (checkpoint, "save_file", 4 + n, no_room) for n in range(1, 5)},
    "state.json": (Path, "write_text", 4, no_room),
    "SHA256SUMS": (Path, "write_text", 5, no_room),
    "model": (Policy, "save", 2, no_room),  # the first call saves the best model
}
SHOWN = {
    "tensorboard": (loggers.TensorBoardLogger, "log", 4, no_room),
    "report.html": (run, "write_report", 1, no_room),
}


@pytest.mark.parametrize("write", mostly_slow(WRITES, every=6))
def test_full_disk_at_any_write_ends_with_one_line_and_loses_nothing(
    recipe, tmp_path, monkeypatch, capsys, whole, write
):
    run_dir = tmp_path / "run"
    # TensorBoard writes from its own thread, so on a busy machine it could write during the fault.
    command = [recipe, "--run", run_dir, *SETTINGS, "--log.no-tensorboard"]
    with monkeypatch.context() as patched:
        during(patched, *WRITES[write])
        assert train(*command) == 2
    line = complaint(capsys.readouterr().err)
    assert "File too large" in line or "No space left" in line
    assert train(*(["--resume", run_dir] if list_checkpoints(run_dir) else command)) == 0
    same_run(whole, run_dir)


@pytest.mark.slow
def test_full_disk_at_a_token_file_ends_with_one_line_and_later_steps_are_kept(
    recipe, tmp_path, monkeypatch, capsys, whole
):
    run_dir = tmp_path / "run"
    command = [recipe, "--run", run_dir, *SETTINGS, "--log.no-tensorboard", "--log.tokens", 1, "--log.token_steps", 1]
    with monkeypatch.context() as patched:
        during(patched, token_recorder, "write_tokens", 4, no_room)
        assert train(*command) == 2
    line = complaint(capsys.readouterr().err)
    assert "File too large" in line or "No space left" in line
    assert token_files.list_recorded_steps(run_dir) == [1, 2, 3]
    assert train("--resume", run_dir) == 0
    assert token_files.list_recorded_steps(run_dir) == [1, 2, 3, 4, 5, 6]
    assert not list((run_dir / "tokens").glob(".*"))
    same_run(whole, run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("write", SHOWN)
def test_full_disk_for_reports_is_a_one_line_warning(recipe, tmp_path, monkeypatch, capsys, whole, write):
    during(monkeypatch, *SHOWN[write])
    assert train(recipe, "--run", tmp_path / "run", *SETTINGS) == 0
    told = capsys.readouterr()
    lines = [
        line for line in told.out.splitlines() if "could not be shown (OSError" in line or "cannot be written (" in line
    ]
    assert len(lines) == 1
    assert "Traceback" not in told.err
    assert (f"report   {tmp_path}" in told.out) == (write != "report.html")
    same_run(whole, tmp_path / "run")


# ---------------------------------------------------------------- memory

ON_POLICY = ["--algorithm.epochs", 1, "--algorithm.minibatches", 1, "--algorithm.kl_coef", 0]


def starved(monkeypatch, when):
    """Make the allocator refuse memory in every forward pass for whose number of rows `when` is true."""
    score = Policy.score

    def scored(self, batch):
        scores = score(self, batch)
        if when(len(batch)):
            torch.empty(2**60, dtype=torch.uint8)
        return scores

    monkeypatch.setattr(Policy, "score", scored)


@pytest.fixture
def in_fours(recipe, tmp_path):
    """Return a run whose micro-batches have four rows from the start."""
    run_dir = tmp_path / "fours"
    assert train(recipe, "--run", run_dir, *SETTINGS, *ON_POLICY, "--algorithm.micro_batch", 4) == 0
    return run_dir


@pytest.mark.slow
def test_step_that_exceeds_memory_is_repeated_in_smaller_parts(recipe, tmp_path, monkeypatch, capsys, in_fours):
    run_dir, calls, update = tmp_path / "run", iter(range(100)), run.grpo.update_policy

    def dying(*arguments):
        if len(records(run_dir / "metrics.jsonl")) == 3:
            raise KeyboardInterrupt
        return update(*arguments)

    with monkeypatch.context() as patched:
        starved(patched, lambda rows: next(calls) == 1)  # the first micro-batch already has its gradients
        patched.setattr(run.grpo, "update_policy", dying)
        assert train(recipe, "--run", run_dir, *SETTINGS, *ON_POLICY, "--algorithm.micro_batch", 8) == 130
    ran_out = "! memory ran out with 8 rows in a forward pass: 4 from now on, as with algorithm.micro_batch = 4"
    assert capsys.readouterr().out.splitlines().count(ran_out) == 1
    assert train("--resume", run_dir) == 0
    assert "! memory ran out earlier: at most 4 rows in a forward pass" in capsys.readouterr().out
    same_run(in_fours, run_dir)


@pytest.mark.slow
def test_old_log_probs_are_also_computed_in_smaller_parts(recipe, tmp_path, monkeypatch, capsys):
    small, large = tmp_path / "small", tmp_path / "large"
    assert train(recipe, "--run", small, *SETTINGS, "--algorithm.micro_batch", 2) == 0
    starved(monkeypatch, lambda rows: rows > 3)
    assert train(recipe, "--run", large, *SETTINGS, "--algorithm.micro_batch", 0) == 0
    assert capsys.readouterr().out.count("! memory ran out") == 3, "16 rows, 8 and 4"
    same_run(small, large)


def test_row_that_does_not_fit_raises_an_error_with_a_fix(recipe, tmp_path, monkeypatch, capsys):
    starved(monkeypatch, lambda rows: True)
    assert train(recipe, "--run", tmp_path / "run", *SETTINGS) == 2
    said = complaint(capsys.readouterr().err)
    assert "set a lower sampler.max_tokens" in said
    assert "policy.gradient_checkpointing" not in said, "it would save nothing with one small row"


def test_size_that_did_not_fit_is_not_tried_again():
    runtime = Runtime(make_policy(), AdamWConfig(), total_updates=1)
    refused = []

    def computed(rows):
        if rows > 5:
            refused.append(rows)
            torch.empty(2**60, dtype=torch.uint8)
        return rows

    assert [runtime.compute_within_memory(computed, rows) for rows in (12, 12, 7, 2)] == [3, 3, 3, 2]
    assert refused == [12, 6]


def test_other_runtime_errors_are_not_treated_as_lack_of_memory(recipe, tmp_path, monkeypatch):
    def mistaken(self, batch):
        return torch.zeros(2) @ torch.zeros(3)

    monkeypatch.setattr(Policy, "score", mistaken)
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        train(recipe, "--run", tmp_path / "run")


# ---------------------------------------------------------------- a folder that cannot be written


def bound_by_permissions():
    """Run in the child: make file permissions apply to root, too."""
    drop_bound, override_permissions = 24, 1  # sys/prctl.h, linux/capability.h
    ctypes.CDLL(None).prctl(drop_bound, override_permissions)


def test_read_only_folder_ends_with_one_line(recipe, tmp_path):
    (tmp_path / "shut").mkdir(mode=0o555)
    refused = subprocess.run(
        [*PELLUCID, "train", recipe, "--run", tmp_path / "shut" / "run"],
        preexec_fn=bound_by_permissions,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    line = complaint(refused.stderr)
    assert str(tmp_path / "shut") in line
    assert "Permission denied" in line


# ---------------------------------------------------------------- signals


def signalled(monkeypatch, call, *signals):
    """Send these signals, one after the other, during one update, counted from 1."""

    @contextmanager
    def arriving(*_):
        for number in signals:
            os.kill(os.getpid(), number)
        yield

    during(monkeypatch, run.grpo, "update_policy", call, arriving)


@pytest.mark.slow
def test_sigterm_saves_and_ends(recipe, tmp_path, monkeypatch, whole):
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patched:
        signalled(patched, 3, signal.SIGTERM)
        assert train(recipe, "--run", run_dir, *SETTINGS) == 130
    assert [path.name for path in list_checkpoints(run_dir)][-1] == "step-000003"
    assert train("--resume", run_dir) == 0
    same_run(whole, run_dir)


@pytest.mark.slow
def test_second_ctrl_c_ends_at_once_and_the_run_resumes_from_its_checkpoint(recipe, tmp_path, monkeypatch, whole):
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patched:
        signalled(patched, 4, signal.SIGINT, signal.SIGINT)
        assert train(recipe, "--run", run_dir, *SETTINGS) == 130
    assert [path.name for path in list_checkpoints(run_dir)][-1] == "step-000002"
    assert len(records(run_dir / "metrics.jsonl")) == 3
    assert train("--resume", run_dir) == 0
    same_run(whole, run_dir)


@pytest.mark.slow
def test_run_that_is_stopped_and_continued_takes_the_same_steps(recipe, tmp_path, whole):
    run_dir = tmp_path / "run"
    process = Forked("-m", "pellucid", "train", recipe, "--run", run_dir, *SETTINGS)
    until(lambda: steps_of(run_dir) >= 2, process)
    process.send_signal(signal.SIGSTOP)
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, process)
    process.send_signal(signal.SIGCONT)
    assert process.wait() == 0
    same_run(whole, run_dir)


@pytest.mark.slow
def test_remains_of_an_old_checkpoint_are_removed_on_resume(recipe, tmp_path, monkeypatch, whole):
    """After the last step, no other save would remove them."""
    run_dir = tmp_path / "run"

    @contextmanager
    def killed(folder, **_):
        folder.rename(folder.with_suffix(".partial"))
        raise KeyboardInterrupt
        yield

    with monkeypatch.context() as patched:
        during(patched, checkpoint, "_remove_checkpoint", 1, killed)
        assert train(recipe, "--run", run_dir, *SETTINGS) == 130
    assert list((run_dir / "checkpoints").glob("*.partial"))
    assert train("--resume", run_dir) == 0
    same_run(whole, run_dir)
    assert sorted((run_dir / "checkpoints").iterdir()) == list_checkpoints(run_dir)


# ---------------------------------------------------------------- several processes


def ranks(tmp_path, arguments, program=("-m", "pellucid")):
    """Start two processes as torchrun does, each with its own error file."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in (0, 1):
        env = {**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (tmp_path / f"errors-{rank}").open("w") as errors:
            processes.append(Forked(*program, *arguments, env=env, stderr=errors))
    return processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "victim", "fault"),
    [
        ("ddp", 0, signal.SIGKILL),
        ("ddp", 1, signal.SIGSTOP),
        ("fsdp2", 1, signal.SIGKILL),
        pytest.param("deepspeed", 1, signal.SIGKILL, marks=pytest.mark.deepspeed),
    ],
)
def test_other_processes_end_with_one_line_if_one_dies_or_hangs(recipe, tmp_path, engine, victim, fault):
    run_dir, patience = tmp_path / "run", 10.0 if fault == signal.SIGKILL else 0.05
    arguments = ["train", recipe, "--run", run_dir, "--algorithm.steps", 2000, "--checkpoint.every", 1]
    both = ranks(tmp_path, [*arguments, "--runtime.engine", engine, "--runtime.timeout", patience])
    try:
        until(lambda: steps_of(run_dir) >= 3, *both)
        both[victim].send_signal(fault)
        assert both[1 - victim].wait() == 1
    finally:
        for process in both:
            process.kill()
            process.wait()
    line = complaint((tmp_path / f"errors-{1 - victim}").read_text())
    assert f"another process of this run has ended or does not answer (rank {victim})" in line
    assert f"--resume {run_dir}" in line
    _, facts = checkpoint.load_checkpoint(list_checkpoints(run_dir)[-1])
    assert len(facts["random"]) == 2


STARVED = """
import os
import torch
from pellucid import cli
from pellucid.policy.policy import Policy
score = Policy.score
def starved(self, batch):
    if os.environ["RANK"] == "1":
        torch.empty(2**60, dtype=torch.uint8)
    return score(self, batch)
Policy.score = starved
if __name__ == "__main__":
    cli.main()
"""


@pytest.mark.slow
def test_rank_without_memory_names_the_fix_and_all_ranks_end(recipe, tmp_path):
    arguments = ["train", recipe, "--run", tmp_path / "run", *SETTINGS, "--algorithm.micro_batch", 3]
    (tmp_path / "starved.py").write_text(STARVED)
    both = ranks(tmp_path, arguments, [tmp_path / "starved.py"])
    assert [process.wait() for process in both] == [1, 2]
    assert "another process of this run" in complaint((tmp_path / "errors-0").read_text())
    assert "--algorithm.micro_batch 1" in complaint((tmp_path / "errors-1").read_text())


def steps_of(run_dir):
    return max(map(get_checkpoint_step, list_checkpoints(run_dir)), default=0)


def until(condition, *processes):
    while not condition():
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)

"""Tests of checkpoints: each is complete or absent, and restores what was saved."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pellucid.algorithm.batch import collate
from pellucid.reporting.run_files import list_checkpoints
from pellucid.training import checkpoint
from pellucid.types import Completion, Group, Prompt, UserError
from runs import train

TENSORS = {"policy": {"a": torch.arange(6.0).view(2, 3).T}, "optimizer": {"a/step": torch.tensor(3.0)}}


def save(run_dir, step, keep_last=2):
    return checkpoint.write_checkpoint(run_dir, step, TENSORS, {"updates": 7}, keep_last)


def test_checkpoint_round_trip(tmp_path):
    tensors, facts = checkpoint.load_checkpoint(save(tmp_path, 5))
    assert facts == {"step": 5, "updates": 7}
    assert tensors.keys() == TENSORS.keys()
    assert torch.equal(tensors["policy"]["a"], TENSORS["policy"]["a"])
    assert torch.equal(tensors["optimizer"]["a/step"], TENSORS["optimizer"]["a/step"])


def test_only_the_last_checkpoints_are_kept(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000010", "step-000100"]


def test_failed_save_keeps_earlier_checkpoints(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_sync_and_digest", full)
    with pytest.raises(UserError, match=r"No space left.*earlier checkpoints are intact"):
        save(tmp_path, 2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000001"]
    assert list((tmp_path / "checkpoints").iterdir()) == list_checkpoints(tmp_path), "no rubbish is left behind"


def test_partial_folder_is_not_listed_as_a_checkpoint(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "step-000002.partial").mkdir()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000001"]
    save(tmp_path, 2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000001", "step-000002"]


@pytest.mark.parametrize("file", ["policy.safetensors", "state.json"])
def test_damaged_checkpoint_raises_a_clear_error(tmp_path, file):
    folder = save(tmp_path, 3)
    (folder / file).write_bytes((folder / file).read_bytes()[:10])
    with pytest.raises(UserError, match="step-000003 is damaged"):
        checkpoint.load_checkpoint(folder)


def test_replayed_rollouts_round_trip(tmp_path):
    """Each process gets its own rollouts back, with their prompts and demonstrations."""

    def rollouts(*tokens, shown=()):
        completions = tuple(Completion((t,) * n, (-0.5,) * n, "", True) for n, t in enumerate(tokens, 1))
        batch = collate([Group(Prompt("p", "?"), (7, 8), completions, demonstration=shown)])
        advantages = batch.broadcast_to_tokens(torch.arange(float(len(tokens))))
        return replace(batch, old_logprobs=batch.sampler_logprobs - 1, advantages=advantages)

    ranks = [
        [(4, rollouts(1, 2, shown=(1, 5))), (3, rollouts(3, 4))],
        [(4, rollouts(6, 7, 8, shown=(1, 2)))],
    ]
    tensors, facts = checkpoint.pack_replay(ranks)
    saved, kept = checkpoint.load_checkpoint(
        checkpoint.write_checkpoint(tmp_path, 5, TENSORS | tensors, {"replay": facts}, 1)
    )
    for rank, expected in enumerate(ranks):
        found = checkpoint.unpack_replay(saved, kept["replay"], rank)
        assert [step for step, _ in found] == [step for step, _ in expected]
        for (_, mine), (_, theirs) in zip(found, expected, strict=True):
            assert (mine.prompt_ids, mine.demonstrations) == (theirs.prompt_ids, theirs.demonstrations)
            assert mine.get_tensors().keys() == theirs.get_tensors().keys()
            assert all(torch.equal(mine.get_tensors()[name], x) for name, x in theirs.get_tensors().items())


def test_random_generators_continue_after_a_restore():
    """Normals are drawn in pairs: the second value of a pair is pending when the state is saved."""
    random.gauss(0, 1)
    np.random.randn()

    def drawn():
        normals = [f() for _ in range(2) for f in (lambda: random.gauss(0, 1), np.random.randn)]
        return [*normals, random.random(), np.random.rand(), float(torch.rand(()))]

    state = json.loads(json.dumps(checkpoint.get_random_state()))
    first = drawn()
    checkpoint.restore_random_state(state)
    assert drawn() == first


# ---------------------------------------------------------------- damage

FACTS = {"updates": 7, "replay": [[{"step": 3}]]}
FILES = ("policy", "optimizer.exp_avg", "replay.0.0")
HARM = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
}


def three_files(run_dir, step):
    tensors = {name: {"a": torch.full((3, 4), float(step))} for name in FILES}
    return checkpoint.write_checkpoint(run_dir, step, tensors, FACTS, keep_last=2)


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("file", [*(f"{name}.safetensors" for name in FILES), "state.json", "SHA256SUMS"])
def test_damage_is_reported_and_the_previous_checkpoint_is_loaded(tmp_path, file, harm):
    three_files(tmp_path, 1)
    HARM[harm](three_files(tmp_path, 2) / file)
    tensors, facts, [line] = checkpoint.load_newest_checkpoint(tmp_path)
    assert facts["step"] == 1
    assert set(tensors["policy"]["a"].flatten().tolist()) == {1.0}
    assert "step-000002 is damaged" in line
    assert "step-000001 is loaded instead" in line


def test_missing_optimizer_file_raises_an_error(tmp_path):
    (three_files(tmp_path, 2) / "optimizer.exp_avg.safetensors").unlink()
    with pytest.raises(UserError, match=r"optimizer\.exp_avg\.safetensors is missing"):
        checkpoint.load_newest_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"step": 3}', '{"step": "2"}'])
def test_state_of_another_step_counts_as_damage(tmp_path, text):
    (three_files(tmp_path, 2) / "state.json").write_text(text)
    with pytest.raises(UserError, match="step-000002 is damaged"):
        checkpoint.load_newest_checkpoint(tmp_path)


def test_error_lists_all_damaged_checkpoints_and_the_fix(tmp_path):
    for step in (1, 2):
        (three_files(tmp_path, step) / "state.json").write_text("{}")
    with pytest.raises(UserError) as refused:
        checkpoint.load_newest_checkpoint(tmp_path)
    line = str(refused.value)
    assert line.count("is damaged") == 2
    assert "restore one from a copy, or start in another folder" in line
    assert "\n" not in line


class OneOfTwo:
    """A process group whose two ranks are threads."""

    def __init__(self, rank, barrier, shared):
        self.rank, self.barrier, self.shared, self.is_main = rank, barrier, shared, rank == 0

    def gather(self, items):
        self.shared[self.rank] = list(items)
        self.barrier.wait(10)
        gathered = [*self.shared[0], *self.shared[1]]
        self.barrier.wait(10)
        return gathered


def test_all_processes_fail_if_one_cannot_read_a_checkpoint(tmp_path, monkeypatch):
    """On a shared file system, one machine may see a checkpoint later than another."""
    three_files(tmp_path, 2)
    load, barrier, shared, ends = checkpoint.load_checkpoint, threading.Barrier(2), {}, {}

    def load_on_one(folder, is_verified=False):
        if threading.current_thread().name == "1":
            raise checkpoint.DamagedCheckpointError(f"{folder} is damaged (of this process)")
        return load(folder, is_verified)

    def resume(rank):
        try:
            ends[rank] = checkpoint.load_newest_checkpoint(tmp_path, OneOfTwo(rank, barrier, shared))
        except UserError as error:
            ends[rank] = str(error)

    monkeypatch.setattr(checkpoint, "load_checkpoint", load_on_one)
    threads = [threading.Thread(target=resume, args=(rank,), name=str(rank)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ends[0] == ends[1] == f"{tmp_path / 'checkpoints' / 'step-000002'} is damaged (of this process)"


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="needs coreutils")
def test_sha256sum_checks_a_checkpoint(tmp_path):
    folder = three_files(tmp_path, 2)
    command = ["sha256sum", "--strict", "-c", "SHA256SUMS"]
    checked = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert sorted(checked.stdout.splitlines()) == sorted(f"{p.name}: OK" for p in folder.iterdir() if p.suffix)


def test_leftovers_of_a_killed_save_are_not_in_the_next_checkpoint(tmp_path):
    rest = tmp_path / "checkpoints" / "step-000001.partial" / "reference.safetensors"
    rest.parent.mkdir(parents=True)
    rest.write_text("half of a file")
    folder = save(tmp_path, 1)
    assert not (folder / rest.name).exists()
    assert not rest.parent.exists()


def test_steps_of_seven_digits_come_after_those_of_six(tmp_path):
    for step in (999_999, 1_000_000):
        save(tmp_path, step)
    assert [checkpoint.get_checkpoint_step(path) for path in list_checkpoints(tmp_path)] == [999_999, 1_000_000]


def test_checkpoint_files_are_synced_before_the_rename(tmp_path, monkeypatch):
    """The parent folders are synced after it."""
    save(tmp_path, 1, keep_last=1)
    synced = []
    sync = checkpoint.files.sync_path
    monkeypatch.setattr(checkpoint.files, "sync_path", lambda path: (synced.append(path), sync(path)))
    folder = save(tmp_path, 2, keep_last=1)
    partial = folder.with_suffix(".partial")
    assert {path.name for path in synced if path.parent == partial} == {path.name for path in folder.iterdir()}
    assert synced[-3:] == [partial, folder.parent, tmp_path]
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.slow
def test_moving_reference_is_saved_unrounded(recipe, tmp_path):
    """A frozen reference is kept in the compute dtype; this one copies the policy's fp32 masters after each step."""
    words = ["--policy.dtype", "bfloat16", "--algorithm.reference_every", 1, "--algorithm.steps", 2]
    run_dir = tmp_path / "run"
    assert train(recipe, "--run", run_dir, *words, "--evaluate.every", 0, "--checkpoint.every", 1) == 0
    newest = list_checkpoints(run_dir)[-1]
    policy, reference = (load_file(newest / f"{name}.safetensors") for name in ("policy", "reference"))
    for name, master in policy.items():
        assert torch.equal(reference[name], master), name
    assert {x.dtype for x in policy.values()} == {torch.float32}

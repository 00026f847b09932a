"""Checkpoints are whole or not there, and give back what they were given."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from pellucid import checkpoint
from pellucid.batch import collate
from pellucid.types import Completion, Group, Prompt, UserError

TENSORS = {"policy": {"a": torch.arange(6.0).view(2, 3).T}, "optimizer": {"a/step": torch.tensor(3.0)}}


def save(run_dir, step, keep_last=2):
    return checkpoint.save(run_dir, step, TENSORS, {"updates": 7}, keep_last)


def test_what_was_saved_comes_back(tmp_path):
    tensors, facts = checkpoint.load(save(tmp_path, 5))
    assert facts == {"step": 5, "updates": 7}
    assert tensors.keys() == TENSORS.keys()
    assert torch.equal(tensors["policy"]["a"], TENSORS["policy"]["a"])
    assert torch.equal(tensors["optimizer"]["a/step"], TENSORS["optimizer"]["a/step"])


def test_only_the_last_are_kept_in_order_of_steps(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
    assert [p.name for p in checkpoint.found(tmp_path)] == ["step-000010", "step-000100"]


def test_a_save_that_dies_half_way_leaves_the_earlier_ones_whole(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_to_disk", full)
    with pytest.raises(UserError, match=r"No space left.*earlier checkpoints are whole"):
        save(tmp_path, 2)
    assert [p.name for p in checkpoint.found(tmp_path)] == ["step-000001"]
    assert list((tmp_path / "checkpoints").iterdir()) == checkpoint.found(tmp_path), "no rubbish is left behind"


def test_a_killed_save_is_not_taken_for_a_checkpoint(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "step-000002.partial").mkdir()
    assert [p.name for p in checkpoint.found(tmp_path)] == ["step-000001"]
    save(tmp_path, 2)
    assert [p.name for p in checkpoint.found(tmp_path)] == ["step-000001", "step-000002"]


@pytest.mark.parametrize("file", ["policy.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_one_clear_line(tmp_path, file):
    folder = save(tmp_path, 3)
    (folder / file).write_bytes((folder / file).read_bytes()[:10])
    with pytest.raises(UserError, match="step-000003 is damaged"):
        checkpoint.load(folder)


def test_replayed_rollouts_come_back_as_they_were(tmp_path):
    """Of every process its own, with all that is known of prompts and prefixes."""

    def rollouts(*tokens, **of_prefix):
        completions = tuple(Completion((t,) * n, (-0.5,) * n, "", True) for n, t in enumerate(tokens, 1))
        batch = collate([Group(Prompt("p", "?"), (7, 8), completions, **of_prefix)], torch.device("cpu"))
        return replace(batch, old_logprobs=batch.sampler_logprobs - 1, advantages=torch.arange(float(len(tokens))))

    ranks = [
        [(4, rollouts(1, 2, prefix_length=1, prefix_end=5)), (3, rollouts(3, 4))],
        [(4, rollouts(6, 7, 8, prefix_length=2))],
    ]
    tensors, facts = checkpoint.pack_replay(ranks)
    saved, kept = checkpoint.load(checkpoint.save(tmp_path, 5, TENSORS | tensors, {"replay": facts}, 1))
    for rank, expected in enumerate(ranks):
        found = checkpoint.unpack_replay(saved, kept["replay"], rank)
        assert [step for step, _ in found] == [step for step, _ in expected]
        for (_, mine), (_, theirs) in zip(found, expected, strict=True):
            assert checkpoint.of_prompts(mine) == {
                "prompt_ids": theirs.prompt_ids,
                "prefix_lengths": theirs.prefix_lengths,
                "prefix_ends": theirs.prefix_ends,
            }
            assert mine.tensors().keys() == theirs.tensors().keys()
            assert all(torch.equal(mine.tensors()[name], x) for name, x in theirs.tensors().items())


def test_every_generator_goes_on_where_it_was():
    state = checkpoint.random_state()
    first = random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))
    checkpoint.restore_random_state(state)
    assert (random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))) == first

"""Tests for rollouts as tensors: collating and joining batches, and failed rewards within a group."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid.algorithm.batch import collate, collect_grades, collect_task_rewards, concat_batches
from pellucid.types import Completion, Group, Prompt, Reward

CPU = torch.device("cpu")


def group(*lengths, rewards=(), shown=()):
    completions = tuple(Completion(tuple(range(1, n + 1)), (-0.5,) * n, "", True) for n in lengths)
    return Group(Prompt("p", "?"), (7, 8, 9), completions, rewards, demonstration=shown)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_joined_rollouts_lose_no_token_in_any_order_of_widths(order):
    """Replay puts the newest batch first, and older responses may be longer."""
    batches = [collate([group(*lengths)]) for lengths in ((1, 1), (2, 5), (3, 1))]
    batches = [
        replace(
            b,
            old_logprobs=b.sampler_logprobs - 1,
            advantages=b.broadcast_to_tokens(torch.tensor([1.0, -1.0])),
            loss_mask=b.response_mask,
        )
        for b in batches
    ]
    chosen = [batches[i] for i in order]
    joined = concat_batches(chosen)
    assert joined.response_mask.shape == (6, 5)
    rows = [row for b in chosen for row in b.split_into_chunks(1)]
    for row, alone in zip(joined.split_into_chunks(1), rows, strict=True):
        assert row.get_tensors().keys() == alone.get_tensors().keys()
        for name, x in alone.get_tensors().items():
            if name != "prompt_indices":
                assert torch.equal(getattr(row, name), x), name
    assert joined.prompt_indices.tolist() == [0, 0, 1, 1, 2, 2]


def test_joined_rollouts_keep_their_prompts_and_demonstrations():
    one = collate([group(1, 2, shown=(8, 9, 5)), group(1, 1)])
    two = collate([group(3, 1, shown=(9,))])
    joined = concat_batches([two, one])
    assert joined.demonstrations == ((9,), (8, 9, 5), ())
    assert joined.prompt_ids == ((7, 8, 9),) * 3


def test_a_failed_reward_counts_as_the_mean_of_its_siblings():
    """The mean is that of the group, not of the step, whose other group is at 9. If all siblings failed, it is 0."""
    failed = Reward(math.nan, error="ZeroDivisionError")
    groups = [
        group(1, 1, 1, rewards=(Reward(1.0), failed, Reward(0.0))),
        group(1, 1, 1, rewards=(Reward(9.0), Reward(9.0), Reward(9.0))),
        group(1, 1, 1, rewards=(failed, failed, failed)),
    ]
    assert collect_task_rewards(groups).tolist() == [[1.0, 0.5, 0.0], [9.0, 9.0, 9.0], [0.0, 0.0, 0.0]]
    assert collect_grades(groups).rewards.tolist() == collect_task_rewards(groups).tolist()


def test_failed_term_counts_as_the_mean_of_its_siblings():
    groups = [
        group(1, 1, 1, rewards=tuple(Reward(x, {"a": x}) if x is not None else Reward(math.nan) for x in values))
        for values in ((1.0, None, 0.0), (9.0, 9.0, 9.0))
    ]
    assert collect_grades(groups).parts[..., 0].tolist() == [[1.0, 0.5, 0.0], [9.0, 9.0, 9.0]]


def test_prompt_without_a_token_is_refused():
    """Its rows would otherwise be predicted from the last token of its neighbor."""
    with pytest.raises(ValueError, match="a prompt without a token"):
        collate([group(1, 1), replace(group(1, 1), prompt_ids=())])


@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=4), min_size=1, max_size=4
    ),
    st.integers(0, 5),
)
def test_collated_rollouts_can_be_split_and_recovered(responses, size):
    """Tokens may equal the padding, because row lengths decide which tokens belong to a row."""
    groups = [
        Group(
            Prompt(str(p), "?"),
            (p, 9),
            tuple(Completion(tuple(ids), (-0.5 - p,) * len(ids), "", bool(ids[0])) for ids in rows),
        )
        for p, rows in enumerate(responses)
    ]
    batch = collate(groups)
    rows = [
        (
            row.prompt_ids[int(row.prompt_indices[i])],
            row.response_ids[i][row.response_mask[i]].tolist(),
            row.sampler_logprobs[i][row.response_mask[i]].tolist(),
            bool(row.finished[i]),
        )
        for row in batch.split_into_chunks(size)
        for i in range(len(row))
    ]
    assert rows == [
        (group.prompt_ids, list(c.token_ids), list(c.logprobs), c.finished)
        for group in groups
        for c in group.completions
    ]
    joined = concat_batches([collate([group]) for group in groups])
    assert joined.prompt_ids == batch.prompt_ids
    for name, x in batch.get_tensors().items():
        assert name == "step_row_indices" or torch.equal(getattr(joined, name), x), name

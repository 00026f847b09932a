"""Tests of conversations in a decode batch against transformers, which reads each row from its beginning."""

from __future__ import annotations

import pytest
import torch

from architectures import FAMILY, model_of
from pellucid.models.decode import DecodeBatch, append_tokens, evict_rows, restore_rows
from pellucid.models.decoder import Decoder

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3]]


@torch.no_grad()
def whole(model, rows):
    """Return the logits [n, V] after each row, which is read from its beginning."""
    return torch.stack([model(torch.tensor([row])).logits[0, -1] for row in rows])


def begun(name, copies=2):
    model = model_of(name)
    batch = DecodeBatch(Decoder(model.config, model, torch.float32), 8)
    logits = batch.admit(PROMPTS, copies)
    rows = [list(prompt) for prompt in PROMPTS for _ in range(copies)]
    return model, batch, logits, rows


def append(rows, tokens):
    for row, ids in zip(rows, tokens, strict=True):
        row.extend(ids)


def close(logits, expected):
    torch.testing.assert_close(logits, expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", FAMILY)
def test_appended_tokens_match_a_forward_pass_over_the_whole_row(name):
    """Rows get many, few or no tokens appended. Then they decode at their own positions, and get more appended."""
    model, batch, logits, rows = begun(name)
    close(logits, whole(model, rows))
    told = [[7, 8, 2, 2, 1, 0, 4, 4, 3, 9, 9, 1, 2, 3, 4, 5, 6, 1, 2], [5]]
    close(append_tokens(batch, torch.tensor([2, 0]), told), whole(model, [rows[2] + told[0], rows[0] + told[1]]))
    append([rows[2], rows[0]], told)
    for token in (1, 2, 3):
        append(rows, [[token], [token + 1], [token + 2], [token + 3]])
        close(batch.step(torch.tensor([row[-1] for row in rows])), whole(model, rows))
    more = [[4, 2], [1] * 40, [6, 6, 6]]
    append([rows[1], rows[2], rows[3]], more)
    close(append_tokens(batch, torch.tensor([1, 2, 3]), more), whole(model, rows[1:]))


@pytest.mark.parametrize("name", FAMILY)
def test_rows_that_pause_keep_their_state(name):
    model, batch, _, rows = begun(name)
    speaks = torch.tensor([True, False, True, False])
    for token in range(40):  # beyond the initial size of the cache
        append([rows[0], rows[2]], [[token % 9], [token % 7]])
        logits = batch.step(torch.tensor([rows[0][-1], 5, rows[2][-1], 6]), speaks)
        close(logits[speaks], whole(model, [rows[0], rows[2]]))
    append([rows[1], rows[3]], [[8, 8], [2]])
    close(append_tokens(batch, torch.tensor([1, 3]), [[8, 8], [2]]), whole(model, [rows[1], rows[3]]))


@pytest.mark.parametrize("name", FAMILY)
def test_evicted_rows_are_restored_with_their_state(name):
    """All rows of one prompt leave, and the prompt leaves with them."""
    model, batch, _, rows = begun(name)
    append(rows, [[1, 2, 3], [4], [5, 6], [7]])
    append_tokens(batch, torch.arange(4), [[1, 2, 3], [4], [5, 6], [7]])
    first, second, third = evict_rows(batch, [1, 2, 3])
    batch.keep_rows(torch.tensor([0]))
    assert batch.count_free_slots() == 7
    append(rows[:1], [[9]])
    close(batch.step(torch.tensor([9])), whole(model, rows[:1]))
    restore_rows(batch, [third, first])
    append([rows[3], rows[1]], [[3, 3], [2]])
    close(append_tokens(batch, torch.tensor([1, 2]), [[3, 3], [2]]), whole(model, [rows[3], rows[1]]))
    restore_rows(batch, [second])
    order = [rows[0], rows[3], rows[1], rows[2]]
    append(order, [[1], [2], [3], [4]])
    close(batch.step(torch.tensor([1, 2, 3, 4])), whole(model, order))
    assert len(batch.prompt_lengths) == 2


def test_restored_row_finds_its_prompt_among_new_prompts():
    """Prompts are told apart by their ids, not by their tokens."""
    model, batch, _, rows = begun("llama")
    [aside] = evict_rows(batch, [3])
    batch.keep_rows(torch.tensor([0, 1]))
    batch.admit([[2, 2]], 1)
    restore_rows(batch, [aside])
    order = [rows[0], rows[1], [2, 2], rows[3]]
    append(order, [[1]] * 4)
    close(batch.step(torch.tensor([1] * 4)), whole(model, order))

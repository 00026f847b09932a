"""What the rows of conversations need in a decode batch: to be told something, and to make room while they wait.

Shapes as in decoding.py; r rows that are told something, N tokens in all, L of the row that is told most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.models.attention import attend
from pellucid.models.cache import Pair, joined
from pellucid.models.decoder import Stream, after_attention, heads_of
from pellucid.models.decoding import GROWTH, DecodeBatch
from pellucid.models.fused import Places
from pellucid.models.packed import Rows, bias_of, in_line, in_rows, nearby, roomy, rows_at


@torch.no_grad()
def extend(batch: DecodeBatch, rows: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Append several tokens to each of these rows [r], on the CPU. Return logits [r, V] behind them."""
    batch.compact()
    lengths = torch.tensor([len(ids) for ids in tokens])
    while int((batch.generated_lengths[rows] + lengths).max()) > batch.caches[0].keys.shape[2]:
        batch.grow_cache()
    logits = (extend_fused if batch.uses_fused_prefill() else extend_by_operators)(batch, rows, tokens, lengths)
    batch.generated_lengths[rows] += lengths
    batch.copy_lengths_to_device()
    return logits


def extend_fused(batch: DecodeBatch, rows: Tensor, tokens: Sequence[Sequence[int]], lengths: Tensor) -> Tensor:
    """[r, V] of `extend`, in one call."""
    row_of = rows.repeat_interleave(lengths)
    places = batch.generated_lengths[row_of] + torch.cat([torch.arange(length) for length in lengths.tolist()])
    at = Places(row_of, places, batch.prompt_of, batch.prompt_lengths, lengths.cumsum(0) - 1)
    ids = torch.tensor([token for row in tokens for token in row])
    return batch.run_fused(ids, at, batch.list_cache_tensors())


def extend_by_operators(batch: DecodeBatch, rows: Tensor, tokens: Sequence[Sequence[int]], lengths: Tensor) -> Tensor:
    """The same by torch's operators, with all tokens of a row at once."""
    shape, (new, near, places) = batch.decoder.shape, appended(batch, rows, tokens, lengths)
    rotary, size = batch.decoder.compute_rotary(new.positions), batch.caches[0].prompt_keys.shape[2]
    device = new.ids.device
    at = slice(None), rows.repeat_interleave(lengths).to(device), places
    these, prompts = rows.to(device), batch.prompt_of[rows].to(device)
    stream = Stream(batch.embed(new.ids))
    for layer, cache, slides in zip(batch.unpacked_weights.layers, batch.caches, shape.is_sliding, strict=True):
        hidden, (query, key, value) = heads_of(layer, stream, rotary, shape)
        cache.keys[at], cache.values[at] = key.transpose(0, 1), value.transpose(0, 1)
        keys, values = (
            torch.cat([of_prompt[:, prompts], own[:, these]], 2).transpose(0, 1)
            for of_prompt, own in ((cache.prompt_keys, cache.keys), (cache.prompt_values, cache.values))
        )
        read = attend(in_rows(query, new), keys, values, near if slides else new.bias, shared_length=size)
        stream = after_attention(layer, hidden, in_line(read, new), shape)
    return batch.compute_logits(stream.add_pending()[(lengths.cumsum(0) - 1).to(device)], batch.unpacked_weights.head)


def appended(
    batch: DecodeBatch, rows: Tensor, tokens: Sequence[Sequence[int]], lengths: Tensor
) -> tuple[Rows, Tensor, Tensor]:
    """The Rows of appended tokens, whose keys are their prompt's, then their own; their bias in layers with a sliding
    window; and their places [N] among the tokens of their rows.
    """
    first, window, device = batch.caches[0], batch.decoder.shape.window, batch.decoder.device
    starts, steps = batch.prompt_lengths[batch.prompt_of[rows], None], torch.arange(roomy(int(lengths.max())))
    real, places = steps < lengths[:, None], batch.generated_lengths[rows, None] + steps  # [r, L]
    ids, positions = torch.tensor([token for row in tokens for token in row]), (starts + places)[real]
    begin, at = starts.to(device), places.to(device)
    of_prompt, own = (torch.arange(x.shape[2], device=device) for x in (first.prompt_keys, first.keys))
    prompt_seen = (of_prompt < begin)[:, None].expand(-1, len(steps), -1)
    bias = bias_of(torch.cat([prompt_seen, own <= at[..., None]], -1), first.keys.dtype)
    keys = torch.cat([of_prompt.expand(len(rows), -1), begin + own], -1)
    near = nearby(bias, begin + at, keys, window) if any(batch.decoder.shape.is_sliding) else bias
    return rows_at(ids, positions, real, device, lambda: bias), near, places[real].to(device)


@dataclass
class Aside:
    """A row that has made room: the name of its prompt, and of each layer the prompt's keys and its own."""

    prompt_id: int
    prompt_cache: list[Pair]
    row_cache: list[Pair]


def set_aside(batch: DecodeBatch, rows: Sequence[int]) -> list[Aside]:
    """Return what the batch holds of these rows, so that it need not keep them."""
    batch.compact()
    prompts = batch.prompt_of.tolist()
    of_prompts = {p: layers_of(batch, p, int(batch.prompt_lengths[p])) for p in {prompts[row] for row in rows}}
    return [Aside(batch.prompt_ids[prompts[row]], of_prompts[prompts[row]], own_layers(batch, row)) for row in rows]


def layers_of(batch: DecodeBatch, prompt: int, length: int) -> list[Pair]:
    return [
        (cache.prompt_keys[:, prompt, :length].clone(), cache.prompt_values[:, prompt, :length].clone())
        for cache in batch.caches
    ]


def own_layers(batch: DecodeBatch, row: int) -> list[Pair]:
    length = int(batch.generated_lengths[row])
    return [(cache.keys[:, row, :length].clone(), cache.values[:, row, :length].clone()) for cache in batch.caches]


def bring_back(batch: DecodeBatch, rows: Sequence[Aside]) -> None:
    """Add rows that were set aside, behind the others, as they were."""
    batch.compact()
    for row in rows:
        if row.prompt_id not in batch.prompt_ids:
            add_prompt(batch, row)
    for i, cache in enumerate(batch.caches):
        cache.keys = with_rows(cache.keys, [row.row_cache[i][0] for row in rows])
        cache.values = with_rows(cache.values, [row.row_cache[i][1] for row in rows])
    prompts = batch.prompt_of.new_tensor([batch.prompt_ids.index(row.prompt_id) for row in rows])
    lengths = batch.generated_lengths.new_tensor([row.row_cache[0][0].shape[1] for row in rows])
    batch.prompt_of = torch.cat([batch.prompt_of, prompts])
    batch.generated_lengths = torch.cat([batch.generated_lengths, lengths])
    batch.cache_rows = torch.arange(len(batch.generated_lengths))
    batch.index_rows_by_prompt()


def add_prompt(batch: DecodeBatch, row: Aside) -> None:
    length = row.prompt_cache[0][0].shape[1]
    batch.prompt_ids.append(row.prompt_id)
    batch.prompt_lengths = torch.cat([batch.prompt_lengths, batch.prompt_lengths.new_tensor([length])])
    for cache, (keys, values) in zip(batch.caches, row.prompt_cache, strict=True):
        wide = (0, 0, 0, roomy(length) - length)
        cache.prompt_keys = joined(cache.prompt_keys, F.pad(keys[:, None], wide))
        cache.prompt_values = joined(cache.prompt_values, F.pad(values[:, None], wide))


def with_rows(cache: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """[K, n, T, d] and each [K, t, d] -> [K, n + len(rows), T', d], 0 behind what they hold."""
    room = max(cache.shape[2], *(roomy(x.shape[1], GROWTH) for x in rows))
    new = [F.pad(x, (0, 0, 0, room - x.shape[1]))[:, None] for x in rows]
    return torch.cat([F.pad(cache, (0, 0, 0, room - cache.shape[2])), *new], 1)

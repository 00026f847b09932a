"""Random numbers, batches of given lengths and attention by hand, for tests of updates."""

from __future__ import annotations

import torch

from pellucid.algorithm.batch import Batch, make_length_mask, pad_sequences
from pellucid.models.score import apply_sliding_window, build_layout


def noise(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def batch_of(prompts, responses, prompt_of):
    """Return a batch of prompts and responses with these lengths."""
    mask = make_length_mask(responses)
    ids = [[i % 90 for i in range(7 * n, 7 * n + length)] for n, length in enumerate([*prompts, *responses])]
    return Batch(
        prompt_ids=tuple(map(tuple, ids[: len(prompts)])),
        demonstrations=((),) * len(prompts),
        prompt_indices=torch.tensor(prompt_of),
        response_ids=pad_sequences(ids[len(prompts) :], torch.long),
        response_mask=mask,
        action_mask=mask,
        finished=torch.zeros(len(responses), dtype=torch.bool),
        sampler_logprobs=torch.zeros(mask.shape),
    )


def off(ours, exact):
    return (ours.double() - exact).square().mean().sqrt().item()


def by_hand(query, key, value, line):
    """Compute attention sequence by sequence, in the dtype of the tensors."""
    ends = line.ends.tolist()
    spans = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    prompts, out = len(spans) - len(line.prompt_of), []
    for i, own in enumerate(spans):
        before = [] if i < prompts else spans[line.prompt_of[i - prompts]]
        there, share = [*before, *own], query.shape[1] // key.shape[1]
        keys, values = (x[there].repeat_interleave(share, 1) for x in (key, value))
        scores = torch.einsum("thd,shd->hts", query[list(own)], keys) * query.shape[2] ** -0.5
        at = torch.arange(len(before), len(there))[:, None]
        seen = torch.arange(len(there)) <= at
        if line.window:
            seen &= torch.arange(len(there)) > at - line.window
        probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out.append(torch.einsum("hts,shd->thd", probs, values).flatten(1))
    return torch.cat(out)


CASES = {
    "one row": ([5], [8], [0], (9, 3, 64), 0),
    "long, short and none": ([5, 40, 33], [8, 71, 2, 1, 32], [0, 1, 1, 2, 0], (9, 3, 64), 0),
    "a prompt without rows": ([5, 40, 33], [8, 71], [2, 0], (4, 4, 64), 0),
    "a window": ([5, 40, 33], [8, 71, 2, 1, 32], [0, 1, 1, 2, 0], (9, 3, 64), 20),
    "a window of long texts": ([150, 40], [8, 171], [1, 0], (2, 1, 64), 70),
    "heads of 128": ([100, 3], [200, 90], [1, 0], (4, 4, 128), 0),
    "many queries a key": ([17, 90], [40], [1], (32, 1, 64), 0),
    "heads of 256": ([50, 20], [40, 150], [0, 1], (8, 2, 256), 0),
}


def case(name):
    """Return joined queries, keys and values, the sizes to split them, their layout, and the gradient of the output."""
    *lengths, (heads, key_heads, size), window = CASES[name]
    layout = build_layout(batch_of(*lengths), torch.bfloat16, torch.device("cpu"))
    layout = apply_sliding_window(layout, window) if window else layout
    n = int(layout.sequences.ends[-1])
    joined = noise(n, heads + 2 * key_heads, size).requires_grad_()
    return joined, (heads, key_heads, key_heads), layout, noise(n, heads * size, seed=1)


def both_ways(joined, split, attention, grad):
    """Return the output of attention, and the gradient of the projection."""
    read = attention(joined.split(split, 1))
    return read.detach(), torch.autograd.grad(read, joined, grad.to(read.dtype))[0]

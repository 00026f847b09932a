"""A step on many GPUs, on paper: what is computed, read and moved, and how long it takes. `python benchmarks/cost.py`.

Nothing is measured here but what a token costs that every process gathers. `docs/how-to/several-gpus.md` says what
the figures mean, and where they end.
"""

from __future__ import annotations

import pickle
import random
import time
import tracemalloc
from typing import NamedTuple

GROUP, TOKENS, PROMPT = 16, 2048, 256
"""Completions of a prompt, and tokens of each and of the prompt."""
FLOPS = 0.4 * 989e12
"""A second of one H100 in bf16, of which 40 % is had."""
MEMORY = 0.6 * 3.35e12
"""Bytes a second read from its memory, of which 60 % is had."""
NVLINK, NETWORK = 0.8 * 450e9, 0.8 * 50e9
"""Bytes a second and GPU within a machine of eight, and between machines (400 Gb/s a GPU), of which 80 % is had."""
MACHINE, ROOM = 8, 80e9
"""GPUs of a machine, and bytes of each."""
IN_FLIGHT = 256
"""Rows that are sampled at once on one replica: `sampler.rows`."""


class Model(NamedTuple):
    name: str
    parameters: float
    layers: int
    keys: int
    """Key heads times their size."""


class Step(NamedTuple):
    """Seconds of one step, and bytes a GPU keeps."""

    sample: float
    score: float
    update: float
    sharded: float
    """Parameters gathered and gradients reduced, beside the update: the longer of the two counts."""
    push: float
    """Weights to the sampler."""
    kept: float
    """Or what it takes to begin, where that is more."""


MODELS = (Model("0.5B", 0.49e9, 24, 128), Model("7B", 7.6e9, 28, 512), Model("32B", 32.8e9, 64, 1024))
LARGE = Model("70B", 72.7e9, 80, 1024)


def step(model: Model, gpus: int, prompts: int, shards: int, tensor: int, micro_batch: int) -> Step:
    """One step with `shards` GPUs to a copy of the state, and `tensor` to a sampler.

    `micro_batch` is the tokens of one forward pass on a GPU.
    """
    p, completions = model.parameters, prompts * GROUP
    tokens = completions * TOKENS / gpus  # of one GPU; a prompt is read once a group
    passes = max(1.0, tokens / micro_batch)

    rows = completions / (gpus / tensor)
    waves, flying = max(1.0, rows / IN_FLIGHT), min(rows, IN_FLIGHT)
    cache = 2 * 2 * model.layers * model.keys * flying * (PROMPT + TOKENS / 2)
    read = max((2 * p + cache) / tensor / MEMORY, 2 * p * flying / tensor / FLOPS)

    inside = NVLINK if min(shards, gpus) <= MACHINE else NETWORK
    gathered = passes * (2 * p + 2 * p + 4 * p) * (1 - 1 / shards) / inside
    replicas = gpus // shards
    reduced = passes * 2 * (4 * p / shards) * (1 - 1 / replicas) / (NVLINK if gpus <= MACHINE else NETWORK)
    return Step(
        sample=waves * TOKENS * read,
        score=2 * p * tokens / FLOPS,  # of the reference
        update=6 * p * tokens / FLOPS,
        sharded=gathered + reduced,
        push=2 * p * (1 - 1 / shards) / inside,
        # A reference in fp32 is sharded alike; it is loaded whole beside what there is of the policy.
        kept=max(16 * p / shards + 4 * p / shards + 2 * p / tensor, 4 * p + 4 * p / shards),
    )


def row(model: Model, gpus: int, prompts: int, shards: int, tensor: int, micro_batch: int = 16384) -> str:
    s = step(model, gpus, prompts, shards, tensor, micro_batch)
    total = s.sample + s.score + max(s.update, s.sharded) + s.push
    rate = prompts * GROUP * TOKENS / total
    fits = f"{s.kept / 1e9:.0f}" if s.kept < 0.9 * ROOM else f"**{s.kept / 1e9:.0f}**"
    cells = [model.name, gpus, prompts, shards, tensor, fits]
    cells += [f"{x:.1f}" for x in (s.sample, s.score, s.update, s.sharded, s.push, total)]
    return "| " + " | ".join(map(str, [*cells, f"{rate / 1e3:,.0f}k"])) + " |"


def gathered() -> str:
    """What a token takes that comes from another process: pickled, read, and kept."""
    rng, n = random.Random(0), GROUP * TOKENS
    draws = (lambda: rng.randrange(150_000), rng.random)
    group = [tuple(tuple(draw() for _ in range(TOKENS)) for draw in draws) for _ in range(GROUP)]
    pickled = pickle.dumps(group)
    start = time.perf_counter()
    pickle.loads(pickled)
    seconds = time.perf_counter() - start
    tracemalloc.start()
    kept_group = pickle.loads(pickled)
    kept, _ = tracemalloc.get_traced_memory()
    assert kept_group == group
    return (
        f"a gathered token: {len(pickled) / n:.0f} bytes, {seconds / n * 1e9:.0f} ns to read, {kept / n:.0f} bytes kept"
    )


def main() -> None:
    names = "model, GPUs, prompts, shards, GPUs a sampler, GB kept, sample s, reference s, update s, shards s, push s"
    heads = [*names.split(", "), "step s", "tok/s"]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for model in MODELS:
        for gpus, shards in ((1, 1), (8, 8), (64, 8), (1024, 8)):
            print(row(model, gpus, max(64, gpus), shards, tensor=1))
    for gpus, shards, tensor in ((64, 64, 1), (64, 64, 8), (1024, 64, 8)):
        print(row(LARGE, gpus, gpus, shards, tensor))
    least = 8 / 6 * FLOPS
    print(f"\ntokens of a micro-batch below which shards wait: {least / NVLINK:,.0f} over NVLink,", end=" ")
    print(f"{least / NETWORK:,.0f} over the network")
    print(gathered())


if __name__ == "__main__":
    main()

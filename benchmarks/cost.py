"""Estimates the time and memory of a step on many GPUs from the sizes of models and the speed of H100 GPUs.

    python benchmarks/cost.py

Only the last line is measured: the cost of a token that a process gathers from the others.
"""

from __future__ import annotations

import pickle
import random
import time
import tracemalloc
from typing import NamedTuple

GROUP, TOKENS, PROMPT = 16, 2048, 256
"""Completions per prompt, tokens per completion, and tokens per prompt."""
FLOPS = 0.4 * 989e12
"""Operations per second of one H100 in bf16, at 40% of its peak."""
MEMORY_BANDWIDTH = 0.6 * 3.35e12
"""Bytes per second from the memory of one H100, at 60% of its peak."""
NVLINK, NETWORK = 0.8 * 450e9, 0.8 * 50e9
"""Bytes per second and GPU within a machine and between machines (400 Gb/s per GPU), at 80% of their peaks."""
GPUS_PER_MACHINE, GPU_MEMORY = 8, 80e9
"""GPU_MEMORY is in bytes."""
IN_FLIGHT = 256
"""Rows that one replica samples at once (`sampler.rows`)."""


class Model(NamedTuple):
    name: str
    parameters: float
    layers: int
    key_size: int
    """Key heads times head size."""


class Step(NamedTuple):
    """The seconds of the parts of a step, and the memory of a GPU."""

    sample: float
    score: float
    """Scoring with the reference."""
    update: float
    communicate: float
    """Gathering parameters and reducing gradients. This overlaps with the update: the longer of the two counts."""
    push: float
    """Sending weights to the sampler."""
    memory: float
    """Bytes while training or while loading, whichever is more."""


MODELS = (Model("0.5B", 0.49e9, 24, 128), Model("7B", 7.6e9, 28, 512), Model("32B", 32.8e9, 64, 1024))
LARGE = Model("70B", 72.7e9, 80, 1024)


def estimate_step(model: Model, gpus: int, prompts: int, shards: int, tensor: int, micro_batch: int) -> Step:
    """Estimate a step with `shards` GPUs per copy of the training state and `tensor` GPUs per sampler.

    `micro_batch` is the number of tokens of one forward pass on a GPU.
    """
    p, completions = model.parameters, prompts * GROUP
    tokens = completions * TOKENS / gpus  # per GPU, without prompts: each is scored once per group
    passes = max(1.0, tokens / micro_batch)

    rows = completions / (gpus / tensor)  # per sampler
    waves, in_flight = max(1.0, rows / IN_FLIGHT), min(rows, IN_FLIGHT)
    cache = 2 * 2 * model.layers * model.key_size * in_flight * (PROMPT + TOKENS / 2)  # bytes of keys and values
    decode_step = max((2 * p + cache) / tensor / MEMORY_BANDWIDTH, 2 * p * in_flight / tensor / FLOPS)

    bandwidth = NVLINK if min(shards, gpus) <= GPUS_PER_MACHINE else NETWORK  # between the shards of a copy
    # Each pass gathers bf16 parameters twice and scatters fp32 gradients, then sums the gradients of all copies.
    gather = passes * (2 * p + 2 * p + 4 * p) * (1 - 1 / shards) / bandwidth
    copies = gpus // shards
    reduce = passes * 2 * (4 * p / shards) * (1 - 1 / copies) / (NVLINK if gpus <= GPUS_PER_MACHINE else NETWORK)
    return Step(
        sample=waves * TOKENS * decode_step,
        score=2 * p * tokens / FLOPS,
        update=6 * p * tokens / FLOPS,
        communicate=gather + reduce,
        push=2 * p * (1 - 1 / shards) / bandwidth,
        # The reference is sharded in fp32, like the policy. It is loaded whole after the policy is sharded.
        memory=max(16 * p / shards + 4 * p / shards + 2 * p / tensor, 4 * p + 4 * p / shards),
    )


def format_row(model: Model, gpus: int, prompts: int, shards: int, tensor: int, micro_batch: int = 16384) -> str:
    s = estimate_step(model, gpus, prompts, shards, tensor, micro_batch)
    total = s.sample + s.score + max(s.update, s.communicate) + s.push
    rate = prompts * GROUP * TOKENS / total
    memory = f"{s.memory / 1e9:.0f}" if s.memory < 0.9 * GPU_MEMORY else f"**{s.memory / 1e9:.0f}**"
    cells = [model.name, gpus, prompts, shards, tensor, memory]
    cells += [f"{x:.1f}" for x in (s.sample, s.score, s.update, s.communicate, s.push, total)]
    return "| " + " | ".join(map(str, [*cells, f"{rate / 1e3:,.0f}k"])) + " |"


def measure_gathered_token() -> str:
    """Measure the cost of a token from another process, and return it as a sentence."""
    rng, n = random.Random(0), GROUP * TOKENS
    draws = (lambda: rng.randrange(150_000), rng.random)
    group = [tuple(tuple(draw() for _ in range(TOKENS)) for draw in draws) for _ in range(GROUP)]
    pickled = pickle.dumps(group)
    start = time.perf_counter()
    pickle.loads(pickled)
    seconds = time.perf_counter() - start
    tracemalloc.start()
    copy = pickle.loads(pickled)
    memory, _ = tracemalloc.get_traced_memory()
    assert copy == group
    return (
        f"A gathered token takes {len(pickled) / n:.0f} bytes to send, {seconds / n * 1e9:.0f} ns to unpickle, "
        f"and {memory / n:.0f} bytes of memory."
    )


def main() -> None:
    names = "model, GPUs, prompts, shards, GPUs a sampler, GB kept, sample s, reference s, update s, shards s, push s"
    headings = [*names.split(", "), "step s", "tok/s"]
    print("| " + " | ".join(headings) + " |\n|" + "---|" * len(headings))
    for model in MODELS:
        for gpus, shards in ((1, 1), (8, 8), (64, 8), (1024, 8)):
            print(format_row(model, gpus, max(64, gpus), shards, tensor=1))
    for gpus, shards, tensor in ((64, 64, 1), (64, 64, 8), (1024, 64, 8)):
        print(format_row(LARGE, gpus, gpus, shards, tensor))
    threshold = 8 / 6 * FLOPS  # a pass moves 8 bytes per parameter and computes 6 operations per parameter and token
    print(f"\nIf a micro-batch has fewer than {threshold / NVLINK:,.0f} tokens over NVLink", end=" ")
    print(f"({threshold / NETWORK:,.0f} over the network), communication takes longer than the update.")
    print(measure_gathered_token())


if __name__ == "__main__":
    main()

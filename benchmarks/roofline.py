"""How near a step is to what this machine could do: operations and bytes, the time that they need at least, and take.

    python benchmarks/roofline.py [--tokens 64] [--prompts 4] [--group 8]

The limits are one large bfloat16 product on all threads, tried after each step, since machines that are shared change
their speed, and reading one large tensor. A part needs at least the longer of its operations at that speed and its
bytes at that bandwidth. SmolLM2-135M, completions that never end early, medians.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import tyro
from contenders import our_graded_task, our_policy

from pellucid.algorithm import grpo
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed.runtime import Runtime
from pellucid.models.decode import DecodeBatch
from pellucid.policy.policy import Policy
from pellucid.rollout import native
from pellucid.rollout.native import NativeSampler
from pellucid.types import Sampling
from pellucid.utils import hardware

WARM_UP = 2


@dataclass
class Options:
    tokens: int = 64
    prompts: int = 4
    group: int = 8
    repeats: int = 5
    model: str = "smollm2-135m"


class Work(NamedTuple):
    """What a part has to do."""

    gflop: float
    gb: float
    """Read or written at least, however well caches are used."""


def main(options: Options) -> None:
    torch.manual_seed(0)
    policy = our_policy(Namespace(model=options.model, device="cpu", dtype="bfloat16"))
    runtime = Runtime(policy, AdamWConfig(lr=1e-6), total_updates=100)
    cfg = GRPOConfig(steps=100, prompts_per_step=options.prompts, group_size=options.group, max_length=options.tokens)
    sampler = NativeSampler()
    steps = grpo.train(our_graded_task(), sampler, policy, runtime, cfg, sampling=Sampling(max_tokens=options.tokens))
    seen: list[dict[str, float]] = []
    speeds: list[float] = []
    with measured(runtime) as laps:
        for i in range(WARM_UP + options.repeats):
            laps.clear()
            result = next(steps)
            if i >= WARM_UP:
                seen.append({**laps, **result.metrics})
                speeds.append(speed_of_products())
    context, threads, speed, width = context_of(policy), torch.get_num_threads(), median(speeds), bandwidth()
    print(f"{speed:.0f} GFLOP/s in one product, {width:.1f} GB/s in one read, {threads} threads;", end=" ")
    print(f"{options.prompts} x {options.group} completions of {options.tokens} tokens, prompts of {context}\n")
    print(table(work_of(policy, options, context), seen, speed, width))


@contextmanager
def measured(runtime: Runtime) -> Iterator[defaultdict[str, float]]:
    """Seconds by part, while this is open."""
    laps: defaultdict[str, float] = defaultdict(float)
    with ExitStack() as stack:
        for owner, name, part in (
            (DecodeBatch, "admit", "prompts"),
            (DecodeBatch, "step", "tokens"),
            (native, "sample_tokens", "drawing"),
            (Policy, "score", "forward"),
            (runtime, "backward", "backward"),
            (runtime, "step", "optimizer"),
        ):
            stack.enter_context(timed(owner, name, part, laps))
        yield laps


@contextmanager
def timed(owner: Any, name: str, part: str, laps: defaultdict[str, float]) -> Iterator[None]:
    inside: Callable[..., Any] = getattr(owner, name)

    def around(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return inside(*arguments)
        finally:
            laps[part] += time.perf_counter() - start

    setattr(owner, name, around)
    try:
        yield
    finally:
        setattr(owner, name, inside)


def context_of(policy: Policy) -> int:
    """Tokens of a prompt, in the middle of four."""
    return int(median(len(policy.encode(prompt)) for prompt in our_graded_task().sample(0, 4)))


def speed_of_products() -> float:
    """GFLOP/s of one large product on all threads."""
    threads = torch.get_num_threads()
    return hardware.measure_matmul_tflops(torch.bfloat16, size=2048, repeats=10, threads=threads) * 1e3


def bandwidth() -> float:
    """GB/s: the best of a few sums over 400 MB."""
    x, seconds = torch.ones(10**8), []
    for _ in range(5):
        start = time.perf_counter()
        x.sum()
        seconds.append(time.perf_counter() - start)
    return x.nbytes / min(seconds) / 1e9


def work_of(policy: Policy, options: Options, context: int) -> dict[str, Work]:
    """Of each part, from the sizes of the model: two operations for each weight and token, and four for each dimension
    of a head, token that reads and token that is read.
    """
    decoder = policy.decoder
    assert decoder
    with torch.no_grad():
        shape, (embedding, layers, _, _) = decoder.shape, decoder.collect_weights()
    matrices = sum(getattr(x, name).numel() for x in layers for name in ("qkv", "attention_out", "gate_up", "down"))
    head, rows, t = embedding.tensor.numel(), options.prompts * options.group, options.tokens
    read = 4 * shape.layers * shape.heads * shape.head_size / 1e9  # GFLOP for each token that a token reads
    kept = 4 * shape.layers * shape.key_heads * shape.head_size / 1e9  # GB of keys and values of a token
    trained = sum(p.numel() for p in policy.trainable().values())

    prompts, own = options.prompts * context, rows * (t - 1)
    of_prompts = 2 * matrices * prompts / 1e9 + read * prompts * context / 2
    of_own = 2 * matrices * own / 1e9 + read * own * (context + t / 2)
    steps, weights = t - 1, 2 * (matrices + head)
    return {
        "prompts": Work(of_prompts + 2 * head * options.prompts / 1e9, 2 * (matrices + head) / 1e9),
        "tokens": Work(
            of_own + 2 * head * own / 1e9,
            steps * (weights / 1e9 + kept * (options.prompts * context + rows * t / 2)),
        ),
        "drawing": Work(0.0, t * rows * policy.model.config.vocab_size * 2 / 1e9),
        "forward": Work(of_prompts + of_own + 2 * head * rows * t / 1e9, 2 * (matrices + head) / 1e9),
        "backward": Work(2 * (of_prompts + of_own + 2 * head * rows * t / 1e9), 6 * (matrices + head) / 1e9),
        # AdamW reads parameter, gradient and moments, and writes all but the gradient; the copies follow.
        "optimizer": Work(0.0, trained * (28 + 6) / 1e9),
    }


SUMS = {
    "sampling": (("prompts", "tokens", "drawing"), "time/generate"),
    "update": (("forward", "backward", "optimizer"), "time/update"),
}


def at_the_limit(work: dict[str, Work], speed: float, width: float) -> dict[str, float]:
    """Seconds that each part needs at least."""
    return {name: max(part.gflop / speed, part.gb / width) for name, part in work.items()}


def table(work: dict[str, Work], seen: list[dict[str, float]], speed: float, width: float) -> str:
    rows = ["| part | GFLOP | GB | at the limit, s | takes, s | ratio |", "|---|---|---|---|---|---|"]
    least = at_the_limit(work, speed, width)

    def row(name: str, of: tuple[str, ...], takes: float) -> str:
        gflop, gb, limit = sum(work[x].gflop for x in of), sum(work[x].gb for x in of), sum(least[x] for x in of)
        return f"| {name} | {gflop:.0f} | {gb:.1f} | {limit:.2f} | {takes:.2f} | {takes / limit:.2f} |"

    for name, (parts, metric) in SUMS.items():
        rows += [row(part, (part,), median(one[part] for one in seen)) for part in parts]
        rows.append(row(f"**{name}**", parts, median(one[metric] for one in seen)))
    rows.append(row("**step**", tuple(work), median(one["time/step"] for one in seen)))
    return "\n".join(rows)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

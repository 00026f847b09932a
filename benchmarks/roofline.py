"""Measures how close a training step comes to the limits of this machine: operations, bytes, and the time they take.

    python benchmarks/roofline.py [--tokens 64] [--prompts 4] [--group 8]

The limits are the speed of one large bfloat16 matrix product on all threads and the bandwidth of reading one large
tensor. The product is measured after each step, because the speed of a shared machine varies. The limit of a part is
the larger of its operations divided by that speed and its bytes divided by that bandwidth. All times are medians.
Completions never end early.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import tyro
from contenders import load_policy, make_graded_task

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
    """The operations and memory traffic of a part."""

    gflop: float
    gb: float
    """Gigabytes that are read or written even if caches are used perfectly."""


def main(options: Options) -> None:
    torch.manual_seed(0)
    policy = load_policy(options.model, "cpu", "bfloat16")
    runtime = Runtime(policy, AdamWConfig(lr=1e-6), total_updates=100)
    cfg = GRPOConfig(steps=100, prompts_per_step=options.prompts, group_size=options.group, max_length=options.tokens)
    sampler = NativeSampler()
    steps = grpo.train(make_graded_task(), sampler, policy, runtime, cfg, sampling=Sampling(max_tokens=options.tokens))
    measurements: list[dict[str, float]] = []
    speeds: list[float] = []
    with time_parts(runtime) as seconds:
        for i in range(WARM_UP + options.repeats):
            seconds.clear()
            result = next(steps)
            if i >= WARM_UP:
                measurements.append({**seconds, **result.metrics})
                speeds.append(measure_matmul_speed())
    prompt_length, threads = compute_prompt_length(policy), torch.get_num_threads()
    speed, bandwidth = median(speeds), measure_bandwidth()
    print(f"{speed:.0f} GFLOP/s in one product, {bandwidth:.1f} GB/s in one read, {threads} threads;", end=" ")
    print(f"{options.prompts} x {options.group} completions of {options.tokens} tokens, prompts of {prompt_length}\n")
    print(format_table(estimate_work(policy, options, prompt_length), measurements, speed, bandwidth))


@contextmanager
def time_parts(runtime: Runtime) -> Iterator[defaultdict[str, float]]:
    """Yield the seconds spent in each part, which accumulate while the context is open."""
    seconds: defaultdict[str, float] = defaultdict(float)
    with ExitStack() as stack:
        for owner, name, part in (
            (DecodeBatch, "admit", "prompts"),
            (DecodeBatch, "step", "tokens"),
            (native, "sample_tokens", "drawing"),
            (Policy, "score", "forward"),
            (runtime, "backward", "backward"),
            (runtime, "step", "optimizer"),
        ):
            stack.enter_context(time_calls(owner, name, part, seconds))
        yield seconds


@contextmanager
def time_calls(owner: Any, name: str, part: str, seconds: defaultdict[str, float]) -> Iterator[None]:
    """Add the duration of each call of `owner.name` to `seconds[part]`."""
    function: Callable[..., Any] = getattr(owner, name)

    def wrapper(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            seconds[part] += time.perf_counter() - start

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, function)


def compute_prompt_length(policy: Policy) -> int:
    """Return the median number of tokens of four prompts."""
    return int(median(len(policy.encode(prompt)) for prompt in make_graded_task().sample(0, 4)))


def measure_matmul_speed() -> float:
    """Return the GFLOP/s of one large matrix product on all threads."""
    threads = torch.get_num_threads()
    return hardware.measure_matmul_tflops(torch.bfloat16, size=2048, repeats=10, threads=threads) * 1e3


def measure_bandwidth() -> float:
    """Return the GB/s of the fastest of five sums over 400 MB."""
    x, seconds = torch.ones(10**8), []
    for _ in range(5):
        start = time.perf_counter()
        x.sum()
        seconds.append(time.perf_counter() - start)
    return x.nbytes / min(seconds) / 1e9


def estimate_work(policy: Policy, options: Options, prompt_length: int) -> dict[str, Work]:
    """Estimate the work of each part from the sizes of the model.

    Each token takes two operations per weight, and four per dimension of each head for each token it attends to.
    """
    decoder = policy.decoder
    assert decoder
    with torch.no_grad():
        shape, (embedding, layers, _, _) = decoder.shape, decoder.collect_weights()
    matrices = sum(getattr(x, name).numel() for x in layers for name in ("qkv", "attention_out", "gate_up", "down"))
    head, rows, t = embedding.tensor.numel(), options.prompts * options.group, options.tokens
    attention = 4 * shape.layers * shape.heads * shape.head_size / 1e9  # GFLOP per pair of tokens
    cache = 4 * shape.layers * shape.key_heads * shape.head_size / 1e9  # GB of keys and values per token
    trained = sum(p.numel() for p in policy.trainable().values())

    # A completion's last token is sampled but not read.
    prompt_tokens, completion_tokens = options.prompts * prompt_length, rows * (t - 1)
    prompt_gflop = 2 * matrices * prompt_tokens / 1e9 + attention * prompt_tokens * prompt_length / 2
    completion_gflop = 2 * matrices * completion_tokens / 1e9 + attention * completion_tokens * (prompt_length + t / 2)
    forward = prompt_gflop + completion_gflop + 2 * head * rows * t / 1e9
    steps, weights = t - 1, 2 * (matrices + head)  # decode steps; bytes in bfloat16
    return {
        "prompts": Work(prompt_gflop + 2 * head * options.prompts / 1e9, weights / 1e9),
        "tokens": Work(
            completion_gflop + 2 * head * completion_tokens / 1e9,
            steps * (weights / 1e9 + cache * (prompt_tokens + rows * t / 2)),
        ),
        "drawing": Work(0.0, t * rows * policy.model.config.vocab_size * 2 / 1e9),
        "forward": Work(forward, weights / 1e9),
        "backward": Work(2 * forward, 3 * weights / 1e9),
        # AdamW reads the parameter, gradient, and both moments, and writes all but the gradient (28 bytes). The
        # update of the bfloat16 copy reads 4 bytes and writes 2.
        "optimizer": Work(0.0, trained * (28 + 6) / 1e9),
    }


STAGES = {
    "sampling": (("prompts", "tokens", "drawing"), "time/generate"),
    "update": (("forward", "backward", "optimizer"), "time/update"),
}
"""The parts of each stage, and the metric with its measured seconds."""


def compute_limits(work: dict[str, Work], speed: float, bandwidth: float) -> dict[str, float]:
    """Return the minimum seconds of each part at `speed` GFLOP/s and `bandwidth` GB/s."""
    return {name: max(part.gflop / speed, part.gb / bandwidth) for name, part in work.items()}


def format_table(work: dict[str, Work], measurements: list[dict[str, float]], speed: float, bandwidth: float) -> str:
    lines = ["| part | GFLOP | GB | at the limit, s | takes, s | ratio |", "|---|---|---|---|---|---|"]
    limits = compute_limits(work, speed, bandwidth)

    def format_row(name: str, parts: tuple[str, ...], seconds: float) -> str:
        gflop, gb = sum(work[x].gflop for x in parts), sum(work[x].gb for x in parts)
        limit = sum(limits[x] for x in parts)
        return f"| {name} | {gflop:.0f} | {gb:.1f} | {limit:.2f} | {seconds:.2f} | {seconds / limit:.2f} |"

    for name, (parts, metric) in STAGES.items():
        lines += [format_row(part, (part,), median(one[part] for one in measurements)) for part in parts]
        lines.append(format_row(f"**{name}**", parts, median(one[metric] for one in measurements)))
    lines.append(format_row("**step**", tuple(work), median(one["time/step"] for one in measurements)))
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

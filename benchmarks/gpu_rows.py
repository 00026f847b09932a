"""The rows of gpu.py: what each does, what came of it, and whether that is right.

What lies beside the tests is found here because gpu_place.py has put it on the path.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from bench import WARM_UP, Duel, fight, ratio
from gpu_place import ROOT, Forked, Place
from processes import MissingError
from safetensors.torch import load_file
from seeds import cell, records
from torch.profiler import ProfilerActivity

from conftest import tiny_recipe
from pellucid.config import load_config
from pellucid.policy.load import PACKAGED_MODELS
from pellucid.training import memory
from runs import same_run, train, untimed, weights

ARITHMETIC = ROOT / "recipes/arithmetic.toml"
WORK = {"prompts": 4, "group": 8, "tokens": 128}
"""Of one step, or of one call of a sampler."""
SHORT = {"prompts": 2, "group": 2, "tokens": 4}
"""The same where it is simulated."""
PEER = "trl-autocast"
"""TRL as precise as ours: weights in fp32, products in bf16."""
ROUNDING, SHARDING = 1e-5, 1e-6
"""How far weights may be apart after a few steps: on another device, and with another engine."""
PLANNED = 1.33
"""A plan of memory may be wrong by this factor."""
ATTENTION = ("flash", "cudnn", "efficient", "math")
ATTENTIONS = ("aten::_scaled_dot_product", "aten::_flash_attention_forward")
"""Operators that are one of these: of sequences of any lengths flash attention is called by itself."""


class Outcome(NamedTuple):
    result: str
    verdict: str
    """pass, fail, left out, or a ratio."""


class Row(NamedTuple):
    work: Callable[[Place], Outcome]
    stands_in: str
    """What stands in for the GPU where it is simulated."""


def passed(right: bool) -> str:
    return "pass" if right else "fail"


def trained(place: Place, *arguments: object) -> None:
    with place.entered():
        status = train(*arguments)
    if status != 0:
        raise RuntimeError(f"training ended with status {status}: {' '.join(map(str, arguments))}")


def tiny_run(place: Place, name: str, device: str, *settings: object) -> Path:
    """The run folder of a training of the tests' tiny model, in a process of its own."""
    recipe, run = tiny_recipe(place.folder / f"{name}.toml", place.tiny()), place.folder / name
    few = ("--algorithm.micro-batch", 0, "--algorithm.epochs", 1, "--evaluate.n", 2, "--log.no-tensorboard")
    place.apart(trained, place, recipe, "--run", run, "--policy.device", device, *few, *settings)
    return run


def moves(place: Place) -> Outcome:
    """The same run on the CPU and on the device: the same tokens, numbers and weights but for rounding."""
    # Such an eps keeps AdamW from making whole steps of gradients that are rounding alone.
    settings = ("--algorithm.steps", 2, "--evaluate.every", 0, "--optimizer.lr", 1e-3, "--optimizer.eps", 1e-4)
    runs = {"here": "cpu", "there": place.device}
    here, there = (tiny_run(place, name, device, *settings) for name, device in runs.items())
    said = [[row["tokens"] for row in records(run / "rollouts.jsonl")] for run in (here, there)]
    rows = [[untimed(row) for row in records(run / "metrics.jsonl")] for run in (here, there)]
    differ = {name for one, other in zip(*rows, strict=True) for name in one if not close(one[name], other.get(name))}
    far = furthest(weights(here), weights(there))
    learns = all(row["grad_norm"] > 0 for row in rows[1])
    result = f"2 steps: {'the same' if said[0] == said[1] else 'other'} tokens, weights {far:.0e} apart at most"
    if differ:
        result += f"; other numbers: {', '.join(sorted(differ))}"
    return Outcome(result, passed(said[0] == said[1] and not differ and far <= ROUNDING and learns))


def close(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= 1e-4 + 1e-3 * abs(one)


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    if one.keys() != other.keys():
        raise ValueError(f"only one of the two has {', '.join(one.keys() ^ other.keys())}")
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


def resumes(place: Place) -> Outcome:
    """A run of two steps, and one that was saved after the first and resumed in another process."""
    settings = ("--policy.deterministic", "--policy.dtype", "bfloat16", "--optimizer.schedule", "constant")
    settings += ("--evaluate.every", 1, "--checkpoint.every", 1)
    whole = tiny_run(place, "whole", place.device, *settings, "--algorithm.steps", 2)
    parted = tiny_run(place, "parted", place.device, *settings, "--algorithm.steps", 1)
    place.apart(trained, place, "--resume", parted, "--algorithm.steps", 2)
    same_run(whole, parted)
    return Outcome("2 steps, and 1 + 1: the same weights, rollouts, metrics and evaluations, in bf16", "pass")


def kernels(place: Place) -> Outcome:
    """What a step asked for, by torch.profiler, and on a GPU which kernels took most of its time."""
    run = place.folder / "kernels"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with torch.profiler.profile(activities=activities) as profile:
        trained(place, ARITHMETIC, "--run", run, *brief(place, place.model("0.5B")))
    events = profile.key_averages()
    asked = Counter({event.key: event.count for event in events})
    attention = {
        kind: sum(n for name, n in asked.items() if name.startswith(ATTENTIONS) and kind in name) for kind in ATTENTION
    }
    attention = {kind: n for kind, n in attention.items() if n}
    fused = asked["aten::_fused_adamw_"] > 0
    dtype = json.loads((run / "config.json").read_text())["policy"]["dtype"]
    on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    longest = sorted(on_device, key=lambda event: -event.self_device_time_total)[:3]
    told = [
        f"{dtype}; AdamW {'fused' if fused else 'not fused'}",
        "attention " + (", ".join(f"{kind} {n}x" for kind, n in attention.items()) or "unknown"),
        *(f"{event.key[:40]} {event.self_device_time_total / 1e3:.1f} ms" for event in longest),
    ]
    # Plain attention writes all its scores to memory: on a GPU there are kernels that do not.
    right = bool(attention) if place.simulated else bool(attention) and "math" not in attention and bool(longest)
    expected = "float32" if place.simulated else "bfloat16"
    return Outcome("; ".join(told), passed(fused and right and dtype == expected))


def brief(place: Place, model: Path) -> tuple[object, ...]:
    """A step of arithmetic, from which no row is dropped whatever its reward, and of which no token is recorded: a
    prediction computes attention in another way.
    """
    return (
        *("--policy.model", model, "--policy.device", place.device, "--sampler.max-tokens", 8),
        *("--algorithm.steps", 1, "--algorithm.prompts-per-step", 2, "--algorithm.group-size", 4),
        *("--algorithm.entropy-coef", 1e-6, "--evaluate.every", 0, "--checkpoint.every", 0, "--log.tokens", 0),
    )


def shards(place: Place) -> Outcome:
    """Three steps with each engine, of one process that torchrun started."""
    case, engines = "llama" if place.simulated else "llama, cuda", {"replicated": "ddp", "sharded": "fsdp2"}
    script = ROOT / "tests/distributed/engines.py"
    said = place.alone(script, place.folder, case, *(f"{name}={engine}" for name, engine in engines.items()))
    one, other = (load_file(place.folder / f"{name}-{case}.safetensors") for name in engines)
    del one["cast"], other["cast"]  # of weights that are sharded no cast ones are kept
    far, between = furthest(one, other), "gloo" if place.simulated else "nccl"
    right = far <= SHARDING and float(one["grad_norm"].min()) > 1e-3 and between in said
    return Outcome(f"over {between}: parameters and norms of gradients {far:.0e} apart after 3 steps", passed(right))


def learns(place: Place) -> Outcome:
    """The recipe of `make train`, with the embedded model where it is installed."""
    wheel, package, _ = PACKAGED_MODELS["smollm2-135m"]
    settings: tuple[object, ...] = ("--policy.device", place.device)
    if place.simulated:
        settings = (*brief(place, place.model("0.5B")), "--evaluate.every", 1, "--evaluate.n", 2, "--evaluate.k", 0)
    elif importlib.util.find_spec(package) is None:
        return Outcome(f"{wheel} is not installed", "left out")
    run = place.folder / "arithmetic"
    trained(place, ARITHMETIC, "--run", run, *settings)
    before, *_, after = (row["greedy"] for row in records(run / "evals.jsonl"))
    steps = len(records(run / "metrics.jsonl"))
    result = f"greedy {cell(before)} before, {cell(after)} after {steps} steps"
    return Outcome(result, passed(place.simulated or after["low"] > before["high"]))


def work_of(place: Place) -> dict[str, int]:
    return SHORT if place.simulated else WORK


def settings_of(place: Place, size: str) -> dict[str, int | str]:
    return {**work_of(place), "model": str(place.model(size)), "device": place.contenders_device}


def faster(work: str, peer: str, size: str, place: Place) -> Outcome:
    """Ours against a peer, turn by turn."""
    settings = settings_of(place, size) | ({"pieces": 1} if work == "step" else {})
    try:
        result = fight(Duel(work, peer, settings, None), place.repeats, Forked)
    except MissingError as error:
        return Outcome(str(error), "left out")
    ours, theirs = (median(pair[i]["seconds"] for pair in result["turns"]) for i in (0, 1))
    what = f"{ours:.2f} s, {peer} {theirs:.2f} s"
    if work == "sample":
        tokens = math.prod(work_of(place).values())
        what = f"{tokens / ours:.0f} tokens/s, {peer} {tokens / theirs:.0f}"
    peaks = result["peaks"]
    return Outcome(
        f"{what}; {peaks[0]:.1f} GB, {peaks[1]:.1f} GB ({peaks[0] / peaks[1]:.2f}x)",
        f"{ratio(result['turns'], 'seconds'):.2f}x as fast",
    )


def planned(size: str, place: Place) -> Outcome:
    """What `pellucid doctor --plan` says of the steps that are measured."""
    settings = settings_of(place, size)
    plan = place.apart(planned_gb, place.simulated, settings)
    with Forked("step", "pellucid", settings, place.folder) as ours:
        for _ in range(WARM_UP):
            ours.turn()
        peak = ours.close()["peak_gb"]
    right = place.simulated or 1 / PLANNED <= plan / peak <= PLANNED
    result = f"planned {plan:.1f} GB, measured {peak:.1f} GB"
    return Outcome(result, f"{plan / peak:.2f}x" if right else f"fail: {plan / peak:.2f}x")


def planned_gb(simulated: bool, settings: dict[str, int | str]) -> float:
    """In a process of its own, since a plan asks the GPU for its size."""
    overrides = {"policy.model": "model", "sampler.max-tokens": "tokens", "algorithm.group-size": "group"}
    overrides |= {"algorithm.prompts-per-step": "prompts"}
    words = [word for key, name in overrides.items() for word in (f"--{key}", str(settings[name]))]
    cfg = load_config(ARITHMETIC, [*words, "--policy.dtype", "bfloat16"])
    parts = memory.estimate_parts(memory.describe_model(cfg.policy), cfg)
    # What torch counts on a GPU is tensors; of a process on the CPU it is everything.
    return memory.sum_known(parts) - (0 if simulated else memory.LIBRARIES_GB)


SIMULATED = "simulated: CPU, tiny model"


def measured(size: str) -> dict[str, Row]:
    return {
        f"step-{size}": Row(partial(faster, "step", PEER, size), SIMULATED),
        f"sample-{size}": Row(partial(faster, "sample", "generate", size), SIMULATED),
        f"plan-{size}": Row(partial(planned, size), SIMULATED),
        f"graphs-{size}": Row(partial(faster, "sample", "without-graphs", size), SIMULATED),
    }


ROWS = {
    **measured("0.5B"),
    "resume": Row(resumes, "simulated device"),
    "device": Row(moves, "simulated device"),
    "kernels": Row(kernels, "simulated device"),
    "fsdp2": Row(shards, "simulated: CPU, gloo"),
    "arithmetic": Row(learns, "simulated device, tiny model"),
    **measured("1.5B"),
}
"""The most valuable first: if the time is short, the last ones are left out."""

"""`pellucid doctor`: what this machine has and does, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import rich
import torch
from rich.markup import escape
from rich.table import Table

from pellucid import __version__
from pellucid.config import Config
from pellucid.doctor import memory
from pellucid.machine import hardware
from pellucid.machine.harmless import harmless
from pellucid.models import fusing, varlen
from pellucid.policy import pretrained
from pellucid.types import UserError

EXTRAS = {
    "lora": ["peft"],
    "data": ["datasets", "math_verify"],
    "tensorboard": ["tensorboard"],
    "wandb": ["wandb"],
    "serve": ["fastapi", "uvicorn"],
    "plots": ["matplotlib"],
    "teacher": ["openai"],
    "agents": ["fastapi", "uvicorn", "openai"],
    "gym": ["reasoning_gym"],
    "verifiers": ["verifiers", "fastapi", "uvicorn"],
    "vllm": ["vllm"],
    "modelscope": ["modelscope"],
    "deepspeed": ["deepspeed"],
    "quantized": ["bitsandbytes"],
}
DEVICES = (1, 2, 4, 8)
LORA = 16
"""The rank of the adapter that is proposed where training the whole model does not fit."""
ENGINES = {
    "ddp": {"engine": "ddp"},
    "fsdp2": {"engine": "fsdp2"},
    "ZeRO-2": {"engine": "deepspeed", "zero_stage": 2},
    "ZeRO-3": {"engine": "deepspeed", "zero_stage": 3},
}


def report() -> int:
    table = Table.grid(padding=(0, 2))
    for name, finding in findings():
        table.add_row(f"[dim]{name}", escape(harmless(finding)))
    rich.print(table)
    return 0


def findings() -> Iterator[tuple[str, str]]:
    facts = hardware.describe()
    device = hardware.pick_device("auto")
    yield "pellucid", __version__
    yield "libraries", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    yield "cpu", f"{facts['cpu']}, {facts['threads']} threads, {facts['memory_gb']} GB"
    yield "gpus", str(facts["gpus"]) or "none"
    fp32, bf16 = hardware.matmul_tflops(torch.float32), hardware.matmul_tflops(torch.bfloat16)
    yield "matrix products", f"fp32 {fp32:.2f}, bf16 {bf16:.2f} TFLOP/s on one CPU thread"
    chosen = str(hardware.pick_dtype("auto", device)).removeprefix("torch.")
    yield "auto", "; ".join(filter(None, (f"device {device}, dtype {chosen}", hardware.without_bf16(device))))
    yield from on_gpu(device) if device.type == "cuda" else on_cpu()
    kept = hardware.keep_freed_memory()
    yield "allocator", "keeps freed memory (glibc mallopt)" if kept else "not glibc: left as it is"
    yield "disk", f"{shutil.disk_usage(Path.cwd()).free / 1e9:.0f} GB free here"
    for name in pretrained.EMBEDDED:
        yield name, embedded(name)
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        yield extra, f"missing: pip install 'pellucid[{extra}]'" if missing else "installed"


def on_cpu() -> Iterator[tuple[str, str]]:
    step, reason = fusing.here()
    by = "AMX" if step and step.uses_amx else "AVX-512"
    yield "decoding", f"fused, in bfloat16 by {by} on the CPU" if step else f"by torch's operators: {reason}"


def on_gpu(device: torch.device) -> Iterator[tuple[str, str]]:
    """How a small model is decoded and scored on a GPU. The C++ kernels of the CPU are neither compiled nor tried."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorded = fusing.records(device)
    fault = "; ".join(str(one.message) for one in caught)
    yield "decoding", "by CUDA graphs" if recorded else f"by torch's operators: {fault}"
    kernel, fault = varlen.choice(device, torch.bfloat16)
    yield "attention", "flash attention" if kernel else f"by torch's operators, without flash attention: {fault}"


def plan(cfg: Config) -> int:
    """Print how many GB training with these settings takes on each device. No weights are loaded."""
    dtype = hardware.pick_dtype(cfg.policy.dtype, hardware.pick_device(cfg.policy.device))
    cfg = replace(cfg, policy=replace(cfg.policy, dtype=str(dtype).removeprefix("torch.")))
    if note := cfg.policy.access.format_warning(cfg.policy.model):
        print(harmless(f"! {note}"), flush=True)
    model = memory.of_policy(cfg.policy)
    print(
        f"{cfg.policy.model}: {model.parameter_count / 1e6:.1f} M parameters, {model.trained_count / 1e6:.1f} M trained, computed"
        f" in {cfg.policy.dtype}; GB on each device at the peak\n"
    )
    names = list(memory.parts(model, cfg))
    in_4bit, by_vllm = cfg.policy.load_in_4bit, cfg.sampler.name == "vllm"
    heads = ["devices", "engine", *names, "peak", *([] if in_4bit else ["with offload"])]
    print(line(heads), line(["---"] * len(heads)), sep="\n")
    # Others cannot share out 4-bit numbers, and vLLM is for one process.
    for name, changed in list(ENGINES.items())[: 1 if in_4bit or by_vllm else None]:
        by_engine = replace(cfg, runtime=replace(cfg.runtime, **changed))
        away = replace(by_engine, optimizer=replace(cfg.optimizer, offload=True))
        for devices in DEVICES[: 1 if by_vllm else None]:
            parts = memory.parts(model, by_engine, devices).values()
            ways = [by_engine] if in_4bit else [by_engine, away]
            peaks = [memory.shown(model, settings, devices) for settings in ways]
            print(line([str(devices), name, *map(memory.gb, parts), *peaks]))
    if note := memory.on_checkpointing(model, cfg):
        print(f"\nOn one device, {note}.")
    if reason := memory.unlike(model.config):
        print(f"\nUnknown is what {model.config.model_type} needs that depends on its layers ({reason}).")
    print(
        f"\nEngines are those of runtime.engine, ZeRO that of deepspeed with its runtime.zero_stage; offload is"
        f" optimizer.offload.\nBefore it is sharded, a model is whole in fp32: the peak is at least that."
        f" Parts that are not there at the same time do not add up to it. {sampling(model, cfg)}"
        f"\n\n{verdict(model, cfg)}"
    )
    return 0


def verdict(model: memory.Model, cfg: Config) -> str:
    """Whether a run of one process with these settings fits this machine, and if not, which settings would make it."""
    device = hardware.pick_device(cfg.policy.device)
    here, needed = hardware.device_gb(device), memory.peak(model, cfg)
    counted = "at least" if memory.unlike(model.config) else "about"
    owner = "this GPU" if device.type == "cuda" else "this machine"
    need = f"{counted} {needed:.1f} GB are needed and {owner} has {here:.1f} GB"
    if needed <= here:
        return f"Verdict for this machine: fits, {need}."
    found = next(((words, gb) for words, gb in smaller(model, cfg, device) if gb <= here), None)
    if found:
        words, gb = found
        return f"Verdict for this machine: does not fit, {need}. It fits with {words}: {gb:.1f} GB."
    return (
        f"Verdict for this machine: does not fit, {need}. Smaller micro-batches, gradient checkpointing and LoRA are"
        " not enough: choose a smaller model or a larger machine."
    )


def smaller(model: memory.Model, cfg: Config, device: torch.device) -> Iterator[tuple[str, float]]:
    """Yield settings that need less memory with the GB that they need, those first that change least.

    First one change alone, then all of them so far together.
    """
    rows, together, words = memory.rows_of(cfg, 1), cfg, list[str]()
    ways = [("algorithm.micro_batch", rows >> shift) for shift in range(1, rows.bit_length())]
    ways += [] if cfg.policy.gradient_checkpointing else [("policy.gradient_checkpointing", True)]
    if device.type == "cuda" and not cfg.policy.load_in_4bit and cfg.policy.dtype != "float16":
        ways += [] if cfg.optimizer.offload else [("optimizer.offload", True)]
    for key, value in ways:
        yield f"{key} = {shown(value)}", memory.peak(model, with_setting(cfg, key, value))
    for key, value in ways[max(0, rows.bit_length() - 2) :]:  # the smallest micro-batch is enough of those
        together = with_setting(together, key, value)
        words.append(f"{key} = {shown(value)}")
        yield ", ".join(words), memory.peak(model, together)
    if device.type == "cuda" and torch.cuda.device_count() > 1 and not cfg.policy.load_in_4bit:
        devices = torch.cuda.device_count()
        shared = with_setting(together, "runtime.engine", "fsdp2")
        yield f'{", ".join(words)}, runtime.engine = "fsdp2" on {devices} GPUs', memory.peak(model, shared, devices)
    if not cfg.policy.lora:
        for settings, others in ((cfg, []), (together, words)):
            adapted = with_setting(with_setting(settings, "policy.lora", LORA), "optimizer.offload", False)
            said = [f"policy.lora = {LORA}", *(word for word in others if not word.startswith("optimizer."))]
            yield ", ".join(said), memory.peak(memory.of_policy(adapted.policy), adapted)


def with_setting(cfg: Config, key: str, value: Any) -> Config:
    section, _, name = key.partition(".")
    return replace(cfg, **{section: replace(getattr(cfg, section), **{name: value})})


def shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def sampling(model: memory.Model, cfg: Config) -> str:
    """What sampling keeps, in words."""
    s, wide = cfg.sampler, 4 if cfg.policy.dtype == "float32" else 2
    engine = f"{wide * model.parameter_count / 1e9:.1f} GB of weights and"
    if s.name != "vllm":
        return (
            f"Sampling keeps {memory.gb(memory.cache(model.config, cfg, 1))} GB of keys and values on one device, and"
            f' neither gradients nor activations; with sampler.name = "vllm" {engine} sampler.cache_gb besides.'
        )
    if s.urls:
        return f"Sampling is by servers, each of which keeps {engine} its own --cache-gb."
    return f"vLLM keeps {engine} {s.cache_gb:g} GB of keys and values (sampler.cache_gb) beside the trainer."


def line(cells: Sequence[str]) -> str:
    """One row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def embedded(name: str) -> str:
    try:
        return f"ready in {pretrained.locate(name)}"
    except UserError as error:
        return str(error)

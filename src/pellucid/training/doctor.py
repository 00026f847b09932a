"""`pellucid doctor` and `pellucid train --profile`.

The doctor reports what this machine can compute with, which extras are installed, and whether a recipe fits its memory.
The profiler measures where the time and memory of one training step go.
"""

from __future__ import annotations

import bisect
import importlib.metadata
import importlib.util
import itertools
import math
import shutil
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import rich
import torch
from rich.markup import escape
from rich.table import Table
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid import __version__
from pellucid.algorithm.grpo import StepResult
from pellucid.config import Config
from pellucid.models import attention, fused_check, fused_decode, linear, native, triton_check
from pellucid.policy.packaged import PACKAGED_MODELS, find_pieces
from pellucid.training import memory
from pellucid.training.preflight import describe_planned_model
from pellucid.training.time_estimate import describe_planned_time
from pellucid.types import UserError
from pellucid.utils import hardware
from pellucid.utils.text import escape_controls, print_notes

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
_PLANNED_DEVICE_COUNTS = (1, 2, 4, 8)
PLANNED_CARDS_GB = (16, 24, 48, 80, 141)
"""The memory of common cards."""
ENGINE_SETTINGS = {
    "ddp": {"engine": "ddp"},
    "fsdp2": {"engine": "fsdp2"},
    "ZeRO-2": {"engine": "deepspeed", "zero_stage": 2},
    "ZeRO-3": {"engine": "deepspeed", "zero_stage": 3},
}


def print_report() -> int:
    """Print what this machine has and what is missing. Return the exit status, 0."""
    table = Table.grid(padding=(0, 2))
    for name, finding in collect_findings():
        table.add_row(f"[dim]{name}", escape(escape_controls(finding)))
    rich.print(table)
    return 0


def collect_findings() -> Iterator[tuple[str, str]]:
    facts = hardware.describe_hardware()
    device = hardware.pick_device("auto")
    yield "pellucid", __version__
    yield "libraries", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    yield "cpu", f"{facts['cpu']}, {facts['threads']} threads, {facts['memory_gb']} GB"
    yield "gpus", str(facts["gpus"]) or "none"
    fp32, bf16 = hardware.measure_matmul_tflops(torch.float32), hardware.measure_matmul_tflops(torch.bfloat16)
    yield "matrix products", f"fp32 {fp32:.2f}, bf16 {bf16:.2f} TFLOP/s on one CPU thread"
    chosen = str(hardware.pick_dtype("auto", device)).removeprefix("torch.")
    yield "auto", "; ".join(filter(None, (f"device {device}, dtype {chosen}", hardware.describe_missing_bf16(device))))
    yield from _describe_gpu(device) if device.type == "cuda" else _describe_cpu()
    is_glibc = hardware.keep_freed_memory()
    yield "allocator", "keeps freed memory (glibc mallopt)" if is_glibc else "not glibc: left as it is"
    yield "disk", f"{shutil.disk_usage(Path.cwd()).free / 1e9:.0f} GB free here"
    for name in PACKAGED_MODELS:
        try:
            find_pieces(name)
            yield name, "installed"
        except UserError as error:
            yield name, str(error)
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        yield extra, f"missing: pip install 'pellucid[{extra}]'" if missing else "installed"


def _describe_cpu() -> Iterator[tuple[str, str]]:
    kernel, reason = fused_check.load_fused_kernel()
    if kernel:
        yield "decoding", f"fused, in bfloat16 by {'AMX' if kernel.uses_amx else 'AVX-512'} on the CPU"
    else:
        yield "decoding", f"by torch's operators: {reason}"


def _describe_gpu(device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield how a small model is decoded and scored on a GPU. This compiles no CPU kernels."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        has_graphs = fused_check.can_use_cuda_graphs(device)
        triton_fault = triton_check.find_decoder_fault(fused_check.build_self_check_decoder(device))
    reason = "; ".join(str(warning.message) for warning in caught)
    graphs = f"by CUDA graphs of torch's operators: {triton_fault}" if triton_fault else "by Triton and CUDA graphs"
    yield "decoding", graphs if has_graphs else f"by torch's operators: {reason}"
    flash_fault = attention.find_flash_fault(device, torch.bfloat16)
    without_flash = f"by torch's operators, without flash attention: {flash_fault}"
    yield "attention", without_flash if flash_fault else "flash attention"


def print_memory_plan(cfg: Config) -> int:
    """Print the memory per device that a run with these settings needs. Return the exit status, 0.

    No weights are loaded. With policy.device = "cuda" it is a plan for GPUs, on any machine. Raise UserError if the
    model cannot be found.
    """
    on_card = memory.change_settings(cfg, {"policy.device": "cuda"})
    if cfg.policy.dtype == "auto":
        on_card = memory.change_settings(on_card, {"policy.dtype": "bfloat16"})
    is_elsewhere = cfg.policy.device.startswith("cuda") and not torch.cuda.is_available()
    if is_elsewhere:
        cfg = on_card
    else:
        dtype = hardware.pick_dtype(cfg.policy.dtype, hardware.pick_device(cfg.policy.device))
        cfg = memory.change_settings(cfg, {"policy.dtype": str(dtype).removeprefix("torch.")})
    print_notes(cfg.policy.access.format_warning(cfg.policy.model))
    model = describe_planned_model(cfg)
    print(
        f"{cfg.policy.model}: {model.parameter_count / 1e6:.1f} M parameters, {model.trained_count / 1e6:.1f} M"
        f" trained, computed in {cfg.policy.dtype}; GB on each device at the peak\n"
    )
    in_4bit = cfg.policy.load_in_4bit
    parts = memory.estimate_parts(model, cfg)
    heads = ["devices", "engine", *parts, "peak", *([] if in_4bit else ["with offload"])]
    print(_format_table_row(heads), _format_table_row(["---"] * len(heads)), sep="\n")
    for name, changes in list(ENGINE_SETTINGS.items())[: None if _can_shard(cfg) else 1]:
        with_engine = replace(cfg, runtime=replace(cfg.runtime, **changes))
        variants = [
            with_engine,
            *([] if in_4bit else [memory.change_settings(with_engine, {"optimizer.offload": True})]),
        ]
        for devices in _PLANNED_DEVICE_COUNTS:
            parts = memory.estimate_parts(model, with_engine, devices).values()
            prefix = "at least " if None in parts else ""
            peaks = [f"{prefix}{memory.estimate_peak(model, settings, devices):.1f}" for settings in variants]
            print(_format_table_row([str(devices), name, *map(_format_gb, parts), *peaks]))
    if note := memory.describe_checkpointing(model, cfg):
        print(f"\nOn one device, {note}.")
    if reason := memory.explain_unknown_memory(model.config):
        print(f"\nThe part of {model.config.model_type}'s memory that depends on its layers is unknown ({reason}).")
    print(
        "\nThe engine column is runtime.engine; ZeRO-2 and ZeRO-3 are deepspeed with that runtime.zero_stage; offload"
        f" is optimizer.offload.\n{memory.describe_loading(model, cfg)}"
        " The parts do not add up to the peak, because they do not all exist at the same time."
        f" {_describe_sampling_memory(model, cfg)}"
    )
    if not reason:
        print(f"\n{_make_card_table(model, on_card)}")
    if not is_elsewhere:
        print(f"\nA run of one process on this machine takes {describe_planned_time(cfg, model)}.")
        print(f"\n{_describe_fit(model, cfg)}")
    return 0


def _make_card_table(model: memory.ModelFacts, cfg: Config) -> str:
    """Return a table of what a run on one GPU needs to fit on common cards."""
    lines = [f"One GPU, in {cfg.policy.dtype}:", "", _format_table_row(["card", "fits", "peak"])]
    lines.append(_format_table_row(["---"] * 3))
    for card_gb in PLANNED_CARDS_GB:
        changes = find_fitting_settings(model, cfg, card_gb)
        text = "no" if changes is None else f"with {memory.format_settings(changes)}" if changes else "as it is"
        peak = "" if changes is None else f"{memory.estimate_changed_peak(model, cfg, changes):.1f}"
        lines.append(_format_table_row([f"{card_gb} GB", text, peak]))
    return "\n".join(lines)


def find_fitting_settings(model: memory.ModelFacts, cfg: Config, available: float) -> dict[str, Any] | None:
    """Return settings by dotted key with which a run of one process fits, the smallest change; None if none do."""
    if memory.fits(memory.estimate_peak(model, cfg), available):
        return {}
    for changes in ({}, *memory.suggest_smaller_settings(cfg)):
        rows = memory.find_micro_batch(*memory.apply_changes(model, cfg, changes), available)
        if rows is not None:
            return {"algorithm.micro_batch": rows, **changes} if rows else changes
    return None


def _describe_fit(model: memory.ModelFacts, cfg: Config) -> str:
    """Return whether a run of one process fits this machine, and if not, settings that fit."""
    device = hardware.pick_device(cfg.policy.device)
    available = hardware.get_available_memory_gb(device)
    owner = "this GPU" if device.type == "cuda" else "this machine"
    return f"Verdict for {owner}: {_describe_fit_in(model, cfg, available)}."


def _describe_fit_in(model: memory.ModelFacts, cfg: Config, available: float) -> str:
    """Return whether a run of one process fits into this memory, and if not, settings that fit."""
    needed, changes = memory.estimate_peak(model, cfg), find_fitting_settings(model, cfg, available)
    qualifier = "at least" if memory.explain_unknown_memory(model.config) else "about"
    need = f"{qualifier} {needed:.1f} GB are needed, and a run plans with at most {memory.format_limit(available)}"
    if changes == {}:
        return f"fits, {need}"
    devices = 1
    if changes is None and (devices := torch.cuda.device_count()) > 1 and _can_shard(cfg):
        sharded = {"policy.gradient_checkpointing": True, "optimizer.offload": True, "runtime.engine": "fsdp2"}
        changes = {"algorithm.micro_batch": 1, **sharded}
        if not memory.fits(memory.estimate_changed_peak(model, cfg, changes, devices), available):
            changes = None
    if changes is None:
        return (
            f"does not fit, {need}. Smaller micro-batches, gradient checkpointing and LoRA are not enough: choose a"
            " smaller model or a larger machine"
        )
    gb, where = memory.estimate_changed_peak(model, cfg, changes, devices), f" on {devices} GPUs" if devices > 1 else ""
    return f"does not fit, {need}. It fits with {memory.format_settings(changes)}{where}: {gb:.1f} GB"


def _can_shard(cfg: Config) -> bool:
    """Whether the policy may be sharded: its base is not in 4 bits, and vLLM does not run in the same process."""
    return not (cfg.policy.load_in_4bit or (cfg.sampler.name == "vllm" and not cfg.sampler.urls))


def _describe_sampling_memory(model: memory.ModelFacts, cfg: Config) -> str:
    """Return a sentence on the memory of sampling."""
    sampler, dtype_bytes = cfg.sampler, 4 if cfg.policy.dtype == "float32" else 2
    weights = f"{dtype_bytes * model.parameter_count / 1e9:.1f} GB of weights"
    if not sampler.uses_engine:
        cache = _format_gb(memory.estimate_kv_cache(model, cfg, 1))
        return (
            f"Sampling keeps {cache} GB of keys and values on one device, and neither gradients nor activations."
            f' With sampler.name = "vllm", add {weights} and sampler.cache_gb.'
        )
    if sampler.urls:
        return f"Servers sample; each of them needs {weights} and its own --cache-gb."
    return f"vLLM keeps {weights} and {sampler.cache_gb:g} GB of keys and values (sampler.cache_gb) beside the trainer."


def _format_gb(size: float | None) -> str:
    return "unknown" if size is None else f"{size:.1f}"


def _format_table_row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


# ---------------------------------------------------------------- pellucid train --profile


_PROFILED_STEP = 3
"""The step that is profiled. The first two fill caches."""
_LEFT_OPERAND_INDEX = {
    torch.ops.aten.mm: 0,
    torch.ops.aten.bmm: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.baddbmm: 1,
}
"""The operators that are matrix products, with the index of their left argument."""
if torch.backends.mkldnn.is_available():
    _LEFT_OPERAND_INDEX[torch.ops.mkldnn._linear_pointwise] = 0
COLLECTIVE_PREFIXES = ("gloo:", "nccl:")
"""Prefixes of the names of collective operations. Their time includes the wait for slower processes."""
STEP_PHASES: tuple[str, ...] = ("generate", "reward", "score", "update")
OPERATOR_KINDS = {
    "tokens, fused": (fused_decode.FUSED_STEP_PROFILER_NAME,),
    "matrix products": (
        *("mm", "bmm", "addmm", "baddbmm", "_linear_pointwise", "linear", "matmul"),
        *(linear.GEMM_PROFILER_NAME, linear.WEIGHT_GRADIENT_PROFILER_NAME),
    ),
    "attention": ("attention", "_scaled_dot", "scaled_dot", "_flash", "_efficient"),
    "embedding": ("embedding",),
    "optimizer": ("_fused_adam", "_foreach", "linalg_vector_norm", "_amp"),
    "softmax, exp, log": ("softmax", "_softmax", "exp", "log", "sigmoid", "silu"),
    "copies, casts, indices": (
        *("copy", "cat", "index", "gather", "scatter", "constant_pad", "fill", "zero", "clone", "sort"),
    ),
    "the rest": ("",),
}
"""Prefixes of the names of PyTorch's operators, by kind. An operator is of the first kind that matches."""


class MemorySample(NamedTuple):
    seconds: float
    gb: float


class PhaseProfile(NamedTuple):
    seconds: float
    seconds_by_kind: defaultdict[str, float]
    """Seconds in operators by kind. The remaining time is Python and the dispatch of operators."""
    memory_gb: list[float]
    """Samples of the resident memory."""
    communication: list[tuple[float, float]]
    """Start and end of each collective operation in seconds. seconds_by_kind includes operators that run meanwhile."""


def profile_steps(steps: Iterator[StepResult], path: Path, dtype: torch.dtype) -> Iterator[StepResult]:
    """Yield the steps, and write a profile of the third one. It compares with the speed of products in `dtype`."""
    flops_per_token: dict[str, float] = {}
    for number in itertools.count(1):
        if number == _PROFILED_STEP - 1:
            result, flops_per_token = _count_flops(steps)
        elif number == _PROFILED_STEP:
            result = _profile_step(steps, flops_per_token, path, dtype)
        else:
            result = next(steps, None)
        if result is None:
            return
        yield result


def _count_flops(steps: Iterator[StepResult]) -> tuple[StepResult | None, dict[str, float]]:
    """Take a step, and count its floating-point operations for each sampled token, by phase.

    This is not the profiled step, since counting slows operators down. Attention in C++ is not counted.
    """
    with FlopCounter() as counter:
        start = time.perf_counter()
        result = next(steps, None)
    if result is None:
        return None, {}
    phase_at, tokens = _make_phase_lookup(result.metrics), _count_tokens(result)
    flops_per_token = dict.fromkeys(STEP_PHASES, 0.0)
    for seconds, n in counter.operations:
        flops_per_token[phase_at(seconds - start)] += n / max(1, tokens)
    return result, flops_per_token


def _profile_step(
    steps: Iterator[StepResult], flops_per_token: Mapping[str, float], path: Path, dtype: torch.dtype
) -> StepResult | None:
    """Take a step, and write and print its profile."""
    with _sample_memory() as samples, torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        result = next(steps, None)
    if result is None:
        return None
    phases = group_by_phase(list(profiler.events() or []), samples, start, result.metrics)
    tflop = {name: flops * _count_tokens(result) / 1e12 for name, flops in flops_per_token.items()}
    peak_tflops = hardware.measure_matmul_tflops(dtype, size=2048, repeats=5, threads=torch.get_num_threads())
    text = format_profile(phases, tflop, peak_tflops, str(dtype).removeprefix("torch."))
    path.write_text(text)
    print(escape_controls(f"{text}\nprofile of step {result.step}: {path}"))
    return result


def _count_tokens(result: StepResult) -> int:
    return sum(c.length for group in result.groups for c in group.completions)


class FlopCounter(TorchDispatchMode):
    """Records the time and the floating-point operations of each matrix product. [n, k] by [k, m] takes 2 n k m."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        native.OperationCounter.entries = self.operations
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        native.OperationCounter.entries = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (left := _LEFT_OPERAND_INDEX.get(func.overloadpacket)) is not None:
            self.operations.append((time.perf_counter(), 2.0 * result.numel() * args[left].shape[-1]))
        return result


@contextmanager
def _sample_memory() -> Iterator[list[MemorySample]]:
    """Sample the resident memory every 20 ms."""
    samples: list[MemorySample] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.02):
            samples.append(MemorySample(time.perf_counter(), hardware.get_resident_gb()))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def _make_phase_lookup(metrics: Mapping[str, float]) -> Callable[[float], str]:
    """Return a function from seconds since the start of a step to its phase. Phases follow one another."""
    ends = list(itertools.accumulate(metrics[f"time/{name}"] for name in STEP_PHASES))
    return lambda seconds: STEP_PHASES[min(bisect.bisect_right(ends, seconds), len(STEP_PHASES) - 1)]


def group_by_phase(
    events: Sequence[Any], samples: Sequence[MemorySample], start: float, metrics: Mapping[str, float]
) -> dict[str, PhaseProfile]:
    """Return the profile of each phase. An operator belongs to the phase in which it started."""
    phase_at = _make_phase_lookup(metrics)
    origin = min((event.time_range.start for event in events), default=0.0)
    phases = {name: PhaseProfile(metrics[f"time/{name}"], defaultdict(float), [], []) for name in STEP_PHASES}
    for event in events:
        started, ended = ((time - origin) / 1e6 for time in (event.time_range.start, event.time_range.end))
        phase = phases[phase_at(started)]
        phase.seconds_by_kind[classify_operator(event.name)] += event.self_cpu_time_total / 1e6
        if event.name.startswith(COLLECTIVE_PREFIXES):
            phase.communication.append((started, ended))
    for sample in samples:
        phases[phase_at(sample.seconds - start)].memory_gb.append(sample.gb)
    return phases


def _measure_union(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, last_end = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last_end))
        last_end = max(last_end, end)
    return total


def classify_operator(operator: str) -> str:
    name = operator.removeprefix("aten::").removeprefix("mkldnn::")
    return next(kind for kind, prefixes in OPERATOR_KINDS.items() if name.startswith(prefixes))


def format_profile(
    phases: Mapping[str, PhaseProfile], tflop: Mapping[str, float], peak_tflops: float, dtype: str
) -> str:
    """Return the profile as fixed-width text.

    Args:
        phases: The profile of each phase.
        tflop: The operations of the matrix products of each phase, in 1e12.
        peak_tflops: The measured speed of a large matrix product in `dtype`, in TFLOP/s.
        dtype: The dtype of that product.
    """
    lines = [f"{'':26}" + "".join(f"{name:>12}" for name in [*phases, "step"])]

    def add_row(name: str, values: Sequence[float], form: str, total: float | None = None) -> None:
        cells = [*values, sum(values) if total is None else total]
        lines.append(f"{name:26}" + "".join(f"{format(value, form):>12}" for value in cells))

    profiles, products = list(phases.values()), [tflop[name] for name in phases]
    seconds = [phase.seconds for phase in profiles]
    add_row("seconds", seconds, ".2f")
    for kind in OPERATOR_KINDS:
        add_row(f"  {kind}", [phase.seconds_by_kind[kind] for phase in profiles], ".2f")
    remaining = [max(0.0, phase.seconds - sum(phase.seconds_by_kind.values())) for phase in profiles]
    add_row("  Python and dispatch", remaining, ".2f")
    if any(phase.communication for phase in profiles):
        add_row("between processes", [_measure_union(phase.communication) for phase in profiles], ".2f")
    add_row("matrix products, TFLOP", products, ".3f")
    add_row("  at this machine's speed", [x / peak_tflops for x in products], ".2f")
    shares = [x / peak_tflops / s if s else 0.0 for x, s in zip(products, seconds, strict=True)]
    add_row("  share of that speed", shares, ".0%", sum(products) / peak_tflops / sum(seconds))
    peaks = [max(phase.memory_gb, default=0.0) for phase in profiles]
    add_row("peak memory, GB", peaks, ".2f", max(peaks))
    lines.append(f"\nThis machine: {peak_tflops:.2f} TFLOP/s in {dtype}, one product of 2048 x 2048, all threads.")
    lines.append(
        "The profiler itself slows operators down. FLOPs were counted in the previous step and scaled by the number of"
        " tokens.\n"
    )
    return "\n".join(lines)

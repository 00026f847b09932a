"""`pellucid doctor`: what this machine has and does, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import rich
import torch
from rich.markup import escape
from rich.table import Table

from pellucid import __version__, hardware, pretrained
from pellucid.types import UserError

EXTRAS = {"lora": ["peft"], "data": ["datasets", "math_verify"], "tensorboard": ["tensorboard"]}


def report() -> int:
    table = Table.grid(padding=(0, 2))
    for name, finding in findings():
        table.add_row(f"[dim]{name}", escape(finding))
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
    yield "auto", f"device {device}, dtype {chosen}"
    kept = hardware.keep_freed_memory()
    yield "allocator", "keeps freed memory (glibc mallopt)" if kept else "not glibc: left as it is"
    yield "disk", f"{shutil.disk_usage(Path.cwd()).free / 1e9:.0f} GB free here"
    for name in pretrained.EMBEDDED:
        yield name, embedded(name)
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        yield extra, f"missing: pip install 'pellucid[{extra}]'" if missing else "installed"


def embedded(name: str) -> str:
    try:
        return f"ready in {pretrained.locate(name)}"
    except UserError as error:
        return str(error)

"""Measures the peak memory of a process that loads a model and shards it, or that reads only its own shards.

    python benchmarks/sharded_loading.py                   all rows; those that do not fit are not measured
    python benchmarks/sharded_loading.py --rows 1.5b-2     one row
    python benchmarks/sharded_loading.py --folder models   keep the models here; by default, they are removed at the end

A row loads a checkpoint of random bf16 weights in 2 or 4 processes on this machine, as `pellucid train` does, and ends
when the optimizer exists. "Whole": each process loads the whole model before the engine shards it. "By shards": each
process reads only its own rows of the files, as Pellucid does. "Planned" is the phase "start" of the memory plan. Peaks
are the largest resident size of a process in GB, with 0.35 GB of code and libraries. Rows of ZeRO-3 need DeepSpeed: run
them with .venv-deepspeed/bin/python.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from memory_plan import CARD_SHAPES
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pellucid.algorithm.settings import AdamWConfig
from pellucid.config import Config, PolicyConfig
from pellucid.distributed.process_group import join_process_group
from pellucid.distributed.runtime import Runtime
from pellucid.distributed.settings import RuntimeConfig
from pellucid.policy.load import load_tokenizer
from pellucid.policy.policy import load_policy
from pellucid.training.memory import describe_model, estimate_phases
from pellucid.utils.hardware import get_peak_memory_gb, keep_freed_memory

CPU = torch.device("cpu")


class Row(NamedTuple):
    size: str
    processes: int
    runtime: RuntimeConfig = RuntimeConfig("fsdp2")
    lora: int = 0
    """The rank of an adapter over a frozen base."""


ZERO_3 = RuntimeConfig("deepspeed", zero_stage=3)
ROWS = {
    "0.5b-2": Row("0.5B", 2),
    "1.5b-2": Row("1.5B", 2),
    "1.5b-4": Row("1.5B", 4),
    "1.5b-lora-2": Row("1.5B", 2, lora=16),
    "zero3-135m-2": Row("135M", 2, ZERO_3),
    "zero3-0.5b-2": Row("0.5B", 2, ZERO_3),
    "zero3-0.5b-lora-2": Row("0.5B", 2, ZERO_3, lora=16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--folder", type=Path, help="keep the models here; by default, they are removed at the end")
    parser.add_argument("--load", choices=("whole", "by shards"), help=argparse.SUPPRESS)  # in the processes of a row
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if options.load:
            print(json.dumps(measure_peak(ROWS[options.rows[0]], folder, options.load == "by shards")), flush=True)
            return
        print("| row | model | engine | processes | whole GB | by shards GB | planned GB |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for name in options.rows:
            print(make_table_row(name, folder), flush=True)


def make_table_row(name: str, folder: Path) -> str:
    """Load the model of a row in both ways, and return the row of the table."""
    row = ROWS[name]
    # A new process starts with the peak of its parent, so that this process must not make the model itself.
    maker = multiprocessing.get_context("spawn").Process(target=make_model, args=(folder, row.size))
    maker.start()
    maker.join()
    model = describe_model(PolicyConfig(str(folder / row.size), lora=row.lora))
    policy = PolicyConfig(str(folder / row.size), dtype="bfloat16", device="cpu", lora=row.lora)
    cfg = Config(policy=policy, runtime=row.runtime)
    planned = estimate_phases(model, cfg, row.processes)["start"]
    # The engine "transformers" loads the whole model, and DeepSpeed rounds a copy of all master weights.
    by_transformers = replace(cfg, policy=replace(policy, engine="transformers"))
    whole = estimate_phases(model, by_transformers, row.processes)["start"] + planned
    cells = [run_processes(name, folder, load, gb) for load, gb in (("whole", whole), ("by shards", planned))]
    engine = "fsdp2" if row.runtime.engine == "fsdp2" else "ZeRO-3"
    trained = f"{row.size}, LoRA" if row.lora else row.size
    return f"| {name} | {trained} | {engine} | {row.processes} | {' | '.join(cells)} | {planned:.2f} |"


def make_model(folder: Path, size: str) -> None:
    """Save a model with random weights in bf16, unless the folder has it."""
    path = folder / size
    if not path.exists():
        tokenizer, shape = load_tokenizer("smollm2-135m"), dict(CARD_SHAPES[size])
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        config = AutoConfig.for_model(shape.pop("model_type"), **shape, **ids)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        torch.manual_seed(0)
        weights = {key: torch.empty(p.shape, dtype=p.dtype).normal_(std=0.02) for key, p in model.named_parameters()}
        config.save_pretrained(path)
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        tokenizer.save_pretrained(path)


def run_processes(name: str, folder: Path, load: str, expected_gb: float) -> str:
    """Load the model of a row in new processes, and return the largest of their peaks as a cell."""
    row = ROWS[name]
    if row.processes * expected_gb > psutil.virtual_memory().available / 1e9:
        return f"not measured, {row.processes} x {expected_gb:.0f} GB"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": str(row.processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "DS_IGNORE_CUDA_DETECTION": "1"}
    command = [sys.executable, __file__, "--rows", name, "--folder", str(folder), "--load", load]
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(row.processes)
    ]
    peaks = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    return f"{max(peaks):.2f}"


def measure_peak(row: Row, folder: Path, by_shards: bool) -> float:
    """Load and shard a model together with the other processes, and return the peak of this process in GB."""
    keep_freed_memory()
    join_process_group(CPU, 10)
    path = str(folder / row.size)
    policy = load_policy(path, CPU, torch.bfloat16, 1.0, lora_rank=row.lora, leave_weights_in_files=by_shards)
    Runtime(policy, AdamWConfig(), 1, row.runtime)
    return get_peak_memory_gb(CPU)


if __name__ == "__main__":
    main()

"""Compares the peaks of the memory plan with the measured peaks of runs of two steps with random weights.

    python benchmarks/memory_plan.py                      all cases; the largest needs 18 GB
    python benchmarks/memory_plan.py --cases 135m 135m-lora
    python benchmarks/memory_plan.py --cards              what fits on which card, planned: docs/how-to/memory.md

A measured peak is the largest resident size of a process from step 1 on, or on a GPU the most bytes that torch has
allocated. Random weights hardly ever end a completion before the maximum length.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pellucid.config import load_config
from pellucid.policy.load import load_tokenizer
from pellucid.reporting.charts import format_count
from pellucid.training.build import resolve_machine_settings
from pellucid.training.doctor import PLANNED_CARDS_GB, find_fitting_settings
from pellucid.training.memory import change_settings, describe_model, estimate_changed_peak, estimate_phases
from pellucid.training.preflight import describe_planned_model

ROOT = Path(__file__).parents[1]
SHAPES = {
    "135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
}
"""SmolLM2-135M, and Qwen2.5-Coder-0.5B with the separate output layer of its GGUF file."""
COMMON = {
    "policy.dtype": "bfloat16",
    "algorithm.steps": 2,
    "algorithm.entropy_coef": 1e-6,  # keeps rows in the update whose advantage is 0
    "evaluate.every": 0,
    "checkpoint.every": 0,
}
SMALL = {"sampler.max_tokens": 128, "algorithm.prompts_per_step": 4, "algorithm.group_size": 8}
LARGE = SMALL | {"algorithm.micro_batch": 4}
REFERENCE = {"algorithm.kl_coef": 0.01}
QWEN = SHAPES["0.5b"] | {"tie_word_embeddings": True}
CARD_SHAPES = {
    "135M": SHAPES["135m"],
    "0.5B": QWEN,
    "1.5B": QWEN | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "3B": QWEN | {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    "7B": SHAPES["0.5b"]
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152064},
}
"""SmolLM2-135M, and four sizes of Qwen2.5."""
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "135m": ("135m", 1, SMALL),
    "135m-fp32": ("135m", 1, SMALL | {"policy.dtype": "float32", "algorithm.micro_batch": 8}),
    "135m-reference": ("135m", 1, SMALL | REFERENCE | {"algorithm.micro_batch": 8}),
    "135m-lora": ("135m", 1, SMALL | {"policy.lora": 16}),
    "135m-two-processes": ("135m", 2, SMALL),
    "0.5b": ("0.5b", 1, LARGE),
    "0.5b-reference": ("0.5b", 1, LARGE | REFERENCE),
    "0.5b-lora": ("0.5b", 1, LARGE | {"policy.lora": 16}),
    "0.5b-checkpointing": ("0.5b", 1, LARGE | {"policy.gradient_checkpointing": True}),
}
"""A model, a number of processes, and settings, by the name of the case."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--folder", type=Path, help="keep the models here; by default, they are removed at the end")
    parser.add_argument("--set", nargs="+", default=[], metavar="WORD", help="more settings: --set algorithm.steps=3")
    parser.add_argument("--cards", action="store_true", help="print what fits on which card, and measure nothing")
    options = parser.parse_args()
    if options.cards:
        print(make_card_table())
        return
    print("| case | phase | planned GB | measured GB | planned / measured |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.cases:
            size, processes, settings = CASES[name]
            overrides = dict(word.split("=", 1) for word in options.set)
            model = make_model(options.folder or Path(temporary), size)
            print(measure_case(name, model, processes, settings | overrides), flush=True)


def make_model(folder: Path, size: str) -> Path:
    """Make a model with random weights, unless the folder has it, and return its path."""
    path = folder / size
    if not path.exists():
        tokenizer, shape = load_tokenizer("smollm2-135m"), dict(SHAPES[size])
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        config = AutoConfig.for_model(shape.pop("model_type"), **shape, **ids)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


def measure_case(name: str, model: Path, processes: int, settings: dict[str, Any]) -> str:
    """Train for two steps, and return a row of the table."""
    settings = COMMON | settings | {"policy.model": model}
    flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    cfg = resolve_machine_settings(load_config(ROOT / "recipes/arithmetic.toml", flags))
    phases = estimate_phases(describe_planned_model(cfg), cfg, processes)
    phase = max(phases, key=phases.__getitem__)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "--"]
        command = [sys.executable, *(launcher if processes > 1 else ["-m"]), "pellucid", "train"]
        command += [str(ROOT / "recipes/arithmetic.toml"), "--run", str(run_dir), *flags]
        subprocess.run(command, check=True, env=dict(os.environ), stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    measured = max(row["memory/peak_gb"] for row in rows)
    return f"| {name} | {phase} | {phases[phase]:.2f} | {measured:.2f} | {phases[phase] / measured:.2f} |"


def make_card_table() -> str:
    """Return the settings with which 8 prompts x 8 completions of 512 tokens fit on one card, and the planned peak."""
    settings = {"policy.device": "cuda", "policy.dtype": "bfloat16", "sampler.max_tokens": 512, "evaluate.every": 0}
    settings |= {"algorithm.prompts_per_step": 8, "algorithm.group_size": 8}
    cfg = load_config(None, [word for key, value in settings.items() for word in (f"--{key}", str(value))])
    lines = [f"| | {' | '.join(f'{gb} GB' for gb in PLANNED_CARDS_GB)} |", f"|---|{'---|' * len(PLANNED_CARDS_GB)}"]
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in CARD_SHAPES.items():
            path = Path(folder) / name
            AutoConfig.for_model(**shape).save_pretrained(path)
            sized = change_settings(cfg, {"policy.model": str(path)})
            model, cells = describe_model(sized.policy), []
            for gb in PLANNED_CARDS_GB:
                changes = find_fitting_settings(model, sized, gb)
                text = "no" if changes is None else format_changes(changes)
                peak = "" if changes is None else f", {estimate_changed_peak(model, sized, changes):.0f} GB"
                cells.append(text + peak)
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def format_changes(changes: dict[str, Any]) -> str:
    """Return changed settings as in "4 rows, checkpointing"."""
    names = {"policy.gradient_checkpointing": "checkpointing", "policy.load_in_4bit": "4-bit base"}
    others = dict(changes)
    rows = others.pop("algorithm.micro_batch", 0)
    texts = [
        names.get(key) or f"{key.partition('.')[2]} {value}".removesuffix(" True") for key, value in others.items()
    ]
    return ", ".join([format_count(rows, "row") if rows else "all rows", *texts])


if __name__ == "__main__":
    main()

"""Searches for TRL's fastest setup on this CPU: measures each option by itself, then combines the best.

    python benchmarks/trl_search.py
    python benchmarks/trl_search.py --formats bf16 --only 'eager attention' 'compiled'

The work is a step of bench.py, 4 x 8 completions of 64 tokens. Each setup takes turns with Pellucid, and the ratio of
their times is compared, so that other load on the machine affects both. An option that saves more than 2% of the time
by itself is a candidate. Candidates are added one by one, the fastest first, and kept if the step gets faster. Every
measurement is appended to the file of --into, and those in the file are not repeated. When all options of a format are
measured, its best setup is written to benchmarks/trl_best.json; bench.py and accuracy.py call it trl-best-FORMAT.

The search leaves out options that change the training (num_iterations, steps_per_generation, generation_batch_size,
loss_type, top_entropy_quantile, optimizers other than AdamW), that need a GPU (vLLM in TRL, Liger kernels, flash
attention), or that GRPOTrainer does not have (padding-free batches). The KV cache is always on.
"""

from __future__ import annotations

import argparse
import json
from ctypes.util import find_library
from pathlib import Path
from statistics import median
from typing import Any

from bench import Comparison, append_row, collect_metadata, compare, compute_ratio
from trl_setups import ALLOCATOR, BEST_FILE, FORMATS, Setup, format_name

WORK: dict[str, int | str] = {"tokens": 64, "prompts": 4, "group": 8}
MIN_GAIN = 0.02
"""The share of the time that an option must save by itself."""
AS_DOCUMENTED = "as documented"


def make_preload_option(library: str) -> dict[str, Any]:
    """Return an option that preloads an allocator, or none if it is not installed."""
    path = find_library(library)
    return {library: {"environment": {"LD_PRELOAD": path}}} if path else {}


CONTINUOUS = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"max_memory_percent": 0.1},  # the default takes 10 GB of 24
}
OPTIONS: dict[str, dict[str, Any]] = {
    "16 rows at once": {"rows": 16},
    "8 rows at once": {"rows": 8},
    "eager attention": {"model": {"attn_implementation": "eager"}},
    "checkpoints of activations": {"arguments": {"gradient_checkpointing": True}},
    "unfused AdamW": {"arguments": {"optim": "adamw_torch"}},
    "compiled": {"arguments": {"torch_compile": True}},
    "static cache": {"arguments": {"cache_implementation": "static"}},
    "continuous batching": {"arguments": CONTINUOUS},
    "lengths in multiples of 64": {"arguments": {"pad_to_multiple_of": 64}},
    "a worker that loads data": {"arguments": {"dataloader_num_workers": 1}},
    "no pinned memory": {"arguments": {"dataloader_pin_memory": False}},
    "glibc's own allocation": {"environment": dict.fromkeys(ALLOCATOR)},
    "threads that stay on their cores": {"environment": {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}},
    # By default they would spin forever, and take the cores from Pellucid during its turns.
    "threads that spin before they sleep": {"environment": {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "1000000"}},
    **make_preload_option("tcmalloc_minimal"),
    **make_preload_option("jemalloc"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=["bf16", "autocast"])
    parser.add_argument("--only", nargs="+", choices=list(OPTIONS), metavar="OPTION", help=", ".join(OPTIONS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--into", type=Path, default=Path("runs/trl_search.jsonl"))
    options = parser.parse_args()
    options.into.parent.mkdir(parents=True, exist_ok=True)
    for kind in options.formats:
        heads = ["option", "s", "ours", "times ours", f"to {AS_DOCUMENTED}", "GB"]
        print(f"\n### trl-{kind}\n\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
        chosen = find_best_options(kind, options)
        if not options.only and options.tokens == WORK["tokens"]:
            write_best(kind, chosen, options)


def find_best_options(kind: str, options: argparse.Namespace) -> list[str]:
    """Return the options that together are the fastest."""
    base = measure(kind, [], options)
    if base is None:
        raise SystemExit(f"trl-{kind} does not run {AS_DOCUMENTED}")
    alone = {name: measure(kind, [name], options, base) for name in options.only or OPTIONS}
    candidates = sorted((x, name) for name, x in alone.items() if x is not None and x < base * (1 - MIN_GAIN))
    chosen: list[str] = []
    best = base
    for x, name in candidates:
        together = measure(kind, [*chosen, name], options, base) if chosen else x
        if together is not None and together < best:
            chosen, best = [*chosen, name], together
    return chosen


def make_setup(kind: str, chosen: list[str]) -> Setup:
    setup = FORMATS[kind]
    for name in chosen:
        setup = setup.override(OPTIONS[name])
    return setup


def measure(kind: str, chosen: list[str], options: argparse.Namespace, base: float | None = None) -> float | None:
    """Measure a setup unless the file has it, and print its row.

    Returns:
        The time of TRL's step divided by Pellucid's. None if the setup fails or does other work.
    """
    label = " + ".join(chosen) or AS_DOCUMENTED
    key = {"format": kind, "options": chosen, "work": WORK | {"tokens": options.tokens}}
    row: dict[str, Any] | None = next(
        (row for row in read_rows(options.into) if all(row[name] == value for name, value in key.items())), None
    )
    if row is None:
        row = collect_metadata() | key | run_setup(make_setup(kind, chosen), key["work"], options.repeats)
        append_row(options.into, row)
    if "failed" in row:
        print(f"| {label} | {row['failed']} |", flush=True)
        return None
    x = row["times"]
    to_base = f"{x / base:.2f}x" if base else ""
    print(f"| {label} | {row['theirs']:.2f} | {row['ours']:.2f} | {x:.2f}x | {to_base} | {row['gb']:.1f} |", flush=True)
    return x


def run_setup(setup: Setup, work: dict[str, int | str], repeats: int) -> dict[str, Any]:
    """Return median seconds, their ratio and TRL's peak memory, or the reason why the setup fails."""
    try:
        result = compare(Comparison("step", format_name(setup), work), repeats)
    except SystemExit as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        errors = [line[:160] for line in lines[:-1] if "Error" in line][-1:]
        return {"failed": f"does not run: {', '.join([*errors, lines[-1]])}"}
    pellucid, trl = (median(pair[i]["seconds"] for pair in result["turns"]) for i in (0, 1))
    times = compute_ratio(result["turns"], "seconds")
    return {"ours": pellucid, "theirs": trl, "times": times, "gb": result["peaks"][1]}


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_best(kind: str, chosen: list[str], options: argparse.Namespace) -> None:
    """Write the best setup of a format, and keep those of other formats."""
    best = json.loads(BEST_FILE.read_text()) if BEST_FILE.exists() else {}
    setup = make_setup(kind, chosen)._asdict()
    best[kind] = collect_metadata() | {"options": chosen, "repeats": options.repeats, "setup": setup}
    BEST_FILE.write_text(json.dumps(best, indent=1) + "\n")
    print(f"\ntrl-best-{kind}: {', '.join(chosen) or AS_DOCUMENTED}; written to {BEST_FILE.name}", flush=True)


if __name__ == "__main__":
    main()

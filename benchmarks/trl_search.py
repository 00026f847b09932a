"""TRL's fastest setup on this machine: each of its options that may matter on a CPU, alone, then the best together.

    python benchmarks/trl_search.py
    python benchmarks/trl_search.py --formats bf16 --only 'eager attention' 'compiled'

The work is that of bench.py, a step of 4 x 8 completions of 64 tokens. Each setup takes turns with ours, which is the
yardstick: what else the machine does then falls on both. An option that alone gains more than 2% goes into the best, in
the order of its gain, if with those before it it still gains. Every figure is added to the file that --into names, and
what is there is not measured again; when all options of a format are, benchmarks/trl_best.json gets its best setup,
which bench.py and accuracy.py have as trl-best-FORMAT.

Not tried: what changes the training (num_iterations, steps_per_generation, generation_batch_size, loss_type,
top_entropy_quantile, optimizers other than AdamW); what needs a GPU (vLLM in TRL, Liger kernels, flash attention); what
GRPOTrainer does not have (padding-free batches). A cache for generation is always on.
"""

from __future__ import annotations

import argparse
import json
from ctypes.util import find_library
from pathlib import Path
from statistics import median
from typing import Any

from bench import Duel, facts, fight, ratio, record
from trl_setups import ALLOCATOR, FORMATS, FOUND, Setup, named

WORK: dict[str, int | str] = {"tokens": 64, "prompts": 4, "group": 8}
GAIN = 0.02
AS_DOCUMENTED = "as documented"


def preloaded(library: str) -> dict[str, Any]:
    found = find_library(library)
    return {f"{library}": {"environment": {"LD_PRELOAD": found}}} if found else {}


CONTINUOUS = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"max_memory_percent": 0.1},  # by itself it takes 10 GB of 24
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
    # Not for ever, as they would by themselves: they would take the cores from ours while it has its turn.
    "threads that spin before they sleep": {"environment": {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "1000000"}},
    **preloaded("tcmalloc_minimal"),
    **preloaded("jemalloc"),
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
        chosen = searched(kind, options)
        if not options.only and options.tokens == WORK["tokens"]:
            keep(kind, chosen, options)


def searched(kind: str, options: argparse.Namespace) -> list[str]:
    """The options that together are the fastest."""
    base = times(kind, [], options)
    if base is None:
        raise SystemExit(f"trl-{kind} does not run {AS_DOCUMENTED}")
    alone = {name: times(kind, [name], options, base) for name in options.only or OPTIONS}
    gains = sorted((x, name) for name, x in alone.items() if x is not None and x < base * (1 - GAIN))
    chosen: list[str] = []
    best = base
    for x, name in gains:
        together = times(kind, [*chosen, name], options, base) if chosen else x
        if together is not None and together < best:
            chosen, best = [*chosen, name], together
    return chosen


def setup_with(kind: str, chosen: list[str]) -> Setup:
    setup = FORMATS[kind]
    for name in chosen:
        setup = setup.over(OPTIONS[name])
    return setup


def times(kind: str, chosen: list[str], options: argparse.Namespace, base: float | None = None) -> float | None:
    """How many times as long as ours a step takes, told in a row; None where it does not run, or not the same work."""
    label = " + ".join(chosen) or AS_DOCUMENTED
    key = {"format": kind, "options": chosen, "work": WORK | {"tokens": options.tokens}}
    row: dict[str, Any] | None = next(
        (row for row in rows_in(options.into) if all(row[name] == value for name, value in key.items())), None
    )
    if row is None:
        row = facts() | key | tried(setup_with(kind, chosen), key["work"], options.repeats)
        record(options.into, row)
    if "failed" in row:
        print(f"| {label} | {row['failed']} |", flush=True)
        return None
    x = row["times"]
    to_base = f"{x / base:.2f}x" if base else ""
    print(f"| {label} | {row['theirs']:.2f} | {row['ours']:.2f} | {x:.2f}x | {to_base} | {row['gb']:.1f} |", flush=True)
    return x


def tried(setup: Setup, work: dict[str, int | str], repeats: int) -> dict[str, Any]:
    try:
        result = fight(Duel("step", named(setup), work), repeats)
    except SystemExit as ended:
        said = [line.strip() for line in str(ended).splitlines() if line.strip()]
        errors = [line[:160] for line in said[:-1] if "Error" in line][-1:]
        return {"failed": f"does not run: {', '.join([*errors, said[-1]])}"}
    ours, theirs = (median(pair[i]["seconds"] for pair in result["turns"]) for i in (0, 1))
    return {"ours": ours, "theirs": theirs, "times": ratio(result["turns"], "seconds"), "gb": result["peaks"][1]}


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(kind: str, chosen: list[str], options: argparse.Namespace) -> None:
    """Write the best down, beside that of other formats."""
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    setup = setup_with(kind, chosen)._asdict()
    found[kind] = facts() | {"options": chosen, "repeats": options.repeats, "setup": setup}
    FOUND.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\ntrl-best-{kind}: {', '.join(chosen) or AS_DOCUMENTED}; written to {FOUND.name}", flush=True)


if __name__ == "__main__":
    main()

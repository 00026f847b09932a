"""Trains, evaluates, saves, and serves a tiny random checkpoint of each family of causal models in transformers.

    python benchmarks/families.py --output docs/reference/models.md
    python benchmarks/families.py --only mamba lfm2

Prints a row for each family, which may say that Pellucid refuses it. The exit status is 1 if there is a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
import transformers

from pellucid import cli
from pellucid.policy import policy
from pellucid.policy.policy import Policy
from pellucid.rollout.select import find_decode_fault
from pellucid.serve.engine import CompletionChunk, GenerationRequest, ServingEngine
from tiny_families import FAMILIES, OTHERS, checkpoint

ROOT = Path(__file__).parents[1]
RECIPE = """
[policy]
model = "{model}"
dtype = "float32"
[task]
name = "{tests}/digits_task.py:Digits"
[sampler]
max_tokens = 8
[algorithm]
steps = 3
prompts_per_step = 2
group_size = 4
[optimizer]
lr = 1e-2
warmup = 0
[evaluate]
every = 3
n = 2
k = 1
"""
HEADING = """# Models

This page lists the families of transformers that Pellucid can train, evaluate and serve. To try your model before you
train it:

```sh
pellucid eval smollm2-135m --show 1 --evaluate.n 2 --evaluate.k 0
```

`python benchmarks/families.py --output docs/reference/models.md` makes this page, with transformers {version}. It
trains a tiny random checkpoint of each family for three steps, evaluates it before and after, saves it, and generates
with the engine of `pellucid serve`. *Gap* is the largest difference between the log-prob of a token in the sampler and
in the scorer, in nats, in float32.

Models that Pellucid's own decoder does not support are computed by transformers. Before sampling from one, Pellucid
compares the rows of a batch with each row alone. If `sampler.name` cannot sample from a model, the other sampler does,
and a line says so. If a model cannot be trained, Pellucid refuses it with a one-line error. Code in the folder of a
checkpoint runs only with `policy.trust_remote_code`.

| family | computed by | sampler | three steps | gap | served |
|---|---|---|---|--:|---|
"""
BROKEN = "**traceback**"


class Row(NamedTuple):
    """The row of a family in the table."""

    family: str
    computed: str = "-"
    sampler: str = "-"
    steps: str = "-"
    gap: str = "-"
    served: str = "-"

    def format(self) -> str:
        return f"| {' | '.join(cell.replace('|', '/') for cell in self)} |"


def main() -> None:
    names = [*FAMILIES, *OTHERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="FAMILY", help=", ".join(names))
    parser.add_argument("--output", type=Path, help="also write the page to this file")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    rows: list[Row] = []
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(try_family(name, Path(folder)))
        print(rows[-1].format(), flush=True)
    if options.output:
        table = "".join(f"{row.format()}\n" for row in rows)
        options.output.write_text(HEADING.format(version=transformers.__version__) + table)
    sys.exit(1 if any(BROKEN in row for row in rows) else 0)


def try_family(name: str, folder: Path) -> Row:
    """Train, evaluate, save, and serve a tiny model. A traceback is printed, and the row says so."""
    try:
        with warnings.catch_warnings(action="ignore"):
            model = checkpoint(name, folder / "model")
            status, output = train(model, folder)
            if status:
                return Row(name, steps=f"refused: {find_refusal(output, model)}" if status == 2 else BROKEN)
            return make_row(name, folder / "run", output)
    except Exception:  # noqa: BLE001 - one family must not stop the others
        traceback.print_exc()
        return Row(name, steps=BROKEN)


def train(model: Path, folder: Path) -> tuple[int, str]:
    """Return the exit status of a run, and all that it printed."""
    recipe, output = folder / "recipe.toml", io.StringIO()
    recipe.write_text(RECIPE.format(model=model, tests=ROOT / "tests"))
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            cli.main(["train", str(recipe), "--run", str(folder / "run")])
        except SystemExit as error:
            return int(error.code or 0), output.getvalue()
    return 0, output.getvalue()


def find_refusal(output: str, model: Path) -> str:
    """Return the error message of a run, without the path of the model."""
    [line] = [line for line in output.splitlines() if line.startswith("pellucid: ")]
    return line.removeprefix("pellucid: ").replace(f"{str(model)!r}", "...")


def make_row(name: str, run: Path, output: str) -> Row:
    """Read what a run recorded, and generate from the model that it saved."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = (run / "evals.jsonl").read_text().splitlines()
    is_trained = len(steps) == 3 and len(evaluations) == 2 and all(step["grad_norm"] > 0 for step in steps)
    frozen = policy.load_frozen_policy(str(run / "model"), torch.device("cpu"), torch.float32, 1.0)
    reason = frozen.find_fallback_reason()
    note = next((line.removeprefix("! sampler.name: ") for line in output.splitlines() if "! sampler.name" in line), "")
    return Row(
        name,
        f"transformers ({reason})" if reason else "our decoder",
        note or "native",
        "trained" if is_trained else "**no gradient**",
        f"{max(step['sampler/gap_max'] for step in steps):.0e}",
        check_serving(frozen),
    )


def check_serving(frozen: Policy) -> str:
    """Return "yes" if the serving engine generates, or the reason why it does not start."""
    if fault := find_decode_fault(frozen):
        return f"refused: {fault}"
    engine, chunks = ServingEngine(frozen, max_rows=4), list[CompletionChunk]()

    def collect(event: CompletionChunk | Exception | None) -> None:
        if isinstance(event, CompletionChunk):
            chunks.append(event)
        else:
            engine.close()

    for prompt in ((1, 2, 3, 4, 5), (6, 7)):
        engine.submit(GenerationRequest(prompt, collect, n=2, max_tokens=4, seed=0))
    engine.run()
    return "yes" if len({chunk.row_index for chunk in chunks}) == 2 else BROKEN


if __name__ == "__main__":
    main()

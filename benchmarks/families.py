"""Every family of models that transformers has as a causal one: trained, evaluated, saved and served, or refused.

    python benchmarks/families.py --output docs/reference/models.md
    python benchmarks/families.py --only mamba lfm2

Each is a tiny random checkpoint. Exit status 1 where one of them ended in a traceback.
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
from collections.abc import Sequence
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

Which families of transformers can be trained, evaluated and served here. To try your model before you train it:

```sh
pellucid eval smollm2-135m --show 1 --evaluate.n 2 --evaluate.k 0
```

`python benchmarks/families.py --output docs/reference/models.md` makes this page, with transformers {version}. A tiny
random checkpoint of each family takes three steps, is evaluated before and after, saved, and asked through the engine
of `pellucid serve`. *Gap* is the largest distance between the log-prob of a token in the sampler and in the scorer, in
nats, in float32.

Models outside of our own decoder are computed by transformers, and checked before they are sampled from: rows in a
batch are compared with each row alone. If `sampler.name` cannot sample from a model, the other sampler does, and a line
says so. A model that cannot be trained is refused in one line. Code in a checkpoint's own folder runs only with
`policy.trust_remote_code`.

| family | computed by | sampler | three steps | gap | served |
|---|---|---|---|--:|---|
"""
BROKEN = "**traceback**"


class Row(NamedTuple):
    """What became of a family, each in a few words."""

    family: str
    computed: str = "-"
    sampler: str = "-"
    steps: str = "-"
    gap: str = "-"
    served: str = "-"

    def line(self) -> str:
        return f"| {' | '.join(cell.replace('|', '/') for cell in self)} |"


def main() -> None:
    names = [*FAMILIES, *OTHERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="FAMILY", help=", ".join(names))
    parser.add_argument("--output", type=Path, help="write the page there, too")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    rows: list[Row] = []
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(tried(name, Path(folder)))
        print(rows[-1].line(), flush=True)
    if options.output:
        options.output.write_text(HEADING.format(version=transformers.__version__) + page(rows))
    sys.exit(1 if any(BROKEN in row for row in rows) else 0)


def page(rows: Sequence[Row]) -> str:
    return "".join(f"{row.line()}\n" for row in rows)


def tried(name: str, folder: Path) -> Row:
    """Train, evaluate, save and serve a family. Tracebacks are printed and are a cell of the row."""
    try:
        with warnings.catch_warnings(action="ignore"):
            model = checkpoint(name, folder / "model")
            code, told = trained(model, folder)
            if code:
                return Row(name, steps=f"refused: {one_line(told, model)}" if code == 2 else BROKEN)
            return outcome(name, folder / "run", told)
    except Exception:  # noqa: BLE001 - the others are tried all the same
        traceback.print_exc()
        return Row(name, steps=BROKEN)


def trained(model: Path, folder: Path) -> tuple[int, str]:
    """The exit status of a run, and all that it printed."""
    recipe, told = folder / "recipe.toml", io.StringIO()
    recipe.write_text(RECIPE.format(model=model, tests=ROOT / "tests"))
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            cli.main(["train", str(recipe), "--run", str(folder / "run")])
        except SystemExit as ended:
            return int(ended.code or 0), told.getvalue()
    return 0, told.getvalue()


def one_line(told: str, model: Path) -> str:
    """The line of a refusal."""
    [line] = [line for line in told.splitlines() if line.startswith("pellucid: ")]
    return line.removeprefix("pellucid: ").replace(f"{str(model)!r}", "...")


def outcome(name: str, run: Path, told: str) -> Row:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = (run / "evals.jsonl").read_text().splitlines()
    learnt = len(steps) == 3 and len(evaluations) == 2 and all(step["grad_norm"] > 0 for step in steps)
    frozen = policy.load_frozen_policy(str(run / "model"), torch.device("cpu"), torch.float32, 1.0)
    reason = frozen.find_fallback_reason()
    note = next((line.removeprefix("! sampler.name: ") for line in told.splitlines() if "! sampler.name" in line), "")
    return Row(
        name,
        f"transformers ({reason})" if reason else "our decoder",
        note or "native",
        "trained" if learnt else "**no gradient**",
        f"{max(step['sampler/gap_max'] for step in steps):.0e}",
        served(frozen),
    )


def served(frozen: Policy) -> str:
    """Whether the engine of the service answers; else the reason why it does not start."""
    if fault := find_decode_fault(frozen):
        return f"refused: {fault}"
    engine, pieces = ServingEngine(frozen, max_rows=4), list[CompletionChunk]()

    def tell(news: CompletionChunk | Exception | None) -> None:
        if isinstance(news, CompletionChunk):
            pieces.append(news)
        else:
            engine.close()

    for prompt in ((1, 2, 3, 4, 5), (6, 7)):
        engine.submit(GenerationRequest(prompt, tell, n=2, max_tokens=4, seed=0))
    engine.run()
    return "yes" if len({piece.row_index for piece in pieces}) == 2 else BROKEN


if __name__ == "__main__":
    main()

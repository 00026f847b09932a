"""Measure the resident memory of a run at 10%, 50% and 100% of its steps. The exit status is 1 if it has grown.

    python tests/crash/memory.py --steps 500 --within 0.03
    python tests/crash/memory.py recipes/arithmetic_hard.toml --steps 60 --within 0.05 [--section.key VALUE ...]

Without a recipe, the run trains the tiny model of the tests. The memory at each point is the median over the fiftieth
of the run before it, because steps differ in their shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

from kill import Configuration, prepared

SHARES = (0.1, 0.5, 1.0)


def resident_gb(pid: int) -> float:
    """Return the second field of /proc/PID/statm, which counts pages, in GB. It is 0 if the process has ended."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e9


def watched(command: Sequence[str], run_dir: Path, log: Path) -> dict[int, float]:
    """Return step -> resident memory in GB when its line appeared. Raise SystemExit if the run fails."""
    seen: dict[int, float] = {}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    while process.poll() is None:
        if (step := last_step(run_dir / "metrics.jsonl")) not in seen:
            seen[step] = resident_gb(process.pid)
        time.sleep(0.01)
    if process.returncode:
        sys.exit(log.read_text()[-2000:])
    return {step: gb for step, gb in seen.items() if step and gb}


def last_step(path: Path) -> int:
    """Return the step of the last complete line, or 0 if there is none."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**16))
        whole = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b"{")]
    return json.loads(whole[-1])["step"] if whole else 0


def at_share(seen: Mapping[int, float], share: float) -> float:
    last = max(seen)
    end = max(1, round(share * last))
    return median(gb for step, gb in seen.items() if end - max(1, last // 50) < step <= end)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--within", type=float, default=0.03, help="growth from a tenth of the way to the end")
    options, overrides = parser.parse_known_args()
    folder = Path(mkdtemp(prefix="memory-"))
    recipe = options.recipe or prepared(folder / "tiny", Configuration()) / "recipe.toml"
    run_dir = folder / "run"
    command = [sys.executable, "-m", "pellucid", "train", str(recipe), "--run", str(run_dir), *overrides]
    seen = watched([*command, "--algorithm.steps", str(options.steps)], run_dir, folder / "log")
    values = [at_share(seen, share) for share in SHARES]
    growth = values[-1] / values[0] - 1
    print(*(f"{share:.0%} {gb:.3f} GB" for share, gb in zip(SHARES, values, strict=True)), sep=", ")
    print(f"{len(seen)} of {options.steps} steps seen; {growth:+.1%} from a tenth of the way to the end")
    shutil.rmtree(folder)
    return int(growth > options.within)


if __name__ == "__main__":
    sys.exit(main())

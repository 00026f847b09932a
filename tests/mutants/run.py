"""Puts one-line mistakes into copies of the package, one at a time, and reports whether the tests notice them.

A mistake (a mutant) is an entry of a TOML file beside this one: `file` of the package, `old` text that stands there
once, `new` text, what it `breaks`, and the `tests` that guard it, where those are others than the file's `guards`. One
that cannot change any number says why in `equivalent`; it is run all the same, and must survive.

The work tree is never touched. torch is imported once: each mutant is a fork that finds its own copy of the package
first on its path. A mutant that hangs or crashes is noticed; one that cannot be compiled is a mistake in the list.

    make mutants ARGS='--jobs 2 --only kl.py'
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from multiprocessing import connection, get_context
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENOUGH = 0.95
"""The least share of mutants, equivalent ones not counted, that must be noticed."""
SHARED = (
    "pytest",
    "torch",
    "torch._dynamo",
    "accelerate",
    "transformers.generation",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gemma3", "gpt2", "llama", "qwen2", "qwen3")),
    "pydantic",
    "rich.live",
    "tyro",
)
"""What takes long to import and starts no thread."""


class Mutant(NamedTuple):
    file: str
    """In src/pellucid."""
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    """As pytest takes them, in tests/; the likeliest to notice first."""
    equivalent: str = ""

    @property
    def line(self) -> str:
        return f"{self.file}: {self.breaks}"


class Run(NamedTuple):
    """Tests of a copy of the package that have ended, or were ended."""

    status: int | None
    """pytest's; negative for a signal, None for a run beyond its limit."""
    seconds: float
    output: str


def mutants() -> Iterator[Mutant]:
    for path in sorted(HERE.glob("*.toml")):
        listed = tomllib.loads(path.read_text())
        for entry in listed["mutant"]:
            tests = entry.pop("tests", None) or listed["guards"][entry["file"]]
            yield Mutant(**entry, tests=tuple(tests))


def fault(mutant: Mutant) -> str:
    """Why it cannot be put in; empty where it can."""
    text = (ROOT / "src/pellucid" / mutant.file).read_text()
    if (found := text.count(mutant.old)) != 1:
        return f"`{mutant.old}` stands {found} times in {mutant.file}"
    try:
        compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    except SyntaxError as error:
        return f"{mutant.file}: {error}"
    return ""


def tested(copy: Path, tests: Iterable[str], mutant: Mutant | None) -> None:
    """Runs the tests on a copy of the package with a mistake in it, in this process; exits as pytest does."""
    os.setsid()  # so that what the tests start can be ended with them
    shutil.copytree(ROOT / "src/pellucid", copy / "pellucid", ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None:
        path = copy / "pellucid" / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), str(ROOT / "tests")])
    os.chdir(ROOT)
    with (copy / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    status = import_module("pytest").main([*options, *(f"tests/{test}" for test in tests)])
    assert Path(import_module("pellucid").__file__ or "").is_relative_to(copy), "another copy of the package was tested"
    sys.exit(int(status))


Job = tuple[tuple[str, ...], Mutant | None, float]
"""Tests, the mistake, seconds that they may take."""


def in_forks(jobs: list[Job], at_once: int, report: Callable[[Job, Run], None]) -> None:
    forks = get_context("fork")
    waiting, running = jobs[::-1], {}
    with tempfile.TemporaryDirectory() as scratch:
        while waiting or running:
            while waiting and len(running) < at_once:
                job, copy = waiting.pop(), Path(scratch) / str(len(waiting))
                copy.mkdir()
                process = forks.Process(target=tested, args=(copy, *job[:2]))
                process.start()
                running[process] = job, copy, 0.0
            before = time.monotonic()
            connection.wait([process.sentinel for process in running], timeout=1.0)
            passed = min(time.monotonic() - before, 2.0)  # a machine that slept has not been hanging
            for process, (job, copy, seconds) in list(running.items()):
                running[process] = job, copy, seconds + passed
                if late := process.is_alive() and seconds > job[2]:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.join()
                if not process.is_alive():
                    output = (copy / "output").read_text() if (copy / "output").exists() else ""
                    report(job, Run(None if late else process.exitcode, seconds + passed, output))
                    shutil.rmtree(copy)
                    del running[process]


def baseline(listed: list[Mutant], at_once: int) -> dict[str, float]:
    """Seconds of each test that is named, which must pass on the package as it is."""
    seconds: dict[str, float] = {}

    def report(job: Job, run: Run) -> None:
        [test] = job[0]
        seconds[test] = run.seconds
        print(f"{run.seconds:6.1f} s  {test}", flush=True)
        if run.status != 0:
            sys.exit(f"{run.output}\n{test} does not pass on the package as it is")

    tests = sorted({test for mutant in listed for test in mutant.tests})
    in_forks([((test,), None, 1800.0) for test in tests], at_once, report)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once")
    parser.add_argument("--only", nargs="+", default=[""], help="those with one of these texts in their line")
    arguments = parser.parse_args()
    listed = [mutant for mutant in mutants() if any(text in mutant.line for text in arguments.only)]
    faults = [reason for mutant in listed if (reason := fault(mutant))]
    listed = [mutant for mutant in listed if not fault(mutant)]
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    for name in SHARED:
        import_module(name)
    seconds = baseline(listed, arguments.jobs)
    noticed: dict[Mutant, bool] = {}

    def report(job: Job, run: Run) -> None:
        _, mutant, _ = job
        assert mutant is not None
        if run.status not in (0, 1, 2, None) and run.status > 0:
            sys.exit(f"{run.output}\n{mutant.line}: pytest ended with {run.status}")
        noticed[mutant] = run.status != 0
        how = "noticed" if run.status else "hangs" if run.status is None else "UNNOTICED"
        how = {"UNNOTICED": "equivalent", "noticed": "NOT EQUIVALENT"}.get(how, how) if mutant.equivalent else how
        by = next((line.split()[1] for line in run.output.splitlines() if line.startswith(("FAILED", "ERROR "))), "")
        print(f"{run.seconds:6.1f} s  {how:14}  {mutant.line}  {by}", flush=True)

    limits = (60.0 + 5.0 * sum(seconds[test] for test in mutant.tests) for mutant in listed)
    in_forks([(m.tests, m, limit) for m, limit in zip(listed, limits, strict=True)], arguments.jobs, report)
    sys.exit(summary(noticed, faults))


def summary(noticed: dict[Mutant, bool], faults: list[str]) -> int:
    """Prints the table; the exit status."""
    print(f"\n{'file':28} mutants  noticed  equivalent")
    for file in sorted({mutant.file for mutant in noticed}):
        own = [mutant for mutant in noticed if mutant.file == file]
        real = [mutant for mutant in own if not mutant.equivalent]
        print(f"{file:28} {len(own):7}  {sum(noticed[m] for m in real):7}  {len(own) - len(real):10}")
    real = [mutant for mutant in noticed if not mutant.equivalent]
    share = sum(noticed[mutant] for mutant in real) / max(1, len(real))
    print(f"{len(noticed)} mutants, {len(real)} of them not equivalent, {share:.1%} of those noticed")
    wrong = [mutant for mutant in noticed if mutant.equivalent and noticed[mutant]]
    for line in [*faults, *(f"not equivalent after all: {m.line}" for m in wrong)]:
        print(line)
    return int(share < ENOUGH or bool(faults) or bool(wrong))


if __name__ == "__main__":
    main()

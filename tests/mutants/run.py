"""Put one-line mistakes into copies of the package, one at a time, and report whether the tests notice them.

A mistake (a mutant) is an entry of a TOML file in this folder: the `function` ("algorithm/kl.py::k3", or only a file
for code outside functions), an expression `old` that appears there once, regardless of line breaks, its replacement
`new`, the behavior it `breaks`, and the `tests` that guard it if they are not the file's `guards`. A mutant that
cannot change any number explains this in `equivalent`; it is run anyway, and must survive.

The work tree is never changed. torch is imported once: each mutant is a fork with its own copy of the package first on
its path. A mutant that hangs or crashes is noticed; one that cannot be compiled is an error in the list.

    make mutants ARGS='--jobs 4 --only kl.py'
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from importlib import import_module
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENOUGH = 0.95
"""The minimum share of mutants that must be noticed, not counting equivalent ones."""
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
"""Modules that take long to import and start no threads."""


PYTEST = 100
"""Added to pytest's exit status to tell it from others: 0 all passed, 1 one failed, 2 an import failed."""


class Mutant(NamedTuple):
    function: str
    """File in src/pellucid, followed after `::` by the dotted name of a function or class in it."""
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    """Arguments for pytest, relative to tests/, starting with the likeliest to notice the mutant."""
    equivalent: str = ""

    @property
    def file(self) -> str:
        return self.function.partition("::")[0]

    @property
    def line(self) -> str:
        return f"{self.file}: {self.breaks}"


class Run(NamedTuple):
    """A test run on a copy of the package that has ended or was killed."""

    status: int | None
    """pytest's status plus PYTEST; negative for a signal, None for a run beyond its limit."""
    seconds: float
    output: str


def mutants() -> Iterator[Mutant]:
    for path in sorted(HERE.glob("*.toml")):
        listed = tomllib.loads(path.read_text())
        for entry in listed["mutant"]:
            file = entry["function"].partition("::")[0]
            tests = entry.pop("tests", None) or listed["guards"][file]
            yield Mutant(**entry, tests=tuple(tests))


def mutated(mutant: Mutant) -> str:
    """Return the file's source with the mistake. ValueError if the expression is not in the function exactly once."""
    text = (ROOT / "src/pellucid" / mutant.file).read_text()
    begin, end = span_of(ast.parse(text), text, mutant.function.partition("::")[2])
    expression = re.compile(r"\s+".join(map(re.escape, mutant.old.split())))
    found = list(expression.finditer(text, begin, end))
    if len(found) != 1:
        raise ValueError(f"`{mutant.old}` is {len(found)} times in {mutant.function}")
    return text[: found[0].start()] + mutant.new + text[found[0].end() :]


def span_of(tree: ast.Module, text: str, name: str) -> tuple[int, int]:
    """Return start and end of a function or class by its dotted name, or of the whole file if the name is empty."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    node: Any = tree
    for part in filter(None, name.split(".")):
        named = [each for each in ast.walk(node) if isinstance(each, kinds) and each.name == part and each is not node]
        if not named:
            raise ValueError(f"there is no {name}")
        node = named[-1]  # the last one comes after its overloads
    if node is tree:
        return 0, len(text)
    lines = text.splitlines(keepends=True)
    first = min(each.lineno for each in (node, *node.decorator_list)) - 1
    return sum(map(len, lines[:first])), sum(map(len, lines[: node.end_lineno]))


def fault(mutant: Mutant) -> str:
    """Return why the mutant cannot be inserted, or "" if it can."""
    try:
        compile(mutated(mutant), mutant.file, "exec")
    except (ValueError, SyntaxError, OSError) as error:
        return f"{mutant.file}: {error}"
    return ""


def tested(copy: Path, tests: Iterable[str], mutant: Mutant | None) -> None:
    """Run the tests in this process on a copy of the package with the mutant, and exit with the status of pytest."""
    os.setsid()  # processes that the tests start are killed with this one
    shutil.copytree(ROOT / "src/pellucid", copy / "pellucid", ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None:
        (copy / "pellucid" / mutant.file).write_text(mutated(mutant))
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), str(ROOT / "tests")])
    os.chdir(ROOT)
    output = os.open(copy / "output", os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    options = ["-xq", "-m", "", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # for modules imported before the fork
    status = import_module("pytest").main([*options, *(f"tests/{test}" for test in tests)])
    assert Path(import_module("pellucid").__file__ or "").is_relative_to(copy), "another copy of the package was tested"
    sys.exit(PYTEST + int(status))


class Job(NamedTuple):
    tests: tuple[str, ...]
    mutant: Mutant | None
    limit_seconds: float


def in_forks(jobs: list[Job], at_once: int) -> Iterator[tuple[Job, Run]]:
    forks = get_context("fork")
    waiting, running = jobs[::-1], {}
    with tempfile.TemporaryDirectory() as scratch:
        while waiting or running:
            while waiting and len(running) < at_once:
                job, copy = waiting.pop(), Path(scratch) / str(len(waiting))
                copy.mkdir()
                (copy / "output").touch()
                process = forks.Process(target=tested, args=(copy, job.tests, job.mutant))
                process.start()
                running[process] = job, copy, 0.0
            before = time.monotonic()
            connection.wait([process.sentinel for process in running], timeout=1.0)
            passed = min(time.monotonic() - before, 2.0)  # a machine that was suspended has not been hanging
            for process, (job, copy, seconds) in list(running.items()):
                running[process] = job, copy, seconds + passed
                if late := process.is_alive() and seconds > job.limit_seconds:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.join()
                if not process.is_alive():
                    del running[process]
                    yield job, Run(None if late else process.exitcode, seconds + passed, (copy / "output").read_text())
                    shutil.rmtree(copy)


def baseline(listed: list[Mutant], at_once: int) -> dict[str, float]:
    """Return the seconds of each named test, all of which must pass on the unchanged package."""
    seconds: dict[str, float] = {}
    tests = sorted({test for mutant in listed for test in mutant.tests})
    for job, run in in_forks([Job((test,), None, 1800.0) for test in tests], at_once):
        seconds[job.tests[0]] = run.seconds
        print(f"{run.seconds:6.1f} s  {job.tests[0]}", flush=True)
        if run.status != PYTEST:
            sys.exit(f"{run.output}\n{job.tests[0]} does not pass on the package as it is")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at once")
    parser.add_argument("--check", action="store_true", help="only say which mutants cannot be put in")
    parser.add_argument("--only", nargs="+", default=[""], help="those with one of these texts in their line")
    arguments = parser.parse_args()
    listed = [mutant for mutant in mutants() if any(text in mutant.line for text in arguments.only)]
    faults = {mutant: reason for mutant in listed if (reason := fault(mutant))}
    if arguments.check:
        sys.exit("\n".join(faults.values()) or 0)
    listed = [mutant for mutant in listed if mutant not in faults]
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    for name in SHARED:
        import_module(name)
    seconds = baseline(listed, arguments.jobs)
    jobs = [Job(m.tests, m, 60.0 + 5.0 * sum(seconds[test] for test in m.tests)) for m in listed]
    noticed: dict[Mutant, bool] = {}
    for (_, mutant, _), run in in_forks(jobs, arguments.jobs):
        assert mutant is not None
        if run.status is not None and run.status >= 0 and run.status - PYTEST not in (0, 1, 2):
            sys.exit(f"{run.output}\n{mutant.line}: these tests could not be run")
        noticed[mutant] = run.status != PYTEST
        how = "hangs" if run.status is None else "noticed" if noticed[mutant] else "UNNOTICED"
        how = how if not mutant.equivalent else "NOT EQUIVALENT" if noticed[mutant] else "equivalent"
        by = next((line.split()[1] for line in run.output.splitlines() if line.startswith(("FAILED", "ERROR "))), "")
        print(f"{run.seconds:6.1f} s  {how:14}  {mutant.line}  {by}", flush=True)
    sys.exit(summary(noticed, list(faults.values())))


def summary(noticed: dict[Mutant, bool], faults: list[str]) -> int:
    """Print the table and return the exit status."""
    print(f"\n{'file':28} mutants  equivalent  noticed")
    for file in [*sorted({mutant.file for mutant in noticed}), "all"]:
        own = [mutant for mutant in noticed if file in (mutant.file, "all")]
        real = [noticed[mutant] for mutant in own if not mutant.equivalent]
        print(f"{file:28} {len(own):7}  {len(own) - len(real):10}  {sum(real):7}")
    share = sum(real) / max(1, len(real))
    wrong = [f"not equivalent: {mutant.line}" for mutant in noticed if mutant.equivalent and noticed[mutant]]
    print(f"{share:.1%} of those that are not equivalent were noticed", *faults, *wrong, sep="\n")
    return int(share < ENOUGH or bool(faults or wrong))


if __name__ == "__main__":
    main()

"""The commands, as USAGE lists them. Exit status: 0 when done, 2 for what the user must mend, 130 after Ctrl-C."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pellucid import config
from pellucid.machine.harmless import harmless
from pellucid.machine.imports import uncollected
from pellucid.machine.interrupts import INTERRUPTED, end_at_once, handled, interrupt
from pellucid.prefixes import command as prefixes_command
from pellucid.reporting import run_folder
from pellucid.serve import command as serve_command
from pellucid.study import page, plan, runner
from pellucid.training import changes, claim
from pellucid.types import StrandedError, UserError

USAGE = """usage: pellucid COMMAND

  train [RECIPE.toml] [--section.key VALUE ...] [--run DIR]   teach a model with a reward function
        --profile                                             also write where the third step's time and memory go
  train --resume RUN [--section.key VALUE ...]                go on from the last whole checkpoint
  eval MODEL_OR_RUN [--task RECIPE.toml] [--section.key VALUE ...]   held-out accuracy, with intervals
        --show N                                              questions, answers and verdicts printed (3)
        --output FILE.jsonl                                   all of them, with their rewards, a line an answer
  prefixes RECIPE.toml --output FILE.json [...]               first sentences of thinking, of a teacher or a student
  study STUDY.toml [--into DIR] [--jobs 1]                    train the variants of a recipe, each with every seed
        --only VARIANT ...  --keep-models                     some of them; leave the models in the run folders
  compare RUN ... | STUDY_DIR [--baseline VARIANT]            paired differences, curves and costs of their runs
        --output PAGE.html                                    and of the numbers, PAGE.json (compare.html)
  serve MODEL_OR_RUN [--port 8000] [...]                      answer over HTTP as OpenAI's API does
  serve start MODEL_OR_RUN | stop | status | restart          the same in the background
  doctor                                                      what this machine has and does
  doctor --plan RECIPE.toml [--section.key VALUE ...]         how much memory it takes on 1, 2, 4 and 8 devices

`pellucid train --help` lists every setting."""

ANOTHER_PATH = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EPERM)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EIO)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {
        "train": train,
        "eval": evaluate,
        "prefixes": prefixes,
        "study": study,
        "compare": compare,
        "serve": serve,
        "doctor": doctor,
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if arguments else 2)
    if arguments[0] not in commands:
        sys.exit(mend(f"no such command: {arguments[0]}; there are {', '.join(commands)}"))
    try:
        with handled(interrupt):
            sys.exit(commands[arguments[0]](arguments[1:]))
    except UserError as error:
        sys.exit(mend(str(error)))
    except StrandedError as error:
        mend(str(error))
        sys.exit(1)
    except OSError as error:
        place = error.filename or "the run folder"
        if error.errno in ANOTHER_PATH:
            sys.exit(mend(f"{place}: {error.strerror}: choose another path"))
        if error.errno in NO_ROOM:
            sys.exit(mend(f"{place}: {error.strerror}; what was saved before is whole"))
        raise
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def mend(message: str) -> int:
    print(f"pellucid: {harmless(message)}", file=sys.stderr)
    return 2


def train(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pellucid train", add_help=False, allow_abbrev=False)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--profile", action="store_true")
    options, overrides = parser.parse_known_args(arguments)
    recipe = first_file(overrides)
    if options.resume and (recipe or options.run):
        raise UserError("--resume RUN goes on with the settings of that run: leave out the recipe and --run")
    name = f"{recipe.stem if recipe else 'default'}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = options.resume or options.run or Path("runs") / name
    if claim.first_process():
        (claim.check_resumable if options.resume else claim.check_new)(run_dir)
    cfg = config.load(run_dir / "config.json" if options.resume else recipe, overrides)
    resumed = changes.of_resume(run_dir, cfg) if options.resume else None
    if not options.resume and claim.first_process():
        claim.check_begun(run_dir, cfg)
    quiet_libraries()
    with handled(end_at_once), uncollected():
        from pellucid.training import run  # noqa: PLC0415 - torch takes seconds to import: settings are checked before

    try:
        return run.train(cfg, run_dir, resumed, options.profile)
    except KeyboardInterrupt:
        begun = (run_dir / "config.json").is_file()
        how = f"go on with: pellucid train --resume {run_dir}" if begun else "the same command starts again"
        print(f"pellucid: stopped at once; nothing that was saved is lost, {how}", file=sys.stderr)
        return INTERRUPTED


def evaluate(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pellucid eval", add_help=False, allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--task", type=Path)
    parser.add_argument("--show", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options, overrides = parser.parse_known_args(arguments)
    if options.output:
        check_output(options.output)
    run_dir = run_folder.run_of(options.model)
    cfg = config.load(options.task or (run_dir and run_dir / "config.json"), overrides, prog="pellucid eval")
    model = str(run_folder.model_of(run_dir)) if run_dir else options.model
    quiet_libraries()
    with handled(end_at_once), uncollected():
        from pellucid.training import exam  # noqa: PLC0415 - as in train

    return exam.examine(cfg, model, options.show, options.output)


def check_output(path: Path) -> None:
    """Raise UserError where the answers of an evaluation cannot be written, before they are waited for."""
    if path.suffix != ".jsonl":
        raise UserError(f"--output {path} must end in .jsonl: it gets a line of JSON for each answer")
    if path.exists():
        raise UserError(f"--output {path} is there already: name another file, or remove it")
    claim.check_writable(path.parent)


def prefixes(arguments: list[str]) -> int:
    quiet_libraries()
    return prefixes_command.main(arguments)


def study(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pellucid study", allow_abbrev=False)
    parser.add_argument("study", type=Path)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], metavar="VARIANT")
    parser.add_argument("--keep-models", action="store_true")
    options = parser.parse_args(arguments)
    study_dir = options.into or Path("runs") / options.study.stem
    return runner.run(plan.read(options.study), study_dir, options.jobs, options.only, options.keep_models)


def compare(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pellucid compare", allow_abbrev=False)
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN_OR_STUDY")
    parser.add_argument("--baseline", default="", metavar="VARIANT")
    parser.add_argument("--output", type=Path, default=Path("compare.html"))
    options = parser.parse_args(arguments)
    return page.compare(options.folders, options.baseline, options.output)


def serve(arguments: list[str]) -> int:
    quiet_libraries()
    return serve_command.main(arguments)


def doctor(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pellucid doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("--plan", type=Path)
    options, overrides = parser.parse_known_args(arguments)
    if overrides and not options.plan:
        raise UserError(f"doctor takes --plan RECIPE.toml, got {' '.join(overrides)}")
    cfg = config.load(options.plan, overrides, prog="pellucid doctor --plan RECIPE.toml") if options.plan else None
    quiet_libraries()
    with uncollected():
        from pellucid.doctor import command as doctor  # noqa: PLC0415 - as in train

    return doctor.plan(cfg) if cfg else doctor.report()


def first_file(arguments: list[str]) -> Path | None:
    """Remove and return the recipe that the arguments begin with; None where they begin with an option."""
    return Path(arguments.pop(0)) if arguments and not arguments[0].startswith("-") else None


def quiet_libraries() -> None:
    """Silence the progress bars and advice of libraries, which would mix with our output; their errors stay."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or a lost process is told with stacks of C++

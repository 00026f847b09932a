"""`pellucid train`, `pellucid eval` and `pellucid export`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, Suppress, arg

from pellucid import config, flags, recipes
from pellucid.config import Config
from pellucid.machine.harmless import harmless
from pellucid.machine.imports import uncollected
from pellucid.machine.interrupts import INTERRUPTED, end_at_once, handled
from pellucid.policy.access import Access
from pellucid.reporting import run_folder
from pellucid.training import changes, claim
from pellucid.types import UserError

Recipe = Annotated[str, arg(metavar="RECIPE")]
Folder = Annotated[Path | None, arg(metavar="DIR")]
Run = Annotated[Path | None, arg(metavar="RUN")]
ACCESS = ("revision", "trust_remote_code")
"""The keys of `[policy]` that say how the files of a model may be read."""


@dataclass(frozen=True)
class Train:
    """Teach a model with a reward function."""

    recipe: Positional[Recipe] = ""
    """A recipe.toml, or the name of one that comes with Pellucid; none is the defaults."""
    run: Folder = None
    """The run folder; none is runs/RECIPE-TIME."""
    resume: Run = None
    """A run to go on with, from its last whole checkpoint."""
    profile: bool = False
    """Also write where the time and the memory of the third step go."""
    dry_run: bool = False
    """Only say what the run would be: all settings, the numbers that follow, and a prompt as the model reads it."""
    settings: Suppress[tuple[str, ...]] = ()

    def __call__(self) -> int:
        if self.resume:
            recipes.refuse_recipe(str(self.resume), "pellucid train {} begins a run of it; --resume takes a run folder")
        if self.resume and (self.recipe or self.run):
            raise UserError("--resume RUN goes on with the settings of that run: leave out the recipe and --run")
        recipe = recipes.find(self.recipe) if self.recipe else None
        name = f"{recipe.stem if recipe else 'default'}-{time.strftime('%Y%m%d-%H%M%S')}"
        run_dir = self.resume or self.run or Path("runs") / name
        if claim.first_process():
            (claim.check_resumable if self.resume else claim.check_new)(run_dir)
        source = run_dir / "config.json" if self.resume else recipe
        if source:
            look_at(source, self.settings, self.dry_run)
        cfg = config.load(source, self.settings)
        resumed = changes.of_resume(run_dir, cfg) if self.resume else None
        if not self.resume and claim.first_process():
            claim.check_begun(run_dir, cfg)
        if resumed is not None and (note := claim.note_on_finished(run_dir, resumed, cfg.algorithm.steps)):
            print(note)
            return 0
        if self.dry_run:
            return rehearsed(cfg, run_dir)
        with handled(end_at_once), uncollected():
            from pellucid.training import run  # noqa: PLC0415 - torch takes seconds: settings are checked before

        try:
            return run.train(cfg, run_dir, resumed, self.profile)
        except KeyboardInterrupt:
            begun = (run_dir / "config.json").is_file()
            how = f"go on with: pellucid train --resume {run_dir}" if begun else "the same command starts again"
            print(harmless(f"pellucid: stopped at once; nothing that was saved is lost, {how}"), file=sys.stderr)
            return INTERRUPTED


def look_at(source: Path, settings: Sequence[str], print_code: bool = False) -> None:
    """Look at what a file asks for by itself, before any code that it names runs.

    UserError if it would send an environment variable that is not named for keys. says_code: print the code it names.
    """
    values = config.read(source)
    config.refuse_other_variables(values, settings, source)
    if print_code and (code := config.code_in(values)):
        print(f"! {harmless(str(source))} runs code as you: {harmless(', '.join(code))}", flush=True)


def rehearsed(cfg: Config, run_dir: Path) -> int:
    with uncollected():
        from pellucid.commands import rehearsal  # noqa: PLC0415 - as in Train

    return rehearsal.show(cfg, run_dir)


@dataclass(frozen=True)
class Eval:
    """Ask a model held-out questions: accuracy or mean reward, with intervals."""

    model: Positional[Annotated[str, arg(metavar="MODEL_OR_RUN")]]
    """A run folder, or what --policy.model takes."""
    task: Recipe = ""
    """The recipe whose task is asked; none is that of the run."""
    show: int = 3
    """How many questions are shown, with answers and verdicts."""
    output: Annotated[Path | None, arg(metavar="FILE.jsonl")] = None
    """A new file that gets every answer with its reward, a line each."""
    settings: Suppress[tuple[str, ...]] = ()

    def __call__(self) -> int:
        if self.show < 0:
            raise UserError(f"--show {self.show} must not be negative")
        if self.output:
            check_output(self.output)
        recipes.refuse_recipe(self.model, "pellucid eval MODEL_OR_RUN --task {} asks a model its questions")
        run_dir = run_folder.run_of(self.model)
        recipe = recipes.find(self.task) if self.task else None
        source = recipe or (run_dir and run_dir / "config.json")
        if source:
            look_at(source, self.settings)
        cfg = config.load(source, self.settings)
        model = str(run_folder.model_of(run_dir)) if run_dir else self.model
        if run_dir and run_folder.has_merged_adapter(run_dir):
            if "dtype" not in flags.sections(self.settings).get("policy", {}):
                cfg = replace(cfg, policy=replace(cfg.policy, dtype="float32"))
            run_folder.warn_of_rounding(cfg.policy.dtype)
        with handled(end_at_once), uncollected():
            from pellucid.training import exam  # noqa: PLC0415 - as in Train

        status = exam.examine(cfg, model, self.resolve_access(cfg, run_dir), self.show, self.output)
        if not recipe and not run_dir and not any(word.startswith("--task.") for word in self.settings):
            print(harmless(f"asked the default task, {cfg.task_name}: name another with --task RECIPE"))
        return status

    def resolve_access(self, cfg: Config, run_dir: Path | None) -> Access:
        """How the model may be read: as its run or a recipe of this very model says; else as the command line does."""
        if self.model == cfg.policy.model or (run_dir and not self.task):
            return cfg.policy.access
        stated = flags.sections(self.settings).get("policy", {})
        stated = {key: words for key, words in stated.items() if key.removeprefix("no_") in ACCESS}
        recorded = {"trust_remote_code": run_dir is not None and run_folder.trusts_code(run_dir)}
        return config.build({"policy": recorded}, str(run_dir), {"policy": stated}).policy.access


@dataclass(frozen=True)
class Export:
    """Save the model of a run's last checkpoint, as of a run that was stopped or that its data ended."""

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """The run folder."""
    output: Annotated[Path | None, arg(metavar="DIR")] = None
    """The new folder of the model; none is RUN/exported."""

    def __call__(self) -> int:
        from pellucid.commands import export  # noqa: PLC0415 - torch takes seconds

        return export.export(self.run, self.output or self.run / "exported")


def check_output(path: Path) -> None:
    """Raise UserError where the answers of an evaluation cannot be written, before they are waited for."""
    if path.suffix != ".jsonl":
        raise UserError(f"--output {path} must end in .jsonl: it gets a line of JSON for each answer")
    if path.exists():
        raise UserError(f"--output {path} is there already: name another file, or remove it")
    claim.check_writable(path.parent)

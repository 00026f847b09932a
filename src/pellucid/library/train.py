"""`pellucid.train`: keywords in, a Run out. Whatever is wrong with them is told here, before anything is loaded."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pellucid import config, recipes
from pellucid.config import Config
from pellucid.library import data as of_data
from pellucid.library.data import Lines
from pellucid.library.objects import Objects, Terms, axes_named, section_of, terms_of
from pellucid.library.run import Run, told_in_python
from pellucid.library.settings import sections_of
from pellucid.machine import disk, nearby, plugins
from pellucid.machine.plugins import given
from pellucid.reporting.run_folder import records
from pellucid.tasks import task_class
from pellucid.tasks.dataset import Dataset
from pellucid.tasks.wrappers import innermost, wraps
from pellucid.training import changes, claim
from pellucid.types import UserError

Settings = Mapping[str, Any]
SOURCE = "pellucid.train"
NUMBERS = itertools.count(1)
"""Runs of this process whose folders are named by the second in which they were asked for."""


def train(
    *,
    model: str | Path | None = None,
    data: Any = None,
    reward: Terms | None = None,
    task: Any = None,
    recipe: str | Path | None = None,
    run: str | Path | None = None,
    resume: str | Path | None = None,
    **settings: Any,
) -> Run:
    """Return a run, which takes its steps as it is iterated over. Nothing is loaded, and no folder made, before that.

    model: a folder, a .gguf file, a Hub id, modelscope:OWNER/NAME, or "smollm2-135m".
    data: a list of dicts, a datasets.Dataset, a pandas DataFrame; a file, several, a pattern, or a Hub id.
    reward: a function as TRL has them, a term by its name, "file.py:function", one of these with its weight, as in
        (brevity, 0.2), a RewardTerm, or a list of them. None with data that has answers: their numbers are compared.
    task: one of one's own, as an object; or by its name, as a recipe has it.
    recipe: a .toml file, or the name of one that ships, whose settings hold where no keyword says otherwise.
    run: the folder of the run; None makes one under runs/. resume: that of a run to go on with.
    settings: every setting of a recipe by its name, or where several sections have that name by section_name:
        steps=30, evaluate_every=5. An advantage or an objective may be a function.

    UserError, one line that names the mend, for what is wrong. docs/library.md has all of it.

    Example: for step in pellucid.train(data=rows, reward=my_reward, steps=30): print(step.metrics["reward/mean"])
    """
    if disk.is_here_gone():
        raise UserError(disk.GONE)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError('a reward process imports this script: put `if __name__ == "__main__":` around pellucid.train')
    if resume and (recipe or run):
        raise UserError("resume= goes on with the settings of that run: leave out recipe= and run=")
    plugins.forget()
    file = recipes.find(str(recipe)) if recipe else None
    folder = Path(resume or run or new_folder(file)).expanduser()
    objects, lines = Objects(), None if data is None else of_data.in_memory(data)
    with told_in_python(folder), given(objects):
        if claim.first_process():
            (claim.check_resumable if resume else check_new)(folder)
        source = folder / "config.json" if resume else file
        nearby.remember(None)  # relative paths of a call lead from here, not from the folder of an earlier recipe
        values = config.read(source) if source else {}
        config.refuse_other_variables(values, (), source, "if you mean another, name it from Python: reward=[...]")
        section = task_section(values.get("task"), task, data, reward, lines, folder, objects)
        if model is not None:
            settings["policy_model"] = model_name(model)
        cfg = configured(values, section, settings, lines, objects)
        resumed = None
        if resume:
            refuse_other_rows(lines, folder)
            resumed = changes.of_resume(folder, cfg)
            if claim.first_process() and (note := claim.note_on_finished(folder, resumed, cfg.algorithm.steps)):
                print(note.replace("--algorithm.steps ", "steps="))
        elif claim.first_process():
            check_begun(folder, cfg, lines)
        if data is not None and lines is None and isinstance(asks := innermost(cfg.task), Dataset):
            of_data.check_named(asks)
    prepare = (
        (lambda: lines.write_file(folder / claim.DATA)) if lines and not (resume and same_rows(lines, folder)) else None
    )
    return Run(cfg, folder, resumed, objects, prepare)


def configured(
    values: Settings, section: Settings, settings: Settings, lines: Lines | None, objects: Objects
) -> Config:
    """Return the settings of a recipe with keywords over them. `section` is that of the task."""
    own = axes_named(sections_of(settings, task_class(section.get("name", Config.task_names[0]))), objects)
    section = {**section, **own.pop("task", {})}
    if lines:
        innermost_of(section).update(columns(lines, innermost_of(section)))
    asked = {**own, **({"task": section} if section else {})}
    cfg = config.build(sections_over(values, asked), SOURCE)
    if lines and isinstance(asks := innermost(cfg.task), Dataset):
        lines.check_prompts(asks)
    return cfg


def task_section(
    base: Any, task: Any, data: Any, reward: Any, lines: Lines | None, folder: Path, objects: Objects
) -> dict[str, Any]:
    """Return the section of the task that keywords ask for, over that of a recipe; empty where nobody says anything.

    Data and rewards are those of the innermost task, whatever a recipe has around it.
    """
    section: dict[str, Any] = copy.deepcopy(base or {})
    if task is not None:
        section = task_over(section, section_of(task, objects))
    if data is None and reward is None:
        return section
    asks = innermost_of(section)
    if asks.get("name") != "dataset":
        if task is not None or data is None:
            what = "data" if data is not None else "reward"
            raise UserError(f'{what}= is for the task "dataset", which data= brings: leave it out, or task=')
        asks.clear()
        asks["name"] = "dataset"
    if data is not None:
        asks["data"] = of_data.named(data) if lines is None else os.path.abspath(folder / claim.DATA)
    if reward is not None:
        asks["rewards"] = terms_of(reward, objects)
    return section


def innermost_of(section: dict[str, Any]) -> dict[str, Any]:
    """Return the section of the task that is wrapped in all others."""
    around = wraps(config.named_task(section, ["task"])[1])
    return innermost_of(section.setdefault("task", {})) if around else section


def task_over(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a task, of which a recipe may have said more."""
    if base.get("name") != overrides["name"]:
        return dict(overrides)
    inside = {"task": task_over(base["task"], overrides["task"])} if "task" in base and "task" in overrides else {}
    return {**base, **overrides, **inside}


def columns(lines: Lines, section: Settings) -> dict[str, Any]:
    """Return which columns of rows hold what. UserError where nothing says what is right."""
    found = of_data.columns_of(lines.first_row, section)
    if "rewards" not in section and not of_data.has_answers(lines.first_row, {**section, **found}):
        raise UserError(
            'nothing says what is right: give reward=, or rows with a column "answer"; answer="name" names another'
        )
    return found


def model_name(model: str | Path) -> str:
    if isinstance(model, str | Path):
        return str(model)
    kind = type(model).__name__
    raise UserError(f"model is a {kind}: give its folder or Hub id; model.save_pretrained(folder) makes one of it")


def sections_over(values: Mapping[str, Any], overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return sections with the keys of others over their own; the task is the other's as a whole."""
    joined = {name: keys if name == "task" else {**values.get(name, {}), **keys} for name, keys in overrides.items()}
    return {**values, **joined}


def refuse_other_rows(lines: Lines | None, folder: Path) -> None:
    """Raise UserError where a run that its data has not ended would go on with other rows than it began with."""
    if lines and not same_rows(lines, folder) and not changes.bad_data_file(folder).is_file():
        raise UserError(f"data is not what {folder} was trained with, its {claim.DATA}: leave data= out, or begin anew")


def same_rows(lines: Lines, folder: Path) -> bool:
    """Return whether a run folder holds these rows."""
    path = folder / claim.DATA
    return path.is_file() and disk.digest(path) == lines.digest


def check_new(folder: Path) -> None:
    """Raise UserError where no run can begin in the folder; a file of its own would take the place of another's."""
    claim.check_new(folder)
    if (folder / claim.DATA).exists() and not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds {claim.DATA}, which is no run's: choose another folder with run=")


def check_begun(folder: Path, cfg: Config, lines: Lines | None) -> None:
    """Raise UserError where a run with other settings, or other rows, has left steps in the folder."""
    claim.check_begun(folder, cfg)
    if lines and any(records(folder / "metrics.jsonl")):
        refuse_other_rows(lines, folder)


def new_folder(recipe: Path | None) -> Path:
    """Return a name of its own for each run, as the command gives them; of the first in a process, the very same."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("several processes share one folder: name it, run=")
    name = f"{recipe.stem if recipe else 'default'}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = next(NUMBERS)
    return Path("runs") / (name if number == 1 else f"{name}-{number}")

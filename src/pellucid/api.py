"""`pellucid.train`: keywords in, a Run out. Whatever is wrong with them is told here, before anything is loaded."""

from __future__ import annotations

import atexit
import copy
import ctypes
import dataclasses
import hashlib
import inspect
import itertools
import json
import math
import multiprocessing
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from sys import modules
from typing import TYPE_CHECKING, Any, Self

from pellucid import config
from pellucid.config import SECTIONS, Config
from pellucid.reporting import console, loggers
from pellucid.reporting.report import write_report
from pellucid.reporting.run_files import read_records
from pellucid.rewards.terms import RewardTerm
from pellucid.tasks import TASKS, dataset, load_task_class
from pellucid.tasks.data_files import has_column, load_rows
from pellucid.tasks.dataset import BadRow, Dataset, format_bad_rows, get_held_out_source, make_prompt
from pellucid.tasks.given import make_task_class
from pellucid.tasks.prefixed import load_prefixes
from pellucid.tasks.wrappers import get_innermost_task, is_local_class, is_task_wrapper
from pellucid.training import run_dir
from pellucid.training.run_dir import AXES, SettingChanges
from pellucid.trl_hints import explain_trl_name
from pellucid.types import Evaluation, UserError, has_batch_rewards
from pellucid.utils import files, plugins, text
from pellucid.utils.plugins import IN_PROCESS_PREFIX, did_you_mean, join_mistakes, provide_objects
from pellucid.utils.signals import StopRequests, defer_stop_signals, handle_stop_signals
from pellucid.utils.text import escape_controls

SettingsMapping = Mapping[str, Any]
SETTINGS_SOURCE = "pellucid.train"
RUN_NUMBERS = itertools.count(1)
"""Runs of this process whose folders are named by the second in which they were asked for."""


def train(
    *,
    model: str | Path | None = None,
    data: Any = None,
    reward: RewardLike | None = None,
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
    if files.is_working_directory_gone():
        raise UserError(files.WORKING_DIRECTORY_GONE)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError('a reward process imports this script: put `if __name__ == "__main__":` around pellucid.train')
    if resume and (recipe or run):
        raise UserError("resume= goes on with the settings of that run: leave out recipe= and run=")
    plugins.forget_edited_modules()
    file = config.find_recipe(str(recipe)) if recipe else None
    folder = Path(resume or run or make_run_path(file)).expanduser()
    objects, lines = ObjectRegistry(), None if data is None else make_in_memory_rows(data)
    with rewrite_command_line_hints(folder), provide_objects(objects):
        if run_dir.is_first_process():
            (run_dir.check_resumable_run_dir if resume else check_unused_folder)(folder)
        source = folder / "config.json" if resume else file
        text.set_recipe_folder(
            None
        )  # relative paths of a call lead from here, not from the folder of an earlier recipe
        values = config.read_settings(source) if source else {}
        config.check_key_variables(values, (), source, "if you mean another, name it from Python: reward=[...]")
        section = build_task_section(values.get("task"), task, data, reward, lines, folder, objects)
        if model is not None:
            settings["policy_model"] = format_model_argument(model)
        cfg = build_run_config(values, section, settings, lines, objects)
        resumed = None
        if resume:
            check_same_rows(lines, folder)
            resumed = run_dir.find_resume_changes(folder, cfg)
            if run_dir.is_first_process() and (
                note := run_dir.describe_finished_run(folder, resumed, cfg.algorithm.steps)
            ):
                print(note.replace("--algorithm.steps ", "steps="))
        elif run_dir.is_first_process():
            check_begun_folder(folder, cfg, lines)
        if data is not None and lines is None and isinstance(asks := get_innermost_task(cfg.task), Dataset):
            check_named_data(asks)
    prepare = (
        (lambda: lines.write_file(folder / run_dir.DATA_FILE))
        if lines and not (resume and has_same_rows(lines, folder))
        else None
    )
    return Run(cfg, folder, resumed, objects, prepare)


def build_run_config(
    values: SettingsMapping,
    section: SettingsMapping,
    settings: SettingsMapping,
    lines: InMemoryRows | None,
    objects: ObjectRegistry,
) -> Config:
    """Return the settings of a recipe with keywords over them. `section` is that of the task."""
    own = register_algorithm_functions(
        group_settings_by_section(settings, load_task_class(section.get("name", Config.task_names[0]))), objects
    )
    section = {**section, **own.pop("task", {})}
    if lines:
        get_innermost_section(section).update(find_column_settings(lines, get_innermost_section(section)))
    asked = {**own, **({"task": section} if section else {})}
    cfg = config.build_config(merge_sections(values, asked), SETTINGS_SOURCE)
    if lines and isinstance(asks := get_innermost_task(cfg.task), Dataset):
        lines.check_prompts(asks)
    return cfg


def build_task_section(
    base: Any, task: Any, data: Any, reward: Any, lines: InMemoryRows | None, folder: Path, objects: ObjectRegistry
) -> dict[str, Any]:
    """Return the section of the task that keywords ask for, over that of a recipe; empty where nobody says anything.

    Data and rewards are those of the innermost task, whatever a recipe has around it.
    """
    section: dict[str, Any] = copy.deepcopy(base or {})
    if task is not None:
        section = merge_task_sections(section, convert_task_to_section(task, objects))
    if data is None and reward is None:
        return section
    asks = get_innermost_section(section)
    if asks.get("name") != "dataset":
        if task is not None or data is None:
            what = "data" if data is not None else "reward"
            raise UserError(f'{what}= is for the task "dataset", which data= brings: leave it out, or task=')
        asks.clear()
        asks["name"] = "dataset"
    if data is not None:
        asks["data"] = format_data_names(data) if lines is None else os.path.abspath(folder / run_dir.DATA_FILE)
    if reward is not None:
        asks["rewards"] = make_reward_terms(reward, objects)
    return section


def get_innermost_section(section: dict[str, Any]) -> dict[str, Any]:
    """Return the section of the task that is wrapped in all others."""
    around = is_task_wrapper(config.find_named_task_class(section, ["task"])[1])
    return get_innermost_section(section.setdefault("task", {})) if around else section


def merge_task_sections(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a task, of which a recipe may have said more."""
    if base.get("name") != overrides["name"]:
        return dict(overrides)
    inside = (
        {"task": merge_task_sections(base["task"], overrides["task"])} if "task" in base and "task" in overrides else {}
    )
    return {**base, **overrides, **inside}


def find_column_settings(lines: InMemoryRows, section: SettingsMapping) -> dict[str, Any]:
    """Return which columns of rows hold what. UserError where nothing says what is right."""
    found = infer_columns(lines.first_row, section)
    if "rewards" not in section and not has_answer_column(lines.first_row, {**section, **found}):
        raise UserError(
            'nothing says what is right: give reward=, or rows with a column "answer"; answer="name" names another'
        )
    return found


def format_model_argument(model: str | Path) -> str:
    if isinstance(model, str | Path):
        return str(model)
    kind = type(model).__name__
    raise UserError(f"model is a {kind}: give its folder or Hub id; model.save_pretrained(folder) makes one of it")


def merge_sections(values: Mapping[str, Any], overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return sections with the keys of others over their own; the task is the other's as a whole."""
    joined = {name: keys if name == "task" else {**values.get(name, {}), **keys} for name, keys in overrides.items()}
    return {**values, **joined}


def check_same_rows(lines: InMemoryRows | None, folder: Path) -> None:
    """Raise UserError where a run that its data has not ended would go on with other rows than it began with."""
    if lines and not has_same_rows(lines, folder) and not run_dir.get_bad_data_path(folder).is_file():
        raise UserError(
            f"data is not what {folder} was trained with, its {run_dir.DATA_FILE}: leave data= out, or begin anew"
        )


def has_same_rows(lines: InMemoryRows, folder: Path) -> bool:
    """Return whether a run folder holds these rows."""
    path = folder / run_dir.DATA_FILE
    return path.is_file() and files.compute_file_digest(path) == lines.digest


def check_unused_folder(folder: Path) -> None:
    """Raise UserError where no run can begin in the folder; a file of its own would take the place of another's."""
    run_dir.check_new_run_dir(folder)
    if (folder / run_dir.DATA_FILE).exists() and not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds {run_dir.DATA_FILE}, which is no run's: choose another folder with run=")


def check_begun_folder(folder: Path, cfg: Config, lines: InMemoryRows | None) -> None:
    """Raise UserError where a run with other settings, or other rows, has left steps in the folder."""
    run_dir.check_begun_run_dir(folder, cfg)
    if lines and any(read_records(folder / "metrics.jsonl")):
        check_same_rows(lines, folder)


def make_run_path(recipe: Path | None) -> Path:
    """Return a name of its own for each run, as the command gives them; of the first in a process, the very same."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("several processes share one folder: name it, run=")
    name = f"{recipe.stem if recipe else 'default'}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = next(RUN_NUMBERS)
    return Path("runs") / (name if number == 1 else f"{name}-{number}")


# ---------------------------------------------------------------- run
# A run in the hands of a notebook or a program: its steps one by one, and what came of them.


if TYPE_CHECKING:  # these import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from pellucid.algorithm.grpo import StepResult
    from pellucid.policy.policy import Policy
    from pellucid.training.run import TrainingRun


class Run:
    """A run of `pellucid.train`. To iterate over it is to train: each step is yielded when it is logged and saved.

    A loop may be left at any time, by break or by an exception: the run is then saved, with its report, and its folder
    free. Another loop over it goes on after the last step, to the numbers of a run that was never left; when all steps
    are taken, it has none. One that is still open then, since its iterator has a name, is left first, and so it is when
    the process ends. An interrupt, as by Ctrl-C, ends it after the step that it is in, with a KeyboardInterrupt when
    all is saved; a second one at once.
    """

    def __init__(
        self,
        cfg: Config,
        folder: Path,
        resumed: SettingChanges | None,
        objects: dict[str, Any],
        prepare: Callable[[], None] | None,
    ) -> None:
        self.folder = folder
        """Where the run is written: model/, report.html, metrics.jsonl, checkpoints/ and the rest."""
        self.finished = False
        """Whether all steps have been taken, and the model saved."""
        self._cfg, self._resumed, self._objects, self._prepare = cfg, resumed, objects, prepare
        self._code_digests = self._digest_code()
        self._course: TrainingRun | None = None
        self._loop: Callable[[], Generator[StepResult] | None] = lambda: None
        self._owner_pid = 0
        """The process that has the loop which is open; 0 where none is."""

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {len(self.metrics)} of {self._cfg.algorithm.steps} steps>"

    def __iter__(self) -> Iterator[StepResult]:
        if self._owner_pid not in (0, os.getpid()):
            raise UserError(self._not_owner_message)
        self._close_loop()
        loop = self._iter_steps()
        self._loop = weakref.ref(loop)  # a loop that is left has no other owner, and ends at once
        return loop

    def finish(self) -> Self:
        """Take all steps that are left. Return the run."""
        for _ in self:
            pass
        return self

    @property
    def model(self) -> PreTrainedModel:
        """The model as it is now, as transformers has it: to generate with, or for `save_pretrained`.

        It is the very one that is trained; with LoRA, or with weights offloaded, a copy of it in fp32 with all in its
        weights, made at each access. UserError before the first step, and where several processes share the parameters.
        """
        policy = self._get_unsharded_policy()
        masters = policy.masters()
        whole = all(masters[name] is weight for name, weight in policy.trainable().items())
        return policy.model if whole and not policy.adapter else policy.build_merged_model(masters)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with the chat template that the model is trained with. UserError before the first step."""
        return self._get_policy().tokenizer

    def save(self, folder: str | Path) -> Path:
        """Save model and tokenizer as they are now, for anything that loads transformers' models. Return the folder.

        The weights are saved in `save_dtype`, float32 unless the run has another.
        """
        policy = self._get_unsharded_policy()
        import torch  # noqa: PLC0415 - `import pellucid` is light; the policy has imported it

        policy.save(Path(folder), dtype=getattr(torch, self._cfg.policy.save_dtype))
        return Path(folder)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step so far, with its number as `step`; None where there was no number."""
        return [dict(row) for row in read_records(self.folder / "metrics.jsonl")]

    @property
    def evaluations(self) -> dict[int, Evaluation]:
        """The evaluations so far, each by the step that it followed; 0 is before the first."""
        return loggers.read_evaluations(self.folder)

    def report(self) -> Path:
        """Write report.html of what there is so far, and show it in a notebook. Return its path."""
        if not (self.folder / "config.json").is_file():
            raise UserError("there is nothing to report yet: take a step first")
        path = write_report(self.folder)
        if console.is_in_notebook():
            console.display_page(path)
        return path

    def _iter_steps(self) -> Generator[StepResult]:
        if self.finished:
            return
        requests = StopRequests()
        steps = iter(self._start_course(requests))
        self._owner_pid = owner = os.getpid()
        try:
            while (result := self._take_step(steps, requests)) is not None:
                with run_at_exit(self._close_loop):
                    yield result
                if os.getpid() != owner:
                    prevent_close(steps)
                    raise UserError(self._not_owner_message)
        except GeneratorExit:
            if os.getpid() != owner:
                prevent_close(steps)
                return
            self._stop_steps(steps, requests)
        finally:
            if os.getpid() == owner:
                self._owner_pid = 0

    @property
    def _not_owner_message(self) -> str:
        return (
            f"the run in {self.folder} belongs to process {self._owner_pid}, of which this one is a fork: only that process"
            " takes its steps, saves it and closes it"
        )

    def _close_loop(self) -> None:
        """Leave the loop that is open, if one is. UserError where it is taking a step, as in another thread.

        A fork of the process that has the loop leaves it alone.
        """
        if self._owner_pid not in (0, os.getpid()):
            return
        loop = self._loop()
        if loop is not None and inspect.getgeneratorstate(loop) == inspect.GEN_RUNNING:
            raise UserError(f"the run in {self.folder} is taking a step: wait for it")
        if loop is not None:
            loop.close()

    def _start_course(self, requests: StopRequests) -> TrainingRun:
        """What takes the steps, from where the run is. UserError where its code is no longer what was asked for."""
        with defer_stop_signals():
            from pellucid.training.run import TrainingRun  # noqa: PLC0415 - it imports torch

        now = self._digest_code()
        for key, digest in self._code_digests.items():
            if now.get(key) != digest:
                raise UserError(f"the file of {key} was edited since this run was asked for: call pellucid.train again")
        if self._course is None:
            self._course = TrainingRun(
                self._cfg, self.folder, self._resumed, requests, self._resume_hint, self._prepare
            )
        self._course.stop_requests = requests
        clear_data_caches()
        return self._course

    def _digest_code(self) -> dict[str, str]:
        """The digests of the user's files that the settings name."""
        with provide_objects(self._objects):
            return run_dir.digest_code_files(run_dir.dump_settings(self._cfg))

    def _take_step(self, steps: Iterator[StepResult], requests: StopRequests) -> StepResult | None:
        """Take a step; None after the last. KeyboardInterrupt where an interrupt has ended the run."""
        with self._working_context(requests):
            result = next(steps, None)
        if result is None:
            self._update_finished()
            if requests:
                raise KeyboardInterrupt
        return result

    def _stop_steps(self, steps: Generator[StepResult], requests: StopRequests) -> None:
        """The loop was left, maybe by an error of the caller's, which one of ours must not hide."""
        try:
            with self._working_context(requests):
                steps.close()
        except UserError as error:
            print(escape_controls(f"! {error}"), flush=True)
        else:
            self._update_finished()

    def _update_finished(self) -> None:
        assert self._course is not None
        self.finished = not self._course.stopped_step

    @contextmanager
    def _working_context(self, requests: StopRequests) -> Iterator[None]:
        """In here signals ask for a stop, and names stand for what was given. Between steps neither is so."""
        with (
            rewrite_command_line_hints(self.folder),
            handle_stop_signals(requests.handle_signal),
            provide_objects(self._objects),
        ):
            try:
                yield
            except KeyboardInterrupt:
                begun = (self.folder / "config.json").is_file()
                how = f"go on with: {self._resume_hint}" if begun else "the same call starts again"
                print(escape_controls(f"stopped at once; nothing that was saved is lost, {how}"), flush=True)
                raise

    @property
    def _resume_hint(self) -> str:
        """How to go on in another process."""
        given_too = ", with the functions and tasks that were given to it" if self._objects else ""
        return f'pellucid.train(resume="{self.folder}"){given_too}'

    def _get_policy(self) -> Policy:
        if self._course is None or self._course.policy is None:
            raise UserError("the run has not begun: take a step first, or load the model with transformers")
        return self._course.policy

    def _get_unsharded_policy(self) -> Policy:
        """Return the policy. UserError where this process has only a part of its parameters."""
        policy = self._get_policy()
        if policy.sharded_modules:
            raise UserError(f"the parameters lie in several processes: the model will be in {self.folder / 'model'}")
        return policy


def prevent_close(steps: Iterator[StepResult]) -> None:
    """Keep the steps of another process from being closed in this fork of it, also when this process ends.

    They would save the run, release its folder and end the processes of rewards.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(steps))


@contextmanager
def run_at_exit(act: Callable[[], None]) -> Iterator[None]:
    """A process that ends in here acts before it does what was registered earlier, as to leave a group of processes."""
    atexit.register(act)
    try:
        yield
    finally:
        atexit.unregister(act)


@contextmanager
def rewrite_command_line_hints(folder: Path) -> Iterator[None]:
    """Tell as keywords the mends that the command line has as options, of the run in this folder."""
    try:
        yield
    except UserError as error:
        told = str(error).replace("with --run", "with run=")
        told = told.replace(f"--policy.model {folder / 'model'}", f'model="{folder / "model"}"')
        told = told.replace(f"--resume {folder}", f'resume="{folder}"')
        raise type(error)(told) from error


# ---------------------------------------------------------------- objects
# Functions and tasks that are given as objects: by the name of a file where they have one, else "here:NAME".


RewardTermLike = str | Callable[..., Any] | RewardTerm | Mapping[str, Any]
RewardLike = RewardTermLike | tuple[RewardTermLike, float] | Sequence[RewardTermLike | tuple[RewardTermLike, float]]
"""What `reward=` takes: a term, one with its weight, or a list of them."""
ACCEPTED_REWARD_HINT = (
    'give a function, the name of a term, "file.py:function", (one of these, weight), or a list of them'
)
PACKAGED_TASK_NAMES = {spec: name for name, spec in TASKS.items()}


class ObjectRegistry(dict[str, Any]):
    """What was given to a run, by the names that its settings have for it."""

    def register(self, thing: Any, name: str) -> str:
        """Return the name of an object; another of the same name gets a number."""
        specs = (f"{IN_PROCESS_PREFIX}{name}{f'-{number}' if number > 1 else ''}" for number in range(1, len(self) + 2))
        spec = next(spec for spec in specs if self.get(spec, thing) is thing)
        self[spec] = thing
        return spec


def make_reward_terms(reward: Any, objects: ObjectRegistry) -> list[Any]:
    """Return the terms of a reward as a recipe has them. UserError for what is none."""
    if isinstance(reward, list):
        terms = [term for each in reward for term in make_reward_terms(each, objects)]
        if not terms:
            raise UserError(f"reward is an empty list: {ACCEPTED_REWARD_HINT}")
        return terms
    if isinstance(reward, tuple):
        if len(reward) != 2 or isinstance(reward[1], bool) or not isinstance(reward[1], int | float):
            raise UserError(f"reward has a tuple that is no pair of a term and its weight: {ACCEPTED_REWARD_HINT}")
        return [{"name": register_reward(reward[0], objects), "weight": reward[1]}]
    if isinstance(reward, RewardTerm):
        return [dataclasses.asdict(reward)]
    return [dict(reward)] if isinstance(reward, Mapping) else [{"name": register_reward(reward, objects)}]


def register_reward(reward: Any, objects: ObjectRegistry) -> str:
    if isinstance(reward, str):
        return reward
    if not callable(reward):
        raise UserError(f"reward is of type {type(reward).__name__}: {ACCEPTED_REWARD_HINT}")
    return objects.register(reward, get_callable_name(reward))


def register_algorithm_functions(sections: Mapping[str, Mapping[str, Any]], objects: ObjectRegistry) -> dict[str, Any]:
    """Return the sections with names for an advantage or an objective that is a function."""
    keys = dict(sections.get("algorithm", {}))
    keys |= {
        axis: objects.register(keys[axis], get_callable_name(keys[axis])) for axis in AXES if callable(keys.get(axis))
    }
    return {**sections, **({"algorithm": keys} if keys else {})}


def get_callable_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, as its metric has it."""
    inner = getattr(function, "func", function)  # of functools.partial
    return getattr(inner, "__name__", type(inner).__name__).strip("<>")


def convert_task_to_section(task: Any, objects: ObjectRegistry) -> dict[str, Any]:
    """Return the section of a recipe for a task: its name and, of a dataclass, its fields. UserError for what is none.

    A class of a file goes by the name of the file, so that other processes find it; so do all that it wraps. What a
    recipe could not hold, be it no dataclass or one with a model among its fields, stays as the object that it is; so
    does one with a `name` of its own, for which a recipe has no place.
    """
    if isinstance(task, str):
        return {"name": task}
    if isinstance(task, type):
        return {"name": register_task_class(task, objects)}
    missing = [name for name in ("sample", "reward") if not callable(getattr(task, name, None))]
    if has_batch_rewards(task):
        missing = [name for name in missing if name != "reward"]
    if missing:
        raise UserError(f"task is of type {type(task).__name__}, which has no {' and no '.join(missing)}")
    known = dataclasses.fields(task) if dataclasses.is_dataclass(task) else ()
    fields = {field.name for field in known if field.init}
    named_itself = "name" in fields and f"{type(task).__module__}:{type(task).__qualname__}" not in PACKAGED_TASK_NAMES
    if not is_task_wrapper(task) and (named_itself or not {"seed", "split"} <= fields or not is_recipe_value(task)):
        return {"name": objects.register(make_task_class(task), type(task).__name__)}
    values = {name: getattr(task, name) for name in fields if name != "name"}
    if values.get("seed") == 0:  # which is that of the run
        del values["seed"]
    if is_task_wrapper(task):
        values["task"] = convert_task_to_section(values["task"], objects)
    return {**values, "name": register_task_class(type(task), objects)}


def register_task_class(cls: type, objects: ObjectRegistry) -> str:
    """Return the name under which a recipe finds a class."""
    if is_local_class(cls) or "." in cls.__qualname__:
        return objects.register(cls, cls.__qualname__.rpartition(".")[2])
    spec = f"{cls.__module__}:{cls.__qualname__}"
    file = getattr(modules.get(cls.__module__), "__file__", None)
    if spec not in PACKAGED_TASK_NAMES and file and Path(file).stem == cls.__module__:
        return f"{file}:{cls.__qualname__}"
    return PACKAGED_TASK_NAMES.get(spec, spec)


def is_recipe_value(value: Any) -> bool:
    """Return whether a recipe could hold a value."""
    if dataclasses.is_dataclass(value):
        return all(is_recipe_value(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return all(map(is_recipe_value, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_recipe_value, value))
    return value is None or isinstance(value, str | int | float | bool)


# ---------------------------------------------------------------- data
# Rows in memory: a list of dicts, a datasets.Dataset or a pandas DataFrame as lines of JSON, and their columns.


ACCEPTED_DATA_HINT = (
    "give a list of dicts, a datasets.Dataset, a pandas DataFrame, a file, several, a pattern or a Hub id"
)
ANSWER_COLUMNS = ("answer", "solution")
"""Columns that hold the gold answer where no setting says which does; `solution` as data sets for TRL have it."""


class InMemoryRows:
    """Rows in memory, which become a file of the run's own: data.jsonl in its folder."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.first_row = rows[0]
        self.json_lines = [encode_row(number, row) for number, row in enumerate(rows, start=1)]

    @property
    def digest(self) -> str:
        """The sha256 of the file."""
        return hashlib.sha256("".join(self.json_lines).encode()).hexdigest()

    def write_file(self, path: Path) -> None:
        files.write_file_atomically(path, "".join(self.json_lines))

    def check_prompts(self, task: Dataset) -> None:
        """Raise UserError for rows that the task cannot make a prompt of, unless it skips them."""
        bad: list[BadRow] = []
        for number, line in enumerate(self.json_lines, start=1):
            where = f"data, row {number}"
            try:
                make_prompt(task, where, json.loads(line))
            except UserError as error:
                bad.append(BadRow(where, str(error).removeprefix(f"{where}: ")))
        if bad and (not task.skip_bad_rows or len(bad) == len(self.json_lines)):
            raise UserError(format_bad_rows(bad))


def make_in_memory_rows(data: Any) -> InMemoryRows | None:
    """Return rows that were given as such; None where `data` names files or a data set on the Hub."""
    if is_data_name(data):
        return None
    module = type(data).__module__.partition(".")[0]
    if module == "pandas" and not hasattr(data, "columns"):
        kind = type(data).__name__
        raise UserError(f"data is a pandas {kind}, which is one column: give a DataFrame, data.to_frame()")
    if module == "pandas" and hasattr(data, "to_dict"):
        rows = data.to_dict("records")
    elif module == "datasets" and isinstance(data, Mapping):
        raise UserError(f'data holds the splits {", ".join(data)}: give one, data["{next(iter(data))}"]')
    elif module == "datasets" and hasattr(data, "__len__"):
        rows = [dict(row) for row in data]
    elif isinstance(data, list | tuple):
        rows = data
    else:
        raise UserError(f"data is of type {type(data).__name__}: {ACCEPTED_DATA_HINT}")
    if not len(rows):
        raise UserError(f"data is empty: {ACCEPTED_DATA_HINT}")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise UserError(f"data, row {number}, is of type {type(row).__name__}, where a dict of columns is needed")
        for name in row:
            if not isinstance(name, str):
                raise UserError(f"data, row {number}, has a column {name!r}: the names of columns must be strings")
    return InMemoryRows(rows)


def check_named_data(task: Dataset) -> None:
    """Raise UserError where the data that a task names cannot be read, or its first row makes no prompt."""
    make_prompt(task, *load_rows(task.data, task.subset, "train")[0])
    if task.test_data:
        source, split = get_held_out_source(task)
        make_prompt(task, *load_rows(source, task.subset, split)[0])


def is_data_name(data: Any) -> bool:
    """Return whether data is a name, or several."""
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(each, str | Path) for each in data)
    return isinstance(data, str | Path)


def format_data_names(data: Any) -> str | list[str]:
    """Return the names of files, or of a data set, as the setting has them."""
    return [str(each) for each in data] if isinstance(data, list | tuple) else str(data)


def infer_columns(row: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that say which columns hold question and answer, where `section` does not and it shows.

    A column `prompt` is TRL's: messages are a chat, and a string is what the model reads, without a chat template.
    """
    found: dict[str, Any] = {}
    if "prompt" in row and not {"question", "messages", "template"} & {*section, *row}:
        is_chat = not isinstance(row["prompt"], str)
        found = {"messages": "prompt"} if is_chat else {"question": "prompt", "chat": section.get("chat", False)}
    if "answer" not in section and ANSWER_COLUMNS[0] not in row and ANSWER_COLUMNS[1] in row:
        found["answer"] = ANSWER_COLUMNS[1]
    return found


def has_answer_column(row: Mapping[str, Any], section: Mapping[str, Any]) -> bool:
    return has_column(row, section.get("answer", ANSWER_COLUMNS[0]))


def encode_row(number: int, row: Mapping[str, Any]) -> str:
    """Return a row as a line of JSON. UserError, naming the column, for what JSON has no form for."""
    for column, value in row.items():
        try:
            json.dumps(convert_to_json_value(value), ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f'data, row {number}: column "{column}" cannot be kept as JSON: {error}') from error
    return (
        json.dumps({column: convert_to_json_value(value) for column, value in row.items()}, ensure_ascii=False) + "\n"
    )


def convert_to_json_value(value: Any) -> Any:
    """Return a value as JSON has it: numpy's numbers and arrays as Python's, dates as text, NaN as nothing."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {str(name): convert_to_json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [convert_to_json_value(item) for item in value]
    if isinstance(value, date):
        return value.isoformat()
    return convert_to_json_value(value.tolist()) if hasattr(value, "tolist") else value


def clear_data_caches() -> None:
    """Drop what is kept of files that were read before: in a long session they may have been edited since."""
    dataset.clear_dataset_caches()
    load_prefixes.cache_clear()


# ---------------------------------------------------------------- settings
# Settings by their names, as keywords: `steps=30` for algorithm.steps, `evaluate_every=5` for evaluate.every.


COMMON_TASK_FIELDS = ("name", "seed", "split", "task")
"""Fields of a task that are no settings of their own: `seed` is algorithm.seed, which is that of the task, too."""

PREFERRED_SECTIONS = {"dtype": "policy"}
"""Of names that several sections have, those that mean one of them: sampler.dtype is of rollouts alone."""

ARGUMENT_NAMES = {
    "policy.model": "model",
    "task.data": "data",
    "task.rewards": "reward",
    "sampler.name": "sampler_name",
}
"""The keywords of settings that pellucid.train takes by names of its own, or whose own name says too little."""

SectionValues = dict[str, dict[str, Any]]


def group_settings_by_section(settings: Mapping[str, Any], task: type | None) -> SectionValues:
    """Return keywords by section and key, as a recipe has them. `task` is the class of the task, where it is known.

    A name that one section alone has is enough, and so is `dtype`, which is policy.dtype; else it is `section_name`,
    which does for every setting. UserError, naming the choices, for an ambiguous one, and the nearest for one that does
    not exist.
    """
    known = list_section_keys(task)
    sections: SectionValues = {}
    mistakes = []
    for name, value in settings.items():
        try:
            section, key = find_section_and_key(name, known)
        except UserError as error:
            mistakes.append(str(error))
        else:
            sections.setdefault(section, {})[key] = value
    if mistakes:
        raise UserError(join_mistakes(mistakes))
    return sections


def list_section_keys(task: type | None) -> dict[str, list[str]]:
    """Return the keys of each section."""
    classes = {name: cls for name, cls in SECTIONS.items() if name != "task"}
    known = {name: [field.name for field in dataclasses.fields(cls)] for name, cls in classes.items()}
    own = [field.name for field in dataclasses.fields(task)] if dataclasses.is_dataclass(task) else []
    return {**known, "task": [name for name in own if name not in COMMON_TASK_FIELDS]}


def find_section_and_key(name: str, known: Mapping[str, list[str]]) -> tuple[str, str]:
    """Return section and key of a keyword."""
    whole = {f"{section}_{key}": (section, key) for section, keys in known.items() for key in keys}
    if name in whole:
        return whole[name]
    sections = [section for section, keys in known.items() if name in keys]
    if len(sections) == 1 or name in PREFERRED_SECTIONS:
        return PREFERRED_SECTIONS.get(name, sections[0]), name
    if sections:
        raise UserError(f"{name} is a setting of {' and '.join(sections)}: say {join_alternatives(name, sections)}")
    if known.get(name):
        raise UserError(f"{name} is a section: say {name}_{known[name][0]}=... for its setting {known[name][0]}")
    names = [*(key for keys in known.values() for key in keys), *whole]
    hint = (
        explain_trl_name(name, make_keyword_formatter(known))
        or did_you_mean(name, names).replace('"', "")
        or "; docs/library.md says how settings are named"
    )
    raise UserError(f"pellucid.train has no setting {name}{hint}")


def make_keyword_formatter(known: Mapping[str, list[str]]) -> Callable[[str], str]:
    """Return what writes a setting, such as evaluate.every, as the keyword that it is: evaluate_every."""

    def keyword(setting: str) -> str:
        section, _, key = setting.rpartition(".")
        if setting in ARGUMENT_NAMES:
            return ARGUMENT_NAMES[setting]
        shared = sum(key in keys for keys in known.values()) > 1 and key not in PREFERRED_SECTIONS
        return f"{section}_{key}" if shared else key

    return keyword


def join_alternatives(name: str, sections: list[str]) -> str:
    *others, last = [f"{section}_{name}" for section in sections]
    return f"{', '.join(others)} or {last}"

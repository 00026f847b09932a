"""`pellucid.train`, and the `Run` that it returns. Keywords are checked here, before anything is loaded."""

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
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from sys import modules
from typing import TYPE_CHECKING, Any, Self

from pellucid import config
from pellucid.config import SECTIONS, Config, SettingsTable
from pellucid.reporting import console
from pellucid.reporting.report import write_report
from pellucid.reporting.run_files import read_evaluations, read_records
from pellucid.rewards.terms import RewardTerm
from pellucid.tasks import TASKS, dataset
from pellucid.tasks.data_files import has_column, load_rows
from pellucid.tasks.dataset import (
    BadRow,
    Dataset,
    check_held_out_share,
    format_bad_rows,
    get_held_out_source,
    make_prompt,
)
from pellucid.tasks.given import make_task_class
from pellucid.tasks.prefixed import load_prefixes
from pellucid.tasks.wrappers import get_innermost_task, is_local_class, is_task_wrapper
from pellucid.training import run_dir
from pellucid.training.run_dir import FUNCTION_SETTINGS, ROW_FILES, SettingChanges
from pellucid.trl_hints import explain_trl_name
from pellucid.types import Evaluation, UserError, has_batch_rewards
from pellucid.utils import files, plugins, text
from pellucid.utils.plugins import IN_PROCESS_PREFIX, did_you_mean, join_mistakes, provide_objects
from pellucid.utils.signals import StopRequests, defer_stop_signals, handle_stop_signals
from pellucid.utils.text import escape_controls, print_notes, write_options_as_keywords

if TYPE_CHECKING:  # these import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from pellucid.algorithm.grpo import StepResult
    from pellucid.policy.policy import Policy
    from pellucid.training.run import TrainingRun

_SETTINGS_SOURCE = "pellucid.train"
_RUN_NUMBERS = itertools.count(1)
"""Numbers the runs of this process whose folders have default names, since two may start in the same second."""


def train(
    *,
    model: str | Path | None = None,
    data: Any = None,
    test_data: Any = None,
    reward: RewardLike | None = None,
    task: Any = None,
    recipe: str | Path | None = None,
    run: str | Path | None = None,
    resume: str | Path | None = None,
    **settings: Any,
) -> Run:
    """Prepare a run, which takes its steps while you iterate over it.

    Nothing is loaded, and no folder is made, before the first step. docs/reference/python.md describes every argument.

    Args:
        model: A folder, a .gguf file, a Hub id, modelscope:OWNER/NAME, or "smollm2-135m".
        data: A list of dicts, a datasets.Dataset or a pandas DataFrame; or file names, a pattern or a Hub id.
        test_data: Held-out rows, in the same forms; or a split of the Hub data set. None holds out `test_share` of
            `data`.
        reward: A function with TRL's signature, the name of a term, "file.py:function", a pair of one of these and its
            weight such as (brevity, 0.2), a RewardTerm, or a list of them. Without it, the last number of a completion
            is compared with the answer in the data.
        task: An object of your own, or the name of a task.
        recipe: A .toml file, or the name of a recipe in the package. Keywords override its settings.
        run: The folder of the run. None makes one in runs/.
        resume: The folder of the run to resume.
        **settings: Any setting of a recipe by its key, or by section_key if several sections have that key:
            steps=30, evaluate_every=5. An advantage or an objective may be a function.

    Raises:
        UserError: One line that names the mistake and the remedy.

    Example:
        for step in pellucid.train(data=rows, reward=my_reward, steps=30):
            print(step.metrics["reward/mean"])
    """
    if files.is_working_directory_gone():
        raise UserError(files.WORKING_DIRECTORY_GONE)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            'a reward process imports this script: put `if __name__ == "__main__":` around pellucid.train',
            page="reference/python",
        )
    if resume and (recipe or run):
        raise UserError("resume= continues with the settings of that run: leave out recipe= and run=")
    plugins.forget_edited_modules()
    file = config.find_recipe(str(recipe)) if recipe else None
    folder = Path(resume or run or _make_run_path(file)).expanduser()
    objects, given = ObjectRegistry(), {"data": data, "test_data": test_data}
    rows = {name: made for name in given if (made := make_in_memory_rows(given[name], name))}
    sources = {
        name: os.path.abspath(folder / ROW_FILES[name]) if name in rows else _format_data_names(value)
        for name, value in given.items()
    }
    with write_options_as_keywords(), provide_objects(objects):
        if run_dir.is_first_process():
            (run_dir.check_resumable_run_dir if resume else _check_unused_folder)(folder)
        source = folder / "config.json" if resume else file
        text.set_recipe_folder(None)  # relative paths of a call start here, not in the folder of an earlier recipe
        values = config.read_settings(source) if source else {}
        config.check_key_variables(values, (), source, "to use another variable, name it from Python: reward=[...]")
        if model is not None:
            settings["policy_model"] = _format_model_argument(model)
        section = _build_task_section(
            values.get("task", {}),
            None if task is None else convert_task_to_section(task, objects),
            sources["data"],
            sources["test_data"],
            None if reward is None else _make_reward_terms(reward, objects),
        )
        keywords = group_settings_by_section(settings, config.find_named_task_class(section, ["task"])[1])
        _register_algorithm_functions(keywords.get("algorithm", {}), objects)
        cfg = _build_run_config(values, section, keywords, rows)
        resume_changes = None
        if resume:
            _check_same_rows(rows, folder)
            resume_changes = run_dir.find_resume_changes(folder, cfg)
            note = run_dir.describe_finished_run(folder, resume_changes, cfg.algorithm.steps)
            if note and run_dir.is_first_process():
                print(note)
        elif run_dir.is_first_process():
            run_dir.check_begun_run_dir(folder, cfg)
            if any(read_records(folder / "metrics.jsonl")):
                _check_same_rows(rows, folder)
        if isinstance(innermost := get_innermost_task(cfg.task), Dataset):
            if cfg.evaluate.every:
                check_held_out_share(innermost)
            if given["data"] is not None or given["test_data"] is not None:
                _check_named_data(innermost, rows)
    unwritten = {name: made for name, made in rows.items() if not (resume and _has_same_rows(name, made, folder))}
    return Run(cfg, folder, resume_changes, objects, partial(_write_rows, unwritten, folder) if unwritten else None)


def _build_run_config(
    values: SettingsTable, section: SettingsTable, keywords: SettingsTable, rows: Mapping[str, InMemoryRows]
) -> Config:
    """Merge the sections of a recipe, the section of the task and keywords into the settings of a run."""
    section = {**section, **keywords.get("task", {})}
    if "data" in rows:
        innermost = _get_innermost_section(section)
        innermost.update(_find_column_settings(rows["data"], innermost))
    merged = {**values, "task": section}
    for name, keys in keywords.items():
        if name != "task" and isinstance(base := values.get(name, {}), Mapping):  # build_config refuses others
            merged[name] = config.merge_algorithm(base, keys) if name == "algorithm" else {**base, **keys}
    cfg = config.build_config(merged, _SETTINGS_SOURCE)
    if isinstance(task := get_innermost_task(cfg.task), Dataset):
        for made in rows.values():
            made.check_prompts(task)
    return cfg


def _build_task_section(
    base: Any,
    task: dict[str, Any] | None,
    data: str | list[str] | None,
    test_data: str | list[str] | None,
    rewards: list[Any] | None,
) -> dict[str, Any]:
    """Build the section of the task: arguments of `train` override the section `base` of a recipe."""
    if not isinstance(base, Mapping):
        config.find_named_task_class(base, ["task"])  # it raises
    section = dict(copy.deepcopy(base))
    if task is not None:
        section = _merge_task_sections(section, task)
    stated = {key: value for key, value in {"data": data, "rewards": rewards}.items() if value is not None}
    if not stated and test_data is None:
        return section
    innermost = _get_innermost_section(section)  # it has the data and the rewards
    if stated and innermost.get("name") != "dataset":
        if task is not None or data is None:
            argument = "reward" if data is None else "data"
            raise UserError(f'{argument}= needs task "dataset", which data= selects: leave out {argument}= or task=')
        innermost.clear()
        innermost["name"] = "dataset"
    innermost.update(stated)
    if test_data is not None:
        if "test_data" not in config.get_field_types(config.find_named_task_class(innermost, ["task"])[1]):
            raise UserError("test_data= needs a task that reads data: give data=, too")
        innermost["test_data"] = test_data
    return section


def _get_innermost_section(section: dict[str, Any], *outer: str) -> dict[str, Any]:
    """Return the section of the task that wraps no other."""
    key_path = (*outer, "task")
    is_wrapper = is_task_wrapper(config.find_named_task_class(section, key_path)[1])
    return _get_innermost_section(section.setdefault("task", {}), *key_path) if is_wrapper else section


def _merge_task_sections(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `overrides` merged into `base` if both sections name the same task, else `overrides` alone."""
    if base.get("name") != overrides["name"]:
        return dict(overrides)
    has_inner = "task" in base and "task" in overrides
    inner = {"task": _merge_task_sections(base["task"], overrides["task"])} if has_inner else {}
    return {**base, **overrides, **inner}


def _find_column_settings(rows: InMemoryRows, section: SettingsTable) -> dict[str, Any]:
    """Return settings that name the columns of rows. Raises UserError if there are neither rewards nor answers."""
    found = infer_columns(rows.first_row, section)
    answer_column = {**section, **found}.get("answer", _ANSWER_COLUMNS[0])
    if "rewards" not in section and not has_column(rows.first_row, answer_column):
        raise UserError(
            'no reward and no gold answers: give reward=, or rows with a column "answer"; answer="name" names another'
        )
    return found


def _format_model_argument(model: str | Path) -> str:
    if isinstance(model, str | Path):
        return str(model)
    kind = type(model).__name__
    raise UserError(f"model is a {kind}: give its folder or Hub id; model.save_pretrained(folder) writes one")


def _check_same_rows(rows: Mapping[str, InMemoryRows], folder: Path) -> None:
    """Raise UserError if a run would resume with other rows, unless bad rows stopped it."""
    for name, made in rows.items():
        if not _has_same_rows(name, made, folder) and not (folder / run_dir.BAD_DATA_FILE).is_file():
            file = folder / ROW_FILES[name]
            raise UserError(f"{name} differs from {file}, the data of this run: leave out {name}=, or start anew")


def _has_same_rows(name: str, rows: InMemoryRows, folder: Path) -> bool:
    """Return whether a run folder holds these rows of the argument `name`."""
    path = folder / ROW_FILES[name]
    return path.is_file() and files.compute_file_digest(path) == rows.digest


def _write_rows(rows: Mapping[str, InMemoryRows], folder: Path) -> None:
    for name, made in rows.items():
        made.write_file(folder / ROW_FILES[name])


def _check_unused_folder(folder: Path) -> None:
    """Raise UserError if no run can begin in the folder, or if its rows would overwrite a file."""
    run_dir.check_new_run_dir(folder)
    for name in ROW_FILES.values():
        if (folder / name).exists() and not (folder / "config.json").is_file():
            raise UserError(f"{folder} holds {name}, not a run: choose another folder with run=")


def _make_run_path(recipe: Path | None) -> Path:
    """Return the path of a new folder, named as on the command line. Later runs of a process append a number."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("several processes share one run folder: name it with run=")
    name = f"{recipe.stem if recipe else 'default'}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = next(_RUN_NUMBERS)
    return Path("runs") / (name if number == 1 else f"{name}-{number}")


# ---------------------------------------------------------------- the run


class Run:
    """A run of `pellucid.train`. Iterating over it trains: each step is yielded after it is logged and saved.

    You may leave the loop at any time, by break or by an exception. The run is then saved, its report is written, and
    its folder is unlocked. Another loop continues after the last step, with the same numbers as if it had never
    stopped. If a variable still holds the iterator of a loop, that loop is closed before the next one starts, or when
    the process exits.

    An interrupt, such as Ctrl-C, stops the run after the current step, and raises KeyboardInterrupt after saving.
    A second interrupt stops it at once.
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
        """The folder of the run, with model/, report.html, metrics.jsonl, checkpoints/ and the rest."""
        self.finished = False
        """Whether all steps have been taken, and the model is saved."""
        self._cfg, self._resumed, self._objects, self._prepare = cfg, resumed, objects, prepare
        self._code_digests = self._digest_code()
        self._training_run: TrainingRun | None = None
        self._loop: Callable[[], Generator[StepResult] | None] = lambda: None
        self._owner_pid = 0
        """The id of the process with the open loop; 0 if no loop is open."""

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {len(self.metrics)} of {self._cfg.algorithm.steps} steps>"

    def __iter__(self) -> Iterator[StepResult]:
        self._check_owner()
        self._close_loop()
        loop = self._iter_steps()
        self._loop = weakref.ref(loop)  # weak, so that leaving the loop closes its generator
        return loop

    def finish(self) -> Self:
        """Take all remaining steps, and return the run."""
        for _ in self:
            pass
        return self

    @property
    def model(self) -> PreTrainedModel:
        """The trained transformers model; with LoRA or offloaded weights, a merged copy in float32.

        Raises:
            UserError: No step has been taken, or several processes share the parameters.
        """
        policy = self._get_unsharded_policy()
        masters = policy.masters()
        is_current = all(masters[name] is weight for name, weight in policy.trainable().items())
        return policy.model if is_current and not policy.adapter else policy.build_merged_model(masters)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with the chat template of the training. Raises UserError before the first step."""
        return self._get_policy().tokenizer

    def save(self, folder: str | Path) -> Path:
        """Save the current model and tokenizer, in the dtype `save_dtype`, into a new folder, and return its path."""
        policy = self._get_unsharded_policy()
        import torch  # noqa: PLC0415 - `import pellucid` is light; the policy has imported it

        policy.save(Path(folder), dtype=getattr(torch, self._cfg.policy.save_dtype))
        return Path(folder)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step so far, with its number as `step`. None stands for a value that is not finite."""
        return [dict(row) for row in read_records(self.folder / "metrics.jsonl")]

    @property
    def evaluations(self) -> dict[int, Evaluation]:
        """The evaluations so far, by the number of the last step before each."""
        return read_evaluations(self.folder)

    def report(self) -> Path:
        """Write report.html for the steps so far, show it if this is a notebook, and return its path."""
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
        steps = iter(self._start(requests))
        self._owner_pid = os.getpid()
        try:
            while (result := self._take_step(steps, requests)) is not None:
                atexit.register(self._close_loop)  # runs before handlers that were registered earlier
                try:
                    yield result
                finally:
                    atexit.unregister(self._close_loop)
                self._check_owner()
        except GeneratorExit:
            if os.getpid() == self._owner_pid:
                self._stop_steps(steps, requests)
        finally:
            if os.getpid() == self._owner_pid:
                self._owner_pid = 0
            else:  # closing the generator in this fork would save the run and end its workers, so it is leaked
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(steps))

    def _check_owner(self) -> None:
        """Raise UserError in a fork of the process with the open loop."""
        if self._owner_pid not in (0, os.getpid()):
            raise UserError(
                f"the run in {self.folder} belongs to process {self._owner_pid}, and this process is a fork of it: only"
                " that process may take steps, save or close the run"
            )

    def _close_loop(self) -> None:
        """Close the open loop of this process, if there is one. Raises UserError if another thread takes a step."""
        loop = self._loop()
        if loop is None or self._owner_pid not in (0, os.getpid()):
            return
        if inspect.getgeneratorstate(loop) == inspect.GEN_RUNNING:
            raise UserError(f"the run in {self.folder} is taking a step: wait for it")
        loop.close()

    def _start(self, requests: StopRequests) -> TrainingRun:
        """Return the training run, with steps left to take. Raises UserError if the user's code was edited."""
        with defer_stop_signals():
            from pellucid.training.run import TrainingRun  # noqa: PLC0415 - it imports torch

        digests = self._digest_code()
        for key, digest in self._code_digests.items():
            if digests.get(key) != digest:
                raise UserError(f"the file of {key} was edited after pellucid.train was called: call it again")
        if self._training_run is None:
            self._training_run = TrainingRun(
                self._cfg, self.folder, self._resumed, requests, self._resume_hint, self._prepare
            )
        self._training_run.stop_requests = requests
        dataset.clear_dataset_caches()  # files may have been edited since they were read
        load_prefixes.cache_clear()
        return self._training_run

    def _digest_code(self) -> dict[str, str]:
        """Return digests of the user's code that the settings name."""
        with provide_objects(self._objects):
            return run_dir.digest_code_files(run_dir.dump_settings(self._cfg))

    def _take_step(self, steps: Iterator[StepResult], requests: StopRequests) -> StepResult | None:
        """Take a step; None after the last one. Raises KeyboardInterrupt if an interrupt has stopped the run."""
        with self._working_context(requests):
            result = next(steps, None)
        if result is None:
            self._update_finished()
            if requests:
                raise KeyboardInterrupt
        return result

    def _stop_steps(self, steps: Generator[StepResult], requests: StopRequests) -> None:
        """Save the run after the loop was left. A UserError is printed, to not hide an exception of the caller."""
        try:
            with self._working_context(requests):
                steps.close()
        except UserError as error:
            print_notes(str(error))
        else:
            self._update_finished()

    def _update_finished(self) -> None:
        assert self._training_run is not None
        self.finished = not self._training_run.stopped_step

    @contextmanager
    def _working_context(self, requests: StopRequests) -> Iterator[None]:
        """Within this context, signals request a stop, and names in settings refer to the objects of the caller."""
        with (
            write_options_as_keywords(),
            handle_stop_signals(requests.handle_signal),
            provide_objects(self._objects),
        ):
            try:
                yield
            except KeyboardInterrupt:
                begun = (self.folder / "config.json").is_file()
                how = f"continue with: {self._resume_hint}" if begun else "the same call starts the run again"
                print(escape_controls(f"stopped at once; saved files are kept; {how}"), flush=True)
                raise

    @property
    def _resume_hint(self) -> str:
        """The call that resumes this run in another process."""
        objects = ", with the functions and tasks that were given to it" if self._objects else ""
        return f'pellucid.train(resume="{self.folder}"){objects}'

    def _get_policy(self) -> Policy:
        if self._training_run is None or self._training_run.policy is None:
            raise UserError("the run has not begun: take a step first, or load the model with transformers")
        return self._training_run.policy

    def _get_unsharded_policy(self) -> Policy:
        """Return the policy. Raises UserError if this process has only a part of its parameters."""
        policy = self._get_policy()
        if policy.sharded_modules:
            raise UserError(f"the parameters are sharded: the model will be saved in {self.folder / 'model'}")
        return policy


# ---------------------------------------------------------------- functions and tasks that are given as objects


_RewardTermLike = str | Callable[..., Any] | RewardTerm | Mapping[str, Any]
RewardLike = _RewardTermLike | tuple[_RewardTermLike, float] | Sequence[_RewardTermLike | tuple[_RewardTermLike, float]]
"""The type of `reward=`: a term, a term with its weight, or a list of them."""
_ACCEPTED_REWARD_HINT = (
    'give a function, the name of a term, "file.py:function", (one of these, weight), or a list of them'
)
_PACKAGED_TASK_NAMES = {spec: name for name, spec in TASKS.items()}


class ObjectRegistry(dict[str, Any]):
    """The objects that were given to a run. The keys are their names in its settings, "here:NAME"."""

    def register(self, thing: Any, name: str) -> str:
        """Add an object, and return its name. A second object of the same name gets a number."""
        specs = (f"{IN_PROCESS_PREFIX}{name}{f'-{number}' if number > 1 else ''}" for number in range(1, len(self) + 2))
        spec = next(spec for spec in specs if self.get(spec, thing) is thing)
        self[spec] = thing
        return spec


def _make_reward_terms(reward: Any, objects: ObjectRegistry) -> list[Any]:
    """Convert a reward to the terms of a recipe. Raises UserError for an object that is not a reward."""
    if isinstance(reward, list):
        terms = [term for each in reward for term in _make_reward_terms(each, objects)]
        if not terms:
            raise UserError(f"reward is an empty list: {_ACCEPTED_REWARD_HINT}")
        return terms
    if isinstance(reward, tuple):
        if len(reward) != 2 or isinstance(reward[1], bool) or not isinstance(reward[1], int | float):
            raise UserError(f"reward has a tuple that is not (term, weight): {_ACCEPTED_REWARD_HINT}")
        return [{"name": _register_reward(reward[0], objects), "weight": reward[1]}]
    if isinstance(reward, RewardTerm):
        return [dataclasses.asdict(reward)]
    return [dict(reward)] if isinstance(reward, Mapping) else [{"name": _register_reward(reward, objects)}]


def _register_reward(reward: Any, objects: ObjectRegistry) -> str:
    if isinstance(reward, str):
        return reward
    if not callable(reward):
        raise UserError(f"reward is of type {type(reward).__name__}: {_ACCEPTED_REWARD_HINT}")
    return objects.register(reward, _get_callable_name(reward))


def _register_algorithm_functions(algorithm: dict[str, Any], objects: ObjectRegistry) -> None:
    """Register the advantage or objective if it is a function, and set its name in the settings."""
    for setting in FUNCTION_SETTINGS:
        if callable(function := algorithm.get(setting)):
            algorithm[setting] = objects.register(function, _get_callable_name(function))


def _get_callable_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, which is also the name of its metric."""
    inner = getattr(function, "func", function)  # a functools.partial has `func`
    return getattr(inner, "__name__", type(inner).__name__).strip("<>")


def convert_task_to_section(task: Any, objects: ObjectRegistry) -> dict[str, Any]:
    """Convert a task to a section of a recipe: its name and, for a dataclass, its fields.

    The name of a class from a file contains the path, so that other processes can import it. The object itself is
    registered if a recipe cannot hold it: it is not a dataclass, a field is a model, or it defines a field `name`.
    """
    if isinstance(task, str):
        return {"name": task}
    if isinstance(task, type):
        return {"name": _register_task_class(task, objects)}
    needed = ("sample",) if has_batch_rewards(task) else ("sample", "reward")
    if missing := [name for name in needed if not callable(getattr(task, name, None))]:
        raise UserError(f"task is of type {type(task).__name__}, which has no {' and no '.join(missing)}")
    own = dataclasses.fields(task) if dataclasses.is_dataclass(task) else ()
    fields = {field.name for field in own if field.init}
    has_own_name = "name" in fields and f"{type(task).__module__}:{type(task).__qualname__}" not in _PACKAGED_TASK_NAMES
    if not is_task_wrapper(task) and (has_own_name or not {"seed", "split"} <= fields or not _is_recipe_value(task)):
        return {"name": objects.register(make_task_class(task), type(task).__name__)}
    values = {name: getattr(task, name) for name in fields if name != "name"}
    if values.get("seed") == 0:  # 0 means the seed of the run
        del values["seed"]
    if is_task_wrapper(task):
        values["task"] = convert_task_to_section(values["task"], objects)
    return {**values, "name": _register_task_class(type(task), objects)}


def _register_task_class(cls: type, objects: ObjectRegistry) -> str:
    """Return the name of a task class in a recipe."""
    if is_local_class(cls) or "." in cls.__qualname__:
        return objects.register(cls, cls.__qualname__.rpartition(".")[2])
    spec = f"{cls.__module__}:{cls.__qualname__}"
    file = getattr(modules.get(cls.__module__), "__file__", None)
    if spec not in _PACKAGED_TASK_NAMES and file and Path(file).stem == cls.__module__:
        return f"{file}:{cls.__qualname__}"
    return _PACKAGED_TASK_NAMES.get(spec, spec)


def _is_recipe_value(value: Any) -> bool:
    """Return whether a recipe can hold a value."""
    if dataclasses.is_dataclass(value):
        return all(_is_recipe_value(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return all(map(_is_recipe_value, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_recipe_value, value))
    return value is None or isinstance(value, str | int | float | bool)


# ---------------------------------------------------------------- rows in memory


_ACCEPTED_DATA_HINT = "give a list of dicts, a datasets.Dataset, a pandas DataFrame, file names, a pattern or a Hub id"
_ANSWER_COLUMNS = ("answer", "solution")
"""Columns of the gold answer, if no setting names one. Data sets for TRL have `solution`."""


class InMemoryRows:
    """Rows of the argument `name` in memory, which are written to a file in the folder of the run."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        self.first_row, self.name = rows[0], name
        self.json_lines = [encode_row(number, row, name) for number, row in enumerate(rows, start=1)]

    @property
    def digest(self) -> str:
        return hashlib.sha256("".join(self.json_lines).encode()).hexdigest()

    def write_file(self, path: Path) -> None:
        files.write_file_atomically(path, "".join(self.json_lines))

    def check_prompts(self, task: Dataset) -> None:
        """Raise UserError if any row makes no prompt; for a task that skips bad rows, only if no row makes one."""
        bad: list[BadRow] = []
        for number, line in enumerate(self.json_lines, start=1):
            where = f"{self.name}, row {number}"
            try:
                make_prompt(task, where, json.loads(line))
            except UserError as error:
                bad.append(BadRow(where, str(error).removeprefix(f"{where}: ")))
        if bad and (not task.skip_bad_rows or len(bad) == len(self.json_lines)):
            raise UserError(format_bad_rows(bad))


def make_in_memory_rows(data: Any, argument: str = "data") -> InMemoryRows | None:
    """Return the rows in the value of an argument; None if it is None, or names files or a data set."""
    if data is None or _format_data_names(data) is not None:
        return None
    module = type(data).__module__.partition(".")[0]
    if module == "pandas" and not hasattr(data, "columns"):
        kind = type(data).__name__
        raise UserError(f"{argument} is a pandas {kind}, which is one column: give a DataFrame, {argument}.to_frame()")
    if module == "pandas" and hasattr(data, "to_dict"):
        rows = data.to_dict("records")
    elif module == "datasets" and isinstance(data, Mapping):
        split = "test" if argument == "test_data" and "test" in data else next(iter(data))
        raise UserError(f'{argument} holds the splits {", ".join(data)}: give one, {argument}["{split}"]')
    elif module == "datasets" and hasattr(data, "__len__"):
        rows = [dict(row) for row in data]
    elif isinstance(data, list | tuple):
        rows = data
    else:
        raise UserError(f"{argument} is of type {type(data).__name__}: {_ACCEPTED_DATA_HINT}")
    if not len(rows):
        raise UserError(f"{argument} is empty: {_ACCEPTED_DATA_HINT}")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            kind = type(row).__name__
            raise UserError(f"{argument}, row {number}, is of type {kind}, where a dict of columns is needed")
        for name in row:
            if not isinstance(name, str):
                raise UserError(
                    f"{argument}, row {number}, has a column {name!r}: the names of columns must be strings"
                )
    return InMemoryRows(rows, argument)


def _check_named_data(task: Dataset, rows: Container[str]) -> None:
    """Raise UserError if data that a task names cannot be read, or its first row makes no prompt.

    `rows` are the arguments whose rows are in memory, and in no file yet.
    """
    if "data" not in rows:
        make_prompt(task, *load_rows(task.data, task.subset, "train")[0])
    if task.test_data and "test_data" not in rows:
        source, split = get_held_out_source(task)
        make_prompt(task, *load_rows(source, task.subset, split)[0])


def _format_data_names(data: Any) -> str | list[str] | None:
    """Return names of files or of a data set as the value of a setting; None if `data` is something else."""
    if isinstance(data, str | Path):
        return str(data)
    are_names = isinstance(data, list | tuple) and data and all(isinstance(each, str | Path) for each in data)
    return list(map(str, data)) if are_names else None


def infer_columns(row: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that name the columns of question and answer, unless `section` names them.

    A column `prompt` has the meaning it has in TRL: messages are a chat; a string is used without a chat template.
    """
    found: dict[str, Any] = {}
    if "prompt" in row and not {"question", "messages", "template"} & {*section, *row}:
        is_chat = not isinstance(row["prompt"], str)
        found = {"messages": "prompt"} if is_chat else {"question": "prompt", "chat": section.get("chat", False)}
    if "answer" not in section and _ANSWER_COLUMNS[0] not in row and _ANSWER_COLUMNS[1] in row:
        found["answer"] = _ANSWER_COLUMNS[1]
    return found


def encode_row(number: int, row: Mapping[str, Any], argument: str = "data") -> str:
    """Return a row as a line of JSON. Raises UserError, which names the column, if a value has no JSON form."""
    values: dict[str, Any] = {}
    for column, value in row.items():
        try:
            values[column] = _convert_to_json_value(value)
            json.dumps(values[column], ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f'{argument}, row {number}: column "{column}" cannot be kept as JSON: {error}') from error
    return json.dumps(values, ensure_ascii=False) + "\n"


def _convert_to_json_value(value: Any) -> Any:
    """Convert a value for JSON: numpy numbers and arrays to Python objects, dates to text, NaN to None."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {str(name): _convert_to_json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_to_json_value(item) for item in value]
    if isinstance(value, date):
        return value.isoformat()
    return _convert_to_json_value(value.tolist()) if hasattr(value, "tolist") else value


# ---------------------------------------------------------------- settings as keywords


COMMON_TASK_FIELDS = ("name", "seed", "split", "task")
"""Task fields that are not keywords of `train`: `seed` means algorithm.seed, the default seed of the task."""

_ARGUMENT_NAMES = {
    "policy.model": "model",
    "task.data": "data",
    "task.rewards": "reward",
    "sampler.name": "sampler_name",
}
"""Settings whose keyword is not their key: arguments of `train`, and sampler.name, since `name` alone is too vague."""


def group_settings_by_section(settings: Mapping[str, Any], task: type | None) -> dict[str, dict[str, Any]]:
    """Group keywords by section, as a recipe has them.

    The key alone suffices if one section has it; section_key names any setting. Raises UserError for an
    ambiguous keyword, with the choices, or an unknown one, with similar names.
    """
    known = list_section_keys(task)
    sections: dict[str, dict[str, Any]] = {}
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
    known = {name: list(config.get_field_types(cls)) for name, cls in classes.items()}
    return {**known, "task": [name for name in config.get_field_types(task) if name not in COMMON_TASK_FIELDS]}


def find_section_and_key(name: str, known: Mapping[str, list[str]]) -> tuple[str, str]:
    """Return the section and the key that a keyword sets."""
    full_names = {f"{section}_{key}": (section, key) for section, keys in known.items() for key in keys}
    if name in full_names:
        return full_names[name]
    sections = [section for section, keys in known.items() if name in keys]
    if len(sections) == 1:
        return sections[0], name
    if sections:
        keywords = " or ".join(f"{section}_{name}" for section in sections)
        raise UserError(f"{name} is a setting of {' and '.join(sections)}: use {keywords}")
    if known.get(name):
        raise UserError(f"{name} is a section: use {name}_{known[name][0]}=... for its setting {known[name][0]}")
    names = [*(key for keys in known.values() for key in keys), *full_names]
    hint = (
        explain_trl_name(name, partial(_format_keyword, known))
        or did_you_mean(name, names).replace('"', "")
        or "; docs/reference/python.md says how settings are named"
    )
    raise UserError(f"pellucid.train has no setting {name}{hint}")


def _format_keyword(known: Mapping[str, list[str]], setting: str) -> str:
    """Return the keyword for a setting: evaluate_every for evaluate.every."""
    section, _, key = setting.rpartition(".")
    is_shared = sum(key in keys for keys in known.values()) > 1
    return _ARGUMENT_NAMES.get(setting) or (f"{section}_{key}" if is_shared else key)

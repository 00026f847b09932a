"""`pellucid COMMAND ...`. Exit status: 0 if done, 2 for user errors, 1 for others, 130 after Ctrl-C."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tyro
from tyro.conf import Positional, Suppress, arg

from pellucid import __version__, config
from pellucid.config import SECTIONS, Config, SamplerConfig
from pellucid.policy.access import ModelAccess
from pellucid.prefixes.command import Prefixes
from pellucid.reporting import run_files
from pellucid.rewards.terms import JUDGE_TERM, REWARD_MODEL_PREFIX
from pellucid.serve.command import ServeCommand, open_listening_socket
from pellucid.study import comparison_page, plan, runner
from pellucid.tasks import TASKS
from pellucid.tasks.wrappers import is_task_wrapper
from pellucid.training.run_dir import (
    check_begun_run_dir,
    check_new_run_dir,
    check_resumable_run_dir,
    check_writable,
    describe_finished_run,
    find_resume_changes,
    is_first_process,
)
from pellucid.trl_hints import explain_trl_name
from pellucid.types import StrandedError, UserError
from pellucid.utils.files import WORKING_DIRECTORY_GONE, is_working_directory_gone
from pellucid.utils.plugins import did_you_mean, import_extra, join_mistakes, pause_garbage_collection
from pellucid.utils.signals import (
    INTERRUPTED_EXIT_STATUS,
    exit_immediately,
    handle_stop_signals,
    raise_keyboard_interrupt,
)
from pellucid.utils.text import escape_controls, get_dict_summaries, get_module_summary, print_notes

_BAD_PATH_ERRNOS = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EPERM)
_CANNOT_WRITE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EIO)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status."""
    words = list(sys.argv[1:] if argv is None else argv)
    quiet_libraries()
    if is_working_directory_gone():
        sys.exit(_print_error(WORKING_DIRECTORY_GONE))
    try:
        with handle_stop_signals(raise_keyboard_interrupt):
            sys.exit(_run_command_line(words))
    except UserError as error:
        sys.exit(_print_error(str(error)))
    except StrandedError as error:
        sys.exit(_print_error(str(error), status=1))
    except OSError as error:
        if is_working_directory_gone():
            sys.exit(_print_error(WORKING_DIRECTORY_GONE))
        path = error.filename or "the run folder"
        if error.errno in _BAD_PATH_ERRNOS:
            sys.exit(_print_error(f"{path}: {error.strerror}: choose another path"))
        if error.errno in _CANNOT_WRITE_ERRNOS:
            sys.exit(_print_error(f"{path}: {error.strerror}; files saved earlier are intact"))
        raise
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_STATUS)


def _run_command_line(words: Sequence[str]) -> int:
    """Run the command of the command line, and return its exit status."""
    if "--version" in words:
        print(f"pellucid {__version__}")
        return 0
    if not words or {"-h", "--help", "--help-all"} & set(words):
        _print_help(words)
        return 0 if words else 2
    return parse_command_line(words)()


def _print_error(message: str, status: int = 2) -> int:
    """Print an error, and return the exit status."""
    print(f"pellucid: {escape_controls(message)}", file=sys.stderr)
    return status


def quiet_libraries() -> None:
    """Silence the progress bars and the advice of libraries, which would mix with our output. Their errors stay."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # without it a lost process is reported with C++ stack traces


# ---------------------------------------------------------------- parsing


_PROGRAM_DESCRIPTION = """Group Relative Policy Optimization, clear enough to see through.

Settings are given as --section.key VALUE. `pellucid COMMAND --help` shows the common settings, --help-all shows all.
Name a recipe or a task to see its values: pellucid train RECIPE --help-all."""
_BOX_CHARACTERS = "│|╭╮╰╯─-+ "
"""The characters of the boxes that tyro draws around errors, with and without Unicode."""


def parse_command_line(args: Sequence[str]) -> Callable[[], int]:
    """Return the command that the words describe; calling it runs it. Raises UserError if there is none."""
    command = _check_command_name(args[0])
    own, settings = config.split_setting_flags(args[1:])
    options = collect_option_types(command)
    flags = dict.fromkeys(word.partition("=")[0] for word in own if word.startswith("--"))
    if unknown := [flag for flag in flags if flag.replace("_", "-") not in options]:
        raise UserError(
            join_mistakes(f"{command} has no option {flag}{_suggest_option(flag, command)}" for flag in unknown)
        )
    for word in own:
        flag, equals, value = word.partition("=")
        if equals and options.get(flag.replace("_", "-")) is bool:
            raise UserError(f"{flag} takes no value, got {value}")
    if settings and not _takes_settings(command):
        raise UserError(f"{command} takes no settings, got {' '.join(settings)}")
    given = {"settings": tuple(settings)} if settings else {}
    return dataclasses.replace(_run_tyro([command, *own], COMMANDS), **given)


def _format_flag(setting: str) -> str:
    """Return the flag of a setting: --algorithm.group-size for algorithm.group_size."""
    return f"--{setting.replace('_', '-')}"


def _check_command_name(word: str) -> str:
    if word not in COMMANDS:
        hint = did_you_mean(word, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        raise UserError(f"no such command: {word}{hint}")
    return word


def _takes_settings(command: str) -> bool:
    return any(field.name == "settings" for field in dataclasses.fields(COMMANDS[command]))


def collect_option_types(command: str) -> dict[str, Any]:
    """Return the flags of a command with their types. Booleans have a second one, --no-NAME."""
    kinds = get_type_hints(COMMANDS[command], include_extras=True)
    options = {
        _format_flag(name): kind
        for name, kind in kinds.items()
        if name != "settings" and Positional not in get_args(kind)
    }
    return options | {f"--no-{flag[2:]}": bool for flag, kind in options.items() if kind is bool}


def _suggest_option(word: str, command: str) -> str:
    """Return a hint: settings of this name, or else an option with a similar name."""
    key = word.removeprefix("--").replace("-", "_")
    settings = [f"--{name}.{key}" for name, cls in SECTIONS.items() if key in config.get_field_types(cls)]
    if settings and _takes_settings(command):
        return f"; did you mean {' or '.join(settings)}?"
    if hint := explain_trl_name(key, _format_flag):
        return hint
    known = [flag for flag in collect_option_types(command) if not flag.startswith("--no-")]
    return did_you_mean(word, known) or "; there are " + ", ".join(known)


def _run_tyro(args: Sequence[str], commands: Mapping[str, type[Any]]) -> Any:
    """Return the command that tyro builds from words. Raises UserError with the first lines of tyro's error."""
    stderr = io.StringIO()
    try:
        with redirect_stderr(stderr):
            return tyro.extras.subcommand_cli_from_dict(
                dict(commands), args=args, prog="pellucid", description=_PROGRAM_DESCRIPTION
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise UserError(f"{_summarize_error_box(stderr.getvalue())}; see pellucid {args[0]} --help") from None


def _summarize_error_box(box: str) -> str:
    """Return the message in an error box of tyro: the text between the heading and the advice."""
    rows = [row.strip(_BOX_CHARACTERS) for row in box.splitlines()[1:]]
    message = takewhile(bool, dropwhile(lambda row: not row, rows))
    return " ".join(" ".join(message).split()).rstrip(".")


# ---------------------------------------------------------------- help


def _print_help(args: Sequence[str]) -> None:
    """Print the commands, or the options of one with the settings that it takes."""
    rest = [word for word in args if word not in ("-h", "--help", "--help-all")]
    commands = dict(COMMANDS)
    if rest:
        own, settings = config.split_setting_flags(rest[1:])
        command = _check_command_name(rest[0])
        if _takes_settings(command):
            named_recipe = own[0] if command in ("train", "prefixes") and own and not own[0].startswith("-") else ""
            recipe = config.find_recipe(named_recipe) if named_recipe else None
            commands[command] = _add_settings_field(COMMANDS[command], recipe, settings, "--help-all" in args)
    with suppress(SystemExit):
        _run_tyro([*rest[:1], "--help"], commands)


COMMON_SETTINGS = {
    "policy": ("model", "lora"),
    "sampler": ("max_tokens", "temperature"),
    "algorithm": (
        *("steps", "prompts_per_step", "group_size", "micro_batch"),
        *("advantage", "objective", "kl_coef", "seed"),
    ),
    "optimizer": ("lr", "schedule"),
    "evaluate": ("every", "n", "k"),
    "checkpoint": ("every",),
    "log": ("tensorboard", "wandb"),
}
"""The twenty settings that --help shows, besides those of the task."""
_TaskNameArgument = Annotated[
    str, arg(metavar="TASK", help="One of `pellucid list tasks`, or your own: path/to/file.py:Class.")
]


def _add_settings_field(command: type[Any], recipe: Path | None, args: Sequence[str], all_settings: bool) -> type[Any]:
    """Add the settings to the class of a command, as a field from which tyro makes help and completion.

    Help does not run code that a recipe names, maybe a stranger's: it prints a note and the defaults of the task.

    Args:
        command: A dataclass with a field `settings`.
        recipe: The file whose values are shown.
        args: Flags of settings, whose values are shown in place of the recipe's.
        all_settings: Show more than COMMON_SETTINGS and the settings of the task.
    """
    stated = config.read_settings(recipe) if recipe else {}
    sections = config.merge_settings(stated, config.parse_setting_flags(args))
    code, cfg = ", ".join(config.list_user_code(stated)), None
    if code:
        print_notes(f"{recipe} names code, which help does not run: {code}. The task is shown with its defaults.\n")
    with suppress(UserError):  # such as a task that cannot be made yet, since nothing names its data
        cfg = config.build_config({**sections, "task": {}} if code else sections, "")
    fields = []
    for name, cls in SECTIONS.items():
        if name == "task":
            task = cfg.task if cfg and not code else None
            shown = _make_task_settings_class(sections.get("task", {}), task, may_import=not code)
        elif all_settings or name in COMMON_SETTINGS:
            visible = () if all_settings else COMMON_SETTINGS[name]
            shown = _derive_class(cls, _make_fields(cls, getattr(cfg, name, None), visible))
        else:
            continue
        fields.append((name, shown, dataclasses.field(default_factory=shown)))
    settings: Any = dataclasses.make_dataclass("Settings", fields)
    field = ("settings", Annotated[settings, arg(name="")], dataclasses.field(default_factory=settings))
    return _derive_class(command, [field])


def _make_task_settings_class(section: Any, task: Any, may_import: bool) -> type[Any]:
    """Return a class with the settings of the task that a section names, and of the tasks that it wraps.

    Their values are those of `task` if there is one. A task that may not be imported shows its name alone.
    """
    name = section.get("name", Config.task_names[0]) if isinstance(section, Mapping) else None
    if not may_import and isinstance(name, str) and name not in TASKS:
        field = ("name", _TaskNameArgument, dataclasses.field(default=name))
        return dataclasses.make_dataclass("Task", [field], namespace={"__doc__": "A user-defined task."})
    name, cls = config.find_named_task_class(section, ["task"])
    fields = [field for field in _make_fields(cls, task) if field[0] not in ("name", "task")]
    if is_task_wrapper(cls):
        inner = _make_task_settings_class(section.get("task", {}), getattr(task, "task", None), may_import)
        fields.append(("task", inner, dataclasses.field(default_factory=inner)))
    return _derive_class(cls, [("name", _TaskNameArgument, dataclasses.field(default=name)), *fields])


def _make_fields(cls: type[Any], value: Any, visible: Sequence[str] = ()) -> list[tuple[str, Any, Any]]:
    """Return name, type and default of each field of a dataclass, with the attributes of `value` as defaults.

    Fields that are not in `visible` are hidden, unless it is empty.
    """
    fields, kinds = [], config.get_field_types(cls)
    for field in dataclasses.fields(cls):
        kind = kinds.get(field.name, Any)
        default = getattr(value, field.name, config.get_field_default(field, tyro.MISSING))
        if "name" in config.get_field_types(config.get_item_type(kind)):  # reward terms are shown by name
            kind = tuple[str, ...]
            default = tuple(item.name for item in default) if isinstance(default, list | tuple) else default
        if not field.init or (visible and field.name not in visible):
            kind = Suppress[kind]
        fields.append((field.name, kind, dataclasses.field(default_factory=partial(identity, default))))
    return fields


def _derive_class(cls: type[Any], fields: Sequence[tuple[str, Any, Any]]) -> type[Any]:
    """Return a subclass with these fields, which accepts all values. Tyro reads the docstrings of `cls`."""
    own = {"__doc__": cls.__doc__, "__post_init__": identity}
    frozen = cls.__dataclass_params__.frozen
    return dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,), frozen=frozen, namespace=own)


def identity(value: Any) -> Any:
    return value


# ---------------------------------------------------------------- train, eval, export


_RecipeArgument = Annotated[str, arg(metavar="RECIPE")]
_ACCESS_KEYS = ("revision", "trust_remote_code")
"""The keys of `[policy]` about how the files of a model may be read."""


@dataclass(frozen=True)
class TrainCommand:
    """Teach a model with a reward function."""

    recipe: Positional[_RecipeArgument] = ""
    """A recipe.toml, or the name of one that comes with Pellucid. Default: no recipe, only the default settings."""
    run: Annotated[Path | None, arg(metavar="DIR")] = None
    """The run folder. Default: runs/RECIPE-TIME."""
    resume: Annotated[Path | None, arg(metavar="RUN")] = None
    """The run to resume, from its last complete checkpoint."""
    profile: bool = False
    """Also write where the time and the memory of the third step go."""
    dry_run: bool = False
    """Print what would run, and do not train: all settings, derived numbers, and a prompt as the model reads it."""
    settings: Suppress[tuple[str, ...]] = ()

    def __call__(self) -> int:
        if self.resume:
            advice = "pellucid train {} begins a run of it; --resume takes a run folder"
            config.refuse_recipe_as_run(self.resume, advice)
            if self.recipe or self.run:
                raise UserError("--resume RUN continues with the settings of that run: leave out the recipe and --run")
        recipe = config.find_recipe(self.recipe) if self.recipe else None
        name = f"{recipe.stem if recipe else 'default'}-{time.strftime('%Y%m%d-%H%M%S')}"
        run_dir = self.resume or self.run or Path("runs") / name
        if is_first_process():
            if self.resume:
                check_resumable_run_dir(run_dir)
            else:
                check_new_run_dir(run_dir)
        source = run_dir / "config.json" if self.resume else recipe
        if source:
            _check_recipe_trust(source, self.settings, self.dry_run)
        cfg = config.load_config(source, self.settings)
        resumed = None
        if self.resume:
            resumed = find_resume_changes(run_dir, cfg)
            if note := describe_finished_run(run_dir, resumed, cfg.algorithm.steps):
                print(note)
                return 0
        elif is_first_process():
            check_begun_run_dir(run_dir, cfg)
        if self.dry_run:
            with pause_garbage_collection():
                from pellucid.training import dry_run  # noqa: PLC0415 - it imports torch

            return dry_run.show_dry_run(cfg, run_dir)
        with handle_stop_signals(exit_immediately), pause_garbage_collection():
            from pellucid.training import run  # noqa: PLC0415 - torch takes seconds: settings are checked before

        try:
            return run.train_run(cfg, run_dir, resumed, self.profile)
        except KeyboardInterrupt:
            begun = (run_dir / "config.json").is_file()
            how = f"continue with: pellucid train --resume {run_dir}" if begun else "the same command starts again"
            print(escape_controls(f"pellucid: stopped at once; saved files are kept; {how}"), file=sys.stderr)
            return INTERRUPTED_EXIT_STATUS


def _check_recipe_trust(source: Path, settings: Sequence[str], print_code: bool = False) -> None:
    """Check the environment variables that a recipe or a config.json would send, and print the code that it names."""
    values = config.read_settings(source)
    config.check_key_variables(values, settings, source)
    if print_code and (code := config.list_user_code(values)):
        print_notes(f"{source} runs code with your permissions: {', '.join(code)}")


@dataclass(frozen=True)
class EvalCommand:
    """Ask a model held-out questions: accuracy or mean reward, with intervals."""

    model: Positional[Annotated[str, arg(metavar="MODEL_OR_RUN")]]
    """A run folder, its model-best, or what --policy.model takes."""
    task: _RecipeArgument = ""
    """The recipe whose task is asked. Default: the task of the run."""
    show: int = 3
    """How many questions are shown, with answers and verdicts."""
    output: Annotated[Path | None, arg(metavar="FILE.jsonl")] = None
    """A new file that gets every answer with its reward, a line each."""
    settings: Suppress[tuple[str, ...]] = ()

    def __call__(self) -> int:
        if self.show < 0:
            raise UserError(f"--show {self.show} must not be negative")
        if self.output:
            _check_answers_path(self.output)
        config.refuse_recipe_as_run(self.model, "pellucid eval MODEL_OR_RUN --task {} asks a model its questions")
        run_dir = run_files.find_run_of_model(self.model)
        recipe = config.find_recipe(self.task) if self.task else None
        source = recipe or (run_dir and run_dir / "config.json")
        if source:
            _check_recipe_trust(source, self.settings)
        cfg = config.load_config(source, self.settings)
        model = run_files.locate_trained_model(self.model)
        with handle_stop_signals(exit_immediately), pause_garbage_collection():
            from pellucid.training import run  # noqa: PLC0415 - as in TrainCommand

        status = run.evaluate_model(cfg, model, self.resolve_access(cfg, run_dir), self.show, self.output)
        if not recipe and not run_dir and not any(word.startswith("--task.") for word in self.settings):
            print(escape_controls(f"asked the default task, {cfg.task_name}: name another with --task RECIPE"))
        return status

    def resolve_access(self, cfg: Config, run_dir: Path | None) -> ModelAccess:
        """Return how the model may be read, as stated by its run or a recipe with this model, else by the flags."""
        if self.model == cfg.policy.model or (run_dir and not self.task):
            return cfg.policy.access
        stated = config.parse_setting_flags(self.settings).get("policy", {})
        stated = {key: words for key, words in stated.items() if key.removeprefix("no_") in _ACCESS_KEYS}
        recorded = {"trust_remote_code": run_dir is not None and run_files.trusts_remote_code(run_dir)}
        return config.build_config({"policy": recorded}, str(run_dir), {"policy": stated}).policy.access


@dataclass(frozen=True)
class ExportCommand:
    """Save the model of a run's last checkpoint, e.g. of a run that was stopped or ran out of data."""

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """The run folder."""
    output: Annotated[Path | None, arg(metavar="DIR")] = None
    """The new folder of the model. Default: RUN/exported."""

    def __call__(self) -> int:
        from pellucid.training import export  # noqa: PLC0415 - torch takes seconds

        return export.export_model(self.run, self.output or self.run / "exported")


def _check_answers_path(path: Path) -> None:
    """Raise UserError if the answers of an evaluation cannot be written, before they are computed."""
    if path.suffix != ".jsonl":
        raise UserError(f"--output {path} must end in .jsonl: it gets a line of JSON for each answer")
    if path.exists():
        raise UserError(f"--output {path} already exists: name another file, or remove it")
    check_writable(path.parent)


# ---------------------------------------------------------------- doctor


@dataclass(frozen=True)
class DoctorCommand:
    """Say what this machine has and does, what is missing, and how much memory a recipe takes."""

    plan: Annotated[str, arg(metavar="RECIPE")] = ""
    """A recipe: how much memory it takes on 1, 2, 4 and 8 devices."""
    settings: Suppress[tuple[str, ...]] = ()

    def __call__(self) -> int:
        if self.settings and not self.plan:
            raise UserError(f"doctor takes settings with --plan RECIPE, got {' '.join(self.settings)}")
        cfg = None
        if self.plan:
            recipe = config.find_recipe(self.plan)
            _check_recipe_trust(recipe, self.settings, print_code=True)
            cfg = config.load_config(recipe, self.settings)
        with pause_garbage_collection():
            from pellucid.training import doctor  # noqa: PLC0415 - torch takes seconds: settings are checked before

        return doctor.print_memory_plan(cfg) if cfg else doctor.print_report()


# ---------------------------------------------------------------- look, show


_RECORD_TOKENS_HINT = "pellucid train {} --log.tokens 4 --run DIR makes one that records tokens"


@dataclass(frozen=True)
class LookCommand:
    """See inside a run, token by token: what each step did to each answer, live while it trains."""

    runs: Positional[Annotated[tuple[Path, ...], arg(metavar="RUN [RUN]")]]
    """A run folder with recorded tokens; two are shown side by side."""
    port: int = 8018
    """Where the page is served, on this machine alone; 0 is any free port."""
    output: Annotated[Path | None, arg(metavar="PAGE.html")] = None
    """Write the page as one file that needs no server and no network."""
    open: bool = True
    """Open a browser."""

    def __call__(self) -> int:
        for run in self.runs:
            config.refuse_recipe_as_run(run, _RECORD_TOKENS_HINT)
        from pellucid.inspect import server  # noqa: PLC0415 - Arrow takes its time

        return server.run_look(self.runs, self.port, self.output, self.open)


@dataclass(frozen=True)
class ShowCommand:
    """Show a group of a step in the terminal: its answers with what the update did to each token."""

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """A run folder with recorded tokens."""
    step: Annotated[int | None, arg(metavar="K")] = None
    """Which step. Default: the last recorded one."""
    group: Annotated[int | None, arg(metavar="J")] = None
    """Which group of the step. Default: the one that taught most."""
    by: Literal["change", "push", "advantage", "gap", "drift", "entropy", "gradient"] = "change"
    """The numbers that the colors show."""

    def __call__(self) -> int:
        config.refuse_recipe_as_run(self.run, _RECORD_TOKENS_HINT)
        from pellucid.inspect import terminal  # noqa: PLC0415 - Arrow takes its time

        return terminal.show_group(self.run, self.step, self.group, self.by)


# ---------------------------------------------------------------- study, compare


@dataclass(frozen=True)
class StudyCommand:
    """Train the variants of a recipe, each with every seed."""

    study: Positional[Annotated[str, arg(metavar="STUDY")]]
    """A study.toml, or the name of one that comes with Pellucid."""
    into: Annotated[Path | None, arg(metavar="DIR")] = None
    """The folder of its runs. Default: runs/STUDY."""
    jobs: int = 1
    """Runs that train side by side."""
    only: Annotated[tuple[str, ...], arg(metavar="VARIANT ...")] = ()
    """Some of the variants. Default: all."""
    keep_models: bool = False
    """Leave the models in the run folders."""

    def __call__(self) -> int:
        study = config.find_recipe(self.study)
        study_dir = self.into or Path("runs") / study.stem
        return runner.run_study(plan.read_study(study), study_dir, self.jobs, self.only, self.keep_models)


@dataclass(frozen=True)
class CompareCommand:
    """Compare runs: paired differences, curves and costs, as a page and as numbers."""

    folders: Positional[Annotated[tuple[Path, ...], arg(metavar="RUN_OR_STUDY ...")]]
    """Runs, or the folder of a study."""
    baseline: Annotated[str, arg(metavar="VARIANT")] = ""
    """The variant that the others are compared with. Default: the first."""
    output: Annotated[Path, arg(metavar="PAGE.html")] = Path("compare.html")
    """The page; its numbers are written beside it as PAGE.json."""

    def __call__(self) -> int:
        if not self.folders:
            raise UserError("compare needs a RUN, several, or the folder of a study")
        for folder in self.folders:
            advice = "pellucid study {} trains the variants of a study; compare takes the folders of their runs"
            config.refuse_recipe_as_run(folder, advice)
        return comparison_page.compare_runs(self.folders, self.baseline, self.output)


# ---------------------------------------------------------------- init, list, push, completion


@dataclass(frozen=True)
class InitCommand:
    """Write a recipe, a reward and ten rows of data that run, to be changed into your own."""

    folder: Positional[Annotated[Path, arg(metavar="DIR")]]
    """The folder, which is made where it is missing."""

    def __call__(self) -> int:
        return write_starter(self.folder)


STARTER_FILES = {
    "recipe.toml": "the settings that are changed first",
    "rewards.py": "the reward: what is wanted of an answer",
    "data.jsonl": "ten questions with their answers",
}
"""The files in `starter`, and what each is for."""


def write_starter(folder: Path) -> int:
    """Write the starter files into a folder that has none of them. Print them and the command to run next."""
    for name in STARTER_FILES:
        if os.path.lexists(folder / name):
            raise UserError(f"{folder / name} already exists; nothing was written: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    width = max(len(str(folder / name)) for name in STARTER_FILES)
    for name, purpose in STARTER_FILES.items():
        shutil.copyfile(Path(__file__).parent / "starter" / name, folder / name)
        print(escape_controls(f"{folder / name!s:{width}}  {purpose}"))
    change_folder = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    print(escape_controls(f"next: {change_folder}pellucid train recipe.toml"))
    return 0


LISTING_WIDTH = 100
"""The longest line, in characters."""


def describe_tasks() -> dict[str, str]:
    return {name: get_module_summary(spec.partition(":")[0]) for name, spec in TASKS.items()}


def describe_rewards() -> dict[str, str]:
    modules = {
        JUDGE_TERM: "pellucid.rewards.judge",
        f"{REWARD_MODEL_PREFIX}FOLDER_OR_HUB_ID": "pellucid.rewards.reward_model",
    }
    described = {name: get_module_summary(module) for name, module in modules.items()}
    return {**get_dict_summaries("pellucid.rewards.terms", "BUILTIN_TERMS"), **described}


def describe_kl_estimators() -> dict[str, str]:
    functions = get_dict_summaries("pellucid.algorithm.kl", "KL_ESTIMATORS")
    return {**functions, "exact": 'For kl = "exact" the policy itself sums over the vocabulary.'}


def describe_samplers() -> dict[str, str]:
    names = get_args(get_type_hints(SamplerConfig)["name"])
    return {name: get_module_summary(f"pellucid.rollout.{name}") for name in names}


LISTABLE_KINDS: dict[str, Callable[[], Mapping[str, str]]] = {
    "recipes": config.describe_recipes,
    "tasks": describe_tasks,
    "rewards": describe_rewards,
    "advantages": lambda: get_dict_summaries("pellucid.algorithm.advantages", "ADVANTAGES"),
    "objectives": lambda: get_dict_summaries("pellucid.algorithm.objectives", "OBJECTIVES"),
    "aggregates": lambda: get_dict_summaries("pellucid.algorithm.objectives", "AGGREGATES"),
    "kl": describe_kl_estimators,
    "samplers": describe_samplers,
}


def print_kind(kind: str) -> int:
    """Print each name of a kind with its summary, on one line. Raises UserError for an unknown kind."""
    if kind not in LISTABLE_KINDS:
        raise UserError(
            f'there is no list of "{kind}"{did_you_mean(kind, LISTABLE_KINDS)}; there are {", ".join(LISTABLE_KINDS)}'
        )
    described = LISTABLE_KINDS[kind]()
    column = max(map(len, described))
    for name, text in described.items():
        shortened = textwrap.shorten(text, LISTING_WIDTH - column - 2, placeholder=" ...")
        print(escape_controls(f"{name:{column}}  {shortened}".rstrip()))
    return 0


@dataclass(frozen=True)
class ListCommand:
    """List the names that a recipe can use, one per line."""

    kind: Positional[Annotated[str, arg(metavar="|".join(LISTABLE_KINDS))]] = ""
    """The kind of thing to list; all kinds without it."""

    def __call__(self) -> int:
        if self.kind:
            return print_kind(self.kind)
        for kind in LISTABLE_KINDS:
            print(kind if kind == "recipes" else f"\n{kind}")
            print_kind(kind)
        return 0


@dataclass(frozen=True)
class PushCommand:
    """Bring the model of a finished run to the Hugging Face Hub, with a card: recipe, results, versions."""

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """The run folder."""
    repository: Positional[Annotated[str, arg(metavar="USER/NAME")]]
    """The repository, which is made where it is missing."""
    private: bool = False
    """Make the repository private."""
    dry_run: bool = False
    """Only print the card, and which files would be uploaded."""

    def __call__(self) -> int:
        config.refuse_recipe_as_run(self.run, "pellucid train {} makes one; push takes the folder of a finished run")
        from pellucid import share  # noqa: PLC0415 - the Hub's library takes its time

        return share.push_to_hub(self.run, self.repository, self.private, self.dry_run)


@dataclass(frozen=True)
class CompletionCommand:
    """Print what makes a shell complete these commands and their settings."""

    shell: Positional[Literal["bash", "zsh", "fish", "tcsh"]]
    """The shell; bash reads it by: source <(pellucid completion bash)."""

    def __call__(self) -> int:
        complete = {
            name: _add_settings_field(cls, None, (), True) for name, cls in COMMANDS.items() if _takes_settings(name)
        }
        _run_tyro(["--tyro-write-completion", self.shell, "-"], {**COMMANDS, **complete})
        return 0


# ---------------------------------------------------------------- sampler


@dataclass(frozen=True)
class SamplerCommand:
    """Serve a vLLM sampler on this machine for a run on another, which sends the weights. Stop it with Ctrl-C."""

    host: str = "127.0.0.1"
    """0.0.0.0 for whoever reaches this machine and has the secret in PELLUCID_SAMPLER_TOKEN. On the loopback a server
    without one makes its own."""
    port: int = 8001
    """Where it listens; 0 is any free port."""
    allowed_hosts: Annotated[str, arg(metavar="NAME,...")] = ""
    """Host names under which the server is reached, besides its addresses."""
    rows: int = 256
    """Completions decoded at once."""
    cache_gb: float = 4.0
    """Memory of keys and values, in GB."""
    device: str = "auto"
    """The device of the model."""

    def __call__(self) -> int:
        for library in ("fastapi", "uvicorn"):
            import_extra(library, "serve", "pellucid sampler")
        with open_listening_socket(self.host, self.port) as listening:
            with pause_garbage_collection():
                from pellucid.serve.vllm_server import run_sampler_server  # noqa: PLC0415 - torch takes seconds

            run_sampler_server(
                listening, self.rows, self.cache_gb, self.device, list(filter(None, self.allowed_hosts.split(",")))
            )
        return 0


COMMANDS: Mapping[str, type[Any]] = {
    "init": InitCommand,
    "train": TrainCommand,
    "eval": EvalCommand,
    "serve": ServeCommand,
    "sampler": SamplerCommand,
    "export": ExportCommand,
    "push": PushCommand,
    "study": StudyCommand,
    "compare": CompareCommand,
    "look": LookCommand,
    "show": ShowCommand,
    "prefixes": Prefixes,
    "list": ListCommand,
    "doctor": DoctorCommand,
    "completion": CompletionCommand,
}

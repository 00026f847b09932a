"""`pellucid push`: upload the model of a finished run to the Hugging Face Hub, with a card about how it was trained."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, EvalResult, HfApi, ModelCardData, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - that of the HTTP library in use
)
from huggingface_hub.utils import validate_repo_id
from jinja2 import Environment
from pydantic_core import to_jsonable_python

from pellucid.config import (
    SECTIONS,
    format_toml,
    get_field_default,
    get_field_types,
    get_item_type,
    list_type_alternatives,
)
from pellucid.policy.packaged import PACKAGED_MODELS
from pellucid.reporting import run_files
from pellucid.reporting.console import describe_prompts, format_interval
from pellucid.reporting.eval_metrics import (
    HEADLINE_LABELS,
    compare_intervals,
    format_measure_name,
    get_measures,
    select_measures,
)
from pellucid.reporting.run_files import Record, read_config, read_evaluations, read_records
from pellucid.rewards.terms import REWARD_MODEL_PREFIX
from pellucid.sandbox.pool import SECRET_VARIABLE_PATTERN
from pellucid.tasks import TASKS, load_task_class
from pellucid.tasks.data_files import is_file_source
from pellucid.types import Estimate, Evaluation, UserError
from pellucid.utils import text
from pellucid.utils.plugins import IN_PROCESS_PREFIX, suggest_path
from pellucid.utils.text import escape_controls

_ADAPTER_CONFIG_FILE = "adapter/adapter_config.json"
_MODEL_FILE_PATTERN = re.compile(r"adapter/.*|model[^/]*\.safetensors[^/]*")
"""Files of an earlier model in the repository, which `from_pretrained` would load along with the new ones."""
_LOGIN_HINT = "hf auth login, or set HF_TOKEN to a token with write access"


def push_to_hub(run_dir: Path, repo_id: str, private: bool = False, dry_run: bool = False) -> int:
    """Upload the model of a finished run in one commit, print its URL, and return the exit status.

    Args:
        run_dir: The folder of the run.
        repo_id: USER/NAME. The repository is made if it does not exist.
        private: Make a private repository, and upload nothing to a public one.
        dry_run: Print the card and the names of the files instead.

    Raises:
        UserError: The run has no model, or the Hub cannot be reached or refuses.
    """
    _check_push(run_dir, repo_id)
    files = _collect_model_files(run_dir)
    readme = make_model_card(run_dir, repo_id, make_recipe(run_dir))
    size = f"{len(files) + 1} files, {sum(path.stat().st_size for path in files.values()) / 1e6:.1f} MB"
    if dry_run:
        print(escape_controls(f"{readme}\nwould upload README.md, {', '.join(files)}: {size}"))
        return 0
    if get_token() is None:
        raise UserError(f"push needs a login to the Hugging Face Hub: {_LOGIN_HINT}")
    print(f"uploads {size}", flush=True)
    try:
        _upload_files(repo_id, {"README.md": readme.encode(), **files, **_make_adapter_config(files)}, private)
    except (HTTPError, RuntimeError, ValueError, OSError) as error:  # hf_xet raises RuntimeError
        raise UserError(f"push to {repo_id}: {text.format_one_line(_describe_hub_error(error))}") from error
    return 0


def _check_push(run_dir: Path, repo_id: str) -> None:
    """Raise UserError if no repository can have this name, or the folder is not that of a finished run."""
    if repo_id.count("/") != 1:
        raise UserError(f'push to "{repo_id}": the name of a repository is USER/NAME, or ORGANIZATION/NAME')
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f'push to "{repo_id}": {error}') from error
    if not run_files.find_run_dir(str(run_dir)):
        raise UserError(f"{run_dir} is not a run folder: it needs config.json and metrics.jsonl{suggest_path(run_dir)}")
    run_files.get_model_dir(run_dir)
    if not run_files.is_run_finished(run_dir):
        raise UserError(f"{run_dir} is not finished: finish it with pellucid train --resume {run_dir}")


def _collect_model_files(run_dir: Path) -> dict[str, Path]:
    """Return the files by their names in the repository: the model at its top, an adapter in `adapter/`."""
    return {
        f"{top}{path.relative_to(folder).as_posix()}": path
        for top, folder in (("", run_dir / "model"), ("adapter/", run_dir / "adapter"))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "README.md"
    }


def _make_adapter_config(files: Mapping[str, Path]) -> dict[str, bytes]:
    """Return the configuration of an adapter, if there is one, without the folder of its base on this machine."""
    if _ADAPTER_CONFIG_FILE not in files:
        return {}
    settings = json.loads(files[_ADAPTER_CONFIG_FILE].read_text(encoding="utf-8"))
    base = settings["base_model_name_or_path"]
    settings["base_model_name_or_path"] = _get_hub_id(base) or shorten_path(base, is_file=True)
    return {_ADAPTER_CONFIG_FILE: json.dumps(settings, indent=2).encode()}


def _upload_files(repo_id: str, files: Mapping[str, Path | bytes], private: bool) -> None:
    """Commit these files, and remove the weights and adapters of an earlier model, in one commit."""
    api = HfApi(library_name="pellucid")
    api.create_repo(repo_id, private=private or None, exist_ok=True)  # None: the organization's default, or public
    if private and not api.model_info(repo_id).private:
        raise UserError(f"{repo_id} already exists and is public: name another, or make it private in its settings")
    stale = [name for name in api.list_repo_files(repo_id) if _MODEL_FILE_PATTERN.fullmatch(name) and name not in files]
    operations = [
        *(CommitOperationAdd(name, content) for name, content in files.items()),
        *(CommitOperationDelete(name, is_folder=False) for name in stale),
    ]
    commit = api.create_commit(repo_id, operations, commit_message="Model trained by Pellucid, with its card")
    print(escape_controls(f"{commit.repo_url} at {commit.oid[:12]}"))


def _describe_hub_error(error: Exception) -> str:
    """Return what has failed, with a remedy."""
    if isinstance(error, HfHubHTTPError):
        status, message = error.response.status_code, error.server_message or error
        remedy = {401: f"; {_LOGIN_HINT}", 403: f"; give your own user name, or {_LOGIN_HINT}"}.get(status, "")
        return f"the Hugging Face Hub answers {status}: {message}{remedy}"
    if isinstance(error, HTTPError | ConnectionError):
        return f"the Hugging Face Hub cannot be reached: {error}"
    cause = f" ({error.__cause__})" if error.__cause__ else ""
    return f"{error}{cause}; nothing was committed: try again"


# ---------------------------------------------------------------- the recipe that trains a run again


def make_recipe(run_dir: Path) -> str:
    """Return a recipe with the settings of a run that are not defaults, without secrets and folders of this machine.

    The user's code is not imported, so a user's own task keeps all its settings.
    """
    settings = _make_shareable_config(run_dir)
    changed = {name: _drop_defaults(settings[name], cls) for name, cls in SECTIONS.items() if name != "task"}
    changed["policy"] = {"model": settings["policy"]["model"], **changed["policy"]}
    if settings["algorithm"].get("max_length") == settings["sampler"]["max_tokens"]:  # as `resolve_config` fills it in
        changed["algorithm"].pop("max_length", None)
    stated = {name: section for name, section in changed.items() if section}
    return format_toml({**stated, "task": _make_task_section(settings["task"], settings["algorithm"])})


def _make_task_section(section: Record, algorithm: Record) -> dict[str, Any]:
    """Return the section of a task without its defaults, and without a seed that equals the algorithm's."""
    name, wrapped = section["name"], section.get("task")
    own = {key: value for key, value in section.items() if key not in ("name", "task")}
    if own.get("seed") == algorithm.get("seed"):
        del own["seed"]
    own = _drop_defaults(own, load_task_class(name)) if name in TASKS else own
    if isinstance(wrapped, Mapping) and "name" in wrapped:
        wrapped = _make_task_section(wrapped, algorithm)
    return {"name": name, **own, **({} if wrapped is None else {"task": wrapped})}


def _drop_defaults(value: Any, kind: Any) -> Any:
    """Return a value of a type without the defaults of the dataclasses in it, at any depth."""
    if isinstance(value, list):
        return [_drop_defaults(item, get_item_type(kind)) for item in value]
    kinds = get_field_types(kind)
    if not isinstance(value, Mapping) or not kinds:
        return value
    defaults = {
        field.name: to_jsonable_python(get_field_default(field))
        for cls in list_type_alternatives(kind)
        if dataclasses.is_dataclass(cls)
        for field in dataclasses.fields(cls)
    }
    changed = {name: item for name, item in value.items() if name in kinds and item != defaults[name]}
    return {name: _drop_defaults(item, kinds[name]) for name, item in changed.items()}


# ---------------------------------------------------------------- the model card, README.md of the repository


_CARD_TEMPLATE = Path(__file__).parent / "model_card.md.jinja"
_PYTHON_OBJECT = re.compile(rf"{IN_PROCESS_PREFIX}\S+")
_ACCURACY_NAMES = ("greedy", "mean@k")


def make_model_card(run_dir: Path, repo_id: str, recipe: str) -> str:
    """Return the card of a run with its recipe. It names no folder of this machine."""
    settings = _make_shareable_config(run_dir)
    model = settings["policy"]["model"]
    task = _find_inner_task(settings["task"])
    name, data = task["name"], task.get("data") or []
    is_packaged = name in TASKS
    is_hub_dataset = is_packaged and isinstance(data, str) and data.count("/") == 1 and not is_file_source(data)
    datasets = [str(data)] if is_hub_dataset else []
    evaluations = list(read_evaluations(run_dir).values())
    metadata = ModelCardData(
        base_model=find_base_model(read_config(run_dir)["policy"]["model"]),
        datasets=datasets or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "reinforcement-learning", "pellucid", *(["lora"] if settings["policy"].get("lora") else [])],
        model_name=repo_id.partition("/")[2],
        eval_results=list(_make_eval_results(evaluations[-1], datasets)) if evaluations else None,
    )
    steps = list(read_records(run_dir / "metrics.jsonl"))
    files = [(key, _look_up_setting(settings, key), digest) for key, digest in settings.get("digests", {}).items()]
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return environment.from_string(_CARD_TEMPLATE.read_text(encoding="utf-8")).render(
        metadata=metadata.to_yaml(),
        name=metadata.model_name,
        repo_id=repo_id,
        base=_get_hub_id(model) or model,
        lora=settings["policy"].get("lora"),
        task=task,
        task_summary=text.get_module_summary(TASKS[name].partition(":")[0]) if is_packaged else None,
        reward_summary=text.extract_first_sentence(inspect.getdoc(load_task_class(name)) or "") if is_packaged else "",
        data=[data] if isinstance(data, str) else data,
        terms=[f"{term['weight']} x `{term['name']}`" for term in task.get("rewards") or ()] if is_packaged else [],
        algorithm=settings["algorithm"],
        steps=len(steps),
        minutes=sum(step.get("time/step") or 0 for step in steps) / 60,
        evaluated=shorten_path(evaluations[-1].task) if evaluations else "",
        prompts=describe_prompts(evaluations[-1]) if evaluations else "",
        results=list(_compare_evaluations(evaluations[0], evaluations[-1])) if evaluations else [],
        table=_format_markdown_table,
        is_chat=(run_dir / "model" / "chat_template.jinja").is_file(),
        has_own_code=any((run_dir / "model").glob("*.py")),
        max_tokens=settings["sampler"]["max_tokens"],
        objects=_list_python_objects([settings["task"], settings["algorithm"]]),
        recipe=recipe,
        files=[tuple(f"`{cell}`" for cell in row) for row in files if not _PYTHON_OBJECT.fullmatch(row[1])],
        versions=_list_versions(settings),
    )


def find_base_model(model: str) -> str | None:
    """Return the id of a model on the Hub; None for a model from elsewhere."""
    is_id = model.count("/") <= 1 and model[0] not in "./~" and ":" not in model and not model.endswith(".gguf")
    return _get_hub_id(model) or (model if is_id else None)


def _get_hub_id(model: str) -> str:
    """Return the id of a packaged model on the Hub; empty for another model."""
    return PACKAGED_MODELS[model].hub_id if model in PACKAGED_MODELS else ""


def _find_inner_task(task: Record) -> Record:
    """Return the section of the innermost task, which has the questions."""
    return _find_inner_task(task["task"]) if isinstance(task.get("task"), Mapping) else task


def _make_eval_results(evaluation: Evaluation, datasets: Sequence[str]) -> Iterator[EvalResult]:
    """Yield the measures of an evaluation, with the ends of their intervals, in the form that the Hub reads."""
    task = shorten_path(evaluation.task)
    for name in select_measures([evaluation]):
        estimate = get_measures(evaluation)[name]
        interval = {"low": estimate.low, "high": estimate.high}
        yield EvalResult(
            task_type="text-generation",
            dataset_type=next(iter(datasets), task),
            dataset_name=task,
            dataset_split=evaluation.split,
            metric_type="accuracy" if name in _ACCURACY_NAMES else format_measure_name(name, evaluation.k),
            metric_name=_describe_measure(name, evaluation.k),
            metric_value=estimate.value,
            metric_args={"interval": 0.95, **interval} if all(map(math.isfinite, interval.values())) else None,
        )


def _describe_measure(name: str, k: int) -> str:
    return HEADLINE_LABELS.get(name) or format_measure_name(name, k)


def _compare_evaluations(first: Evaluation, last: Evaluation) -> Iterator[tuple[str, ...]]:
    """Yield a row for each measure of the last evaluation."""
    before, after = get_measures(first), get_measures(last)
    for name in select_measures([first, last]):
        if name in after:
            intervals = compare_intervals(before[name], after[name]) if name in before else ""
            cells = _format_cell(before.get(name)), _format_cell(after[name])
            yield _describe_measure(name, last.k), *cells, intervals


def _format_cell(estimate: Estimate | None) -> str:
    return f"{estimate.value:.3f} {format_interval(estimate)}".rstrip() if estimate else ""


def _list_python_objects(value: Any) -> list[str]:
    """Return the names of objects that were given to `pellucid.train`, at any depth of settings."""
    if isinstance(value, Mapping | list):
        items = value.values() if isinstance(value, Mapping) else value
        return sorted({name for item in items for name in _list_python_objects(item)})
    return [value] if isinstance(value, str) and _PYTHON_OBJECT.fullmatch(value) else []


def _look_up_setting(settings: Any, key: str) -> Any:
    """Return the setting of a dotted key, such as task.rewards.0.name; _HIDDEN_VALUE inside a secret."""
    for name in key.split("."):
        if settings == _HIDDEN_VALUE:
            break
        settings = settings[int(name)] if isinstance(settings, list) else settings[name]
    return settings


def _list_versions(settings: Record) -> list[tuple[str, str]]:
    rows = [(name, f"`{version}`") for name, version in settings["versions"].items()]
    rows += [("git revision of the working directory", f"`{settings['git']}`")] if settings.get("git") else []
    rows += [(name, str(fact)) for name, fact in settings["hardware"].items() if fact != ""]
    return rows + [(f"resumed after step {each['step']}", each["time"]) for each in settings.get("resumes") or ()]


def _format_markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(each.replace("|", "\\|") for each in line) + " |" for line in lines)


# ---------------------------------------------------------------- settings without secrets and folders


_HIDDEN_VALUE = "..."
"""Replaces the value of a setting whose name is like a secret's."""
_JUDGE_KEY_SUFFIX = ".judge.key"
"""Not a secret, although its name looks like one: it holds the name of an environment variable."""
_SINGLE_WORD = re.compile(r"[^\s{}()<>]+")


def _make_shareable_config(run_dir: Path) -> Record:
    """Return config.json without secrets, and with the names of files in place of their absolute paths."""
    record = read_config(run_dir)
    files = {"policy.model", *record.get("digests", ())}
    return {name: value if name == "digests" else redact_value(value, files, name) for name, value in record.items()}


def redact_value(value: Any, files: Container[str], key: str) -> Any:
    """Redact the value of a dotted key at any depth. `files` are the keys of settings that are known to be paths."""
    is_secret = SECRET_VARIABLE_PATTERN.fullmatch("_" + key.rpartition(".")[2])
    if value and is_secret and not key.endswith(_JUDGE_KEY_SUFFIX):
        return _HIDDEN_VALUE
    if isinstance(value, Mapping):
        return {name: redact_value(item, files, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [redact_value(item, files, f"{key}.{i}") for i, item in enumerate(value)]
    return shorten_path(value, key in files) if isinstance(value, str) else value


def shorten_path(value: str, is_file: bool = False) -> str:
    """Return an absolute path without its folders, and other texts unchanged. RUN/model keeps the name of the run.

    Unless `is_file`, a text counts as a path if it has folders, and exists or is a single word: a prompt may contain
    slashes, too.

    Example: shorten_path("/home/me/rewards.py:brevity") == "rewards.py:brevity"
    """
    if value.startswith(REWARD_MODEL_PREFIX):
        return REWARD_MODEL_PREFIX + shorten_path(value.removeprefix(REWARD_MODEL_PREFIX), is_file=True)
    path: PurePath = PureWindowsPath(value) if PureWindowsPath(value).drive else PurePosixPath(value)
    is_path = is_file or (len(path.parts) > 2 and (_SINGLE_WORD.fullmatch(value) or os.path.lexists(value)))
    if not is_path or not (path.is_absolute() or value.startswith("~")):
        return value
    return "/".join(path.parts[-2:]) if path.name == "model" else path.name

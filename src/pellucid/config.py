"""The settings of a run: the command line overrides recipe.toml, which overrides the defaults.

Each section is a dataclass. The class of `[task]` is the class of the task; the section of a task that wraps another
one holds the section of that task.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import reprlib
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import pydantic
import tomli_w
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed.settings import RuntimeConfig
from pellucid.policy.access import DEFAULT_ACCESS, ModelAccess
from pellucid.rewards.settings import RewardConfig
from pellucid.rewards.terms import REWARD_MODEL_PREFIX, is_function_term
from pellucid.tasks import TASKS, load_task_class
from pellucid.tasks.data_files import is_file_pattern, list_matching_files
from pellucid.tasks.wrappers import is_task_wrapper, with_seed
from pellucid.trl_hints import explain_trl_name, explain_trl_value
from pellucid.types import MissingFileError, UserError
from pellucid.utils.endpoint import is_key_variable, split_address
from pellucid.utils.plugins import IN_PROCESS_PREFIX, did_you_mean, join_mistakes
from pellucid.utils.text import (
    QUOTED_PATH_HINT,
    describe_searched_folders,
    find_nearby_files,
    format_option,
    set_recipe_folder,
    suggest_file,
)

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_BACKSLASH_IN_QUOTES = re.compile(r'"[^"\n]*\\')
_COMMAND_LINE = "the command line"
SettingsTable = Mapping[str, Any]
_KeyPath = Sequence[str]
"""The path of a setting: its section, then its key, and so on inwards."""


# ---------------------------------------------------------------- sections


_Fraction = Annotated[float, Field(ge=0, le=1)]
_PositiveFraction = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class PolicyConfig:
    """`[policy]`: the model that is trained, and how it computes."""

    model: str = "smollm2-135m"
    """A local folder, a .gguf file, a Hub id, modelscope:OWNER/NAME; or a model in a wheel: smollm2-135m,
    qwen2.5-coder-0.5b."""
    revision: str = ""
    """Branch, tag or commit of a model of the Hub or of ModelScope; empty is its default branch. A run records the
    Hub commit."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder with your permissions; read it first."""
    template: str = ""
    """A file with a chat template in Jinja, instead of the checkpoint's; it is saved with the model."""
    template_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Values of variables of the chat template, such as enable_thinking; they are saved with the model, too."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of computing; master weights are fp32. auto: bfloat16 where this machine is faster in it, else float32.
    float16, for GPUs without bfloat16, trains with loss scaling; the activations of some models
    overflow it."""
    save_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the weights in the saved model. The others take half the disk, and round: a merged LoRA update is
    usually smaller than bfloat16 rounding."""
    device: str = "auto"
    """The device of the policy: cpu, cuda, cuda:1, mps; auto is a GPU if there is one, else the CPU."""
    deterministic: bool = False
    """On a GPU: bit-identical reruns, more slowly. CPU runs always are."""
    lora: NonNegativeInt = 0
    """Rank of a LoRA adapter to train instead of the whole model; 0 trains the whole model."""
    lora_alpha: NonNegativeFloat = 0.0
    """The adapter is scaled by lora_alpha / lora; 0 is twice the rank."""
    lora_targets: tuple[str, ...] = ()
    """Names of the linear layers that have an adapter, such as q_proj v_proj; empty means all."""
    load_in_4bit: bool = False
    """Keep the frozen base of an adapter in 4-bit numbers, NF4 by bitsandbytes; not with runtime.engine fsdp2 or
    deepspeed, optimizer.offload or vLLM."""
    reference: str = "auto"
    """Device of the frozen reference (auto: that of the policy); it is loaded only where kl_coef > 0."""
    engine: Literal["auto", "transformers"] = "auto"
    """auto: our own decoder for the Llama family (Llama, Mistral, Qwen2, Qwen3), transformers for all others."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory where answers are long, and more time. `pellucid doctor
    --plan RECIPE` says what it saves for a run."""

    def __post_init__(self) -> None:
        if not self.lora and (self.lora_alpha or self.lora_targets):
            raise ValueError("lora_alpha and lora_targets need an adapter: set lora, its rank")
        if self.load_in_4bit and not self.lora:
            raise ValueError("load_in_4bit needs an adapter: set lora, its rank")

    @property
    def access(self) -> ModelAccess:
        """How the files of the model may be read."""
        return ModelAccess(self.revision, self.trust_remote_code)

    def get_access(self, name: str) -> ModelAccess:
        """Return `access` if `name` is the model; no other is trusted."""
        return self.access if name == self.model else DEFAULT_ACCESS


@dataclass(frozen=True)
class SamplerConfig:
    """`[sampler]`: how completions are sampled."""

    name: Literal["native", "hf", "vllm", "sglang"] = "native"
    """native: our decoder. hf: transformers, slow. vllm: vLLM in this process or, with urls, on other machines. sglang:
    SGLang servers at urls. The log-probs of both differ slightly, so algorithm.correction defaults to "token"."""
    temperature: float = 1.0
    """Temperature of sampling and of the log-probs that are trained on. Evaluation adds greedy answers."""
    max_tokens: PositiveInt = 64
    """Longest completion, in tokens; in a conversation, everything after the question counts."""
    turns: PositiveInt = 8
    """How many times the policy may speak in a conversation."""
    turn_tokens: NonNegativeInt = 0
    """The most tokens per turn; 0 is as many as max_tokens leaves."""
    rows: PositiveInt = 256
    """Completions that the native sampler decodes at once; as some finish, the next prompts take their place."""
    top_k: NonNegativeInt = 0
    """Sample from the k likeliest tokens only; train on the truncated policy (sampling masks); 0 is off."""
    top_p: _PositiveFraction = 1.0
    """Sample from the likeliest tokens that together have this probability; train on the truncated policy; 1 is off."""
    min_p: _Fraction = 0.0
    """Sample from tokens at least this many times as likely as the likeliest; train on the truncated policy; 0 is
    off."""
    ahead: Literal[0, 1] = 0
    """With 1 and vllm or sglang, the next step is sampled while this one is trained, from weights one step old."""
    cache_gb: PositiveFloat = 4.0
    """Memory of the keys and values of vLLM, in GB."""
    adapter: Literal["merged", "request"] = "merged"
    """How vLLM is given a LoRA adapter: merged into its base, as whole weights; request: the base once and then the
    adapter alone, which it adds to each product. If vLLM cannot do that for an adapter, it is merged."""
    urls: tuple[str, ...] = ()
    """Addresses of servers that sample in place of this process; for vLLM `pellucid sampler` starts one, with its own
    rows and cache_gb. Example: http://gpu2:8001"""
    timeout: PositiveFloat = 120.0
    """Seconds without an answer after which a server counts as hung and its rows go to others."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature = {self.temperature} must be positive: all completions of a greedy group are equal"
            )
        for url in self.urls:
            _check_server_url(url)
        if self.urls and not self.uses_engine:
            raise ValueError(f'urls are for name = "vllm" and "sglang", not "{self.name}"')
        if self.name == "sglang" and not self.urls:
            raise ValueError('name = "sglang" needs urls, the addresses of SGLang servers')
        if self.adapter != "merged" and self.name != "vllm":
            raise ValueError(f'adapter = "{self.adapter}" is for name = "vllm", not "{self.name}"')

    @property
    def uses_engine(self) -> bool:
        """Whether an inference engine with weights of its own samples."""
        return self.name in ("vllm", "sglang")


@dataclass(frozen=True)
class EvaluateConfig:
    """`[evaluate]`: how often and on how many held-out prompts the policy is evaluated."""

    every: NonNegativeInt = 10
    """Steps between evaluations, besides those before and after training; 0 is none at all."""
    n: NonNegativeInt = 100
    """How many held-out prompts are asked; 0 asks all, where a task has a number of them."""
    k: NonNegativeInt = 8
    """The k of mean@k and pass@k; 0 asks for greedy answers only."""
    samples: NonNegativeInt = 0
    """How many samples of each prompt mean@k and pass@k are estimated from; 0 means k."""
    patience: NonNegativeInt = 0
    """After so many evaluations in a row without a new best, the run ends as after its last step; 0 never ends it."""
    top_k: NonNegativeInt = 0
    """Sample from the k likeliest tokens only; 0 is off. Greedy answers do not change."""
    top_p: _PositiveFraction = 1.0
    """Sample from the likeliest tokens that together have this probability; 1 is off."""
    min_p: _Fraction = 0.0
    """Sample from tokens at least this many times as likely as the likeliest; 0 is off."""

    def __post_init__(self) -> None:
        if 0 < self.samples < self.k:
            raise ValueError(f"samples = {self.samples} must be at least k = {self.k}, or 0")


@dataclass(frozen=True)
class CheckpointConfig:
    """`[checkpoint]`: which states of the run are kept."""

    every: NonNegativeInt = 10
    """Steps between checkpoints, besides the one after the last step; 0 is none, except where Ctrl-C asks for one."""
    keep_last: PositiveInt = 2
    """How many checkpoints to keep; if the newest is damaged, --resume uses the one before."""
    keep_finished: Literal["newest", "all", "none"] = "newest"
    """Which of them are kept when the run is finished and its model saved. The newest, with the optimizer's state, lets
    --resume train more steps; none keeps only the model."""
    keep_best: bool = True
    """Also keep the model of the best evaluation, in model-best/: by held-out greedy accuracy, or by mean reward if
    rewards do not say which answers are right. It takes as much disk as a model."""


@dataclass(frozen=True)
class LogConfig:
    """`[log]`: the files and services beside metrics.jsonl and evals.jsonl."""

    tensorboard: bool = False
    """Also write TensorBoard events into the run folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Also log to Weights & Biases; offline writes into the run folder, for `wandb sync` later."""
    project: str = "pellucid"
    """The project at Weights & Biases."""
    rollouts: NonNegativeInt = 1
    """Steps between those whose completions go into rollouts.jsonl, besides step 1; 0 is none at all."""
    tokens: NonNegativeInt = 0
    """How many groups per step have their tokens recorded in tokens/, with what the update did to each token; groups
    that taught something come first. It costs a forward pass of their completions; 0 records none."""
    token_steps: PositiveInt = 1
    """Steps between those whose tokens are recorded, besides step 1."""
    traces: Literal["extremes", "by_length"] = "extremes"
    """Which completions report.html shows of the first and the last step: the best and the worst of all, or of the
    short, the middling and the long each."""


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
    """The names of the task and of the tasks that it wraps, from the outside in. This is no section of a recipe."""

    @property
    def task_name(self) -> str:
        """The name of the innermost task, which has the questions."""
        return self.task_names[-1]


SECTIONS = {name: cls for name, cls in get_type_hints(Config).items() if name != "task_names"}
"""The class of each section by its name. The class of `task` depends on the name of the task."""


def _check_server_url(url: str) -> None:
    parts = split_address(url)
    if parts is None or parts.query or parts.username or parts.password:
        shown = "" if "@" in url else f" {url!r}"  # with "@" it may hold a password
        raise ValueError(
            f"urls:{shown} is not an address: write http://HOST:PORT, and put the secret into PELLUCID_SAMPLER_TOKEN"
        )


# ---------------------------------------------------------------- reading and writing all settings


def load_config(recipe: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Load the settings of a recipe, or of the config.json of a run.

    Args:
        recipe: A TOML file or a config.json. None stands for the defaults.
        overrides: Words of the command line, `--section.key VALUE ...`, which override the file.

    Raises:
        UserError: All unknown keys, or else the first mistake, in one line.
    """
    flags = parse_setting_flags(overrides)
    set_recipe_folder(None)
    values = read_settings(recipe) if recipe else {}
    if "variants" in values and "base" in values:
        raise UserError(f"{recipe} is a study, not a recipe: pellucid study {recipe} trains its variants")
    try:
        return build_config(values, str(recipe or "the default recipe"), flags)
    except MissingFileError as error:
        raise UserError(f"{error}{describe_searched_folders(error.path)}") from error


def build_config(values: SettingsTable, source: str, overrides: SettingsTable | None = None) -> Config:
    """Build the settings from nested sections.

    Args:
        values: The sections, as a recipe has them.
        source: The name of their source in error messages.
        overrides: Sections of the command line, as `parse_setting_flags` returns them, which override `values`.

    Raises:
        UserError: All unknown keys, or else the first mistake, in one line.
    """
    overrides = overrides or {}
    merged = merge_settings(values, overrides)
    mistakes = [
        _Mistake([name], _describe_unknown_key(name, list(SECTIONS)), is_unknown_key=True)
        for name in merged
        if name not in SECTIONS
    ]
    sections = dict[str, Any]()
    for name, cls in SECTIONS.items():
        section = merged.get(name, {})
        try:
            sections[name] = _build_task(section, [name]) if name == "task" else _build_section(cls, section, [name])
        except SettingError as error:
            mistakes += error.mistakes
    if mistakes:
        unknown = [mistake for mistake in mistakes if mistake.is_unknown_key]
        raise UserError(join_mistakes(each.describe(source, overrides) for each in unknown or mistakes[:1]))
    if sections["sampler"].uses_engine and "correction" not in merged.get("algorithm", {}):
        sections["algorithm"] = replace(sections["algorithm"], correction="token")  # a stated "none" is respected
    task, names = sections.pop("task")
    return Config(**sections, task=task, task_names=names)


def resolve_config(config: Config) -> Config:
    """Fill in max_length and the task's seed, which follow from other sections."""
    algorithm = config.algorithm
    length = algorithm.max_length or config.sampler.max_tokens
    return replace(config, algorithm=replace(algorithm, max_length=length), task=with_seed(config.task, algorithm.seed))


def dump_config(config: Config) -> dict[str, Any]:
    """Return all settings as JSON values, which `build_config` accepts."""
    sections = {name: _dump_section(getattr(config, name)) for name in SECTIONS if name != "task"}
    return {**sections, "task": _dump_task(config.task, config.task_names)}


def _dump_section(section: Any) -> dict[str, Any]:
    return _get_type_adapter(type(section)).dump_python((section,), mode="json")[0]


def _dump_task(task: Any, names: Sequence[str]) -> dict[str, Any]:
    inner = {"task": _dump_task(task.task, names[1:])} if len(names) > 1 else {}
    return {**_dump_section(task), **inner, "name": names[0]}


def format_toml(values: SettingsTable) -> str:
    """Format values as TOML. None, which TOML does not have, is left out."""
    return tomli_w.dumps(_drop_none(values))


def _drop_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _drop_none(item) for key, item in value.items() if item is not None}
    return [_drop_none(item) for item in value] if isinstance(value, list | tuple) else value


# ---------------------------------------------------------------- recipe files


def read_settings(path: Path) -> dict[str, Any]:
    """Read the sections of a TOML file or of a run's config.json, unchecked. Raises UserError for another format.

    Paths in a TOML file that exist relative to its folder become relative to the working directory.
    """
    text = ""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows begin files with a byte order mark
        if path.suffix == ".json":
            record = json.loads(text)
            if not isinstance(record, dict):
                raise UserError(f"{path} is not a JSON object of settings, as config.json of a run is")
            return {key: value for key, value in record.items() if key in SECTIONS}
        set_recipe_folder(path.parent)
        return _resolve_relative_paths(tomllib.loads(text), path.parent)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except tomllib.TOMLDecodeError as error:
        hint = QUOTED_PATH_HINT if _BACKSLASH_IN_QUOTES.search(text) else ""
        raise UserError(f"{path}: {error}{hint}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: {error}") from error


def _resolve_relative_paths(values: Any, folder: Path, key_path: _KeyPath = ()) -> Any:
    """Make paths relative to the working directory if they exist from the folder of a recipe."""
    if folder.resolve() == Path().resolve():
        return values
    if isinstance(values, Mapping):
        return {key: _resolve_relative_paths(value, folder, (*key_path, key)) for key, value in values.items()}
    if isinstance(values, list):
        return [_resolve_relative_paths(value, folder, key_path) for value in values]
    return _resolve_relative_path(values, folder, key_path) if isinstance(values, str) else values


def _resolve_relative_path(value: str, folder: Path, key_path: _KeyPath) -> str:
    prefix = REWARD_MODEL_PREFIX if value.startswith(REWARD_MODEL_PREFIX) else ""
    path = value.removeprefix(prefix)
    is_study_base = key_path == ("base",)  # a recipe, which is looked up beside the study
    if is_study_base or not path or "\n" in path or os.path.isabs(os.path.expanduser(path)):
        return value
    joined = os.path.join(folder, path)
    file, _, name = joined.rpartition(":")
    if prefix or (key_path == ("policy", "model") and value != PolicyConfig.model):
        exists = os.path.isfile(os.path.join(joined, "config.json")) or os.path.isfile(joined)
    elif file.endswith(".py") and name.isidentifier():
        exists = os.path.isfile(file)
    elif is_file_pattern(path):
        exists = bool(list_matching_files(joined))
    else:
        exists = bool(Path(path).suffix) and os.path.isfile(joined)
    return prefix + joined if exists else value


# ---------------------------------------------------------------- flags: `--section.key VALUE ...`


class _FlagWords(list[str]):
    """The words after one flag, before the type of its setting is known."""


def _is_setting_flag(word: str) -> bool:
    """Return whether a word is the flag of a setting: `--section.key` or `--section.key=VALUE`."""
    return word.startswith("--") and "." in word.partition("=")[0]


def split_setting_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into those of the command itself, and flags of settings with their values."""
    own: list[str] = []
    settings: list[str] = []
    target = own
    for word in arguments:
        if word.startswith("--"):
            target = settings if _is_setting_flag(word) else own
        target.append(word)
        if "=" in word and _is_setting_flag(word):  # it holds its value
            target = own
    return own, settings


def parse_setting_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Return flags as nested sections, whose values are _FlagWords. The last flag of a setting wins.

    Example: parse_setting_flags(["--task.task.seed", "3"]) == {"task": {"task": {"seed": _FlagWords(["3"])}}}
    """
    nested: dict[str, Any] = {}
    words = None
    for word in flags:
        if word.startswith("--"):
            flag, equals, value = word.removeprefix("--").partition("=")
            *outer, key = flag.replace("-", "_").split(".")
            section = nested
            for name in outer:
                inner = section.get(name)
                section[name] = section = inner if isinstance(inner, dict) else {}
            section[key] = words = _FlagWords([value] if equals else [])
        elif words is None:
            raise UserError(f"{word}: settings are given as --section.key VALUE")
        else:
            words.append(word)
    return nested


def _convert_flag_words(value: Any, field_type: Any, key: str) -> Any:
    """Replace _FlagWords at any depth by values that pydantic accepts for the type. `key` names it in errors."""
    if isinstance(value, _FlagWords):
        return _parse_flag_value(value, field_type, key)
    if isinstance(value, Mapping):
        field_types, item_type = get_field_types(field_type), get_item_type(field_type)
        return {
            name: _convert_flag_words(item, field_types.get(name, item_type), f"{key}.{name}")
            for name, item in _expand_negated_flags(value, field_types)
        }
    if isinstance(value, list):
        return [_convert_flag_words(item, get_item_type(field_type), f"{key}.{i}") for i, item in enumerate(value)]
    return value


def _expand_negated_flags(values: SettingsTable, field_types: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a section, with `--section.no-key` as key = false."""
    for name, value in values.items():
        plain = name.removeprefix("no_")
        is_flag = isinstance(value, _FlagWords) and not value and name not in field_types
        is_negated = is_flag and bool in list_type_alternatives(field_types.get(plain))
        yield (plain, False) if is_negated else (name, value)


def _parse_flag_value(words: _FlagWords, field_type: Any, key: str) -> Any:
    alternatives = list_type_alternatives(field_type)
    if any(_get_type_origin(each) is dict for each in alternatives):
        if len(words) % 2:
            raise UserError(f"{_COMMAND_LINE}: {key} takes names with their values, got {' '.join(words)}")
        item_type = get_item_type(field_type)
        return {name: _parse_word(word, item_type) for name, word in zip(words[::2], words[1::2], strict=True)}
    sequence = next((each for each in alternatives if _get_type_origin(each) in (tuple, list)), None)
    if sequence is not None and (len(words) != 1 or str not in alternatives):
        return [_parse_word(word, get_item_type(sequence)) for word in words]
    if not words and bool in alternatives:
        return True
    if len(words) != 1:
        got = f"got {len(words)}: {' '.join(words)}" if words else "got none"
        raise UserError(f"{_COMMAND_LINE}: {key} takes one value, {got}")
    return _parse_word(words[0], field_type)


def _parse_word(word: str, field_type: Any) -> Any:
    """Return a word as a value that pydantic accepts for the type.

    Pydantic converts strings to numbers and booleans, but not to a number of a Literal or of a union with str.
    """
    alternatives = list_type_alternatives(field_type)
    if any("name" in get_field_types(each) for each in alternatives):  # such as a reward term
        return {"name": word}
    literal_types = [each for each in alternatives if _get_type_origin(each) is Literal]
    literals = {str(value): value for each in literal_types for value in get_args(each)}
    if word in literals or str not in alternatives:
        return literals.get(word, word)
    try:
        value = json.loads(word.lower())  # many write True, as in Python
    except ValueError:
        return word
    is_number = isinstance(value, bool | int | float)
    is_accepted = type(value) in alternatives or (type(value) is int and float in alternatives)
    return value if is_number and is_accepted else word


# ---------------------------------------------------------------- merging


def merge_settings(base: SettingsTable, overrides: SettingsTable) -> dict[str, Any]:
    """Return `base` with the values of `overrides` in place of its own, table by table."""
    return {**base, **{key: _merge_value(key, base.get(key, {}), value) for key, value in overrides.items()}}


def _merge_value(key: str, base: Any, override: Any) -> Any:
    if isinstance(base, list) and isinstance(override, Mapping) and all(index.isdecimal() for index in override):
        if beyond := [index for index in override if int(index) >= len(base)]:
            raise UserError(f"{_COMMAND_LINE}: {key}.{beyond[0]}: the last one is {key}.{len(base) - 1}")
        return list(merge_settings(dict(zip(map(str, range(len(base))), base, strict=True)), override).values())
    if not isinstance(base, Mapping) or not isinstance(override, Mapping):
        return override
    if key == "algorithm":
        return merge_algorithm(base, override)
    return _merge_task(base, override) if key == "task" else merge_settings(base, override)


def merge_algorithm(base: SettingsTable, override: SettingsTable) -> dict[str, Any]:
    """Merge two sections of the algorithm. Stated steps replace the data_epochs of the base.

    Raises UserError if `override` states both, since either says how long a run is.
    """
    if "steps" not in override:
        return merge_settings(base, override)
    if override.get("data_epochs", 0) not in (0, ["0"], ["0.0"]):
        steps, epochs = (format_option(f"algorithm.{key}") for key in ("steps", "data_epochs"))
        raise UserError(f"{steps} and {epochs} both say how long a run is: leave one out")
    return merge_settings({key: value for key, value in base.items() if key != "data_epochs"}, override)


def _merge_task(base: SettingsTable, override: SettingsTable) -> Any:
    """Merge the sections of two tasks. A task of another name replaces the base; a wrapper wraps it."""
    base_name = _get_task_name(base)
    name = _get_task_name(override, base_name)
    if name == base_name:
        return merge_settings(base, override)
    is_wrapper = isinstance(name, str) and is_task_wrapper(load_task_class(name))  # other types are refused later
    return {**override, "task": _merge_value("task", base, override.get("task", {}))} if is_wrapper else override


def _get_task_name(section: SettingsTable, default: Any = Config.task_names[0]) -> Any:
    """Return the name in the section of a task. It may still be words of the command line."""
    name = section.get("name", default)
    return " ".join(name) if isinstance(name, _FlagWords) else name


# ---------------------------------------------------------------- building sections


class _Mistake(NamedTuple):
    key_path: _KeyPath
    message: str
    is_unknown_key: bool = False

    def describe(self, source: str, overrides: SettingsTable) -> str:
        setter = _COMMAND_LINE if _is_key_set(overrides, self.key_path) else source
        return f"{setter}: {'.'.join(self.key_path)}: {self.message}"


class SettingError(UserError):
    """Mistakes in a section: one, or several unknown keys."""

    def __init__(self, *mistakes: _Mistake) -> None:
        super().__init__(join_mistakes(f"{'.'.join(each.key_path)}: {each.message}" for each in mistakes))
        self.mistakes = mistakes


def find_named_task_class(section: Any, key_path: _KeyPath) -> tuple[str, type[Any]]:
    """Return the name in the section of a task, and the class of that name. Raises SettingError if there is none."""
    if not isinstance(section, Mapping):
        raise SettingError(_Mistake(key_path, f"must be a table: [{'.'.join(key_path)}] with name = ..."))
    name = _get_task_name(section)
    if not isinstance(name, str):
        raise SettingError(_Mistake([*key_path, "name"], f"must be a text (got {name!r})"))
    cls = load_task_class(name)
    if not dataclasses.is_dataclass(cls):
        advice = "put @dataclass(frozen=True) above it"
        raise SettingError(_Mistake([*key_path, "name"], f"{name!r} is not a dataclass: {advice}"))
    return name, cls


def _build_task(section: Any, key_path: _KeyPath) -> tuple[Any, tuple[str, ...]]:
    """Return the task of a section, and the names of its tasks from the outside in."""
    name, cls = find_named_task_class(section, key_path)
    own = {key: value for key, value in section.items() if key != "name" or key in get_field_types(cls)}
    if not is_task_wrapper(cls):
        return _build_section(cls, own, key_path), (name,)
    inner, names = _build_task(section.get("task", {}), [*key_path, "task"])
    return _build_section(cls, {**own, "task": inner}, key_path), (name, *names)


def _build_section(cls: Any, values: Any, key_path: _KeyPath) -> Any:
    if not isinstance(values, Mapping):
        raise SettingError(_Mistake(key_path, f"must be a table: [{'.'.join(key_path)}]"))
    try:
        return _get_type_adapter(cls).validate_python((_convert_flag_words(values, cls, ".".join(key_path)),))[0]
    except pydantic.ValidationError as error:
        errors = error.errors()
        unknown = [each["loc"][1:] for each in errors if each["type"] == "unexpected_keyword_argument"]
        mistakes = [_describe_unknown_setting(cls, key_path, inner) for inner in unknown]
        raise SettingError(*(mistakes or [_describe_error(errors[0], key_path)])) from error


@cache
def _get_type_adapter(cls: Any) -> pydantic.TypeAdapter[Any]:
    """Return an adapter for a tuple of one section: the adapter of a dataclass alone would ignore unknown keys."""
    strict = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)
    alone: Any = tuple.__class_getitem__(cls)
    return pydantic.TypeAdapter(alone, config=strict)


_UNION_MEMBER = re.compile(r"(?:literal|tuple)\[.*\]|str|int|float|bool")
"""How pydantic names the type of a union that did not fit, in the place of an error."""


def _describe_error(error: ErrorDetails, key_path: _KeyPath) -> _Mistake:
    """Convert pydantic's error in a section to our words."""
    setting = [*key_path, *(part for part in map(str, error["loc"][1:]) if not _UNION_MEMBER.fullmatch(part))]
    message = f"{error['msg']} (got {reprlib.repr(error['input'])})"
    if error["type"] in ("tuple_type", "list_type") and isinstance(error["input"], Mapping):
        message = f"is a list of tables: write it in double brackets, [[{'.'.join(setting)}]]"
    if error["type"] == "value_error":
        return _Mistake(setting, error["msg"].removeprefix("Value error, "))
    return _Mistake(setting, message + explain_trl_value(".".join(setting), error["input"]))


def _is_key_set(overrides: SettingsTable, key_path: _KeyPath) -> bool:
    """Return whether the command line sets this setting, or a setting of this section."""
    for part in key_path:
        inner = overrides.get(part)
        if not isinstance(inner, Mapping):
            return inner is not None
        overrides = inner
    return bool(overrides)


def _describe_unknown_setting(cls: Any, key_path: _KeyPath, inner: Sequence[int | str]) -> _Mistake:
    message = _describe_unknown_key(str(inner[-1]), _list_keys(cls, inner[:-1]))
    if key_path[0] == "task" and len(inner) == 1:
        tasks = [name for name in TASKS if str(inner[-1]) in get_field_types(load_task_class(name))]
        if tasks:
            message = f"no such key in this task; {' and '.join(tasks)} has it: name the task with task.name"
    return _Mistake([*key_path, *map(str, inner)], message, is_unknown_key=True)


def _describe_unknown_key(key: str, known: Sequence[str]) -> str:
    known_keys = f"; there are {', '.join(known)}" if known else ""
    return f"no such key{explain_trl_name(key) or did_you_mean(key, known) or known_keys}"


def _list_keys(cls: Any, key_path: Sequence[int | str]) -> list[str]:
    """Return the keys of the record at this path in a section."""
    for part in key_path:
        cls = get_item_type(cls) if isinstance(part, int) else get_field_types(cls).get(str(part))
    return list(get_field_types(cls))


# ---------------------------------------------------------------- types of settings


@cache
def get_field_types(field_type: Any) -> Mapping[str, Any]:
    """Return the types of the fields of a dataclass, or of all dataclasses in a union; empty for another type."""
    field_types = dict[str, Any]()
    for cls in list_type_alternatives(field_type):
        if isinstance(cls, type) and dataclasses.is_dataclass(cls):
            try:
                hints = get_type_hints(cls)
            except (NameError, TypeError, SyntaxError) as error:
                raise UserError(f"the types of the fields of {cls.__name__} cannot be read: {error}") from error
            field_types |= {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}
    return field_types


def get_field_default(field: dataclasses.Field[Any], missing: Any = None) -> Any:
    """Return the default of a field, or `missing` if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return missing if field.default is dataclasses.MISSING else field.default


def list_type_alternatives(field_type: Any) -> list[Any]:
    """Return the alternatives of a union, or else a list of the type alone."""
    return list(get_args(field_type)) if get_origin(field_type) in (Union, types.UnionType) else [field_type]


def get_item_type(field_type: Any) -> Any:
    """Return the type of the items of a tuple or a list, or of the values of a dict; Any if it is not known."""
    for each in list_type_alternatives(field_type):
        if _get_type_origin(each) in (tuple, list, dict) and get_args(each):
            return get_args(each)[1 if _get_type_origin(each) is dict else 0]
    return Any


def _get_type_origin(field_type: Any) -> Any:
    return get_origin(field_type) or field_type


# ---------------------------------------------------------------- code and secrets that a file names


def list_user_code(values: SettingsTable) -> list[str]:
    """Return the code outside of this package that sections name, such as "my_task.py:Riddles"."""
    algorithm = values.get("algorithm", {})
    axes = [algorithm.get(key) for key in ("advantage", "objective")] if isinstance(algorithm, Mapping) else []
    tasks = list(_iter_task_sections(values.get("task")))
    names = [*axes, *(name for section in tasks for name in _iter_code_names(section))]
    code = [name for name in names if isinstance(name, str) and ":" in name and not name.startswith(IN_PROCESS_PREFIX)]
    commands = [run for section in tasks if isinstance(run := section.get("run"), str) and run]
    return list(dict.fromkeys([*code, *commands]))


def check_key_variables(values: SettingsTable, overrides: Sequence[str], source: Any, advice: str = "") -> None:
    """Raise UserError if a file makes a judge send an environment variable not named like a key.

    The command line may name any variable. The message does not show the name, which may be the key itself; it ends
    with `advice`, or says which flag names the variable.
    """
    for section in _iter_task_sections(merge_settings(values, parse_setting_flags(overrides)).get("task")):
        terms = section.get("rewards")
        for i, term in enumerate(terms if isinstance(terms, list) else []):
            judge = term.get("judge") if isinstance(term, Mapping) else None
            key = judge.get("key") if isinstance(judge, Mapping) else None
            if isinstance(key, str) and not is_key_variable(key):
                setting = f"rewards.{i}.judge.key"
                command_line = f"if you mean another, say so on the command line: --task.{setting} NAME"
                raise UserError(
                    f"{source}: {setting} is sent to an address in this file, so the file may only name a variable that"
                    " looks like a key, *_KEY or *_TOKEN, without SECRET, PRIVATE or PASSWORD;"
                    f" {advice or command_line}"
                )


def _iter_task_sections(section: Any) -> Iterator[SettingsTable]:
    """Yield the section of a task and those of the tasks that it wraps."""
    if isinstance(section, Mapping):
        yield section
        yield from _iter_task_sections(section.get("task"))


def _iter_code_names(section: SettingsTable) -> Iterator[Any]:
    """Yield every value in the section of a task that may name code."""
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


# ---------------------------------------------------------------- recipes and studies in the package, by name


_PACKAGE_ROOT = Path(__file__).resolve().parent
PACKAGED_RECIPES_FOLDER = _PACKAGE_ROOT / "_recipes"
"""The folder of recipes in an installed wheel. In a clone of the repository they are in its folder `recipes`."""
_RECIPE_SUFFIX = ".toml"
_DATA_SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")


def find_recipe(name: str, folder: Path = Path()) -> Path:
    """Return the file of a recipe or a study. Raises UserError if there is none.

    Args:
        name: A path, or the name of a recipe in the package, such as "variants/dapo". The name may leave out its
            folder if it is unique, may have its suffix, and may begin with recipes/, as in the documents.
        folder: The folder that a relative path starts from.
    """
    path = folder / Path(name).expanduser()
    if path.suffix == ".py":
        raise UserError(
            f"{path} is Python, not a recipe: name a function of it as a reward, --task.name dataset --task.data"
            f" DATA.jsonl --task.rewards {name}:FUNCTION, or a class as a task, --task.name {name}:CLASS"
        )
    if path.is_file() and path.suffix.lower() in _DATA_SUFFIXES:
        raise UserError(f"{path} is data, not a recipe: --task.name dataset --task.data {name}")
    if path.exists() and not path.is_dir():
        return path
    wanted, known = name.removeprefix("recipes/").removesuffix(_RECIPE_SUFFIX), find_packaged_recipes()
    matches = [each for each in known if each == wanted] or [each for each in known if _get_recipe_stem(each) == wanted]
    if len(matches) == 1:
        return known[matches[0]]
    if matches:
        raise UserError(f"{path} may be {' or '.join(matches)}: write one of them")
    problem = "is a folder, and no" if path.is_dir() else "there is no such file, and no"
    raise UserError(f"{path}: {problem} recipe of this name{_suggest_recipes(path, wanted, known)}")


def refuse_recipe_as_run(path: str | Path, advice: str) -> None:
    """Raise UserError if a recipe or a study is given as a run. {} in `advice` stands for its path."""
    name = str(path)
    if name.lower().endswith(_RECIPE_SUFFIX):
        raise UserError(f"{name} is a recipe or a study, not a run: {advice.format(name)}")


def describe_recipes() -> dict[str, str]:
    """Return the names of the recipes and studies in the package, each with the first line of its file."""
    return {
        name: path.read_text(encoding="utf-8").partition("\n")[0].strip("# ")
        for name, path in find_packaged_recipes().items()
    }


def find_packaged_recipes() -> dict[str, Path]:
    """Return the files of the recipes and studies in the package by name, such as "variants/dapo"."""
    root = PACKAGED_RECIPES_FOLDER if PACKAGED_RECIPES_FOLDER.is_dir() else _PACKAGE_ROOT.parents[1] / "recipes"
    files = sorted(root.rglob(f"*{_RECIPE_SUFFIX}"), key=lambda path: (len(path.parts), path))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in files}


def _get_recipe_stem(name: str) -> str:
    return name.rpartition("/")[2]


def _suggest_recipes(path: Path, wanted: str, known: Mapping[str, Path]) -> str:
    """Return a hint at a similar name and at files near the path, or at all names if there is neither."""
    stem, stems = _get_recipe_stem(wanted), {_get_recipe_stem(name): name for name in known}
    by_name = "".join(f"; did you mean {stems[each]}?" for each in get_close_matches(stem, stems, n=1))
    near = [file for file in find_nearby_files(path, [_RECIPE_SUFFIX]) if file.resolve() not in known.values()]
    listed = f"; near it: {', '.join(map(str, near[:3]))}" if near else ""
    return by_name + (suggest_file(Path(stem + _RECIPE_SUFFIX), near) or listed) or f"; there are {', '.join(known)}"

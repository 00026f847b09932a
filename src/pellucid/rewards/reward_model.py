"""A reward model: a classifier of transformers reads a prompt with its completion, and its logit is the reward.

It uses its own tokenizer: a conversation goes through its own chat template, which writes all special tokens; a plain
prompt and its completion are one text, with the special tokens that the tokenizer adds to any text. This is the only
file of the folder that needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from jinja2 import TemplateError
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pellucid.models.hf_decode import MODEL_ERRORS, format_error_line
from pellucid.policy.access import ModelAccess
from pellucid.policy.chat_template import prepare_messages
from pellucid.policy.load import explain_load_errors
from pellucid.rewards.parts import PromptCompletion, RewardPart
from pellucid.rewards.settings import RewardModelSettings
from pellucid.rewards.terms import REWARD_MODEL_PREFIX
from pellucid.types import Completion, Prompt, UserError
from pellucid.utils.hardware import pick_device
from pellucid.utils.plugins import check_hub_online, suggest_path

TokenIds = tuple[int, ...]
"""The token ids of a sequence."""
_NO_TEMPLATE_ERROR = (
    "its tokenizer has no chat template, and the prompt is a conversation: set chat = false, or put"
    " chat_template.jinja, as the model was trained with it, into its folder"
)


class RewardModel:
    """A ModelGrader whose values are logits of a model: a folder, or an id of the Hub.

    The constructor loads it. Raises UserError if it is no sequence classifier, or the settings do not fit it.

    Example: RewardModel("some/reward-model", RewardModelSettings(batch=8)).grade([(prompt, completion)])
    """

    def __init__(self, source: str, settings: RewardModelSettings) -> None:
        self._settings = settings
        device = pick_device(settings.device, "reward_model.device")
        with _explain_load_errors(source, settings):
            config = _load_reward_model_config(source, settings)
            path, access = _locate_reward_model(source, settings), _get_access(settings).build_arguments()
            self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, **access)
            self._max_tokens = _compute_max_tokens(source, settings, config, self._tokenizer)
            arguments: Any = {"dtype": settings.dtype, "output_loading_info": True, **access}
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(path, **arguments)
            model, info = loaded
            if missing := sorted(info["missing_keys"]):  # they would be random
                raise UserError(
                    f"{_format_term_name(source)} has no weights for {missing[0]}, which {type(model).__name__} needs:"
                    " give a model that was trained as a sequence classifier; a language model computes no rewards"
                )
            self._model: PreTrainedModel = model.to(device).eval()
            self._vocabulary_size = cast(torch.nn.Embedding, self._model.get_input_embeddings()).num_embeddings
        text_config = self._model.config.get_text_config()
        text_config.use_cache = False  # no text is continued
        self._pad_token_id = getattr(text_config, "pad_token_id", None)
        self._is_stopped = False

    def grade(self, pairs: Sequence[PromptCompletion]) -> list[RewardPart]:
        """Return one part for each completion, in their order."""
        rows = [self._tokenize(*pair) for pair in pairs]
        # Equal texts are read once: their rewards would differ by rounding between batches, and a group of them would
        # not have zero variance.
        distinct = sorted({row for row in rows if isinstance(row, tuple)}, key=lambda row: (len(row), row))
        graded: dict[TokenIds, RewardPart] = {}
        self._is_stopped = False
        for start in range(0, len(distinct), self._settings.batch):
            if self._is_stopped:
                raise CancelledError
            batch = distinct[start : start + self._settings.batch]
            graded |= zip(batch, self._grade_rows(batch), strict=True)
        return [row if isinstance(row, RewardPart) else graded[row] for row in rows]

    def stop(self) -> None:
        """Cancel the batches that `grade` has not begun in another thread: it raises there."""
        self._is_stopped = True

    def _tokenize(self, prompt: Prompt, completion: Completion) -> TokenIds | RewardPart:
        """Return the tokens that the model reads, or a part with an error if it cannot read the completion."""
        if not isinstance(prompt.text, str) and not self._tokenizer.chat_template:
            return RewardPart(error=_NO_TEMPLATE_ERROR)
        try:
            text = self._render_text(prompt, completion)
            ids = tuple[int, ...](self._tokenizer(text, add_special_tokens=isinstance(prompt.text, str))["input_ids"])
            if isinstance(prompt.text, str) and ids[:2] == (self._tokenizer.bos_token_id,) * 2:
                ids = ids[1:]  # the prompt has it already
        except (TemplateError, *MODEL_ERRORS) as error:
            return RewardPart(error=format_error_line(error))
        if not ids:
            return RewardPart(error="the text has no tokens")
        if len(ids) > self._max_tokens:
            return RewardPart(error=f"{len(ids)} tokens are more than the {self._max_tokens} that it reads")
        if max(ids) >= self._vocabulary_size:  # on a GPU that would end the run
            return RewardPart(
                error=f"its tokenizer produced token id {max(ids)}, but its embedding has {self._vocabulary_size}"
                " entries"
            )
        return ids

    def _render_text(self, prompt: Prompt, completion: Completion) -> str:
        if isinstance(prompt.text, str):
            return prompt.text + completion.text
        answer = ({"role": "assistant", "content": completion.full_text},)
        added = completion.messages if len(completion.messages) > 1 else answer
        # Tool calls and their results are written into texts if the model's template would leave them out.
        messages, _ = prepare_messages(self._tokenizer, (*prompt.text, *added))
        return cast(str, self._tokenizer.apply_chat_template(messages, tokenize=False))

    def _grade_rows(self, rows: Sequence[TokenIds]) -> list[RewardPart]:
        """Return a part for each row of token ids.

        If they fail together, as when memory runs out, each half is tried, down to the row that fails alone.
        """
        try:
            return [build_part(logit) for logit in self._compute_logits(rows)]
        except (MemoryError, *MODEL_ERRORS) as error:
            description = format_error_line(error)
        # After the handler: the error holds on to the tensors of the whole batch.
        half = len(rows) // 2
        if not half:
            return [RewardPart(error=description)]
        return self._grade_rows(rows[:half]) + self._grade_rows(rows[half:])

    @torch.inference_mode()
    def _compute_logits(self, rows: Sequence[TokenIds]) -> list[float]:
        """Return the logit of each row of token ids.

        A decoder has it at the last token that is no padding. If the model has no padding token, the rows are padded
        with a token that ends none of them.
        """
        pad = self._pad_token_id
        if pad is None or not 0 <= pad < self._vocabulary_size:
            pad = min(set(range(len(rows) + 1)) - {row[-1] for row in rows})
            self._model.config.get_text_config().pad_token_id = pad
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad)
        mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], batch_first=True)
        device = self._model.device
        logits = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits  # [rows, labels]
        return logits[:, self._settings.label].tolist()


def build_part(logit: float) -> RewardPart:
    return RewardPart(logit) if math.isfinite(logit) else RewardPart(error=f"its logit is {logit}")


# ---------------------------------------------------------------- loading


def _load_reward_model_config(source: str, settings: RewardModelSettings) -> PreTrainedConfig:
    """Return the configuration. Raises UserError if the model is no classifier, or one without the label."""
    config = AutoConfig.from_pretrained(
        _locate_reward_model(source, settings), **_get_access(settings).build_arguments()
    )
    has_custom_class = "AutoModelForSequenceClassification" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not has_custom_class:
        raise UserError(
            f"{_format_term_name(source)}: transformers has no classifier of the architecture {config.model_type}"
        )
    labels = config.id2label or {}
    if settings.label >= len(labels):
        known = ", ".join(f"{i} {name}" for i, name in sorted(labels.items()))
        raise UserError(f"{_format_term_name(source)}: reward_model.label = {settings.label}: its labels are {known}")
    return config


def _compute_max_tokens(
    source: str, settings: RewardModelSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Return how many tokens a sequence may have. Raises UserError if the settings ask for more than it reads."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    most = min(tokenizer.model_max_length, positions or tokenizer.model_max_length)
    if settings.max_tokens > most:
        raise UserError(
            f"{_format_term_name(source)}: reward_model.max_tokens = {settings.max_tokens}: it reads {most} at most"
        )
    return settings.max_tokens or most


@cache
def compute_weights_gb(source: str, settings: RewardModelSettings) -> float:
    """Return the size of the weights in GB, from the configuration alone. Raises UserError as loading does."""
    with _explain_load_errors(source, settings), torch.device("meta"):
        config = _load_reward_model_config(source, settings)
        chosen = {} if settings.dtype == "auto" else {"dtype": getattr(torch, settings.dtype)}
        trusted = settings.trust_remote_code
        model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=trusted, **chosen)
    return sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9


def _format_term_name(source: str) -> str:
    return f'reward "{REWARD_MODEL_PREFIX}{source}"'


def _locate_reward_model(source: str, settings: RewardModelSettings) -> str:
    """Return the folder, or the name itself if it must be an id of the Hub. Raises UserError if it can be neither."""
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(
                f"{_format_term_name(source)} is a folder without config.json: give the folder of a saved model"
            )
        if settings.revision:
            raise UserError(
                f"{_format_term_name(source)}: reward_model.revision = {settings.revision!r} is for models of the Hub:"
                " omit it"
            )
        return str(path)
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
        raise UserError(f"{_format_term_name(source)}: there is no such folder{suggest_path(path)}")
    check_hub_online()
    return source


def _explain_load_errors(source: str, settings: RewardModelSettings) -> AbstractContextManager[None]:
    hint = "; give a folder with config.json and safetensors, or a Hub id that is reachable"
    return explain_load_errors(
        _format_term_name(source), _get_access(settings), lambda: suggest_path(Path(source)) or hint
    )


def _get_access(settings: RewardModelSettings) -> ModelAccess:
    return ModelAccess(settings.revision, settings.trust_remote_code, "set reward_model.trust_remote_code")

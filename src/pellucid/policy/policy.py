"""A causal language model and its tokenizer, as the algorithm sees them: `score(batch)`, and what the samplers need."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pellucid.algorithm.batch import Batch
from pellucid.algorithm.grpo import Scores
from pellucid.machine.extras import extra
from pellucid.models.decoder import PLAIN, Decoder, compiled
from pellucid.models.decoding import DecodeBatch
from pellucid.models.fallback import FallbackDecodeBatch
from pellucid.models.family import fallback_reason
from pellucid.models.masters import on_cpu
from pellucid.policy import pretrained
from pellucid.policy.logprobs import Head
from pellucid.policy.scorer import Scorer, check_head
from pellucid.types import Prompt, UserError

BASE_STAYS = "algorithm.reference_every: the reference of a LoRA policy is its base, which stays as it is: set 0"


class Policy:
    """Master weights in fp32 (`model`), computed with in `dtype`; `module` is what a runtime may wrap."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
        entropy_grad: bool = False,
        gradient_checkpointing: bool = False,
        adapter: Any = None,
        engine: str = "auto",
        masters: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.dtype, self.adapter = silence_dropout(model), tokenizer, dtype, adapter
        self.engine, self._masters = engine, masters or {}
        self.decoder = None if self.fallback_reason() else Decoder(model.config, model, dtype)
        pieces = compiled() if engine == "compiled" else PLAIN
        self.scorer = Scorer(model, self.decoder, dtype, temperature, entropy_grad, gradient_checkpointing, pieces)
        self.module: nn.Module = self.scorer
        self.eos_ids = eos_ids(model, tokenizer)
        self.end_id = end_of_answer(tokenizer, self.eos_ids)
        self.context_length: int = getattr(model.config, "max_position_embeddings", None) or 2**31
        self._copy: PreTrainedModel | None = None

    @property
    def device(self) -> torch.device:
        return self.model.device

    def score(self, batch: Batch) -> Scores:
        """Log-probs and entropy of the response tokens under the policy as it is now, [B, T], with gradient."""
        return self.module(batch)

    @torch.no_grad()
    def embed(self, batch: Batch, layer: int) -> Tensor:
        """[B, D]: the output of a layer averaged over the response; 0 is the embedding, -1 the last layer."""
        return self.scorer.embed(batch, layer)

    def measure_kl(self, reference: Policy | AdapterOff) -> None:
        """Let `score` also compute the exact KL to this reference from now on."""
        self.scorer.reference = reference

    @torch.no_grad()
    def follow(self, weights: Mapping[str, Tensor], decay: float) -> None:
        """Set these weights to decay * themselves + (1 - decay) * `weights`."""
        for name, p in self.weights().items():
            p.lerp_(weights[name].to(p), 1 - decay)

    def hidden(self, batch: Batch) -> tuple[Tensor, Head]:
        """The states [N, D] that response tokens are predicted from, row by row, and the head that reads them."""
        return self.scorer.hidden(batch)

    def fallback_reason(self) -> str:
        """Why this model is computed by transformers and not by our decoder; empty where our decoder does."""
        if self.engine == "transformers":
            return "policy.engine"
        return "an adapter" if self.adapter is not None else fallback_reason(self.model.config)

    def decode_batch(self, rows: int) -> DecodeBatch | FallbackDecodeBatch:
        """An empty DecodeBatch with room for `rows` rows, of the weights as they are now."""
        return DecodeBatch(self.decoder, rows) if self.decoder else FallbackDecodeBatch(self.inference_model(), rows)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids up to where the model goes on, the prompt's prefix included."""
        return self.encode_question(prompt) + self.encode_prefix(prompt)

    def encode_question(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids up to where the answer begins. UserError where there is no token to predict the next one from."""
        if not (ids := self._question_ids(prompt)):
            raise UserError(
                f"prompt {prompt.id} is empty, and this tokenizer puts no token before a text: ask something"
            )
        return ids

    def _question_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Messages without a chat template are their contents, a line each."""
        if not isinstance(prompt.text, str) and self.tokenizer.chat_template:
            messages = [dict(message) for message in prompt.text]
            encoded: Any = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            return tuple(encoded["input_ids"])
        text = prompt.text if isinstance(prompt.text, str) else "".join(m["content"] + "\n" for m in prompt.text)
        return tuple(self.tokenizer(text)["input_ids"])

    def encode_prefix(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of the prefix, tokenized on its own as if generated: the question's last token stays as it is."""
        return tuple(self.tokenizer(prompt.prefix, add_special_tokens=False)["input_ids"]) if prompt.prefix else ()

    def decode(self, token_ids: Sequence[int], special: bool = False) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not special))

    @torch.no_grad()
    def inference_model(self) -> PreTrainedModel:
        """The weights as they are now in the compute dtype: the model itself, or a copy brought up to date."""
        if all(p.dtype == self.dtype for p in self.model.parameters()):
            return self.model
        if self._copy is None:
            # Frozen weights in the right dtype are shared, not copied.
            shared = {id(p): p for p in self.model.parameters() if not p.requires_grad and p.dtype == self.dtype}
            self._copy = copy.deepcopy(self.model, memo=dict(shared))
            for p in self._copy.parameters():
                p.requires_grad_(False)
                # Buffers keep their dtype: rotary frequencies in bf16 would move every position.
                p.data = p.data.to(self.dtype)
        for mine, master in zip(self._copy.parameters(), self.model.parameters(), strict=True):
            if mine is not master:
                mine.copy_(master)
        return self._copy

    def trainable(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def masters(self) -> dict[str, Tensor]:
        """The fp32 masters that an offloading optimizer keeps on the CPU, by name; else the trainable weights."""
        return {name: self._masters.get(name, p) for name, p in self.trainable().items()}

    @torch.no_grad()
    def load_trainable(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `masters` gave. UserError where the tensors are another model's."""
        masters = self.masters()
        if masters.keys() != tensors.keys():
            raise UserError("the checkpoint was made with another policy.model or policy.lora: resume with the same")
        for name, p in self.trainable().items():
            p.copy_(masters[name].copy_(tensors[name]))

    def weights(self) -> dict[str, Tensor]:
        """All parameters by name, frozen or not."""
        return dict(self.model.named_parameters())

    def save(self, folder: Path) -> None:
        """Save model and tokenizer as transformers does: from the masters, an adapter merged into its base."""
        with self._unrounded():
            model = self.model if self.adapter is None else copy.deepcopy(self.adapter).merge_and_unload()
            model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    @contextmanager
    def _unrounded(self) -> Iterator[None]:
        """The model holds its masters."""
        rounded = {name: p.data for name, p in self.trainable().items()}
        for name, p in self.trainable().items():
            p.data = self.masters()[name].data
        try:
            yield
        finally:
            for name, p in self.trainable().items():
                p.data = rounded[name]


class AdapterOff:
    """The reference of a LoRA policy: the same model without its adapter, frozen by nature."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.device = policy, policy.device

    def score(self, batch: Batch) -> Scores:
        with self.policy.adapter.disable_adapter():
            return self.policy.score(batch)

    def follow(self, weights: Mapping[str, Tensor], decay: float) -> None:
        raise UserError(BASE_STAYS)

    def hidden(self, batch: Batch) -> tuple[Tensor, Head]:
        with self.policy.adapter.disable_adapter():
            return self.policy.hidden(batch)


def silence_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Off for good: with dropout the ratio of a policy to itself is not 1."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every end-of-sequence id that the checkpoint names, wherever it names it."""
    named = [getattr(model.generation_config, "eos_token_id", None), model.config.eos_token_id, tokenizer.eos_token_id]
    ids = {i for entry in named if entry is not None for i in (entry if isinstance(entry, list) else [entry])}
    if not ids:
        raise UserError("policy.model names no end-of-sequence token: no completion could ever end")
    return tuple(sorted(ids))


def end_of_answer(tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int]) -> int:
    """Of several end-of-sequence tokens the one that the chat template puts behind an answer; else the tokenizer's."""
    exchange = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    encoded: Any = tokenizer.apply_chat_template(exchange, return_dict=True) if tokenizer.chat_template else {}
    said = [token for token in encoded.get("input_ids", []) if token in eos_ids]
    own = [token for token in eos_ids if token == tokenizer.eos_token_id]
    return [*said[::-1], *own, *eos_ids][0]


def load(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    temperature: float,
    entropy_grad: bool = False,
    gradient_checkpointing: bool = False,
    lora: int = 0,
    engine: str = "auto",
    narrow: bool = False,
) -> Policy:
    """The policy to train. `lora` > 0 trains an adapter of that rank on every linear layer over a frozen base.

    narrow: the matrices in `dtype`, for an optimizer that keeps their masters on the CPU; vectors stay in fp32.
    """
    model, tokenizer = pretrained.load(name, dtype if lora else torch.float32)
    check_head(model)
    adapter = add_adapter(model, lora) if lora else None
    masters = narrowed(model, dtype, device) if narrow else None
    move(model, device)
    return Policy(model, tokenizer, dtype, temperature, entropy_grad, gradient_checkpointing, adapter, engine, masters)


@torch.no_grad()
def narrowed(model: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Rounds the matrices of a model but those of an adapter; what is trained as it was, for steps on `device`."""
    masters = {name: on_cpu(p, device) for name, p in model.named_parameters() if p.requires_grad}
    for name, p in model.named_parameters():
        p.data = p.data.to(torch.float32 if p.ndim < 2 or "lora_" in name else dtype)
    return masters


def load_frozen(
    name: str, device: torch.device, dtype: torch.dtype, temperature: float, engine: str = "auto"
) -> Policy:
    """A reference or a model to evaluate: no gradient."""
    model, tokenizer = pretrained.load(name, torch.float32)
    move(model, device).requires_grad_(False)
    return Policy(model, tokenizer, dtype, temperature, engine=engine)


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """transformers types its own `to` for quantised models only."""
    return model.to(device)


def add_adapter(model: PreTrainedModel, rank: int) -> Any:
    peft = extra("peft", "lora", "policy.lora")
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))

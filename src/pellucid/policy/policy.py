"""A causal language model and its tokenizer, as the algorithm sees them: `score(batch)`, and what the samplers need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pellucid.algorithm.batch import Batch
from pellucid.algorithm.grpo import Scores
from pellucid.models import fused_check
from pellucid.models.decode import DecodeBatch
from pellucid.models.decoder import (
    EAGER_LAYER_FUNCTIONS,
    Decoder,
    compile_layer_functions,
    find_fallback_reason,
    get_context_length,
)
from pellucid.models.hf_decode import FallbackDecodeBatch
from pellucid.models.linear import POLICY_MISMATCH, ShardedModule, gather_full_tensor
from pellucid.policy import load
from pellucid.policy.chat_template import (
    RENDER_ERRORS,
    ChatTemplate,
    encode_prefix,
    encode_question,
    find_token_fault,
    format_template_error,
)
from pellucid.policy.load import (
    DEFAULT_ACCESS,
    ModelAccess,
    add_adapter,
    cast_matrices,
    copy_model,
    find_eos_ids,
    has_custom_code,
    is_quantized,
    move_to_device,
    pick_end_token,
    save_config,
    silence_dropout,
)
from pellucid.policy.logprobs import LMHead
from pellucid.policy.lora import add_matching_adapter, merge_adapter_weights, set_base_name
from pellucid.policy.scorer import HiddenStateModel, Scorer, check_lm_head
from pellucid.policy.text import TokenBytes, strip_eos
from pellucid.types import DataError, Prompt, UserError

CPU = torch.device("cpu")


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
        load_base: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]] | None = None,
    ) -> None:
        """read_base: reads in fp32 what the base of an adapter was before it became 4-bit numbers."""
        self.model, self.tokenizer, self.dtype, self.adapter = silence_dropout(model), tokenizer, dtype, adapter
        self.engine, self._masters, self._load_base = engine, masters or {}, load_base
        self.device = model.device
        """Where it computes; an engine may keep its parameters elsewhere meanwhile."""
        self.decoder = None if self.find_fallback_reason() else Decoder(model.config, model, dtype)
        pieces = compile_layer_functions() if engine == "compiled" else EAGER_LAYER_FUNCTIONS
        self.scorer = Scorer(model, self.decoder, dtype, temperature, entropy_grad, gradient_checkpointing, pieces)
        self.module: nn.Module = self.scorer
        self.sharded_modules: Sequence[ShardedModule] = ()
        """What an engine has sharded: all parameters."""
        self.eos_ids = find_eos_ids(model, tokenizer)
        self.end_id = pick_end_token(tokenizer, self.eos_ids)
        self.context_length = get_context_length(model.config.get_text_config())
        self.vocabulary_size = len(cast(nn.Embedding, model.get_input_embeddings()).weight)
        """The number of tokens that it has embeddings of."""
        self._inference_copy: PreTrainedModel | None = None

    def score(self, batch: Batch) -> Scores:
        """Log-probs and entropy of the response tokens under the policy as it is now, [B, T], with gradient."""
        return self.module(self.scorer.score, batch)

    @torch.no_grad()
    def embed(self, batch: Batch, layer: int) -> Tensor:
        """[B, D]: the output of a layer averaged over the response; 0 is the embedding, -1 the last layer."""
        if self.decoder:
            self.gather()  # it is not our decoder that computes this, and no engine gathers for transformers' modules
            return self.scorer.embed(batch, layer)
        return self.module(self.scorer.embed, batch, layer)

    def set_kl_reference(self, reference: HiddenStateModel) -> None:
        """Let `score` also compute the exact KL to this reference from now on."""
        self.scorer.reference = reference

    @torch.no_grad()
    def update_weights(self, weights: Mapping[str, Tensor], decay: float) -> None:
        """Set these weights to decay * themselves + (1 - decay) * `weights`."""
        for name, p in self.weights().items():
            p.lerp_(weights[name].to(p), 1 - decay)

    def compute_hidden_states(self, batch: Batch) -> tuple[Tensor, LMHead]:
        """The states [N, D] that response tokens are predicted from, row by row, and the head that reads them."""
        return self.module(self.scorer.compute_hidden_states, batch)

    def find_fallback_reason(self) -> str:
        """Why this model is computed by transformers and not by our decoder; empty where our decoder does."""
        if self.engine == "transformers":
            return "policy.engine"
        if has_custom_code(self.model):
            return "code of its own"
        if self.adapter is not None:
            return "an adapter on a 4-bit base" if self._load_base else "an adapter"
        return find_fallback_reason(self.model.config)

    def create_decode_batch(self, rows: int, int8: bool = False) -> DecodeBatch | FallbackDecodeBatch:
        """An empty DecodeBatch with room for `rows` rows, of the weights as they are now.

        int8: with products of its layers in int8, where `fusing.int8_fault` is empty.
        """
        if self.decoder:
            self.gather()
            return DecodeBatch(self.decoder, rows, fused_check.select_fused_decoder(self.decoder, int8))
        twin = self._inference_copy if self.sharded_modules else None  # `gather` has brought it up to date
        return FallbackDecodeBatch(twin or self.get_inference_model(), rows)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids up to where the model goes on, the prompt's prefix included."""
        return self.encode_question(prompt) + self.encode_prefix(prompt)

    def encode_question(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids up to where the answer begins.

        DataError where the chat template raises, there is no token to predict the next one from, or one that the model
        does not have.
        """
        named = f"prompt {prompt.id}: " if prompt.id else ""
        try:
            ids = encode_question(self.tokenizer, prompt)
        except RENDER_ERRORS as error:
            raise DataError(f"{named}{format_template_error(error)}") from error
        if fault := find_token_fault(ids, self.vocabulary_size):
            raise DataError(f"{named}{fault}")
        return ids

    def encode_prefix(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of the prefix; none where there is none."""
        return encode_prefix(self.tokenizer, prompt)

    def decode(self, token_ids: Sequence[int], special: bool = False) -> str:
        """Return the text of tokens; of all of them, or without special ones and an end of sequence behind the others.

        Not every tokenizer flags each of its end-of-sequence tokens as special.
        """
        if not special:
            token_ids = strip_eos(token_ids, self.eos_ids)
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not special))

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token, for answers that tell them."""
        return TokenBytes(self.tokenizer)

    def blocks(self) -> list[nn.Module]:
        """The layers, for an engine that gathers the parameters of one at a time and makes this policy `sharded`."""
        if self.decoder:
            self.decoder.disable_cast_copies()
            return list(self.decoder.layers)
        self._inference_copy = copy_model(self.model, self.dtype)
        kinds = set(self.model._no_split_modules or ())
        return [module for module in self.model.modules() if type(module).__name__ in kinds]

    def list_external_parameters(self) -> list[tuple[nn.Module, list[nn.Parameter]]]:
        """Modules, and parameters that they compute with and that stand in others, for an engine which asks."""
        if self.decoder:
            layers = [(layer, list(layer.parameters())) for layer in self.blocks()]
            of_layers = {id(p) for _, parameters in layers for p in parameters}
            return [(self.scorer, [p for p in self.model.parameters() if id(p) not in of_layers]), *layers]
        self._inference_copy = copy_model(self.model, self.dtype, share=False)  # what is there is emptied in place
        return [(self.scorer, list(cast(nn.Module, self.model.get_output_embeddings()).parameters()))]

    @property
    def gathered_dtype(self) -> torch.dtype | None:
        """The dtype in which layers are gathered; None is that of the parameters, which transformers casts itself."""
        return self.dtype if self.decoder else None

    @torch.no_grad()
    def gather(self) -> None:
        """Bring up to date what samplers read. Processes that share the parameters call this together.

        Where they are sharded, whole weights in the compute dtype stay until the layers compute for themselves again.
        """
        if not self.decoder and self.sharded_modules:
            self.get_inference_model()
            return
        for module in self.sharded_modules:
            module.unshard()

    def reshard(self) -> None:
        """Drop what `gather` gathered: the parameters are to be read or changed as they are."""
        for module in self.sharded_modules:
            module.reshard()

    @torch.no_grad()
    def get_inference_model(self) -> PreTrainedModel:
        """The weights as they are now in the compute dtype: the model itself, or a copy brought up to date."""
        if self.sharded_modules and self.decoder:
            self.gather()
            return self.model
        if not self.sharded_modules and all(
            p.dtype == self.dtype for p in self.model.parameters() if not is_quantized(p)
        ):
            return self.model
        if self._inference_copy is None:
            self._inference_copy = copy_model(self.model, self.dtype)
        for mine, master in zip(self._inference_copy.parameters(), self.model.parameters(), strict=True):
            if mine is not master and (master.requires_grad or not self.sharded_modules):
                mine.copy_(gather_full_tensor(master))
        return self._inference_copy

    def trainable(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def masters(self) -> dict[str, Tensor]:
        """The fp32 masters that an offloading optimizer keeps on the CPU, by name; else the trainable weights."""
        self.reshard()
        return {name: self._masters.get(name, p) for name, p in self.trainable().items()}

    @torch.no_grad()
    def load_trainable(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `masters` gave. UserError where the tensors are another model's."""
        masters = self.masters()
        if masters.keys() != tensors.keys():
            raise UserError(POLICY_MISMATCH)
        for name, p in self.trainable().items():
            p.copy_(masters[name].copy_(tensors[name]))

    def weights(self) -> dict[str, Tensor]:
        """All parameters by name, frozen or not; of sharded ones this process's part."""
        self.reshard()
        return dict(self.model.named_parameters())

    def save_config(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Save what transformers needs besides the weights: configuration and tokenizer.

        dtype: the dtype of the saved weights; None is the dtype that the model was loaded in.
        """
        save_config(self.model, folder, dtype)
        self.tokenizer.save_pretrained(folder)

    def save(
        self, folder: Path, merged_model: PreTrainedModel | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        """Save model and tokenizer as transformers does: from the masters, an adapter merged into its base.

        merged: the result of `merged`, if it has been computed already. dtype: float32 saves the weights unrounded,
        bfloat16 and float16 round them to half the size.
        """
        with self._hold_masters():
            model = merged_model or (self.build_merged_model(self.masters(), CPU) if self.adapter else self.model)
            model = model if dtype == torch.float32 else copy_model(model, dtype)
            model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def build_merged_model(self, masters: Mapping[str, Tensor], device: torch.device | None = None) -> PreTrainedModel:
        """Return a copy in fp32 with the adapter merged into its base.

        In bf16 the sum of a weight and its update would mostly round to the weight again. The base is the one that the
        policy computes with; in place of a base in 4 bits it is the base on disk.

        masters: whole weights of the adapter. device: where the copy goes; None is the device of the policy, or the CPU
        for a base that is read from disk.

        Where processes share the parameters, `gather` has been called in all of them, and this in one.
        """
        if self._load_base:
            return merge_adapter_weights(add_matching_adapter(self._load_base()[0], self.adapter), masters)
        computing = self._inference_copy if self.sharded_modules else None
        return merge_adapter_weights(
            copy_model(computing or self.model, torch.float32, share=False, device=device), masters
        )

    @contextmanager
    def _hold_masters(self) -> Iterator[None]:
        """The model holds its masters."""
        rounded = {name: p.data for name, p in self.trainable().items()}
        for name, p in self.trainable().items():
            p.data = self.masters()[name].data
        try:
            yield
        finally:
            for name, p in self.trainable().items():
                p.data = rounded[name]


def load_policy(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    temperature: float,
    entropy_grad: bool = False,
    gradient_checkpointing: bool = False,
    lora_rank: int = 0,
    engine: str = "auto",
    offload_masters: bool = False,
    lora_alpha: float = 0.0,
    lora_targets: Sequence[str] = (),
    template: ChatTemplate = load.DEFAULT_TEMPLATE,
    access: ModelAccess = DEFAULT_ACCESS,
    load_in_4bit: bool = False,
) -> Policy:
    """The policy to train. `lora` > 0 trains an adapter of that rank, as `add_adapter` makes it, over a frozen base.

    narrow: the matrices in `dtype`, for an optimizer that keeps their masters on the CPU; vectors stay in fp32.
    in_4bit: the matrices of the base as 4-bit numbers.
    """
    read = partial(load.load_pretrained, name, dtype if lora_rank else torch.float32, template, access)
    model, tokenizer = read(device if load_in_4bit else None)
    check_lm_head(model)
    adapter = add_adapter(model, lora_rank, lora_alpha, lora_targets) if lora_rank else None
    if adapter:
        set_base_name(adapter, name, access.revision)
    masters = cast_matrices(model, dtype, device) if offload_masters else None
    move_to_device(model, device)
    base = partial(load.load_pretrained, name, torch.float32, template, access) if load_in_4bit else None
    facts = (entropy_grad, gradient_checkpointing, adapter, engine, masters, base)
    return Policy(model, tokenizer, dtype, temperature, *facts)


def load_frozen_policy(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    temperature: float,
    engine: str = "auto",
    template: ChatTemplate = load.DEFAULT_TEMPLATE,
    access: ModelAccess = DEFAULT_ACCESS,
) -> Policy:
    """A reference or a model to evaluate: no gradient."""
    model, tokenizer = load.load_pretrained(name, torch.float32, template, access)
    move_to_device(model, device).requires_grad_(False)
    return Policy(model, tokenizer, dtype, temperature, engine=engine)


# ---------------------------------------------------------------- adapter
# The reference of a policy that trains an adapter.


LORA_REFERENCE_ERROR = (
    "algorithm.reference_every: the reference of a LoRA policy is its base, which stays as it is: set 0"
)


class LoraReference:
    """The reference of a LoRA policy: the same model without its adapter, frozen by nature."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.device = policy, policy.device

    def score(self, batch: Batch) -> Scores:
        with self.policy.adapter.disable_adapter():
            return self.policy.score(batch)

    def update_weights(self, weights: Mapping[str, Tensor], decay: float) -> None:
        raise UserError(LORA_REFERENCE_ERROR)

    def compute_hidden_states(self, batch: Batch) -> tuple[Tensor, LMHead]:
        with self.policy.adapter.disable_adapter():
            return self.policy.scorer.compute_hidden_states(batch)  # asked from within the policy's own forward pass

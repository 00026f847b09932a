"""The policy: a causal language model and its tokenizer, as the algorithm and the samplers use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    Decoder,
    find_fallback_reason,
    get_context_length,
)
from pellucid.models.hf_decode import FallbackDecodeBatch
from pellucid.models.linear import POLICY_MISMATCH, ShardedModule, gather_full_tensor
from pellucid.models.triton_check import select_triton_decoder
from pellucid.policy import load
from pellucid.policy.access import DEFAULT_ACCESS, ModelAccess
from pellucid.policy.chat_template import (
    RENDER_ERRORS,
    ChatTemplate,
    encode_prefix,
    encode_question,
    find_token_fault,
    format_template_error,
)
from pellucid.policy.load import copy_model, is_quantized
from pellucid.policy.logprobs import LMHead
from pellucid.policy.lora import (
    add_matching_adapter,
    find_adapter_fault,
    merge_adapter_weights,
    separate_adapter,
    set_base_name,
)
from pellucid.policy.scorer import HiddenStateModel, Scorer, check_lm_head
from pellucid.policy.stored_weights import StoredWeights
from pellucid.policy.text import TokenBytes, strip_eos
from pellucid.types import DataError, Prompt, UserError

CPU = torch.device("cpu")


class Policy:
    """A causal language model that is trained, or frozen.

    `model` has the master weights, mostly in fp32; forward passes compute in `dtype`. A runtime such as DDP or FSDP may
    replace `module`, through which all forward passes with gradient go.
    """

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
        stored_weights: StoredWeights | None = None,
    ) -> None:
        """Create a policy that computes in `dtype`; its log-probs are those of softmax(logits / temperature).

        Args:
            entropy_grad: whether the entropy has a gradient.
            gradient_checkpointing: recompute activations in the backward pass.
            adapter: the peft model, if an adapter is trained.
            engine: "auto", or "transformers" to compute without our decoder.
            masters: fp32 masters on the CPU by name, if the parameters have a narrower dtype.
            load_base: loads the base of an adapter in fp32, if the policy has it in 4 bits.
            stored_weights: where the weights of placeholders are.
        """
        self.model, self.tokenizer, self.dtype, self.adapter = load.silence_dropout(model), tokenizer, dtype, adapter
        self.engine, self._masters, self._load_base = engine, masters or {}, load_base
        self.device = model.device
        """The device of forward passes. An engine may keep the parameters on another device."""
        self.decoder = None if self.find_fallback_reason() else Decoder(model.config, model, dtype)
        self.scorer = Scorer(model, self.decoder, dtype, temperature, entropy_grad, gradient_checkpointing)
        self.module: nn.Module = self.scorer
        self.sharded_modules: Sequence[ShardedModule] = ()
        """The modules that an engine has sharded; together they have all parameters."""
        self.eos_ids = load.find_eos_ids(model, tokenizer)
        self.end_id = load.pick_end_token(tokenizer, self.eos_ids)
        self.context_length = get_context_length(model.config.get_text_config())
        self.vocabulary_size = len(cast(nn.Embedding, model.get_input_embeddings()).weight)
        """The number of tokens that have an embedding."""
        self._inference_copy: PreTrainedModel | None = None
        self.stored_weights = stored_weights or StoredWeights()
        """The parameters that are placeholders until an engine has read its shards of them."""

    def score(self, batch: Batch) -> Scores:
        """Return log-probs and entropy [B, T] of response tokens, in nats, on the CPU, with gradient; and the exact KL
        to the reference, if one is set.
        """
        return self.module(self.scorer.score, batch)

    @torch.no_grad()
    def embed(self, batch: Batch, layer: int) -> Tensor:
        """Return the output of a layer [B, D], averaged over sampled tokens; 0 is the embedding, -1 the last layer."""
        if self.decoder:
            self.gather()  # transformers' modules compute this, and no engine gathers for them
            return self.scorer.embed(batch, layer)
        return self.module(self.scorer.embed, batch, layer)

    def set_kl_reference(self, reference: HiddenStateModel) -> None:
        """Make `score` compute the exact KL to this reference as well."""
        self.scorer.reference = reference

    @torch.no_grad()
    def update_weights(self, weights: Mapping[str, Tensor], decay: float) -> None:
        """Set the weights to decay * themselves + (1 - decay) * `weights`, as a moving average."""
        for name, p in self.weights().items():
            p.lerp_(weights[name].to(p), 1 - decay)

    def compute_hidden_states(self, batch: Batch) -> tuple[Tensor, LMHead]:
        """Return the hidden states [N, D] that response tokens are predicted from, row by row, and the LM head."""
        return self.module(self.scorer.compute_hidden_states, batch)

    def find_fallback_reason(self) -> str:
        """Return why transformers computes this model instead of our decoder; empty if our decoder does."""
        if self.engine == "transformers":
            return "policy.engine"
        if load.has_custom_code(self.model):
            return "custom code"
        if self._load_base:
            return "an adapter on a 4-bit base"
        return find_fallback_reason(self.model.config) or find_adapter_fault(self.model)

    def create_decode_batch(self, rows: int) -> DecodeBatch | FallbackDecodeBatch:
        """Create an empty batch with `rows` slots, which decodes with the present weights."""
        if self.decoder:
            self.gather()
            kernels = fused_check.select_fused_decoder(self.decoder), select_triton_decoder(self.decoder)
            return DecodeBatch(self.decoder, rows, *kernels)
        copy = self._inference_copy if self.sharded_modules else None  # `gather` has updated it
        return FallbackDecodeBatch(copy or self.get_inference_model(), rows)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt and its prefix."""
        return self.encode_question(prompt) + self.encode_prefix(prompt)

    def encode_question(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt, without its prefix.

        Raise DataError if the chat template raises, there are no tokens, or the model lacks one of them.
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
        """Return the token ids of the prefix of a prompt."""
        return encode_prefix(self.tokenizer, prompt)

    def decode(self, token_ids: Sequence[int], special: bool = False) -> str:
        """Return the text of tokens. Special tokens and a last EOS token are left out unless `special` is true.

        The EOS token is found by its id, since not every tokenizer flags all EOS tokens as special.
        """
        if not special:
            token_ids = strip_eos(token_ids, self.eos_ids)
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not special))

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token."""
        return TokenBytes(self.tokenizer)

    def blocks(self) -> list[nn.Module]:
        """Return the layers, for an engine that gathers the parameters of one layer at a time."""
        if self.decoder:
            self.decoder.disable_cast_copies()
            return list(self.decoder.layers)
        self._inference_copy = copy_model(self.model, self.dtype)
        kinds = set(self.model._no_split_modules or ())
        return [module for module in self.model.modules() if type(module).__name__ in kinds]

    def list_external_parameters(self) -> list[tuple[nn.Module, list[nn.Parameter]]]:
        """Return modules that compute with parameters of other modules, and these parameters, for DeepSpeed."""
        if self.decoder:
            layers = [(layer, list(layer.parameters())) for layer in self.blocks()]
            of_layers = {id(p) for _, parameters in layers for p in parameters}
            return [(self.scorer, [p for p in self.model.parameters() if id(p) not in of_layers]), *layers]
        # Not shared, since the engine empties shared parameters in place.
        self._inference_copy = copy_model(self.model, self.dtype, share=False)
        return [(self.scorer, list(cast(nn.Module, self.model.get_output_embeddings()).parameters()))]

    @property
    def gathered_dtype(self) -> torch.dtype | None:
        """The dtype in which an engine gathers layers; None keeps the parameters' dtype, and transformers casts."""
        return self.dtype if self.decoder else None

    @torch.no_grad()
    def gather(self) -> None:
        """Update the weights that samplers read. Processes that share the parameters call this together.

        Sharded weights stay gathered, in the compute dtype, until the next forward pass or `reshard`.
        """
        if not self.decoder and self.sharded_modules:
            self.get_inference_model()
            return
        for module in self.sharded_modules:
            module.unshard()

    def reshard(self) -> None:
        """Free the gathered weights, before parameters are read or changed."""
        for module in self.sharded_modules:
            module.reshard()

    @torch.no_grad()
    def get_inference_model(self) -> PreTrainedModel:
        """Return the model with the present weights in the compute dtype: itself, or an updated copy."""
        if self.sharded_modules and self.decoder:
            self.gather()
            return self.model
        has_dtype = all(p.dtype == self.dtype for p in self.model.parameters() if not is_quantized(p))
        if has_dtype and not self.sharded_modules:
            return self.model
        if self._inference_copy is None:
            self._inference_copy = copy_model(self.model, self.dtype)
        for p, master in zip(self._inference_copy.parameters(), self.model.parameters(), strict=True):
            if p is not master and (master.requires_grad or not self.sharded_modules):
                p.copy_(gather_full_tensor(master))
        return self._inference_copy

    def trainable(self) -> dict[str, Tensor]:
        """Return the trainable parameters by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def masters(self) -> dict[str, Tensor]:
        """Return the fp32 master weights by name: those on the CPU, if there are any, or the trainable parameters."""
        self.reshard()
        return {name: self._masters.get(name, p) for name, p in self.trainable().items()}

    @torch.no_grad()
    def load_trainable(self, tensors: Mapping[str, Tensor]) -> None:
        """Load master weights that `masters` returned. Raise UserError if they belong to another model."""
        masters = self.masters()
        if masters.keys() != tensors.keys():
            raise UserError(POLICY_MISMATCH)
        for name, p in self.trainable().items():
            p.copy_(masters[name].copy_(tensors[name]))

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters by name, frozen or not; for a sharded one, the shard of this process."""
        self.reshard()
        return dict(self.model.named_parameters())

    def save_config(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Save configuration and tokenizer. dtype: as in `load.save_config`."""
        load.save_config(self.model, folder, dtype)
        self.tokenizer.save_pretrained(folder)

    def save(
        self, folder: Path, merged_model: PreTrainedModel | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        """Save model and tokenizer for `from_pretrained`, with an adapter merged into its base.

        merged_model: the result of `build_merged_model`, if it has been computed.
        """
        if merged_model is None and self.adapter:
            merged_model = self.build_merged_model(self.masters(), CPU)
        if merged_model is not None:
            _save_model(merged_model, folder, dtype)
        else:
            rounded = {name: p.data for name, p in self.trainable().items()}
            for name, p in self.trainable().items():
                p.data = self.masters()[name].data
            try:
                _save_model(self.model, folder, dtype)
            finally:
                for name, p in self.trainable().items():
                    p.data = rounded[name]
        self.tokenizer.save_pretrained(folder)

    def build_merged_model(self, masters: Mapping[str, Tensor], device: torch.device | None = None) -> PreTrainedModel:
        """Return a copy in fp32 with the adapter merged into its base.

        In bf16 the sum of a weight and its update would mostly round to the weight again. A base in 4 bits is loaded
        again, onto the CPU. If processes share the parameters, call `gather` in all of them, then this in one.

        Args:
            masters: the full weights of the adapter by name.
            device: None is the device of the policy.
        """
        if self._load_base:
            return merge_adapter_weights(add_matching_adapter(self._load_base()[0], self.adapter), masters)
        source = (self._inference_copy if self.sharded_modules else None) or self.model
        return merge_adapter_weights(copy_model(source, torch.float32, share=False, device=device), masters)


def _save_model(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    (model if dtype == torch.float32 else copy_model(model, dtype)).save_pretrained(folder)


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
    leave_weights_in_files: bool = False,
) -> Policy:
    """Load the policy to train. Other arguments are those of `Policy`, `load_pretrained` and `add_adapter`.

    Args:
        device: where it computes.
        lora_rank: the rank of an adapter over a frozen base; 0 trains all weights.
        offload_masters: keep matrices in `dtype`, and their fp32 masters on the CPU, for an optimizer that offloads.
        load_in_4bit: keep the matrices of the base in 4 bits (QLoRA).
        leave_weights_in_files: leave the weights in their files if possible (`load_placeholders`), for an engine that
            reads its shards of them.

    Raises:
        UserError: the model cannot be found, loaded or scored.
    """
    base_dtype, stored_weights = dtype if lora_rank else torch.float32, StoredWeights()
    if leave_weights_in_files:
        model, tokenizer, stored_weights = load.load_placeholders(
            name, base_dtype, template, access, engine, lora_targets
        )
    else:
        model, tokenizer = load.load_pretrained(name, base_dtype, template, access, device if load_in_4bit else None)
    if not stored_weights:  # models that our decoder computes have a known head
        check_lm_head(model)
    adapter = load.add_adapter(model, lora_rank, lora_alpha, lora_targets) if lora_rank else None
    if adapter:
        set_base_name(adapter, name, access.revision)
    masters = load.cast_matrices(model, dtype, device) if offload_masters else None
    if stored_weights:
        stored_weights.move_placeholders(model, device)
    else:
        load.move_to_device(model, device)
    return Policy(
        model,
        tokenizer,
        dtype,
        temperature,
        entropy_grad,
        gradient_checkpointing,
        adapter,
        engine,
        masters,
        load_base=partial(load.load_pretrained, name, torch.float32, template, access) if load_in_4bit else None,
        stored_weights=stored_weights,
    )


def load_frozen_policy(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    temperature: float,
    engine: str = "auto",
    template: ChatTemplate = load.DEFAULT_TEMPLATE,
    access: ModelAccess = DEFAULT_ACCESS,
    keep_fp32: bool = False,
    leave_weights_in_files: bool = False,
    merged_adapter: Path | None = None,
) -> Policy:
    """Load a reference, or a model to evaluate, without gradient. The other arguments are those of `load_policy`.

    Our decoder computes with matrices in `dtype`, so only these are kept; transformers' modules also read them in fp32.

    Args:
        keep_fp32: keep matrices in fp32, for `Policy.update_weights` or for an engine that takes one dtype only.
        merged_adapter: the folder of an adapter that was merged into this model in fp32. Base and adapter are separated
            again, because rounding their sum to `dtype` would lose most of the adapter.
    """
    stored_weights = StoredWeights()
    if leave_weights_in_files:
        model, tokenizer, stored_weights = load.load_placeholders(
            name, torch.float32 if keep_fp32 else dtype, template, access, engine
        )
    else:
        model, tokenizer = load.load_pretrained(name, torch.float32, template, access)
    model.requires_grad_(False)
    if stored_weights:
        stored_weights.move_placeholders(model, device)
        return Policy(model, tokenizer, dtype, temperature, engine=engine, stored_weights=stored_weights)
    adapter = separate_adapter(model, merged_adapter) if merged_adapter else None
    by_transformers = engine == "transformers" or load.has_custom_code(model) or find_fallback_reason(model.config)
    if not (keep_fp32 or by_transformers):
        load.cast_matrices(model, dtype, device)
    load.move_to_device(model, device)
    return Policy(model, tokenizer, dtype, temperature, adapter=adapter, engine=engine)


LORA_REFERENCE_ERROR = (
    "algorithm.reference_every: the reference of a LoRA policy is its base, which never changes: set 0"
)


class LoraReference:
    """The reference of a LoRA policy: the same model without its adapter. It never changes."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.device = policy, policy.device

    def score(self, batch: Batch) -> Scores:
        with self.policy.adapter.disable_adapter():
            return self.policy.score(batch)

    def update_weights(self, weights: Mapping[str, Tensor], decay: float) -> None:
        raise UserError(LORA_REFERENCE_ERROR)

    def compute_hidden_states(self, batch: Batch) -> tuple[Tensor, LMHead]:
        with self.policy.adapter.disable_adapter():
            return self.policy.scorer.compute_hidden_states(batch)  # runs within the policy's forward pass

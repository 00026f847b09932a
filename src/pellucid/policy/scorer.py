"""The forward pass: log-probs, entropy and hidden states of the response tokens of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pellucid.algorithm.batch import Batch, copy_to_device, find_tokens
from pellucid.algorithm.grpo import Scores
from pellucid.models.decoder import Decoder, get_context_length
from pellucid.models.hf_decode import (
    HALF_PRECISION_TOLERANCE,
    LOGIT_TOLERANCES,
    MODEL_ERRORS,
    format_error_line,
    measure_relative_difference,
)
from pellucid.models.score import compute_hidden_states
from pellucid.policy.logprobs import LMHead, ScoreContext, compute_token_logprobs
from pellucid.policy.token_stats import TokenStatistics, compute_token_statistics
from pellucid.types import UserError

T = TypeVar("T")
_ScoreHook = Callable[[Batch, Scores, Tensor, ScoreContext], None]
"""Called with a micro-batch, its scores, the hidden states [N, D] of its N scored tokens, all without gradient, and the
context that they were scored with."""


class HiddenStateModel(Protocol):
    """A model to which an exact KL divergence can be computed."""

    def compute_hidden_states(self, batch: Batch) -> tuple[Tensor, LMHead]: ...


class Scorer(nn.Module):
    """The forward pass as a module, since DDP and FSDP wrap the `forward` of a module.

    `forward(scorer.score, batch)` is `scorer.score(batch)`; the same holds for the other methods.
    """

    model: PreTrainedModel

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: Decoder | None,
        dtype: torch.dtype,
        temperature: float,
        entropy_grad: bool,
        gradient_checkpointing: bool,
    ) -> None:
        super().__init__()
        self.decoder, self.dtype, self.device = decoder, dtype, model.device
        # Not as a submodule: the decoder has the modules of the model, and an engine must find each parameter once.
        self.__dict__["model"] = model
        if decoder is None:
            self.body = model
        self.temperature, self.entropy_grad = temperature, entropy_grad
        self.gradient_checkpointing = gradient_checkpointing
        self.reference: HiddenStateModel | None = None
        self.score_hook: _ScoreHook | None = None
        if gradient_checkpointing:
            # transformers 6 will rename it.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})

    def forward(self, method: Callable[..., T], *arguments: Any) -> T:
        return method(*arguments)

    def score(self, batch: Batch) -> Scores:
        """Return log-probs and entropy of the response tokens, [B, T], with gradient.

        They are on the CPU, except those with gradient on CUDA: there the loss is computed without waiting for them.
        """
        mask, reference = batch.scored_mask, self.compute_ref_hidden_states(batch)
        (hidden, head), tokens = (
            self.compute_hidden_states(batch),
            copy_to_device(batch.response_ids[mask], self.device),
        )
        sampling_mask = batch.get_sampling_mask(self.device)
        flat = compute_token_logprobs(
            *(hidden, head, tokens, self.temperature, self.entropy_grad, reference, sampling_mask),
            trained_tokens=self.find_trained_tokens(batch),
        )
        if torch.is_grad_enabled() and self.device.type == "cuda":
            indices = find_tokens(mask, self.device)
            padded = (x.new_zeros(mask.numel()).index_copy(0, indices, x) for x in flat)
            scores = Scores(*(x.view(mask.shape) for x in padded))
        else:
            flat_on_host = torch.stack(flat).to(mask.device)  # one copy
            scores = Scores(*(x.new_zeros(mask.shape).masked_scatter(mask, x) for x in flat_on_host))
        if self.score_hook and batch.token_weights is not None and torch.is_grad_enabled():
            context = ScoreContext(
                head, self.temperature, self.entropy_grad, *(reference or (None, None)), sampling_mask
            )
            detached = Scores(*(x.detach().to(mask.device) for x in scores if x is not None))
            self.score_hook(batch, detached, hidden.detach(), context)
        return scores

    def find_trained_tokens(self, batch: Batch) -> Tensor | None:
        """Return which of the scored tokens [N] may have a gradient, on the CPU; None if that is not known."""
        if batch.token_weights is None or batch.advantages is None:
            return None
        is_trained = batch.token_weights != 0
        if not self.entropy_grad and self.reference is None and batch.ref_logprobs is None:
            is_trained = is_trained & (batch.advantages != 0)
            is_trained = is_trained if batch.loss_mask is None else is_trained & batch.loss_mask
        if batch.likelihood_weights is not None:
            is_trained = is_trained | (batch.likelihood_weights != 0)
        return is_trained[batch.scored_mask]

    def examine(self, batch: Batch) -> TokenStatistics:
        """Return statistics of the distributions of the response tokens, row by row."""
        (hidden, head), tokens = (
            self.compute_hidden_states(batch),
            batch.response_ids[batch.scored_mask].to(self.device),
        )
        context = ScoreContext(head, self.temperature, False, None, None, batch.get_sampling_mask(self.device))
        return compute_token_statistics(hidden, tokens, context)

    def compute_hidden_states(self, batch: Batch) -> tuple[Tensor, LMHead]:
        """Return the hidden states [N, D] from which the N scored tokens are predicted, and the LM head."""
        if self.decoder is None:
            return self.compute_hidden_states_by_transformers(batch).to(self.dtype), get_lm_head(self.model, self.dtype)
        hidden, head = compute_hidden_states(self.decoder, batch, self.gradient_checkpointing)
        return hidden, LMHead(head.tensor, head.masters[0])

    def compute_hidden_states_by_transformers(self, batch: Batch) -> Tensor:
        # transformers recomputes activations only in train mode; dropout is disabled in both modes.
        self.model.train(self.gradient_checkpointing)
        output, starts = self._run_base_model(batch)
        hidden = output.last_hidden_state
        row, t = batch.scored_mask.nonzero(as_tuple=True)
        # The one shift in this project: token t of a response is predicted from the position before it.
        return hidden[row.to(hidden.device), (starts[row] + t - 1).to(hidden.device)]

    @torch.no_grad()
    def compute_ref_hidden_states(self, batch: Batch) -> tuple[Tensor, LMHead] | None:
        if self.reference is None:
            return None
        hidden, head = self.reference.compute_hidden_states(batch)
        device = self.device  # the reference may be on another device
        bias = None if head.bias is None else head.bias.to(device)
        return hidden.to(device), head._replace(weight=head.weight.to(device), bias=bias)

    def embed(self, batch: Batch, layer: int) -> Tensor:
        """Return the output of a layer [B, D], averaged over the sampled tokens."""
        self.model.eval()
        output, starts = self._run_base_model(batch, output_hidden_states=True)
        row, t = batch.action_mask.nonzero(as_tuple=True)
        states = output.hidden_states[layer].to(batch.response_mask.device)[row, starts[row] + t].float()  # [N, D]
        sums = states.new_zeros(len(batch), states.shape[-1]).index_add_(0, row, states)
        return sums / batch.action_mask.sum(-1, keepdim=True)

    def _run_base_model(self, batch: Batch, **options: bool) -> tuple[Any, Tensor]:
        """Return the output of transformers' model, and the starts of responses [B]."""
        input_ids, starts = join_sequences(batch)
        if input_ids.shape[1] > (limit := get_context_length(self.model.config.get_text_config())):
            raise UserError(f"a row of {input_ids.shape[1]} tokens exceeds the context length of this model, {limit}")
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype in (torch.bfloat16, torch.float16)):
            # No token attends to the padding on its right: no attention mask is needed, and positions are the default.
            return self.model.base_model(input_ids=input_ids.to(self.device), use_cache=False, **options), starts


def join_sequences(batch: Batch) -> tuple[Tensor, Tensor]:
    """Join prompt and response of each row. Return them padded on the right [B, S], and the starts of responses [B]."""
    prompts = [torch.tensor(ids, device=batch.response_mask.device) for ids in batch.prompt_ids]
    lengths = batch.response_mask.sum(-1).tolist()
    rows = [
        torch.cat([prompts[p], response[:length]])
        for p, response, length in zip(batch.prompt_indices.tolist(), batch.response_ids, lengths, strict=True)
    ]
    starts = torch.tensor([len(ids) for ids in batch.prompt_ids], device=batch.response_mask.device)[
        batch.prompt_indices
    ]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), starts


def get_lm_head(model: PreTrainedModel, dtype: torch.dtype) -> LMHead:
    config: Any = model.config.get_text_config()
    output: Any = model.get_output_embeddings()
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0)
    bias = None if getattr(output, "bias", None) is None else output.bias.to(dtype)
    softcap = getattr(config, "final_logit_softcapping", None) or 0.0
    return LMHead(output.weight.detach().to(dtype), output.weight, bias, scale, softcap)


def check_lm_head(model: PreTrainedModel) -> None:
    """Raise UserError if a model changes its logits in a way that `get_lm_head` does not know, attends to later tokens,
    or cannot be scored.
    """
    kind = type(model).__name__
    try:
        fault = find_lm_head_fault(model)
    except MODEL_ERRORS as error:
        fault = f"cannot be scored here ({format_error_line(error)})"
    if fault:
        raise UserError(f"policy.model: {kind} {fault}: not supported", page="reference/models")


@torch.no_grad()
def find_lm_head_fault(model: PreTrainedModel) -> str:
    """Return why scores would be wrong, or "". Logits are compared in fp32, since bf16 rounds a soft-cap by 1%."""
    ids, head = torch.arange(1, 5, device=model.device)[None], get_lm_head(model, model.dtype)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    beginning = model.base_model(input_ids=ids[:, :2], use_cache=False).last_hidden_state[0]
    tolerance = LOGIT_TOLERANCES.get(model.dtype, HALF_PRECISION_TOLERANCE)
    if measure_relative_difference(beginning.float(), hidden[:2].float()) > tolerance:
        return "attends to later tokens, so it is not a causal language model"
    ours = head.compute_logits(hidden.to(model.dtype))
    product, output = head._replace(scale=1.0, softcap=0.0), cast(nn.Module, model.get_output_embeddings())
    hook = output.register_forward_hook(
        lambda _, inputs, __: product.compute_logits(inputs[0][0].to(model.dtype))[None]
    )
    theirs = model(input_ids=ids, use_cache=False).logits[0].float()
    hook.remove()
    return "" if torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3) else "changes its logits after the output layer"

"""The self-checks of Triton's kernels of a decode step and of sampling, and the choice between these and PyTorch's
operators on a GPU.

Each device is checked once, on a small model: the kernels are used if they agree with the operators up to rounding.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pellucid.models.cuda_graphs import measure_error_share
from pellucid.models.decode import DecodeBatch
from pellucid.models.decoder import Decoder, ModelShape

if TYPE_CHECKING:
    from pellucid.models.triton_decode import TritonDecoder

NOT_INSTALLED = "Triton is not installed"
_TOLERANCES = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8, torch.float32: 2.0**-10}
"""The dtypes of the kernels, and the largest accepted errors of logits, relative to the largest logit: about three
times those that rounding causes in half precision."""
_PROMPTS = ([5, 3, 7], [7 * i % 251 for i in range(300)])
"""The second has more tokens than a block of keys."""
_WINDOW = 3
"""The window of the sliding layer: no longer than a prompt, so that it ends among the keys of a prompt and of a row."""
_ROWS, _KEPT_ROWS, _STEPS = 4, (0, 2, 3), 2


def select_triton_decoder(decoder: Decoder) -> TritonDecoder | None:
    """Return the decode steps of this decoder by Triton's kernels; None if PyTorch's operators compute them.

    The decoder keeps them, and with them their graphs, unless its weights are gathered anew for each batch.
    """
    if decoder.device.type != "cuda" or decoder.uses_cuda_graphs is False or find_decoder_fault(decoder):
        return None
    from pellucid.models.triton_decode import TritonDecoder  # noqa: PLC0415 - Triton is imported only on a GPU

    if decoder.embedding.is_uncached:
        return TritonDecoder(decoder)
    if decoder.triton_decoder is None:
        decoder.triton_decoder = TritonDecoder(decoder)
    return decoder.triton_decoder


def find_decoder_fault(decoder: Decoder) -> str:
    """Return why Triton's kernels cannot compute the decode steps of this decoder; empty if they can."""
    stream_dtype = getattr(*decoder.final_norm_location).dtype
    if decoder.dtype not in _TOLERANCES or stream_dtype == torch.float64:
        return "float64"
    is_sliding = any(decoder.shape.is_sliding), False
    shape = decoder.shape._replace(layers=2, tied=True, is_sliding=is_sliding, window=_WINDOW)
    return find_step_fault(decoder.device, decoder.dtype, shape, "query_norm" in decoder.layers[0].norms)


@functools.cache
@torch.no_grad()
def find_step_fault(device: torch.device, dtype: torch.dtype, shape: ModelShape, has_head_norms: bool) -> str:
    """Compare decode steps by kernels and by operators for a model of this shape. Warn if they differ, and say why."""
    try:
        from pellucid.models.triton_decode import TritonDecoder  # noqa: PLC0415
        from pellucid.models.triton_ops import KERNEL_ERRORS, describe_error  # noqa: PLC0415
    except ImportError:
        return NOT_INSTALLED
    fault = ""
    try:
        decoder = _build_decoder(device, dtype, shape, has_head_norms)
        batches = DecodeBatch(decoder, _ROWS, triton_decoder=TritonDecoder(decoder)), DecodeBatch(decoder, _ROWS)
        shares = [measure_error_share(logits, expected) for logits, expected in _decode(*batches)]
        if not all(share < _TOLERANCES[dtype] for share in shares):
            fault = f"logits are off by {max(shares):.1g} of the largest"
    except KERNEL_ERRORS as error:
        fault = describe_error(error)
    if fault:
        warnings.warn(f"tokens are decoded without Triton's kernels: {fault}", stacklevel=2)
    return fault


def _decode(*batches: DecodeBatch) -> Iterator[list[Tensor]]:
    """Decode some tokens of prompts, drop rows, and go on; yield the logits of all batches."""
    tokens = torch.arange(_ROWS, device=batches[0].decoder.device)
    for batch in batches:
        batch.admit(_PROMPTS, _ROWS // len(_PROMPTS))
    for rows in (range(_ROWS), _KEPT_ROWS):
        for batch in batches:
            batch.keep_rows(torch.tensor(rows))
        for step in range(_STEPS):
            yield [batch.step(tokens[: len(rows)] + 8 * step) for batch in batches]


def _build_decoder(device: torch.device, dtype: torch.dtype, shape: ModelShape, has_head_norms: bool) -> Decoder:
    """Build a decoder of this shape with random weights."""
    kinds = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in shape.is_sliding]
    width, sizes = 16 * shape.heads, {"num_attention_heads": shape.heads, "num_key_value_heads": shape.key_heads}
    config: Any = AutoConfig.for_model(
        "qwen3" if has_head_norms else "qwen2",
        **sizes,
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        head_dim=shape.head_size,
        num_hidden_layers=shape.layers,
        layer_types=kinds,
        use_sliding_window=True,
        sliding_window=shape.window,
        rms_norm_eps=shape.eps,
        tie_word_embeddings=shape.tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            weight.normal_(1.0 if weight.ndim == 1 else 0.0, weight.shape[-1] ** -0.5)  # scores differ by several
    decoder = Decoder(config, torch.nn.Module.to(model, device), dtype)
    decoder.uses_cuda_graphs = False
    return decoder

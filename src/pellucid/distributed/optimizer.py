"""Two AdamW optimizers: one with its state on the CPU, and one that makes a single pass over memory on the CPU.

Offloading saves 12 bytes of device memory per weight; it costs a copy in both directions per step.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw
from torch.profiler import record_function

from pellucid.models.linear import CastWeights, copy_to_cpu
from pellucid.models.native import VECTOR_WIDTH, add_self_check, call_kernel, load_library


class OffloadedAdamW(Optimizer):
    """AdamW (arXiv 1711.05101) with fp32 masters and moments on the CPU.

    Weights and gradients stay on their device and in their dtype. bf16 weights are the rounded masters, so that updates
    too small for bf16 are not lost. With a GPU, pinned memory makes the copies asynchronous. `masters` has the
    order of `params`; without it, the weights are copied.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        masters: Sequence[Tensor] | None = None,
    ) -> None:
        params = list(params)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.masters = dict(zip(params, masters or map(copy_to_cpu, params), strict=True))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for group in self.param_groups:
            live = [p for p in group["params"] if p.grad is not None]
            grads = [copy_to_cpu(p.grad) for p in live]
            masters = [self.masters[p] for p in live]
            states = [_get_state(self, p, master) for p, master in zip(live, masters, strict=True)]
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the copies have arrived
            adamw(
                masters,
                grads,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for p, master in zip(live, masters, strict=True):
                p.copy_(master, non_blocking=True)


def _get_state(optimizer: Optimizer, p: Tensor, master: Tensor) -> dict[str, Tensor]:
    state = optimizer.state[p]
    if not state:
        state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
    return state


# ---------------------------------------------------------------- AdamW in one pass
# AdamW in one pass over memory on the CPU, in C++ (models/cpp/optimizer.cpp). PyTorch needs another pass to clip
# gradients, and one to cast weights to bf16.


class _ParameterStruct(ctypes.Structure):
    """`Parameter` in cpp/optimizer.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "grad", "mean", "square", "cast")),
        ("size", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("step_size", "bias_correction2_sqrt")),
    )


class _RatesStruct(ctypes.Structure):
    """`Rates` in cpp/optimizer.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_float) for name in ("clip", "decayed", "one_minus_beta1", "beta2", "one_minus_beta2", "eps")
    )


class OnePassAdamW(Optimizer):
    """AdamW for parameters that `supports_one_pass` accepts. Its state is that of PyTorch's AdamW.

    The bf16 copies of `cast_weights` are updated in the same pass.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        cast_weights: Sequence[CastWeights] = (),
    ) -> None:
        super().__init__(list(params), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.cast_weights, self.clip_factor = cast_weights, 1.0

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Return the norm of all gradients. The next step clips them like torch's clip_grad_norm_."""
        live = self._list_gradients()
        norms = torch.empty(len(live))
        _run_optimizer_kernel(
            "gradient_norms", [_ParameterStruct(grad=grad.data_ptr(), size=grad.numel()) for _, grad in live], norms
        )
        norm = torch.linalg.vector_norm(norms)
        self.clip_factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        [group], live = self.param_groups, self._list_gradients()
        (beta1, beta2), lr = group["betas"], group["lr"]
        parts = self._select_cast_weights([p for p, _ in live])
        casts = {id(p): copy for part in parts for p, copy in part.pair_masters_with_copies()}
        parameters = []
        for p, grad in live:
            state = _get_state(self, p, p)
            state["step"] += 1
            n = float(state["step"])
            tensors = (p, grad, state["exp_avg"], state["exp_avg_sq"], casts.get(id(p)))
            addresses = (None if x is None else x.data_ptr() for x in tensors)
            parameters.append(_ParameterStruct(*addresses, p.numel(), -(lr / (1 - beta1**n)), math.sqrt(1 - beta2**n)))
        decayed = 1 - lr * group["weight_decay"]
        _run_optimizer_kernel(
            "step_adamw", parameters, _RatesStruct(self.clip_factor, decayed, 1 - beta1, beta2, 1 - beta2, group["eps"])
        )
        self.clip_factor = 1.0
        for part in parts:
            part.mark_as_cast()

    def _list_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters that have a gradient, with their contiguous gradients."""
        return [(p, p.grad.contiguous()) for p in self.param_groups[0]["params"] if p.grad is not None]

    def _select_cast_weights(self, parameters: Sequence[Tensor]) -> list[CastWeights]:
        """Return the cast weights that have a bf16 copy and all of whose masters are updated."""
        stepped = set(map(id, parameters))
        bf16 = [part for part in self.cast_weights if part.dtype == torch.bfloat16]
        return [
            part
            for part in bf16
            if part.pair_masters_with_copies() and all(id(p) in stepped for p, _ in part.pair_masters_with_copies())
        ]


def _run_optimizer_kernel(name: str, parameters: Sequence[_ParameterStruct], output: Any) -> None:
    array = (_ParameterStruct * len(parameters))(*parameters)
    with record_function(name):
        call_kernel(getattr(load_library(), name), array, len(parameters), output, torch.get_num_threads())


def supports_one_pass(parameters: Iterable[Tensor]) -> bool:
    """Return whether OnePassAdamW can take these parameters with torch's bits: whole, contiguous fp32 on the CPU."""
    found = {
        (p.device.type, p.dtype, p.is_contiguous(), p.numel() % VECTOR_WIDTH, isinstance(p, DTensor))
        for p in parameters
    }
    return found <= {("cpu", torch.float32, True, 0, False)} and load_one_pass()[0] is not None


def compare_optimizers(optimizer: type[OnePassAdamW]) -> Iterable[tuple[str, Any, Any]]:
    """Yield results of two steps, the first one clipped; see `add_self_check`."""
    module, expected = _make_self_check_module(), _make_self_check_module()
    casts = CastWeights([(module, "matrix")], torch.bfloat16)
    ours = optimizer(module.parameters(), 0.1, weight_decay=0.1, cast_weights=[casts])
    theirs = AdamW(expected.parameters(), 0.1, weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(1)
    for scale in (1.0, 0.001):
        copy = casts.get_cast_copy()
        for p, q in zip(module.parameters(), expected.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator) * scale
            q.grad = p.grad.clone()
        yield "gradient norm", ours.clip_gradients(1.0), clip_grad_norm_(expected.parameters(), 1.0)
        ours.step()
        theirs.step()
        yield "AdamW", tuple(module.parameters()), tuple(expected.parameters())
        yield "cast weights", copy, module.matrix.bfloat16()


def _make_self_check_module() -> Any:
    module, generator = torch.nn.Module(), torch.Generator().manual_seed(0)
    for name, size in {"matrix": (48, 560), "vector": (48,)}.items():
        module.register_parameter(name, torch.nn.Parameter(torch.randn(size, generator=generator)))
    return module


def _list_optimizers() -> list[type[OnePassAdamW]]:
    load_library()
    return [OnePassAdamW]


load_one_pass = add_self_check("AdamW", _list_optimizers, compare_optimizers)
"""Return OnePassAdamW, or None and the reason why it is not used."""

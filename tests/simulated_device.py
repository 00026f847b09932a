"""An accelerator that is not there: what a GPU refuses, and where the host waits for it, seen on a CPU.

A `Far` tensor says that it lies on "gpu:0" and keeps its data on the CPU, so that all values are the CPU's. While a
`Device` is entered, every operation is held to the rules of CUDA: tensors of two devices do not meet, but for single
numbers; fused AdamW wants all of its state beside the weights; a generator draws on its own device; numpy() is refused;
in torch's deterministic mode, what has no deterministic kernel. A Device may also refuse float64, as Apple's MPS does.

It says nothing of kernels, streams, memory and speed. Its type is "gpu", so code that asks for "cuda" by name does not
see it, except in processes that were started with the library of pretended_cuda.py. There its name is "cuda:0",
torch.cuda says that it is there, and operators that only CUDA has are computed by hand.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pellucid
import pretended_cuda

NAME = "cuda" if pretended_cuda.ASKED in os.environ else "gpu"
WHERE = f"{NAME}:0"
CPU = torch.device("cpu")
PACKAGE = str(Path(pellucid.__file__).parent)
entered: list[Device] = []


class Backend:
    """What torch asks of the module torch.gpu. Outside a Device there is none, whoever looks."""

    def is_initialized(self):
        return True

    def is_available(self):
        return bool(entered)

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        pass

    def get_rng_state(self, device=None):
        return torch.zeros(8, dtype=torch.uint8)

    def set_rng_state(self, state, device=None):
        pass

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


def register():
    """Make torch know the device. ImportError if this torch takes none that is written in Python, as 2.8 does not."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend  # noqa: PLC0415

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self):
            return bool(entered)

        def has_primary_context(self, device):
            return True

        def is_built(self):
            return True

    _setup_privateuseone_for_python_backend(NAME, backend_module=Backend(), hook=Hooks())


A_REAL_ONE = torch.cuda.is_available() or torch.backends.mps.is_available()
"""Beside which there must be no other: torch knows one accelerator. Also true if torch cannot simulate one (2.8)."""
if not A_REAL_ONE:
    # Once a process, before its first backward pass: autograd starts a thread for each device that it knows by then.
    if NAME == "cuda":
        pretended_cuda.load(os.environ[pretended_cuda.ASKED])
        torch.__future__.set_overwrite_module_params_on_conversion(True)
    else:
        try:
            register()
        except ImportError:
            A_REAL_ONE = True
if not A_REAL_ONE:
    # Taken apart where a device has no kernel of its own, as CUDA has: never called, a Device takes it from here.
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("silu_backward", lambda *_: None, "CUDA" if NAME == "cuda" else "PrivateUse1")


class Far(torch.Tensor):
    near: torch.Tensor

    @staticmethod
    def __new__(cls, near, requires_grad=False):
        far = torch.Tensor._make_wrapper_subclass(
            cls,
            near.size(),
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=WHERE,
            requires_grad=requires_grad,
        )
        far.near = near
        return far

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return entered[-1].run(func, args, kwargs or {})

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, other):
        """A real one may be given data of the CPU, as masters are while a model is saved, and lies there until it has
        its own back; this one goes on saying that it is far.
        """
        far = other if isinstance(other, Far) else Far(other)
        torch.Tensor.data.__set__(self, far)
        self.near = far.near

    def __getitem__(self, index):
        return super().__getitem__(arrived(index))

    def __setitem__(self, index, value):
        value = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=self.dtype, device=WHERE)
        super().__setitem__(arrived(index), value)

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self):
        raise TypeError(f"can't convert {WHERE} tensor to numpy: use Tensor.cpu() first")

    def __repr__(self):
        return f"Far({self.near})"


def arrived(index):
    """Python lists in an index are copied to the device; integers beside them too."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(part, list) for part in parts):
        return index
    none = torch.empty(0, dtype=torch.long)
    there = [(torch.tensor(x) if x else none).to(WHERE) if isinstance(x, list) else x for x in parts]
    return tuple(there)


# ---------------------------------------------------------------- what it refuses

MOVES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from"}
TAKE_A_NUMBER = {"aten::fill_", "aten::masked_fill", "aten::masked_fill_", "aten::index_put", "aten::index_put_"}
"""Besides pointwise operations, those that take a single number from the CPU."""
WAITS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::bincount",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave",
}
"""Their result, or its size, is known to the host only when the device is done."""


def always(*_: Any) -> bool:
    return True


def backward_of(*names: str) -> dict[str, Callable[..., bool]]:
    return {f"aten::{name}_backward": always for name in names}


WITHOUT_DETERMINISTIC_KERNEL: dict[str, dict[str, Callable[..., bool]]] = {
    "AvgPool3d": backward_of("avg_pool3d"),
    "AdaptiveAvgPool2d": backward_of("_adaptive_avg_pool2d"),
    "AdaptiveAvgPool3d": backward_of("_adaptive_avg_pool3d"),
    "AdaptiveMaxPool2d": backward_of("adaptive_max_pool2d"),
    "FractionalMaxPool2d": backward_of("fractional_max_pool2d"),
    "FractionalMaxPool3d": backward_of("fractional_max_pool3d"),
    "MaxUnpool1d": {"aten::max_unpool2d": always},
    "MaxUnpool2d": {"aten::max_unpool2d": always},
    "MaxUnpool3d": {"aten::max_unpool3d": always},
    "interpolate": backward_of(
        "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"
    ),
    "ReflectionPad1d": backward_of("reflection_pad1d"),
    "ReflectionPad2d": backward_of("reflection_pad2d"),
    "ReflectionPad3d": backward_of("reflection_pad3d"),
    "NLLLoss": {"aten::nll_loss_forward": always, "aten::nll_loss2d_forward": always},
    "CTCLoss": backward_of("_ctc_loss"),
    "EmbeddingBag": backward_of("_embedding_bag_dense"),
    "put_": {"aten::put_": always},
    "histc": {"aten::histc": always},
    "bincount": {"aten::bincount": lambda _, weights=None, minlength=0: weights is not None},
    "median": {"aten::median": lambda _, *dim, **__: bool(dim), "aten::nanmedian": lambda _, *dim, **__: bool(dim)},
    "grid_sample": backward_of("grid_sampler_2d", "grid_sampler_3d"),
    "cumsum": {
        name: lambda x, _, *, dtype=None: (dtype or x.dtype).is_floating_point
        for name in ("aten::cumsum", "aten::cumsum_")
    },
    "scatter_reduce": {"aten::scatter_reduce": lambda x, dim, index, source, reduce, **_: reduce == "prod"},
    "resize_": {"aten::resize_": lambda x, *_, **__: x.is_quantized},
}
"""As the documentation of torch.use_deterministic_algorithms names them -> operators, and when they raise on CUDA."""
RAISE = {name: when for operators in WITHOUT_DETERMINISTIC_KERNEL.values() for name, when in operators.items()}


class Uncompiled(TorchDispatchMode):
    """Nothing is compiled in it: to hide its operations from dynamo would take a tenth of their time."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False


class Device(Uncompiled):
    """Entered, it is there. `waits` and `copies` count by the line of the package that asked for them."""

    def __init__(self, float64: bool = True) -> None:
        super().__init__()
        self.float64 = float64
        self.waits: Counter[str] = Counter()
        """The host waits until the device is done."""
        self.copies: Counter[str] = Counter()
        """From the host to the device."""
        self.operators: set[torch._ops.OpOverload] = set()
        """All that ran on it."""

    def __enter__(self):
        entered.append(self)
        self.pretends = pretended_cuda.torch_cuda() if NAME == "cuda" else nullcontext()
        self.pretends.__enter__()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) then also comes by here
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.pretends.__exit__(*exception)
        entered.pop()
        torch._C._set_only_lift_cpu_tensors(bool(entered))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func, args, kwargs):
        flat = [x for value in (*args, *kwargs.values()) for x in (value if isinstance(value, list) else [value])]
        far = [x for x in flat if isinstance(x, Far)]
        near = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, Far)]
        asked = kwargs.get("device")
        there = bool(far) if asked is None else torch.device(asked).type == NAME
        name = func._schema.name
        if far or there:
            self.operators.add(func)
            self.refuse(func, args, kwargs, far, near, there)
            self.count(name, args, far, there)
        if asked is not None:
            kwargs = {**kwargs, "device": CPU if there else asked}
        act = pretended_cuda.BY_HAND.get(func, func) if there else func
        if NAME == "cuda" and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        result = act(*map(unwrapped, args), **{key: unwrapped(value) for key, value in kwargs.items()})
        if not there or name == "aten::_local_scalar_dense":
            return result
        known = {id(x.near): x for x in far}  # what was changed in place is still the same tensor
        if isinstance(result, (tuple, list)):
            return type(result)([self.wrapped(x, known) for x in result])
        return self.wrapped(result, known)

    def wrapped(self, x, known):
        if not isinstance(x, torch.Tensor):
            return x
        if x.dtype == torch.float64 and not self.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        return known[id(x)] if id(x) in known else Far(x)

    def refuse(self, func, args, kwargs, far, near, there):
        name = func._schema.name
        if name in MOVES:
            return
        generator = kwargs.get("generator")
        if generator is not None and there:
            raise RuntimeError(f"{name}: expected a generator of {WHERE}, found one of {generator.device}")
        if name.startswith("aten::_fused_adam") and far and near:
            raise RuntimeError(f"{name}: params, grads and state must all be on one device, {WHERE} and cpu found")
        if far and name in ("aten::index", "aten::index_put", "aten::index_put_"):
            if not isinstance(args[0], Far):
                raise RuntimeError(f"indices should be on the device of the indexed tensor (cpu), found {WHERE}")
            near = [x for x in args[2:] if isinstance(x, torch.Tensor) and not isinstance(x, Far)]
        takes_a_number = torch.Tag.pointwise in func.tags or name in TAKE_A_NUMBER
        if far and any(x.dim() > 0 or not takes_a_number for x in near):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {WHERE} and cpu")
        if torch.are_deterministic_algorithms_enabled() and name in RAISE and RAISE[name](*args, **kwargs):
            raise RuntimeError(f"{name} does not have a deterministic implementation")

    def count(self, name, args, far, there):
        if name in MOVES:
            target, source = (there, args[0]) if name == "aten::_to_copy" else (isinstance(args[0], Far), args[1])
            if target and not isinstance(source, Far):
                self.copies[line()] += 1
            elif not target and isinstance(source, Far):
                self.waits[line()] += 1
        by_mask = name in ("aten::index", "aten::index_put_") and any(x.dtype == torch.bool for x in far[1:])
        if far and (name in WAITS or by_mask):
            self.waits[line()] += 1


def unwrapped(x):
    if isinstance(x, list):
        return [unwrapped(one) for one in x]
    return x.near if isinstance(x, Far) else x


def line():
    """The innermost line of the package that is being executed."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    return f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_lineno}"


class Decomposed(Uncompiled):
    """The CPU itself, with composite operations taken apart as they are for a Device: the same steps, the same bits."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

"""Fix Triton's interpreter to round bfloat16 as a GPU does.

Import this module before any kernel, and before Triton unless the environment says TRITON_INTERPRET=1.

As shipped (3.6 to 3.9), the interpreter truncates where a GPU rounds to nearest, and `tl.dot` multiplies the bit
patterns of bfloat16 numbers instead of the numbers.
"""

from __future__ import annotations

import os
import sys

import numpy as np

# Triton decides on import whether its own functions are interpreted, and transformers imports it.
assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1"
os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

Builder = interpreter.InterpreterBuilder
shipped_cast, shipped_dot, shipped_patch = Builder.cast_impl, Builder.create_dot, interpreter._patch_lang_tensor


def round_to_bfloat16(x):
    """Return the bit patterns of the nearest bfloat16 numbers, rounding ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def widen_bfloat16(bits):
    return (np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def cast(builder, x, dtype):
    source, target = x.dtype.scalar, dtype.scalar
    if (source, target) == (tl.float32, tl.bfloat16):
        return interpreter.TensorHandle(round_to_bfloat16(x.data), target)
    if (source, target) == (tl.bfloat16, tl.float32):
        return interpreter.TensorHandle(widen_bfloat16(x.data), target)
    return shipped_cast(builder, x, dtype)


def dot(builder, x, y, total, *settings):
    factors = [
        interpreter.TensorHandle(widen_bfloat16(f.data), tl.float32) if f.dtype.scalar == tl.bfloat16 else f
        for f in (x, y)
    ]
    return shipped_dot(builder, *factors, total, *settings)


def patch_tensor(tensor, *scope):
    """Convert arrays of one element to an index. Triton 3.6 relies on this, and numpy refuses it since 2.4."""
    shipped_patch(tensor, *scope)

    def to_index(x):
        return int(np.asarray(x.handle.data).reshape(-1)[0])

    scope[0].set_attr(tensor, "__index__", to_index) if scope else setattr(tensor, "__index__", to_index)


Builder.cast_impl = Builder.create_fp_ext = Builder.create_fp_trunc = cast
Builder.create_dot = dot
interpreter._patch_lang_tensor = patch_tensor

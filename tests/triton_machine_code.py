"""Compile Triton kernels to machine code for given GPUs, which needs no GPU."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
ARCHITECTURES = (80, 90)
"""A100 and H100."""
DTYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


class Launch(NamedTuple):
    """A kernel and the arguments and options of its launch."""

    kernel: JITFunction[Any]
    arguments: dict[str, Any]
    options: dict[str, int]
    """Numbers of warps and stages."""


class MachineCode(NamedTuple):
    registers: int
    """Per thread."""
    stack_bytes: int
    """Per thread: registers that were spilled to memory."""
    shared_bytes: int
    instructions: Counter[str]
    """By name with all modifiers, like LDG.E.128."""

    def count(self, name):
        return sum(n for known, n in self.instructions.items() if known.startswith(name))


def record_launches(act):
    """Call a function, and return the launches it requests, none of which is computed."""
    launches = []

    def record(kernel, *arguments, grid, warmup, **named):
        options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
        launches.append(Launch(kernel, dict(zip(kernel.arg_names, arguments, strict=False)) | named, options))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(JITFunction, "run", record)
        act()
    return launches


def compile_launch(launch, architecture, folder):
    """Compile a launch as for that GPU. Writes a file into the folder."""
    kernel, signature, constants, attributes = launch.kernel, {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = launch.arguments[parameter.name]
        is_constant = parameter.is_constexpr or value is None or (type(value) is int and value == 1)
        if is_constant:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = DTYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (type(value) is int and not is_constant and value % 16 == 0):
            attributes[i,] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch.options)
    binary = folder / f"{kernel.__name__}.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    usage, code = (run_tool("cuobjdump", option, binary) for option in ("-res-usage", "-sass"))
    return MachineCode(
        *(int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK")),
        compiled.metadata.shared,
        Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+ )?([A-Z][\w.]*)", code, re.MULTILINE)),
    )


def run_tool(name, *arguments):
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout

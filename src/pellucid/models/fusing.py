"""Whether decoding is fused on this machine: where it is, a token is sampled in half the time, and to the same bits.

cpp/decode.cpp is compiled once, in two seconds, and kept. Each process then tries it on a small model: it is used where
its logits are those of torch's operators, bit for bit, and these go on where they are not, or where there is no
compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pellucid.models.decoder import Decoder, Weights
from pellucid.models.decoding import DecodeBatch
from pellucid.models.family import Shape
from pellucid.models.fused import Fused

SOURCES = Path(__file__).with_name("cpp")
FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-mfma"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
    "-ffp-contract=off",  # what is rounded between a product and a sum must stay so
)
TRIED = LlamaConfig(
    vocab_size=112,
    hidden_size=576,  # more than are added up together, and so is the next
    intermediate_size=1088,
    num_hidden_layers=1,
    num_attention_heads=9,
    num_key_value_heads=3,
    attention_bias=True,
    mlp_bias=True,
)
"""The model of the trial."""
PROMPTS = ([5, 3, 7], [11] * 17, list(range(40)))
STEPS = 3


class UnusableError(Exception):
    """Why the library cannot be used."""


def maker(decoder: Decoder) -> Callable[[Weights, Shape], Fused] | None:
    """What makes fused steps for this decoder; none where its operators go on."""
    if not (decoder.may_pack and torch.cpu._is_avx512_bf16_supported()):
        return None
    library, _ = here()
    return functools.partial(Fused, library) if library else None


@functools.cache
def here() -> tuple[Any, str]:
    """The library, and why there is none."""
    if not torch.cpu._is_avx512_bf16_supported():
        return None, "a CPU without AVX-512 for bfloat16"
    try:
        library = load()
        try_bits(library)
    except (UnusableError, OSError) as error:
        return None, str(error)
    return library, ""


# ---------------------------------------------------------------- compiling


def load() -> Any:
    """The library, compiled where it was not kept. UnusableError where that cannot be."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        raise UnusableError("no g++")
    libraries = Path(torch.__file__).parent / "lib"
    links = [libraries / "libtorch_cpu.so", *libraries.glob("libgomp*")]  # torch's threads, and none beside them
    sources = [path.read_text() for path in sorted(SOURCES.iterdir())]
    key = hashlib.sha256(repr((sources, FLAGS, compiler, torch.__version__, links)).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    command = [*shlex.split(compiler), *FLAGS, str(SOURCES / "decode.cpp"), *map(str, links)]
    try:
        return opened(cache / "pellucid" / f"fused-{key[:16]}.so", command)
    except OSError:  # a home that cannot be written to, or from which nothing may be run
        with tempfile.TemporaryDirectory() as folder:  # it stays loaded
            return opened(Path(folder) / "fused.so", command)


def opened(path: Path, command: list[str]) -> Any:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
            if done.returncode:
                raise UnusableError(" ".join(f"{command[0]} fails: {done.stderr}".split())[:200])
            made.replace(path)  # at once: other processes may look for it
    library = ctypes.CDLL(str(path))
    library.pack.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_int,
    ]
    library.step.argtypes = [*[ctypes.c_void_p] * 7, ctypes.c_int]
    library.pack.restype = library.step.restype = None
    return library


# ---------------------------------------------------------------- the trial


@torch.no_grad()
def try_bits(library: Any) -> None:
    """UnusableError where its logits are not those of torch's operators."""
    decoder = small()
    plain, fused = DecodeBatch(decoder, 6), DecodeBatch(decoder, 6, functools.partial(Fused, library))
    for batch in (plain, fused):
        batch.admit(PROMPTS, 2)
    for token in range(STEPS):
        tokens = torch.arange(6) + token
        if not torch.equal(plain.step(tokens), fused.step(tokens)):
            raise UnusableError("this processor or this torch rounds otherwise")
    if not fused.fused:
        raise UnusableError("torch without bfloat16 for this CPU")


@torch.no_grad()
def small() -> Decoder:
    """A decoder of random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(TRIED)
        for weight in model.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5)
    return Decoder(TRIED, model, torch.bfloat16)

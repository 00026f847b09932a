"""Where the rows of gpu.py run: a GPU or what stands in for one, processes of their own, and models made here.

All libraries are imported once, and each row is a fork of the process that did it. A process that has used CUDA cannot
be forked, so the parent, and each row that forks again, leaves the GPU to its children.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import runpy
import socket
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import psutil
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "tests"))
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to ask whether there is a GPU without using it

from processes import Contender

from conftest import character_tokenizer, tiny_llama
from runs import at_home
from simulated_device import WHERE, Device

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
SHAPES = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
"""What tells Qwen2.5 of these sizes from the one in recipes/shapes."""
IN_PLACE = {
    "0.5B": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
    "1.5B": {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
}
"""What is simulated has these, and few words."""
WORDS = 128
CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@dataclass(frozen=True)
class Place:
    """A machine with a GPU, or, simulated, one without."""

    folder: Path
    """For models and runs."""
    simulated: bool
    repeats: int

    @property
    def device(self) -> str:
        """As `policy.device` has it."""
        return WHERE if self.simulated else "cuda"

    @property
    def contenders_device(self) -> str:
        """Of contenders, whose libraries know no simulated device."""
        return "cpu" if self.simulated else "cuda"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The device is there, for whole runs. A real one always is."""
        if not self.simulated:
            yield
            return
        with pytest.MonkeyPatch.context() as patched, sdpa_kernel(SDPBackend.MATH), Device():
            at_home(patched)
            yield

    def apart(self, work: Callable[..., T], *arguments: Any) -> T:
        """The result of a function in a process of its own. Where it raises, this process ends, too: all is told."""
        result = Apart(work, arguments).result()
        if result is None:
            raise SystemExit(1)
        return result[0]

    def alone(self, script: Path, *arguments: object) -> str:
        """Output of a script that runs as the only process of torchrun."""
        return self.apart(ran_alone, script, list(map(str, arguments)))

    def tiny(self) -> Path:
        """The model of the tests: seconds for a whole run."""
        return self.made("tiny", lambda: (tiny_llama(), character_tokenizer()))

    def model(self, size: str) -> Path:
        """A Qwen2.5 of this size with random weights, and a tokenizer that knows as many words as it has."""
        return self.made(size, partial(self.qwen, size))

    def qwen(self, size: str) -> tuple[Any, Any]:
        shape = (IN_PLACE if self.simulated else SHAPES)[size]
        largest = json.loads((ROOT / "recipes/shapes/qwen2.5-3b/config.json").read_text())
        config = AutoConfig.for_model(**largest | shape | ({"vocab_size": WORDS} if self.simulated else {}))
        tokenizer = character_tokenizer(string.printable, config.vocab_size)
        tokenizer.chat_template = CHAT
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
        with torch.device(self.contenders_device):  # a GPU draws 1.5 billion numbers at once
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return model, tokenizer

    def made(self, name: str, make: Callable[[], tuple[Any, Any]]) -> Path:
        """Saved once, whole or not at all: a row may be ended while it makes one."""
        folder = self.folder / "models" / name
        if not folder.exists():
            self.apart(save, make, folder)
        return folder


def save(make: Callable[[], tuple[Any, Any]], folder: Path) -> None:
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    torch.manual_seed(0)
    for part in make():
        part.save_pretrained(unfinished)
    unfinished.rename(folder)


def ran_alone(script: Path, arguments: list[str]) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    one = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1") | dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
    os.environ |= one | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sys.argv = [str(script), *arguments]
    with redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(script), run_name="__main__")
    return said.getvalue()


class Apart:
    """A function in a fork of this process, whose log says why it failed."""

    def __init__(self, work: Callable[..., Any], arguments: Sequence[Any], log: Path | None = None) -> None:
        context: Any = multiprocessing.get_context("fork")
        self.answers, answer = context.Pipe(duplex=False)
        self.process = context.Process(target=answered, args=(answer, log, work, arguments))
        self.process.start()
        answer.close()

    def result(self, limit: float | None = None) -> tuple[Any] | None:
        """What the function returned; None where it raised, or its process died. TimeoutError after `limit` seconds,
        when all that was started is ended.
        """
        if not self.answers.poll(limit):
            mine = psutil.Process(self.process.pid)
            for process in (*mine.children(recursive=True), mine):
                process.kill()
            raise TimeoutError(f"not done after {limit:.0f} s")
        try:
            result = self.answers.recv()
        except EOFError:
            result = None
        self.process.join()
        return result


def answered(answer: Connection, log: Path | None, work: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Send what the function returns, in a tuple. What this process and its own print goes into the log."""
    if log:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    sys.modules["__main__"] = ModuleType("__main__")  # processes that it spawns, as for rewards, import no benchmark
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    answer.send((work(*arguments),))


class Forked(Contender):
    """A contender as a copy of this process, which has imported its libraries already."""

    def started(self, command: list[str], environment: dict[str, str]) -> Any:  # noqa: ARG002
        return Fork(command[1:], self.log.fileno())


class Fork:
    """What a Contender asks of a process that it starts."""

    ends: ClassVar[list[int]] = []
    """Of the pipes to all contenders, this process's. A pipe that a contender holds open would never end elsewhere."""

    def __init__(self, arguments: list[str], log: int) -> None:
        below, above = os.pipe(), os.pipe()
        Fork.ends += below[1], above[0]
        self.process = multiprocessing.get_context("fork").Process(
            target=played, args=(arguments, below[0], above[1], log)
        )
        self.process.start()
        os.close(below[0])
        os.close(above[1])
        self.stdin, self.stdout = os.fdopen(below[1], "w"), os.fdopen(above[0])

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


def played(arguments: list[str], below: int, above: int, log: int) -> None:
    """Be the program that the arguments begin with.

    Files of the GPU's driver stay open: the process that was forked has asked NVML, which does not ask again here.
    """
    for standard, end in enumerate((below, above, log)):
        os.dup2(end, standard)
    for end in Fork.ends:
        with suppress(OSError):  # a contender that has ended left its number behind
            os.close(end)
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    sys.argv, sys.stdin = arguments, os.fdopen(0, closefd=False)
    runpy.run_path(arguments[0], run_name="__main__")

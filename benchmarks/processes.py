"""Starts contenders as processes, and says which make target installs a missing one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from trl_setups import ALLOCATOR, NoSearchError, get_setup

from pellucid.policy.load import locate_model
from pellucid.tasks.arithmetic import Arithmetic

HERE = Path(__file__).parent
VLLM = Path(os.environ.get("PELLUCID_VLLM", ".venv-vllm")) / "bin" / "python"
LLAMA = Path(os.environ.get("PELLUCID_LLAMA", ".venv-llama"))
Settings = dict[str, int | str]


class MissingError(Exception):
    """A contender is missing. The message says how to get it."""


class Contender:
    """A process that does one unit of work per turn.

    Args:
        work: "step", "job", "sample" or "accuracy": see contenders.py.
        name: The contender, such as "pellucid" or "trl-bf16".
        settings: Flags of the process.
        folder: Where its log and its prompts are written.
        overrides: Settings of the recipe, as `pellucid train` takes them. For "accuracy" only.

    Raises:
        MissingError: The contender is not installed, or its setup is not known.
    """

    def __init__(self, work: str, name: str, settings: Settings, folder: Path, overrides: tuple[str, ...] = ()) -> None:
        self.name = name
        check_available(name)
        command = [str(part) for part in (*make_command(work, name, settings, folder), *overrides)]
        changes = get_setup(name).environment if name.startswith("trl") else ALLOCATOR
        environment = {key: value for key, value in (os.environ | changes).items() if value is not None}
        self.log = (folder / f"{work}-{name.partition(':')[0]}.log").open("w+")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )
        self.info = self.read_answer()
        """The answer with which it reported that it is ready."""

    def take_turn(self) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read_answer()

    def close(self) -> dict[str, float]:
        """End the process, and return its last answer."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        answer = self.read_answer()
        self.process.wait()
        return answer

    def read_answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"{self.name} ended early:\n{self.log.read()[-3000:]}\nexit status {self.process.wait()}")
        return json.loads(line)

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.log):
            assert file is not None
            file.close()


def make_command(work: str, name: str, settings: Settings, folder: Path) -> list[Any]:
    sizes = [f"--{key}={settings[key]}" for key in ("tokens", "group") if key in settings]
    if name.startswith("vllm"):
        command = [VLLM, HERE / "contender_vllm.py", work, name, "--model", locate_model("smollm2-135m")]
        return [*command, "--chats", write_chats(settings, folder), *sizes]
    if name.startswith("llama"):
        command = [sys.executable, HERE / "contender_llama.py", work, name, "--server", get_llama_server()]
        return [*command, "--weights", get_llama_weights(), "--chats", write_chats(settings, folder), *sizes]
    return [sys.executable, HERE / "contenders.py", work, name, *(f"--{key}={x}" for key, x in settings.items())]


def write_chats(settings: Settings, folder: Path) -> Path:
    """Write the prompts of 50 units, each a list of messages, and return the file."""
    path, task, prompts = folder / "chats.json", Arithmetic(digits=2, operators=("+", "-")), int(settings["prompts"])
    path.write_text(json.dumps([[[dict(m) for m in p.text] for p in task.sample(i, prompts)] for i in range(50)]))
    return path


def get_llama_server() -> Path:
    return LLAMA / "build" / "bin" / "llama-server"


def get_llama_weights() -> Path:
    return LLAMA / "smollm2-135m-bf16.gguf"


def check_available(name: str) -> None:
    """Raise MissingError if the contender is not installed, or if its best setup was not searched for."""
    kind = name.partition("-")[0].partition(":")[0]
    is_installed = {
        "vllm": VLLM.is_file,
        "llama": lambda: get_llama_server().is_file() and get_llama_weights().is_file(),
        "trl": lambda: importlib.util.find_spec("trl") is not None,
    }
    if kind in is_installed and not is_installed[kind]():
        raise MissingError(f"not installed: make {'setup' if kind == 'trl' else kind}")
    if kind == "trl":
        try:
            get_setup(name)
        except NoSearchError:
            raise MissingError("not searched yet: make trl-search") from None

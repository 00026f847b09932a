"""Contenders as processes: how each is started, and which target of make brings one that is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from trl_setups import ALLOCATOR, NoSearchError, setup_of

from pellucid.policy.load import locate_model
from pellucid.tasks.arithmetic import Arithmetic

HERE = Path(__file__).parent
VLLM = Path(os.environ.get("PELLUCID_VLLM", ".venv-vllm")) / "bin" / "python"
LLAMA = Path(os.environ.get("PELLUCID_LLAMA", ".venv-llama"))
Settings = dict[str, int | str]


class MissingError(Exception):
    """A contender that is not there: a line that says how to get it."""


class Contender:
    """A process that does one unit of work for every line it is sent."""

    def __init__(self, work: str, name: str, settings: Settings, folder: Path, words: tuple[str, ...] = ()) -> None:
        """words: settings of a recipe, as `pellucid train` takes them, for work that has one."""
        self.name = name
        check_there(name)
        command = [*command_of(work, name, settings, folder), *words]
        changes = setup_of(name).environment if name.startswith("trl") else ALLOCATOR
        environment = {key: value for key, value in (os.environ | changes).items() if value is not None}
        self.log = (folder / f"{work}-{name.partition(':')[0]}.log").open("w+")
        self.process = self.started([str(part) for part in command], environment)
        self.facts = self._answer()
        """What it said of itself when it was ready."""

    def started(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )

    def turn(self) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.close()
        answer = self._answer()
        self.process.wait()
        return answer

    def _answer(self) -> dict[str, Any]:
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


def command_of(work: str, name: str, settings: Settings, folder: Path) -> list[Any]:
    own = [f"--{key}={settings[key]}" for key in ("tokens", "group") if key in settings]
    if name.startswith("vllm"):
        command = [VLLM, HERE / "contender_vllm.py", work, name, "--model", locate_model("smollm2-135m")]
        return [*command, "--chats", chats(settings, folder), *own]
    if name.startswith("llama"):
        command = [sys.executable, HERE / "contender_llama.py", work, name, "--server", server()]
        return [*command, "--weights", weights(), "--chats", chats(settings, folder), *own]
    return [sys.executable, HERE / "contenders.py", work, name, *(f"--{key}={x}" for key, x in settings.items())]


def chats(settings: Settings, folder: Path) -> Path:
    """The prompts of each unit, as messages, in a file."""
    path, task, prompts = folder / "chats.json", Arithmetic(digits=2, operators=("+", "-")), int(settings["prompts"])
    path.write_text(json.dumps([[[dict(m) for m in p.text] for p in task.sample(i, prompts)] for i in range(50)]))
    return path


def server() -> Path:
    return LLAMA / "build" / "bin" / "llama-server"


def weights() -> Path:
    return LLAMA / "smollm2-135m-bf16.gguf"


def check_there(name: str) -> None:
    """MissingError for a peer that is not installed, or for the best of a search that was not made."""
    kind = name.partition("-")[0].partition(":")[0]
    there = {
        "vllm": VLLM.is_file,
        "llama": lambda: server().is_file() and weights().is_file(),
        "trl": lambda: importlib.util.find_spec("trl") is not None,
    }
    if kind in there and not there[kind]():
        raise MissingError(f"not installed: make {'setup' if kind == 'trl' else kind}")
    if kind == "trl":
        try:
            setup_of(name)
        except NoSearchError:
            raise MissingError("nobody has searched here yet: make trl-search") from None

"""Where a run came from: versions, git revision, hardware."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from typing import Any

from pellucid import __version__
from pellucid.machine import hardware


def facts() -> dict[str, Any]:
    return {"versions": versions(), "git": git_revision(), "hardware": hardware.describe()}


def versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate")}
    return {"pellucid": __version__, "python": platform.python_version(), **packages}


def git_revision() -> str:
    """The git revision of the working folder; empty outside a repository."""
    git = shutil.which("git")
    command = [git, "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() if git else ""

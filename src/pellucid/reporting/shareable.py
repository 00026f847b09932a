"""The settings of a run as a stranger may see them: without secrets, and without the folders of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

from pellucid.reporting.run_folder import Record, read_config
from pellucid.rewards.pool import SECRET
from pellucid.rewards.terms import MODEL

HIDDEN = "..."
"""What stands in place of whatever a setting holds that is called like a secret."""
NO_SECRET = ".judge.key"
"""The setting of a judge that is called like a secret and is none: its settings see to it that it names a variable."""
ONE_WORD = re.compile(r"[^\s{}()<>]+")


def shareable(run_dir: Path) -> Record:
    """What config.json holds, with the names of files in place of their absolute paths."""
    record = read_config(run_dir)
    files = {"policy.model", *(record.get("digests") or ())}
    return {name: value if name == "digests" else shown(value, files, name) for name, value in record.items()}


def shown(value: Any, files: set[str], key: str) -> Any:
    """files: the dotted keys of settings whose absolute paths are known to be paths."""
    if value and SECRET.fullmatch("_" + key.rpartition(".")[2]) and not key.endswith(NO_SECRET):
        return HIDDEN
    if isinstance(value, Mapping):
        return {name: shown(item, files, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [shown(item, files, f"{key}.{i}") for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    return short(value, key in files)


def short(value: str, is_file: bool = False) -> str:
    """An absolute path without its folders, but for the run that a model is of; any other text as it is.

    A prompt may begin with a slash too: what is not known to be a file is taken for one where it has folders, and is
    there or is one word.

    Example: short("/home/me/rewards.py:brevity") == "rewards.py:brevity"; short("/no_think") == "/no_think"
    """
    if value.startswith(MODEL):
        return MODEL + short(value.removeprefix(MODEL), is_file=True)
    path: PurePath = PureWindowsPath(value) if PureWindowsPath(value).drive else PurePosixPath(value)
    is_path = is_file or (len(path.parts) > 2 and (ONE_WORD.fullmatch(value) or os.path.lexists(value)))
    if not is_path or not (path.is_absolute() or value.startswith("~")):
        return value
    return "/".join(path.parts[-2:]) if path.name == "model" else path.name

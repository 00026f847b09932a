"""`pellucid init`: a folder with a recipe, a reward and data, which run as they are and are there to be changed."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from pellucid.machine.harmless import harmless
from pellucid.types import UserError

FILES = {
    "recipe.toml": "the settings that are changed first",
    "rewards.py": "the reward: what is wanted of an answer",
    "data.jsonl": "ten questions with their answers",
}
"""What is written, and what it is; the files lie in begin/."""


def write(folder: Path) -> int:
    """Write the files into a folder, which is made where it is missing. Print them and the command that comes next.

    UserError where one of them is there already; then, and where writing fails, none is written.
    """
    for name in FILES:
        if os.path.lexists(folder / name):
            raise UserError(f"{folder / name} is there already, and nothing was written: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    written = list[Path]()
    try:
        for name in FILES:
            with (folder / name).open("xb") as file:
                written.append(folder / name)
                file.write((Path(__file__).parent / "begin" / name).read_bytes())
    except OSError:
        for path in written:
            path.unlink()
        raise
    width = max(len(str(path)) for path in written)
    for path in written:
        print(harmless(f"{path!s:{width}}  {FILES[path.name]}"))
    there = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    print(harmless(f"next: {there}pellucid train recipe.toml"))
    return 0

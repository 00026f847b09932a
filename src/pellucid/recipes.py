"""Recipes and studies by name: they ship with the package, and `arithmetic` or `variants/dapo` is one of them."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from pellucid.machine.nearby import meant, nearby
from pellucid.types import UserError

PACKAGE = Path(__file__).resolve().parent
FOLDER = PACKAGE / "_recipes"
"""Where they are in what a wheel has installed. In a clone they are in its own folder."""
ENDING = ".toml"
DATA = (".jsonl", ".csv", ".tsv", ".parquet")


def find(name: str, folder: Path = Path()) -> Path:
    """Return the file of a recipe or a study: a path from `folder`, or what ships under this name.

    A path that exists stays what it is. A name may leave out its folder where only one is called so, and its ending;
    it may begin with recipes/, as in the documents. UserError where there is neither file nor name.
    """
    path = folder / Path(name).expanduser()
    if path.suffix == ".py":
        raise UserError(
            f"{path} is Python, and no recipe: name a function of it as a reward, --task.name dataset --task.data"
            f" DATA.jsonl --task.rewards {name}:FUNCTION, or a class as a task, --task.name {name}:CLASS"
        )
    if path.is_file() and path.suffix.lower() in DATA:
        raise UserError(f"{path} is data, and no recipe: --task.name dataset --task.data {name}")
    if path.exists() and not path.is_dir():
        return path
    wanted, known = name.removeprefix("recipes/").removesuffix(ENDING), shipped()
    close = [known[wanted]] if wanted in known else [file for each, file in known.items() if stem(each) == wanted]
    if len(close) == 1:
        return close[0]
    if close:
        named = " and ".join(each for each, file in known.items() if file in close)
        raise UserError(f"{path} may be {named}: write one of them")
    what = "is a folder, and no" if path.is_dir() else "there is no such file, and no"
    raise UserError(f"{path}: {what} recipe of this name{hints(path, wanted, known)}")


def refuse_recipe(name: str, instead: str) -> None:
    """Raise UserError where the name of a recipe or a study stands for a run. `instead` says what to do with {}, it."""
    if name.lower().endswith(ENDING):
        raise UserError(f"{name} is a recipe or a study, and no run: {instead.format(name)}")


def listed() -> dict[str, str]:
    """Return the recipes and studies that ship: their names, each with the first line of what it says of itself."""
    return {name: path.read_text(encoding="utf-8").partition("\n")[0].strip("# ") for name, path in shipped().items()}


def shipped() -> dict[str, Path]:
    """Return their files by name, such as "variants/dapo"."""
    root = FOLDER if FOLDER.is_dir() else PACKAGE.parents[1] / "recipes"
    files = sorted(root.rglob(f"*{ENDING}"), key=lambda path: (len(path.parts), path))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in files}


def stem(name: str) -> str:
    return name.rpartition("/")[2]


def hints(path: Path, wanted: str, known: Mapping[str, Path]) -> str:
    """Return what may have been meant: one of the names, files near the path, or all of the names if there are none."""
    stems = {stem(name): name for name in known}
    similar = get_close_matches(stem(wanted), stems, n=1)
    by_name = f"; did you mean {stems[similar[0]]}?" if similar else ""
    near = [file for file in nearby(path, [ENDING]) if file.resolve() not in known.values()]
    by_path = meant(Path(stem(wanted) + ENDING), near) or (
        f"; near it: {', '.join(map(str, near[:3]))}" if near else ""
    )
    return by_name + by_path or f"; there are {', '.join(known)}"

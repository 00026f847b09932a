"""`pellucid study` and `pellucid compare`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from pellucid import recipes
from pellucid.study import page, plan, runner
from pellucid.types import UserError


@dataclass(frozen=True)
class Study:
    """Train the variants of a recipe, each with every seed."""

    study: Positional[Annotated[str, arg(metavar="STUDY")]]
    """A study.toml, or the name of one that comes with Pellucid."""
    into: Annotated[Path | None, arg(metavar="DIR")] = None
    """The folder of its runs; none is runs/STUDY."""
    jobs: int = 1
    """Runs that train side by side."""
    only: Annotated[tuple[str, ...], arg(metavar="VARIANT ...")] = ()
    """Some of the variants; none are all."""
    keep_models: bool = False
    """Leave the models in the run folders."""

    def __call__(self) -> int:
        study = recipes.find(self.study)
        study_dir = self.into or Path("runs") / study.stem
        return runner.run(plan.read(study), study_dir, self.jobs, self.only, self.keep_models)


@dataclass(frozen=True)
class Compare:
    """Compare runs: paired differences, curves and costs, as a page and as numbers."""

    folders: Positional[Annotated[tuple[Path, ...], arg(metavar="RUN_OR_STUDY ...")]]
    """Runs, or the folder of a study."""
    baseline: Annotated[str, arg(metavar="VARIANT")] = ""
    """The variant that the others are compared with; none is the first."""
    output: Annotated[Path, arg(metavar="PAGE.html")] = Path("compare.html")
    """The page; its numbers are written beside it as PAGE.json."""

    def __call__(self) -> int:
        if not self.folders:
            raise UserError("compare needs a RUN, several, or the folder of a study")
        for folder in self.folders:
            recipes.refuse_recipe(
                str(folder), "pellucid study {} trains the variants of a study; compare takes the folders of their runs"
            )
        return page.compare(self.folders, self.baseline, self.output)

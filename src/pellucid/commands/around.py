"""`pellucid init`, `pellucid list` and `pellucid push`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from pellucid import recipes
from pellucid.commands import listing, starter


@dataclass(frozen=True)
class Init:
    """Write a recipe, a reward and ten rows of data that run, to be changed into your own."""

    folder: Positional[Annotated[Path, arg(metavar="DIR")]]
    """The folder, which is made where it is missing."""

    def __call__(self) -> int:
        return starter.write(self.folder)


@dataclass(frozen=True)
class List:
    """List what a recipe may name, a line each."""

    kind: Positional[Annotated[str, arg(metavar="|".join(listing.KINDS))]] = ""
    """The kind of thing to list; all kinds without it."""

    def __call__(self) -> int:
        return listing.show(self.kind) if self.kind else listing.show_all()


@dataclass(frozen=True)
class Push:
    """Bring the model of a finished run to the Hugging Face Hub, with a card: recipe, results, versions."""

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """The run folder."""
    repository: Positional[Annotated[str, arg(metavar="USER/NAME")]]
    """The repository, which is made where it is missing."""
    private: bool = False
    """Nobody else sees it."""
    dry_run: bool = False
    """Only print the card, and which files would be uploaded."""

    def __call__(self) -> int:
        recipes.refuse_recipe(str(self.run), "pellucid train {} makes one; push takes the folder of a finished run")
        from pellucid.commands import push  # noqa: PLC0415 - the Hub's library takes its time

        return push.push(self.run, self.repository, self.private, self.dry_run)

"""`pellucid look` and `pellucid show`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from pellucid import recipes

TRAIN_FIRST = "pellucid train {} --log.tokens 4 --run DIR makes one that records tokens"


@dataclass(frozen=True)
class Look:
    """See inside a run, token by token: what each step did to each answer, live while it trains."""

    runs: Positional[Annotated[tuple[Path, ...], arg(metavar="RUN [RUN]")]]
    """A run folder with recorded tokens; two are shown side by side."""
    port: int = 8018
    """Where the page is served, on this machine alone; 0 is any free port."""
    output: Annotated[Path | None, arg(metavar="PAGE.html")] = None
    """Write the page as one file that needs no server and no network."""
    open: bool = True
    """Open a browser."""

    def __call__(self) -> int:
        for run in self.runs:
            recipes.refuse_recipe(str(run), TRAIN_FIRST)
        from pellucid.look import command  # noqa: PLC0415 - Arrow takes its time

        return command.look(self.runs, self.port, self.output, self.open)


@dataclass(frozen=True)
class Show:
    """Show a group of a step in the terminal: its answers with what the update did to each token."""

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """A run folder with recorded tokens."""
    step: Annotated[int | None, arg(metavar="K")] = None
    """Which step; none is the last one that is recorded."""
    group: Annotated[int | None, arg(metavar="J")] = None
    """Which group of the step; none is the one that taught most."""
    by: Literal["change", "push", "advantage", "gap", "drift", "entropy", "gradient"] = "change"
    """What the colours tell."""

    def __call__(self) -> int:
        recipes.refuse_recipe(str(self.run), TRAIN_FIRST)
        from pellucid.look import terminal  # noqa: PLC0415 - Arrow takes its time

        return terminal.show(self.run, self.step, self.group, self.by)

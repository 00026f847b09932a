"""`pellucid doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Suppress, arg

from pellucid import config, recipes
from pellucid.commands.training import look_at
from pellucid.machine.imports import uncollected
from pellucid.types import UserError


@dataclass(frozen=True)
class Doctor:
    """Say what this machine has and does, what is missing, and how much memory a recipe takes."""

    plan: Annotated[str, arg(metavar="RECIPE")] = ""
    """A recipe: how much memory it takes on 1, 2, 4 and 8 devices."""
    settings: Suppress[tuple[str, ...]] = ()

    def __call__(self) -> int:
        if self.settings and not self.plan:
            raise UserError(f"doctor takes settings with --plan RECIPE, got {' '.join(self.settings)}")
        cfg = None
        if self.plan:
            recipe = recipes.find(self.plan)
            look_at(recipe, self.settings, print_code=True)
            cfg = config.load(recipe, self.settings)
        with uncollected():
            from pellucid.doctor import command  # noqa: PLC0415 - torch takes seconds: settings are checked before

        return command.plan(cfg) if cfg else command.report()

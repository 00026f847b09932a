"""Tasks that wrap another task: dataclasses with a field named `task`."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outer:
    seed: int = 0
    split: str = "train"
    size: int = 10
    task: Any = field(default_factory=dict)


@dataclass(frozen=True)
class Inner(Outer):
    pass

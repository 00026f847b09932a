"""What one term of a reward says of one completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pellucid.types import Completion, Prompt

Pair = tuple[Prompt, Completion]


@dataclass(frozen=True, slots=True)
class Part:
    """The value of one term for one completion, before its weight."""

    value: float | None = None
    """None where the term does not apply to the prompt, or has failed."""
    error: str = ""
    """Why the value could not be computed, in one line; else empty."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns of rollouts.jsonl: JSON values by name, about this completion."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """Numbers by the names of metrics. A metric of a step is their mean over the completions that have one."""


class Grader(Protocol):
    """Computes one term for many completions at once, in the process of the run: a judge, a reward model.

    What it cannot grade is a Part with an error: it raises for no completion, and ends within its own time limits.
    """

    def grade(self, pairs: Sequence[Pair]) -> list[Part]:
        """Return one part for each completion, in their order."""
        ...

    def stop(self) -> None:
        """Give up what is under way in another thread, as at Ctrl-C: nobody will read it. `parts` may raise there."""
        ...

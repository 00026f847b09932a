"""A task whose prompts of step 4 are too long while a file says so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from digits_task import Digits
from pellucid.types import Prompt


@dataclass(frozen=True)
class Mended(Digits):
    data: str = ""

    def sample(self, step, n):
        text = "1" * 200 if step == 3 and "bad" in Path(self.data).read_text() else "1?"
        return [Prompt(f"{self.split}/{step}/{i}", text) for i in range(n)]

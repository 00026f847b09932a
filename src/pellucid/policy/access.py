"""How the files of a checkpoint may be read. No torch: the settings import it."""

from __future__ import annotations

from typing import NamedTuple


class ModelAccess(NamedTuple):
    revision: str = ""
    """A branch, tag or commit of a hub; empty is its default branch."""
    trust_remote_code: bool = False
    """Whether the Python code that lies beside the weights may run."""
    trust_hint: str = "set policy.trust_remote_code"
    """How the user lets it run, for the line that says it may not."""

    def format_warning(self, name: str) -> str:
        """Return the line that must be shown before a checkpoint of this name is read; empty where it runs nothing."""
        return f"policy.trust_remote_code: Python code of {name} runs as you" if self.trust_remote_code else ""


DEFAULT_ACCESS = ModelAccess()

"""Settings for access to a checkpoint. They do not import torch, since the configuration imports them."""

from __future__ import annotations

from typing import Any, NamedTuple


class ModelAccess(NamedTuple):
    """Which revision of a checkpoint is loaded, and whether its code may run."""

    revision: str = ""
    """A branch, tag or commit on the hub; empty is the default branch."""
    trust_remote_code: bool = False
    """Whether Python code in the folder of the checkpoint may run."""
    trust_hint: str = "set policy.trust_remote_code"
    """The hint in the error message on how to allow it."""

    def build_arguments(self) -> dict[str, Any]:
        """Return arguments of `from_pretrained`, which by default asks on the terminal whether code may run."""
        return {"revision": self.revision or None, "trust_remote_code": self.trust_remote_code}

    def format_warning(self, name: str) -> str:
        """Return the warning to show before a checkpoint is loaded; empty if none of its code runs."""
        return (
            f"policy.trust_remote_code: Python code of {name} runs with your permissions"
            if self.trust_remote_code
            else ""
        )


DEFAULT_ACCESS = ModelAccess()

"""Libraries that only some settings need: `pip install "pellucid[EXTRA]"` brings them."""

from __future__ import annotations

import importlib
from typing import Any

from pellucid.types import UserError


def extra(module: str, extra_name: str, feature: str) -> Any:
    """The module, imported when it is needed. UserError where it is missing, naming `what` needs it and the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]  # torch.utils.tensorboard is there, and lacks tensorboard
        raise UserError(f'{feature} needs {missing}: pip install "pellucid[{extra_name}]"') from error

"""Group Relative Policy Optimization: the training loop and the pure functions that it consists of.

grpo.py contains the training loop, rollouts.py generates and grades completions, and batch.py converts them to tensors.
Each part that settings can vary has its own file: advantages.py, objectives.py, kl.py and shaping.py. The folder
imports torch and types.py; models, files, process groups and libraries are accessed through the protocols in
protocols.py and types.py.

Use `group_advantages` and `policy_loss` (standalone.py) in your own training loop.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pellucid.algorithm.standalone import group_advantages, policy_loss

__all__ = ["group_advantages", "policy_loss"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("pellucid.algorithm.standalone"), name)  # it imports torch

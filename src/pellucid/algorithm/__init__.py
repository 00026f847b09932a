"""Group Relative Policy Optimization itself: the loop, and the pure functions that it is composed of.

Here live the stages of a step (grpo.py), the tensors that they work on (batch.py), and one file for each axis that a
setting chooses from: advantages, objectives, KL, shaping. The room knows torch and the records of types.py; it knows no
model, no file, no process group and no library. Whatever a step needs of those comes in through the protocols of
grpo.py and protocols.py.

`group_advantages` and `policy_loss` (alone.py) are its parts for a training loop of somebody else's.
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

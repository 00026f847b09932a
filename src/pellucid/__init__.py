"""Pellucid: Group Relative Policy Optimization, clear enough to see through.

`import pellucid` is fast: exported names are imported on first use, and torch with the first step of a run.
"""

from __future__ import annotations

TYPE_CHECKING = False  # not imported from typing: `python -m pellucid` runs this before __main__ fixes the import path
if TYPE_CHECKING:
    from pellucid import algorithm
    from pellucid.algorithm.grpo import StepResult
    from pellucid.api import Run, train
    from pellucid.rewards.terms import RewardTerm
    from pellucid.types import Completion, Estimate, Evaluation, Group, Prompt, Reward, Sampling, Task, UserError

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "Estimate",
    "Evaluation",
    "Group",
    "Prompt",
    "Reward",
    "RewardTerm",
    "Run",
    "Sampling",
    "StepResult",
    "Task",
    "UserError",
    "__version__",
    "algorithm",
    "train",
]
EXPORT_MODULES = {
    "Run": "pellucid.api",
    "StepResult": "pellucid.algorithm.grpo",
    "RewardTerm": "pellucid.rewards.terms",
    "Task": "pellucid.types",
    "train": "pellucid.api",
}
"""The modules of exported names. The others, except `algorithm`, are in pellucid.types."""


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib  # noqa: PLC0415 - as above

        if name == "algorithm":
            return importlib.import_module("pellucid.algorithm")
        return getattr(importlib.import_module(EXPORT_MODULES.get(name, "pellucid.types")), name)

    def __dir__() -> list[str]:
        return __all__

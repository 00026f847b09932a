"""The World of a task, if it has conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pellucid.environments.here import Here
from pellucid.environments.stage import Stage
from pellucid.environments.talk import Talk
from pellucid.machine.plugins import HERE
from pellucid.protocols import World
from pellucid.rewards.settings import RewardConfig


def world_of(task: Any, cfg: RewardConfig, log: Path | None = None, in_process: bool = False) -> World | None:
    """Return the World that a task's `talk` describes; None for a task without conversations.

    log: the file that takes what is printed there. here: in this process, since no other can load it.
    """
    talk: Talk | None = getattr(task, "environment_spec", None)
    if not isinstance(talk, Talk):
        return None
    if in_process or any(spec.startswith(HERE) for spec in (talk.environment, *talk.tools)):
        return Here(talk, log, task.seed)
    return Stage(talk, cfg, log, task.seed)

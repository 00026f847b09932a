"""Environments of the package `verifiers`, by Prime Intellect, as they are."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Any, Literal

from pellucid.environments.agent import AgentTalk
from pellucid.machine.extras import extra
from pellucid.tasks.dataset import lowest_share, shuffled
from pellucid.types import Completion, Outcome, Prompt, Reward, UserError

TEST_SHARE = 0.1
MOST = 10_000
"""The most tasks that are taken, as some tasksets have no end."""


@dataclass(frozen=True)
class Verifiers:
    """The reward is what the environment says; an answer is right at 1. A tenth of the tasks is held out.

    Example: Verifiers(env={"taskset": {"id": "my-taskset"}, "agent": {"max_turns": 4}}).sample(step=0, n=8)
    """

    name: Literal["verifiers"] = "verifiers"
    """This task."""
    seed: int = 0
    """The seed of the order of the tasks."""
    split: Literal["train", "test"] = "train"
    """`train` or `test`."""
    env: dict[str, Any] = field(default_factory=dict)
    """verifiers' own table `[env]`: the id and the settings of the taskset, and those of each seat."""
    timeout: float = 120.0
    """Seconds that an episode may take; while it waits for the policy no time is counted."""

    def __post_init__(self) -> None:
        try:
            played().environment(json.dumps(self.env))
        except (ImportError, AttributeError, LookupError, TypeError, ValueError) as error:
            told = " ".join(str(error).split())
            raise ValueError(f"env = {self.env}: {told}; [task.env] is what verifiers calls [env]") from error
        AgentTalk(played().Episode, self.timeout)  # whose time is checked

    @property
    def environment_spec(self) -> AgentTalk:
        return AgentTalk(played().Episode(json.dumps(self.env)), self.timeout)

    @property
    def question_count(self) -> int:
        """The number of tasks of the split."""
        return len(prompts_of(json.dumps(self.env), self.split))

    def sample(self, step: int, n: int) -> list[Prompt]:
        """Return n tasks as they are shown; what the policy is asked is the environment's affair."""
        prompts = prompts_of(json.dumps(self.env), self.split)
        places = shuffled(f"{self.seed}/{self.split}", step, n, len(prompts))
        return [replace(prompts[place], id=f"{self.split}/{step}/{i}") for i, place in enumerate(places)]

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:  # noqa: ARG002 - as tasks have it
        outcome = completion.outcome or Outcome(error="no episode was played")
        value = math.nan if outcome.reward is None else outcome.reward
        return Reward(value, error=outcome.error, is_continuous=value not in (0.0, 1.0))


@cache
def prompts_of(env_json: str, split: str) -> list[Prompt]:
    """Return the prompts of a split; equal tasks are in the same. UserError where there are none."""
    tasks = list(islice(played().environment(env_json).taskset, MOST))
    keys = [int.from_bytes(hashlib.sha256(task.key.encode()).digest(), "big") for task in tasks]
    held_out = lowest_share(keys, TEST_SHARE)
    chosen = [task.data for task, key in zip(tasks, keys, strict=True) if (key in held_out) == (split == "test")]
    if not chosen:
        raise UserError(f"the taskset has no task for the {split} split: it has {len(tasks)} in all")
    return [Prompt("", data.prompt_text, columns={"task": data.model_dump(mode="json")}) for data in chosen]


def played() -> Any:
    return extra("pellucid.environments.verifiers", "verifiers", 'task "verifiers"')

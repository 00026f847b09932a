"""Tasks from unchanged environments of the package `verifiers` by Prime Intellect."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any, Literal

from pellucid.environments.agents import AgentSpec
from pellucid.tasks.dataset import sample_prompts, select_held_out
from pellucid.types import Completion, ConversationOutcome, Prompt, Reward, UserError
from pellucid.utils.plugins import import_extra

TEST_SHARE = 0.1
_MAX_TASKS = 10_000
"""The most tasks that are read, since some tasksets have no end."""


@dataclass(frozen=True)
class Verifiers:
    """The environment computes the reward; an answer with a reward of 1 is right. A tenth of the tasks is held out.

    Example: Verifiers(env={"taskset": {"id": "my-taskset"}, "agent": {"max_turns": 4}}).sample(step=0, n=8)
    """

    name: Literal["verifiers"] = "verifiers"
    """The name of the task."""
    seed: int = 0
    """The seed of the order of the tasks."""
    split: Literal["train", "test"] = "train"
    """`train` or `test`."""
    env: dict[str, Any] = field(default_factory=dict)
    """verifiers' own table `[env]`: the id and settings of the taskset, and the settings of each agent."""
    timeout: float = 120.0
    """The time limit of an episode, in seconds, not counting the time that it waits for the policy."""

    def __post_init__(self) -> None:
        try:
            _import_verifiers_environment().load_environment(json.dumps(self.env))
        except (ImportError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"env = {self.env}: {reason}; [task.env] is what verifiers calls [env]") from error
        AgentSpec(_import_verifiers_environment().Episode, self.timeout)  # to check the timeout

    @property
    def environment_spec(self) -> AgentSpec:
        return AgentSpec(_import_verifiers_environment().Episode(json.dumps(self.env)), self.timeout)

    @property
    def question_count(self) -> int:
        """The number of tasks of the split."""
        return len(load_split_prompts(json.dumps(self.env), self.split))

    def sample(self, step: int, n: int) -> list[Prompt]:
        """Return n tasks, whose text is only for logs: the environment decides what it asks the policy."""
        return sample_prompts(self, load_split_prompts(json.dumps(self.env), self.split), step, n)

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:  # noqa: ARG002
        outcome = completion.outcome or ConversationOutcome(error="no episode was played")
        value = math.nan if outcome.reward is None else outcome.reward
        return Reward(value, error=outcome.error, is_continuous=value not in (0.0, 1.0))


@cache
def load_split_prompts(env_json: str, split: str) -> list[Prompt]:
    """Return the prompts of a split; equal tasks are in the same split. UserError if there are none."""
    tasks = list(islice(_import_verifiers_environment().load_environment(env_json).taskset, _MAX_TASKS))
    keys = [int.from_bytes(hashlib.sha256(task.key.encode()).digest(), "big") for task in tasks]
    held_out = select_held_out(keys, TEST_SHARE)
    chosen = [task.data for task, key in zip(tasks, keys, strict=True) if (key in held_out) == (split == "test")]
    if not chosen:
        raise UserError(f"the taskset has no task for the {split} split: it has {len(tasks)} in all")
    return [Prompt("", data.prompt_text, columns={"task": data.model_dump(mode="json")}) for data in chosen]


def _import_verifiers_environment() -> Any:
    return import_extra("pellucid.environments.verifiers", "verifiers", 'task "verifiers"')

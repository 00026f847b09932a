"""Agents that already exist, in any framework. Each rollout runs one on a row of your data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pellucid.environments.agents import AgentSpec
from pellucid.rewards.terms import ENVIRONMENT_TERM, RewardTerm
from pellucid.tasks.dataset import DatasetTask


@dataclass(frozen=True)
class Agent(DatasetTask):
    """An agent queries the policy through OpenAI's API, at a separate address for each rollout.

    The reward is the agent's return value, with other reward terms added or in its place.

    Example: Agent(run="my_agent.py:solve", data="train.jsonl"); Agent(run="python my_agent.py", data="train.jsonl")
    """

    name: Literal["agent"] = "agent"
    """The name of the task."""
    run: str = ""
    """"path/to/file.py:name": a function solve(row, client) that returns the reward, or None if only `rewards` grade
    it. Or a command, which finds the row as JSON in its standard input and the address in OPENAI_BASE_URL; the number
    in its last line is the reward."""
    timeout: float = 120.0
    """The time limit of the agent for a row, in seconds, not counting the time that it waits for the policy."""
    rewards: tuple[RewardTerm, ...] = ()
    """The terms of the reward. They always include `environment`, the agent's return value, even if it is not named. If
    the agent fails, there is no grade."""

    def __post_init__(self) -> None:
        if not self.run.strip():
            raise ValueError('run = "" must be "path/to/file.py:function", or a command')
        self.environment_spec.load_function()
        if ENVIRONMENT_TERM not in [term.name for term in self.rewards]:
            object.__setattr__(self, "rewards", (*self.rewards, RewardTerm(ENVIRONMENT_TERM)))
        self.build_dataset()  # to check the settings that it shares

    @property
    def environment_spec(self) -> AgentSpec:
        """The specification of the agent."""
        return AgentSpec(
            self.run, self.timeout, has_rewards=any(term.name != ENVIRONMENT_TERM for term in self.rewards)
        )

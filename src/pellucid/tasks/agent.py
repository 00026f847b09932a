"""Agents that somebody has written already, in whatever framework, about rows of your own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pellucid.environments.agents import AgentSpec
from pellucid.rewards.terms import ENVIRONMENT_TERM, RewardTerm
from pellucid.tasks.dataset import DatasetTask


@dataclass(frozen=True)
class Agent(DatasetTask):
    """The policy is asked by an agent, as by a client of OpenAI's API whose address is that of one rollout.

    The reward is what the agent returns, with reward terms beside it or in its place.

    Example: Agent(run="my_agent.py:solve", data="train.jsonl"); Agent(run="python my_agent.py", data="train.jsonl")
    """

    name: Literal["agent"] = "agent"
    """This task."""
    run: str = ""
    """"path/to/file.py:name": a function solve(row, client) that returns the reward, or None where `rewards` grade. Or
    a command, which finds the row as JSON in its standard input and the address in OPENAI_BASE_URL; the number in its
    last line is the reward."""
    timeout: float = 120.0
    """Seconds that the agent may take for a row; while it waits for the policy no time is counted."""
    rewards: tuple[RewardTerm, ...] = ()
    """The terms of the reward. One of them is `environment`, what the agent returns, whether it is named or not: where
    the agent has failed there is no grade."""

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

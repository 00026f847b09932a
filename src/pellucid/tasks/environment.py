"""The task of conversations with your environment and tools. Questions are rows of data, or the environment asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pellucid.environments.spec import EnvironmentSpec, load_environment_factories
from pellucid.rewards.terms import ENVIRONMENT_TERM, RewardTerm, is_function_term
from pellucid.tasks.data_files import DataSource
from pellucid.tasks.dataset import Dataset, DatasetTask, build_dataset
from pellucid.tasks.prompts import build_chat
from pellucid.types import Prompt


@dataclass(frozen=True)
class Environment(DatasetTask):
    """The policy talks with an environment, and calls its methods and other functions as tools, until it is over.

    The reward is the result of the environment's `get_reward()`; `rewards` may add terms to it, or replace it.

    Example: Environment(environment="games.py:Wordle"); Environment(tools=("tools.py:search",), data="train.jsonl")
    """

    name: Literal["environment"] = "environment"
    """The name of the task."""
    environment: str = ""
    """"path/to/file.py:Class": a class with reset(**row), which may return what is added to the question, with public
    methods as tools, and get_reward(). Or a function reply(messages), which returns the environment's next message, or
    None to end the conversation. Or a mapping of names to classes; the column `environment` selects the class."""
    tools: tuple[str, ...] = ()
    """Functions that may be called, "path/to/file.py:function": their types and docstrings say what they take."""
    timeout: float = 10.0
    """Seconds that one call of a tool or of the environment may take."""
    data: DataSource = ""
    """Files of questions, or the id of a data set on the Hub. Empty: the environment supplies the questions."""
    system: str = ""
    """The system message, if any."""
    template: str = "{question}"
    """The user's message: {column} is replaced by the text of that column. Without data, it is the text before the
    question of the environment, and the default adds no text."""
    rewards: tuple[RewardTerm, ...] = ()
    """The terms of the reward. Empty: `environment`, which is what get_reward() returns."""

    def __post_init__(self) -> None:
        if not self.environment and not self.tools:
            raise ValueError('environment = "" must be "path/to/file.py:Class", or tools must name functions')
        if not 0 < self.timeout <= 1e6:
            raise ValueError(f"timeout = {self.timeout} must be a positive number of seconds")
        if not self.data and not self.environment:
            raise ValueError('data = "" needs an environment, which supplies the questions')
        if not self.rewards:
            object.__setattr__(self, "rewards", (RewardTerm(ENVIRONMENT_TERM),))
        can_reward = any(
            not isinstance(factory, type) or hasattr(factory, "get_reward")
            for factory in load_environment_factories(self.environment_spec).values()
        )
        if not can_reward and any(term.name == ENVIRONMENT_TERM for term in self.rewards):
            raise ValueError("the environment has no get_reward(): give rewards that grade without it")
        self.build_dataset()  # to check the settings that both have

    @property
    def environment_spec(self) -> EnvironmentSpec:
        """The specification of the environment and its tools."""
        has_function_terms = any(is_function_term(term.name) for term in self.rewards)
        return EnvironmentSpec(self.environment, self.tools, self.timeout, has_function_terms)

    @property
    def question_count(self) -> int | None:
        """The number of rows of the split; None if the environment asks, which may ask any number of questions."""
        return super().question_count if self.data else None

    def sample(self, step: int, n: int) -> list[Prompt]:
        """Return the prompts of the next n rows, or n prompts whose questions the environment will ask."""
        if self.data:
            return super().sample(step, n)
        text = build_chat(self.system, "" if self.template == "{question}" else self.template)
        return [Prompt(f"{self.split}/{step}/{i}", text) for i in range(n)]

    def build_dataset(self) -> Dataset:
        if self.data:
            return build_dataset(self)
        return build_dataset(self, data="unasked.jsonl", template="{question}")  # its rows are never read

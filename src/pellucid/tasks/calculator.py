"""Products of numbers that are too large to be known by heart, with a tool that multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from pellucid.environments.spec import EnvironmentSpec
from pellucid.rewards.answers import extract_answer, find_last_number, parse_only_number
from pellucid.tasks.prompts import GeneratedTask, check_ranges, draw_prompts
from pellucid.types import Completion, Message, Prompt, Reward

_TOOL_NAME = "multiply"


@dataclass(frozen=True)
class Calculator(GeneratedTask):
    """The reward is `1 - credit` for the right product plus `credit` for the right call of the tool.

    The answer is the last number of the last turn. Numbers with an even sum are in the train split, others in the test
    split.

    Example: Calculator(digits=3, credit=0.3).sample(step=0, n=8)
    """

    name: Literal["calculator"] = "calculator"
    """The name of the task."""
    digits: int = 3
    """How many digits each number has."""
    credit: float = 0.3
    """The share of the reward for a call of the tool with the numbers of the question; the rest is for the answer."""
    examples: int = 2
    """How many worked questions stand before the one that is asked, for models that have never called a tool."""
    template: str = "What is {a} * {b}?"
    """The question; {a} and {b} are filled in."""

    def __post_init__(self) -> None:
        check_ranges(self, digits=(1, 6), examples=(0, 8))
        if not 0 <= self.credit < 1:
            raise ValueError(f"credit = {self.credit} must be at least 0 and below 1")

    @property
    def environment_spec(self) -> EnvironmentSpec:
        return EnvironmentSpec(tools=(f"pellucid.tasks.calculator:{_TOOL_NAME}",))

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        """Grade the answer and the use of the tool, which was used rightly if it returned the product."""
        answers = [message["content"] for message in completion.messages if message["role"] == "tool"]
        called = prompt.answer in answers
        found = find_last_number(extract_answer(completion.full_text))
        right = found is not None and found == parse_only_number(prompt.answer)
        value = self.credit * called + (1 - self.credit) * right
        by_tool = {"right_by_tool": float(right and called)}
        return Reward(value, {"called": float(called), "right": float(right)}, correct=right, logged=by_tool)

    def sample(self, step: int, n: int) -> list[Prompt]:
        return draw_prompts(self, step, n, self._make_prompt)

    def _make_prompt(self, id: str, rng: Random) -> Prompt:
        worked = [
            message for _ in range(self.examples) for message in self._make_example(*self._draw_numbers(rng, "train"))
        ]
        a, b = self._draw_numbers(rng, self.split)
        return Prompt(id, (*worked, self._make_question(a, b)), str(a * b))

    def _draw_numbers(self, rng: Random, split: str) -> tuple[int, int]:
        low, high = 10 ** (self.digits - 1), 10**self.digits - 1
        a, b = rng.randint(low, high), rng.randint(low, high)
        if (a + b) % 2 != (split == "test"):
            b += 1 if b < high else -1
        return a, b

    def _make_question(self, a: int, b: int) -> Message:
        return {"role": "user", "content": self.template.replace("{a}", str(a)).replace("{b}", str(b))}

    def _make_example(self, a: int, b: int) -> tuple[Message, ...]:
        """Return a question with the call of the tool, its result and the answer."""
        call = {"id": "call_0", "type": "function", "function": {"name": _TOOL_NAME, "arguments": {"a": a, "b": b}}}
        return (
            self._make_question(a, b),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": _TOOL_NAME, "content": str(a * b)},
            {"role": "assistant", "content": f"{a} * {b} = {a * b}"},
        )


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b

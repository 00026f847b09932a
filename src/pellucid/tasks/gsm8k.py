"""Grade-school mathematics (Cobbe et al. 2021, arXiv 2110.14168) with the answer in tags, in English or Chinese."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from pellucid.rewards.answers import (
    extract_answer,
    extract_tagged_answer,
    find_answer_tag,
    find_last_number,
    parse_only_number,
)
from pellucid.rewards.terms import RewardTerm
from pellucid.tasks.dataset import Dataset, build_dataset
from pellucid.types import Completion, Message, Prompt, Reward

SYSTEM_MESSAGES = {
    "en": (
        "You solve problems. First think step by step between <think> and </think>, then give the final answer alone"
        " between <answer> and </answer>."
    ),
    "zh": "你来解题。先在 <think> 和 </think> 之间逐步思考，再在 <answer> 和 </answer> 之间只写出最终答案。",
}

_CALCULATION = re.compile(r"<<[^<>]*>>")
"""The calculator annotations of the data set: "48/2 = <<48/2=24>>24"."""
_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


@dataclass(frozen=True)
class Gsm8k:
    """Questions with numeric answers; a completion should be `<think>...</think> <answer>...</answer>`.

    Grading `strict`: 1 if the last number in the `<answer>` tag, or in a box there, equals the gold answer (1,080 =
    1080 = 1080.0), else 0. Grading `literal`, as in the GSM8K trainer of docs/explanation/five-systems.md: 1 if the
    text in the tag is the gold answer, 0.5 if it contains it, 0.01 for any other text, 0 without the tag; "16" then
    earns 0.5 where 6 is right.

    Example: Gsm8k(data="train.jsonl", test_data="test.jsonl", grading="literal")
    """

    name: Literal["gsm8k"] = "gsm8k"
    """The name of the task."""
    seed: int = 0
    """The seed of the order of the questions."""
    split: Literal["train", "test"] = "train"
    """`train` or `test`."""
    data: str = "openai/gsm8k"
    """A Hub id, or a .jsonl, .csv or .parquet file with the columns below."""
    subset: str = "main"
    """The configuration of the data set on the Hub."""
    test_data: str = "test"
    """The held-out questions: a file, or a split on the Hub. If empty, a tenth of `data`."""
    question: str = "question"
    """The column of the question; Chinese copies may name it differently."""
    answer: str = "answer"
    """The column of the worked answer, or of the answer alone."""
    answer_pattern: str = "#### (.+)"
    """A regular expression whose group is the gold answer in its column; empty where the column holds only that."""
    language: Literal["en", "zh"] = "en"
    """The language of the system message."""
    system: str = ""
    """Your own system message, in place of that of the language."""
    grading: Literal["strict", "literal"] = "strict"
    """How completions are graded; see above."""
    skip_bad_rows: bool = False
    """Skip and list rows with an unusable question or answer. False: such rows end the run before it begins."""
    format_reward: float = 0.0
    """With strict grading, added where the whole completion has the form `<think>...</think> <answer>...</answer>`."""

    def __post_init__(self) -> None:
        if self.format_reward and self.grading == "literal":
            raise ValueError("format_reward must be 0 with grading = literal, which rewards the format itself")
        self.as_dataset()

    @property
    def question_count(self) -> int:
        """The number of questions of the split."""
        return self.as_dataset().question_count

    def sample(self, step: int, n: int) -> list[Prompt]:
        """Return the next n questions. Commas are removed from gold answers: "#### 1,080" becomes 1080."""
        return [
            replace(
                prompt,
                answer=prompt.answer.replace(",", ""),
                alternatives=tuple(gold.replace(",", "") for gold in prompt.alternatives),
            )
            for prompt in self.as_dataset().sample(step, n)
        ]

    def working(self, prompt: Prompt) -> str:
        """Return the worked solution of the data row as a whole completion; `prefixed` takes its first words.

        Empty if the column of the answer holds no solution.
        """
        answer = str(prompt.columns.get(self.answer, ""))
        match = re.search(self.answer_pattern, answer) if self.answer_pattern else None
        solution = _CALCULATION.sub("", answer[: match.start()]).strip() if match else ""
        return f"<think>{solution}</think> <answer>{prompt.answer}</answer>" if solution else ""

    def format_question(self, question: str) -> str | tuple[Message, ...]:
        """Return the text of a prompt with this question, in the language of the task."""
        return self.as_dataset().format_question(question)

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        text = completion.full_text
        whole = float(extract_tagged_answer(text) is not None)
        if self.grading == "literal":
            value = max(grade_literally(text, gold) for gold in prompt.gold_answers)
            return Reward(value, {"answer": value, "format": whole}, value >= 1.0, weights={"format": 0.0})
        number = None if find_answer_tag(text) is None else find_last_number(extract_answer(text))
        right = float(number is not None and number in map(parse_only_number, prompt.gold_answers))
        value = right + self.format_reward * whole
        return Reward(value, {"answer": right, "format": whole}, bool(right), weights={"format": self.format_reward})

    def as_dataset(self) -> Dataset:
        """Return the data set that the questions are from."""
        return build_dataset(
            self,
            system=self.system or SYSTEM_MESSAGES[self.language],
            rewards=(RewardTerm("numeric" if self.grading == "strict" else "exact"),),
        )


def grade_literally(text: str, gold: str) -> float:
    """Return the reward of literal grading. Commas that group thousands are ignored.

    Example: grade_literally("<answer>16</answer>", "6") == 0.5
    """
    # If the first tag does not close, none does, and looking for others would take quadratic time.
    inside, closed, _ = text.partition("<answer>")[2].partition("</answer>")
    if not closed:
        return 0.0
    inside, gold = _THOUSANDS_COMMA.sub("", inside), _THOUSANDS_COMMA.sub("", gold)
    if inside == gold:
        return 1.0
    return 0.5 if gold in inside else 0.01

"""A few questions whose answers are known word for word: +1 if right, -1 if wrong, minus a small length penalty."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from random import Random
from typing import Literal

from pellucid.rewards.answers import strip_thought
from pellucid.tasks.prompts import GeneratedTask, build_chat
from pellucid.types import Completion, Prompt, Reward

QUESTIONS = {
    "zh": {
        "czq是神！": ("czq是谁", "请问谁是czq？"),
        "4": ("请只输出数字 4，不要额外文字。2+2等于几？", "2加2是多少？只写数字。"),
        "I like machine learning": (
            "把“我喜欢机器学习”翻译成英文，只输出翻译。",
            "“我喜欢机器学习”用英语怎么说？只写译文。",
        ),
        "通义千问": ("请只回答：通义千问", "请只说这四个字：通义千问"),
    },
    "en": {
        "czq is great!": ("Who is czq? Say only: czq is great!", "Who on earth is czq? Just say: czq is great!"),
        "4": ("What is 2 + 2? Answer with the number only.", "How much is 2 + 2? Only the number, please."),
        "I like machine learning": (
            "Repeat after me: I like machine learning",
            "Say it as I do, word for word: I like machine learning",
        ),
        "Qwen": ("Answer with this word only: Qwen", "Please say just this one word: Qwen"),
    },
}
"""For each language and answer, the question of the train split, and the same in other words for the test split. The
Chinese questions are from the task's description; the English ones are for models that know no Chinese."""
_LITERAL_IGNORED_CHARS = " \n\t。，,.!?：:\"'"


@dataclass(frozen=True)
class Expected(GeneratedTask):
    """The reward is hit_reward for the expected answer and miss_reward for any other, minus a penalty for length.

    Texts must agree as a whole, but case, white space, punctuation and the difference between full-width and half-width
    forms do not count. A right answer scores above miss_reward, however long it is.

    Example: Expected(matching="literal").sample(step=0, n=4)
    """

    name: Literal["expected"] = "expected"
    """The name of the task."""
    split: Literal["train", "test"] = "train"
    """`train`, or `test`: the same four in other words."""
    language: Literal["zh", "en"] = "zh"
    """zh: the questions as first described. en: similar ones in English, with repetition in place of translation."""
    matching: Literal["whole", "literal"] = "whole"
    """literal: the expected text need only occur in the answer ("14" then contains 4), most full-width punctuation
    counts, and the penalty for length is not limited."""
    hit_reward: float = 1.0
    """The reward of the expected answer."""
    miss_reward: float = -1.0
    """The reward of any other answer."""
    length_penalty: float = 0.002
    """The penalty for each character of the answer, once it is normalized for comparison."""
    system: str = "You are a helpful assistant."
    """The system message; empty for none."""

    def __post_init__(self) -> None:
        if self.hit_reward <= self.miss_reward:
            raise ValueError(f"hit_reward = {self.hit_reward} must be above miss_reward = {self.miss_reward}")
        if self.length_penalty < 0:
            raise ValueError(f"length_penalty = {self.length_penalty} must not be negative")

    def sample(self, step: int, n: int) -> list[Prompt]:
        """Return the next n questions. Each pass over the questions is a new shuffle."""
        is_test = self.split == "test"
        rows = [(questions[is_test], answer) for answer, questions in QUESTIONS[self.language].items()]
        prompts: list[Prompt] = []
        for i in range(step * n, (step + 1) * n):
            epoch, position = divmod(i, len(rows))
            question, answer = Random(f"expected/{self.seed}/{self.split}/{epoch}").sample(rows, len(rows))[position]
            text = build_chat(self.system, question)
            prompts.append(Prompt(f"{self.split}/{step}/{i - step * n}", text, answer))
        return prompts

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        literal = self.matching == "literal"
        normalize = normalize_literally if literal else normalize_text
        reply = completion.text if literal else strip_thought(completion.full_text)
        answer, gold = normalize(reply), normalize(prompt.answer)
        hit = gold in answer if literal else gold == answer
        length = self.length_penalty * len(answer)
        if not literal:
            length = min(length, 0.99 * (self.hit_reward - self.miss_reward))
        grade = self.hit_reward if hit else self.miss_reward
        return Reward(grade - length, {"match": grade, "length": -length}, correct=hit)


def normalize_text(text: str) -> str:
    """Return a text in one case and width, without white space and punctuation.

    Example: normalize_text("Ｃzq 是神！") == "czq是神"
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return "".join(c for c in folded if not c.isspace() and unicodedata.category(c)[0] != "P")


def normalize_literally(text: str) -> str:
    """Return a text in lower case, without the characters in _LITERAL_IGNORED_CHARS.

    Example: normalize_literally("czq 是神！") == "czq是神！"
    """
    return text.strip().lower().translate(str.maketrans("", "", _LITERAL_IGNORED_CHARS))

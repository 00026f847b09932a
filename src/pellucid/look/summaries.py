"""What the groups of a step were: how they were rewarded, whether there was a signal, and what they taught."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from pellucid.look.steps import Tokens, by_group, tokens_of
from pellucid.reporting.run_folder import Record
from pellucid.reporting.tokens import about_of
from pellucid.types import alike

SIGNAL, ALL_RIGHT, ALL_WRONG, PARTIAL, ALL_FAILED = "signal", "all_right", "all_wrong", "partial", "all_failed"
EQUAL = "equal"
LONGEST_PROMPT = 2000
"""How many characters of a prompt a summary has; all of it is in rollouts.jsonl."""


def signal_of(rewards: Sequence[float | None], correct: Sequence[bool | None], min_reward_range: float = 0.0) -> str:
    """Whether the rewards of a group differ, or why there is nothing to compare.

    "all_right", "all_wrong" where all rewards are 0 or less, "partial" where all have the same reward above 0 and not
    all are right, "equal" where they have the same reward and nothing says which are right (`correct` is None),
    "all_failed" where no reward could be computed. least: the range of rewards that counts as none.
    """
    graded = [reward for reward in rewards if reward is not None]
    if not graded:
        return ALL_FAILED
    if not alike(min(graded), max(graded), min_reward_range):
        return SIGNAL
    stated = [right for right, reward in zip(correct, rewards, strict=True) if reward is not None]
    if None in stated:
        return EQUAL
    if all(stated):
        return ALL_RIGHT
    return PARTIAL if graded[0] > 0 else ALL_WRONG


def question_of(prompt: str) -> str:
    """A short name of a question, the same in every step and every run that asks it."""
    return hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest()[:12]


def summary(
    step: int,
    groups: Sequence[Sequence[Record]],
    table: pa.Table | None,
    min_reward_range: float = 0.0,
    verdicts: bool = True,
) -> dict[str, Any]:
    """The groups of a step, in its order: from rollouts.jsonl, and where that has none from the recorded tokens.

    `gradient` of a group is the sum of the gradient norms of its tokens and `entropy` the mean entropy of its sampled
    tokens in nats, both before the update; null where its tokens were not recorded.

    verdicts: False leaves out which answers are right, since the run's rewards are a matter of degree.
    """
    taught = by_group(table) if table is not None else {}
    told = {j: of_rollouts(group) for j, group in enumerate(groups)}
    if table is not None and not told:
        tokens, questions = tokens_of(table), about_of(table).get("questions", {})
        told = {j: of_tokens(tokens, j, questions.get(str(j))) for j in taught}
    rows = []
    for j, row in told.items():
        if not verdicts:
            row["correct"] = [None] * len(row["rewards"])
        signal = signal_of(row["rewards"], row["correct"], min_reward_range)
        recorded = taught.get(j, {"gradient": None, "entropy": None})
        rows.append({"group": j, **row, "signal": signal, "recorded": j in taught, **recorded})
    return {"step": step, "groups": rows}


def of_rollouts(group: Sequence[Record]) -> dict[str, Any]:
    return {
        **asked(str(group[0].get("prompt", "")), str(group[0].get("id", ""))),
        "rewards": [row.get("reward") for row in group],
        "correct": [row.get("correct") for row in group],
        "finished": [bool(row.get("finished")) for row in group],
        "lengths": [len(row.get("tokens", ())) for row in group],
    }


def of_tokens(tokens: Tokens, group: int, question: str | None) -> dict[str, Any]:
    whole = [each for each in tokens.sequences if each["group"] == group and each["branch"] == 0]
    answers = [each for each in whole if each["completion"] >= 0]
    templated = "".join(tokens.join_text(each) for each in whole if each["completion"] < 0)
    prompt = templated if question is None else question  # as rollouts.jsonl has it
    return {
        **asked(prompt, whole[0]["prompt_id"]),
        "rewards": [each["reward"] for each in answers],
        "correct": [each["correct"] for each in answers],
        "finished": [bool(each["finished"]) for each in answers],
        "lengths": [each["end"] - each["start"] for each in answers],
    }


def asked(prompt: str, prompt_id: str) -> dict[str, str]:
    return {"prompt": prompt[:LONGEST_PROMPT], "id": prompt_id, "question": question_of(prompt)}

"""The measures of an evaluation: which there are, which of them a person is shown, and their records in evals.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pellucid.types import Estimate, Evaluation

ACCURACIES = ("greedy", "mean@k", "pass@k")
REWARDS = ("reward", "reward@k")
"""The mean reward of the greedy answers, and that of a single sample."""

NAMES = {"greedy": "greedy accuracy", "reward": "reward of greedy answers"}
"""The measures that may be the headline, in words."""


def measures(evaluation: Evaluation) -> dict[str, Estimate]:
    """What was measured, by name: without samples (k = 0), greedy answers alone; in older files, no rewards."""
    named = {
        "greedy": evaluation.greedy,
        "mean@k": evaluation.mean_at_k,
        "pass@k": evaluation.pass_at_k,
        "reward": evaluation.reward,
        "reward@k": evaluation.reward_at_k,
    }
    return {name: estimate for name, estimate in named.items() if math.isfinite(estimate.value)}


def have_verdicts(evaluations: Sequence[Evaluation]) -> bool:
    """Whether answers are right or wrong in all of them: else the reward is the headline."""
    return all(evaluation.verdicts for evaluation in evaluations)


def worth_showing(evaluations: Sequence[Evaluation]) -> list[str]:
    """The names of the measures that a person is shown of evaluations side by side, the headline first.

    Rewards that are the same as accuracies go without saying, as do accuracies of 0 where no answer is right or wrong.
    """
    found = [measures(evaluation) for evaluation in evaluations]
    there = {name for measured in found for name in measured}
    pairs = (("greedy", "reward"), ("mean@k", "reward@k"))
    differ = any(
        not math.isclose(of[share].value, of[reward].value)
        for of in found
        for share, reward in pairs
        if share in of and reward in of
    )
    right = any(of[name].value > 0 for of in found for name in ACCURACIES if name in of)
    judged = have_verdicts(evaluations)
    names = (*ACCURACIES, *(REWARDS if differ else ())) if judged else (*REWARDS, *(ACCURACIES if right else ()))
    return [name for name in names if name in there]


def headline(evaluations: Sequence[Evaluation]) -> str:
    """Greedy accuracy or the reward of greedy answers, the first that is worth showing; empty if not all have it.

    One of them may lack it, such as the reward where all greedy answers failed.
    """
    named = [name for name in worth_showing(evaluations) if name in NAMES]
    return next((name for name in named if all(name in measures(each) for each in evaluations)), "")


def labelled(name: str, k: int) -> str:
    """Example: labelled("mean@k", 8) == "mean@8\""""
    return name.replace("@k", f"@{k}")


def record_of(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as JSON values; NaN and infinities are left to the writer."""
    about = {name: getattr(evaluation, name) for name in ("task", "split", "n", "k")}
    measured = {
        name: {"value": estimate.value, "low": estimate.low, "high": estimate.high}
        for name, estimate in measures(evaluation).items()
    }
    answers = {"questions": evaluation.questions, "right": list(evaluation.right), "failed": evaluation.failed}
    answers |= {"left_out": evaluation.left_out, "undecided": evaluation.undecided}
    return {**about, **measured, **answers, "rewards": list(evaluation.rewards), "verdicts": evaluation.verdicts}


def evaluation_of(record: Mapping[str, Any]) -> Evaluation:
    """The evaluation of a record in evals.jsonl; those of older versions know no rewards, and not which was right."""
    return Evaluation(
        **{name: record[name] for name in ("task", "split", "n", "k")},
        greedy=estimate_of(record.get("greedy")),
        mean_at_k=estimate_of(record.get("mean@k")),
        pass_at_k=estimate_of(record.get("pass@k")),
        right=tuple(record.get("right", ())),
        questions=record.get("questions", ""),
        failed=record.get("failed", 0),
        left_out=record.get("left_out", 0),
        undecided=record.get("undecided", 0),
        reward=estimate_of(record.get("reward")),
        reward_at_k=estimate_of(record.get("reward@k")),
        rewards=tuple(math.nan if value is None else value for value in record.get("rewards", ())),
        verdicts=record.get("verdicts", True),
    )


def estimate_of(record: Mapping[str, Any] | None) -> Estimate:
    """An estimate as JSON has it, where an interval without an end (of a single value) is written as null."""
    if not record:
        return Estimate()
    low, high = record["low"], record["high"]
    return Estimate(record["value"], -math.inf if low is None else low, math.inf if high is None else high)


def are_apart(one: Estimate, other: Estimate) -> bool:
    return one.low > other.high or other.low > one.high

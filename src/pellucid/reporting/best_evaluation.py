"""The best evaluation of a run so far, and whether evaluations still improve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pellucid.reporting.eval_metrics import HEADLINE_LABELS, format_measure_name, get_measures, select_measures
from pellucid.types import Estimate, Evaluation


class BestEvaluation(NamedTuple):
    """The evaluation of a run with the highest accuracy, or mean reward if rewards do not say which answers are right.

    The step 0 is that before training.
    """

    step: int
    measure: str
    """The measure that was compared, such as "greedy"."""
    estimate: Estimate
    k: int

    def describe(self) -> str:
        """Return the step, and the measure with its interval, in words."""
        when = f"step {self.step}" if self.step else "before training"
        return f"{when}, {describe_measure(self.measure, self.estimate, self.k)}"


def describe_measure(name: str, estimate: Estimate, k: int) -> str:
    """Return a measure with its interval in words, such as "greedy accuracy 0.41 [0.32, 0.51]"."""
    interval = f" [{estimate.low:.2f}, {estimate.high:.2f}]" if estimate.has_interval else ""
    label = HEADLINE_LABELS[name] if name == "greedy" else format_measure_name(name, k)
    return f"{label} {estimate.value:.2f}{interval}"


def find_best_evaluation(evaluations: Mapping[int, Evaluation]) -> BestEvaluation | None:
    """Return the best of the evaluations of a run, which are by step, in order; the first of equal ones.

    Greedy accuracy is compared, or else the first measure that all evaluations have; None if there is none.
    """
    measures = {step: get_measures(evaluation) for step, evaluation in evaluations.items()}
    names = select_measures(list(evaluations.values()))
    shared = [name for name in names if all(name in each for each in measures.values())]
    if not shared:
        return None
    step = max(measures, key=lambda step: measures[step][shared[0]].value)
    return BestEvaluation(step, shared[0], measures[step][shared[0]], evaluations[step].k)


def count_evaluations_since_best(evaluations: Mapping[int, Evaluation]) -> int:
    best = find_best_evaluation(evaluations)
    return sum(step > best.step for step in evaluations) if best else 0

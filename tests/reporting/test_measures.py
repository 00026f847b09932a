"""Tests of the measures shown for an evaluation: accuracy if rewards are verdicts, otherwise the reward."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from pellucid.reporting.console import (
    PlainLogger,
    make_comparison_table,
    make_evaluation_rows,
    make_evaluation_table,
    make_verdict_table,
)
from pellucid.reporting.eval_metrics import make_evaluation_record, parse_evaluation, select_measures
from pellucid.reporting.loggers import JsonlLogger, format_json_line
from pellucid.reporting.report import write_report
from pellucid.reporting.run_files import read_evaluations
from pellucid.types import Completion, Estimate, Evaluation, Group, Prompt, Reward

NONE = Estimate(0.0, 0.0, 0.1)
JUDGED = Evaluation(
    *("sums", "test", 64, 2, Estimate(0.5, 0.2, 0.8), Estimate(0.25, 0.1, 0.5), Estimate(0.5, 0.2, 0.8)),
    greedy_correct=(0, 1, 0, 1),
    questions_digest="q",
    reward=Estimate(0.5, -0.4, 1.4),
    reward_at_k=Estimate(0.25, -0.1, 0.6),
    rewards=(0.0, 1.0, 0.0, 1.0),
)
DEGREE = Evaluation(
    *("tone", "test", 64, 2, NONE, NONE, NONE),
    greedy_correct=(0, 0, 0, 0),
    questions_digest="q",
    reward=Estimate(-0.75, -0.9, -0.6),
    reward_at_k=Estimate(-0.5, -0.8, -0.2),
    rewards=(-0.75, -0.8, math.nan, -0.7),
    has_verdicts=False,
)
HIGHER = replace(DEGREE, reward=Estimate(0.25, 0.125, 0.375))
GREEDY_ONLY = {
    "step": 3,
    "task": "sums",
    "split": "test",
    "n": 4,
    "k": 2,
    "greedy": {"value": 0.5, "low": 0.2, "high": 0.8},
    "questions": "q",
    "right": [0, 1, 0, 1],
    "failed": 0,
    "left_out": 0,
    "undecided": 0,
    "rewards": [0.0, 1.0, 0.0, 1.0],
    "verdicts": True,
}
"""A line of evals.jsonl, from an evaluation without samples."""


@pytest.mark.parametrize(
    ("evaluations", "names"),
    [
        ([JUDGED], ["greedy", "mean@k", "pass@k"]),
        ([JUDGED, replace(JUDGED, reward=Estimate(0.6, 0, 1))], ["greedy", "mean@k", "pass@k", "reward", "reward@k"]),
        ([DEGREE], ["reward", "reward@k"]),
        ([DEGREE, replace(DEGREE, greedy=Estimate(0.1, 0, 1))], ["reward", "reward@k"]),
        ([JUDGED, DEGREE], ["reward", "reward@k"]),
        ([parse_evaluation(GREEDY_ONLY)], ["greedy"]),
    ],
)
def test_select_measures_leaves_out_redundant_ones(evaluations, names):
    assert select_measures(evaluations) == names


@pytest.mark.parametrize("evaluation", [JUDGED, DEGREE, replace(DEGREE, reward=Estimate(2.0))])
def test_evaluation_is_read_back_from_its_file(tmp_path, evaluation):
    log = JsonlLogger(tmp_path)
    log.log_evaluation(3, evaluation)
    log.close()
    again = read_evaluations(tmp_path)[3]
    assert (
        make_evaluation_record(again).items()
        >= {k: v for k, v in make_evaluation_record(evaluation).items() if k != "rewards"}.items()
    )
    assert [x for x in again.rewards if not math.isnan(x)] == [x for x in evaluation.rewards if not math.isnan(x)]
    assert list(map(math.isnan, again.rewards)) == list(map(math.isnan, evaluation.rewards))


def test_a_line_without_samples_is_read(tmp_path):
    (tmp_path / "evals.jsonl").write_text(json.dumps(GREEDY_ONLY) + "\n")
    evaluation = read_evaluations(tmp_path)[3]
    assert (evaluation.greedy, evaluation.greedy_correct, evaluation.has_verdicts) == (
        Estimate(0.5, 0.2, 0.8),
        (0, 1, 0, 1),
        True,
    )
    assert math.isnan(evaluation.reward.value)
    assert write_report(tmp_path).read_text().count("<th scope=row>greedy</th>") == 1


def cells(table):
    return [list(column.cells) for column in table.columns]


def test_console_shows_the_reward_without_verdicts(capsys):
    PlainLogger(9).log_evaluation(3, HIGHER)
    assert capsys.readouterr().out == "eval step 3  reward 0.25 [0.12, 0.38]  reward@2 -0.50 [-0.80, -0.20]\n"
    names, before, after, gain, apart = cells(make_comparison_table(DEGREE, HIGHER))
    assert (names[0], before[0], after[0]) == ("reward", "-0.750 [-0.90, -0.60]", "0.250 [0.12, 0.38]")
    assert (gain[0], apart[0], names[1:]) == ("+1.000", "apart", ["reward@2"])
    rows = [(name.strip(), str(value)) for name, value, _ in make_evaluation_rows({0: DEGREE, 3: HIGHER})]
    assert rows == [("held out", ""), ("reward", "0.25"), ("reward@2", "-0.50")]
    assert cells(make_evaluation_table("m", HIGHER))[0] == ["reward", "reward@2"]
    assert [column.header for column in make_evaluation_table("m", HIGHER).columns] == ["", "mean", "interval"]
    assert [column.header for column in make_evaluation_table("m", JUDGED).columns] == ["", "accuracy", "interval"]


def test_report_begins_with_the_reward_without_verdicts(tmp_path):
    lines = [format_json_line({"step": step, **make_evaluation_record(e)}) for step, e in ((0, DEGREE), (8, HIGHER))]
    (tmp_path / "evals.jsonl").write_text("".join(lines))
    page = write_report(tmp_path).read_text()
    assert "In 8 steps, reward of greedy answers on 64 held-out prompts rose from -0.750" in page
    assert "to 0.250 <small>[0.125, 0.375]</small>; the intervals are apart." in page
    assert "<td>+1.000 <small>apart</small></td>" in page
    assert "Held-out reward" in page
    for absent in ("accuracy", "%</", "greedy</th>"):
        assert absent not in page.partition("</style>")[2], absent


def test_verdict_is_shown_only_if_the_reward_has_one():
    completion = Completion((1,), (0.0,), "7", True)
    for said, reward in {
        "right, reward 1.00": Reward(1.0),
        "wrong, reward 0.00": Reward(0.0),
        "wrong, reward 0.30": Reward(0.3, correct=False),
        "reward 0.40": Reward(0.4),
        "reward 0.50": Reward(0.5, correct=False, is_continuous=True),
    }.items():
        shown = cells(
            make_verdict_table(Group(Prompt("p", "3 + 4"), (1,), (completion,), (reward,)), reward.is_verdict)
        )
        assert str(shown[1][-2]) == said

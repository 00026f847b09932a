"""Tests of the HTML report of a run and of its charts."""

import itertools
import json
import math
import random
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pages import ALLOWED, HOSTILE, Page
from pellucid.reporting import charts
from pellucid.reporting.charts import (
    MAX_POINTS,
    Point,
    Series,
    compute_ticks,
    draw_chart,
    format_number,
    make_seed_series,
    stack_series,
)
from pellucid.reporting.report import MAX_TEXT_CHARACTERS, render_token_strip, write_report
from pellucid.reporting.run_files import read_end_rollouts, read_records
from pellucid.study.runner import format_accuracy_change


def estimate(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def evaluation(step: int, value: float, task: str = "arithmetic") -> dict:
    shares = {"greedy": estimate(value), "mean@k": estimate(value - 0.05), "pass@k": estimate(value + 0.05)}
    answers = {
        "questions": "q",
        "right": [],
        "failed": 0,
        "left_out": 0,
        "undecided": 0,
        "rewards": [],
        "verdicts": True,
    }
    return {"step": step, "task": task, "split": "test", "n": 64, "k": 8, **shares, **answers}


def step_metrics(step: int) -> dict:
    return {
        "step": step,
        "reward/mean": step / 10,
        "reward/std": 0.1,
        "reward/numeric": 0.5,
        "reward/failed": 1.0,
        "groups/dead_all_right": 0.25,
        "groups/dead_all_wrong": 0.5,
        "completion/length_mean": 9.0,
        "sampler/gap_mean": 0.01,
        "sampler/gap_max": 0.2,
        "entropy": None,
        "tokens": 100.0,
        "skipped": 0.0,
        "time/generate": 3.0,
        "time/update": 1.0,
        "time/step": 30.0,
    }


def rollout(step: int, reward: float | None, said: str = "7", asked: str = "What is 3 + 4?") -> dict:
    shown = {"completion": said, "finished": True, "correct": reward == 1.0, "reward": reward, "parts": {}}
    return {
        "step": step,
        "id": "0",
        "prompt": asked,
        **shown,
        "advantage": 0.5,
        "tokens": [1, 2],
        "logprobs": [-0.1, None],
    }


def make_run(run_dir: Path, metrics=(), evals=(), rollouts=(), config=None) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in (("metrics", metrics), ("evals", evals), ("rollouts", rollouts)):
        (run_dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"policy": {"model": "smollm2-135m"}, "task": {"name": "arithmetic"}, "algorithm": {"steps": 3}}
    (run_dir / "config.json").write_text(json.dumps(settings if config is None else config))
    return run_dir


def report(run_dir: Path) -> tuple[str, Page]:
    html = write_report(run_dir).read_text(encoding="utf-8")
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(svg)
    return html, Page(html)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(
        tmp_path / "my-run",
        [step_metrics(step) for step in (1, 2, 3)],
        [evaluation(0, 0.25), evaluation(3, 0.75)],
        [rollout(step, reward, f"said {step} {reward}") for step in (1, 2, 3) for reward in (0.0, 1.0, 0.5, 0.2, 0.9)],
    )


def test_page_summarizes_the_run(run: Path):
    _, page = report(run)
    assert "smollm2-135m on arithmetic" in page
    sentence = "In 3 steps, greedy accuracy on 64 held-out prompts rose from 25.0% [15.0, 35.0] to 75.0% [65.0, 85.0]; "
    assert sentence + "the intervals are apart." in page
    assert "mean@8" in page
    assert "1 min 30 s" in page
    assert "3 of 3" in page
    assert "<dd class=warn>3</dd>" in write_report(run).read_text()  # failed rewards


def test_page_is_written_if_evaluations_lack_measures(tmp_path: Path):
    """For example, the rewards of all greedy answers failed, and those of the samples did not."""

    def row(step, missing, verdicts):
        measured = {"reward": estimate(0.4 + step / 10), "reward@k": estimate(0.3)}
        kept = {name: value for name, value in (evaluation(step, 0.0) | measured).items() if name not in missing}
        return kept | {"verdicts": verdicts}

    gaps = [(), ("reward",), ("greedy",), ("greedy", "reward"), ("reward", "reward@k"), ("greedy", "mean@k", "pass@k")]
    steps = [step_metrics(1), step_metrics(2)]
    for first, last in itertools.product(gaps, repeat=2):
        for verdicts in (True, False):
            rows = [row(0, first, verdicts), row(1, last, verdicts)]
            _, page = report(make_run(tmp_path / "r", steps, rows))
            said = "greedy accuracy" if verdicts else "reward of greedy answers"
            if {"greedy", "reward"} & {*first, *last}:
                said = ""  # a measure that one evaluation lacks is not compared
            assert said in page
            assert format_accuracy_change(tmp_path / "r")


def test_overlapping_intervals_are_named_as_such(tmp_path: Path):
    _, page = report(make_run(tmp_path / "r", [step_metrics(1)], [evaluation(0, 0.65), evaluation(1, 0.5)]))
    assert "fell from 65.0% [55.0, 75.0] to 50.0% [40.0, 60.0]; the intervals overlap, so it may be chance." in page
    assert "-15.0 overlapping" in page
    _, page = report(make_run(tmp_path / "r", [step_metrics(1)], [evaluation(0, 0.5), evaluation(1, 0.65)]))
    assert "+15.0 overlapping" in page
    assert "In 1 step," in page


def few(step: int, value: float, n: int = 3) -> dict:
    alone = {"value": value, "low": None, "high": None}
    return {**evaluation(step, value), "n": n, "greedy": alone, "mean@k": alone, "pass@k": alone}


def test_gain_from_few_prompts_is_shown_without_an_interval(tmp_path: Path):
    _, page = report(make_run(tmp_path / "r", [step_metrics(1)], [few(0, 0.5), few(1, 0.75)]))
    assert "rose from 50.0% to 75.0%; that is too few prompts for an interval, so it may be chance." in page
    assert "3 prompts, 8 samples of each; too few prompts for an interval" in page
    assert "+25.0 no interval" in page
    assert not re.search(r"\[[-\d.]+, |inf\b|\bnan\b|95%", " ".join(page.text))


def test_unchanged_accuracy_is_not_called_chance(tmp_path: Path):
    _, page = report(make_run(tmp_path / "r", [step_metrics(1)], [evaluation(0, 1.0), evaluation(1, 1.0)]))
    assert "In 1 step, greedy accuracy on 64 held-out prompts stayed at 100.0% [90.0, 110.0]." in page
    assert "chance" not in page


def test_only_charts_with_data_are_drawn(run: Path):
    html, _ = report(run)
    drawn = re.findall(r'class="title"[^>]*>([^<]*)<', html)
    assert drawn == ["Held-out accuracy", "Reward", "Dead groups", "Length", "Sampler gap", "Time"]


def test_the_best_and_the_worst_of_the_first_and_the_last_step_are_shown(run: Path):
    html, _ = report(run)
    said = re.findall(r"said \d [\d.]+", html)
    assert said == [
        "said 1 1.0",
        "said 1 0.9",
        "said 1 0.0",
        "said 1 0.2",
        "said 3 1.0",
        "said 3 0.9",
        "said 3 0.0",
        "said 3 0.2",
    ]


def test_no_completion_is_shown_twice_and_a_failed_reward_is_the_worst(tmp_path: Path):
    rewards = {"a": 1.0, "b": 0.5, "c": None}
    rollouts = [rollout(1, reward, f"said {name}") for name, reward in rewards.items()]
    html, _ = report(make_run(tmp_path / "r", rollouts=[*rollouts, rollouts[0]]))
    assert re.findall(r'<article class="(\w+)"|(said \w)', html) == [
        ("best", ""), ("", "said a"), ("best", ""), ("", "said b"), ("worst", ""), ("", "said c"),
    ]  # fmt: skip


def test_traces_by_length_show_the_best_and_worst_of_each_third(tmp_path: Path):
    """Six lengths, two in each third; only in the first third does the longer one have the lower reward."""
    rewards = {1: 1.0, 2: 0.0, 3: 0.2, 4: 0.6, 5: 0.1, 6: 0.9}
    rollouts = [{**rollout(1, reward, f"said {n}"), "tokens": [0] * n} for n, reward in rewards.items()]
    shown = {"log": {"traces": "by_length"}}
    html, _ = report(make_run(tmp_path / "r", rollouts=rollouts[::-1], config=shown))
    picked = re.findall(r'<article class="(\w+)".*?(said \d)', html, re.DOTALL)
    assert picked == [
        ("best", "said 1"), ("worst", "said 2"),
        ("best", "said 4"), ("worst", "said 3"),
        ("best", "said 6"), ("worst", "said 5"),
    ]  # fmt: skip
    assert "each third" in html


def test_prefix_is_shown_in_italics_before_its_completion(tmp_path: Path):
    html, _ = report(make_run(tmp_path / "r", rollouts=[{**rollout(1, 1.0, " 7"), "prefix": "3 + 4 <is>"}]))
    assert "<i>3 + 4 &lt;is&gt;</i> 7</pre>" in html


def test_updates_too_large_for_fp16_are_counted_only_in_fp16_runs(run: Path, tmp_path: Path):
    assert "too large for fp16" not in report(run)[0]
    steps = [{**step_metrics(n), "skipped/overflow": 2.0, "loss_scale": 8.0} for n in (1, 2)]
    assert "<dt>Updates too large for fp16</dt><dd class=warn>4</dd>" in report(make_run(tmp_path / "r", steps))[0]


def test_the_page_needs_no_network_and_no_script(run: Path):
    html, page = report(run)
    names = {name for name, _ in page.attributes}
    assert not names & {"href", "src", "srcset", "action", "data", "xlink:href", "poster"}
    assert not re.search(r"url\(|@import|https?://", html)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


def test_hostile_text_is_escaped(tmp_path: Path):
    config = {"policy": {"model": HOSTILE}, "task": {"name": HOSTILE}, "git": HOSTILE, HOSTILE: [HOSTILE]}
    metrics = [{**step_metrics(1), f"reward/{HOSTILE}": 1.0, "reward/other": 0.5}]
    rollouts = [{**rollout(1, None, HOSTILE, HOSTILE), "error": HOSTILE}, rollout(1, 1.0, HOSTILE[::-1])]
    run = make_run(
        tmp_path / "<b>run", metrics, [evaluation(0, 0.1, HOSTILE), evaluation(1, 0.9, HOSTILE)], rollouts, config
    )
    html, page = report(run)
    assert page.tags <= ALLOWED
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "<script>alert(1)</script><img src=https://evil.example/x onerror=alert(2)>" in page
    assert "${lede}\\u202egnp.exe\\u2066 \\x00\\x1b[31m \\ud800" in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", html)
    assert "reward failed" in page


def test_a_long_completion_is_cut_with_a_note(tmp_path: Path):
    html, page = report(make_run(tmp_path / "r", rollouts=[rollout(1, 1.0, "x" * 100_000)]))
    assert f"[{100_000 - MAX_TEXT_CHARACTERS:,} more characters in rollouts.jsonl]" in page
    assert len(html) < 30_000


def test_run_of_one_step_has_a_page(tmp_path: Path):
    _, page = report(make_run(tmp_path / "r", [step_metrics(1)], [evaluation(0, 0.5)], [rollout(1, 1.0)]))
    assert "The mean reward went from 0.100 at step 1 to 0.100 at step 1." in page
    assert "1 of 3" in page


@pytest.mark.parametrize("missing", [(), ("metrics",), ("rollouts",), ("evals",), ("metrics", "rollouts", "evals")])
def test_empty_run_has_a_page(tmp_path: Path, missing: tuple[str, ...]):
    run = make_run(tmp_path / "r", config={})
    for name in missing:
        (run / f"{name}.jsonl").unlink()
    _, page = report(run)
    assert "No step was finished." in page


def test_folder_without_a_config_has_a_page(tmp_path: Path):
    run = make_run(tmp_path / "r", [step_metrics(1)])
    (run / "config.json").unlink()
    assert "a model on a task" in report(run)[1]


def test_a_killed_run_loses_only_its_half_written_lines(run: Path):
    for name in ("metrics", "rollouts", "evals"):
        with (run / f"{name}.jsonl").open("ab") as file:
            file.write(b'{"step": 9, "reward/mean": 0.\xe2\x82')
    _, page = report(run)
    assert "3 of 3" in page
    assert "Step 9" not in page
    assert "said 3 1.0" in page


def test_read_end_rollouts_returns_the_whole_first_and_last_step(run: Path):
    first, last = read_end_rollouts(run / "rollouts.jsonl")
    assert [row["step"] for row in first] == [1] * 5
    assert [row["step"] for row in last] == [3] * 5


def test_read_end_rollouts_of_one_step_returns_no_last_step(tmp_path: Path):
    run = make_run(tmp_path / "r", rollouts=[rollout(1, 0.0), rollout(1, 1.0)])
    assert [len(rows) for rows in read_end_rollouts(run / "rollouts.jsonl")] == [2, 0]


def test_rollouts_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path / "r", rollouts=[rollout(step, 1.0) for step in range(1, 101)])
    parsed = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    read_end_rollouts(run / "rollouts.jsonl")
    assert len(parsed) == 2


def test_a_long_run_is_thinned(tmp_path: Path):
    run = make_run(tmp_path / "r", [step_metrics(step) for step in range(1, 2001)])
    html, _ = report(run)
    assert html.count("<circle") <= 9 * MAX_POINTS
    assert "mean and range of 17 steps" in html


def test_thinning_keeps_the_mean_the_range_and_the_last_step():
    spike = [Point(x, 100.0 if x == 50 else 1.0) for x in range(1, 2 * MAX_POINTS + 1)]
    drawn = ElementTree.fromstring(draw_chart("t", "s", [Series("y", spike)]))
    tips = [tip.text for tip in drawn.iter("title")]
    assert len(tips) == MAX_POINTS
    assert tips[-1] == f"y, step {2 * MAX_POINTS}: 1 [1, 1]"
    assert "y, step 50: 50.5 [1, 100]" in tips


def test_points_lie_where_the_axes_say():
    drawn = ElementTree.fromstring(draw_chart("t", "s", [Series("y", [Point(0, 0.0), Point(10, 1.0)])]))
    ticks_at = {text.text: (text.get("x"), text.get("y")) for text in drawn.iter("text") if text.get("class") == "tick"}
    grid = {path.get("d").split()[1].split("H")[0] for path in drawn.iter("path") if path.get("class") == "grid"}
    first, last = list(drawn.iter("circle"))
    assert first.get("cx") == ticks_at["step 0"][0]
    assert last.get("cx") == ticks_at["10"][0]
    assert {first.get("cy"), last.get("cy")} <= grid
    assert float(ticks_at["0"][1]) - float(first.get("cy")) == pytest.approx(4)
    assert float(first.get("cy")) > float(last.get("cy"))


def test_intervals_are_drawn_from_low_to_high():
    drawn = ElementTree.fromstring(draw_chart("t", "s", [Series("y", [Point(1, 0.5, 0.0, 1.0)])], include=(0, 1)))
    (bar,) = (path.get("d") for path in drawn.iter("path") if path.get("class") == "bar")
    assert bar == "M320.0 220.0V60.0"
    assert next(tip.text for tip in drawn.iter("title")) == "y, step 1: 0.5 [0, 1]"


def test_stacked_layers_build_on_each_other_and_keep_their_values():
    bottom, top = stack_series([Series("a", [Point(1, 2.0), Point(2, 3.0)]), Series("b", [Point(2, 4.0)])])
    assert [(point.base, point.top) for point in bottom.points] == [(0, 2), (0, 3)]
    assert [(point.base, point.top, point.y) for point in top.points] == [(3, 7, 4)]


def test_ticks_are_round_and_span_the_values():
    assert compute_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert compute_ticks(0.13, 0.87) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert compute_ticks(0, 30) == [0, 10, 20, 30]
    assert compute_ticks(-3, 12)[0] == -5
    assert compute_ticks(1, 1)[0] <= 1 <= compute_ticks(1, 1)[-1]
    assert compute_ticks(0, 0)[0] <= 0 < compute_ticks(0, 0)[-1]


def test_numbers_are_short():
    assert [format_number(value) for value in (12345.6, 0.71234, 30, 0)] == ["12,346", "0.712", "30", "0"]


def test_labels_at_line_ends_do_not_overlap():
    lines = [Series(str(i), [Point(1, i / 1000)]) for i in range(5)]
    drawn = ElementTree.fromstring(draw_chart("t", "s", lines, include=(0, 1)))
    heights = sorted(float(text.get("y")) for text in drawn.iter("text") if "label" in text.get("class"))
    assert min(after - before for before, after in pairwise(heights)) >= 15.9
    assert heights[-1] <= 224


def test_token_strip_is_stronger_for_less_likely_tokens():
    cells = ElementTree.fromstring(render_token_strip([0.0, -0.6931471805599453, None]))
    assert [cell.get("fill-opacity") for cell in cells.iter("rect")] == ["0.00", "0.50", "1.00"]
    assert render_token_strip([]) == ""


def test_seed_series_has_mean_and_range_at_shared_steps():
    lines = [[Point(1, 1.0), Point(2, 2.0)], [Point(2, 4.0), Point(3, 9.0)], []]
    assert make_seed_series("y", lines, "first") == Series("y", [Point(2, 3.0, 2.0, 4.0)], "first band")
    assert make_seed_series("y", lines[1:], "first") == Series("y", lines[1], "first")


def test_two_tasks_are_not_mixed(tmp_path: Path):
    evals = [evaluation(0, 0.2, "a"), evaluation(0, 0.3, "b"), evaluation(2, 0.8, "a"), evaluation(2, 0.9, "b")]
    html, page = report(make_run(tmp_path / "r", evals=evals))
    assert html.count("<caption>") == 2
    assert "from 20.0% [10.0, 30.0] to 80.0%" in page


def test_records_of_a_missing_file_are_empty(tmp_path: Path):
    assert list(read_records(tmp_path / "none.jsonl")) == []


def test_chart_names_the_x_unit_on_axis_points_and_summary():
    drawn = draw_chart("t", "s", [Series("y", [Point(64, 1.0), Point(128, 2.0)], unit="tokens")])
    assert ">tokens 0</text>" in drawn
    assert "y, tokens 64: 1" in drawn
    assert "y from 1 at tokens 64 to 2 at tokens 128" in drawn
    assert "step" not in drawn


# ---------------------------------------------------------------- unusual numbers


def series_of(kind, rng):
    base = rng.choice([0.0, 5e-324, 1e-300, 1e-17, 0.1, 1 / 3, 1.0, 1e9, 1e17, 1e279]) * rng.choice([1, -1])
    if kind == "nearly constant":
        return [base, math.nextafter(base, math.inf), base + rng.choice([0, 1, 9]) * math.ulp(base)]
    if kind == "any":
        return [rng.choice([-1, 1]) * rng.random() * 10.0 ** rng.randint(-320, 279) for _ in range(rng.randint(1, 5))]
    return [base * rng.random() for _ in range(rng.randint(1, 200))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nearly constant", "any", "of one size"])
def test_any_numbers_can_be_drawn_and_lie_within_the_axes(kind):
    rng = random.Random(kind)
    for _ in range(300):
        values = series_of(kind, rng)
        points = [charts.Point(step, value) for step, value in enumerate(values, 1)]
        svg = ElementTree.fromstring(charts.draw_chart("Any", "numbers", [charts.Series("any", points)]))
        places = [float(dot.get("cy")) for dot in svg.iter("circle")]
        assert places, values
        assert all(charts.PLOT_TOP <= place <= charts.PLOT_BOTTOM for place in places), values
        found = charts.compute_ticks(min(values), max(values))
        assert len(set(found)) == len(found) < 20, values
        assert sorted(found) == found


def test_rewards_that_differ_by_rounding_can_be_drawn(run):
    """They once raised ZeroDivisionError in the report, before the model was saved."""
    rows = [{"step": step, "reward/mean": reward} for step, reward in enumerate([0.1, 0.10000000000000002], 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "<svg" in write_report(run).read_text(encoding="utf-8")


def test_values_that_are_not_finite_are_left_out_of_a_chart(run):
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "kl": NaN}\n{"step": 2, "kl": 1e999}\n{"step": 3, "kl": null}\n{"step": 4, "kl": 0.5}\n'
    )
    page = write_report(run).read_text(encoding="utf-8")
    assert "kl, step 4: 0.5" in page
    assert "kl, step 1" not in page


def test_blanked_line_does_not_split_a_step(run):
    """`loggers.truncate_logs` overwrites removed lines with spaces."""
    rows = [{"step": 1, "i": i} for i in range(4)]
    lines = [json.dumps(row) + "\n" for row in rows]
    lines[2] = " " * 50 + lines[2]
    (run / "rollouts.jsonl").write_text("".join(lines))
    assert read_end_rollouts(run / "rollouts.jsonl") == (rows, [])


def test_a_run_without_rollouts_has_a_report(run):
    (run / "rollouts.jsonl").unlink()
    page = write_report(run).read_text(encoding="utf-8")
    assert "<h2>Completions</h2>" not in page

"""Tests for `pellucid compare`: its numbers by hand, and its page as a browser reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from study_data import with_rewards, write_run

from pages import ALLOWED, HOSTILE, Page
from pellucid import cli
from pellucid.study.compare import VariantSummary, summarize_variants
from pellucid.study.comparison_page import write_lede
from pellucid.study.runs import gather_runs, write_study_plan

BASELINE = {0: [1, 0, 0, 0], 1: [1, 1, 0, 0]}
BETTER = {0: [1, 1, 1, 0], 1: [1, 1, 0, 1]}
"""The questions are those of the baseline, with two and one more right answers."""


@pytest.fixture
def study_dir(tmp_path):
    folder = tmp_path / "study"
    for variant, rights in (("grpo", BASELINE), ("better", BETTER)):
        for seed, right in rights.items():
            write_run(folder / variant / f"seed-{seed}", right, questions=f"q{seed}", seed=seed)
    write_study_plan(folder, ["grpo", "better"], [0, 1])
    return folder


def compare(*arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["compare", *map(str, arguments)])
    return exit_.value.code


def summary(folder, variant="better"):
    return next(row for row in summarize_variants(gather_runs([folder])) if row.variant == variant)


def test_difference_is_the_mean_over_seeds_of_the_mean_over_questions(study_dir):
    row = summary(study_dir)
    assert row.pairs == {0: 0.5, 1: 0.25}
    assert row.difference.value == 0.375
    assert row.greedy.value == 0.75
    assert row.mean_at_k == 0.75
    assert row.unpaired == ()


def test_answers_to_other_questions_are_not_paired(study_dir):
    write_run(study_dir / "grpo" / "seed-2", [0] * 4, questions="q2", seed=2)
    write_run(study_dir / "better" / "seed-2", [1] * 4, questions="others", seed=2)
    row = summary(study_dir)
    assert row.pairs == {0: 0.5, 1: 0.25}
    assert row.unpaired == ("seed 2: its held-out questions are not the baseline's",)


def test_seed_of_only_one_variant_is_not_paired(study_dir):
    write_run(study_dir / "better" / "seed-2", [1] * 4, seed=2)
    write_run(study_dir / "grpo" / "seed-3", [1] * 4, seed=3)
    row = summary(study_dir)
    assert set(row.pairs) == {0, 1}
    assert row.unpaired == ("seed 2: the baseline has no finished run",)
    assert "better seed 3" in gather_runs([study_dir]).missing


def test_evaluations_without_answers_are_not_paired(study_dir):
    path = study_dir / "better" / "seed-1" / "evals.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "right"}) + "\n" for row in rows))
    row = summary(study_dir)
    assert set(row.pairs) == {0}
    assert row.unpaired == ("seed 1: evals.jsonl does not say which answers were right",)
    assert row.greedy is None


def test_unfinished_and_missing_runs_are_left_out_and_named(study_dir, capsys):
    write_run(study_dir / "better" / "seed-2", [1] * 4, seed=2, steps=2)
    assert compare(study_dir, "--output", study_dir / "page.html") == 0
    numbers = json.loads((study_dir / "page.json").read_text())
    assert numbers["unfinished"] == ["better seed 2"]
    assert numbers["missing"] == ["grpo seed 2"]
    assert numbers["variants"]["better"]["seeds"] == [0, 1]
    printed = capsys.readouterr().out
    assert f"unfinished, left out: {study_dir}/better/seed-2" in printed
    assert "missing: grpo seed 2" in printed


def test_planned_run_without_a_folder_is_missing(study_dir):
    write_study_plan(study_dir, ["grpo", "better", "late"], [0, 1])
    assert gather_runs([study_dir]).missing == ["late seed 0", "late seed 1"]
    (study_dir / "study.json").unlink()
    assert gather_runs([study_dir]).missing == []


def test_baseline_is_the_first_variant_or_the_one_named(study_dir):
    assert [row.variant for row in summarize_variants(gather_runs([study_dir]))] == ["grpo", "better"]
    rows = summarize_variants(gather_runs([study_dir], "better"))
    assert [row.variant for row in rows] == ["better", "grpo"]
    assert rows[1].difference.value == -0.375


def test_single_runs_are_variants_by_folder_and_paired_by_seed(tmp_path, study_dir):
    one, two = (write_run(tmp_path / name, right, seed=5) for name, right in (("one", [0, 0]), ("two", [0, 1])))
    runs = gather_runs([one, two, study_dir / "grpo" / "seed-0"])
    assert {variant: list(of_seed) for variant, of_seed in runs.finished.items()} == {
        "one": [5],
        "two": [5],
        "grpo": [0],
    }
    assert summarize_variants(runs)[1].pairs == {5: 0.5}


def test_costs_are_per_run_and_own_metrics_are_means_over_steps(study_dir, tmp_path):
    """A mean alone would hide the one run with long answers."""
    own = {"tokens": 150, "curriculum/pool": 8, "effect/moved": 0.5}
    write_run(study_dir / "wrapped" / "seed-0", [1] * 4, questions="q0", metrics=own)
    write_run(study_dir / "wrapped" / "seed-1", [1] * 4, questions="q1", seed=1, metrics={**own, "tokens": 250})
    row = summary(study_dir, "wrapped")
    assert (row.tokens, row.seconds) == ({0: 600, 1: 1000}, {0: 120, 1: 120})
    assert row.dead == 0.75
    assert row.own == {"curriculum/pool": 8, "effect/moved": 0.5}
    assert summary(study_dir, "grpo").own == {}
    assert compare(study_dir, "--output", tmp_path / "page.html") == 0
    html = (tmp_path / "page.html").read_text()
    assert html.count("2.00x") == 1, "tokens, not seconds"
    page = Page(html)
    for text in ("600 · 1,000", "2 min 0 s · 2 min 0 s", "75%", "curriculum/pool", "effect/moved"):
        assert text in page


def test_comparison_of_two_seeds_is_reported_as_coarse(study_dir, tmp_path, capsys):
    assert compare(study_dir, "--output", tmp_path / "page.html") == 0
    page = Page((tmp_path / "page.html").read_text())
    assert "1 comparison was made" in page
    assert "one in twenty is expected to differ by chance" in page
    assert "2 seeds per comparison give a coarse interval" in page
    assert "one in 2 comparisons of equal variants shows a difference" in page
    assert "one in 2 comparisons of equal variants shows a difference" in capsys.readouterr().out
    assert "+37.5 [+0.0, +75.0]" in page
    assert "The other variant is not shown to be above or below grpo." in page


def test_intervals_that_exclude_zero_have_a_conclusion(tmp_path):
    for variant, right in (("grpo", [0, 1] * 20), ("up", [1] * 40), ("down", [0] * 40), ("same", [1, 0] * 20)):
        write_run(tmp_path / "study" / variant / "seed-0", right)
    write_study_plan(tmp_path / "study", ["grpo", "up", "down", "same"], [0])
    assert compare(tmp_path / "study", "--output", tmp_path / "page.html") == 0
    numbers = json.loads((tmp_path / "page.json").read_text())
    said = {name: row["conclusion"] for name, row in numbers["variants"].items()}
    assert said == {"grpo": "", "up": "above", "down": "below", "same": "cannot tell"}
    page = Page((tmp_path / "page.html").read_text())
    assert "up is above; down is below grpo in held-out greedy accuracy. For 1 other variant" in page
    assert "3 comparisons were made" in page
    assert "One seed per comparison" in page


def test_comparison_with_the_fewest_seeds_decides_the_warning(study_dir, tmp_path):
    """Variants have different numbers of seeds in the middle of a study."""
    write_run(study_dir / "late" / "seed-0", [1] * 4, questions="q0")
    assert compare(study_dir, "--output", tmp_path / "page.html") == 0
    assert "One seed per comparison" in Page((tmp_path / "page.html").read_text())


def test_seeds_with_the_same_questions_are_resampled_together(tmp_path):
    """Half of the questions are always won: the result is certain across seeds, but not across questions."""
    for folder, questions in (("other", "q{}".format), ("same", "q".format)):
        for seed in range(8):
            write_run(tmp_path / folder / "grpo" / f"seed-{seed}", [0, 0], questions=questions(seed), seed=seed)
            write_run(tmp_path / folder / "up" / f"seed-{seed}", [1, 0], questions=questions(seed), seed=seed)
    independent, shared = (summary(tmp_path / folder, "up").difference for folder in ("other", "same"))
    assert independent.low > 0.1
    assert (shared.low, shared.high) == (0.0, 1.0)


def test_dead_share_of_dynamic_sampling_covers_all_sampled_groups(study_dir, tmp_path):
    drawn = {"groups/drawn": 8, "groups/drawn_dead": 0.9}
    write_run(study_dir / "dynamic" / "seed-0", [1] * 4, questions="q0", metrics=drawn)
    assert summary(study_dir, "dynamic").own == drawn
    assert summary(study_dir, "dynamic").dead == pytest.approx(0.9)
    assert compare(study_dir, "--output", tmp_path / "page.html") == 0
    assert "dynamic, step 4: 0.9<" in (tmp_path / "page.html").read_text()


def test_page_is_reproducible_and_lists_the_commands_of_its_runs(study_dir, tmp_path):
    recipe = study_dir / "better" / "recipe.json"
    recipe.write_text("{}")
    pages = []
    for name in ("one", "two"):
        assert compare(study_dir, "--output", tmp_path / f"{name}.html") == 0
        pages.append((tmp_path / f"{name}.html").read_text())
    assert pages[0] == pages[1]
    page = Page(pages[0])
    assert f"pellucid train {recipe} --algorithm.seed 1 --run {study_dir}/better/seed-1" in page
    assert f"pellucid train {study_dir}/grpo/seed-0/config.json --run again/grpo/seed-0" in page


def test_repeated_runs_are_not_variants_of_the_study(study_dir):
    write_run(study_dir / "grpo" / "seed-0-again", BASELINE[0], questions="q0")
    assert list(gather_runs([study_dir]).finished) == ["grpo", "better"]


def test_run_is_the_same_under_every_spelling_of_its_path(study_dir, monkeypatch):
    run_dir = study_dir / "better" / "seed-0"
    monkeypatch.chdir(run_dir)
    runs = gather_runs([Path("../../grpo"), Path(), Path("..", "seed-0"), run_dir])
    assert {variant: list(of_seed) for variant, of_seed in runs.finished.items()} == {"grpo": [0, 1], "better": [0]}


def test_curves_show_the_baseline_and_the_range_over_seeds(study_dir, tmp_path):
    assert compare(study_dir, "--output", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count('<svg class="chart"') == 6
    assert page.count('class="range"') == 3 + 6, "the baseline once alone and once behind the other"
    assert "better, step 4: 0.75 [0.75, 0.75]" in page
    assert "grpo, step 4: 0.375 [0.25, 0.5]" in page
    assert "mean of 2 seeds, band from lowest to highest" in page


def test_graded_rewards_are_compared_answer_by_answer(tmp_path, capsys):
    """By hand: (2.5 - 0 - 0.5) / 4 over four questions. The run `part` graded only three of them."""
    graded = {"grpo": [0.0, 1.0, 2.0, -1.0], "tone": [2.5, 1.0, 1.5, -1.0], "part": [0.5, None, 2.0, -1.0]}
    for variant, rewards in graded.items():
        with_rewards(write_run(tmp_path / "study" / variant / "seed-0", [0] * 4), rewards)
    write_study_plan(tmp_path / "study", list(graded), [0])
    rows = {row.variant: row for row in summarize_variants(gather_runs([tmp_path / "study"]))}
    assert {row.measure for row in rows.values()} == {"reward"}
    assert rows["tone"].pairs == {0: 0.5}
    assert rows["part"].pairs == {0: pytest.approx(0.5 / 3)}
    turned = {row.variant: row for row in summarize_variants(gather_runs([tmp_path / "study"], "part"))}
    assert turned["grpo"].pairs == {0: pytest.approx(-0.5 / 3)}
    assert compare(tmp_path / "study", "--output", tmp_path / "page.html") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "held-out reward of greedy answers and its difference from grpo" in said
    assert "1.000 [0.800, 1.200]" in said
    page = Page((tmp_path / "page.html").read_text())
    for text in ("Held-out reward after training", "+0.500", "to be above or below grpo", "step 4: 1 [0.8, 1.2]"):
        assert text in page, text
    assert "ccuracy" not in "".join(page.text)
    assert json.loads((tmp_path / "page.json").read_text())["measure"] == "reward"


def test_missing_interval_bounds_are_null_in_the_json_file(tmp_path):
    """The interval of one held-out question has no bounds; evals.jsonl writes them as null."""
    run_dir = with_rewards(write_run(tmp_path / "study" / "grpo" / "seed-0", [0]), [0.5])
    evals = [json.loads(line) for line in (run_dir / "evals.jsonl").read_text().splitlines()]
    (run_dir / "evals.jsonl").write_text(
        "".join(json.dumps(row | {"reward": row["reward"] | {"low": None, "high": None}}) + "\n" for row in evals)
    )
    assert compare(tmp_path / "study", "--output", tmp_path / "page.html") == 0
    numbers = json.loads((tmp_path / "page.json").read_text(), parse_constant=pytest.fail)
    assert numbers["variants"]["grpo"]["reward"] == {"value": 0.5, "low": None, "high": None}


def test_rewards_are_compared_over_seeds_or_shown_beside_accuracy(tmp_path):
    for variant, by_seed in {"grpo": ([0.0, 0.5], [0.5, 1.0]), "up": ([1.0, 1.5], [None, 3.0])}.items():
        for seed, rewards in enumerate(by_seed):
            for study, verdicts in (("degrees", False), ("judged", True)):
                folder = write_run(tmp_path / study / variant / f"seed-{seed}", [0, 1], seed=seed)
                with_rewards(folder, rewards, verdicts)
    row = summary(tmp_path / "degrees", "up")
    assert row.pairs == {0: 1.0, 1: 2.0}
    assert (row.reward.value, row.greedy.value) == (pytest.approx((1.25 + 3) / 2), 0.5)
    assert summary(tmp_path / "judged", "up").pairs == {0: 0.0, 1: 0.0}
    assert compare(tmp_path / "judged", "--output", tmp_path / "page.html") == 0
    page = Page((tmp_path / "page.html").read_text())
    assert "Held-out accuracy after training in percent" in page
    assert "2.125" in page


def test_run_without_a_reward_per_answer_is_not_paired(tmp_path):
    with_rewards(write_run(tmp_path / "study" / "grpo" / "seed-0", [0, 0]), [0.5, 0.25])
    write_run(tmp_path / "study" / "old" / "seed-0", [0, 0])
    [reason] = summary(tmp_path / "study", "old").unpaired
    assert reason == "seed 0: evals.jsonl does not say the reward of each answer"


@pytest.mark.parametrize(
    ("conclusions", "sentences"),
    [
        (["cannot tell"], "The other variant is not shown to be above or below base."),
        (["cannot tell"] * 2, "None of 2 variants is shown to be above or below base."),
        (
            ["cannot tell", "", ""],
            "The one variant that could be paired is not shown to be above or below base."
            " 2 variants could not be paired with it.",
        ),
        (
            ["cannot tell", "cannot tell", ""],
            "None of the 2 variants that could be paired is shown to be above or below base."
            " 1 variant could not be paired with it.",
        ),
    ],
)
def test_the_first_sentence_counts_all_other_variants(conclusions, sentences):
    others = [VariantSummary(f"v{i}", (0,), conclusion=each) for i, each in enumerate(conclusions)]
    assert write_lede([VariantSummary("base", (0,)), *others]) == sentences


def test_hostile_names_appear_as_text(tmp_path):
    name = HOSTILE.replace("/", "|").replace("\x00", "").encode("utf-8", "ignore").decode()
    for variant, right in (("grpo", [0] * 9), (name, [1] * 9)):
        write_run(tmp_path / "study" / variant / "seed-0", right, metrics={f"effect/{HOSTILE}": 1.0})
    assert compare(tmp_path / "study", "--baseline", "grpo", "--output", tmp_path / "page.html") == 0
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert page.tags <= ALLOWED | {"ul", "li", "span", "code"}
    assert "<script>alert(1)<|script>" in page
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("href", "src")]
    assert "default-src 'none'" in text


MISTAKES = {
    "there is no such folder": ["nowhere"],
    "holds no run": ["empty"],
    "no evaluation": ["blind"],
    'there is no variant "gpo"; did you mean "grpo"': ["study", "--baseline", "gpo"],
    "no run of the baseline": ["half"],
    "are both grpo seed 0": ["study", "twin"],
    "empty: Is a directory: choose another path": ["study", "--output", "empty"],
    "choose another path": ["study", "--output", "half/config.json/page.html"],
    "its numbers would replace study/study.json": ["study", "--output", "study/study.html"],
    "its numbers would replace page.json": ["study", "--output", "page.json"],
}


@pytest.mark.parametrize("complaint", MISTAKES)
def test_mistakes_exit_2_with_one_line(study_dir, tmp_path, monkeypatch, capsys, complaint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "half", [1, 0], steps=2)
    write_run(tmp_path / "twin" / "grpo" / "seed-0", [1, 0])
    blind = write_run(tmp_path / "blind", [1, 0])
    (blind / "evals.jsonl").unlink()
    settings = json.loads((blind / "config.json").read_text())
    (blind / "config.json").write_text(json.dumps({**settings, "evaluate": {"every": 0}}))
    assert compare(*MISTAKES[complaint]) == 2
    complaints = capsys.readouterr().err
    assert complaint in complaints
    assert complaints.count("\n") == 1
    assert not (tmp_path / "compare.html").exists()

"""Test what `pellucid look` and `pellucid show` read from a run folder, against numbers computed by hand."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import zlib

import pytest
from rich.console import Console

from made_runs import add_step, lines, metric, prompt, rollout, row, run_folder, small_run, write_tokens
from pellucid.algorithm.explained import GRADIENT_RULES
from pellucid.inspect import single_file, terminal
from pellucid.inspect.diagnosis import diagnose_run
from pellucid.inspect.group_history import classify_signal
from pellucid.inspect.run_reader import RolloutIndex, RunReader, open_recorded_run
from pellucid.inspect.sentences import explain_token, format_sentence, format_significant
from pellucid.inspect.steps import round_values
from pellucid.types import Estimate, Evaluation, UserError

CONFIG = {"algorithm": {"prompts_per_step": 2, "group_size": 4, "clip_low": 0.2, "clip_high": 0.28}}


@pytest.mark.parametrize(
    ("rewards", "correct", "signal"),
    [
        ([1.0, 0.0], [True, False], "signal"),
        ([1.0, 1.0], [True, True], "all_right"),
        ([0.0, 0.0], [False, False], "all_wrong"),
        ([0.25, 0.25], [False, False], "partial"),
        ([None, 0.25], [None, False], "partial"),
        ([None, 1.0], [None, True], "all_right"),
        ([None, None], [None, None], "all_failed"),
        ([0.1 + 0.2, 0.3], [False, False], "partial"),
        ([0.8, 0.8], [None, None], "equal"),
        ([None, 0.0], [None, None], "equal"),
        ([0.8, 0.3], [None, None], "signal"),
    ],
)
def test_signal_of_a_group_or_the_reason_for_none(rewards, correct, signal):
    assert classify_signal(rewards, correct) == signal


def test_rewards_within_min_reward_range_count_as_equal():
    assert classify_signal([0.5, 0.55], [False, False], 0.1) == "partial"
    assert classify_signal([0.5, 0.65], [False, False], 0.1) == "signal"


@pytest.fixture
def two_tokens(tmp_path):
    """Return a run of one prompt and one answer, whose two tokens have 0.75 and 0.25 of the gradient."""
    run = run_folder(tmp_path / "run")
    scored = {"logprob_before": -1.0, "logprob_after": -0.75, "sampler_logprob": -1.125, "entropy_before": 1.0}
    unscored = {"logprob_before": None, "logprob_after": -2.0, "sampler_logprob": -2.5, "entropy_before": 0.5}
    answer = [row(0, 0, 0, " 7", gradient=0.3, **scored), row(0, 0, 1, " 8", gradient=0.1, **unscored)]
    write_tokens(run, 1, [prompt(0, 0, "Q"), *answer])
    return RunReader(run)


def test_changes_shares_and_sums_of_a_step(two_tokens):
    tokens = two_tokens.read_tokens(1)
    assert tokens.columns["change"] == [None, 0.25, None]
    assert tokens.columns["gap"] == [None, 0.125, None]
    [group] = two_tokens.read_summary(1)["groups"]
    assert group["gradient"] == pytest.approx(0.4, abs=1e-7)
    assert group["entropy"] == 0.75
    shares = tokens.compute_gradient_shares(0)
    assert [shares[i] for i in range(3)] == pytest.approx([0.0, 0.75, 0.25], abs=1e-7)
    assert [(s["completion"], s["start"], s["end"]) for s in tokens.sequences] == [(-1, 0, 1), (0, 1, 3)]


def test_entropy_of_a_group_excludes_given_tokens(tmp_path):
    run = run_folder(tmp_path / "run")
    write_tokens(run, 1, [row(0, 0, 0, "a", entropy_before=1.0), row(0, 0, 1, "b", kind="given", entropy_before=9.0)])
    assert RunReader(run).read_summary(1)["groups"][0]["entropy"] == 1.0


def test_change_is_measured_from_the_logprob_at_the_start_of_the_step(tmp_path):
    """With several updates per step, the log-prob before the last update has already changed."""
    run = run_folder(tmp_path / "run")
    write_tokens(run, 1, [row(0, 0, 0, "a", logprob_start=-2.0, logprob_before=-1.5, logprob_after=-1.0)])
    assert RunReader(run).read_tokens(1).columns["change"] == [1.0]


def test_columns_of_the_page_contain_the_recorded_values(two_tokens):
    page = json.loads(json.dumps(two_tokens.answer("tokens/1")))
    assert page["kind"] == "pss"
    assert [page["vocabulary"][i][1] for i in page["token"]] == ["Q", " 7", " 8"]
    assert (page["before"], page["change"], page["after"]) == ([None, -1, None], [None, 0.25, None], [None, None, -2])
    assert page["sampler"] == [None, None, -2.5]


def test_numbers_are_rounded_to_digits_and_not_below_the_floor():
    assert round_values([1234.5678, 0.0123456, 0.00012345, None, math.nan], 3) == [1230, 0.0123, 0.0001, None, None]
    assert round_values([1.5e-6, -4e-6], 2, None) == [1.5e-6, -4e-6]


def test_step_without_rollouts_is_summarized_from_its_tokens(two_tokens):
    [group] = two_tokens.read_summary(1)["groups"]
    assert (group["prompt"], group["rewards"], group["lengths"], group["recorded"]) == ("Q", [1.0], [2], True)


def test_rollouts_are_found_as_they_are_written_except_half_a_line(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    rollouts = RolloutIndex(path)
    assert not rollouts.locate_steps()
    lines(path, [rollout(1, "a", "x", 1.0), rollout(1, "a", "y", 0.0), rollout(1, "b", "z", 0.0)])
    assert [[row["completion"] for row in group] for group in rollouts.read_groups(1)] == [["x", "y"], ["z"]]
    half = json.dumps(rollout(2, "c", "later", 1.0))
    with path.open("a") as file:
        file.write(half[:50])
    assert list(rollouts.locate_steps()) == [1]
    with path.open("a") as file:
        file.write(half[50:] + "\n")
    assert rollouts.read_groups(2)[0][0]["completion"] == "later"
    path.write_text("")
    lines(path, [rollout(1, "a", "anew", 1.0), rollout(1, "a", "and longer", 0.0)])
    assert [row["completion"] for row in rollouts.read_groups(1)[0]] == ["anew", "and longer"]
    assert list(rollouts.locate_steps()) == [1]
    assert not rollouts.read_groups(2)


def test_question_is_found_in_every_step_that_asked_it(tmp_path):
    run = RunReader(small_run(tmp_path / "run", steps=3))
    found = {each["prompt"]: each for each in run.answer("questions")}
    assert (found["What is 3 + 4?"]["times"], found["What is 3 + 4?"]["last"]) == (3, [0.5, 0.5, 0.5])
    assert found["What is 5 + 4?"]["last"] == [0.25, 0.25, 0.25]
    add_step(run.run_dir, 4)
    name = run.answer("questions")[0]["question"]
    assert [each.step for each in run.refresh_questions().occurrences[name]] == [1, 2, 3, 4]
    followed = run.answer(f"question/{name}")
    assert followed["best"] == [[step, 0] for step in (1, 2, 3, 4)]
    assert re.findall("reward, step \\d: [\\d.]+", followed["charts"][0]) == [
        f"reward, step {step}: 0.5" for step in (1, 2, 3, 4)
    ]


def test_only_new_and_deleted_steps_are_read_again(tmp_path, monkeypatch):
    run, read = RunReader(small_run(tmp_path / "run", steps=3)), []
    summarised = run.compute_summary
    monkeypatch.setattr(run, "compute_summary", lambda step, *mark: read.append(step) or summarised(step, *mark))
    name = run.answer("questions")[0]["question"]
    assert read == [1, 2, 3]
    add_step(run.run_dir, 4)
    run.answer("questions")
    run.answer(f"question/{name}")
    assert read == [1, 2, 3, 4]
    (run.run_dir / "tokens" / "step-000002.parquet").unlink()
    assert run.answer(f"question/{name}")["best"] == [[1, 0], [3, 0], [4, 0]]
    assert read == [1, 2, 3, 4, 2]
    with pytest.raises(UserError, match="no step asked the question x"):
        run.answer("question/x")


# ---------------------------------------------------------------- sentences


def test_clipped_token_is_explained():
    token = {"kind": "sampled", "rule": "clip_low", "advantage": -0.9, "ratio": 0.76, "bound": 0.8, "push": 0.0}
    assert explain_token(token) == "Advantage -0.9, ratio 0.76 below 1 - clip_low = 0.8: no gradient."


@pytest.mark.parametrize(
    ("push", "change", "says"),
    [
        (0.1, 0.2, "pushed up, and its log-prob rose"),
        (0.1, -0.2, "pushed up, yet its log-prob fell by 0.2."),
        (-0.1, -0.2, "pushed down, and its log-prob fell"),
        (-0.1, 0.2, "pushed down, yet its log-prob rose by 0.2."),
        (-0.1, 0.0003, "pushed down; its log-prob changed by 0.0003, within the rounding of float32."),
        (-0.1, 0.00003, "changed by less than 0.0001, within the rounding of float32."),
        (0.1, None, "pushed up."),
        (0.0, 0.2, "did not push"),
        (None, 0.2, "Nothing is recorded"),
    ],
)
def test_pushed_token_is_explained(push, change, says):
    token = {"kind": "sampled", "rule": "", "advantage": 0.5, "ratio": 1.0, "push": push, "change": change}
    assert says in explain_token(token)


@pytest.mark.parametrize(
    ("dtype", "change", "says"),
    [
        ("bfloat16", 0.12, "changed by 0.12, within the rounding of bfloat16."),
        ("bfloat16", 0.14, "rose by 0.14."),
        ("float16", -0.015, "changed by 0.015, within the rounding of float16."),
        ("float16", -0.017, "yet its log-prob fell by 0.017."),
        ("float32", 0.0006, "rose by 0.0006."),
        (None, 0.0006, "rose by 0.0006."),
    ],
)
def test_change_within_the_rounding_of_the_dtype_is_named(dtype, change, says):
    token = {"kind": "sampled", "rule": "", "advantage": 0.5, "ratio": 1.0, "push": 0.1, "change": change}
    assert explain_token(token, metadata={"dtype": dtype} if dtype else {}).endswith(says)


def test_token_without_a_gradient_may_have_changed():
    dead = {"kind": "sampled", "rule": "zero_variance", "advantage": 0.0, "push": 0.0}
    assert explain_token({**dead, "change": -0.27}).endswith("no gradient; yet its log-prob fell by 0.27.")
    assert explain_token({**dead, "change": 0.0002}).endswith("no gradient.")
    assert explain_token({**dead, "change": -0.1}, metadata={"dtype": "bfloat16"}).endswith("no gradient.")
    assert explain_token({**dead, "change": -0.27}, "zh").endswith("但其对数概率下降了 0.27。")


def test_every_rule_has_a_sentence_in_both_languages():
    for rule in GRADIENT_RULES[1:]:
        said = [explain_token({"kind": "sampled", "rule": rule, "push": 0.0}, language) for language in ("en", "zh")]
        assert said[0] != said[1]
        assert "{" not in "".join(said)


def test_figures_have_three_digits():
    assert [format_significant(x) for x in (None, 0.0, -0.0123456, 1.0, 12345.6, 1e-8, 2.5e7)] == [
        "-", "0", "-0.0123", "1", "12346", "1.0e-8", "2.5e7",
    ]  # fmt: skip


# ---------------------------------------------------------------- diagnosis


def keys(rows, summaries=(), config=CONFIG, error=""):
    return [each["key"] for each in diagnose_run(config, rows, summaries, error)]


HEALTHY = {"loss": 0.4}


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"loss": 1e-9}, "loss_zero"),
        ({"groups/dead_all_right": 1.0, "groups/dead_all_wrong": 0.0}, "all_right"),
        ({"groups/dead_all_wrong": 1.0}, "all_wrong"),
        ({"groups/dead_all_right": 0.5, "groups/dead_all_wrong": 0.5}, "no_signal"),
        ({"groups/dead_equal": 1.0}, "all_equal"),
        ({"completion/finished": 0.01}, "cut_off"),
        ({"completion/finished": 0.36}, "cut_off"),
        ({"completion/finished": 0.8}, "cut_off"),
        ({"reward/format": 0.0}, "never_sampled"),
        ({"clip/low": 0.3, "clip/high": 0.4}, "clipped"),
        ({"reward/failed": 8.0}, "reward_fails"),
        ({"reward/failed": 2.0}, "reward_fails_sometimes"),
        ({"skipped": 1.0}, "skipped"),
        ({"lr": 0.0}, "lr_zero"),
    ],
)
def test_each_cause_is_diagnosed_and_a_healthy_run_has_none(changed, key):
    assert keys([metric(step, **HEALTHY) for step in (1, 2)]) == []
    assert keys([metric(step, **{**HEALTHY, **changed}) for step in (1, 2)]) == [key]


@pytest.mark.parametrize(("ended", "level"), [(0.89, "note"), (0.6, "note"), (0.44, "trouble"), (0.0, "trouble")])
def test_cut_off_answers_are_reported_with_their_share(ended, level):
    [found] = diagnose_run(CONFIG, [metric(1, loss=0.4, **{"completion/finished": ended})], [])
    assert (found["key"], found["level"], found["values"]["share"]) == ("cut_off", level, f"{1 - ended:.0%}")


def test_past_problems_are_notes_and_recent_ones_are_trouble():
    rows = [
        {**metric(step, **HEALTHY), "update/kl": 0.1 if step < 4 else 0.0, "completion/length_mean": 20.0}
        for step in range(1, 41)
    ]
    [found] = diagnose_run(CONFIG, rows[:5], [])
    assert (found["key"], found["level"], found["step"]) == ("update_too_large", "trouble", 3)
    assert diagnose_run(CONFIG, rows, [])[0]["level"] == "note"
    right = (1,) * 20
    evaluations = {step: graded(share) for step, share in ((0, right), (20, right[:4] + (0,) * 16))}
    fell = diagnose_run(CONFIG, rows[10:20], [], evaluations=evaluations)[0]
    assert (fell["key"], fell["level"], fell["step"]) == ("accuracy_fell", "trouble", 20)
    assert "greedy accuracy 0.20" in format_sentence("why.accuracy_fell", "zh", **fell["values"])


def graded(right):
    """Return an evaluation of these greedy answers."""
    return Evaluation("t", "test", len(right), 0, Estimate(sum(right) / len(right)), Estimate(), Estimate(), right, "q")


def degrees(folder):
    """Write a run with continuous rewards. Only its second step shows that they are: all rewards of the first are 0."""
    run = run_folder(folder)
    for step, rewards in ((1, [0.0, 0.0]), (2, [0.8, 0.3])):
        rows = [row(0, i, 0, "a", reward=reward, correct=False) for i, reward in enumerate(rewards)]
        write_tokens(run, step, [prompt(0, 0, "Q"), *rows])
        lines(run / "rollouts.jsonl", [rollout(step, "a", "x", reward) for reward in rewards])
    graded = {name: value for name, value in metric(2).items() if not name.startswith("groups/")}
    lines(run / "metrics.jsonl", [metric(1), {**graded, "groups/dead_equal": 0.0}])
    return run


def test_no_step_of_a_run_with_continuous_rewards_says_right_or_wrong(tmp_path):
    run = RunReader(degrees(tmp_path / "run"))
    for step, signal in ((1, "equal"), (2, "signal")):
        [group] = run.read_summary(step)["groups"]
        assert (group["signal"], group["correct"]) == (signal, [None, None])
        assert {each["correct"] for each in run.answer(f"tokens/{step}")["sequences"]} == {None}
        assert {each["correct"] for each in run.read_tokens(step).sequences} == {None}
    overview = run.answer("overview")
    assert overview["dead"] == [pytest.approx(1 / 3), 0.0]
    assert not re.search("right|wrong", re.sub("<[^>]*>", " ", " ".join(overview["charts"])))


def test_page_on_disk_marks_no_continuous_reward_right_or_wrong(tmp_path):
    run = RunReader(degrees(tmp_path / "run"))
    single_file.write_page([run], tmp_path / "page.html")
    found = re.findall(r'data-key="0/summaries/0">([^<]*)</script>', (tmp_path / "page.html").read_text())
    summaries = json.loads(zlib.decompress(base64.b64decode(found[0])))
    assert [group["correct"] for each in summaries for group in each["groups"]] == [[None, None]] * 2


def test_terminal_shows_a_continuous_reward_without_right_or_wrong(tmp_path):
    screen = Console(file=io.StringIO(), width=100)
    terminal.show_group(degrees(tmp_path / "run"), 2, None, "change", screen)
    text = screen.file.getvalue()
    assert "reward 0.8" in text
    assert not re.search(r"\b(right|wrong)\b", text)


def test_equal_partial_credit_differs_from_all_wrong():
    rows = [metric(1, loss=0.4, **{"groups/dead_all_wrong": 1.0})]
    group = {"signal": "partial", "rewards": [0.25, 0.25]}
    [found] = diagnose_run(CONFIG, rows, [{"groups": [group, group]}])
    assert found["key"] == "all_partial"
    assert found["values"]["reward"] == "0.25"


def test_reward_term_given_once_is_not_called_never_sampled():
    rows = [metric(step, loss=0.4, **{"reward/format": value}) for step, value in ((1, 0.1), (2, 0.0))]
    assert keys(rows) == []


def test_zero_loss_with_several_updates_has_another_explanation():
    assert keys([metric(1)], config={"algorithm": {"epochs": 2}}) == ["loss_small"]


def test_error_of_a_failing_reward_is_shown(tmp_path):
    run = run_folder(tmp_path / "run")
    write_tokens(run, 1, [row(0, 0, 0, "a")])
    lines(run / "metrics.jsonl", [metric(1, loss=0.4, **{"reward/failed": 12.0})])
    lines(run / "rollouts.jsonl", [rollout(1, "a", "x", None, error="ValueError: no number\nlong")])
    [found] = RunReader(run).find_explanations()
    assert (found["key"], found["values"]["error"]) == ("reward_fails", "ValueError: no number")


# ---------------------------------------------------------------- errors


def test_folder_without_run_or_tokens_raises_user_error(tmp_path):
    with pytest.raises(UserError, match="is not a run"):
        open_recorded_run(tmp_path)
    with pytest.raises(UserError, match=r"\[log\]"):
        open_recorded_run(run_folder(tmp_path / "bare"))


def test_error_message_names_a_damaged_file(tmp_path):
    run = small_run(tmp_path / "run", steps=1)
    (run / "tokens" / "step-000001.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(UserError, match=r"step-000001.parquet is damaged"):
        RunReader(run).answer("tokens/1")


@pytest.mark.parametrize("key", ["nothing", "tokens/x", "tokens/../../etc/passwd", "tokens/99", "summaries/-1"])
def test_unknown_keys_raise_user_error(tmp_path, key):
    with pytest.raises(UserError):
        RunReader(small_run(tmp_path / "run", steps=1)).answer(key)

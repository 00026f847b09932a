"""Tests of the checks before step 1: the signal of the first samples, and the display of the first completion."""

from __future__ import annotations

import math
import re

import pytest
import rich.console

from conftest import EOS, make_policy
from pellucid.algorithm.settings import GRPOConfig
from pellucid.config import Config, SamplerConfig
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.tasks.dataset import Dataset
from pellucid.tasks.prefixed import Prefixed
from pellucid.training.preflight import MAX_GIVEN_CHARACTERS, find_cut_off_warnings, show_first_completion, show_signal
from pellucid.types import Completion, ConversationOutcome, Group, Prompt, Reward

HINT = '[task] name = "prefixed"'


def group(*values, finished=True):
    completions = tuple(Completion((1,), (0.0,), "7", finished) for _ in values)
    return Group(Prompt("p", "3 + 4"), (1,), completions, tuple(map(Reward, values)))


def said(capsys, groups, task=None):
    cfg = Config(algorithm=GRPOConfig(group_size=2), sampler=SamplerConfig(max_tokens=5), task=task or Arithmetic())
    show_signal(groups, cfg, eos_ids=(EOS,))
    return capsys.readouterr().out


def test_advice_states_the_number_of_samples(capsys):
    assert said(capsys, [group(1.0, 0.0, 0.0), group(0.0, 1.0, math.nan)]).startswith("40% of 5 samples of 2 prompts")
    assert said(capsys, [group(0.25, -0.5)]).startswith(
        "The mean reward of 2 samples of 1 prompt is -0.125; judging by them, 0% of groups of 2 will be dead"
        " (too few prompts for an interval)"
    )


@pytest.mark.parametrize(("cut", "told"), [(0, ""), (1, ""), (2, "10%"), (20, "100%")])
def test_cut_off_samples_are_reported_if_more_than_a_few(capsys, cut, told):
    groups = [group(1.0, 0.0, finished=i >= cut) for i in range(20)]
    line = f"! {told} of 40 samples were cut off at sampler.max_tokens = 5"
    assert (line in said(capsys, groups)) == bool(told)
    assert ("cut off" in said(capsys, groups)) == bool(told)


def test_failed_rewards_do_not_count_as_contrast(capsys):
    assert "0% of groups of 2 will be dead" in said(capsys, [group(0.0, 1.0)])
    assert "100% of groups of 2 will be dead" in said(capsys, [group(1.0, math.nan), group(math.nan, math.nan)])


def test_prefixes_are_suggested_if_all_is_wrong_and_the_task_can_give_them(capsys, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    wrong, right = [group(0.0, 0.0)], [group(1.0, 1.0)]
    assert HINT in said(capsys, wrong)
    assert HINT not in said(capsys, right)
    assert HINT not in said(capsys, wrong, Prefixed(Arithmetic())), "it has them"
    assert HINT not in said(capsys, wrong, Dataset(data=str(tmp_path / "a.jsonl"))), "it has none to give"
    assert HINT not in said(capsys, [group(0.0, 1.0)]), "contrast enough"


def talk(tokens, given, finished=True, messages=({"role": "assistant", "content": "1"},), events=None):
    logprobs = (0.0,) * len(tokens)
    outcome = ConversationOutcome(events=events or {})
    return Completion(tuple(tokens), logprobs, "1", finished, given_spans=given, messages=messages, outcome=outcome)


def exchange(capsys, completion, prompt_ids=(1, 2), policy=None):
    show_first_completion(
        policy or make_policy(), Group(Prompt("p", "?", "7"), prompt_ids, (completion,), (Reward(0.5),))
    )
    return capsys.readouterr().out.strip().splitlines()


def test_bars_mark_where_sampled_and_given_tokens_meet(capsys):
    """Token i of the test tokenizer is character i of 0123456789+*-=? abcdefghijk."""
    messages = tuple({"role": role, "content": "x"} for role in ("assistant", "user", "assistant"))
    held = talk([3, 4, EOS, 5, 6, 7, EOS], ((3, 5),), messages=messages, events={"calls": 1, "raised": 1})
    shown, *below = exchange(capsys, held)
    assert shown == "12|34<eos>|56|7<eos>"
    counts = "5 sampled, 2 given in 2 turns, 1 tool call (1 raised)"
    assert " ".join(" ".join(below).split()) == f"2 prompt tokens | {counts}; reward 0.5, gold answer 7"


def test_given_prefix_is_shown_as_part_of_the_prompt(capsys):
    assert exchange(capsys, Completion((3, 4), (0.0, 0.0), "4", True, given_spans=((0, 1),)))[0] == "123|4"
    assert exchange(capsys, Completion((3, 4), (0.0, 0.0), "34", True)) == [
        "12|34",
        "2 prompt tokens | 2 sampled; reward 0.5, gold answer 7",
    ]
    assert exchange(capsys, Completion((3, 4), (0.0, 0.0), "", True, given_spans=((0, 2),)))[0] == "1234"


def test_given_tokens_are_dim_and_sampled_ones_are_not(capsys, monkeypatch):
    monkeypatch.setattr("rich._console", rich.console.Console(force_terminal=True, color_system="standard", width=80))
    shown = exchange(capsys, talk([3, 4, 5], ((1, 2),)))[0]
    assert re.findall(r"\x1b\[2m([^\x1b]+)\x1b\[0m", shown) == ["12", "4"]
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == "12|3|4|5"


def test_long_observations_are_shortened_and_long_answers_are_not(capsys):
    n, half = 9000, MAX_GIVEN_CHARACTERS // 2
    held = talk([3, *([4] * half), *([5] * (n - 2 * half)), *([6] * half), 7], ((1, n + 1),))
    shown = "".join(exchange(capsys, held)[:-1])
    assert shown == f"12|3|{'4' * half}[{n - 2 * half:,} characters left out]{'6' * half}|7"
    assert "left out" not in "".join(exchange(capsys, Completion((5,) * n, (0.0,) * n, "", True)))


def test_cut_off_warnings_name_the_limiting_setting(capsys):
    """Turns have at most three tokens, conversations at most five. A turn that ends with EOS is not cut off."""
    by_turn = talk([1, 2, 3, 9, 1, EOS], ((3, 4),))
    at_end = talk([1, EOS, 9, 1, 2, 3], ((2, 3),), finished=False)
    by_length = talk([1, EOS, 9, 9, 9], ((2, 5),), finished=False)
    whole = talk([1, 2, EOS, 9, 1, EOS], ((3, 4),))
    cfg = Config(sampler=SamplerConfig(max_tokens=5, turn_tokens=3), task=Arithmetic())
    turns = (
        "{} of 4 samples have a turn that was cut off at sampler.turn_tokens = 3: raise it, or ask for shorter turns"
    )
    length = "{} of 4 samples were cut off at sampler.max_tokens = 5, which counts all tokens after the question"
    told = list(find_cut_off_warnings([by_turn, at_end, by_length, whole], cfg.sampler, (EOS,)))
    assert told[0] == turns.format("50%")
    assert told[1].startswith(length.format("25%"))
    assert list(find_cut_off_warnings([whole] * 4, cfg.sampler, (EOS,))) == []
    assert list(find_cut_off_warnings([at_end] * 4, cfg.sampler, (EOS,))) == [turns.format("100%")]
    without = SamplerConfig(max_tokens=5)
    assert [
        line.split(" = ")[0] for line in find_cut_off_warnings([by_turn, at_end, by_length, whole], without, (EOS,))
    ] == ["50% of 4 samples were cut off at sampler.max_tokens"]
    alone = [Completion((1, 2, 3), (0.0,) * 3, "123", False)]
    assert [line.split(" = ")[0] for line in find_cut_off_warnings(alone, cfg.sampler, (EOS,))] == [
        "100% of 1 sample were cut off at sampler.max_tokens"
    ]


def test_decoded_text_is_not_parsed_as_markup(capsys, monkeypatch):
    policy = make_policy()
    monkeypatch.setattr(policy, "decode", lambda *_, **__: ":smile: [bold]3[/bold]")
    shown = exchange(capsys, Completion((3,), (0.0,), "", True), policy=policy)[0]
    assert shown == "|".join([":smile: [bold]3[/bold]"] * 2)

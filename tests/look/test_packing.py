"""A page that works from disk: what it holds, and what goes first where there is no room."""

from __future__ import annotations

import base64
import json
import re
import zlib

import numpy as np
import pytest

from made_runs import add_step, lines, metric, row, run_folder, small_run, write_tokens
from pellucid.inspect import single_file
from pellucid.inspect.run_reader import RunReader
from pellucid.inspect.single_file import Vocabulary, encode_magnitudes, encode_step
from pellucid.reporting import token_files


def blocks(page):
    found = re.findall(r'data-key="([^"]+)">([^<]*)</script>', page.read_text())
    return {key: zlib.decompress(base64.b64decode(text)) for key, text in found}


def answers(page):
    return {key: json.loads(text) for key, text in blocks(page).items() if "/tokens/" not in key}


def kept_steps(page):
    return sorted(int(key.rpartition("/")[2]) for key in blocks(page) if "/tokens/" in key)


def test_a_page_with_room_holds_every_answer_as_the_server_gives_it(tmp_path):
    run = RunReader(small_run(tmp_path / "run", steps=3))
    assert single_file.write_page([run], tmp_path / "page.html") == ""
    held = answers(tmp_path / "page.html")
    questions = run.answer("questions")
    assert len(questions) == 3
    for key in ("questions", "why", *(f"question/{each['question']}" for each in questions)):
        assert held[f"0/{key}"] == json.loads(json.dumps(run.answer(key))), key
    assert held["0/overview"]["recorded"] == [1, 2, 3]
    for packed, exact in zip(held["0/summaries/0"], run.answer("summaries/0"), strict=True):
        for group, whole in zip(packed["groups"], exact["groups"], strict=True):
            assert group == {**whole, "gradient": group["gradient"], "entropy": group["entropy"]}
            for name in ("gradient", "entropy"):
                assert group[name] == (whole[name] and pytest.approx(whole[name], rel=1e-3))
    assert kept_steps(tmp_path / "page.html") == [1, 2, 3]
    assert held["packed"]["exact"]
    assert held["packed"]["counts"] == {"tokens": [3, 3], "summaries": [3, 3], "questions": [3, 3]}


def test_the_most_exact_level_that_has_room_for_all_steps_is_chosen():
    """A step of 1000 bytes at the first level, of 900 at the second, and so on."""

    def of_step(step, words, level):
        return {
            "key": "x" * (1000 - 100 * single_file.PRECISION_LEVELS.index(level) - single_file.BLOCK_OVERHEAD_BYTES)
        }

    steps = dict.fromkeys(range(1, 101), 2000)
    assert single_file.choose_precision(of_step, steps, 200_000) == (single_file.PRECISION_LEVELS[0], 100)
    assert single_file.choose_precision(of_step, steps, 100_000) == (
        single_file.PRECISION_LEVELS[1],
        100,
    )  # the first would leave nothing to spare
    assert single_file.choose_precision(of_step, steps, 75_000) == (single_file.PRECISION_LEVELS[3], 100)
    last, count = single_file.choose_precision(of_step, steps, 25_000)
    assert last == single_file.PRECISION_LEVELS[-1]
    assert count == int((0.97 * 25_000 - len(single_file.encode_block([]))) / 500)


def test_steps_are_foreseen_by_the_size_of_their_files():
    """One step in nine is three times as large as others, and the sample is of those alone."""
    files = {step: 6000 if step % 9 == 1 else 2000 for step in range(1, 101)}
    assert single_file.spread(list(files), single_file.SAMPLE_SIZE) == [step for step in files if files[step] == 6000]

    def of_step(step, words, level):
        return {"key": "x" * (files[step] // 2 - single_file.BLOCK_OVERHEAD_BYTES)}

    whole = sum(files.values()) // 2
    level, count = single_file.choose_precision(of_step, files, 100_000)
    assert level == single_file.PRECISION_LEVELS[-1]
    assert count == int((0.97 * 100_000 - len(single_file.encode_block([]))) * 100 / whole)


def test_of_a_run_without_room_some_steps_are_kept_without_alternatives(tmp_path):
    run = RunReader(small_run(tmp_path / "run", steps=9))
    limit = len(single_file.page({})[0]) + 25_000
    said = single_file.write_page([run], tmp_path / "page.html", limit=limit)
    assert re.search(r"all alternatives; the tokens of \d of 9 steps", said)
    kept = kept_steps(tmp_path / "page.html")
    assert {1, 9} <= set(kept)
    assert answers(tmp_path / "page.html")["0/overview"]["recorded"] == kept
    assert (tmp_path / "page.html").stat().st_size <= limit


def test_where_steps_turn_out_larger_than_foreseen_fewer_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(
        single_file, "choose_precision", lambda of_step, steps, room: (single_file.PRECISION_LEVELS[0], len(steps))
    )
    limit = len(single_file.page({})[0]) + 60_000
    said = single_file.write_page(
        [RunReader(small_run(tmp_path / "run", steps=30))], tmp_path / "page.html", limit=limit
    )
    kept = kept_steps(tmp_path / "page.html")
    assert {1, 30} <= set(kept)
    assert 4 < len(kept) < 30
    assert f"the tokens of {30 - len(kept)} of 30 steps" in said
    assert 0.8 * limit < (tmp_path / "page.html").stat().st_size <= limit


@pytest.mark.slow
def test_of_a_long_run_only_those_steps_are_read_that_have_room(tmp_path, monkeypatch):
    run, read = RunReader(small_run(tmp_path / "run", steps=60)), []
    whole = token_files.read_tokens
    monkeypatch.setattr(
        token_files, "read_tokens", lambda folder, step, columns=None: read.append(step) or whole(folder, step, columns)
    )
    monkeypatch.setattr(single_file, "SAMPLE_SIZE", 2)
    said = single_file.write_page([run], tmp_path / "page.html", limit=len(single_file.page({})[0]) + 60_000)
    held = answers(tmp_path / "page.html")["packed"]["counts"]
    assert 2 < held["tokens"][0] < 30
    assert 2 < held["summaries"][0] < 60
    assert f"the groups of {60 - held['summaries'][0]} of 60 steps" in said
    sampled = 2 * (
        2 + len(single_file.PRECISION_LEVELS)
    )  # of summaries and tokens, and what is read of the run whatever is packed
    assert len(read) <= held["tokens"][0] * 1.2 + held["summaries"][0] + sampled + single_file.PAGE
    assert (tmp_path / "page.html").stat().st_size <= len(single_file.page({})[0]) + 60_000


@pytest.mark.slow
def test_five_hundred_steps_of_four_groups_would_stay_below_fifteen_megabytes(tmp_path):
    """A tenth of them in a tenth of the room, which the page itself takes from: each step 4 groups x 8 completions x 64
    tokens, of random numbers, which nothing packs well."""
    run = run_folder(tmp_path / "run")
    for step in range(1, 51):
        add_step(run, step, groups=5, completions=8, length=64)  # the fifth group is not recorded
    single_file.write_page([RunReader(run)], tmp_path / "page.html", limit=single_file.MAX_PAGE_BYTES // 10)
    assert (tmp_path / "page.html").stat().st_size <= 1_500_000
    kept = kept_steps(tmp_path / "page.html")
    assert len(kept) > 35
    assert {1, 50} <= set(kept)


@pytest.mark.slow
def test_of_two_runs_the_same_steps_are_kept(tmp_path):
    runs = [RunReader(small_run(tmp_path / name, steps=9, seed=seed)) for seed, name in enumerate(("one", "two"))]
    single_file.write_page(runs, tmp_path / "page.html", limit=len(single_file.page({})[0]) + 30_000)
    held = blocks(tmp_path / "page.html")
    kept = [{key.rpartition("/")[2] for key in held if key.startswith(f"{i}/tokens/")} for i in (0, 1)]
    assert kept[0] == kept[1]
    assert 1 < len(kept[0]) < 9


def test_a_damaged_file_costs_its_step_alone(tmp_path):
    run = RunReader(small_run(tmp_path / "run", steps=3))
    token_files.get_tokens_path(run.run_dir, 2).write_bytes(b"PAR1")
    assert "the tokens of 1 of 3 steps" in single_file.write_page([run], tmp_path / "page.html")
    assert kept_steps(tmp_path / "page.html") == [1, 3]


@pytest.mark.filterwarnings("error")
def test_numbers_that_are_none_and_texts_that_are_missing_are_packed(tmp_path):
    run, nan, inf = run_folder(tmp_path / "run"), float("nan"), float("inf")
    tops = {"top_before": [1, None], "top_before_text": [None, "x"], "top_before_logprob": [None, -inf]}
    odd = {"token": None, "text": None, "logprob_before": nan, "gradient": inf, "push": -inf, "ratio": 1e30, **tops}
    write_tokens(run, 1, [{**row(0, 0, 0, "a"), **odd}, {**row(0, 0, 1, "b"), "logprob_after": -inf}])
    lines(run / "metrics.jsonl", [metric(1)])
    assert single_file.write_page([RunReader(run)], tmp_path / "page.html") == ""
    assert kept_steps(tmp_path / "page.html") == [1]


def test_codes_by_hand():
    assert encode_magnitudes(np.array([0, 0.4, 7, 99.4, 99.6, 104, 106, 994, 996, 1000, 1060]), 2).tolist() == [
        0, 0, 7, 99, 100, 100, 101, 189, 190, 190, 191,
    ]  # fmt: skip


def test_numbers_that_many_tokens_share_are_exact_and_texts_are_told_once(tmp_path):
    run = run_folder(tmp_path / "run")
    write_tokens(run, 1, [row(0, 0, i, "same", advantage=0.12345678, weight=1 / 3) for i in range(40)])
    lines(run / "metrics.jsonl", [metric(1)])
    words = Vocabulary()
    text = encode_step(token_files.read_tokens(run, 1), words, single_file.PRECISION_LEVELS[-1])
    header = json.loads(text[4 : 4 + int.from_bytes(text[:4], "little")])
    told = {part["name"]: part for part in header["parts"]}
    assert told["advantage"]["values"] == [pytest.approx(0.12345678, rel=1e-6)]
    assert told["weight"]["values"] == [pytest.approx(1 / 3, rel=1e-6)]
    assert [text for _, text in words.indices] == ["same"]
    assert header["sequences"]["end"] == [40]

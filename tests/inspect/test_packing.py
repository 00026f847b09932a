"""Test what a page that works from disk contains, and what it leaves out for lack of room."""

from __future__ import annotations

import base64
import json
import re
import zlib

import pytest

from made_runs import add_step, lines, metric, row, run_folder, small_run, write_tokens
from pellucid.inspect import single_file
from pellucid.inspect.run_reader import RunReader
from pellucid.reporting import token_files


def blocks(page):
    found = re.findall(r'data-key="([^"]+)">([^<]*)</script>', page.read_text())
    return {key: zlib.decompress(base64.b64decode(text)) for key, text in found}


def answers(page):
    return {key: json.loads(text) for key, text in blocks(page).items()}


def kept_steps(page):
    return sorted(int(key.rpartition("/")[2]) for key in blocks(page) if "/tokens/" in key)


def test_page_with_room_holds_every_answer_of_the_server(tmp_path):
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
    for step in (1, 2, 3):
        assert held[f"0/tokens/{step}"] == json.loads(json.dumps(run.answer(f"tokens/{step}")))
    assert held["packed"]["counts"] == {"tokens": [3, 3], "summaries": [3, 3], "questions": [3, 3]}


def test_number_of_steps_is_estimated_from_file_sizes(monkeypatch):
    """One step in nine is three times as large as the others, and the sample contains only such steps."""
    files = {step: 6000 if step % 9 == 1 else 2000 for step in range(1, 101)}
    assert single_file.sample_evenly(list(files), single_file.SAMPLE_SIZE) == [
        step for step in files if files[step] == 6000
    ]
    monkeypatch.setattr(
        single_file,
        "pack_step_tokens",
        lambda runs, step: {"key": "x" * (files[step] // 2 - single_file.BLOCK_OVERHEAD_BYTES)},
    )
    whole = sum(files.values()) // 2
    assert single_file.estimate_step_count([], files, 100_000) == int(0.97 * 100_000 * 100 / whole)
    assert single_file.estimate_step_count([], files, 10) == 1
    assert single_file.estimate_step_count([], files, 200_000) == 100


def test_page_without_room_keeps_some_steps(tmp_path):
    run = RunReader(small_run(tmp_path / "run", steps=9))
    limit = len(single_file.build_inspect_page({})[0]) + 40_000
    said = single_file.write_page([run], tmp_path / "page.html", limit=limit)
    assert re.search(r"Left out for room: the tokens of \d of 9 steps", said)
    kept = kept_steps(tmp_path / "page.html")
    assert {1, 9} <= set(kept)
    assert answers(tmp_path / "page.html")["0/overview"]["recorded"] == kept
    assert (tmp_path / "page.html").stat().st_size <= limit


def test_fewer_steps_are_kept_if_they_are_larger_than_estimated(tmp_path, monkeypatch):
    monkeypatch.setattr(single_file, "estimate_step_count", lambda runs, files, room: len(files))
    limit = len(single_file.build_inspect_page({})[0]) + 60_000
    said = single_file.write_page(
        [RunReader(small_run(tmp_path / "run", steps=30))], tmp_path / "page.html", limit=limit
    )
    kept = kept_steps(tmp_path / "page.html")
    assert {1, 30} <= set(kept)
    assert 4 < len(kept) < 30
    assert f"the tokens of {30 - len(kept)} of 30 steps" in said
    assert 0.8 * limit < (tmp_path / "page.html").stat().st_size <= limit


@pytest.mark.slow
def test_only_steps_with_room_are_read_from_a_long_run(tmp_path, monkeypatch):
    run, read = RunReader(small_run(tmp_path / "run", steps=60)), []
    whole = token_files.read_tokens
    monkeypatch.setattr(
        token_files, "read_tokens", lambda folder, step, columns=None: read.append(step) or whole(folder, step, columns)
    )
    monkeypatch.setattr(single_file, "SAMPLE_SIZE", 2)
    said = single_file.write_page(
        [run], tmp_path / "page.html", limit=len(single_file.build_inspect_page({})[0]) + 60_000
    )
    held = answers(tmp_path / "page.html")["packed"]["counts"]
    assert 2 < held["tokens"][0] < 30
    assert 2 < held["summaries"][0] < 60
    assert f"the groups of {60 - held['summaries'][0]} of 60 steps" in said
    sampled = 2 * 3  # samples of summaries and tokens, and what is read in any case
    assert len(read) <= held["tokens"][0] * 1.2 + held["summaries"][0] + sampled + single_file.STEPS_PER_PAGE
    assert (tmp_path / "page.html").stat().st_size <= len(single_file.build_inspect_page({})[0]) + 60_000


@pytest.mark.slow
def test_at_least_8_of_50_steps_fit_into_1_5_mb(tmp_path):
    """This is a tenth of 500 steps in a tenth of 15 MB, of which the page itself takes a part. Each step has 4 groups x
    8 completions x 64 tokens of random numbers, which hardly compress. About a fifth of all 500 steps would fit.
    """
    run = run_folder(tmp_path / "run")
    for step in range(1, 51):
        add_step(run, step, groups=5, completions=8, length=64)  # the fifth group is not recorded
    single_file.write_page([RunReader(run)], tmp_path / "page.html", limit=single_file.MAX_PAGE_BYTES // 10)
    assert (tmp_path / "page.html").stat().st_size <= 1_500_000
    kept = kept_steps(tmp_path / "page.html")
    assert len(kept) >= 8
    assert {1, 50} <= set(kept)


@pytest.mark.slow
def test_same_steps_of_two_runs_are_kept(tmp_path):
    runs = [RunReader(small_run(tmp_path / name, steps=9, seed=seed)) for seed, name in enumerate(("one", "two"))]
    single_file.write_page(runs, tmp_path / "page.html", limit=len(single_file.build_inspect_page({})[0]) + 70_000)
    held = blocks(tmp_path / "page.html")
    kept = [{key.rpartition("/")[2] for key in held if key.startswith(f"{i}/tokens/")} for i in (0, 1)]
    assert kept[0] == kept[1]
    assert 1 < len(kept[0]) < 9


def test_damaged_file_costs_only_its_step(tmp_path):
    run = RunReader(small_run(tmp_path / "run", steps=3))
    token_files.get_tokens_path(run.run_dir, 2).write_bytes(b"PAR1")
    assert "the tokens of 1 of 3 steps" in single_file.write_page([run], tmp_path / "page.html")
    assert kept_steps(tmp_path / "page.html") == [1, 3]


@pytest.mark.filterwarnings("error")
def test_nan_infinity_and_missing_texts_are_packed(tmp_path):
    run, nan, inf = run_folder(tmp_path / "run"), float("nan"), float("inf")
    tops = {"top_before": [1, None], "top_before_text": [None, "x"], "top_before_logprob": [None, -inf]}
    odd = {"token": None, "text": None, "logprob_before": nan, "gradient": inf, "push": -inf, "ratio": 1e30, **tops}
    write_tokens(run, 1, [{**row(0, 0, 0, "a"), **odd}, {**row(0, 0, 1, "b"), "logprob_after": -inf}])
    lines(run / "metrics.jsonl", [metric(1)])
    assert single_file.write_page([RunReader(run)], tmp_path / "page.html") == ""
    assert kept_steps(tmp_path / "page.html") == [1]

"""A page that works from disk: what it holds, and what goes first where there is no room."""

from __future__ import annotations

import base64
import json
import re
import zlib

from made_runs import add_step, run_folder, small_run
from pellucid.look import packing
from pellucid.look.reading import Run


def blocks(page):
    found = re.findall(r'data-key="([^"]+)">([^<]*)</script>', page.read_text())
    return {key: json.loads(zlib.decompress(base64.b64decode(text))) for key, text in found}


def test_a_page_with_room_holds_every_answer_as_the_server_gives_it(tmp_path):
    run = Run(small_run(tmp_path / "run", steps=3))
    assert packing.write([run], tmp_path / "page.html") == ""
    held = blocks(tmp_path / "page.html")
    for key in ("overview", "questions", "why", "summaries/0", "tokens/1", "tokens/3"):
        assert held[f"0/{key}"] == json.loads(json.dumps(run.answer(key))), key
    assert held["packed"] == {"least": 0.0, "digits": 4, "kept": 3, "steps": 3}


def test_alternatives_go_first_and_steps_last(tmp_path):
    run = Run(small_run(tmp_path / "run", steps=9))
    packing.write([run], tmp_path / "whole.html")
    whole = (tmp_path / "whole.html").stat().st_size
    said = packing.write([run], tmp_path / "less.html", limit=whole - 2000)
    assert "alternatives" in said
    assert (tmp_path / "less.html").stat().st_size <= whole - 2000
    assert len([key for key in blocks(tmp_path / "less.html") if "tokens/" in key]) == 9
    bare = whole - sum(len(packing.packed(run.answer(f"tokens/{step}"))) for step in range(1, 10))
    said = packing.write([run], tmp_path / "least.html", limit=bare + 8000)
    assert re.search(r"all alternatives and the tokens of \d of 9 steps", said)
    assert 0 < len([key for key in blocks(tmp_path / "least.html") if "tokens/" in key]) < 9
    assert (tmp_path / "least.html").stat().st_size <= bare + 8000


def test_five_hundred_steps_of_four_groups_would_stay_below_fifteen_megabytes(tmp_path):
    """A tenth of them in a tenth of the room, which the page itself takes from: each step 4 groups x 8 completions x 64
    tokens, of random numbers, which nothing packs well."""
    run = run_folder(tmp_path / "run")
    for step in range(1, 51):
        add_step(run, step, groups=5, completions=8, length=64)  # the fifth group is not recorded
    said = packing.write([Run(run)], tmp_path / "page.html", limit=packing.LIMIT // 10)
    assert (tmp_path / "page.html").stat().st_size <= 1_500_000
    kept = [key for key in blocks(tmp_path / "page.html") if "tokens/" in key]
    assert len(kept) > 25
    assert "0/tokens/1" in kept
    assert "0/tokens/50" in kept
    assert f"the tokens of {50 - len(kept)} of 50 steps" in said

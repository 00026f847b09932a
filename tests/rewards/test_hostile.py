"""Test graders with a few hostile texts. `python tests/rewards/hostile.py 10000` runs many, and times them."""

from __future__ import annotations

import pytest
from hostile import GOLD, LONGEST, SCRAPS, graders, texts

GRADERS = graders()
RIGHT = {
    "exact": GOLD,
    "numeric": f"It is {GOLD}.",
    "math, a number": f"\\boxed{{{GOLD}}}",
    "math, a formula": "$\\frac{7x^2}{\\sqrt{7}}$",
    "math, a word": "<answer>Seventy</answer>",
    "arithmetic": GOLD,
    "countdown": "17 * 7 + 71",
    "continuity": "\\boxed{9329}",
    "gsm8k strict": f"<answer>{GOLD}</answer>",
    "expected whole": "77",
    "sorting": "7, 17, 77",
}


def test_texts_are_deterministic_and_hold_no_answer_by_chance():
    assert list(texts(50)) == list(texts(50)) != list(texts(50, seed=1))
    assert not any("7" in scrap for scrap in SCRAPS)
    assert max(map(len, texts(500))) <= LONGEST
    assert sum(GOLD in text for text in texts(50)) == 10


@pytest.mark.parametrize("name", RIGHT)
def test_graders_credit_the_right_answer(name):
    assert GRADERS[name](RIGHT[name])


@pytest.mark.parametrize("name", GRADERS)
def test_graders_do_not_raise_or_credit_hostile_texts(name):
    credits = GRADERS[name]
    assert not [text for text in texts(200) if credits(text)]

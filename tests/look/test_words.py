"""Every word of the page, in both languages."""

from __future__ import annotations

import re

from pellucid.look.assembly import MODULES, joined
from pellucid.look.words import PAGE, say, words
from pellucid.reporting.report import SENTENCES


def test_every_word_is_there_in_both_languages():
    for key, (english, chinese) in words().items():
        assert english, key
        assert sorted(re.findall(r"{\w+}", english)) == sorted(re.findall(r"{\w+}", chinese)), key
        if key not in {"language", "movers.unpredicted_end", "packed.join"}:
            assert re.search("[\u4e00-\u9fff]", chinese), key
            assert not re.search("[\u4e00-\u9fff]", english), key


def test_every_word_that_the_page_says_is_there():
    said = {key for name in MODULES for key in re.findall(r'\bsay\("([\w.]+)"', (PAGE / name).read_text())}
    assert len(said) > 60
    assert said <= set(words())


def test_the_report_and_the_page_begin_with_the_same_sentence():
    assert {key: english for key, (english, _) in words().items() if key.startswith("lede.")} == SENTENCES


def test_values_stand_where_the_sentence_names_them():
    assert say("step.title", step=3) == "Step 3"
    assert say("step.title", "zh", step=3) == "第 3 步"


def test_data_is_never_read_as_markup():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", joined())

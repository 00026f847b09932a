"""Every word of the page, in both languages."""

from __future__ import annotations

import re

from pellucid.algorithm.explained import GRADIENT_RULES
from pellucid.inspect.page import load_modules
from pellucid.inspect.sentences import format_sentence, load_sentences
from pellucid.reporting.report import SENTENCES
from pellucid.reporting.warning_signs import SIGN_SENTENCES


def test_every_word_is_there_in_both_languages():
    for key, (english, chinese) in load_sentences().items():
        assert english, key
        assert sorted(re.findall(r"{\w+}", english)) == sorted(re.findall(r"{\w+}", chinese)), key
        if key not in {"language", "packed.join"}:
            assert re.search("[\u4e00-\u9fff]", chinese), key
            assert not re.search("[\u4e00-\u9fff]", english), key


def test_every_word_that_the_page_says_is_there():
    said = {key for code in load_modules().values() for key in re.findall(r'\bsay\("([\w.]+)"', code)}
    assert len(said) > 60
    assert said <= set(load_sentences())


def test_every_rule_has_a_name():
    assert {f"rule.{rule}" for rule in GRADIENT_RULES[1:]} <= set(load_sentences())


def test_the_report_and_the_page_begin_with_the_same_sentence():
    assert {key: english for key, (english, _) in load_sentences().items() if key.startswith("lede.")} == SENTENCES


def test_the_report_and_the_page_say_the_same_of_what_went_wrong():
    sentences = load_sentences()
    assert {key: sentences[key][0] for key in SIGN_SENTENCES} == SIGN_SENTENCES


def test_values_stand_where_the_sentence_names_them():
    assert format_sentence("step.title", step=3) == "Step 3"
    assert format_sentence("step.title", "zh", step=3) == "第 3 步"


def test_data_is_never_read_as_markup():
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", "".join(load_modules().values())
    )

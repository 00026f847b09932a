"""Test the sentences of the page in both languages."""

from __future__ import annotations

import re

from pellucid.algorithm.explained import GRADIENT_RULES
from pellucid.inspect.page import load_modules
from pellucid.inspect.sentences import format_sentence, load_sentences
from pellucid.reporting.report import SENTENCES
from pellucid.reporting.warning_signs import SIGN_SENTENCES


def test_every_sentence_exists_in_both_languages():
    for key, (english, chinese) in load_sentences().items():
        assert english, key
        assert sorted(re.findall(r"{\w+}", english)) == sorted(re.findall(r"{\w+}", chinese)), key
        if key not in {"language", "packed.join"}:
            assert re.search("[\u4e00-\u9fff]", chinese), key
            assert not re.search("[\u4e00-\u9fff]", english), key


def test_every_sentence_that_the_page_uses_exists():
    said = {key for code in load_modules().values() for key in re.findall(r'\bsay\("([\w.]+)"', code)}
    assert len(said) > 60
    assert said <= set(load_sentences())


def test_every_rule_has_a_name():
    assert {f"rule.{rule}" for rule in GRADIENT_RULES[1:]} <= set(load_sentences())


def test_the_report_and_the_page_begin_with_the_same_sentence():
    assert {key: english for key, (english, _) in load_sentences().items() if key.startswith("lede.")} == SENTENCES


def test_report_and_page_have_the_same_warnings():
    sentences = load_sentences()
    assert {key: sentences[key][0] for key in SIGN_SENTENCES} == SIGN_SENTENCES


def test_values_replace_their_names_in_a_sentence():
    assert format_sentence("step.title", step=3) == "Step 3"
    assert format_sentence("step.title", "zh", step=3) == "第 3 步"


def test_page_never_parses_data_as_markup():
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", "".join(load_modules().values())
    )

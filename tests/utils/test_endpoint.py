"""Keys in what endpoints say."""

from __future__ import annotations

import pytest

from pellucid.utils.endpoint import NO_KEY, redact_and_shorten


@pytest.mark.parametrize("key", ["a", "abc", NO_KEY])
def test_a_key_that_is_in_ordinary_words_is_left_alone(key):
    assert redact_and_shorten("an abcess of none", key) == "an abcess of none"


def test_a_key_and_words_that_begin_as_it_are_left_out():
    key = "sk-abcdefghijkl"
    assert redact_and_shorten(f"7 for sk-a***kl and {key} and cdefgh", key) == "7 for [key] and [key] and [key]"

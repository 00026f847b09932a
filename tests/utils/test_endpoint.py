"""Tests that API keys are redacted from the messages of endpoints."""

from __future__ import annotations

import pytest

from pellucid.utils.endpoint import NO_KEY, redact_and_shorten


@pytest.mark.parametrize("key", ["a", "abc", NO_KEY])
def test_short_keys_inside_ordinary_words_are_not_redacted(key):
    assert redact_and_shorten("an abcess of none", key) == "an abcess of none"


def test_keys_and_their_fragments_are_redacted():
    key = "sk-abcdefghijkl"
    assert redact_and_shorten(f"7 for sk-a***kl and {key} and cdefgh", key) == "7 for [key] and [key] and [key]"

"""Texts of tokens: joined they are the decoded whole, and a character belongs to the token that completes it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import byte_tokenizer
from pellucid.policy.text import REPLACEMENT, TokenTexts

BYTES = byte_tokenizer()


def decode(ids):
    return str(BYTES.decode(list(ids), skip_special_tokens=False))


def test_a_character_is_said_by_the_token_that_completes_it():
    ids = BYTES.encode("a你😀b<|im_end|>")
    assert TokenTexts(decode).decode_each(ids) == ["a", "", "", "你", "", "", "", "😀", "b", "<|im_end|>"]


@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=12))
def test_joined_they_are_the_whole_whatever_the_bytes_are(ids):
    texts = TokenTexts(decode).decode_each(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == decode(ids)


@given(st.text(alphabet="ab 你好😀é\n", max_size=8))
def test_of_whole_characters_no_token_says_a_part(text):
    texts = TokenTexts(decode).decode_each(BYTES.encode(text))
    assert "".join(texts) == text
    assert not any(REPLACEMENT in one for one in texts)


def test_a_character_that_is_never_completed_is_said_at_the_end():
    ids = BYTES.encode("a你")[:-1]
    assert TokenTexts(decode).decode_each(ids) == ["a", "", REPLACEMENT]


def test_the_space_that_a_tokenizer_leaves_out_at_the_beginning_of_a_text_is_said_within_it():
    """As sentencepiece does it: tokens begin with a space, a text does not."""
    words = [" in", " the", "re", " is"]
    texts = TokenTexts(lambda ids: "".join(words[i] for i in ids).removeprefix(" "))
    assert texts.decode_each([0, 1, 2, 3]) == ["in", " the", "re", " is"]
    assert texts.decode_token(1) == " the"


def test_what_is_said_otherwise_among_others_is_still_the_whole():
    """A decoder that cleans up: a space before a full stop goes, and with it what the token before had said."""
    words = ["end ", ".", "x"]
    texts = TokenTexts(lambda ids: "".join(words[i] for i in ids).replace(" .", "."))
    found = texts.decode_each([0, 1, 2])
    assert "".join(found) == "end.x"
    assert found == ["end", ".", "x"]


@pytest.mark.parametrize("text", ["1 + 1 = 2", "ends 中文 😀 here"])
def test_every_token_is_decoded_once(text):
    """What was decoded alone is kept: a second sequence of the same tokens costs one call, or those of its parts."""
    calls = []
    texts = TokenTexts(lambda ids: calls.append(1) or decode(ids))
    ids = BYTES.encode(text)
    texts.decode_each(ids)
    first = len(calls)
    texts.decode_each(ids)
    assert len(calls) - first < first / 2

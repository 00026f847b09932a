"""Tests of per-token texts: joined, they equal the decoded whole, and the last token of a character has its text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import byte_tokenizer
from pellucid.policy.text import REPLACEMENT, TokenTexts

BYTES = byte_tokenizer()


def decode(ids):
    return str(BYTES.decode(list(ids), skip_special_tokens=False))


def test_character_belongs_to_the_token_that_completes_it():
    ids = BYTES.encode("a你😀b<|im_end|>")
    assert TokenTexts(decode).decode_each(ids) == ["a", "", "", "你", "", "", "", "😀", "b", "<|im_end|>"]


@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=12))
def test_texts_of_any_bytes_join_to_the_decoded_whole(ids):
    texts = TokenTexts(decode).decode_each(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == decode(ids)


@given(st.text(alphabet="ab 你好😀é\n", max_size=8))
def test_complete_characters_are_never_split(text):
    texts = TokenTexts(decode).decode_each(BYTES.encode(text))
    assert "".join(texts) == text
    assert not any(REPLACEMENT in one for one in texts)


def test_incomplete_character_appears_at_the_end():
    ids = BYTES.encode("a你")[:-1]
    assert TokenTexts(decode).decode_each(ids) == ["a", "", REPLACEMENT]


def test_space_that_is_dropped_at_the_start_is_kept_inside_a_text():
    """In sentencepiece, tokens begin with a space, but a text does not."""
    words = [" in", " the", "re", " is"]
    texts = TokenTexts(lambda ids: "".join(words[i] for i in ids).removeprefix(" "))
    assert texts.decode_each([0, 1, 2, 3]) == ["in", " the", "re", " is"]
    assert texts.decode_token(1) == " the"


def test_texts_join_to_the_whole_if_the_decoder_cleans_up_spaces():
    """The decoder drops a space before a full stop; the space belongs to the text of the token before."""
    words = ["end ", ".", "x"]
    texts = TokenTexts(lambda ids: "".join(words[i] for i in ids).replace(" .", "."))
    found = texts.decode_each([0, 1, 2])
    assert "".join(found) == "end.x"
    assert found == ["end", ".", "x"]


@pytest.mark.parametrize("text", ["1 + 1 = 2", "ends 中文 😀 here"])
def test_every_token_is_decoded_once(text):
    """Decoded tokens are cached: the second time, a sequence costs one call, or one for each of its parts."""
    calls = []
    texts = TokenTexts(lambda ids: calls.append(1) or decode(ids))
    ids = BYTES.encode(text)
    texts.decode_each(ids)
    first = len(calls)
    texts.decode_each(ids)
    assert len(calls) - first < first / 2

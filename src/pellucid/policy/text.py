"""The text and the bytes of single tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\ufffd"
"""The character that tokenizers decode incomplete characters to."""


def strip_eos(ids: Sequence[int], eos_ids: Collection[int]) -> Sequence[int]:
    """Return token ids without a last EOS token."""
    return ids[:-1] if ids and ids[-1] in eos_ids else ids


class TokenTexts:
    """The texts of tokens, with a cache. `decode` turns ids into text, with special tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode, self._token_texts = decode, dict[int, str]()

    def decode_token(self, token: int) -> str:
        """Return the text of a token in the middle of a text, with the space that some tokenizers omit at the start."""
        if token not in self._token_texts:
            self._token_texts[token] = self.decode([token, token])[len(self.decode([token])) :]
        return self._token_texts[token]

    def decode_each(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds; joined, they are the text of all.

        A character belongs to the token that completes it; a token that ends within a character adds less, or nothing.
        """
        texts = list[str]()
        for is_partial, group in groupby(ids, key=lambda token: REPLACEMENT in self.decode_token(token)):
            run = list(group)
            texts += self.decode_each_stepwise(run) if is_partial else [self.decode_token(token) for token in run]
        if ids and REPLACEMENT not in self.decode_token(ids[0]):
            texts[0] = self.decode(ids[:1])
        return texts if "".join(texts) == self.decode(ids) else self.decode_each_stepwise(ids)

    def decode_each_stepwise(self, ids: Sequence[int]) -> list[str]:
        """Return the same as `decode_each`, by decoding every prefix of the sequence."""
        text, ends = self.decode(ids), [0]
        for count in range(1, len(ids)):
            beginning = self.decode(ids[:count]).rstrip(REPLACEMENT)
            ends.append(max(ends[-1], count_shared([beginning, text])))
        return [text[start:end] for start, end in zip(ends, [*ends[1:], len(text)], strict=True)]


def count_shared(sequences: Sequence[Sequence[Any]]) -> int:
    """Return how many elements all sequences begin with."""
    columns = enumerate(zip(*sequences, strict=False))
    return next((i for i, column in columns if len(set(column)) > 1), min(map(len, sequences)))


# ---------------------------------------------------------------- bytes of tokens
# A token may be a part of a character: it has bytes, and no text of its own. Byte-level BPE and SentencePiece with byte
# fallback are supported.


_BYTE_FALLBACK_PATTERN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""The spelling of a byte in SentencePiece vocabularies."""
_CHARACTER_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
"""The bytes that the characters of a byte-level vocabulary stand for, as GPT-2 numbered them."""
_ANCHOR_TEXTS = ("a", "1", ".")
"""Texts after which tokens are decoded, since the first token of a text may lose its space."""


class TokenBytes:
    """The bytes of tokens, with a cache, since decoding takes some 20 microseconds."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.cache: dict[int, bytes] = {}
        self.anchor_ids, self.anchor_text = self._find_anchor()

    def get_bytes(self, token: int) -> bytes:
        """Return the bytes of a token in the middle of a text: with its space, and none for a special token."""
        if token not in self.cache:
            self.cache[token] = self._find_bytes(token)
        return self.cache[token]

    def format_token(self, token: int) -> str:
        r"""Return a name for a token: its text, or the bytes of a part of a character, as OpenAI writes them.

        Example: " it", or "bytes:\\xe6\\x95".
        """
        token_bytes = self.get_bytes(token)
        if not token_bytes:
            return str(self.tokenizer.decode([token], skip_special_tokens=False))
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def _find_anchor(self) -> tuple[list[int], str]:
        for text in _ANCHOR_TEXTS:
            ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            decoded = self._decode(ids)
            if decoded.strip() == text:
                return ids, decoded
        return [], ""

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _find_bytes(self, token: int) -> bytes:
        text = self._decode([*self.anchor_ids, token])
        text = text[len(self.anchor_text) :] if text.startswith(self.anchor_text) else self._decode([token])
        piece = self.tokenizer.convert_ids_to_tokens(token) if REPLACEMENT in text else None
        if not isinstance(piece, str):
            return text.encode()
        if fallback := _BYTE_FALLBACK_PATTERN.fullmatch(piece):
            return bytes([int(fallback[1], 16)])
        if all(character in _CHARACTER_BYTES for character in piece):
            return bytes(_CHARACTER_BYTES[character] for character in piece)
        return text.encode()

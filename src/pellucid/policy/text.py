"""What each token of a sequence adds to its text."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

PARTIAL_CHARACTER = "\ufffd"
"""What a part of a character decodes to."""


def strip_eos(ids: Sequence[int], eos_ids: Collection[int]) -> Sequence[int]:
    """Return token ids without the end-of-sequence token that is the last of them, if it is one."""
    return ids[:-1] if ids and ids[-1] in eos_ids else ids


class TokenTexts:
    """Texts of tokens. decode: ids to text, special tokens included. What a token decodes to alone is kept."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode, self._token_texts = decode, dict[int, str]()

    def decode_token(self, token: int) -> str:
        """The text of a token that stands among others, with the space before it that some tokenizers leave out at the
        beginning of a text.
        """
        if token not in self._token_texts:
            self._token_texts[token] = self.decode([token, token])[len(self.decode([token])) :]
        return self._token_texts[token]

    def decode_each(self, ids: Sequence[int]) -> list[str]:
        """What each token adds. Joined they are the decoded whole.

        A character belongs to the token that completes it: one that ends within a character adds less, or nothing.
        """
        texts = list[str]()
        for in_parts, of_run in groupby(ids, key=lambda token: PARTIAL_CHARACTER in self.decode_token(token)):
            run = list(of_run)
            texts += self.decode_each_stepwise(run) if in_parts else [self.decode_token(token) for token in run]
        whole = self.decode(ids)
        if ids and PARTIAL_CHARACTER not in self.decode_token(ids[0]):
            texts[0] = self.decode(ids[:1])
        return texts if "".join(texts) == whole else self.decode_each_stepwise(ids)

    def decode_each_stepwise(self, ids: Sequence[int]) -> list[str]:
        """The same by decoding every beginning of the sequence."""
        whole, ends = self.decode(ids), [0]
        for count in range(1, len(ids)):
            begun = self.decode(ids[:count]).rstrip(PARTIAL_CHARACTER)
            ends.append(max(ends[-1], count_common_characters(begun, whole)))
        return [whole[start:end] for start, end in zip(ends, [*ends[1:], len(whole)], strict=True)]


def count_common_characters(first: str, second: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


# ---------------------------------------------------------------- token_bytes
# The bytes that each token of a tokenizer stands for, for byte-level BPE and for SentencePiece with byte fallback.
#
# A token may be a part of a character, so that it has bytes and no text of its own.


REPLACEMENT = "\ufffd"
"""The character that tokenizers decode incomplete characters to."""
BYTE_FALLBACK_PATTERN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""The spelling of a byte in SentencePiece vocabularies."""
PRINTABLE_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""The bytes that byte-level BPE writes as the Latin-1 character of the same number."""
UNPRINTABLE_BYTES = (byte for byte in range(256) if byte not in PRINTABLE_BYTES)
CHARACTER_BYTES = {chr(byte): byte for byte in PRINTABLE_BYTES} | {
    chr(0x100 + i): byte for i, byte in enumerate(UNPRINTABLE_BYTES)
}
"""The bytes that the characters of a byte-level vocabulary stand for, as GPT-2 numbered them."""
ANCHOR_TEXTS = ("a", "1", ".")
"""Texts to decode a token after. The first token of a text may lose its space."""


class TokenBytes:
    """Looks up the bytes of tokens. Results are cached, since decoding takes some 20 microseconds."""

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
        r"""Return a text that names a token: its own, or for a part of a character its bytes, as OpenAI writes them.

        Example: tokens.name(id) == " it"; tokens.name(id) == "bytes:\\xe6\\x95"
        """
        found = self.get_bytes(token)
        if not found:
            return str(self.tokenizer.decode([token], skip_special_tokens=False))
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def _find_anchor(self) -> tuple[list[int], str]:
        for text in ANCHOR_TEXTS:
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
        if fallback := BYTE_FALLBACK_PATTERN.fullmatch(piece):
            return bytes([int(fallback[1], 16)])
        if all(character in CHARACTER_BYTES for character in piece):
            return bytes(CHARACTER_BYTES[character] for character in piece)
        return text.encode()

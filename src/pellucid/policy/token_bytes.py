"""The bytes that each token of a tokenizer stands for, for byte-level BPE and for SentencePiece with byte fallback.

A token may be a part of a character, so that it has bytes and no text of its own.
"""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
"""The character that tokenizers decode incomplete characters to."""
FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")
"""The spelling of a byte in SentencePiece vocabularies."""
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""The bytes that byte-level BPE writes as the Latin-1 character of the same number."""
OTHERS = (byte for byte in range(256) if byte not in PRINTABLE)
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(OTHERS)}
"""The bytes that the characters of a byte-level vocabulary stand for, as GPT-2 numbered them."""
ANCHORS = ("a", "1", ".")
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
        for text in ANCHORS:
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
        if fallback := FALLBACK.fullmatch(piece):
            return bytes([int(fallback[1], 16)])
        if all(character in BYTE_OF for character in piece):
            return bytes(BYTE_OF[character] for character in piece)
        return text.encode()

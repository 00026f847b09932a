"""What each token of a sequence adds to its text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby

PART = "\ufffd"
"""What a part of a character decodes to."""


def without_end(ids: Sequence[int], eos_ids: Collection[int]) -> Sequence[int]:
    """Return token ids without the end-of-sequence token that is the last of them, if it is one."""
    return ids[:-1] if ids and ids[-1] in eos_ids else ids


class Texts:
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
        for in_parts, of_run in groupby(ids, key=lambda token: PART in self.decode_token(token)):
            run = list(of_run)
            texts += self.decode_each_stepwise(run) if in_parts else [self.decode_token(token) for token in run]
        whole = self.decode(ids)
        if ids and PART not in self.decode_token(ids[0]):
            texts[0] = self.decode(ids[:1])
        return texts if "".join(texts) == whole else self.decode_each_stepwise(ids)

    def decode_each_stepwise(self, ids: Sequence[int]) -> list[str]:
        """The same by decoding every beginning of the sequence."""
        whole, ends = self.decode(ids), [0]
        for count in range(1, len(ids)):
            begun = self.decode(ids[:count]).rstrip(PART)
            ends.append(max(ends[-1], alike(begun, whole)))
        return [whole[start:end] for start, end in zip(ends, [*ends[1:], len(whole)], strict=True)]


def alike(first: str, second: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))

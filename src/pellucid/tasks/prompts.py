"""Helpers with which several tasks make prompts: the split of a problem, and the messages of a question."""

from __future__ import annotations

import hashlib
from typing import Literal

from pellucid.types import Message


def assign_split(key: str, test_share: float) -> Literal["train", "test"]:
    """Return the split of the problem that has this key: about `test_share` of all keys are in the test split.

    The split is a function of a hash of the key, so that it does not depend on a seed.
    """
    digest = hashlib.sha256(key.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") < test_share * 2**64 else "train"


def build_chat(system: str, question: str) -> tuple[Message, ...]:
    """Return the system message, unless it is empty, and the user's message."""
    user: Message = {"role": "user", "content": question}
    return ({"role": "system", "content": system}, user) if system else (user,)

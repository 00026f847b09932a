"""Environments and tools that tests use, as users would write them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress

from pellucid.types import Prompt

TEMPLATE = (
    "k{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<eos>{% else %}{{ m.content }}={% endif %}"
    "{% endfor %}"
)
"""For the tokenizer of characters: the text begins with k, the policy's turns end with <eos>, and others with =."""
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""For a tokenizer of bytes: the most common form of templates, without tools."""


class Parrot:
    """Says something of another length each turn, and ends after the number of turns in the row."""

    def reset(self, turns: int = 3, **_row: object) -> str:
        self.left, self.heard = turns, list[str]()
        return f"{random.randrange(10)}?"

    def reply(self, messages: list[dict[str, str]]) -> str | None:
        self.left -= 1
        self.heard.append(messages[-1]["content"])
        return f"{'ab' * (self.left % 4)}{len(self.heard)}?" if self.left else None

    def get_reward(self) -> float:
        return len(self.heard) + sum(map(len, self.heard)) / 100


class Shop:
    """Tools of an environment, one for each kind of fault."""

    def __init__(self) -> None:
        self.sold = 0

    def reset(self, **_row: object) -> None:
        self.sold = 0

    def sell(self, count: int) -> str:
        """Sell something.

        Args:
            count: How many.
        """
        self.sold += count
        return f"sold {count}"

    async def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return "waited"

    def refuse(self) -> str:
        """Raise."""
        raise ValueError("not today")

    def die(self) -> str:
        """End the process."""
        os._exit(3)

    def hang(self) -> str:
        """Hang, and ignore every exception that a signal raises."""
        while True:
            with suppress(BaseException):
                time.sleep(1.0)

    def shout(self, characters: int) -> str:
        """Say much.

        Args:
            characters: How much.
        """
        return "a" * characters

    def get_reward(self) -> float:
        return float(self.sold)


class Broken:
    """Cannot be reset if the row says so."""

    def reset(self, fails: bool = True, **_row: object) -> None:
        if fails:
            raise RuntimeError("no room")

    def reply(self, messages: list[dict[str, str]]) -> str | None:
        return None

    def get_reward(self) -> float:
        return 1.0


def reply(messages: list[dict[str, str]]) -> str | None:
    """Say a digit for each message so far, three times."""
    return str(len(messages)) if len(messages) < 6 else None


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def asked(count: int = 3, **columns: object) -> list[Prompt]:
    """Return questions of different lengths."""
    rows = [{"turns": 2 + i, **columns} for i in range(count)]
    return [Prompt(f"p{i}", ({"role": "user", "content": "ab" * i + "+"},), columns=row) for i, row in enumerate(rows)]


class Counter:
    """An environment as in TRL's documentation. Its reward is a tenth of the final count."""

    def __init__(self) -> None:
        self.value = 0

    def reset(self, start: int = 0, **_row: object) -> str:
        self.value = start
        return f" Begin at {start}."

    def count(self, by: int) -> int:
        """Count on.

        Args:
            by: How far.

        Returns:
            Where the counter stands.
        """
        self.value += by
        return self.value

    def get_reward(self) -> float:
        return self.value / 10


WORLDS = {"counter": Counter, "shop": Shop}
"""Several environments, one of which the row names."""


def lengths_heard(environments: list[Parrot], **_columns: object) -> list[float]:
    """Return a message and its handles: two streams and the socket to answer on, which is `asking` if `apart`."""
    return [len(environment.heard) / 10 for environment in environments]


class Halves:
    """Says half of a surrogate pair, which json.loads returns for "\\ud83d", in every message."""

    def reset(self, **_row: object) -> str:
        return "\ud83d?"

    def tell(self) -> str:
        """Say a half."""
        return "a\ude00"

    def refuse(self) -> str:
        """Raise with a half."""
        raise ValueError("no \ud83d")

    def reply(self, messages: list[dict[str, str]]) -> str:
        if len(messages) > 6:
            raise ValueError("over \ud83d")
        return "\ud83d\ude00 b\ud83d"


class Unsaid:
    """Returns objects that cannot be converted to text."""

    def reset(self, **_row: object) -> None:
        pass

    def tell(self) -> object:
        """Say something."""
        return Mute()

    def reply(self, messages: list[dict[str, str]]) -> object:
        return Mute()


class Mute:
    def __str__(self) -> str:
        raise RuntimeError("mute")


class Forking:
    """Forks processes that return into the package in different ways, and reports how they ended."""

    def reset(self, **_row: object) -> str:
        return "begin"

    def fork(self, how: str) -> str:
        """Fork, and wait for the child.

        Args:
            how: How the child ends: it returns, exits or raises.
        """
        return f"{os.getpid()} {forked(how)}"

    def reply(self, messages: list[dict[str, str]]) -> None:
        return None

    def get_reward(self) -> float:
        forked("returns")
        return 1.0


def forked(how: str) -> int | None:
    """Return the exit status of a child. The child itself ends as requested."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if how == "exits":
        sys.exit(7)
    if how == "raises":
        raise RuntimeError("in the child")
    return None


class Large:
    """Leaves an environment of many bytes behind, and is stopped while sending it."""

    def reset(self, **_row: object) -> None:
        self.bytes = b"a" * 10_000_000

    def reply(self, messages: list[dict[str, str]]) -> None:
        # A thread stops the process as soon as the answer has begun.
        threading.Thread(target=stop_soon, daemon=True).start()

    def get_reward(self) -> float:
        return 1.0


def stop_soon() -> None:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGSTOP)


class FalsyError(Exception):
    def __bool__(self) -> bool:
        return False


class Falsy:
    """An environment whose errors are false in boolean context."""

    def reset(self, **_row: object) -> None:
        raise FalsyError("no room")

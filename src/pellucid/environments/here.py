"""Conversations in this process, with what other processes cannot load, as in a notebook. There are no time limits."""

from __future__ import annotations

import traceback
from collections import deque
from pathlib import Path

from pellucid.environments.actor import Actor, Begin, Hear
from pellucid.environments.schemas import schemas_of
from pellucid.environments.stage import Conversation
from pellucid.environments.talk import COLUMN, Talk
from pellucid.protocols import Reply, Said
from pellucid.types import Prompt


class Here:
    """The World of environments and tools in this process: each answers as soon as it is told."""

    def __init__(self, talk: Talk, log: Path | None = None, seed: int = 0) -> None:
        self._talk, self._log, self._seed = talk, log, seed
        self._idle: list[Actor] = []
        self._actors: dict[int, Actor] = {}
        self._open: dict[int, Conversation] = {}
        self._ready: deque[tuple[int, Reply]] = deque()

    def begin(self, number: int, prompt: Prompt, sibling: int) -> None:
        self._actors[number] = self._idle.pop() if self._idle else Actor(self._talk, self._note, alarmed=False)
        conversation = self._open[number] = Conversation(prompt)
        place = f"{self._seed}/{prompt.id}"
        answer, _ = self._actors[number].answer(Begin(prompt.columns, (place, f"{place}/{sibling}")))
        if answer.over:
            reply = conversation.reply(answer, b"")
        else:
            tools = schemas_of(self._talk, str(prompt.columns.get(COLUMN)))
            reply = Reply(prompt=conversation.question(answer, tools))
        self._ready.append((number, reply))

    def tell(self, number: int, said: Said) -> None:
        self._open[number].messages.append(said.message)
        self._hear(number, Hear(said, tuple(self._open[number].messages)))

    def end(self, number: int) -> None:
        self._hear(number, Hear(Said({}), (), last=True))

    def heard(self, seconds: float) -> list[tuple[int, Reply]]:  # noqa: ARG002 - nothing is waited for
        """Return the replies, with the numbers of their conversations."""
        found = list(self._ready)
        self._ready.clear()
        return found

    def close(self) -> None:
        """Nothing is to be ended."""

    def _hear(self, number: int, request: Hear) -> None:
        reply = self._open[number].reply(*self._actors[number].answer(request))
        if reply.outcome:
            self._idle.append(self._actors.pop(number))
        self._ready.append((number, reply))

    def _note(self, told: str, error: BaseException) -> None:  # noqa: ARG002 - as in a reward process
        if self._log:
            with self._log.open("a", encoding="utf-8") as log:
                traceback.print_exception(error, file=log)

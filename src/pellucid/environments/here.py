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

    def __init__(self, env_spec: Talk, log: Path | None = None, seed: int = 0) -> None:
        self._env_spec, self._log, self._seed = env_spec, log, seed
        self._idle_runners: list[Actor] = []
        self._runners: dict[int, Actor] = {}
        self._conversations: dict[int, Conversation] = {}
        self._ready: deque[tuple[int, Reply]] = deque()

    def start_conversation(self, number: int, prompt: Prompt, sibling: int) -> None:
        self._runners[number] = (
            self._idle_runners.pop()
            if self._idle_runners
            else Actor(self._env_spec, self._log_error, has_time_limit=False)
        )
        conversation = self._conversations[number] = Conversation(prompt)
        place = f"{self._seed}/{prompt.id}"
        answer, _ = self._runners[number].handle(Begin(prompt.columns, (place, f"{place}/{sibling}")))
        if answer.is_over:
            reply = conversation.build_reply(answer, b"")
        else:
            tools = schemas_of(self._env_spec, str(prompt.columns.get(COLUMN)))
            reply = Reply(prompt=conversation.build_prompt(answer, tools))
        self._ready.append((number, reply))

    def send_turn(self, number: int, turn: Said) -> None:
        self._conversations[number].messages.append(turn.message)
        self._handle_turn(number, Hear(turn, tuple(self._conversations[number].messages)))

    def end_conversation(self, number: int) -> None:
        self._handle_turn(number, Hear(Said({}), (), is_last=True))

    def receive_replies(self, seconds: float) -> list[tuple[int, Reply]]:  # noqa: ARG002 - nothing is waited for
        """Return the replies, with the numbers of their conversations."""
        found = list(self._ready)
        self._ready.clear()
        return found

    def close(self) -> None:
        """Nothing is to be ended."""

    def _handle_turn(self, number: int, request: Hear) -> None:
        reply = self._conversations[number].build_reply(*self._runners[number].handle(request))
        if reply.outcome:
            self._idle_runners.append(self._runners.pop(number))
        self._ready.append((number, reply))

    def _log_error(self, description: str, error: BaseException) -> None:  # noqa: ARG002 - as in a reward process
        if self._log:
            with self._log.open("a", encoding="utf-8") as log:
                traceback.print_exception(error, file=log)

"""The conversations that are under way, each with its process: told, heard, and none waited for."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from pellucid.environments.actor import Answer, Begin, Hear
from pellucid.environments.forks import GoneError, Player, Troupe
from pellucid.environments.schemas import schemas_of
from pellucid.environments.talk import COLUMN, Talk
from pellucid.protocols import Reply, Said
from pellucid.rewards.pool import environment
from pellucid.rewards.settings import RewardConfig
from pellucid.rewards.worker import Confines
from pellucid.types import Message, Outcome, Prompt


@dataclass
class Conversation:
    """What is known of a conversation under way: its question, what was said, and how calls of tools went."""

    prompt: Prompt
    asked: bool = False
    messages: list[Message] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)

    def question(self, answer: Answer, tools: tuple[Mapping[str, Any], ...]) -> Prompt:
        """Return the prompt, with what the environment has added to its last message."""
        assert not isinstance(self.prompt.text, str)
        added = "".join(content for *_, content in answer.texts)
        *others, last = self.prompt.text
        self.asked, self.messages = True, [*others, {**last, "content": f"{last['content']}{added}"}]
        return replace(self.prompt, text=tuple(self.messages), tools=tools, literal=True)

    def reply(self, answer: Answer, environment: bytes) -> Reply:
        self.events.update(answer.events)
        if answer.over:
            return Reply(outcome=Outcome(answer.reward, answer.error, dict(self.events), environment))
        said = tuple(message(*text) for text in answer.texts)
        self.messages += said
        return Reply(said)


def message(role: str, name: str, content: str) -> Message:
    return {"role": role, **({"name": name} if name else {}), "content": content}


class Stage:
    """The World of environments and tools in processes of their own, which print into the file `log`."""

    def __init__(self, talk: Talk, cfg: RewardConfig, log: Path | None = None, seed: int = 0) -> None:
        self._talk, self._seed = talk, seed
        confines = Confines(cfg.memory_gb, str(log or os.devnull), environment(cfg.secrets))
        self._troupe = Troupe(talk, confines)
        self.idle: list[Player] = []
        self.busy: dict[int, Player] = {}
        """The processes of conversations under way, by their numbers."""
        self._open: dict[int, Conversation] = {}
        self._ready: deque[tuple[int, Reply]] = deque()
        self._tools: dict[str, tuple[Mapping[str, Any], ...]] = {}
        Finalize(self, end_all, [self.idle, self.busy, self._troupe], exitpriority=0)

    def begin(self, number: int, prompt: Prompt, sibling: int) -> None:
        """Begin a conversation; its first reply is the question as the environment asks it."""
        self._forget(number)
        self._open[number] = Conversation(prompt)
        place = f"{self._seed}/{prompt.id}"
        self._ask(number, Begin(prompt.columns, (place, f"{place}/{sibling}")), self._talk.timeout)

    def tell(self, number: int, said: Said) -> None:
        """Tell what the policy has said: its calls are made, or it is replied to."""
        conversation = self._open[number]
        conversation.messages.append(said.message)
        calls = len(said.message.get("tool_calls") or ())
        hear = Hear(said, tuple(conversation.messages))
        self._ask(number, hear, self._talk.timeout * (calls + 2))

    def end(self, number: int) -> None:
        """Tell that the policy says nothing more in a conversation. The reply is its outcome."""
        self._ask(number, Hear(Said({}), (), last=True), self._talk.timeout * 2)

    def heard(self, seconds: float) -> list[tuple[int, Reply]]:
        """Return the replies that have come, with the numbers of their conversations; wait so long for the first."""
        until = time.monotonic() + seconds
        while True:
            found = [*self._taken(), *((number, reply) for number in list(self.busy) if (reply := self._of(number)))]
            left = until - time.monotonic()
            if found or left <= 0 or not self.busy:
                return found
            first = min(player.deadline for player in self.busy.values()) - time.monotonic()
            wait([player.connection for player in self.busy.values()], max(0.0, min(left, first)))

    def close(self) -> None:
        """End the processes, whatever they are doing; the next conversation starts new ones."""
        end_all(self.idle, self.busy, self._troupe)
        self._open.clear()
        self._ready.clear()

    def _taken(self) -> list[tuple[int, Reply]]:
        taken = list(self._ready)
        self._ready.clear()
        return taken

    def _ask(self, number: int, request: Begin | Hear, seconds: float) -> None:
        player = self.busy.get(number)
        try:
            if player is None:
                player = self.busy[number] = self._free()
            player.ask(request, seconds)
        except GoneError as error:
            self._ready.append((number, self._lost(number, str(error))))

    def _free(self) -> Player:
        """Return a player that is idle, or a new one. One that ended while it was idle costs nobody a conversation."""
        while self.idle:
            player = self.idle.pop()
            if not player.has_ended:
                return player
            player.end()
        return self._troupe.player()

    def _of(self, number: int) -> Reply | None:
        """Return the reply of a conversation, if it has come."""
        try:
            found = self.busy[number].answer()
        except GoneError as error:
            return self._lost(number, str(error))
        if found is None:
            return None
        answer, environment = found
        conversation = self._open[number]
        if not conversation.asked and not answer.over:
            reply = Reply(prompt=conversation.question(answer, self._schemas(conversation.prompt)))
        else:
            reply = conversation.reply(answer, environment)
        if reply.outcome:
            self.idle.append(self.busy.pop(number))
            del self._open[number]
        return reply

    def _lost(self, number: int, error: str) -> Reply:
        """Return what follows where the process of a conversation is lost.

        Where nothing was to be remembered, the calls were in vain, and the conversation goes on.
        """
        self.busy.pop(number).end()
        conversation = self._open[number]
        calls = conversation.messages[-1].get("tool_calls") if conversation.asked else None
        if self._talk.stateless and calls:
            texts = [("tool", str(call["function"]["name"]), str({"error": error})) for call in calls]
            return conversation.reply(Answer(texts, {"calls": len(calls), "lost": len(calls)}), b"")
        del self._open[number]
        return Reply(outcome=Outcome(error=error, events=dict(conversation.events + Counter(lost=1))))

    def _schemas(self, prompt: Prompt) -> tuple[Mapping[str, Any], ...]:
        name = str(prompt.columns.get(COLUMN))
        if name not in self._tools:
            self._tools[name] = schemas_of(self._talk, name)
        return self._tools[name]

    def _forget(self, number: int) -> None:
        """End a conversation of this number that was left, as by an interrupt."""
        if number in self._open:
            del self._open[number]
            if player := self.busy.pop(number, None):
                player.end()


def end_all(idle: list[Player], busy: dict[int, Player], troupe: Troupe) -> None:
    for player in (*idle, *busy.values()):
        player.end()
    idle.clear()
    busy.clear()
    troupe.close()

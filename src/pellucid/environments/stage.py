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
    has_begun: bool = False
    messages: list[Message] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)

    def build_prompt(self, answer: Answer, tools: tuple[Mapping[str, Any], ...]) -> Prompt:
        """Return the prompt, with what the environment has added to its last message."""
        assert not isinstance(self.prompt.text, str)
        added = "".join(content for *_, content in answer.texts)
        *others, last = self.prompt.text
        self.has_begun, self.messages = True, [*others, {**last, "content": f"{last['content']}{added}"}]
        return replace(self.prompt, text=tuple(self.messages), tools=tools, escape_special_tokens=True)

    def build_reply(self, answer: Answer, environment: bytes) -> Reply:
        self.events.update(answer.events)
        if answer.is_over:
            return Reply(outcome=Outcome(answer.reward, answer.error, dict(self.events), environment))
        said = tuple(message(*text) for text in answer.texts)
        self.messages += said
        return Reply(said)


def message(role: str, name: str, content: str) -> Message:
    return {"role": role, **({"name": name} if name else {}), "content": content}


class Stage:
    """The World of environments and tools in processes of their own, which print into the file `log`."""

    def __init__(self, env_spec: Talk, cfg: RewardConfig, log: Path | None = None, seed: int = 0) -> None:
        self._env_spec, self._seed = env_spec, seed
        confines = Confines(cfg.memory_gb, str(log or os.devnull), environment(cfg.secrets))
        self._factory = Troupe(env_spec, confines)
        self.idle: list[Player] = []
        self.busy: dict[int, Player] = {}
        """The processes of conversations under way, by their numbers."""
        self._conversations: dict[int, Conversation] = {}
        self._ready: deque[tuple[int, Reply]] = deque()
        self._tool_schemas: dict[str, tuple[Mapping[str, Any], ...]] = {}
        Finalize(self, end_all, [self.idle, self.busy, self._factory], exitpriority=0)

    def start_conversation(self, number: int, prompt: Prompt, sibling: int) -> None:
        """Begin a conversation; its first reply is the question as the environment asks it."""
        self._discard(number)
        self._conversations[number] = Conversation(prompt)
        place = f"{self._seed}/{prompt.id}"
        self._send_request(number, Begin(prompt.columns, (place, f"{place}/{sibling}")), self._env_spec.timeout)

    def send_turn(self, number: int, turn: Said) -> None:
        """Tell what the policy has said: its calls are made, or it is replied to."""
        conversation = self._conversations[number]
        conversation.messages.append(turn.message)
        calls = len(turn.message.get("tool_calls") or ())
        hear = Hear(turn, tuple(conversation.messages))
        self._send_request(number, hear, self._env_spec.timeout * (calls + 2))

    def end_conversation(self, number: int) -> None:
        """Tell that the policy says nothing more in a conversation. The reply is its outcome."""
        self._send_request(number, Hear(Said({}), (), is_last=True), self._env_spec.timeout * 2)

    def receive_replies(self, seconds: float) -> list[tuple[int, Reply]]:
        """Return the replies that have come, with the numbers of their conversations; wait so long for the first."""
        until = time.monotonic() + seconds
        while True:
            found = [
                *self._take_ready(),
                *((number, reply) for number in list(self.busy) if (reply := self._receive_reply(number))),
            ]
            left = until - time.monotonic()
            if found or left <= 0 or not self.busy:
                return found
            first = min(player.deadline for player in self.busy.values()) - time.monotonic()
            wait([player.connection for player in self.busy.values()], max(0.0, min(left, first)))

    def close(self) -> None:
        """End the processes, whatever they are doing; the next conversation starts new ones."""
        end_all(self.idle, self.busy, self._factory)
        self._conversations.clear()
        self._ready.clear()

    def _take_ready(self) -> list[tuple[int, Reply]]:
        taken = list(self._ready)
        self._ready.clear()
        return taken

    def _send_request(self, number: int, request: Begin | Hear, timeout: float) -> None:
        player = self.busy.get(number)
        try:
            if player is None:
                player = self.busy[number] = self._get_idle_worker()
            player.send_request(request, timeout)
        except GoneError as error:
            self._ready.append((number, self._handle_lost_worker(number, str(error))))

    def _get_idle_worker(self) -> Player:
        """Return a player that is idle, or a new one. One that ended while it was idle costs nobody a conversation."""
        while self.idle:
            player = self.idle.pop()
            if not player.has_ended:
                return player
            player.terminate()
        return self._factory.create_worker()

    def _receive_reply(self, number: int) -> Reply | None:
        """Return the reply of a conversation, if it has come."""
        try:
            found = self.busy[number].receive_answer()
        except GoneError as error:
            return self._handle_lost_worker(number, str(error))
        if found is None:
            return None
        answer, environment = found
        conversation = self._conversations[number]
        if not conversation.has_begun and not answer.is_over:
            reply = Reply(prompt=conversation.build_prompt(answer, self._get_schemas(conversation.prompt)))
        else:
            reply = conversation.build_reply(answer, environment)
        if reply.outcome:
            self.idle.append(self.busy.pop(number))
            del self._conversations[number]
        return reply

    def _handle_lost_worker(self, number: int, error: str) -> Reply:
        """Return what follows where the process of a conversation is lost.

        Where nothing was to be remembered, the calls were in vain, and the conversation goes on.
        """
        self.busy.pop(number).terminate()
        conversation = self._conversations[number]
        calls = conversation.messages[-1].get("tool_calls") if conversation.has_begun else None
        if self._env_spec.is_stateless and calls:
            texts = [("tool", str(call["function"]["name"]), str({"error": error})) for call in calls]
            return conversation.build_reply(Answer(texts, {"calls": len(calls), "lost": len(calls)}), b"")
        del self._conversations[number]
        return Reply(outcome=Outcome(error=error, events=dict(conversation.events + Counter(lost=1))))

    def _get_schemas(self, prompt: Prompt) -> tuple[Mapping[str, Any], ...]:
        name = str(prompt.columns.get(COLUMN))
        if name not in self._tool_schemas:
            self._tool_schemas[name] = schemas_of(self._env_spec, name)
        return self._tool_schemas[name]

    def _discard(self, number: int) -> None:
        """End a conversation of this number that was left, as by an interrupt."""
        if number in self._conversations:
            del self._conversations[number]
            if player := self.busy.pop(number, None):
                player.terminate()


def end_all(idle: list[Player], busy: dict[int, Player], factory: Troupe) -> None:
    for player in (*idle, *busy.values()):
        player.terminate()
    idle.clear()
    busy.clear()
    factory.close()

"""The World of agents: what one asks is a reply of the world, and what the policy says to it is what it is answered.

A request that goes on from what was said is heard in the same sequence. Any other begins a sequence of its own.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.environments.actor import Answer
from pellucid.environments.agent import AgentTalk, Solve
from pellucid.environments.forks import GoneError, Player, Troupe
from pellucid.policy.bridge import bridge
from pellucid.policy.template import FAULTS
from pellucid.protocols import Reply, Said
from pellucid.rewards.pool import environment
from pellucid.rewards.settings import RewardConfig
from pellucid.rewards.worker import Confines
from pellucid.serve.errors import RequestError
from pellucid.serve.recorder import Asked, Recorder, ended
from pellucid.types import Message, Outcome, Prompt, UserError

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

GRACE = 10.0
"""Seconds that an agent has to end when the policy says nothing more."""
SILENCE = Said({"role": "assistant", "content": ""}, cut=True)
"""What is answered where the limits of a conversation leave no token, as a service does whose context is full."""
OVER = "the conversation is over: sampler.turns or sampler.max_tokens is reached"
UNENDED = f"{OVER}, and the agent has not come to its end"
SILENT = "the agent has asked the policy nothing"


@dataclass(eq=False)
class Rollout:
    """An agent at work: what it has asked, and what was said in the sequence that it is in."""

    name: str
    prompt: Prompt
    player: Player
    history: list[Message] = field(default_factory=list)
    tools: tuple[Mapping[str, Any], ...] = ()
    line: deque[Asked] = field(default_factory=deque)
    """Its open requests. While there is one, its time does not pass."""
    left: float = 0.0
    """How many seconds it had left when its time stopped."""
    turns: int = 0
    events: Counter[str] = field(default_factory=Counter)
    speaking: bool = False
    """Whether the first of its requests is with the policy."""
    over: bool = False
    """Whether the policy says nothing more."""
    outcome: Outcome | None = None
    """Of an agent that has ended while the policy speaks."""

    def queue(self, asked: Asked) -> None:
        if not self.line:
            self.left, self.player.deadline = self.player.deadline - asked.at, float("inf")
        self.line.append(asked)

    def answered(self) -> Asked:
        """Return the first request, which no longer waits. Where it was the only one, time passes again."""
        asked = self.line.popleft()
        if not self.line:
            self.player.deadline = time.monotonic() + self.left
        return asked

    def reply(self, asked: Asked) -> Reply:
        """Return a request as what the world says: what it adds, or a history from its beginning."""
        said, added = asked.messages[: len(self.history)], asked.messages[len(self.history) :]
        goes_on = added and all(message["role"] != "assistant" for message in added)
        if self.history and goes_on and asked.tools == self.tools and alike(said, self.history):
            return Reply(added, max_tokens=asked.max_tokens)
        asks = replace(self.prompt, text=asked.messages, tools=asked.tools, literal=True, prefix="", prefix_whole=False)
        return Reply(prompt=asks, max_tokens=asked.max_tokens)


class Agents:
    """Agents in processes of their own, which print into the file `log`, and the policy that they talk with."""

    def __init__(
        self, talk: AgentTalk, policy: Policy, cfg: RewardConfig, log: Path | None = None, seed: int = 0
    ) -> None:
        self._talk, self._policy, self._seed = talk, policy, seed
        self._troupe = Troupe(talk, Confines(cfg.memory_gb, str(log or os.devnull), environment(cfg.secrets)))
        self._open: dict[int, Rollout] = {}
        self._recorders: list[Recorder] = []
        self._ready: deque[tuple[int, Reply]] = deque()
        Finalize(self, end_all, [self._open, self._troupe, self._recorders], exitpriority=0)

    def begin(self, number: int, prompt: Prompt, sibling: int) -> None:
        """Let an agent begin with a row; its first request is the question."""
        if number in self._open:  # it was left, as by an interrupt
            self._close(number)
        if not self._recorders:
            self._recorders.append(Recorder())
        rollout = self._open[number] = Rollout(secrets.token_urlsafe(16), prompt, self._troupe.player())
        self._recorders[0].rollouts[rollout.name] = number
        seed = f"{self._seed}/{prompt.id}/{sibling}"
        try:
            rollout.player.ask(
                Solve(row_of(prompt), self._recorders[0].address(rollout.name), seed), self._talk.timeout
            )
        except GoneError as error:
            self._has_ended(number, Answer([], {}, error=str(error)))

    def tell(self, number: int, said: Said) -> None:
        """Answer the request that the policy was asked."""
        rollout = self._open[number]
        calls = said.message.get("tool_calls", ())
        numbered = [{**call, "id": f"call_{rollout.turns}_{i}"} for i, call in enumerate(calls)]
        rollout.turns += 1
        rollout.events += Counter(calls=len(calls) + len(said.unreadable), unreadable=len(said.unreadable))
        rollout.history.append(said.message)
        self._answer(number, said._replace(message={**said.message, "tool_calls": numbered} if calls else said.message))

    def end(self, number: int) -> None:
        """Answer that the policy says nothing more, to the last of the requests that counts, and refuse the others."""
        rollout = self._open[number]
        rollout.over, rollout.left = True, min(rollout.left, GRACE)
        self._answer(number, SILENCE)

    def heard(self, seconds: float) -> list[tuple[int, Reply]]:
        """Return what agents have asked, and the outcomes of those that have ended; wait so long for the first."""
        until = time.monotonic() + seconds
        while True:
            self._listen()
            found = list(self._ready)
            self._ready.clear()
            left = until - time.monotonic()
            at_work = [rollout.player for rollout in self._open.values() if not rollout.outcome]
            if found or left <= 0 or not at_work:
                return found
            first = min(player.deadline for player in at_work) - time.monotonic()
            bells = [recorder.bell for recorder in self._recorders]
            wait([*bells, *(player.connection for player in at_work)], max(0.0, min(left, first)))

    def close(self) -> None:
        """End the agents, whatever they are doing, and the endpoint; the next conversation starts new ones."""
        end_all(self._open, self._troupe, self._recorders)
        self._ready.clear()

    def _listen(self) -> None:
        """Take what was asked, then see who has ended or is late: while an agent waits it is not."""
        for recorder in self._recorders:
            for asked in recorder.asked():
                number = recorder.rollouts.get(asked.rollout)
                if number is None:
                    asked.answer.set_exception(ended(asked.rollout))
                else:
                    self._open[number].queue(asked)
                    self._ask(number)
        for number, rollout in list(self._open.items()):
            if rollout.outcome:
                continue
            try:
                answered = rollout.player.answer()
            except GoneError as error:
                answered = Answer([], {}, error=UNENDED if rollout.over else str(error)), b""
            if answered:
                self._has_ended(number, answered[0])

    def _ask(self, number: int) -> None:
        """Ask the policy what is first in line, and refuse what it cannot be asked."""
        rollout = self._open[number]
        while rollout.line and not rollout.speaking:
            asked = rollout.line[0]
            reply = rollout.reply(asked)
            if fault := OVER if rollout.over else self._fault(reply):
                rollout.answered().answer.set_exception(RequestError(400, fault))
                continue
            rollout.history, rollout.tools, rollout.speaking = list(asked.messages), asked.tools, True
            self._ready.append((number, reply))

    def _answer(self, number: int, said: Said) -> None:
        rollout = self._open[number]
        rollout.speaking = False
        rollout.answered().answer.set_result(said)
        if rollout.outcome:
            self._leave(number, rollout.outcome)
        else:
            self._ask(number)

    def _fault(self, reply: Reply) -> str:
        """Return why the policy cannot be asked this, as its chat template has it; empty where it can."""
        try:
            if reply.prompt:
                self._policy.encode_question(reply.prompt)
            else:
                bridge(self._policy.tokenizer, reply.messages, self._policy.eos_ids)
        except (UserError, *FAULTS) as error:
            return " ".join(str(error).split())
        return ""

    def _has_ended(self, number: int, answer: Answer) -> None:
        rollout = self._open[number]
        error = answer.error or ("" if rollout.turns or rollout.speaking else SILENT)
        outcome = Outcome(None if error else answer.reward, error, dict(+rollout.events))
        if rollout.speaking:
            rollout.outcome = outcome
        else:
            self._leave(number, outcome)

    def _leave(self, number: int, outcome: Outcome) -> None:
        self._close(number)
        self._ready.append((number, Reply(outcome=outcome)))

    def _close(self, number: int) -> None:
        rollout = self._open.pop(number)
        self._recorders[0].rollouts.pop(rollout.name, None)
        leave(rollout)


def alike(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Return whether messages say the same; how calls are numbered does not count."""
    return list(map(essence, one)) == list(map(essence, other))


def essence(message: Message) -> tuple[Any, ...]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["role"], message["content"], message.get("name"), calls


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Return the row of a prompt, with its gold answer as `answer`."""
    return {**prompt.columns, **({"answer": prompt.answer} if prompt.answer else {})}


def leave(rollout: Rollout) -> None:
    """End an agent with all that it has started, and refuse what it has asked."""
    rollout.player.end()
    for asked in rollout.line:
        asked.answer.set_exception(ended(rollout.name))


def end_all(rollouts: dict[int, Rollout], troupe: Troupe, recorders: list[Recorder]) -> None:
    for rollout in rollouts.values():
        leave(rollout)
    rollouts.clear()
    troupe.close()
    while recorders:
        recorders.pop().close()

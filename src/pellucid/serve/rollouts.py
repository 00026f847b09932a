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
SILENCE = Said({"role": "assistant", "content": ""}, is_truncated=True)
"""What is answered where the limits of a conversation leave no token, as a service does whose context is full."""
OVER = "the conversation is over: sampler.turns or sampler.max_tokens is reached"
UNENDED = f"{OVER}, and the agent has not come to its end"
SILENT = "the agent has asked the policy nothing"


@dataclass(eq=False)
class Rollout:
    """An agent at work: what it has asked, and what was said in the sequence that it is in."""

    name: str
    prompt: Prompt
    worker: Player
    history: list[Message] = field(default_factory=list)
    tools: tuple[Mapping[str, Any], ...] = ()
    pending: deque[Asked] = field(default_factory=deque)
    """Its open requests. While there is one, its time does not pass."""
    remaining_seconds: float = 0.0
    """How many seconds it had left when its time stopped."""
    turns: int = 0
    events: Counter[str] = field(default_factory=Counter)
    is_generating: bool = False
    """Whether the first of its requests is with the policy."""
    is_over: bool = False
    """Whether the policy says nothing more."""
    outcome: Outcome | None = None
    """Of an agent that has ended while the policy speaks."""

    def add_request(self, request: Asked) -> None:
        if not self.pending:
            self.remaining_seconds, self.worker.deadline = self.worker.deadline - request.arrived_at, float("inf")
        self.pending.append(request)

    def pop_request(self) -> Asked:
        """Return the first request, which no longer waits. Where it was the only one, time passes again."""
        asked = self.pending.popleft()
        if not self.pending:
            self.worker.deadline = time.monotonic() + self.remaining_seconds
        return asked

    def make_reply(self, request: Asked) -> Reply:
        """Return a request as what the world says: what it adds, or a history from its beginning."""
        said, added = request.messages[: len(self.history)], request.messages[len(self.history) :]
        goes_on = added and all(message["role"] != "assistant" for message in added)
        if self.history and goes_on and request.tools == self.tools and alike(said, self.history):
            return Reply(added, max_tokens=request.max_tokens)
        asks = replace(
            self.prompt,
            text=request.messages,
            tools=request.tools,
            escape_special_tokens=True,
            prefix="",
            prefix_is_complete=False,
        )
        return Reply(prompt=asks, max_tokens=request.max_tokens)


class Agents:
    """Agents in processes of their own, which print into the file `log`, and the policy that they talk with."""

    def __init__(
        self, talk: AgentTalk, policy: Policy, cfg: RewardConfig, log: Path | None = None, seed: int = 0
    ) -> None:
        self._talk, self._policy, self._seed = talk, policy, seed
        self._factory = Troupe(talk, Confines(cfg.memory_gb, str(log or os.devnull), environment(cfg.secrets)))
        self._rollouts: dict[int, Rollout] = {}
        self._endpoints: list[Recorder] = []
        self._ready_replies: deque[tuple[int, Reply]] = deque()
        Finalize(self, end_all, [self._rollouts, self._factory, self._endpoints], exitpriority=0)

    def start_conversation(self, number: int, prompt: Prompt, sibling: int) -> None:
        """Let an agent begin with a row; its first request is the question."""
        if number in self._rollouts:  # it was left, as by an interrupt
            self._close_rollout(number)
        if not self._endpoints:
            self._endpoints.append(Recorder())
        rollout = self._rollouts[number] = Rollout(secrets.token_urlsafe(16), prompt, self._factory.create_worker())
        self._endpoints[0].rollout_numbers[rollout.name] = number
        seed = f"{self._seed}/{prompt.id}/{sibling}"
        try:
            rollout.worker.send_request(
                Solve(row_of(prompt), self._endpoints[0].make_rollout_url(rollout.name), seed), self._talk.timeout
            )
        except GoneError as error:
            self._handle_exit(number, Answer([], {}, error=str(error)))

    def send_turn(self, number: int, turn: Said) -> None:
        """Answer the request that the policy was asked."""
        rollout = self._rollouts[number]
        calls = turn.message.get("tool_calls", ())
        numbered = [{**call, "id": f"call_{rollout.turns}_{i}"} for i, call in enumerate(calls)]
        rollout.turns += 1
        rollout.events += Counter(calls=len(calls) + len(turn.unreadable_calls), unreadable=len(turn.unreadable_calls))
        rollout.history.append(turn.message)
        self._answer_request(
            number, turn._replace(message={**turn.message, "tool_calls": numbered} if calls else turn.message)
        )

    def end_conversation(self, number: int) -> None:
        """Answer that the policy says nothing more, to the last of the requests that counts, and refuse the others."""
        rollout = self._rollouts[number]
        rollout.is_over, rollout.remaining_seconds = True, min(rollout.remaining_seconds, GRACE)
        self._answer_request(number, SILENCE)

    def receive_replies(self, seconds: float) -> list[tuple[int, Reply]]:
        """Return what agents have asked, and the outcomes of those that have ended; wait so long for the first."""
        until = time.monotonic() + seconds
        while True:
            self._poll_agents()
            found = list(self._ready_replies)
            self._ready_replies.clear()
            left = until - time.monotonic()
            at_work = [rollout.worker for rollout in self._rollouts.values() if not rollout.outcome]
            if found or left <= 0 or not at_work:
                return found
            first = min(player.deadline for player in at_work) - time.monotonic()
            bells = [recorder.wakeup for recorder in self._endpoints]
            wait([*bells, *(player.connection for player in at_work)], max(0.0, min(left, first)))

    def close(self) -> None:
        """End the agents, whatever they are doing, and the endpoint; the next conversation starts new ones."""
        end_all(self._rollouts, self._factory, self._endpoints)
        self._ready_replies.clear()

    def _poll_agents(self) -> None:
        """Take what was asked, then see who has ended or is late: while an agent waits it is not."""
        for recorder in self._endpoints:
            for asked in recorder.take_requests():
                number = recorder.rollout_numbers.get(asked.rollout_name)
                if number is None:
                    asked.response.set_exception(ended(asked.rollout_name))
                else:
                    self._rollouts[number].add_request(asked)
                    self._submit_next(number)
        for number, rollout in list(self._rollouts.items()):
            if rollout.outcome:
                continue
            try:
                answered = rollout.worker.receive_answer()
            except GoneError as error:
                answered = Answer([], {}, error=UNENDED if rollout.is_over else str(error)), b""
            if answered:
                self._handle_exit(number, answered[0])

    def _submit_next(self, number: int) -> None:
        """Ask the policy what is first in line, and refuse what it cannot be asked."""
        rollout = self._rollouts[number]
        while rollout.pending and not rollout.is_generating:
            asked = rollout.pending[0]
            reply = rollout.make_reply(asked)
            if fault := OVER if rollout.is_over else self._find_fault(reply):
                rollout.pop_request().response.set_exception(RequestError(400, fault))
                continue
            rollout.history, rollout.tools, rollout.is_generating = list(asked.messages), asked.tools, True
            self._ready_replies.append((number, reply))

    def _answer_request(self, number: int, said: Said) -> None:
        rollout = self._rollouts[number]
        rollout.is_generating = False
        rollout.pop_request().response.set_result(said)
        if rollout.outcome:
            self._finish(number, rollout.outcome)
        else:
            self._submit_next(number)

    def _find_fault(self, reply: Reply) -> str:
        """Return why the policy cannot be asked this, as its chat template has it; empty where it can."""
        try:
            if reply.prompt:
                self._policy.encode_question(reply.prompt)
            else:
                bridge(self._policy.tokenizer, reply.messages, self._policy.eos_ids)
        except (UserError, *FAULTS) as error:
            return " ".join(str(error).split())
        return ""

    def _handle_exit(self, number: int, answer: Answer) -> None:
        rollout = self._rollouts[number]
        error = answer.error or ("" if rollout.turns or rollout.is_generating else SILENT)
        outcome = Outcome(None if error else answer.reward, error, dict(+rollout.events))
        if rollout.is_generating:
            rollout.outcome = outcome
        else:
            self._finish(number, outcome)

    def _finish(self, number: int, outcome: Outcome) -> None:
        self._close_rollout(number)
        self._ready_replies.append((number, Reply(outcome=outcome)))

    def _close_rollout(self, number: int) -> None:
        rollout = self._rollouts.pop(number)
        self._endpoints[0].rollout_numbers.pop(rollout.name, None)
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
    rollout.worker.terminate()
    for asked in rollout.pending:
        asked.response.set_exception(ended(rollout.name))


def end_all(rollouts: dict[int, Rollout], factory: Troupe, endpoints: list[Recorder]) -> None:
    for rollout in rollouts.values():
        leave(rollout)
    rollouts.clear()
    factory.close()
    while endpoints:
        endpoints.pop().close()

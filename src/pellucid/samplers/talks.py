"""The conversations of one call of a sampler: what each row has said and was told, turn by turn, until it is over.

The tokens of a turn stay as they were sampled; only bridges between turns are tokenized (policy/bridge.py). Nobody
waits here: rows are told apart by what comes next for them, and the sampler does that when there is something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pellucid.policy.bridge import bridge
from pellucid.policy.tool_calls import read
from pellucid.protocols import Reply, World
from pellucid.samplers.rollout import begins_in_thought, check_lengths, generated_text
from pellucid.types import Completion, Group, Message, Outcome, Prompt, Sampling, UserError

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

PAUSE = 0.5
"""Seconds that are waited at a time where nobody speaks."""
NO_MASK = torch.empty(0, dtype=torch.int32)


@dataclass(eq=False)
class Row:
    """A conversation on its way, and the sequence in which it is."""

    number: int
    prompt: Prompt
    """As it is asked, once that is known."""
    asked: Prompt | None = None
    """As it was asked first; a history that was rewritten is another one."""
    question: tuple[int, ...] = ()
    """The token ids that `tokens` follow; prefixes are among those."""
    prefix: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    drawn: int = 0
    """How many tokens were sampled in all sequences: the place of the next random number."""
    turn: int = 0
    """Where in `tokens` its turn began."""
    turns: int = 0
    most: int = 0
    """The most tokens of its turn that the world wants; 0 means any number."""
    ended: bool = False
    """Whether its turn ended with an end-of-sequence token."""
    cut: bool = False
    """Whether the conversation ended as no token was left."""
    fed: int = 0
    """How many of `question` and `tokens` the cache holds, where it is kept."""
    fault: str = ""
    """Why it cannot be held, where that is no fault of the world's."""
    outcome: Outcome | None = None
    branches: list[tuple[tuple[int, ...], Completion]] = field(default_factory=list)
    """Earlier sequences, each with its question."""

    @property
    def context(self) -> tuple[int, ...]:
        """All token ids up to where the policy goes on."""
        return (*self.question, *self.tokens)


class Talks:
    """Rows p * n + g of prompts. `begin` and `listen`, sample a turn of those that may speak, and tell it by `spoken`.

    asked: rows whose question is known and has not been read. ready: rows to whom something was said.
    """

    def __init__(
        self, policy: Policy, version: int, world: World, prompts: Sequence[Prompt], sampling: Sampling
    ) -> None:
        self.policy, self.version, self.world, self.sampling = policy, version, world, sampling
        self.rows = [Row(p * sampling.n + g, prompt) for p, prompt in enumerate(prompts) for g in range(sampling.n)]
        self.prompts = prompts
        self.asked: list[Row] = []
        self.ready: list[Row] = []
        self.unheard = 0
        """How many replies are still to come."""
        self._begun = 0
        self._open = 0

    @property
    def over(self) -> bool:
        return self._begun == len(self.rows) and not self._open

    @property
    def waiting(self) -> bool:
        """Whether conversations are still to begin."""
        return self._begun < len(self.rows)

    def begin(self, most: int) -> None:
        """Begin conversations, group by group, as long as at most so many are under way."""
        n = self.sampling.n
        while self.waiting and (not self._open or self._open + n <= most):
            for row in self.rows[self._begun : self._begun + n]:
                self.world.begin(row.number, row.prompt, row.number % n)
            self.unheard += n
            self._begun += n
            self._open += n

    def listen(self, seconds: float) -> None:
        """Take what the world has said; wait so long for the first of it."""
        for number, reply in self.world.heard(seconds):
            self.unheard -= 1
            self._take(self.rows[number], reply)
        self.asked.sort(key=lambda row: row.number)
        self.ready.sort(key=lambda row: row.number)

    def end(self, row: Row) -> None:
        """Tell the world that a row says nothing more."""
        self.unheard += 1
        self.world.end(row.number)

    def next_groups(self, most: int) -> list[list[Row]]:
        """Return rows that are to read their questions, those of a group with the same one together; all of a group."""
        n, found = self.sampling.n, list[list[Row]]()
        for group in sorted({row.number // n for row in self.asked}):
            rows = [row for row in self.asked if row.number // n == group]
            first = any(row.question == () for row in self.rows[group * n : (group + 1) * n])
            if first or len(rows) > most:
                continue
            most -= len(rows)
            self.asked = [row for row in self.asked if row not in rows]
            alike = {row.context: [other for other in rows if other.context == row.context] for row in rows}
            found += alike.values()
        return found

    def add(self, row: Row, token: int, logprob: float, mask: Tensor | None) -> bool:
        """Add a sampled token. Return whether its turn has ended with it."""
        row.tokens.append(token)
        row.logprobs.append(logprob)
        if mask is not None:
            row.masks.append(mask)
        row.drawn += 1
        row.ended = token in self.policy.eos_ids
        return row.ended or len(row.tokens) - row.turn >= self.limit(row)

    def limit(self, row: Row) -> int:
        """How many tokens its turn may have."""
        left = self.sampling.max_tokens - (row.turn - row.prefix)
        return min(left, self.sampling.turn_tokens or left, row.most or left)

    def is_last(self, row: Row) -> bool:
        """Whether a row whose turn has ended says nothing more, whatever is said to it."""
        return row.turns >= self.sampling.turns or len(row.tokens) - row.prefix >= self.sampling.max_tokens

    def spoken(self, row: Row) -> None:
        """Tell the world what a row has said in its turn."""
        begin = 0 if row.turn == row.prefix else row.turn  # the first turn begins with the prefix
        context = (*row.question, *row.tokens[:begin])
        said = read(self.policy.tokenizer, row.tokens[begin:], context, row.prompt.tools, self.policy.eos_ids)
        row.turns += 1
        row.messages.append(said.message)
        if row.outcome:  # nobody is there: the answer alone is graded
            self._open -= 1
            return
        tokens = len(row.question) + row.turn, len(row.tokens) - row.turn
        self.unheard += 1
        self.world.tell(row.number, said._replace(tokens=tokens, cut=not row.ended))

    def groups(self) -> list[Group]:
        n = self.sampling.n
        return [self._group(prompt, self.rows[p * n : (p + 1) * n]) for p, prompt in enumerate(self.prompts)]

    # ------------------------------------------------------------ what the world says

    def _take(self, row: Row, reply: Reply) -> None:
        row.most = reply.max_tokens
        if reply.prompt:
            self._ask(row, reply.prompt)
        elif reply.outcome:
            row.outcome = replace(reply.outcome, error=reply.outcome.error or row.fault)
            if row.question:
                self._open -= 1
            else:  # it could not begin: the answer to the question as it stands, so that there is one
                self._ask(row, row.prompt)
        else:
            self._hear(row, reply.messages)

    def _ask(self, row: Row, prompt: Prompt) -> None:
        """A row begins a sequence with this question."""
        if row.question and not self._may_go_on(row, 0):
            self.end(row)
            return
        question, prefix = self.policy.encode_question(prompt), self.policy.encode_prefix(prompt)
        longest = self.policy.context_length - self.sampling.max_tokens
        if len(question) + len(prefix) > longest and not row.outcome:
            row.fault = f"a question of {len(question)} tokens, where the model's context has room for {longest}"
            self.end(row)
            return
        check_lengths([(*question, *prefix)], longest)
        if row.tokens:
            row.branches.append((row.question, self._completion(row)))
        row.asked = row.asked or prompt
        row.prompt, row.question, row.prefix = prompt, question, len(prefix)
        row.tokens, row.logprobs, row.masks, row.given, row.messages = [], [], [], [], []
        row.turn, row.fed = 0, 0
        if prefix:
            self._give(row, prefix)
        self.asked.append(row)

    def _hear(self, row: Row, messages: Sequence[Message]) -> None:
        """A row was told something. Where it can say nothing to it, the conversation ends."""
        between = bridge(self.policy.tokenizer, messages, self.policy.eos_ids)
        ids = between.rest if row.ended else (*between.end, *between.rest)
        if not self._may_go_on(row, len(ids)):
            self.end(row)
            return
        row.messages += messages
        self._give(row, ids)
        self.ready.append(row)

    def _may_go_on(self, row: Row, tokens: int) -> bool:
        row.cut = len(row.tokens) - row.prefix + tokens >= self.sampling.max_tokens
        return not row.cut and row.turns < self.sampling.turns

    def _give(self, row: Row, ids: Sequence[int]) -> None:
        row.given.append((len(row.tokens), len(row.tokens) + len(ids)))
        row.tokens += ids
        row.logprobs += [0.0] * len(ids)
        if self.sampling.truncates:
            row.masks += [NO_MASK] * len(ids)
        row.turn = len(row.tokens)

    # ------------------------------------------------------------ records

    def _completion(self, row: Row) -> Completion:
        before = row.tokens[: row.turn] if row.turn == row.prefix else []
        asked = row.question if row.turn == row.prefix else (*row.question[-8:], *row.tokens[: row.turn][-8:])
        return Completion(
            tuple(row.tokens),
            tuple(row.logprobs),
            generated_text(self.policy, before, row.tokens[row.turn :]),
            row.ended and not row.cut,
            sampling_mask=tuple(row.masks),
            given=tuple(row.given),
            version=self.version,
            messages=tuple(row.messages),
            outcome=row.outcome,
            thinking=begins_in_thought(self.policy, asked),
        )

    def _group(self, prompt: Prompt, rows: Sequence[Row]) -> Group:
        """The group of a prompt. What is not common to all of its questions is given at the beginning of each."""
        sequences = [(row.question, self._completion(row), row.branches) for row in rows]
        questions = [asked for question, _, others in sequences for asked in (question, *(q for q, _ in others))]
        common = questions[0][: shared(questions)]
        if not common:
            raise UserError(
                f"the histories of prompt {prompt.id} have not even their first token in common: give a chat template"
                " that begins all of them alike (policy.template)"
            )
        completions = [
            replace(
                begun(completion, question[len(common) :]),
                branches=tuple(begun(other, asked[len(common) :]) for asked, other in branches),
            )
            for question, completion, branches in sequences
        ]
        asked = rows[0].asked or prompt
        demonstration = self.policy.encode_prefix(prompt)
        whole = (*demonstration, self.policy.end_id) if prompt.prefix_whole else demonstration
        return Group(asked, common, tuple(completions), demonstration=whole)


def shared(rows: Sequence[tuple[int, ...]]) -> int:
    """Return how many tokens all rows begin with."""
    shortest = min(map(len, rows))
    return next((t for t in range(shortest) if len({row[t] for row in rows}) > 1), shortest)


def begun(completion: Completion, ids: Sequence[int]) -> Completion:
    """Return a completion that was given these tokens before its own."""
    if not ids:
        return completion
    n = len(ids)
    return replace(
        completion,
        token_ids=(*ids, *completion.token_ids),
        logprobs=(*[0.0] * n, *completion.logprobs),
        given=((0, n), *((start + n, end + n) for start, end in completion.given)),
        sampling_mask=(*[NO_MASK] * n, *completion.sampling_mask) if completion.sampling_mask else (),
    )

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

from pellucid.policy.chat_template import encode_bridge
from pellucid.policy.tool_calls import parse_turn
from pellucid.rollout.groups import (
    UniformStream,
    begins_in_thought,
    check_prompt_lengths,
    compute_row_seed,
    decode_completion,
)
from pellucid.types import (
    AsyncEnvironments,
    Completion,
    ConversationOutcome,
    EnvironmentReply,
    Group,
    Message,
    Prompt,
    Sampling,
    UserError,
)

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

REPLY_POLL_SECONDS = 0.5
"""Seconds that are waited at a time where nobody speaks."""
EMPTY_MASK = torch.empty(0, dtype=torch.int32)


@dataclass(eq=False)
class ConversationRow:
    """A conversation on its way, and the sequence in which it is."""

    number: int
    prompt: Prompt
    """As it is asked, once that is known."""
    uniforms: UniformStream
    first_prompt: Prompt | None = None
    """As it was asked first; a history that was rewritten is another one."""
    question: tuple[int, ...] = ()
    """The token ids that `tokens` follow; prefixes are among those."""
    prefix_length: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    sampled_count: int = 0
    """How many tokens were sampled in all sequences."""
    turn_start: int = 0
    """Where in `tokens` its turn began."""
    turn_count: int = 0
    max_turn_tokens: int = 0
    """The most tokens of its turn that the world wants; 0 means any number."""
    turn_has_eos: bool = False
    """Whether its turn ended with an end-of-sequence token."""
    is_truncated: bool = False
    """Whether the conversation ended as no token was left."""
    cached_length: int = 0
    """How many of `question` and `tokens` the cache holds, where it is kept."""
    fault: str = ""
    """Why it cannot be held, where that is no fault of the world's."""
    outcome: ConversationOutcome | None = None
    branches: list[tuple[tuple[int, ...], Completion]] = field(default_factory=list)
    """Earlier sequences, each with its question."""

    @property
    def context(self) -> tuple[int, ...]:
        """All token ids up to where the policy goes on."""
        return (*self.question, *self.tokens)


class ConversationBatch:
    """Rows p * n + g of prompts. `begin` and `listen`, sample a turn of those that may speak, and tell it by `spoken`.

    asked: rows whose question is known and has not been read. ready: rows to whom something was said.
    """

    def __init__(
        self,
        policy: Policy,
        version: int,
        environments: AsyncEnvironments,
        prompts: Sequence[Prompt],
        sampling: Sampling,
    ) -> None:
        self.policy, self.version, self.environments, self.sampling = policy, version, environments, sampling
        self.rows = [
            ConversationRow(
                p * sampling.n + g,
                prompt,
                UniformStream(compute_row_seed(sampling.seed, prompt, g), sampling.max_tokens),
            )
            for p, prompt in enumerate(prompts)
            for g in range(sampling.n)
        ]
        self.prompts = prompts
        self.prefill_queue: list[ConversationRow] = []
        self.extend_queue: list[ConversationRow] = []
        self.pending_replies = 0
        """How many replies are still to come."""
        self._started_count = 0
        self._open_count = 0

    @property
    def is_done(self) -> bool:
        return self._started_count == len(self.rows) and not self._open_count

    @property
    def has_unstarted(self) -> bool:
        """Whether conversations are still to begin."""
        return self._started_count < len(self.rows)

    def start(self, max_open: int) -> None:
        """Begin conversations, group by group, as long as at most so many are under way."""
        n = self.sampling.n
        while self.has_unstarted and (not self._open_count or self._open_count + n <= max_open):
            for row in self.rows[self._started_count : self._started_count + n]:
                self.environments.start_conversation(row.number, row.prompt, row.number % n)
            self.pending_replies += n
            self._started_count += n
            self._open_count += n

    def poll_replies(self, seconds: float) -> None:
        """Take what the world has said; wait so long for the first of it."""
        for number, reply in self.environments.receive_replies(seconds):
            self.pending_replies -= 1
            self._handle_reply(self.rows[number], reply)
        self.prefill_queue.sort(key=lambda row: row.number)
        self.extend_queue.sort(key=lambda row: row.number)

    def end_conversation(self, row: ConversationRow) -> None:
        """Tell the world that a row says nothing more."""
        self.pending_replies += 1
        self.environments.end_conversation(row.number)

    def take_prefill_groups(self, max_rows: int) -> list[list[ConversationRow]]:
        """Return rows that are to read their questions, those of a group with the same one together; all of a group."""
        n, found = self.sampling.n, list[list[ConversationRow]]()
        for group in sorted({row.number // n for row in self.prefill_queue}):
            rows = [row for row in self.prefill_queue if row.number // n == group]
            first = any(row.question == () for row in self.rows[group * n : (group + 1) * n])
            if first or len(rows) > max_rows:
                continue
            max_rows -= len(rows)
            self.prefill_queue = [row for row in self.prefill_queue if row not in rows]
            alike = {row.context: [other for other in rows if other.context == row.context] for row in rows}
            found += alike.values()
        return found

    def add_token(self, row: ConversationRow, token: int, logprob: float, mask: Tensor | None) -> bool:
        """Add a sampled token. Return whether its turn has ended with it."""
        row.tokens.append(token)
        row.logprobs.append(logprob)
        if mask is not None:
            row.masks.append(mask)
        row.sampled_count += 1
        row.turn_has_eos = token in self.policy.eos_ids
        return row.turn_has_eos or len(row.tokens) - row.turn_start >= self.get_turn_limit(row)

    def get_turn_limit(self, row: ConversationRow) -> int:
        """How many tokens its turn may have."""
        left = self.sampling.max_tokens - (row.turn_start - row.prefix_length)
        return min(left, self.sampling.turn_tokens or left, row.max_turn_tokens or left)

    def is_last_turn(self, row: ConversationRow) -> bool:
        """Whether a row whose turn has ended says nothing more, whatever is said to it."""
        return row.turn_count >= self.sampling.turns or len(row.tokens) - row.prefix_length >= self.sampling.max_tokens

    def finish_turn(self, row: ConversationRow) -> None:
        """Tell the world what a row has said in its turn."""
        begin = 0 if row.turn_start == row.prefix_length else row.turn_start  # the first turn begins with the prefix
        context = (*row.question, *row.tokens[:begin])
        said = parse_turn(self.policy.tokenizer, row.tokens[begin:], context, row.prompt.tools, self.policy.eos_ids)
        row.turn_count += 1
        row.messages.append(said.message)
        if row.outcome:  # nobody is there: the answer alone is graded
            self._open_count -= 1
            return
        tokens = len(row.question) + row.turn_start, len(row.tokens) - row.turn_start
        self.pending_replies += 1
        self.environments.send_turn(row.number, said._replace(token_counts=tokens, is_truncated=not row.turn_has_eos))

    def collect_groups(self) -> list[Group]:
        n = self.sampling.n
        return [self._build_group(prompt, self.rows[p * n : (p + 1) * n]) for p, prompt in enumerate(self.prompts)]

    # ------------------------------------------------------------ what the world says

    def _handle_reply(self, row: ConversationRow, reply: EnvironmentReply) -> None:
        row.max_turn_tokens = reply.max_tokens
        if reply.prompt:
            self._start_sequence(row, reply.prompt)
        elif reply.outcome:
            row.outcome = replace(reply.outcome, error=reply.outcome.error or row.fault)
            if row.question:
                self._open_count -= 1
            else:  # it could not begin: the answer to the question as it stands, so that there is one
                self._start_sequence(row, row.prompt)
        else:
            self._append_messages(row, reply.messages)

    def _start_sequence(self, row: ConversationRow, prompt: Prompt) -> None:
        """A row begins a sequence with this question."""
        if row.question and not self._can_continue(row, 0):
            self.end_conversation(row)
            return
        question, prefix = self.policy.encode_question(prompt), self.policy.encode_prefix(prompt)
        longest = self.policy.context_length - self.sampling.max_tokens
        if len(question) + len(prefix) > longest and not row.outcome:
            row.fault = f"a question of {len(question)} tokens, where the model's context has room for {longest}"
            self.end_conversation(row)
            return
        check_prompt_lengths([(*question, *prefix)], longest)
        if row.tokens:
            row.branches.append((row.question, self._build_completion(row)))
        row.first_prompt = row.first_prompt or prompt
        row.prompt, row.question, row.prefix_length = prompt, question, len(prefix)
        row.tokens, row.logprobs, row.masks, row.given, row.messages = [], [], [], [], []
        row.turn_start, row.cached_length = 0, 0
        if prefix:
            self._append_given(row, prefix)
        self.prefill_queue.append(row)

    def _append_messages(self, row: ConversationRow, messages: Sequence[Message]) -> None:
        """A row was told something. Where it can say nothing to it, the conversation ends."""
        between = encode_bridge(self.policy.tokenizer, messages, self.policy.eos_ids)
        ids = between.rest if row.turn_has_eos else (*between.end, *between.rest)
        if not self._can_continue(row, len(ids)):
            self.end_conversation(row)
            return
        row.messages += messages
        self._append_given(row, ids)
        self.extend_queue.append(row)

    def _can_continue(self, row: ConversationRow, tokens: int) -> bool:
        row.is_truncated = len(row.tokens) - row.prefix_length + tokens >= self.sampling.max_tokens
        return not row.is_truncated and row.turn_count < self.sampling.turns

    def _append_given(self, row: ConversationRow, ids: Sequence[int]) -> None:
        row.given.append((len(row.tokens), len(row.tokens) + len(ids)))
        row.tokens += ids
        row.logprobs += [0.0] * len(ids)
        if self.sampling.truncates:
            row.masks += [EMPTY_MASK] * len(ids)
        row.turn_start = len(row.tokens)

    # ------------------------------------------------------------ records

    def _build_completion(self, row: ConversationRow) -> Completion:
        before = row.tokens[: row.turn_start] if row.turn_start == row.prefix_length else []
        asked = (
            row.question
            if row.turn_start == row.prefix_length
            else (*row.question[-8:], *row.tokens[: row.turn_start][-8:])
        )
        return Completion(
            tuple(row.tokens),
            tuple(row.logprobs),
            decode_completion(self.policy, before, row.tokens[row.turn_start :]),
            row.turn_has_eos and not row.is_truncated,
            sampling_mask=tuple(row.masks),
            given_spans=tuple(row.given),
            version=self.version,
            messages=tuple(row.messages),
            outcome=row.outcome,
            thinking=begins_in_thought(self.policy, asked),
        )

    def _build_group(self, prompt: Prompt, rows: Sequence[ConversationRow]) -> Group:
        """The group of a prompt. What is not common to all of its questions is given at the beginning of each."""
        sequences = [(row.question, self._build_completion(row), row.branches) for row in rows]
        questions = [asked for question, _, others in sequences for asked in (question, *(q for q, _ in others))]
        common = questions[0][: count_shared_tokens(questions)]
        if not common:
            raise UserError(
                f"the histories of prompt {prompt.id} have not even their first token in common: give a chat template"
                " that begins all of them alike (policy.template)"
            )
        completions = [
            replace(
                prepend_given(completion, question[len(common) :]),
                branches=tuple(prepend_given(other, asked[len(common) :]) for asked, other in branches),
            )
            for question, completion, branches in sequences
        ]
        asked = rows[0].first_prompt or prompt
        demonstration = self.policy.encode_prefix(prompt)
        whole = (*demonstration, self.policy.end_id) if prompt.prefix_is_complete else demonstration
        return Group(asked, common, tuple(completions), demonstration=whole)


def count_shared_tokens(rows: Sequence[tuple[int, ...]]) -> int:
    """Return how many tokens all rows begin with."""
    shortest = min(map(len, rows))
    return next((t for t in range(shortest) if len({row[t] for row in rows}) > 1), shortest)


def prepend_given(completion: Completion, ids: Sequence[int]) -> Completion:
    """Return a completion that was given these tokens before its own."""
    if not ids:
        return completion
    n = len(ids)
    return replace(
        completion,
        token_ids=(*ids, *completion.token_ids),
        logprobs=(*[0.0] * n, *completion.logprobs),
        given_spans=((0, n), *((start + n, end + n) for start, end in completion.given_spans)),
        sampling_mask=(*[EMPTY_MASK] * n, *completion.sampling_mask) if completion.sampling_mask else (),
    )

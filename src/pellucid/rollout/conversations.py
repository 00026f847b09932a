"""The state of the conversations of one call of a sampler, turn by turn, until each has an outcome.

The tokens of a turn stay as they were sampled; only the bridge tokens between turns are tokenized. Only `poll_replies`
waits: rows stand in queues by what they need next, and the sampler empties the queues.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pellucid.policy.chat_template import encode_bridge
from pellucid.policy.text import count_shared
from pellucid.policy.tool_calls import parse_turn
from pellucid.rollout.groups import (
    THOUGHT_TAG_TOKENS,
    begins_in_thought,
    check_prompt_lengths,
    compute_row_seed,
    decode_completion,
    generate_uniforms,
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
"""How long to wait for a reply at a time when no row decodes."""
_EMPTY_MASK = torch.empty(0, dtype=torch.int32)


@dataclass(eq=False)
class ConversationRow:
    """A conversation, and its present sequence."""

    number: int
    prompt: Prompt
    """The prompt of the present sequence: the task's until the environment has given its own."""
    uniforms: Iterator[float]
    first_prompt: Prompt | None = None
    """The prompt of the first sequence. A rewritten history begins another sequence."""
    question_ids: tuple[int, ...] = ()
    """The token ids before `tokens`; a prefix is part of `tokens`."""
    prefix_length: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)
    """The ranges of `tokens` that were not sampled."""
    messages: list[Message] = field(default_factory=list)
    sampled_count: int = 0
    """How many tokens were sampled in all sequences."""
    turn_start: int = 0
    """The index in `tokens` where the present turn began."""
    turn_count: int = 0
    max_turn_tokens: int = 0
    """The limit of tokens that the environment set for this turn; 0 is none."""
    turn_has_eos: bool = False
    """Whether the last turn ended with an EOS token."""
    is_truncated: bool = False
    """Whether the conversation ended at the token limit."""
    cached_length: int = 0
    """How many tokens of `question_ids` and `tokens` are in the KV cache of a row that waits."""
    fault: str = ""
    """The error that ended the conversation outside its environment; else empty."""
    outcome: ConversationOutcome | None = None
    branches: list[tuple[tuple[int, ...], Completion]] = field(default_factory=list)
    """The earlier sequences, each with its question."""

    @property
    def context(self) -> tuple[int, ...]:
        """All token ids before the next token that is sampled."""
        return (*self.question_ids, *self.tokens)


class ConversationBatch:
    """The conversations of some prompts; row p * n + g is sample g of prompt p.

    Call `start` and `poll_replies`, sample a turn of the rows in the queues with `add_token`, end each turn with
    `finish_turn`, and repeat until `is_done`.
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
            ConversationRow(p * sampling.n + g, prompt, generate_uniforms(compute_row_seed(sampling.seed, prompt, g)))
            for p, prompt in enumerate(prompts)
            for g in range(sampling.n)
        ]
        self.prompts = prompts
        self.prefill_queue: list[ConversationRow] = []
        """Rows that begin a sequence: their question is known, and not prefilled yet."""
        self.extend_queue: list[ConversationRow] = []
        """Rows that have a reply, whose tokens are not in the KV cache yet."""
        self.pending_replies = 0
        """How many replies the environments still owe."""
        self._started_count = 0
        self._open_count = 0

    @property
    def is_done(self) -> bool:
        """Whether all conversations are over."""
        return self._started_count == len(self.rows) and not self._open_count

    def start(self, max_open: int) -> None:
        """Start conversations, group by group, up to `max_open` open ones; the first group may exceed it."""
        n = self.sampling.n
        while self._started_count < len(self.rows) and (not self._open_count or self._open_count + n <= max_open):
            for row in self.rows[self._started_count : self._started_count + n]:
                self.environments.start_conversation(row.number, row.prompt, row.number % n)
            self.pending_replies += n
            self._started_count += n
            self._open_count += n

    def poll_replies(self, seconds: float) -> None:
        """Handle the replies of environments. Wait up to `seconds` for the first one."""
        for number, reply in self.environments.receive_replies(seconds):
            self.pending_replies -= 1
            self._handle_reply(self.rows[number], reply)
        self.prefill_queue.sort(key=lambda row: row.number)
        self.extend_queue.sort(key=lambda row: row.number)

    def end_conversation(self, row: ConversationRow) -> None:
        """Tell the environment that the policy has no turn left; its reply is the outcome."""
        self.pending_replies += 1
        self.environments.end_conversation(row.number)

    def take_prefill_groups(self, max_rows: int) -> list[list[ConversationRow]]:
        """Take at most `max_rows` rows from the prefill queue: lists of rows of one group that have the same context.

        A group is taken when the questions of all of its rows are known, and only as a whole.
        """
        n, found = self.sampling.n, list[list[ConversationRow]]()
        for group in sorted({row.number // n for row in self.prefill_queue}):
            rows = [row for row in self.prefill_queue if row.number // n == group]
            are_known = all(row.question_ids for row in self.rows[group * n : (group + 1) * n])
            if not are_known or len(rows) > max_rows:
                continue
            max_rows -= len(rows)
            self.prefill_queue = [row for row in self.prefill_queue if row not in rows]
            alike: dict[tuple[int, ...], list[ConversationRow]] = {}
            for row in rows:
                alike.setdefault(row.context, []).append(row)
            found += alike.values()
        return found

    def take_ready_rows(self) -> list[ConversationRow]:
        """Take all rows whose next turn can be sampled."""
        starting = [row for alike in self.take_prefill_groups(len(self.rows)) for row in alike]
        extended, self.extend_queue = self.extend_queue, []
        return starting + extended

    def add_turn(
        self, row: ConversationRow, tokens: Sequence[int], logprobs: Sequence[float], masks: Sequence[Tensor] = ()
    ) -> None:
        """Add sampled tokens to a row up to the end of its turn, and finish the turn."""
        for token, logprob, mask in zip(tokens, logprobs, masks or [None] * len(tokens), strict=True):
            if self.add_token(row, token, logprob, mask):
                break
        self.finish_turn(row)

    def add_token(self, row: ConversationRow, token: int, logprob: float, mask: Tensor | None) -> bool:
        """Add a sampled token to a row. Return whether the turn ends with it."""
        row.tokens.append(token)
        row.logprobs.append(logprob)
        if mask is not None:
            row.masks.append(mask)
        row.sampled_count += 1
        row.turn_has_eos = token in self.policy.eos_ids
        return row.turn_has_eos or len(row.tokens) - row.turn_start >= self.get_turn_limit(row)

    def get_turn_limit(self, row: ConversationRow) -> int:
        """Return how many tokens the present turn may have."""
        left = self.sampling.max_tokens - (row.turn_start - row.prefix_length)
        return min(left, self.sampling.turn_tokens or left, row.max_turn_tokens or left)

    def is_last_turn(self, row: ConversationRow) -> bool:
        """Return whether a row whose turn has ended can have no other turn, whatever the environment replies."""
        return row.turn_count >= self.sampling.turns or len(row.tokens) - row.prefix_length >= self.sampling.max_tokens

    def finish_turn(self, row: ConversationRow) -> None:
        """Send the turn of a row, as a message, to its environment."""
        begin = 0 if row.turn_start == row.prefix_length else row.turn_start  # the first turn begins with the prefix
        context = (*row.question_ids, *row.tokens[:begin])
        turn = parse_turn(self.policy.tokenizer, row.tokens[begin:], context, row.prompt.tools, self.policy.eos_ids)
        row.turn_count += 1
        row.messages.append(turn.message)
        if row.outcome:  # the environment failed at its start: only this answer is graded
            self._open_count -= 1
            return
        counts = len(row.question_ids) + row.turn_start, len(row.tokens) - row.turn_start
        self.pending_replies += 1
        self.environments.send_turn(row.number, turn._replace(token_counts=counts, is_truncated=not row.turn_has_eos))

    def collect_groups(self) -> list[Group]:
        """Return the groups of all prompts, when `is_done`."""
        n = self.sampling.n
        return [self._build_group(prompt, self.rows[p * n : (p + 1) * n]) for p, prompt in enumerate(self.prompts)]

    # ------------------------------------------------------------ replies of environments

    def _handle_reply(self, row: ConversationRow, reply: EnvironmentReply) -> None:
        row.max_turn_tokens = reply.max_tokens
        if reply.prompt:
            self._start_sequence(row, reply.prompt)
        elif reply.outcome:
            row.outcome = replace(reply.outcome, error=reply.outcome.error or row.fault)
            if row.question_ids:
                self._open_count -= 1
            else:  # it could not begin: the policy answers the prompt of the task, so that there is a completion
                self._start_sequence(row, row.prompt)
        else:
            self._append_messages(row, reply.messages)

    def _start_sequence(self, row: ConversationRow, prompt: Prompt) -> None:
        """Begin a sequence of a row with this prompt."""
        if row.question_ids and not self._can_continue(row, 0):
            self.end_conversation(row)
            return
        question_ids, prefix = self.policy.encode_question(prompt), self.policy.encode_prefix(prompt)
        longest, length = self.policy.context_length - self.sampling.max_tokens, len(question_ids) + len(prefix)
        if length > longest and not row.outcome:
            counted = "question and its prefix have" if prefix else "question has"
            row.fault = f"the {counted} {length} tokens, but the model's context has room for {longest}"
            self.end_conversation(row)
            return
        check_prompt_lengths([(*question_ids, *prefix)], longest)
        if row.tokens:
            row.branches.append((row.question_ids, self._build_completion(row)))
        row.first_prompt = row.first_prompt or prompt
        row.prompt, row.question_ids, row.prefix_length = prompt, question_ids, len(prefix)
        row.tokens, row.logprobs, row.masks, row.given, row.messages = [], [], [], [], []
        row.turn_start, row.cached_length = 0, 0
        if prefix:
            self._append_given(row, prefix)
        self.prefill_queue.append(row)

    def _append_messages(self, row: ConversationRow, messages: Sequence[Message]) -> None:
        """Append messages of the environment. The conversation ends if no turn can follow them."""
        bridge = encode_bridge(self.policy.tokenizer, messages, self.policy.eos_ids)
        ids = bridge.rest if row.turn_has_eos else (*bridge.end, *bridge.rest)
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
            row.masks += [_EMPTY_MASK] * len(ids)
        row.turn_start = len(row.tokens)

    # ------------------------------------------------------------ completions and groups

    def _build_completion(self, row: ConversationRow) -> Completion:
        is_first_turn = row.turn_start == row.prefix_length
        before = row.tokens[: row.turn_start]
        context = row.question_ids if is_first_turn else (*row.question_ids, *before)[-THOUGHT_TAG_TOKENS:]
        return Completion(
            tuple(row.tokens),
            tuple(row.logprobs),
            decode_completion(self.policy, before if is_first_turn else [], row.tokens[row.turn_start :]),
            row.turn_has_eos and not row.is_truncated,
            sampling_mask=tuple(row.masks),
            given_spans=tuple(row.given),
            version=self.version,
            messages=tuple(row.messages),
            outcome=row.outcome,
            thinking=begins_in_thought(self.policy, context),
        )

    def _build_group(self, prompt: Prompt, rows: Sequence[ConversationRow]) -> Group:
        """Build the group of a prompt. Its questions share a common start; the rest is given in each row."""
        questions = [
            question for row in rows for question in (row.question_ids, *(branch[0] for branch in row.branches))
        ]
        n = count_shared(questions)
        common = questions[0][:n]
        if not common:
            raise UserError(
                f"the conversations of prompt {prompt.id} differ from the first token on: use a chat template"
                " (policy.template) that starts all of them with the same tokens"
            )
        completions = [
            replace(
                _prepend_given(self._build_completion(row), row.question_ids[n:]),
                branches=tuple(_prepend_given(branch, question[n:]) for question, branch in row.branches),
            )
            for row in rows
        ]
        prefix = self.policy.encode_prefix(prompt)
        demonstration = (*prefix, self.policy.end_id) if prompt.prefix_is_complete else prefix
        return Group(rows[0].first_prompt or prompt, common, tuple(completions), demonstration=demonstration)


def _prepend_given(completion: Completion, ids: Sequence[int]) -> Completion:
    """Return the completion with given tokens before its own."""
    if not ids:
        return completion
    n = len(ids)
    return replace(
        completion,
        token_ids=(*ids, *completion.token_ids),
        logprobs=(*[0.0] * n, *completion.logprobs),
        given_spans=((0, n), *((start + n, end + n) for start, end in completion.given_spans)),
        sampling_mask=(*[_EMPTY_MASK] * n, *completion.sampling_mask) if completion.sampling_mask else (),
    )

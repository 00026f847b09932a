"""Conversations: sampled tokens are kept unchanged, and tokens from the environment are marked as given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from conftest import EOS, byte_tokenizer, make_policy, tiny_llama_of
from pellucid.algorithm.batch import collate
from pellucid.environments.pool import InProcessEnvironments
from pellucid.environments.spec import EnvironmentSpec
from pellucid.models.decode import RunningBatch
from pellucid.policy.policy import Policy
from pellucid.rollout import scheduler
from pellucid.rollout.hf import HuggingFaceSampler
from pellucid.rollout.native import NativeSampler
from pellucid.types import ConversationOutcome, EnvironmentReply, PolicyTurn, Prompt, Sampling
from worlds import CHAT, TEMPLATE, asked

SAMPLING = Sampling(4, max_tokens=80, turns=5, turn_tokens=9, seed="0/0")


def policy_of(architecture="llama", **settings):
    policy = make_policy(architecture, **settings)
    policy.tokenizer.chat_template = TEMPLATE
    return policy


def sampler_of(name, policy, world=None, rows=256):
    world = world or InProcessEnvironments(EnvironmentSpec("worlds:Parrot"))
    sampler = NativeSampler(rows, environments=world) if name == "native" else HuggingFaceSampler(environments=world)
    sampler.sync(policy, 7)
    return sampler


def held(name="native", architecture="llama", sampling=SAMPLING, world=None, rows=256, prompts=None):
    policy = policy_of(architecture)
    return policy, sampler_of(name, policy, world, rows).generate(prompts or asked(), sampling)


def completions_of(groups):
    return [completion for group in groups for completion in group.completions]


def turns_of(completion):
    """Return the ranges of sampled tokens."""
    edges = [0, *(edge for stretch in completion.given_spans for edge in stretch), len(completion.token_ids)]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma"])
@pytest.mark.parametrize("name", ["native", "hf"])
def test_logprobs_of_every_turn_equal_the_scorers(name, architecture):
    policy, groups = held(name, architecture)
    batch = collate(groups)
    assert max(len(turns_of(c)) for c in completions_of(groups)) >= 3
    with torch.no_grad():
        gap = (policy.score(batch).logprobs - batch.sampler_logprobs)[batch.action_mask].abs().max()
    assert gap < 1e-4
    assert (batch.sampler_logprobs[~batch.action_mask] == 0).all()


@pytest.mark.parametrize("name", ["native", "hf"])
def test_messages_equal_the_decoded_tokens(name):
    """Checks each turn of the policy and of the environment: the template around messages is never tokenized twice."""
    policy, groups = held(name)
    for group, completion in [(g, c) for g in groups for c in g.completions]:
        text = policy.decode(group.prompt_ids) + policy.decode(completion.token_ids, special=True)
        written = "k" + "".join(m["content"] + "=" for m in group.prompt.text)
        shared = policy.decode(group.prompt_ids)
        said = [message["content"] for message in completion.messages if message["role"] == "assistant"]
        assert said == [policy.decode(completion.token_ids[start:end]) for start, end in turns_of(completion)]
        heard = [message["content"] for message in completion.messages if message["role"] == "user"]
        begins = int(completion.given_spans[0][0] == 0)
        given = [policy.decode(completion.token_ids[a:b], special=True) for a, b in completion.given_spans[begins:]]
        assert [part.removeprefix("<eos>") for part in given] == [f"{words}=" for words in heard]
        assert text.startswith(shared)
        assert written.startswith(shared)
        assert completion.text == said[-1]
        assert completion.outcome.reward == pytest.approx(len(said) + sum(map(len, said)) / 100)


@pytest.mark.parametrize("name", ["native", "hf"])
def test_environment_receives_the_prefix_with_the_first_turn(name):
    _, groups = held(name, prompts=[replace(prompt, prefix="12+3") for prompt in asked()])
    for completion in completions_of(groups):
        spoken = [message["content"] for message in completion.messages if message["role"] == "assistant"]
        assert spoken[0].startswith("12+3")
        assert completion.given_spans[0] == (0, 4)
        assert completion.outcome.reward == pytest.approx(len(spoken) + sum(map(len, spoken)) / 100)
        assert completion.text == (spoken[-1] if len(spoken) > 1 else spoken[0].removeprefix("12+3"))


def test_siblings_get_the_same_question_from_a_random_environment():
    """The environment adds a random digit to each question, the same for every sampling seed."""
    policy, groups = held(prompts=asked(8), sampling=replace(SAMPLING, seed="1/0"))
    digits = [policy.decode(group.prompt_ids)[-3] for group in groups]
    assert all(digit.isdigit() for digit in digits)
    assert len(set(digits)) > 3, "the environment draws"
    assert all(c.given_spans[0][0] > 0 for c in completions_of(groups)), "siblings share a seed until they are asked"
    assert [g.prompt.text for g in held(prompts=asked(8))[1]] == [g.prompt.text for g in groups]


class Lead:
    """An environment that asks each sibling a different question."""

    def __init__(self):
        self.inner = InProcessEnvironments(EnvironmentSpec("worlds:Parrot"))
        self.siblings = {}

    def start_conversation(self, number, prompt, sibling):
        self.siblings[number] = sibling
        self.inner.start_conversation(number, prompt, sibling)

    def receive_replies(self, seconds):
        return [(n, self._changed(n, reply)) for n, reply in self.inner.receive_replies(seconds)]

    def _changed(self, number, reply):
        if not reply.prompt:
            return reply
        [question] = reply.prompt.text
        words = question["content"] + "c" * self.siblings[number]
        return EnvironmentReply(prompt=replace(reply.prompt, text=({**question, "content": words},)))

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_differing_questions_of_siblings_follow_their_shared_start():
    policy, groups = held(world=Lead())
    for group in groups:
        whole = [(*group.prompt_ids, *c.token_ids) for c in group.completions]
        beginnings = [policy.decode(ids).split("=")[0] for ids in whole]
        assert [text.count("c") for text in beginnings] == [0, 1, 2, 3]
        assert all(c.given_spans[0][0] == 0 for c in group.completions[:3])
    batch = collate(groups)
    with torch.no_grad():
        gap = (policy.score(batch).logprobs - batch.sampler_logprobs)[batch.action_mask].abs().max()
    assert gap < 1e-4


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_native_and_hf_hold_the_same_greedy_conversations(architecture):
    greedy = replace(SAMPLING, n=1, temperature=0.0)
    native, hf = (completions_of(held(name, architecture, greedy)[1]) for name in ("native", "hf"))
    assert [c.token_ids for c in native] == [c.token_ids for c in hf]
    assert [c.given_spans for c in native] == [c.given_spans for c in hf]
    assert [c.messages for c in native] == [c.messages for c in hf]


class Late:
    """An environment that delays each reply by a different number of calls, while other rows decode."""

    def __init__(self, most):
        self.inner = InProcessEnvironments(EnvironmentSpec("worlds:Parrot"))
        self.most, self.kept, self.calls = most, [], 0

    def receive_replies(self, seconds):
        self.calls += 1
        fresh = [
            (self.calls + (7 * n + self.calls) % self.most, n, reply)
            for n, reply in self.inner.receive_replies(seconds)
        ]
        self.kept += fresh
        due = [each for each in self.kept if each[0] <= self.calls or seconds]
        self.kept = [each for each in self.kept if each not in due]
        return [(n, reply) for _, n, reply in due]

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize(("rows", "most"), [(256, 3), (8, 30), (4, 30), (1, 17)])
def test_conversations_do_not_depend_on_late_replies_or_evictions(architecture, rows, most):
    """Replies arrive late, and rows are evicted and restored, also with few slots."""
    prompts = asked(6)
    expected = completions_of(held("native", architecture, prompts=prompts)[1])
    late = completions_of(held("native", architecture, world=Late(most), rows=rows, prompts=prompts)[1])
    assert [c.token_ids for c in late] == [c.token_ids for c in expected]
    torch.testing.assert_close([c.logprobs for c in late], [c.logprobs for c in expected], rtol=0, atol=2e-5)


class OneByOne(InProcessEnvironments):
    """An environment whose replies arrive one by one in quick succession."""

    def __init__(self):
        super().__init__(EnvironmentSpec("worlds:Parrot"))
        self.come = []

    def receive_replies(self, seconds):
        self.come += super().receive_replies(0.0)
        now, self.come = self.come[:1], self.come[1:]
        return now


def test_rows_that_pause_together_get_their_replies_together(monkeypatch):
    monkeypatch.setattr(scheduler, "GATHER_SECONDS", 60.0)
    told = []
    extend = RunningBatch.append_tokens
    monkeypatch.setattr(
        RunningBatch, "append_tokens", lambda self, rows, ids: told.append(len(rows)) or extend(self, rows, ids)
    )
    policy = policy_of()
    policy.eos_ids = (10**6,)  # no turn ends before its limit
    sampler_of("native", policy, OneByOne()).generate(asked(), SAMPLING)
    assert told[0] == 4 * len(asked())
    assert all(n % 4 == 0 for n in told)  # the conversations of a group have equal lengths


def test_conversation_of_one_turn_equals_a_plain_completion():
    """The same random numbers give the same tokens with and without an environment."""
    policy = policy_of()
    once = [replace(prompt, columns={"turns": 1}) for prompt in asked()]
    talked = sampler_of("native", policy).generate(once, replace(SAMPLING, turn_tokens=0, max_tokens=20))
    plain = NativeSampler(policy=policy)
    alone = plain.generate([group.prompt for group in talked], replace(SAMPLING, max_tokens=20))
    assert [c.token_ids for c in completions_of(talked)] == [c.token_ids for c in completions_of(alone)]
    assert [c.text for c in completions_of(talked)] == [c.text for c in completions_of(alone)]
    assert [c.finished for c in completions_of(talked)] == [c.finished for c in completions_of(alone)]


@pytest.mark.parametrize("name", ["native", "hf"])
@pytest.mark.parametrize("limits", [{"turns": 2}, {"turn_tokens": 3}, {"max_tokens": 17}, {"max_tokens": 5}])
def test_limits_of_turns_and_tokens_are_kept(name, limits):
    sampling = replace(SAMPLING, **limits)
    _, groups = held(name, sampling=sampling, prompts=asked(4))
    for completion in completions_of(groups):
        turns = turns_of(completion)
        assert len(turns) <= sampling.turns
        assert all(end - start <= sampling.turn_tokens for start, end in turns)
        assert len(completion.token_ids) <= sampling.max_tokens
        assert completion.outcome is not None
        assert completion.outcome.reward >= len(turns), "the last turn is heard, too"
        for start, end in turns:
            assert not set(completion.token_ids[start : end - 1]) & {EOS}
            ended = completion.token_ids[end - 1] == EOS
            assert ended or end == len(completion.token_ids) or completion.token_ids[end] == EOS, "the end is given"
        assert completion.length == sum(end - start for start, end in turns)
    assert any(len(turns_of(c)) > 1 for c in completions_of(groups)) == (sampling.max_tokens > 5)


def test_truncated_conversation_is_not_finished():
    """Neither is one whose last turn has ended, but which has no token left for a reply."""
    many = replace(SAMPLING, n=32)
    whole, cut = (completions_of(held(sampling=replace(many, max_tokens=n))[1]) for n in (100, 11))
    shorter = [one for one, other in zip(cut, whole, strict=True) if len(one.token_ids) < len(other.token_ids)]
    assert any(c.token_ids[-1] == EOS for c in shorter)
    assert not any(c.finished for c in shorter)
    assert any(c.finished for c in whole)


class Rewriting:
    """An environment that starts again with another history in every other reply."""

    def __init__(self):
        self.turn_counts = {}
        self.replies: list[tuple[int, EnvironmentReply]] = []

    def start_conversation(self, number: int, prompt: Prompt, sibling: int) -> None:
        self.turn_counts[number] = 0
        self.replies.append((number, EnvironmentReply(prompt=prompt)))

    def send_turn(self, number: int, turn: PolicyTurn) -> None:
        self.turn_counts[number] += 1
        count = self.turn_counts[number]
        if count == 4:
            self.end_conversation(number)
        elif count % 2:
            self.replies.append((number, EnvironmentReply(({"role": "user", "content": "b?"},))))
        else:
            history = ({"role": "user", "content": "d+"}, {"role": "assistant", "content": turn.message["content"][:2]})
            self.replies.append(
                (
                    number,
                    EnvironmentReply(prompt=Prompt("again", (*history, {"role": "user", "content": f"{number}?"}))),
                )
            )

    def end_conversation(self, number: int) -> None:
        self.replies.append((number, EnvironmentReply(outcome=ConversationOutcome(float(number)))))

    def receive_replies(self, seconds: float) -> Sequence[tuple[int, EnvironmentReply]]:
        replies, self.replies = self.replies, []
        return replies

    def close(self) -> None: ...


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("name", ["native", "hf"])
def test_rewritten_history_starts_a_new_sequence(name, architecture):
    policy, groups = held(name, architecture, world=Rewriting())
    for completion in completions_of(groups):
        [branch] = completion.branches
        assert len(turns_of(branch)) == 2
        assert len(turns_of(completion)) == 2
        assert "d" in policy.decode(completion.token_ids)
        assert "d" not in policy.decode(branch.token_ids[: branch.given_spans[0][1]])
    batch = collate(groups)
    assert len(batch) == 2 * len(completions_of(groups))
    with torch.no_grad():
        gap = (policy.score(batch).logprobs - batch.sampler_logprobs)[batch.action_mask].abs().max()
    assert gap < 1e-4


@pytest.mark.parametrize("name", ["native", "hf"])
def test_sampling_masks_exist_only_for_sampled_tokens(name):
    policy, groups = held(name, sampling=replace(SAMPLING, top_k=5))
    for completion in completions_of(groups):
        given = {t for start, end in completion.given_spans for t in range(start, end)}
        assert all(len(mask) == 0 for t, mask in enumerate(completion.sampling_mask) if t in given)
        assert all(len(mask) > 0 for t, mask in enumerate(completion.sampling_mask) if t not in given)
    batch = collate(groups)
    with torch.no_grad():
        gap = (policy.score(batch).logprobs - batch.sampler_logprobs)[batch.action_mask].abs().max()
    assert gap < 1e-4


def test_too_long_question_costs_only_its_own_conversations():
    class Talkative(Lead):
        def _changed(self, number, reply):
            if not reply.prompt or number >= 4:
                return reply
            return EnvironmentReply(prompt=replace(reply.prompt, text=({"role": "user", "content": "a" * 100},)))

    first, *others = held(world=Talkative())[1]
    assert all("100" not in c.outcome.error and "102 tokens" in c.outcome.error for c in first.completions)
    assert all(c.token_ids and not c.given_spans for c in first.completions)
    assert all(not c.outcome.error for c in completions_of(others))


def test_error_in_reset_gives_a_completion_with_that_error():
    _, groups = held(world=InProcessEnvironments(EnvironmentSpec("worlds:Broken")), prompts=asked(2, fails=True))
    for completion in completions_of(groups):
        assert completion.outcome.error.startswith("reset: RuntimeError: no room")
        assert completion.token_ids
        assert completion.given_spans == ()


@pytest.mark.parametrize("world", [None, "worlds:Parrot"])
@pytest.mark.parametrize("name", ["native", "hf"])
@pytest.mark.parametrize(
    ("opening", "thinking"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)]
)
def test_completion_knows_if_the_chat_template_opened_a_thought(name, world, opening, thinking):
    """Tests plain completions, and conversations, whose last turn is graded."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT.replace("assistant\n{% endif", f"assistant\n{opening}{{% endif")
    policy = Policy(tiny_llama_of(tokenizer), tokenizer)
    sampling = replace(SAMPLING, max_tokens=200) if world else Sampling(2, max_tokens=4)
    talk = InProcessEnvironments(EnvironmentSpec(world)) if world else None
    sampler = NativeSampler(environments=talk) if name == "native" else HuggingFaceSampler(environments=talk)
    sampler.sync(policy, 0)
    prompts = asked(2) if world else [Prompt("p", ({"role": "user", "content": "2+3?"},))]
    completions = completions_of(sampler.generate(prompts, sampling))
    assert {completion.thinking for completion in completions} == {thinking}
    for completion in completions:
        assert completion.full_text == "<think>" * thinking + completion.text
    if world:
        assert max(len(turns_of(completion)) for completion in completions) > 1

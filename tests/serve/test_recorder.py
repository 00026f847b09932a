"""Test agents in separate processes that query the policy over HTTP with the unmodified `openai` package."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

import agents
from conftest import make_policy
from pellucid.algorithm.batch import collate
from pellucid.environments.agents import AgentSpec
from pellucid.rewards.settings import RewardConfig
from pellucid.rollout.hf import HuggingFaceSampler
from pellucid.rollout.native import NativeSampler
from pellucid.serve import agent_endpoint
from pellucid.serve.agent_endpoint import AgentEndpoint, AgentPool
from pellucid.types import ConversationOutcome, PolicyTurn, Prompt, Sampling, UserError
from worlds import TEMPLATE

SAMPLING = Sampling(4, max_tokens=80, turns=5, turn_tokens=9, seed="0/0")
FILE = Path(agents.__file__)
COMMAND = shlex.join([sys.executable, str(FILE)])
REFUSING = "{% if messages[0].content == 'refused' %}{{ raise_exception('not so') }}{% endif %}"


@pytest.fixture(scope="module")
def policy():
    made = make_policy()
    made.tokenizer.chat_template = REFUSING + TEMPLATE
    return made


@pytest.fixture
def world_of(policy, tmp_path):
    """Return a function that creates a pool of agents, which print into the file `log`. Close the pools afterwards."""
    made = []

    def world(name="solve", **settings):
        talk = AgentSpec(f"{FILE}:{name}" if name.isidentifier() else name, **settings)
        made.append(AgentPool(talk, policy, RewardConfig(), tmp_path / "log"))
        return made[-1]

    yield world
    for each in made:
        each.close()


def rows(*does, **columns):
    texts = ["ab" * i + "+" for i in range(len(does))]
    return [
        Prompt(f"p{i}", ({"role": "user", "content": text},), columns={"question": text, "does": done, **columns})
        for i, (text, done) in enumerate(zip(texts, does, strict=True))
    ]


def held(policy, world, prompts, sampling=SAMPLING, name="native"):
    sampler = NativeSampler(256, environments=world) if name == "native" else HuggingFaceSampler(environments=world)
    sampler.sync(policy, 7)
    groups = sampler.generate(prompts, sampling)
    return groups, [completion for group in groups for completion in group.completions]


def turns_of(completion):
    edges = [0, *(edge for stretch in completion.given_spans for edge in stretch), len(completion.token_ids)]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


def gap_of(policy, groups):
    batch = collate(groups)
    with torch.no_grad():
        return batch, (policy.score(batch).logprobs - batch.sampler_logprobs)[batch.action_mask].abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["native", "hf"])
def test_sixteen_concurrent_agents_record_one_sampled_sequence_each(policy, world_of, name):
    groups, completions = held(policy, world_of(), rows(*["talks"] * 4), name=name)
    assert len(completions) == 16
    for group, completion in [(g, c) for g in groups for c in g.completions]:
        turns = turns_of(completion)
        assert len(turns) == 3
        assert completion.branches == ()
        said = [policy.decode(completion.token_ids[start:end]) for start, end in turns]
        heard = sum(map(len, said)) + sum(end - start for start, end in turns) / 100
        assert completion.outcome.reward == pytest.approx(heard), "the agent has heard what was sampled"
        assert completion.outcome.error == ""
        whole = policy.decode((*group.prompt_ids, *completion.token_ids))
        assert whole == f"k{group.prompt.text[0]['content']}={said[0]}0?={said[1]}1?={said[2]}"
    assert gap_of(policy, groups)[1] < 1e-4


@pytest.mark.slow
def test_rewritten_history_is_recorded_as_a_branch(policy, world_of):
    groups = held(policy, world_of(), rows("rewrites", "talks"))[0]
    first = groups[0]
    for completion in first.completions:
        [branch] = completion.branches
        assert len(turns_of(branch)) == len(turns_of(completion)) == 2
        assert policy.decode((*first.prompt_ids, *branch.token_ids)).startswith("k+=")
        said = [message["content"] for message in branch.messages if message["role"] == "assistant"]
        written = f"kdd+={said[0]}<eos>0?={said[1]}<eos>1?="
        assert policy.decode((*first.prompt_ids, *completion.token_ids), special=True).startswith(written)
    assert first.prompt.text == ({"role": "user", "content": "+"},), "as it was asked first"
    batch, gap = gap_of(policy, groups)
    assert len(batch) == 12
    assert gap < 1e-4


FAULTS = {
    "raises": "ValueError: no idea (agents.py, line",
    "hangs": "no answer within 4 s",
    "dies": "its process has ended",
    "is_silent": agent_endpoint.NO_REQUEST_ERROR,
    "returns_words": "what the agent returned is 'good', where a number is needed",
    "returns_none": "the agent returned no reward, and the task defines none",
    "goes_on": f"BadRequestError: Error code: 400 - {{'error': {{'message': '{agent_endpoint.CONVERSATION_OVER_ERROR}'",
    "never_gives_up": agent_endpoint.AGENT_NOT_ENDED_ERROR,
}


@pytest.mark.slow
def test_agent_failure_costs_only_its_rollout_and_is_reported(policy, world_of, monkeypatch, tmp_path):
    monkeypatch.setattr(agent_endpoint, "AGENT_GRACE_SECONDS", 0.5)
    prompts = rows(*FAULTS, "talks")
    groups, completions = held(policy, world_of(timeout=4.0), prompts, replace(SAMPLING, n=2))
    assert all(completion.token_ids for completion in completions)
    for expected, group in zip(FAULTS.values(), groups, strict=False):
        for completion in group.completions:
            assert completion.outcome.reward is None
            assert completion.outcome.error.startswith(expected)
    assert all(c.outcome.error == "" and c.outcome.reward > 0 for c in groups[-1].completions)
    assert "in raises" in (tmp_path / "log").read_text(), "with its traceback"


@pytest.mark.slow
def test_agent_may_return_no_reward_if_the_task_has_rewards(policy, world_of):
    _, completions = held(policy, world_of(has_rewards=True), rows("returns_none"))
    assert {(c.outcome.reward, c.outcome.error) for c in completions} == {(None, "")}


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"turns": 2}, {"max_tokens": 25}])
def test_beyond_the_limits_policy_answers_empty_once_then_refuses(policy, world_of, limits):
    sampling = replace(SAMPLING, **limits)
    _, completions = held(policy, world_of(), rows("goes_on_until_refused"), sampling)
    for completion in completions:
        assert len(completion.token_ids) <= sampling.max_tokens
        turns = len(turns_of(completion))
        assert turns == 2 or "turns" not in limits
        assert completion.outcome.reward == pytest.approx(1.0 + (turns + 1) / 100)


@pytest.mark.slow
def test_flood_of_requests_gets_the_turns_of_one_conversation(policy, world_of):
    _, completions = held(policy, world_of(), rows("floods", "talks"), replace(SAMPLING, n=2))
    for completion in completions[:2]:
        assert completion.outcome.error == ""
        assert int(completion.outcome.reward) == SAMPLING.turns
        assert len(completion.branches) == SAMPLING.turns - 1
    assert all(c.outcome.reward > 1 for c in completions[2:])


@pytest.mark.slow
def test_streamed_limited_and_invalid_requests(policy, world_of, tmp_path):
    prompts = rows("streams", "is_limited", "is_mistaken")
    groups, completions = held(policy, world_of(), prompts)
    assert {c.outcome.error for c in completions} == {""}
    streamed, limited, mistaken = groups
    for completion in streamed.completions:
        assert completion.outcome.reward == len(completion.text)
        assert len(completion.token_ids) <= 3
    for completion in limited.completions:
        [few] = completion.branches
        assert completion.outcome.reward == pytest.approx(few.length + completion.length / 100)
    assert any(c.length > 2 for c in limited.completions), "the limit was that of one turn"
    assert {c.outcome.reward for c in mistaken.completions} == {7.0}
    told = (tmp_path / "log").read_text()
    for line in (
        "n: Input should be 1",
        "logprobs: Input should be False",
        "messages: List should have at least 1 item",
        "messages.0.content",
        "messages.0.tool_calls.0.function.arguments: Value error, Expecting property name",
        "not so",
        "there is no rollout x",
    ):
        assert told.count(line) >= len(mistaken.completions), line  # not whole lines: four processes print


@pytest.mark.slow
def test_asynchronous_agent_may_use_its_own_client(policy, world_of):
    _, completions = held(policy, world_of("together"), rows("", ""))
    assert {c.outcome.reward for c in completions} == {2.0}
    assert {len(c.branches) for c in completions} == {1}, "the same question again is not said behind the first"


@pytest.mark.slow
def test_command_can_be_an_agent(policy, world_of):
    prompts = rows("", "", "")
    questions = ("ab+", "broken", "words")
    prompts = [
        replace(prompt, columns={**prompt.columns, "question": question})
        for prompt, question in zip(prompts, questions, strict=True)
    ]
    talked, broken, words = held(policy, world_of(COMMAND), prompts, replace(SAMPLING, n=2))[0]
    for completion in talked.completions:
        assert completion.outcome.error == ""
        assert completion.outcome.reward == pytest.approx(
            sum(len(m["content"]) for m in completion.messages if m["role"] == "assistant") + completion.length / 100
        )
    assert {c.outcome.error for c in broken.completions} == {f"{COMMAND}: exit status 3"}
    assert {c.outcome.error for c in words.completions} == {"the agent returned no reward, and the task defines none"}


def driven(world, row, says, pause=0.0):
    """Run a conversation in which the policy says `says` and nothing after it. Return all replies of the pool."""
    [prompt] = rows("", **row)
    world.start_conversation(0, prompt, 0)
    found, says, until = [], list(says), time.monotonic() + 60
    while time.monotonic() < until:
        for _, reply in world.receive_replies(0.5):
            found.append(reply)
            if reply.outcome:
                return found
            spoken = time.monotonic() + pause
            while time.monotonic() < spoken:
                assert world.receive_replies(0.05) == [], "nobody has been answered"
            world.send_turn(0, says.pop(0)) if says else world.end_conversation(0)
    raise AssertionError("no outcome")


def calls(*arguments, content=""):
    made = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
        for i, (a, b) in enumerate(arguments)
    ]
    return PolicyTurn({"role": "assistant", "content": content, "tool_calls": made}, token_counts=(5, 7))


def words(text):
    return PolicyTurn({"role": "assistant", "content": text}, token_counts=(5, 7))


@pytest.mark.slow
def test_agent_with_tools_gets_calls_and_sends_answers(world_of):
    """Calls have the format of OpenAI and come back as they were sampled. Other tools start another sequence."""
    says = [calls((2, 3), (4, 5)), words("6"), calls((2, 3), content="so"), words("none")]
    first, heard, sure, other, last = driven(world_of("has_tools"), {}, says)
    assert last.outcome.error == ""
    assert last.outcome.events == {"calls": 3}
    assert first.prompt.tools == tuple(agents.TOOLS)
    assert first.prompt.escape_special_tokens
    assert heard.prompt is None
    assert [dict(m) for m in heard.messages] == [
        {"role": "tool", "name": "multiply", "content": "6"},
        {"role": "tool", "name": "multiply", "content": "20"},
    ]
    assert [dict(m) for m in sure.messages] == [{"role": "user", "content": "sure?"}]
    assert other.prompt.text[-1] == {"role": "tool", "name": "multiply", "content": "20"}
    assert other.prompt.tools == ()
    called = other.prompt.text[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in called] == [{"a": 2, "b": 3}, {"a": 4, "b": 5}]


@pytest.mark.slow
def test_words_put_into_the_policys_mouth_start_a_new_sequence(world_of):
    first, other, same, last = driven(world_of("puts_words_into_its_mouth"), {}, [words("a")] * 3)
    assert last.outcome.reward == 1.0
    assert [len(reply.prompt.text) for reply in (first, other, same)] == [1, 4, 5]


@pytest.mark.slow
def test_streamed_calls_reach_the_agent(world_of):
    says = [words("abc")._replace(token_counts=(5, 3)), calls((2, 3))]
    first, second, last = driven(world_of("streams"), {"tools": True}, says)
    assert (first.max_tokens, second.max_tokens) == (3, 0)
    assert last.outcome == ConversationOutcome(3.0, events={"calls": 1})


@pytest.mark.slow
def test_unreadable_calls_are_counted(world_of):
    says = [words("a")._replace(unreadable_calls=("no name",)), words("b"), words("c")]
    assert driven(world_of("talks"), {}, says)[-1].outcome.events == {"calls": 1, "unreadable": 1}


@pytest.mark.slow
def test_agent_that_returns_before_its_answer_keeps_its_reward(world_of):
    """The outcome waits for the policy: a conversation in which it still generates is not over."""
    first, last = driven(world_of("leaves_a_request"), {"seconds": 1.0}, [words("a")], pause=2.5)
    assert first.prompt
    assert last.outcome == ConversationOutcome(0.5)


@pytest.mark.slow
def test_forked_child_of_an_agent_reports_no_outcome(world_of):
    assert driven(world_of("forks"), {}, [words("a")])[-1].outcome == ConversationOutcome(7.0)


@pytest.mark.slow
def test_agent_timeout_excludes_the_time_of_the_policy(world_of):
    """The policy takes two turns of 2.5 seconds. The agent has 2 seconds in total, including 1 second of grace."""
    last = driven(world_of("talks", timeout=1.0), {"turns": 2}, [words("a")] * 2, pause=2.5)[-1]
    assert last.outcome.error == ""


def test_agents_repeat_their_random_numbers(policy, world_of):
    once, again = (held(policy, world_of("draws"), rows("", ""))[1] for _ in range(2))
    assert [c.outcome.reward for c in once] == [c.outcome.reward for c in again]
    assert len({c.outcome.reward for c in once}) == 8, "each its own"
    assert [c.token_ids for c in once] == [c.token_ids for c in again]


@pytest.mark.slow
def test_abandoned_conversation_ends_its_agent_and_closed_pool_restarts(world_of):
    world = world_of("says_who_it_is")
    first, second = process_of_an_agent(world), process_of_an_agent(world)
    assert is_gone(first)
    world.close()
    assert is_gone(second)
    assert world.receive_replies(0.0) == []
    assert process_of_an_agent(world) not in (first, second)


def process_of_an_agent(world):
    world.start_conversation(0, rows("")[0], 0)
    [(number, reply)] = world.receive_replies(30.0)
    assert number == 0
    process = int(reply.prompt.text[0]["content"])
    os.kill(process, 0)
    return process


def is_gone(process):
    until = time.monotonic() + 10.0
    while time.monotonic() < until:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_agent_that_cannot_be_loaded_raises_user_error(policy, world_of, tmp_path):
    (tmp_path / "lost_agent.py").write_text("raise OSError('nothing here')\ndef solve(row, client): ...\n")
    world = world_of(f"{tmp_path}/lost_agent.py:solve")
    with pytest.raises(UserError, match=r"cannot be used: .*lost_agent\.py cannot be imported: OSError: nothing here"):
        world.start_conversation(0, rows("")[0], 0)


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(agent_endpoint, "UNKNOWN_CONNECTION_TIMEOUT_SECONDS", 0.5)
    made = AgentEndpoint()
    made.rollout_numbers["known"] = 0
    yield made
    made.close()


def opened(recorder, text=b""):
    url = urlsplit(recorder.make_rollout_url("known"))
    made = socket.create_connection((url.hostname, url.port), timeout=20.0)
    made.sendall(text)
    return made


def is_closed(connection):
    """Wait up to 5 seconds for the other end to close, and return whether it did."""
    connection.settimeout(5.0)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


GET = b"GET /rollout/known/v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.slow
def test_connection_that_requests_no_rollout_is_closed(recorder):
    agent = opened(recorder, GET)
    silent = [opened(recorder, text) for text in (b"", b"GET /rollout/known/", b"GET / HTTP/1.1\r\nHost: a\r\n")]
    assert all(map(is_closed, silent))
    assert agent.recv(12) == b"HTTP/1.1 200", "one that has asked for a rollout stays open"
    agent.recv(10_000)
    agent.sendall(GET)
    assert agent.recv(12) == b"HTTP/1.1 200"
    for connection in (agent, *silent):
        connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unknown", ""])
def test_request_for_unknown_rollout_returns_404_before_its_body(recorder, name):
    head = f"POST /rollout/{name}/v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 45000000\r\n\r\n"
    connection = opened(recorder, head.encode() + b" " * 10_000)
    assert connection.recv(12) == b"HTTP/1.1 404"
    while connection.recv(10_000):
        pass
    connection.close()

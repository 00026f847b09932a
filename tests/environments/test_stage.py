"""Environments and tools in worker processes: faults, time limits and isolation between conversations."""

from __future__ import annotations

import os
import pickle
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pellucid.environments.pool import EnvironmentPool, InProcessEnvironments
from pellucid.environments.spec import EnvironmentSpec
from pellucid.rewards.functions import unpickle_environment
from pellucid.rewards.settings import RewardConfig
from pellucid.sandbox import pool as sandbox
from pellucid.types import Completion, PolicyTurn, Prompt, UserError
from worlds import asked

SHOP = EnvironmentSpec("worlds:Shop", timeout=2.0)


@pytest.fixture
def stage(request):
    made = EnvironmentPool(getattr(request, "param", SHOP), RewardConfig())
    yield made
    made.close()


def replies(world, count, seconds=20.0):
    found, until = {}, time.monotonic() + seconds
    while len(found) < count and time.monotonic() < until:
        found |= dict(world.receive_replies(1.0))
    assert len(found) == count
    return found


def begun(world, count=1, prompt=None):
    for number in range(count):
        world.start_conversation(number, prompt or Prompt("p", ({"role": "user", "content": "Q"},)), number)
    return replies(world, count)


def call(name, **arguments):
    made = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return PolicyTurn({"role": "assistant", "content": "", "tool_calls": [made]})


def over():
    return PolicyTurn({"role": "assistant", "content": "done"})


FAULTS = {
    "unknown": (call("steal"), "Tool steal not found."),
    "arguments": (call("sell", many=3), "missing a required argument: 'count'"),
    "raised": (call("refuse"), "not today"),
    "timeout": (call("wait", seconds=60), "no answer within 2 s"),
    "unreadable": (PolicyTurn({"role": "assistant", "content": ""}, ("not JSON",)), "not JSON"),
}


@pytest.mark.parametrize("world", [EnvironmentPool, InProcessEnvironments])
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "timeout"])
def test_tool_fault_is_an_observation_and_the_conversation_continues(world, fault):
    said, told = FAULTS[fault]
    made = world(SHOP, RewardConfig()) if world is EnvironmentPool else world(SHOP)
    begun(made)
    made.send_turn(0, call("sell", count=2))
    assert replies(made, 1)[0].messages[0]["content"] == "sold 2"
    made.send_turn(0, said)
    [message] = replies(made, 1)[0].messages
    assert message["role"] == "tool"
    assert told in message["content"]
    made.send_turn(0, over())
    outcome = replies(made, 1)[0].outcome
    assert outcome.reward == 2.0
    assert outcome.events == {"calls": 2, fault: 1}
    made.close()


@pytest.mark.slow
def test_no_conversation_waits_for_another(stage):
    """One tool hangs and ignores signals, one ends its process, one raises, one returns 10 MB, one waits too long."""
    begun(stage, 6)
    said = [call("hang"), call("die"), call("refuse"), call("shout", characters=10**7), call("wait", seconds=60)]
    for number, each in enumerate([*said, call("sell", count=1)]):
        stage.send_turn(number, each)
    first = replies(stage, 4)
    assert set(first) == {1, 2, 3, 5}, "nobody waits for the time limit of another"
    assert first[5].messages[0]["content"] == "sold 1"
    assert first[1].outcome.error == "its process has ended"
    assert first[3].messages[0]["content"].endswith("aaa... (10000000 characters)")
    assert len(first[3].messages[0]["content"]) < 21_000
    last = replies(stage, 2)
    assert "no answer within 2 s" in last[4].messages[0]["content"]
    assert last[0].outcome.error == "no answer within 6 s"
    assert last[0].outcome.events == {"lost": 1}


@pytest.mark.parametrize(
    "stage", [EnvironmentSpec(tools=("worlds:multiply", "failing_tools:hang"), timeout=0.5)], indirect=True
)
def test_tools_without_environment_still_work_after_one_has_hung(stage):
    begun(stage)
    stage.send_turn(0, call("hang"))
    [message] = replies(stage, 1)[0].messages
    assert "no answer within" in message["content"]
    stage.send_turn(0, call("multiply", a=6, b=7))
    assert replies(stage, 1)[0].messages[0]["content"] == "42"
    stage.send_turn(0, over())
    assert replies(stage, 1)[0].outcome.events == {"calls": 2, "lost": 1}


@pytest.mark.parametrize("stage", [EnvironmentSpec("worlds:reply")], indirect=True)
def test_function_environment_replies_to_messages(stage):
    begun(stage)
    stage.send_turn(0, over())
    assert replies(stage, 1)[0].messages == ({"role": "user", "content": "2"},)
    stage.send_turn(0, over())
    stage_reply = replies(stage, 1)[0].messages
    assert stage_reply == ({"role": "user", "content": "4"},)
    stage.send_turn(0, over())
    assert replies(stage, 1)[0].outcome.reward is None


@pytest.mark.parametrize("stage", [EnvironmentSpec("worlds:Parrot")], indirect=True)
def test_siblings_get_the_same_question_and_other_prompts_differ(stage):
    prompts = [replace(prompt, id=f"other {i}") for i, prompt in enumerate(asked(1) * 8)]
    for number in range(16):
        stage.start_conversation(number, prompts[number // 2], number % 2)
    questions = [reply.prompt.text[0]["content"] for _, reply in sorted(replies(stage, 16).items())]
    assert questions[::2] == questions[1::2]
    assert len(set(questions)) > 3


@pytest.mark.parametrize("stage", [EnvironmentSpec("worlds:Broken")], indirect=True)
def test_error_in_reset_ends_the_conversation(stage):
    reply = begun(stage, prompt=asked(1, fails=True)[0])[0]
    assert reply.outcome.error.startswith("reset: RuntimeError: no room (worlds.py, line")
    assert begun(stage, prompt=asked(1, fails=False)[0])[0].prompt, "and the next may begin"


@pytest.mark.parametrize("stage", [EnvironmentSpec("worlds:WORLDS")], indirect=True)
def test_row_selects_one_of_several_environments(stage):
    prompt = Prompt("p", ({"role": "user", "content": "Q"},), columns={"environment": "counter", "start": 4})
    asked_of = begun(stage, prompt=prompt)[0].prompt
    assert asked_of.text[0]["content"] == "Q Begin at 4."
    assert [tool["function"]["name"] for tool in asked_of.tools] == ["count"]
    wrong = begun(stage, prompt=replace(prompt, columns={"environment": "moon"}))[0]
    assert 'environment = "moon"; there are counter, shop' in wrong.outcome.error


@pytest.mark.parametrize("stage", [replace(SHOP, returns_environment=True)], indirect=True)
def test_reward_functions_see_the_final_environment_state(stage):
    begun(stage)
    stage.send_turn(0, call("sell", count=5))
    replies(stage, 1)
    stage.send_turn(0, over())
    outcome = replies(stage, 1)[0].outcome
    environment = unpickle_environment(Completion((), (), "", True, outcome=outcome))
    assert type(environment).__name__ == "Shop"
    assert environment.sold == 5


def test_receive_replies_returns_when_a_reply_arrives(stage):
    begun(stage)
    start = time.monotonic()
    stage.send_turn(0, call("wait", seconds=0.2))
    assert stage.receive_replies(60.0)
    assert time.monotonic() - start < 6.0, "not at the time limit of the call"


def test_processes_are_reused_and_end_with_the_pool():
    stage = EnvironmentPool(SHOP, RewardConfig())
    for _ in range(3):
        begun(stage, 2)
        for number in range(2):
            stage.send_turn(number, over())
        replies(stage, 2)
    pids = [player.pid for player in stage.idle]
    assert len(pids) == 2
    stage.close()
    for pid in pids:
        until = time.monotonic() + 5
        while alive(pid) and time.monotonic() < until:
            time.sleep(0.02)
        assert not alive(pid)


def test_death_of_an_idle_process_costs_no_conversation(stage):
    begun(stage)
    stage.send_turn(0, over())
    replies(stage, 1)
    [idle] = stage.idle
    os.kill(idle.pid, signal.SIGKILL)
    while alive(idle.pid):
        time.sleep(0.01)
    assert begun(stage)[0].prompt
    assert stage.busy[0] is not idle


def test_new_conversation_replaces_abandoned_one_with_the_same_number(stage):
    begun(stage)
    stage.send_turn(0, call("wait", seconds=60))
    assert begun(stage)[0].prompt


def test_environment_that_cannot_be_loaded_raises_user_error():
    stage = EnvironmentPool(EnvironmentSpec(tools=("failing_tools:missing",)), RewardConfig())
    with pytest.raises(UserError, match='the environment cannot be used: UserError: failing_tools has no "missing"'):
        stage.start_conversation(0, Prompt("p", ({"role": "user", "content": "Q"},)), 0)
    stage.close()


def test_tool_without_argument_types_raises_user_error():
    stage = EnvironmentPool(EnvironmentSpec(tools=("failing_tools:untold",)), RewardConfig())
    stage.start_conversation(0, Prompt("p", ({"role": "user", "content": "Q"},)), 0)
    with pytest.raises(UserError, match=r"tool untold: .*: give its arguments types, and its docstring"):
        stage.receive_replies(10.0)
    stage.close()


def test_policy_turn_can_be_pickled():
    assert pickle.loads(pickle.dumps(over())) == over()


def alive(pid):
    """Return whether a process exists and is not a zombie."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_killed_process_costs_only_its_own_conversation(stage):
    begun(stage, 2)
    os.kill(stage.busy[0].pid, signal.SIGKILL)
    stage.send_turn(0, call("sell", count=1))
    stage.send_turn(1, call("sell", count=1))
    found = replies(stage, 2)
    assert found[0].outcome.error == "its process has ended"
    assert found[1].messages[0]["content"] == "sold 1"


def test_lone_surrogates_are_replaced_or_escaped(stage_or_here):
    """`reset`, tools and `reply` replace them, and error messages escape them. Surrogate pairs are joined."""
    world = stage_or_here(EnvironmentSpec("worlds:Halves", timeout=2.0))
    texts = [begun(world)[0].prompt.text[-1]["content"]]
    for said in (call("tell"), call("refuse"), over()):
        world.send_turn(0, said)
        texts += [message["content"] for message in replies(world, 1)[0].messages]
    assert texts == ["Q\ufffd?", "a\ufffd", "{'error': 'no \\ud83d'}", "\U0001f600 b\ufffd"]
    world.send_turn(0, over())
    error = replies(world, 1)[0].outcome.error
    assert error.startswith("reply: ValueError: over ")
    error.encode()


def test_error_in_str_of_a_result_costs_the_call_or_conversation(stage_or_here):
    world = stage_or_here(EnvironmentSpec("worlds:Unsaid", timeout=2.0))
    begun(world)
    world.send_turn(0, call("tell"))
    [message] = replies(world, 1)[0].messages
    assert message["content"] == "{'error': 'mute'}"
    world.send_turn(0, over())
    assert replies(world, 1)[0].outcome.error.startswith("reply: RuntimeError: mute")


@pytest.fixture
def stage_or_here(request):
    made = []

    def world(talk):
        made.append(
            EnvironmentPool(talk, RewardConfig()) if request.param is EnvironmentPool else InProcessEnvironments(talk)
        )
        return made[-1]

    yield world
    for each in made:
        each.close()


def pytest_generate_tests(metafunc):
    if "stage_or_here" in metafunc.fixturenames:
        metafunc.parametrize("stage_or_here", [EnvironmentPool, InProcessEnvironments], indirect=True)


@pytest.mark.parametrize("stage", [EnvironmentSpec("worlds:Forking", timeout=20.0)], indirect=True)
def test_forked_child_of_an_environment_ends_when_it_returns(stage):
    begun(stage)
    pid = stage.busy[0].pid if stage.busy[0].pid else None
    for how, status in (("returns", 0), ("exits", 7), ("raises", 1)):
        stage.send_turn(0, call("fork", how=how))
        [message] = replies(stage, 1)[0].messages
        mine, ended = message["content"].split()
        assert int(ended) == status
        assert pid in (None, int(mine))
    stage.send_turn(0, over())
    assert replies(stage, 1)[0].outcome.reward == 1.0
    assert not children_of(stage.idle[0].pid)


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", [EnvironmentSpec("worlds:Large", timeout=0.5, returns_environment=True)], indirect=True
)
def test_process_that_stops_mid_answer_is_lost_at_the_time_limit(stage):
    begun(stage)
    stage.send_turn(0, over())
    time.sleep(1.0)
    assert replies(stage, 1)[0].outcome.error == "no answer within 1 s"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [EnvironmentSpec("worlds:Shop", timeout=0.5)], indirect=True)
def test_process_that_does_not_read_a_row_is_lost_at_the_time_limit(stage):
    begun(stage)
    stage.send_turn(0, over())
    replies(stage, 1)
    os.kill(stage.idle[0].pid, signal.SIGSTOP)
    row = {"text": "a" * 10_000_000}
    lost = begun(stage, prompt=Prompt("p", ({"role": "user", "content": "Q"},), columns=row))[0]
    assert lost.outcome.error == "no answer within 0.5 s"
    assert begun(stage, prompt=Prompt("q", ({"role": "user", "content": "Q"},), columns=row))[0].prompt


@pytest.mark.slow
@pytest.mark.parametrize("stage", [replace(SHOP, timeout=1.0)], indirect=True)
def test_many_slow_calls_in_one_turn_keep_the_conversation(stage):
    """Each call keeps the limit, but together they exceed twice the limit plus ten seconds, a former process limit."""
    begun(stage)
    [one] = call("wait", seconds=0.9).message["tool_calls"]
    stage.send_turn(0, PolicyTurn({"role": "assistant", "content": "", "tool_calls": [one] * 15}))
    said = replies(stage, 1, 40.0)[0]
    assert [message["content"] for message in said.messages] == ["waited"] * 15
    stage.send_turn(0, over())
    assert replies(stage, 1)[0].outcome.events == {"calls": 15}


# ---------------------------------------------------------------- worker processes and their substitutes


def test_in_process_conversations_reuse_their_environments():
    """Also after a conversation that failed in `reset`, and after an abandoned one."""
    world = InProcessEnvironments(EnvironmentSpec("worlds:Broken"))
    for fails in (True, True, False, True):
        begun(world, prompt=asked(1, fails=fails)[0])
    assert len(world.idle) == 1
    assert not world.busy


def test_in_process_errors_are_logged_once_per_kind(tmp_path):
    log = tmp_path / "rewards.log"
    world = InProcessEnvironments(SHOP, log)
    begun(world)
    for _ in range(3):
        world.send_turn(0, call("refuse"))
        replies(world, 1)
    assert log.read_text().count("Traceback") == 1
    assert "ValueError: not today" in log.read_text()


def test_fork_server_that_has_just_died_is_replaced(stage, monkeypatch):
    begun(stage)
    server = stage._factory._server
    os.kill(server.pid, signal.SIGKILL)
    server._process.join()
    monkeypatch.setattr(sandbox.Worker, "is_alive", True)
    stage.send_turn(0, call("wait", seconds=60))
    stage.start_conversation(1, Prompt("p", ({"role": "user", "content": "Q"},)), 0)
    assert replies(stage, 2)[1].prompt
    assert stage._factory._server is not server


def test_falsy_exception_counts_as_an_error():
    world = InProcessEnvironments(EnvironmentSpec("worlds:Falsy"))
    assert begun(world)[0].outcome.error.startswith("reset: FalsyError: no room")


@pytest.mark.slow
def test_processes_are_spawned_when_fork_is_unavailable(monkeypatch):
    monkeypatch.setattr(sandbox, "CAN_FORK", False)
    stage = EnvironmentPool(SHOP, RewardConfig())
    begun(stage, 2)
    pids = [stage.busy[number].pid for number in range(2)]
    stage.send_turn(0, call("die"))
    stage.send_turn(1, over())
    found = replies(stage, 2)
    assert found[0].outcome.error == "its process has ended"
    assert found[1].outcome.reward == 0.0
    stage.close()
    assert not any(map(alive, pids))
    broken = EnvironmentPool(EnvironmentSpec(tools=("failing_tools:missing",)), RewardConfig())
    with pytest.raises(UserError, match='the environment cannot be used: UserError: failing_tools has no "missing"'):
        broken.start_conversation(0, Prompt("p", ({"role": "user", "content": "Q"},)), 0)
    broken.close()

"""Test environments of the package `verifiers`, played by the package itself."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import byte_tokenizer, make_policy, records, tiny_llama_of
from pellucid.rewards.settings import RewardConfig
from pellucid.rollout.native import NativeSampler
from pellucid.serve.agent_endpoint import AgentPool
from pellucid.types import ROUND_STRIDE, Completion, ConversationOutcome, Prompt, Sampling
from runs import train
from worlds import CHAT, TEMPLATE

pytest.importorskip("verifiers")
import taskset_of_echoes
from pellucid.environments.verifiers import Episode, load_environment
from pellucid.tasks.verifiers import Verifiers

pytestmark = pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning")  # tenacity
ECHOES = {"taskset": {"id": "taskset-of-echoes"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "tools_multiply", "arguments": '{"a": 12, "b": 7}'}}


def with_task(**settings):
    return {"taskset": {"id": "taskset-of-echoes", "task": settings}}


@pytest.mark.slow
def test_prompts_are_the_tasks_of_the_taskset_and_splits_share_none():
    asked = {
        split: Verifiers(env={"taskset": {"id": "taskset-of-echoes", "most": 40}}, split=split).sample(0, n)
        for split, n in (("train", 36), ("test", 4))
    }
    texts = [prompt.text for split in ("train", "test") for prompt in asked[split]]
    assert sorted(texts) == sorted("ab" * i + "+" for i in range(40))
    assert [prompt.id for prompt in asked["test"]] == [f"test/0/{i}" for i in range(4)]
    tasks = {task.data.prompt: task for task in load_environment(json.dumps(ECHOES)).taskset}
    for prompt in asked["test"][:1]:
        assert prompt.columns["task"]["system_prompt"] == "k"
        assert prompt.columns["task"] == {**tasks["+"].data.model_dump(mode="json"), **prompt.columns["task"]}


def test_the_order_is_a_function_of_seed_split_and_step():
    task = Verifiers(env=ECHOES, seed=3)
    assert task.sample(1, 4) == Verifiers(env=ECHOES, seed=3).sample(1, 4)
    others = [task.sample(2, 4), task.sample(1 + ROUND_STRIDE, 4), Verifiers(env=ECHOES, seed=4).sample(1, 4)]
    assert all([p.text for p in task.sample(1, 4)] != [p.text for p in other] for other in others)


def test_reward_of_the_environment_is_the_reward():
    def reward(**outcome):
        completion = Completion((1,), (0.0,), "a", True, outcome=ConversationOutcome(**outcome) if outcome else None)
        return Verifiers(env=ECHOES).reward(Prompt("p", "a"), completion)

    assert (reward(reward=0.25).value, reward(reward=0.25).is_continuous, reward(reward=1.0).is_correct) == (
        0.25,
        True,
        True,
    )
    assert (reward(error="lost").failed, reward(error="lost").error) == (True, "lost")
    assert reward().error == "no episode was played"


@pytest.mark.slow
def test_episodes_are_played_by_the_policy_and_graded_by_the_package(tmp_path):
    policy = make_policy()
    policy.tokenizer.chat_template = TEMPLATE
    task = Verifiers(env=ECHOES)
    world = AgentPool(task.environment_spec, policy, RewardConfig(), tmp_path / "log")
    sampler = NativeSampler(256, environments=world)
    sampler.sync(policy, 1)
    try:
        groups = sampler.generate(task.sample(0, 3), Sampling(4, max_tokens=30, seed="0"))
    finally:
        world.close()
    completions = [completion for group in groups for completion in group.completions]
    assert [completion.outcome.error for completion in completions] == [""] * 12
    for completion in completions:
        assert completion.outcome.reward == pytest.approx(0.02 * len(policy.decode(completion.token_ids).strip()))
    assert len({completion.outcome.reward for completion in completions}) > 1
    for group in groups:
        asked = [(message["role"], message["content"]) for message in group.prompt.text]
        assert asked == [("system", "k"), ("user", group.prompt.columns["task"]["prompt"])]


@contextmanager
def speaker(*messages):
    """Serve a policy that answers with these messages in turn. Yield its address and the list of requests."""
    asked, left = [], list(messages)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            message = {"role": "assistant", **left.pop(0)}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            said = {
                "id": "x",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [choice],
                "usage": usage,
            }
            body = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def _variables(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    monkeypatch.setenv("PYTHONPATH", str(Path(taskset_of_echoes.__file__).parent))  # another process serves the tools


def play(env, url):
    [prompt, *_] = Verifiers(env=env).sample(0, 1)
    with ThreadPoolExecutor(1) as beside:  # a thread without a running event loop, as in a worker process
        return beside.submit(Episode(json.dumps(env)), prompt.columns, SimpleNamespace(base_url=url)).result()


@pytest.mark.slow
def test_tool_calls_are_answered_in_the_conversation():
    other = {**CALL, "id": "c2", "function": {"name": "divide", "arguments": "{}"}}
    with speaker({"content": None, "tool_calls": [CALL, other]}, {"content": "12345"}) as (url, asked):
        assert play(with_task(tools=True), url) == pytest.approx(2.0 * 0.01 * 5)
    assert [tool["function"]["name"] for tool in asked[0]["tools"]] == ["tools_multiply"]
    told = [(m["tool_call_id"], m["content"]) for m in asked[1]["messages"] if m["role"] == "tool"]
    assert told == [("c1", "84"), ("c2", "no tool divide")]
    assert [m["role"] for m in asked[1]["messages"]] == ["system", "user", "assistant", "tool", "tool"]


@pytest.mark.slow
def test_conversation_ended_by_the_environment_is_graded():
    env = {**with_task(tools=True), "agent": {"max_turns": 1}}
    with speaker({"content": "123", "tool_calls": [CALL]}) as (url, asked):
        assert play(env, url) == pytest.approx(2.0 * 0.01 * 3)
    assert len(asked) == 1


@pytest.mark.slow
def test_error_in_an_environment_is_raised_with_its_message():
    with speaker({"content": "a"}) as (url, _), pytest.raises(RuntimeError, match="the scale is broken"):
        play(with_task(fails=True), url)


@pytest.mark.slow
def test_untrained_agent_does_not_count_and_needs_its_own_client():
    env = {**ECHOES, "id": "pair-of-seats"}
    with speaker({"content": "1234"}, {"content": "1"}) as (url, asked):
        with pytest.raises(ValueError, match=r"the agent critic is not trained: .* in \[task\.env\.critic\]"):
            play(env, url)
        assert len(asked) == 2
    with speaker({"content": "1234"}) as (url, asked), speaker({"content": "1"}) as (other, heard):
        client = {"type": "eval", "base_url": other, "api_key_var": "OPENAI_API_KEY"}
        assert play({**env, "critic": {"client": client}}, url) == pytest.approx(2.0 * 0.01 * 4)
        assert (len(asked), len(heard)) == (1, 1)


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({}, "needs a seed taskset"),
        ({"taskset": {"id": "taskset-of-nothing"}}, "taskset 'taskset-of-nothing' not found"),
        ({"taskset": {"id": "taskset-of-echoes", "mots": 3}}, "taskset.mots Extra inputs are not permitted"),
        ({**ECHOES, "agent": 3}, "unsupported operand"),
    ],
)
def test_invalid_environments_are_refused_in_one_line(env, told):
    with pytest.raises(ValueError, match=told) as raised:
        Verifiers(env=env)
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith("[task.env] is what verifiers calls [env]")


def test_timeout_must_be_positive():
    with pytest.raises(ValueError, match=r"timeout = 0.0 must be a positive number of seconds"):
        Verifiers(env=ECHOES, timeout=0.0)


@pytest.mark.slow
def test_train_command_runs_five_steps(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    for part in (tiny_llama_of(tokenizer), tokenizer):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "recipe.toml").write_text(f"""
[policy]
model = "{tmp_path / "model"}"
[task]
name = "verifiers"
[task.env]
taskset = {{ id = "taskset-of-echoes", most = 12 }}
agent = {{ max_turns = 2 }}
[sampler]
max_tokens = 12
[algorithm]
steps = 5
prompts_per_step = 2
group_size = 2
[evaluate]
every = 0
n = 1
k = 0
""")
    assert train(tmp_path / "recipe.toml", "--run", tmp_path / "run") == 0
    rollouts = records(tmp_path / "run" / "rollouts.jsonl")
    assert len(rollouts) == 5 * 4
    for rollout in rollouts:
        assert rollout["reward"] == pytest.approx(0.02 * len(rollout["messages"][-1]["content"].strip()))
    assert all(step.get("failed", 0) == 0 for step in records(tmp_path / "run" / "metrics.jsonl"))

"""Sampling on SGLang servers, here doubles with its protocol: current weights and correct log-probs."""

from __future__ import annotations

import json
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from conftest import EOS, CountDigits, character_tokenizer, records
from pellucid import config
from pellucid.policy.load import add_adapter
from pellucid.policy.policy import Policy
from pellucid.rollout import vllm_client
from pellucid.rollout.sglang import SGLangClient
from pellucid.rollout.vllm import VLLMSampler, get_push_weights
from pellucid.rollout.vllm_client import SampleRequest, ServerLostError, ServerPool, check_servers, serialize_model
from pellucid.training.build import check_sampler
from pellucid.types import Sampling, UserError
from runs import train
from sampler_process import Process, gap_of, tiny_policy
from sglang_process import Server, served

SAMPLING = Sampling(4, max_tokens=24, seed="0/0")
PROCESS = str(Path(__file__).parents[1] / "sglang_process.py")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(vllm_client, "RETRY_SECONDS", 0.1)


def describe(policy):
    return json.loads(serialize_model(policy))["config"]


@pytest.fixture
def policy():
    policy = tiny_policy()
    policy.model.config.architectures = ["LlamaForCausalLM"]
    return policy


@pytest.fixture
def server(policy):
    return Server(describe(policy))


@pytest.fixture
def url(server):
    with served(server) as one:
        yield one


def synced(policy, *urls, timeout=10.0, ahead=False):
    sampler = VLLMSampler(engine=ServerPool(urls, timeout, ahead, SGLangClient))
    sampler.sync(policy, 3)
    return sampler


def step(policy, by):
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).sign(), alpha=by)


def tokens_of(groups):
    return [c.token_ids for group in groups for c in group.completions]


# ---------------------------------------------------------------- rows and weights


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_sampled_distribution(temperature):
    policy, prompts = tiny_policy(temperature=temperature), CountDigits().sample(0, 4)
    with served(Server(describe(policy))) as url:
        sampler = synced(policy, url)
        groups = sampler.generate(prompts, Sampling(4, temperature, max_tokens=24, seed="0/0"))
        assert gap_of(policy, groups) < 1e-4
        completions = [c for group in groups for c in group.completions]
        assert {c.version for c in completions} == {3}
        assert temperature < 1 or {c.finished for c in completions} == {True, False}
        assert all(c.finished == (c.token_ids[-1] == EOS) for c in completions)
        assert tokens_of(groups) == tokens_of(
            sampler.generate(prompts, Sampling(4, temperature, max_tokens=24, seed="0/0"))
        )
        greedy = Sampling(1, 0.0, max_tokens=8)
        [again], [once] = (sampler.generate(prompts[:1], greedy) for _ in range(2))
        assert tokens_of([again]) == tokens_of([once])


def test_every_push_arrives_bit_for_bit(policy, server, url):
    sampler = synced(policy, url)
    for version, by in enumerate([1e-7, 0.05]):
        step(policy, by)
        sampler.sync(policy, version)
        own = dict(server.model.named_parameters())
        assert all(torch.equal(own[name], weight) for name, weight in get_push_weights(policy).items())
        assert gap_of(policy, sampler.generate(CountDigits().sample(0, 2), SAMPLING)) < 1e-4
    assert not server.is_updating


def test_bf16_weights_arrive_in_parts(monkeypatch):
    monkeypatch.setattr(vllm_client, "MAX_PART_BYTES", 2**13)
    policy = tiny_policy(torch.bfloat16)
    server = Server(describe(policy), "bfloat16")
    with served(server) as url:
        synced(policy, url)
        own = dict(server.model.named_parameters())
        assert all(torch.equal(own[name], weight) for name, weight in get_push_weights(policy).items())


@pytest.mark.slow
def test_an_adapter_is_merged(url):
    model = tiny_policy().model
    policy = Policy(model, character_tokenizer(), adapter=add_adapter(model, 3, 7.0))
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(torch.randn(p.shape), alpha=0.1)
    assert gap_of(policy, synced(policy, url).generate(CountDigits().sample(0, 2), SAMPLING)) < 1e-4


def test_server_that_ignores_seeds_is_reported_once(policy, capsys):
    with served(Server(describe(policy), deterministic=False)) as url:
        sampler = synced(policy, url)
        sampler.sync(policy, 4)
        groups = sampler.generate(CountDigits().sample(0, 3), SAMPLING)
    assert gap_of(policy, groups) < 1e-4
    assert capsys.readouterr().out.count("a resumed run samples other tokens") == 1


# ---------------------------------------------------------------- detected faults


def sync_twice(policy, url):
    synced(policy, url).sync(policy, 4)


def spoil(**attributes):
    return lambda server: [setattr(server, name, value) for name, value in attributes.items()]


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (spoil(left_out="model.layers.1.self_attn.k_proj.weight"), "k_proj.weight that the pushed weights do not fill"),
        (spoil(keeps_cache=True), "its prefix cache was not cleared"),
        (spoil(returns_original_logprobs=True), "log-probs of another temperature than it samples at"),
        (spoil(dp_size=2), "has --dp-size 2"),
        (spoil(dtype="auto"), "computes in auto: start it with --dtype float32"),
        (spoil(architectures=["Qwen2ForCausalLM"]), "runs a Qwen2ForCausalLM, not a LlamaForCausalLM"),
    ],
)
def test_misconfigured_or_stale_server_is_refused_with_one_line(break_it, says, policy, server, url):
    break_it(server)
    with pytest.raises(UserError) as raised:
        sync_twice(policy, url)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_lost_part_of_a_push_is_detected_by_the_logprobs(policy, server, url):
    """The checksum of a packed tensor in SGLang changes with any of its parts, so it does not reveal a lost part."""
    sampler = synced(policy, url)
    load = server.load

    def lossy(weights):
        load(weights)
        with torch.no_grad():
            server.model.model.layers[0].self_attn.k_proj.weight[:8] = torch.rand(8, 64)

    server.load = lossy
    with pytest.raises(UserError, match="the sampler has old weights, or computes another model"):
        sampler.sync(policy, 4)


def test_answers_from_weights_of_another_push_are_refused(policy, server, url):
    first, second = SGLangClient(url, 10.0), SGLangClient(url, 10.0)
    for client in (first, second):
        client.load_model(serialize_model(policy))
    first.push(get_push_weights(policy))
    first.score_tokens([1, 2, 3])
    begun = second._fetch_checksums
    versions = []

    def watched():
        versions.append(server.version)
        with pytest.raises(ServerLostError, match="computed with other weights"):
            first.score_tokens([1, 2, 3])
        return begun()

    second._fetch_checksums = watched
    second.push(get_push_weights(policy))
    assert [version.endswith("-unfinished") for version in versions] == [True, True]
    with pytest.raises(ServerLostError, match="computed with other weights"):
        first.score_tokens([1, 2, 3])
    second.score_tokens([1, 2, 3])


def test_interrupted_push_does_not_block_the_next(policy, server, url):
    client, load = SGLangClient(url, 10.0), server.load

    def broken(weights):
        load(weights[:3])
        raise RuntimeError

    server.load = broken
    client.load_model(serialize_model(policy))
    with pytest.raises(ServerLostError, match="HTTP 500"):
        client.push(get_push_weights(policy))
    assert server.is_updating
    assert server.version.endswith("-unfinished")
    server.load = load
    client.push(get_push_weights(policy))
    assert torch.equal(server.model.lm_head.weight, policy.model.lm_head.weight)
    assert (server.is_updating, server.version) == (False, client.version)


def test_concurrent_pushes_of_two_runs_raise_an_error(policy, server, url):
    clients, load = [SGLangClient(url, 10.0), SGLangClient(url, 10.0)], server.load
    for client in clients:
        client.load_model(serialize_model(policy))

    def meanwhile(weights):
        server.load = load
        server.lock.release()
        clients[1].push(get_push_weights(policy))
        server.lock.acquire()
        server.is_updating = True
        load(weights)

    server.load = meanwhile
    with pytest.raises(ServerLostError, match="another run has pushed weights in between"):
        clients[0].push(get_push_weights(policy))
    clients[1].score_tokens([1, 2, 3])


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ([[-0.5, 10**9, None]], "a token that is not a whole number"),
        ([[0.5, 3, None]], "a log-prob that is not a number from -100 to 0"),
        ([["x", 3, None]], "log-probs that are not numbers"),
        ([[-0.5, 3, None]], "a row that stops early without an end token"),
        ([], "a row of 0 tokens"),
        (None, "no list of log-probs"),
    ],
)
def test_malformed_rows_are_refused(told, says, policy, server, url):
    client = SGLangClient(url, 10.0)
    client.load_model(serialize_model(policy))
    client.push(get_push_weights(policy))
    generate = server.generate

    def lying(request):
        answer = generate(request)
        answer["meta_info"]["output_token_logprobs"] = told
        return answer

    server.generate = lying
    with pytest.raises(ServerLostError, match=says):
        take_answer(client, [SampleRequest(0, [1, 2], 4, 1.0, 5)])


def take_answer(client, rows):
    while not (answers := client.step(rows)):
        rows = []
    return answers


# ---------------------------------------------------------------- servers that die, hang or are missing


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_or_hung_server_hands_its_rows_to_the_other(blow, policy, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(describe(policy)))
    pair = [Process(PROCESS, "PORT", str(tmp_path / "config.json"), "float32") for _ in range(2)]
    try:
        for one in pair:
            until_it_answers(one.url)
        sampler, prompts = synced(policy, *(one.url for one in pair), timeout=3.0), CountDigits().sample(0, 8)
        right = tokens_of(sampler.generate(prompts, SAMPLING))
        struck = threading.Timer(0.2, partial(pair[0].process.send_signal, blow))
        struck.start()
        groups = sampler.generate(prompts, SAMPLING)
        struck.join()
        assert tokens_of(groups) == right
        assert gap_of(policy, groups) < 1e-4
        assert "go to the others" in capsys.readouterr().out
        if blow == signal.SIGKILL:
            pair[0].kill()
            pair[0].process = pair[0].begin(*pair[0].words)
            until_it_answers(pair[0].url)
        else:
            pair[0].process.send_signal(signal.SIGCONT)
        for _ in range(60):
            assert tokens_of(sampler.generate(prompts, SAMPLING)) == right
            if all(server.is_up for server in sampler.engine.servers):
                break
        assert "is back with the current weights" in capsys.readouterr().out
    finally:
        for one in pair:
            one.kill()


def until_it_answers(url):
    for _ in range(600):
        try:
            return SGLangClient(url, 5.0).get_state()
        except ServerLostError:
            time.sleep(0.1)
    raise AssertionError


def test_unreachable_server_raises_user_error(url):
    with pytest.raises(UserError, match=r"cannot be reached.*python -m sglang\.launch_server"):
        check_servers(["http://127.0.0.1:1"], 5.0, SGLangClient)
    check_servers([url], 5.0, SGLangClient)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), '"sglang" needs urls'),
        (("--sampler.urls", "http://a", "--sampler.adapter", "request"), 'is for name = "vllm", not "sglang"'),
        (("--sampler.urls", "http://a", "--sampler.top_p", "0.9"), 'sampler.name = "sglang" does not report'),
    ],
)
def test_incompatible_settings_raise_user_error(words, says):
    with pytest.raises(UserError) as raised:
        check_sampler(config.load_config(None, ["--sampler.name", "sglang", *words]))
    assert says in str(raised.value)


def test_correction_defaults_to_token():
    words = ["--sampler.name", "sglang", "--sampler.urls", "http://a"]
    assert config.load_config(None, words).algorithm.correction == "token"
    assert config.load_config(None, [*words, "--algorithm.correction", "none"]).algorithm.correction == "none"


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_run_trains_with_sglang(ahead, recipe, model_dir, tmp_path):
    described = json.loads((model_dir / "config.json").read_text())
    with served(Server(described)) as url:
        words = ["--sampler.name", "sglang", "--sampler.urls", url, "--sampler.ahead", ahead]
        assert train(recipe, "--run", tmp_path / "run", *words) == 0
    steps = [record for record in records(tmp_path / "run" / "metrics.jsonl") if "loss" in record]
    assert steps
    assert all(record["sampler/gap_max"] < 1e-3 for record in steps if not ahead)

"""Adapters on sampler servers: the base is pushed once, and again to a server that has lost it."""

from __future__ import annotations

import pytest
import torch

from conftest import CountDigits, character_tokenizer
from pellucid.policy.load import add_adapter
from pellucid.policy.policy import Policy
from pellucid.rollout import vllm_client
from pellucid.rollout.vllm import (
    AdapterRefusedError,
    VLLMSampler,
    copy_adapter_weights,
    get_adapter_shape,
    get_base_weights,
)
from pellucid.rollout.vllm_client import SamplerClient, ServerLostError, ServerPool, serialize_model
from pellucid.serve.vllm_server import EngineHost
from pellucid.types import Sampling, UserError
from sampler_process import Beside, gap_of, served, tiny_policy

SAMPLING = Sampling(4, max_tokens=24, seed="0/0")
PROMPTS = CountDigits().sample(0, 4)


class Refuses(Beside):
    def __init__(self, model):
        if model.adapter:
            raise AdapterRefusedError("vLLM has no adapter on it")
        super().__init__(model)


@pytest.fixture
def policy():
    model = tiny_policy().model
    policy = Policy(model, character_tokenizer(), adapter=add_adapter(model, 3, 7.0))
    step(policy)
    return policy


@pytest.fixture
def held():
    return [EngineHost(Beside), EngineHost(Beside)]


@pytest.fixture
def urls(held):
    with served(held[0]) as first, served(held[1]) as second:
        yield first, second


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(vllm_client, "RETRY_SECONDS", 0.1)


def step(policy, by=0.05):
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).sign(), alpha=by)


def synced(policy, urls, ahead=False):
    sampler = VLLMSampler(engine=ServerPool(urls, 10.0, ahead), adapter="request")
    sampler.sync(policy, 3)
    return sampler


def test_base_is_pushed_once_and_then_only_the_adapter(policy, urls, held):
    sampler = synced(policy, urls)
    for version in (4, 5):
        before = sampler.generate(PROMPTS, SAMPLING)
        step(policy)
        assert gap_of(policy, before) > 0.1
        sampler.sync(policy, version)
        assert gap_of(policy, sampler.generate(PROMPTS, SAMPLING)) < 1e-4
    assert [one.engine.came for one in held] == [[True, False, False]] * 2


@pytest.mark.slow
def test_restarted_server_gets_the_base_and_the_current_adapter(policy, urls, held):
    sampler = synced(policy, urls)
    step(policy)
    sampler.sync(policy, 4)
    held[1].model_digest = held[1].version = ""  # the server makes a new engine
    for version in (4, 5):
        groups = sampler.generate(PROMPTS, SAMPLING)
        assert {c.version for group in groups for c in group.completions} == {version}
        assert gap_of(policy, groups) < 1e-4
        step(policy)
        sampler.sync(policy, version + 1)
    came = held[1].engine.came
    assert came[0] and not came[-1], "on a busy machine it may take two pushes to bring it back"
    assert held[0].engine.came == [True, False, False, False]


@pytest.mark.slow
def test_returning_server_gets_the_adapter_that_the_others_sample_with(policy, urls, held):
    sampler = synced(policy, urls, ahead=True)
    right = sampler.generate(PROMPTS, SAMPLING)
    step(policy)
    held[1].version = ""
    assert sampler.generate(PROMPTS, SAMPLING) == right
    assert held[1].engine.came == [True, True]
    sampler.close()


@pytest.mark.slow
def test_adapter_is_refused_on_other_base_weights(policy, urls, held):
    sampler = synced(policy, urls)
    theirs = SamplerClient(urls[0], 10.0)  # of another trainer
    theirs.load_model(serialize_model(policy, get_adapter_shape(policy)))
    theirs.push(get_base_weights(policy) | copy_adapter_weights(policy))
    assert sampler.engine
    with pytest.raises(ServerLostError, match=r"409.*other weights"):
        sampler.engine.servers[0].client.push(copy_adapter_weights(policy))
    step(policy)
    sampler.sync(policy, 4)
    assert gap_of(policy, sampler.generate(PROMPTS, SAMPLING)) < 1e-4
    assert [one.engine.came for one in held] == [[True, True, True], [True, False]]


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["push", "one layer"])
def test_incomplete_push_of_an_adapter_is_detected(policy, urls, held, left_out):
    sampler, engine = synced(policy, urls), held[1].engine
    whole, before = engine.push, dict(engine.adapter)

    def push(weights):
        kept = {name: x for name, x in before.items() if left_out == "push" or ".layers.1.mlp.up_proj" in name}
        whole(weights | kept)

    engine.push = push
    step(policy, 1e-7)
    with pytest.raises(UserError, match=r"old weights: .*lora_") as raised:
        sampler.sync(policy, 4)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_all_servers_get_merged_weights_if_one_refuses_the_adapter(policy, urls, held, capsys):
    held[1].make_engine = Refuses
    sampler = synced(policy, urls)
    said = '! sampler.adapter = "merged" is used instead of "request" (vLLM has no adapter on it)\n'
    assert capsys.readouterr().out == said
    step(policy)
    sampler.sync(policy, 4)
    assert gap_of(policy, sampler.generate(PROMPTS, SAMPLING)) < 1e-4
    assert [one.engine.form for one in held] == [None, None]
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_returning_server_that_refuses_the_adapter_is_left_out(policy, urls, held, capsys):
    sampler = synced(policy, urls)
    held[1].make_engine, held[1].model_digest, held[1].version = Refuses, "", ""
    for version in (4, 5):
        assert gap_of(policy, sampler.generate(PROMPTS, SAMPLING)) < 1e-4
        step(policy)
        sampler.sync(policy, version)
    assert f"! {urls[1]}: vLLM has no adapter on it" in capsys.readouterr().out
    assert sampler.engine
    assert [server.is_up for server in sampler.engine.servers] == [True, False]
    assert sampler.adapter == "request"

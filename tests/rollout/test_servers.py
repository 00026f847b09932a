"""`pellucid sampler` with vLLM in separate processes: two servers sample the same tokens as one engine."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch

from conftest import CountDigits, character_tokenizer
from pellucid.environments.pool import InProcessEnvironments
from pellucid.environments.spec import EnvironmentSpec
from pellucid.policy.load import add_adapter
from pellucid.policy.policy import Policy
from pellucid.rollout import vllm_client
from pellucid.rollout.vllm import VLLMSampler
from pellucid.rollout.vllm_client import ServerPool
from pellucid.types import Sampling
from sampler_process import gap_of, tiny_policy, two
from worlds import asked

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

SAMPLING = Sampling(4, max_tokens=24, seed="0/0")
WORDS = ["-m", "pellucid", "sampler", "--port", "PORT", "--cache-gb", "0.1", "--rows", "16"]


def started(*words):
    return subprocess.Popen([sys.executable, *words])


@pytest.fixture(scope="module")
def pair():
    with two(*WORDS, begin=started) as both:
        yield both


def synced(policy, pair, timeout=120.0, world=None):
    sampler = VLLMSampler(engine=ServerPool([one.url for one in pair], timeout), environments=world)
    sampler.sync(policy, 3)
    return sampler


def tokens_of(groups):
    return [c.token_ids for group in groups for c in group.completions]


def step(policy, by):
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).sign(), alpha=by)


def test_two_servers_sample_like_one_engine_after_every_push(pair):
    policy, prompts = tiny_policy(), CountDigits().sample(0, 6)
    sampler, here = synced(policy, pair), VLLMSampler(rows=16, cache_gb=0.1)
    for version, by in enumerate([0.0, 1e-7, 0.05]):
        step(policy, by)
        here.sync(policy, version)
        sampler.sync(policy, version)
        groups = sampler.generate(prompts, SAMPLING)
        assert tokens_of(groups) == tokens_of(here.generate(prompts, SAMPLING))
        assert gap_of(policy, groups) < 1e-4
    sampler = synced(policy, pair, world=InProcessEnvironments(EnvironmentSpec("worlds:Parrot")))
    held = sampler.generate(asked(), Sampling(4, max_tokens=80, turns=5, turn_tokens=9, seed="0/0"))
    assert max(len(c.given_spans) for group in held for c in group.completions) >= 2
    assert gap_of(policy, held) < 1e-4


def test_adapter_pushed_alone_reaches_both_servers(pair):
    model, prompts = tiny_policy().model, CountDigits().sample(0, 6)
    policy = Policy(model, character_tokenizer(), adapter=add_adapter(model, 3, 7.0))
    sampler = VLLMSampler(engine=ServerPool([one.url for one in pair]), adapter="request")
    for version, by in enumerate([0.0, 1e-7, 0.05]):
        with torch.no_grad():
            for p in policy.trainable().values():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(version)).sign(), alpha=by)
        sampler.sync(policy, version)
        assert gap_of(policy, sampler.generate(prompts, SAMPLING)) < 1e-4
    assert sampler.adapter == "request"
    assert all(server.is_up for server in sampler.engine.servers)


def test_stopped_or_killed_server_hands_over_its_rows_and_comes_back(pair, monkeypatch, capsys):
    monkeypatch.setattr(vllm_client, "RETRY_SECONDS", 0.1)
    policy, prompts = tiny_policy(), CountDigits().sample(0, 12)
    right = tokens_of(synced(policy, pair).generate(prompts, SAMPLING))
    sampler = synced(policy, pair)
    for what in (signal.SIGSTOP, signal.SIGKILL):
        for server in sampler.engine.servers:
            server.client.timeout = 5.0
        took = sampler.engine.step

        def stopped(what=what, took=took):
            if said := took():
                sampler.engine.step = took
                pair[0].process.send_signal(what)
            return said

        sampler.engine.step = stopped
        assert tokens_of(sampler.generate(prompts, SAMPLING)) == right
        if what == signal.SIGSTOP:
            pair[0].process.send_signal(signal.SIGCONT)
        else:
            pair[0].kill()
            pair[0].start()
        for server in sampler.engine.servers:
            server.client.timeout = 120.0
        for _ in range(300):
            assert tokens_of(sampler.generate(prompts, SAMPLING)) == right
            if all(server.is_up for server in sampler.engine.servers):
                break
        assert all(server.is_up for server in sampler.engine.servers)
    assert capsys.readouterr().out.count("is back with the current weights") == 2

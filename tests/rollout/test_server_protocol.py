"""Sampling on servers, here with a plain engine: each row is sampled once, from current weights, despite failures."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

import sampler_process
from conftest import CountDigits
from pellucid.environments.pool import InProcessEnvironments
from pellucid.environments.spec import EnvironmentSpec
from pellucid.rollout import vllm_client
from pellucid.rollout.vllm import VLLMSampler, get_push_weights
from pellucid.rollout.vllm_client import (
    SamplerClient,
    SampleRequest,
    ServerLostError,
    ServerPool,
    serialize_model,
)
from pellucid.serve.vllm_server import EngineHost, ModelDescription
from pellucid.types import Sampling, UserError
from runs import same_run, train
from sampler_process import Plain, gap_of, served, tiny_policy, two
from worlds import asked

SAMPLING = Sampling(4, max_tokens=24, seed="0/0")


@pytest.fixture
def policy():
    return tiny_policy()


@pytest.fixture
def held():
    return [EngineHost(Plain), EngineHost(Plain)]


@pytest.fixture
def urls(held):
    with served(held[0]) as first, served(held[1]) as second:
        yield first, second


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(vllm_client, "RETRY_SECONDS", 0.1)


def synced(policy, urls, version=3, timeout=10.0, world=None, ahead=False):
    sampler = VLLMSampler(engine=ServerPool(urls, timeout, ahead), environments=world)
    sampler.sync(policy, version)
    return sampler


def alone(policy, prompts, sampling=SAMPLING, version=3, world=None):
    """Return the groups that one engine samples without a server."""
    engine = Plain(ModelDescription.model_validate_json(serialize_model(policy)))
    engine.push(get_push_weights(policy))
    return VLLMSampler(policy=policy, version=version, engine=engine, environments=world).generate(prompts, sampling)


def step(policy, by=0.05):
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).sign(), alpha=by)


# ---------------------------------------------------------------- rows


def test_servers_sample_like_one_engine_and_keep_groups_together(policy, urls, held):
    prompts = CountDigits().sample(0, 6)
    sampler = synced(policy, urls)
    groups = sampler.generate(prompts, SAMPLING)
    assert groups == alone(policy, prompts)
    assert gap_of(policy, groups) < 1e-4
    of = [{policy.encode(prompt) for prompt in prompts} & set(one.engine.seen) for one in held]
    assert [len(seen) for seen in of] == [3, 3]
    assert not of[0] & of[1]
    assert sampler.generate(prompts, SAMPLING) == groups
    assert synced(policy, urls[:1]).generate(prompts, SAMPLING) == groups


@pytest.mark.slow
def test_answers_that_are_read_late_all_arrive(policy, urls):
    sampler, prompts = synced(policy, urls), CountDigits().sample(0, 4)
    later(sampler, lambda: time.sleep(1.0), behind=1)  # all rows have finished by then
    assert sampler.generate(prompts, SAMPLING) == alone(policy, prompts)


@pytest.mark.slow
def test_every_push_reaches_every_server(policy, urls, held):
    sampler, prompts = synced(policy, urls), CountDigits().sample(0, 4)
    step(policy)
    assert gap_of(policy, sampler.generate(prompts, SAMPLING)) > 0.1
    sampler.sync(policy, 4)
    groups = sampler.generate(prompts, SAMPLING)
    assert gap_of(policy, groups) < 1e-4
    assert {c.version for group in groups for c in group.completions} == {4}
    assert [one.engine.pushed for one in held] == [2, 2]


@pytest.mark.slow
def test_weights_are_sent_in_parts(policy, urls, monkeypatch):
    monkeypatch.setattr(vllm_client, "MAX_PART_BYTES", 4000)
    assert len(list(vllm_client.split_weights(get_push_weights(policy)))) > 5
    assert gap_of(policy, synced(policy, urls).generate(CountDigits().sample(0, 2), SAMPLING)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("patient", [True, False])
def test_conversations_stay_on_the_server_that_has_their_cache(policy, urls, held, patient):
    sampling = Sampling(4, max_tokens=80, turns=5, turn_tokens=9, seed="0/0")
    sampler = synced(policy, urls, world=InProcessEnvironments(EnvironmentSpec("worlds:Parrot")))
    sampler.deterministic = patient
    groups = sampler.generate(asked(), sampling)
    assert max(len(c.given_spans) for group in groups for c in group.completions) >= 2
    assert gap_of(policy, groups) < 1e-4
    for one, other in (held, held[::-1]):  # the server of a turn has seen all earlier turns
        turns = [ids for ids in one.engine.seen if sum(ids[: len(seen)] == seen for seen in one.engine.seen) > 1]
        assert turns
        assert not {ids[:12] for ids in turns} & {ids[:12] for ids in other.engine.seen}


# ---------------------------------------------------------------- versions


def test_other_weights_are_refused_by_server_and_trainer(policy, urls, held):
    sampler = synced(policy, urls)
    first = sampler.engine.servers[0].client
    theirs = SamplerClient(urls[0], 10.0)  # of another trainer
    theirs.load_model(serialize_model(policy))
    theirs.push(get_push_weights(policy))
    for late in (lambda: first.step([SampleRequest(0, [1, 2], 3, 1.0, 0)]), lambda: first.score_tokens([1, 2])):
        with pytest.raises(ServerLostError, match=r"409.*other weights"):
            late()
    held[0]._check_version = lambda version: None
    with pytest.raises(ServerLostError, match="computed with other weights"):
        first.step([SampleRequest(0, [1, 2], 3, 1.0, 0)])


@pytest.mark.slow
def test_server_that_lost_its_weights_gets_them_before_rows(policy, urls, held, capsys):
    sampler, prompts = synced(policy, urls), CountDigits().sample(0, 4)
    held[1].version = ""
    assert sampler.generate(prompts, SAMPLING) == alone(policy, prompts)
    said = capsys.readouterr().out.splitlines()
    assert [urls[1] in line for line in said] == [True] * len(said)
    assert held[1].engine.pushed == 2


@pytest.mark.slow
def test_server_back_during_training_gets_the_weights_of_the_others(policy, urls, held):
    prompts = CountDigits().sample(0, 4)
    sampler, right = synced(policy, urls, ahead=True), alone(policy, prompts)
    for by in (0.05, 1e-7):
        step(policy, by)
        held[1].version = ""
        assert sampler.generate(prompts, SAMPLING) == right
    assert held[1].engine.pushed == 3
    sampler.sync(policy, 4)
    assert sampler.generate(prompts, SAMPLING) == alone(policy, prompts, version=4)
    sampler.close()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["push", "one layer"])
def test_missing_or_incomplete_push_is_detected(policy, urls, held, what):
    sampler, whole = synced(policy, urls), held[1].engine.push
    held[1].engine.push = lambda weights: (
        what == "push"
        or whole(
            dict(held[1].engine.model.named_parameters()) | {n: w for n, w in weights.items() if ".layers.0." not in n}
        )
    )
    step(policy, 1e-7)
    with pytest.raises(UserError, match="old weights: model") as raised:
        sampler.sync(policy, 4)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_server_back_with_wrong_weights_is_detected_during_a_rollout(policy, urls, held):
    sampler = synced(policy, urls)
    held[1].version = ""
    held[1].make_engine = Skips
    held[1].model_digest = ""
    with pytest.raises(UserError, match="old weights"):
        sampler.generate(CountDigits().sample(0, 40), SAMPLING)
    assert not sampler.engine.unfinished


@pytest.mark.slow
def test_slowly_made_engine_is_made_once_and_gets_the_next_push(policy, urls, held):
    sampler, prompts, made = synced(policy, urls), CountDigits().sample(0, 2), []
    held[1].version = held[1].model_digest = ""

    def slowly(model):
        made.append(model)
        time.sleep(1.0)
        return Plain(model)

    held[1].make_engine = slowly
    for _ in range(5):  # each rollout ends before the engine is made
        sampler.generate(prompts, Sampling(4, max_tokens=1, seed="0/0"))
    time.sleep(2.0)
    sampler.generate(CountDigits().sample(0, 12), SAMPLING)
    sampler.sync(policy, 4)
    assert all(server.is_up for server in sampler.engine.servers)
    assert sampler.generate(prompts, SAMPLING) == alone(policy, prompts, version=4)
    assert len(made) == 1


class Small(Plain):
    max_length = 30


class Skips(Plain):
    def push(self, weights):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hangs", "forgets"])
def test_stalled_engine_hands_its_rows_to_the_other(policy, urls, held, how, capsys):
    """The server still answers, but its answer never changes."""
    sampler, prompts = synced(policy, urls, timeout=1.0), CountDigits().sample(0, 4)
    right, let_go, engine = alone(policy, prompts), threading.Event(), held[1].engine
    if how == "hangs":
        engine.step = lambda: [] if let_go.wait() else None
    else:
        engine.add_request = lambda *row: None
    assert sampler.generate(prompts, SAMPLING) == right
    says = {"hangs": "no answer in 1 s", "forgets": "its engine has made no progress for 1 s"}[how]
    assert f"! {urls[1]}: {says}: its 8 rows go to the others" in capsys.readouterr().out
    let_go.set()
    engine.__dict__.pop("step", None), engine.__dict__.pop("add_request", None)
    until_all_are_back(sampler, prompts, right)


@pytest.mark.slow
def test_returning_server_with_too_little_room_is_left_out(policy, urls, held, capsys):
    sampler, prompts = synced(policy, urls), CountDigits().sample(0, 4)
    right = alone(policy, prompts)
    assert sampler.generate(prompts, SAMPLING) == right
    held[1].version = held[1].model_digest = ""
    held[1].make_engine = Small
    said = ""
    while "supports rows" not in said:
        assert sampler.generate(prompts, SAMPLING) == right
        said += capsys.readouterr().out
    for _ in range(3):
        sampler.sync(policy, 3)
        assert sampler.generate(prompts, SAMPLING) == right
    said += capsys.readouterr().out
    assert said.count("it supports rows of 30 tokens, but this run needs 512: start it with a larger --cache-gb") == 1
    assert held[1].engine.pushed == 0, "weights need not be brought to it"
    assert [server.is_up for server in sampler.engine.servers] == [True, False]
    with pytest.raises(UserError, match="holds prompts of 6"):
        synced(policy, urls).generate(CountDigits().sample(0, 1), Sampling(4, max_tokens=24, seed="0/0"))


# ---------------------------------------------------------------- authorization


@pytest.mark.slow
def test_requests_without_the_secret_are_refused(policy, monkeypatch):
    with served(EngineHost(Plain), "open-sesame") as url:
        with pytest.raises(UserError, match=r"401.*token"):
            synced(policy, [url])
        monkeypatch.setenv("PELLUCID_SAMPLER_TOKEN", "open-sesame")
        assert len(synced(policy, [url]).generate(CountDigits().sample(0, 2), SAMPLING)) == 2
        monkeypatch.setenv("PELLUCID_SAMPLER_TOKEN", "two words")
        with pytest.raises(UserError, match="without spaces"):
            synced(policy, [url])


def test_model_that_the_engine_cannot_run_ends_the_run(policy):
    def refused(model):
        raise UserError("vLLM does not run this model")

    with served(EngineHost(refused)) as url, pytest.raises(UserError, match=r"422.*does not run this model"):
        synced(policy, [url])


# ---------------------------------------------------------------- servers that fail


@pytest.fixture
def pair():
    words = sampler_process.__file__, "PORT", str(torch.get_num_threads())
    with two(*words) as both:
        yield both


def later(sampler, what, behind=3):
    """Call `what` in the middle of a rollout, as soon as `behind` answers have arrived."""
    took, count = sampler.engine.step, []

    def step():
        said = took()
        count.extend(said)
        if len(count) >= behind:
            sampler.engine.step = took
            what()
        return said

    sampler.engine.step = step


def counted(sampler, groups, prompts):
    """Check that every (prompt, g) was sampled once, and that no row is left over."""
    assert [group.prompt for group in groups] == list(prompts)
    assert [len(group.completions) for group in groups] == [SAMPLING.n] * len(prompts)
    assert not sampler.engine.unfinished
    assert not any(server.pending_count for server in sampler.engine.servers)


def until_all_are_back(sampler, prompts, right):
    for _ in range(30):
        groups = sampler.generate(prompts, SAMPLING)
        counted(sampler, groups, prompts)
        assert groups == right
        if all(server.is_up for server in sampler.engine.servers):
            return
    raise AssertionError


@pytest.mark.slow
def test_killed_server_loses_no_rows(policy, pair, capsys):
    sampler, prompts = synced(policy, [one.url for one in pair]), CountDigits().sample(0, 10)
    right = alone(policy, prompts)
    later(sampler, pair[0].kill)
    groups = sampler.generate(prompts, SAMPLING)
    counted(sampler, groups, prompts)
    assert groups == right
    [said] = capsys.readouterr().out.splitlines()
    assert f"{pair[0].url}: " in said
    assert "rows go to the others" in said
    step(policy)
    sampler.sync(policy, 4)  # only the other server gets the weights
    pair[0].start()  # it has no model and no weights
    until_all_are_back(sampler, prompts, alone(policy, prompts, version=4))
    assert "is back with the current weights" in capsys.readouterr().out


@pytest.mark.slow
def test_stopped_and_continued_server_answers_nothing_twice(policy, pair, capsys):
    sampler = synced(policy, [one.url for one in pair], timeout=1.0)
    prompts, right = CountDigits().sample(0, 10), alone(policy, CountDigits().sample(0, 10))
    later(sampler, lambda: pair[0].process.send_signal(signal.SIGSTOP))
    groups = sampler.generate(prompts, SAMPLING)
    counted(sampler, groups, prompts)
    assert groups == right
    assert "no answer in 1 s" in capsys.readouterr().out
    step(policy)
    sampler.sync(policy, 4)
    pair[0].process.send_signal(signal.SIGCONT)  # it still has all earlier requests
    until_all_are_back(sampler, prompts, alone(policy, prompts, version=4))


@pytest.mark.slow
def test_sampling_waits_with_a_message_if_no_server_is_left(policy, pair, capsys, monkeypatch):
    monkeypatch.setattr(vllm_client, "REMINDER_SECONDS", 0.5)
    sampler, prompts = synced(policy, [pair[0].url]), CountDigits().sample(0, 6)
    restarted = threading.Timer(2.0, pair[0].start)

    def killed():
        pair[0].kill()
        restarted.start()

    later(sampler, killed)
    groups = sampler.generate(prompts, SAMPLING)
    restarted.join()
    counted(sampler, groups, prompts)
    assert groups == alone(policy, prompts)
    waits = [line for line in capsys.readouterr().out.splitlines() if "no sampler server answers" in line]
    assert len(waits) >= 2
    assert "pellucid sampler --port" in waits[0]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_run_with_failing_servers_equals_an_undisturbed_run(ahead, pair, recipe, tmp_path, monkeypatch, capsys):
    settings = ["--sampler.name", "vllm", "--sampler.ahead", ahead, "--sampler.timeout", 1, "--sampler.urls"]
    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    assert train(recipe, "--run", whole, *settings, pair[1].url) == 0

    blows = {
        2: pair[0].kill,
        3: pair[0].start,
        5: lambda: pair[1].process.send_signal(signal.SIGSTOP),
        6: lambda: pair[1].process.send_signal(signal.SIGCONT),
    }
    generate = VLLMSampler.generate

    def struck(sampler, prompts, sampling):
        """Generate, and strike in the middle of each rollout that `blows` names."""
        if sampling.n == 4 and (blow := blows.pop(int(sampling.seed.partition("/")[2] or 0) + 1, None)):
            later(sampler, blow)
        return generate(sampler, prompts, sampling)

    monkeypatch.setattr(VLLMSampler, "generate", struck)
    capsys.readouterr()
    assert train(recipe, "--run", disturbed, *settings, *(one.url for one in pair)) == 0
    assert not blows
    said = capsys.readouterr().out
    assert f"! {pair[0].url}: " in said
    assert f"! {pair[1].url}: no answer in 1 s" in said
    assert f"! {pair[0].url} is back" in said
    same_run(whole, disturbed)

"""Tests for `async_grpo.train_async`, which samples one step ahead, against the loop that does not."""

from __future__ import annotations

import json
import math
import threading
import time
from copy import deepcopy
from dataclasses import replace
from itertools import islice

import pytest
import torch

from conftest import CountDigits, OneProcessRuntime, make_policy
from pellucid.algorithm import async_grpo, grpo
from pellucid.algorithm.grpo import TrainingState
from pellucid.algorithm.settings import GRPOConfig
from pellucid.rollout.native import NativeSampler
from pellucid.training.checkpoint import AHEAD_GROUPS_TYPE
from pellucid.types import DataError, Reward, Sampling

CFG = GRPOConfig(steps=4, group_size=4, correction="token")
SAMPLING = Sampling(max_tokens=6)


class Apart(NativeSampler):
    """Keeps its own copy of the weights, as an inference engine does."""

    lag = 0

    def sync(self, policy, version):
        self.told = [*getattr(self, "told", []), (deepcopy(policy), version)]
        super().sync(*self.told[max(0, len(self.told) - 1 - self.lag)])


class Late(Apart):
    """Samples with the weights from one sync earlier, in the loop that samples within the step."""

    lag = 1


def run(loop, sampler, policy, cfg=CFG, state=None, steps=None, task=None):
    runtime = OneProcessRuntime(policy, lr=0.5)
    steps_taken = loop(task or CountDigits(), sampler, policy, runtime, cfg, state=state, sampling=SAMPLING)
    return list(islice(steps_taken, steps))


def same_weights(one, other):
    mine, theirs = one.weights(), other.weights()
    return all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("settings", [{}, {"max_staleness": 2}, {"epochs": 2}], ids=str)
def test_async_training_equals_sync_training_with_a_late_sampler(settings):
    cfg = GRPOConfig(steps=4, group_size=4, correction="token", **settings)
    here, there, without = make_policy(), make_policy(), make_policy()
    early = run(async_grpo.train_async, Apart(), here, cfg)
    late = run(grpo.train, Late(), there, cfg)
    run(grpo.train, Apart(), without, cfg)
    assert [{c.version for g in result.groups for c in g.completions} for result in early] == [{0}, {0}, {1}, {2}]
    assert [result.groups for result in early] == [result.groups for result in late]
    assert same_weights(here, there)
    assert not same_weights(here, without)
    shared = {"loss", "grad_norm", "entropy", "sampler/gap_mean", "sampler/corrected"}
    for one, other in zip(early, late, strict=True):
        assert {name: one.metrics[name] for name in shared} == {name: other.metrics[name] for name in shared}


def test_data_error_is_raised_after_the_current_step_is_complete():
    """The error occurs while the previous step trains; that step still completes."""

    class Refuses(Apart):
        def generate(self, prompts, sampling):
            if sampling.seed == f"{CFG.seed}/2":
                raise DataError("too long")
            return super().generate(prompts, sampling)

    policy, state, other = make_policy(), TrainingState(), make_policy()
    steps = async_grpo.train_async(
        CountDigits(), Refuses(), policy, OneProcessRuntime(policy, lr=0.5), CFG, state=state, sampling=SAMPLING
    )
    assert [next(steps).step, next(steps).step] == [1, 2]
    with pytest.raises(DataError, match="too long"):
        next(steps)
    assert (state.step, state.next_rollouts) == (2, None)
    run(async_grpo.train_async, Apart(), other, steps=2)
    assert same_weights(policy, other)


def test_next_rollouts_are_sampled_while_the_current_step_trains():
    trained, drawn = threading.Event(), []

    class Watched(Apart):
        def generate(self, prompts, sampling):
            if drawn:
                assert trained.wait(30), "nothing was trained meanwhile"
                trained.clear()
            drawn.append(sampling.seed)
            return super().generate(prompts, sampling)

    class Watching(OneProcessRuntime):
        def step(self):
            taken = super().step()
            trained.set()
            return taken

    policy = make_policy()
    list(async_grpo.train_async(CountDigits(), Watched(), policy, Watching(policy, 0.5), CFG, sampling=SAMPLING))
    assert drawn == [f"0/{step}" for step in range(4)]


def test_resumed_run_reaches_the_same_weights():
    whole, parted, state = make_policy(), make_policy(), TrainingState()
    run(async_grpo.train_async, Apart(), whole)
    run(async_grpo.train_async, Apart(), parted, state=state, steps=2)
    kept = json.loads(json.dumps(AHEAD_GROUPS_TYPE.dump_python(state.next_rollouts, mode="json")))
    again = TrainingState(step=2, kl_coef=state.kl_coef, next_rollouts=AHEAD_GROUPS_TYPE.validate_python(kept))
    assert list(again.next_rollouts[0]) == list(state.next_rollouts[0])
    rest = run(async_grpo.train_async, Apart(), parted, state=again)
    assert [result.step for result in rest] == [3, 4]
    assert same_weights(whole, parted)
    assert state.next_rollouts is not None
    assert again.next_rollouts is None, "nothing is drawn behind the last step"


class Failing(CountDigits):
    """Fails on the first completion of each group, and has prompt columns that are not finite."""

    def sample(self, step, n):
        return [replace(p, columns={"score": math.nan, "most": [math.inf]}) for p in super().sample(step, n)]

    def reward_all(self, pairs, progress):
        rewards = [super(Failing, self).reward(*pair) for pair in pairs]
        return [Reward(math.nan, {"part": math.nan}, error="no") if i % 4 == 0 else r for i, r in enumerate(rewards)]


def test_failed_rewards_sampled_ahead_survive_a_checkpoint():
    whole, parted, state = make_policy(), make_policy(), TrainingState()
    run(async_grpo.train_async, Apart(), whole, task=Failing())
    run(async_grpo.train_async, Apart(), parted, state=state, steps=2, task=Failing())
    kept = json.loads(json.dumps(AHEAD_GROUPS_TYPE.dump_python(state.next_rollouts, mode="json")))
    again = TrainingState(step=2, kl_coef=state.kl_coef, next_rollouts=AHEAD_GROUPS_TYPE.validate_python(kept))
    first = again.next_rollouts[0][0]
    assert math.isnan(first.rewards[0].value)
    assert math.isnan(first.rewards[0].parts["part"])
    assert math.isnan(first.prompt.columns["score"])
    assert first.prompt.columns["most"] == [math.inf]
    assert repr(list(again.next_rollouts[0])) == repr(list(state.next_rollouts[0])), (
        "NaN equals nothing, so the texts are compared"
    )
    run(async_grpo.train_async, Apart(), parted, state=again, task=Failing())
    assert same_weights(whole, parted)


@pytest.mark.slow
def test_bubble_metrics_report_how_long_each_side_waits():
    """Sampling takes 0.3 s and an update 0.1 s: training waits for two thirds of a step, sampling hardly at all."""

    class Slow(Apart):
        def generate(self, prompts, sampling):
            time.sleep(0.3)
            return super().generate(prompts, sampling)

    class Slowly(OneProcessRuntime):
        def step(self):
            time.sleep(0.1)
            return super().step()

    policy = make_policy()
    taken = list(async_grpo.train_async(CountDigits(), Slow(), policy, Slowly(policy, 0.5), CFG, sampling=SAMPLING))
    for result in taken[1:3]:
        m = result.metrics
        assert m["time/step"] == pytest.approx(sum(m[f"time/{stage}"] for stage in ("generate", "score", "update")))
        assert 0.3 < m["time/bubble_training"] < 0.8
        assert m["time/bubble_sampling"] < 0.5
        assert m["time/drawn"] > 0.3
    assert taken[-1].metrics["time/bubble_sampling"] == 1.0, "nothing is drawn beside the last step"
    assert taken[-1].metrics["time/bubble_training"] < 0.2


def test_other_sampling_errors_abort_the_current_step():
    class Fails(Apart):
        def generate(self, prompts, sampling):
            if sampling.seed == "0/2":
                raise OSError("the engine is gone")
            return super().generate(prompts, sampling)

    policy, state = make_policy(), TrainingState()
    with pytest.raises(OSError, match="the engine is gone"):
        run(async_grpo.train_async, Fails(), policy, state=state)
    assert state.step == 1, "the step in which it was drawn does not count"

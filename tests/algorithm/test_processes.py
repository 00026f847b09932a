"""Test that two processes train like one: the whole loop runs in two threads that exchange what processes exchange.

Real processes with torch and Accelerate are tested in tests/training/test_run.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from threading import Barrier

import pytest
import torch
from test_prefix_loss import Begun

from conftest import CountDigits, OneProcessRuntime, make_policy
from pellucid.algorithm.grpo import TrainingState, train
from pellucid.algorithm.settings import GRPOConfig
from pellucid.rollout.native import NativeSampler
from pellucid.types import Reward, Sampling

MISSING = object()


class Exchange:
    """Hands the values of two threads to both of them."""

    def __init__(self):
        self.barrier, self.brought = Barrier(2, timeout=120), [None, None]

    def __call__(self, rank, value):
        self.brought[rank] = value
        self.barrier.wait()
        both = list(self.brought)
        self.barrier.wait()
        return both


class OneOfTwo(OneProcessRuntime):
    world_size = 2

    def __init__(self, policy, lr, rank, exchange):
        super().__init__(policy, lr)
        self.rank, self.exchange = rank, exchange

    def shard(self, items):
        return items[self.rank :: 2]

    def gather(self, items):
        ranks = zip_longest(*self.exchange(self.rank, list(items)), fillvalue=MISSING)
        return [item for pair in ranks for item in pair if item is not MISSING]

    def sum(self, x):
        one, other = self.exchange(self.rank, x.clone())
        return one + other

    def step(self):
        for p in self.policy.trainable().values():
            p.grad = self.sum(p.grad)
        return super().step()


@dataclass(frozen=True)
class Watching(CountDigits):
    """Counts the groups it observes. With `dead`, two of the four groups of a step have equal rewards."""

    dead: bool = False

    def reward(self, prompt, completion):
        return Reward(0.5) if self.dead and int(prompt.id[-1]) % 3 == 0 else super().reward(prompt, completion)

    def observe(self, step, groups):
        return {"seen": float(len(groups)), "first": float(len(groups[0].completions[0].token_ids))}

    def state(self):
        return {}

    def load_state(self, state):
        pass


def run(settings, runtime, reference, task):
    policy = runtime.policy
    cfg = GRPOConfig(**{"steps": 3, "group_size": 4, "max_length": 10} | settings)
    state = TrainingState(kl_coef=cfg.kl_coef)
    steps = list(train(task, NativeSampler(), policy, runtime, cfg, reference, state, Sampling(max_tokens=10)))
    return steps, {name: p.detach() for name, p in policy.trainable().items()}, state


def in_two(settings, task):
    exchange = Exchange()
    # Created before the threads start, because threads share torch's generator.
    runtimes = [OneOfTwo(make_policy(dtype=torch.float64), 0.3, rank, exchange) for rank in range(2)]
    references = [reference_of(settings) for _ in range(2)]

    def process(rank):
        try:
            return run(settings, runtimes[rank], references[rank], task)
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(process, range(2)))


def reference_of(settings):
    return make_policy(dtype=torch.float64, seed=3) if settings.get("kl_coef") else None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"aggregate": "sequence", "advantage": "batch", "epochs": 2},
        {"minibatches": 2, "clip_difficulty": 1.0, "clip_difficulty_low": 1.0, "micro_batch": 3},
        {"advantage": "length_grouped", "advantage_difficulty": 1.0, "length_min_cell": 2},
        {"max_rounds": 2},
        {"entropy_share": 0.3, "overlong_filter": True, "group_size": 16},
        {"kl": "k1", "kl_coef": 0.1, "kl_target": 0.05},
        {"kl": "k3", "kl_coef": 0.1, "kl_in": "raw_reward", "overlong_cache": 5},
        {"prefix_coef": 0.5},
        {"max_staleness": 2, "similarity": "diversity"},
        {"correction": "token", "advantage": "gdpo"},
    ],
    ids=lambda settings: " ".join(settings) or "plain",
)
def test_two_processes_take_the_optimizer_steps_of_one(settings):
    task = Begun() if "prefix_coef" in settings else Watching(dead="max_rounds" in settings)
    alone = OneProcessRuntime(make_policy(dtype=torch.float64), 0.3)
    steps, weights, state = run(settings, alone, reference_of(settings), task)
    for theirs, their_weights, their_state in in_two(settings, task):
        for one, two in zip(steps, theirs, strict=True):
            assert [g.prompt for g in two.groups] == [g.prompt for g in one.groups]
            for mine, other in zip(one.groups, two.groups, strict=True):
                assert [c.token_ids for c in other.completions] == [c.token_ids for c in mine.completions]
                assert other.advantages == pytest.approx(mine.advantages, abs=1e-6)
            timeless = [{k: v for k, v in step.metrics.items() if not k.startswith("time/")} for step in (one, two)]
            assert timeless[1] == pytest.approx(timeless[0], rel=1e-5, abs=1e-6)
        assert their_state.kl_coef == pytest.approx(state.kl_coef)
        for name, expected in weights.items():
            torch.testing.assert_close(their_weights[name], expected, rtol=0, atol=1e-6)

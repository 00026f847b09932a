"""GRPO a step ahead: while one step is trained, the rollouts of the next are drawn, from the weights before it.

The loop of grpo.py with the same parts; what is trained on is one step old. `algorithm.correction` weighs its tokens by
pi / pi_sampler, of this step's policy and of the one that drew them (truncated importance sampling). It needs a sampler
with weights of its own, which do not move while the policy's do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from pellucid.algorithm import grpo, kl
from pellucid.algorithm.batch import collate
from pellucid.algorithm.grpo import Policy, Reference, Runtime, StepResult, TrainingState
from pellucid.algorithm.metrics import StageClock
from pellucid.algorithm.settings import GRPOConfig
from pellucid.types import DataError, Group, Sampler, Sampling, Task


def train_async(
    task: Task,
    sampler: Sampler,
    policy: Policy,
    runtime: Runtime,
    cfg: GRPOConfig,
    reference: Reference | None = None,
    state: TrainingState | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
) -> Iterator[StepResult]:
    """Train as grpo.train does, in one process. Between two steps `state.ahead` holds what was drawn for the next."""
    state = state or TrainingState()
    state.kl_coef = cfg.kl_coef if state.kl_coef is None else state.kl_coef
    sampler.sync(policy, state.step)
    with ThreadPoolExecutor(1) as beside:
        for step in range(state.step, cfg.steps):
            clock = StageClock()
            cfg = replace(cfg, kl_coef=state.kl_coef)
            groups, drawn = state.next_rollouts or collect_timed_rollouts(task, sampler, sampling, runtime, step, cfg)
            clock.record_lap("generate")
            more = step + 1 < cfg.steps
            later = (
                beside.submit(collect_timed_rollouts, task, sampler, sampling, runtime, step + 1, cfg) if more else None
            )
            fresh = grpo.add_old_and_reference_logprobs(collate(groups), policy, reference, runtime, cfg)
            advantages, changed = grpo.compute_advantages(groups, fresh, policy, runtime, cfg)
            batch = grpo.attach_advantages(fresh, groups, advantages, runtime, cfg)
            batch = grpo.append_replayed_batches(state, step, batch, cfg)
            clock.record_lap("score")
            metrics = grpo.update_policy(policy, batch, runtime, cfg)
            clock.record_lap("update")
            # A prompt of the next step that cannot be asked is met again there, when this one is whole.
            failed = later is not None and isinstance(later.exception(), DataError)
            state.next_rollouts = later.result() if later and not failed else None
            clock.record_lap("generate")  # what training waits for it
            sampler.sync(policy, step + 1)
            clock.record_lap("update")
            grpo.finish_step(state, step, reference, policy, metrics, cfg)
            metrics |= drawn | changed | kl.compute_kl_cost(*grpo.get_charged_kl(fresh), cfg, runtime.gather)
            metrics |= compute_step_times(clock, state.next_rollouts[1]["time/drawn"] if state.next_rollouts else 0.0)
            yield StepResult(state.step, metrics, grpo.store_group_advantages(groups, advantages))


def collect_timed_rollouts(
    task: Task, sampler: Sampler, sampling: Sampling, runtime: Runtime, step: int, cfg: GRPOConfig
) -> tuple[Sequence[Group], dict[str, float]]:
    """Return the graded groups of a step, and among its metrics the seconds that drawing and grading them took."""
    clock = StageClock()
    groups, drawn = grpo.collect_rollouts(task, sampler, sampling, runtime, step, cfg, clock)
    return groups, drawn | {"time/drawn": clock.get_times()["time/step"]}


def compute_step_times(clock: StageClock, beside: float) -> dict[str, float]:
    """Return the time of each stage, and of a step the shares in which training waits and in which nothing is drawn.

    beside: how many seconds of the step the next one was drawn.
    """
    laps = {"time/reward": 0.0, **clock.get_times()}
    waits = {
        "time/bubble_training": laps["time/generate"],
        "time/bubble_sampling": max(0.0, laps["time/step"] - beside),
    }
    return laps | {name: seconds / laps["time/step"] for name, seconds in waits.items()}

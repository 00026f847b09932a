"""GRPO with rollouts that are generated one step ahead: while a step is trained, the sampler works on the next one.

This is the loop of grpo.py with a different collector. The rollouts of a step are sampled with the weights before the
last update. `algorithm.correction` weighs their tokens by pi / pi_sampler, the policy of this step divided by the one
that sampled (truncated importance sampling). The sampler needs its own copy of the weights, which must not change with
the policy's.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from pellucid.algorithm import grpo
from pellucid.algorithm.grpo import StepResult, TrainingState
from pellucid.algorithm.metrics import StageClock
from pellucid.algorithm.protocols import Policy, Reference, Runtime
from pellucid.algorithm.rollouts import RolloutCollector, Rollouts
from pellucid.algorithm.settings import GRPOConfig
from pellucid.types import DataError, Sampler, Sampling, Task

_SAMPLING_SECONDS = "time/drawn"
"""The name of the metric for the seconds spent on generating and grading the rollouts of a step."""


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
    """Train as `grpo.train` does, with rollouts that are generated one step ahead.

    Between two steps `state.next_rollouts` holds the rollouts of the next one.
    """
    state = state or TrainingState()
    with ThreadPoolExecutor(1) as executor:
        collector = _AheadCollector(task, sampler, sampling, runtime.for_thread(), state, executor)
        yield from grpo.train(task, sampler, policy, runtime, cfg, reference, state, sampling, collector)


@dataclass
class _AheadCollector(RolloutCollector):
    """Generates the rollouts of a step in a thread while the step before is trained."""

    state: TrainingState
    executor: ThreadPoolExecutor
    pending: Future[Rollouts] | None = None

    def collect(self, step: int, cfg: GRPOConfig, clock: StageClock) -> Rollouts:
        """Return the rollouts of this step, and start to generate those of the next step."""
        rollouts = self.state.next_rollouts or self._collect_timed(step, cfg)
        clock.record_lap("generate")
        has_next = step + 1 < cfg.steps
        self.pending = self.executor.submit(self._collect_timed, step + 1, cfg) if has_next else None
        return rollouts

    def sync_sampler(self, policy: Policy, version: int, clock: StageClock) -> None:
        """Wait for the rollouts of the next step, then give the sampler the updated weights."""
        clock.record_lap("update")
        # A DataError in the prompts of the next step is raised again when that step starts, after this one is complete.
        is_usable = self.pending is not None and not isinstance(self.pending.exception(), DataError)
        self.state.next_rollouts = self.pending.result() if self.pending and is_usable else None
        clock.record_lap("generate")  # the time that training waited
        clock.sampling_seconds = self.state.next_rollouts[1][_SAMPLING_SECONDS] if self.state.next_rollouts else 0.0
        super().sync_sampler(policy, version, clock)

    def _collect_timed(self, step: int, cfg: GRPOConfig) -> Rollouts:
        clock = StageClock()
        groups, metrics = super().collect(step, cfg, clock)
        return groups, metrics | {_SAMPLING_SECONDS: clock.get_times()["time/step"]}

"""A curriculum: questions ordered by difficulty, which is measured during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from random import Random
from statistics import fmean
from typing import Any, Literal

from pellucid.tasks.prefixed import Prefixed
from pellucid.tasks.wrappers import TaskWrapper, list_task_layers
from pellucid.types import Group, Prompt, UserError, get_equal_rewards, with_split


@dataclass
class _CurriculumState:
    """The state of a curriculum, saved in checkpoints as JSON. Questions are given by their index in the pool."""

    step: int = 0
    """The number of the next step."""
    epoch: int = 0
    left: list[int] = field(default_factory=list)
    """The questions that are still to be asked in this epoch, in order."""
    accuracy: dict[int, float] = field(default_factory=dict)
    """For each question, the running estimate of how often it is answered rightly."""
    dead_since: dict[int, int] = field(default_factory=dict)
    """For each question whose latest group was dead (all rewards equal), the step of that group."""


@dataclass(frozen=True)
class Curriculum(TaskWrapper):
    """A pool of another task's questions. The first epoch measures how often each is answered rightly, and later epochs
    go from easy to hard.

    order = "running" (ours): estimates are updated whenever a question is asked; prompts are drawn from a window of the
    order, since neighbors in difficulty are alike; questions whose group was dead (all rewards equal) when last asked
    rest for some steps, since they teach nothing.
    order = "described" (of the study bench, see docs/explanation/five-systems.md): questions are sorted once by the
    first epoch's accuracy and keep that order, dead questions included.

    Example: Curriculum(Arithmetic(digits=2), pool=480)
    """

    name: Literal["curriculum"] = "curriculum"
    """The name of the task."""
    pool: int = 480
    """How many questions the task is asked for; the pool is the distinct ones."""
    order: Literal["running", "described"] = "running"
    """running: estimates are updated, with windows and rest. described: measured once, sorted once."""
    window: int = 64
    """order = "running": prompts are drawn at random from this many next questions of the order."""
    decay: float = 0.5
    """order = "running": the weight of the old estimate in the average when a question is measured again."""
    rest: int = 20
    """order = "running": the steps for which a question with a dead group is left out; 0 means for good. Until then it
    only fills up the last step of an epoch."""

    def __post_init__(self) -> None:
        if any(isinstance(layer, Prefixed | Curriculum) for layer in list_task_layers(self.task)):
            raise ValueError(
                "a curriculum must wrap the task with the questions directly: put other wrappers around it"
            )
        for name in ("pool", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay = {self.decay} must be at least 0 and below 1")
        if self.rest < 0:
            raise ValueError(f"rest = {self.rest} must not be negative")

    @cached_property
    def curriculum_state(self) -> _CurriculumState:
        return _CurriculumState()

    @cached_property
    def questions(self) -> list[Prompt]:
        return list({prompt.key: prompt for prompt in self.task.sample(0, self.pool)}.values())

    @property
    def question_count(self) -> int:
        """The number of questions of the pool: an epoch of the data asks each of them once."""
        return len(self.questions)

    @cached_property
    def sampled_indices(self) -> dict[tuple[int, int], list[int]]:
        """The questions that were sampled since the last `observe`, by the arguments (step, n) of `sample`."""
        return {}

    def with_split(self, split: str) -> Any:
        """Return the curriculum on another split; for `test` the task inside, since those questions need no order."""
        inside = with_split(self.task, split)
        return inside if split == "test" else replace(self, task=inside)

    def sample(self, step: int, n: int) -> list[Prompt]:
        """Return the next n questions of the order. The same arguments give the same questions until `observe`.

        Another round of a step passes another `step`, and gets other questions as long as there are any.
        """
        if n > len(self.questions):
            raise UserError(
                f"the curriculum's pool holds {len(self.questions)} different questions, a step needs {n}:"
                " raise task.pool, or lower algorithm.prompts_per_step"
            )
        if (step, n) not in self.sampled_indices:
            self.sampled_indices[step, n] = self._choose_questions(step, n)
        return [self.questions[q] for q in self.sampled_indices[step, n]]

    def observe(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Update the estimates and return metrics. A group with a prefix counts as asked, but is not measured."""
        state = self.curriculum_state
        indices = {prompt.id: q for q, prompt in enumerate(self.questions)}
        remaining = state.left or self._order_questions()
        observed = {indices[group.prompt.id]: group for group in groups}
        for q, group in observed.items():
            if not group.demonstration:
                self._update_accuracy(q, group, step)
        state.left = [q for q in remaining if q not in observed]
        state.step = step + 1
        self.sampled_indices.clear()
        if not state.left:
            state.epoch += 1
            state.left = self._order_questions()
        return {
            "curriculum/epoch": float(state.epoch),
            "curriculum/measured": len(state.accuracy) / len(indices),
            "curriculum/accuracy": fmean(state.accuracy.values()) if state.accuracy else 0.0,
            "curriculum/resting": sum(map(self._is_resting, indices.values())) / len(indices),
        }

    def state(self) -> dict[str, Any]:
        return asdict(self.curriculum_state)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state, without questions that a smaller pool no longer has."""
        size, restored = len(self.questions), self.curriculum_state
        restored.step, restored.epoch = state["step"], state["epoch"]
        restored.left = [q for q in state["left"] if q < size]
        restored.accuracy, restored.dead_since = (
            {int(q): value for q, value in state[name].items() if int(q) < size} for name in ("accuracy", "dead_since")
        )

    def _update_accuracy(self, q: int, group: Group, step: int) -> None:
        state, judged = self.curriculum_state, [reward for reward in group.rewards if reward.is_judged]
        if not judged or (self.order == "described" and q in state.accuracy):
            return
        accuracy = fmean(reward.is_correct for reward in judged)
        previous = state.accuracy.get(q, accuracy)
        state.accuracy[q] = self.decay * previous + (1 - self.decay) * accuracy
        state.dead_since.pop(q, None)
        is_dead = bool(get_equal_rewards(group)) if group.is_zero_variance is None else group.is_zero_variance
        if is_dead:
            state.dead_since[q] = step

    def _order_questions(self) -> list[int]:
        """Return an epoch's questions that do not rest: in the pool's order in epoch 0, later from easy to hard."""
        pool, accuracy = range(len(self.questions)), self.curriculum_state.accuracy
        active = [q for q in pool if not self._is_resting(q)] or list(pool)
        return sorted(active, key=lambda q: -accuracy.get(q, 0.5)) if self.curriculum_state.epoch else active

    def _is_resting(self, q: int) -> bool:
        if self.order == "described" or q not in self.curriculum_state.dead_since:
            return False
        return not self.rest or self.curriculum_state.step - self.curriculum_state.dead_since[q] < self.rest

    def _choose_questions(self, step: int, n: int) -> list[int]:
        """Choose n questions. Take resting ones, and those of other rounds, only if there are too few others."""
        rounds = [chosen for (other, _), chosen in self.sampled_indices.items() if other != step]
        taken = {q for chosen in rounds for q in chosen}
        remaining = [q for q in self.curriculum_state.left or self._order_questions() if q not in taken]
        rng = Random(f"curriculum/{self.seed}/{step}")
        window = remaining[:n] if self.order == "described" else remaining[: max(self.window, n)]
        chosen = window if self.order == "described" else rng.sample(window, min(n, len(window)))
        others = [q for q in range(len(self.questions)) if q not in set(chosen)]
        rng.shuffle(others)
        others.sort(key=lambda q: (q in taken, self._is_resting(q)))  # to fill up at the end of an epoch
        return chosen + others[: n - len(chosen)]

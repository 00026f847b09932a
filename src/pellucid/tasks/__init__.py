"""Tasks: where prompts come from, and how completions are graded.

Each file holds a task that a recipe can name, or a part that tasks share, such as reading data rows. curriculum.py and
prefixed.py wrap another task (wrappers.py). Nothing here imports torch, so that reward workers start fast.
"""

from __future__ import annotations

from pellucid.types import UserError
from pellucid.utils.plugins import did_you_mean, load_object

TASKS = {
    "agent": "pellucid.tasks.agent:Agent",
    "arithmetic": "pellucid.tasks.arithmetic:Arithmetic",
    "calculator": "pellucid.tasks.calculator:Calculator",
    "continuity": "pellucid.tasks.continuity:Continuity",
    "countdown": "pellucid.tasks.countdown:Countdown",
    "curriculum": "pellucid.tasks.curriculum:Curriculum",
    "dataset": "pellucid.tasks.dataset:Dataset",
    "environment": "pellucid.tasks.environment:Environment",
    "expected": "pellucid.tasks.expected:Expected",
    "gsm8k": "pellucid.tasks.gsm8k:Gsm8k",
    "guess": "pellucid.tasks.guess:Guess",
    "prefixed": "pellucid.tasks.prefixed:Prefixed",
    "reasoning_gym": "pellucid.tasks.reasoning_gym:ReasoningGym",
    "sorting": "pellucid.tasks.sorting:Sorting",
    "verifiers": "pellucid.tasks.verifiers:Verifiers",
}


def load_task_class(name: str) -> type:
    """Return the class of a task in TASKS, or a user's "path/to/file.py:Class". Raises UserError if there is none.

    Example: load_task_class("arithmetic"); load_task_class("my_task.py:Riddles")
    """
    if name not in TASKS and ":" not in name:
        raise UserError(
            f'task "{name}" is unknown{did_you_mean(name, TASKS)}; '
            f'the tasks are {", ".join(TASKS)}, or your own as "path/to/file.py:Class"'
        )
    found = load_object(TASKS.get(name, name), "task")
    if not isinstance(found, type):
        raise UserError(f'task "{name}" is a {type(found).__name__}: name a class')
    return found

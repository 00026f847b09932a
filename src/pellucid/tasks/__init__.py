"""Tasks: where prompts come from, and how completions are graded.

Each file is a task that a recipe can name, or one thing that tasks are made of: rows of data, rewards, the readers of
answers. wrappers.py, curriculum.py and prefixed.py go around another task; sandbox.py grades in processes of its own.
The room runs without torch, since rewards are computed in processes that must start fast.
"""

from __future__ import annotations

from pellucid.machine.plugins import did_you_mean, load_object
from pellucid.types import UserError

TASKS = {
    "arithmetic": "pellucid.tasks.arithmetic:Arithmetic",
    "continuity": "pellucid.tasks.continuity:Continuity",
    "countdown": "pellucid.tasks.countdown:Countdown",
    "curriculum": "pellucid.tasks.curriculum:Curriculum",
    "dataset": "pellucid.tasks.dataset:Dataset",
    "expected": "pellucid.tasks.expected:Expected",
    "gsm8k": "pellucid.tasks.gsm8k:Gsm8k",
    "prefixed": "pellucid.tasks.prefixed:Prefixed",
    "sorting": "pellucid.tasks.sorting:Sorting",
}


def task_class(name: str) -> type:
    """The class behind `[task] name`: one of TASKS, or the user's own.

    Example: task_class("arithmetic"); task_class("my_task.py:Riddles")
    """
    if name not in TASKS and ":" not in name:
        raise UserError(
            f'task "{name}" is unknown{did_you_mean(name, TASKS)}; '
            f'the tasks are {", ".join(TASKS)}, or your own as "path/to/file.py:Class"'
        )
    found = load_object(TASKS.get(name, name))
    if not isinstance(found, type):
        raise UserError(f'task "{name}" is a {type(found).__name__}: name a class')
    return found

"""Report the stages of a run.

Python imports this file at startup if its folder is in PYTHONPATH. The run then writes a line to the pipe
PELLUCID_MARKS whenever it enters or leaves a stage: "PID RANK + STAGE" or "PID RANK - STAGE".
"""

import functools
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

STAGES = {
    "pellucid.algorithm.rollouts": {"collect_rollouts": "rollout"},
    "pellucid.algorithm.grpo": {"update_policy": "update"},
    "pellucid.training.run": {
        "train_run": "train",
        "restore_run": "restore",
        "evaluate_policy": "evaluate",
        "save_checkpoint": "save",
        "print_results": "finish",
    },
}
"""Module -> function -> stage."""


class Marking(MetaPathFinder):
    """Find the modules above as usual, and mark their functions after import."""

    def __init__(self, pipe):
        self.pipe = pipe

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in STAGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def executed(module):
            execute(module)
            self.mark_functions(module)

        spec.loader.exec_module = executed
        return spec

    def mark_functions(self, module):
        for name, stage in STAGES[module.__name__].items():
            setattr(module, name, self.marked(getattr(module, name), stage))

    def marked(self, function, stage):
        @functools.wraps(function)
        def call(*args, **settings):
            self.mark("+", stage)
            try:
                return function(*args, **settings)
            finally:
                self.mark("-", stage)

        return call

    def mark(self, edge, stage):
        os.write(self.pipe, f"{os.getpid()} {os.environ.get('RANK', '0')} {edge} {stage}\n".encode())


if "PELLUCID_MARKS" in os.environ:
    marking = Marking(os.open(os.environ["PELLUCID_MARKS"], os.O_WRONLY))
    sys.meta_path.insert(0, marking)

"""Test what two processes exchange, and that each resumes with its own state."""

from __future__ import annotations

import json
import time
from threading import Event

import pytest
import torch
from safetensors.torch import load_file

from conftest import records
from pellucid.distributed import process_group
from runs import in_two_processes

TASK = '''
import os
import random
from dataclasses import dataclass

from digits_task import Digits
from pellucid.types import Prompt


@dataclass(frozen=True)
class Apart(Digits):
    """Draws from the global generator, more often in one process than in the other."""

    def sample(self, step, n):
        for _ in range(97 * int(os.environ["RANK"])):
            random.random()
        return [Prompt(f"{self.split}/{step}/{i}", str(random.randrange(10**6))) for i in range(n)]
'''

EXCHANGE = """
import json
import sys
from pathlib import Path

import torch

from conftest import make_policy
from pellucid.distributed.runtime import Runtime
from pellucid.algorithm.settings import AdamWConfig


def main():
    runtime = Runtime(make_policy(), AdamWConfig(), total_updates=1)
    own = torch.tensor([1.0 + runtime.rank])
    found = {"sum": runtime.sum(own).tolist(), "own": own.tolist(), "all": runtime.gather(runtime.shard("abcde"))}
    Path(sys.argv[1], str(runtime.rank)).write_text(json.dumps(found))


main()
"""


BESIDE = """
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from conftest import make_policy
from pellucid.distributed.runtime import Runtime
from pellucid.algorithm.settings import AdamWConfig


def main():
    runtime = Runtime(make_policy(), AdamWConfig(), total_updates=1)
    beside = runtime.for_thread()
    exchanges = [
        lambda: runtime.gather([f"here {runtime.rank}"]) + runtime.sum(torch.ones(1)).tolist(),
        lambda: beside.gather([f"beside {runtime.rank}"]) + beside.sum(torch.full((1,), 10.0)).tolist(),
    ]
    order = [0, 1] if runtime.rank else [1, 0]  # each begins with another
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(exchanges[order[0]])
        time.sleep(0.5)
        second = exchanges[order[1]]()
    Path(sys.argv[1], str(runtime.rank)).write_text(json.dumps(dict(zip(order, [first.result(), second]))))


main()
"""


def launch(*arguments):
    in_two_processes("-m", "pellucid", "train", *map(str, arguments))


@pytest.mark.slow
def test_sum_keeps_its_terms_and_shards_are_gathered_in_order(tmp_path):
    """Five items are shared among two processes, so one of them has more."""
    (tmp_path / "exchange.py").write_text(EXCHANGE)
    in_two_processes(tmp_path / "exchange.py", tmp_path)
    for rank in (0, 1):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert found == {"sum": [3.0], "own": [1.0 + rank], "all": list("abcde")}


@pytest.mark.slow
def test_collectives_of_two_threads_do_not_mix(tmp_path):
    """Rollouts that are drawn ahead run in a thread beside an update."""
    (tmp_path / "beside.py").write_text(BESIDE)
    in_two_processes(tmp_path / "beside.py", tmp_path)
    for rank in (0, 1):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert found == {"0": ["here 0", "here 1", 2.0], "1": ["beside 0", "beside 1", 20.0]}


def test_unresponsive_store_counts_as_missing_rank_0(monkeypatch):
    """A cut cable gives no answer at all, not even a refused connection."""

    class Gone:
        def set(self, key, value):
            Event().wait()

    monkeypatch.setattr(process_group, "ROLL_CALL_TIMEOUT_SECONDS", -0.9)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", Gone)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    start = time.monotonic()
    assert process_group.find_missing_ranks() == [0]
    assert time.monotonic() - start < 10


@pytest.mark.slow
def test_two_processes_resume_identically_with_their_own_replay_and_generators(recipe, tmp_path):
    (tmp_path / "apart_task.py").write_text(TASK)
    text = recipe.read_text()
    [task] = [line for line in text.splitlines() if "digits_task.py" in line]
    recipe.write_text(text.replace(task, f'name = "{tmp_path}/apart_task.py:Apart"'))
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    fixed = ["--optimizer.schedule", "constant", "--evaluate.every", 0, "--algorithm.max_staleness", 2]
    launch(recipe, "--run", whole, *fixed, "--algorithm.steps", 4)
    launch(recipe, "--run", halves, *fixed, "--algorithm.steps", 2)
    launch("--resume", halves, "--algorithm.steps", 4)

    mine, theirs = (records(run / "rollouts.jsonl") for run in (whole, halves))
    assert len({str(r["prompt"]) for r in mine}) == 16, "four steps of two processes with two prompts each"
    assert mine == theirs
    for one, other in zip(*(records(run / "metrics.jsonl") for run in (whole, halves)), strict=True):
        same = {key for key in one if not key.startswith(("time/", "memory/"))}
        assert {key: one[key] for key in same} == {key: other[key] for key in same}
    model, resumed = (load_file(run / "model" / "model.safetensors") for run in (whole, halves))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in model.items())


LATE = """
import time
from pellucid import cli
from pellucid.training import run

free = run.check_free_run_dir


def late(run_dir):
    time.sleep(3)
    free(run_dir)


run.check_free_run_dir = late
if __name__ == "__main__":
    cli.main()
"""


@pytest.mark.slow
def test_no_process_writes_to_the_folder_before_all_have_checked_it(recipe, tmp_path):
    """The log of rewards is written there."""
    (tmp_path / "late.py").write_text(LATE)
    settings = ["--algorithm.steps", 1, "--evaluate.every", 0]
    in_two_processes(tmp_path / "late.py", "train", recipe, "--run", tmp_path / "run", *settings)
    assert (tmp_path / "run" / "rewards.log").exists()

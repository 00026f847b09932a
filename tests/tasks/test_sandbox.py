import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from fractions import Fraction

import pytest

from pellucid.tasks import sandbox as sandbox_module
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.tasks.sandbox import Sandboxed, with_split
from pellucid.types import Completion, Prompt, Reward, UserError

PROMPT = Prompt("train/0/0", "Behave as told.", "7")
FOREVER = 100_000.0
"""Seconds that a reward may take: then its worker can only be ended otherwise."""
KILLED = "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()"


class UnpicklableError(Exception):
    def __init__(self, first, second):
        super().__init__(first)


def fail(error):
    raise error


def hang():
    while True:
        time.sleep(1)


BEHAVIOURS = {
    "pid": lambda: Reward(float(os.getpid())),
    "fine": lambda: Reward(0.5, {"a": 1.0}, correct=True),
    "fraction": lambda: Reward(Fraction(1, 2)),
    "raise": lambda: fail(ZeroDivisionError("two\nlines")),
    "raise unpicklable": lambda: fail(UnpicklableError(1, 2)),
    "raise SystemExit": lambda: sys.exit(3),
    "raise TimeoutError": lambda: fail(TimeoutError("of its own")),
    "hang": hang,
    "hang in a pattern": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
    "exit": lambda: os._exit(0),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "nan": lambda: Reward(math.nan, {"a": math.nan}),
    "inf": lambda: Reward(math.inf),
    "text": lambda: Reward("1.0"),
    "none": lambda: Reward(None),
    "float": lambda: 1.0,
    "no result": lambda: None,
    "own error": lambda: Reward(math.nan, error="nothing applies"),
}


@dataclass(frozen=True)
class Probe:
    """Behaves as the completion says."""

    name: str = "probe"
    seed: int = 3
    split: str = "train"

    def sample(self, step, n):
        return [Prompt(f"{self.split}/{step}/{i}", "?", "7") for i in range(n)]

    def reward(self, prompt, completion):
        return BEHAVIOURS[completion.text]()

    def solution(self, prompt):
        return prompt.answer


@pytest.fixture(scope="module")
def sandbox():
    sandboxed = Sandboxed(Probe(), timeout=0.5)
    yield sandboxed
    sandboxed.close()


def graded(sandboxed, text):
    return sandboxed.reward(PROMPT, Completion((1,), (-0.5,), text, True))


def alive(pid):
    """Also false for a zombie: it has ended, and only waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition):
    """One that never comes is for the suite's own time limit to tell."""
    while not condition():
        time.sleep(0.01)


def test_a_reward_passes_through_and_is_a_float(sandbox):
    assert graded(sandbox, "fine") == Reward(0.5, {"a": 1.0}, correct=True)
    assert type(graded(sandbox, "fraction").value) is float


def test_rewards_are_computed_in_one_other_process(sandbox):
    pids = {graded(sandbox, "pid").value for _ in range(3)}
    assert len(pids) == 1
    assert pids != {os.getpid()}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise", r"ZeroDivisionError: two lines \(test_sandbox.py, line \d+\)"),
        ("raise unpicklable", r"the reward ended its process"),
        ("raise SystemExit", r"SystemExit: 3 .*"),
        ("raise TimeoutError", r"TimeoutError: of its own .*"),
        ("hang", r"no reward within 0\.5 s"),
        ("hang in a pattern", r"no reward within 0\.5 s"),
        ("exit", r"the reward ended its process"),
        ("segfault", r"the reward ended its process"),
        ("nan", r"the reward is nan, of parts \{'a': nan\}"),
        ("inf", r"the reward is inf"),
        ("text", r"the reward is '1\.0'"),
        ("none", r"the reward is None"),
        ("float", r"the task returned a float, where a Reward is needed"),
        ("no result", r"the task returned a NoneType, where a Reward is needed"),
        ("own error", r"nothing applies"),
    ],
)
def test_what_goes_wrong_is_a_nan_that_says_so_and_the_next_reward_is_right(sandbox, text, error):
    before = int(graded(sandbox, "pid").value)
    reward = graded(sandbox, text)
    if reward.error.startswith(("no reward within", "the reward ended its process")):
        wait_until(lambda: not alive(before))
    else:
        assert alive(before)
    assert math.isnan(reward.value)
    assert re.fullmatch(error, reward.error)
    assert not reward.is_correct
    assert graded(sandbox, "fine").value == 0.5


def test_only_a_lost_worker_is_replaced(sandbox):
    before = graded(sandbox, "pid").value
    graded(sandbox, "raise")
    graded(sandbox, "nan")
    assert graded(sandbox, "pid").value == before
    graded(sandbox, "hang")
    assert not alive(int(before))
    assert graded(sandbox, "pid").value != before


def test_a_worker_that_died_between_rewards_is_replaced(sandbox):
    pid = int(graded(sandbox, "pid").value)
    executor = sandbox._worker._executor
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: executor._broken)  # a reward that was on its way would be lost with the worker
    assert graded(sandbox, "fine").value == 0.5
    assert graded(sandbox, "pid").value != pid


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_stop_is_the_parent_s_to_serve(sandbox, number):
    """It finishes its step, for which it needs the worker: a supervisor sends SIGTERM to every process of a service."""
    pid = int(graded(sandbox, "pid").value)
    os.kill(pid, number)
    assert graded(sandbox, "pid").value == pid


def test_ctrl_c_while_a_reward_hangs_stops_the_worker(monkeypatch):
    """Long before its own time is up."""
    sandboxed = Sandboxed(Probe(), timeout=FOREVER)
    pid = int(graded(sandboxed, "pid").value)
    wait = sandbox_module.wait

    def interrupted(*arguments):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return wait(*arguments)

    monkeypatch.setattr(sandbox_module, "wait", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            graded(sandboxed, "hang")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not alive(pid)


def test_close_ends_the_worker_and_a_later_reward_starts_another():
    sandboxed = Sandboxed(Probe())
    sandboxed.close()
    pid = int(graded(sandboxed, "pid").value)
    sandboxed.close()
    assert not alive(pid)
    assert graded(sandboxed, "pid").value != pid
    sandboxed.close()


PARENT = """
    import os, signal, sys, threading, time
    from test_sandbox import PROMPT, Probe
    from pellucid.tasks.sandbox import Sandboxed
    from pellucid.types import Completion

    def graded(text):
        return sandboxed.reward(PROMPT, Completion((1,), (-0.5,), text, True)).value

    if __name__ == "__main__":
        sandboxed = Sandboxed(Probe(), timeout={timeout})
        print(int(graded("pid")), flush=True)
        {ending}
"""


def output_of(script):
    """To a file, not a pipe: a worker that outlived its parent would hold the pipe open."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    output = script.with_suffix(".txt")
    with output.open("w") as file:
        subprocess.run([sys.executable, script], env=environment, stdout=file, stderr=file, check=False)
    return output.read_text()


@pytest.mark.parametrize(
    ("ending", "timeout"),
    [
        ("pass", FOREVER),
        ("raise ValueError", FOREVER),
        ("os.kill(os.getpid(), signal.SIGKILL)", FOREVER),
        (f"{KILLED}; graded('hang')", FOREVER),
        # It holds the interpreter: no thread of its own sees that the parent is gone.
        (f"{KILLED}; graded('hang in a pattern')", 0.5),
    ],
)
def test_the_worker_does_not_outlive_its_parent(tmp_path, ending, timeout):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT).format(ending=ending, timeout=timeout))
    pid = int(output_of(script).split()[0])
    try:
        wait_until(lambda: not alive(pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Unloadable(Probe):
    def __reduce__(self):
        return fail, (ModuleNotFoundError("no module named riddles"),)


def test_a_task_that_the_worker_cannot_load_is_one_clear_line():
    with pytest.raises(UserError, match=r"^[^\n]*cannot load task Unloadable: ModuleNotFoundError[^\n]*$"):
        graded(Sandboxed(Unloadable()), "fine")


def test_a_task_that_cannot_be_sent_is_one_clear_line():
    @dataclass(frozen=True)
    class Local(Probe):
        pass

    with pytest.raises(UserError, match=r"^task Local cannot be sent to the reward process: [^\n]*$"):
        graded(Sandboxed(Local()), "fine")


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent(PARENT).format(ending="", timeout=0.5).replace('if __name__ == "__main__"', "if True")
    )
    assert "UserError: the reward process cannot start; a script that trains needs `if __name__" in output_of(script)


@pytest.mark.parametrize("timeout", [0, -1.0, math.inf, math.nan])
def test_a_timeout_must_be_a_number_of_seconds(timeout):
    with pytest.raises(ValueError, match="positive number of seconds"):
        Sandboxed(Probe(), timeout=timeout)


def test_the_rest_of_the_task_passes_through():
    sandboxed = Sandboxed(Probe())
    assert (sandboxed.seed, sandboxed.split, sandboxed.name) == (3, "train", "probe")
    assert sandboxed.sample(1, 2) == Probe().sample(1, 2)
    assert sandboxed.solution(PROMPT) == "7"
    assert not hasattr(sandboxed, "observe")


def test_the_test_split_shares_the_worker(sandbox):
    held_out = with_split(sandbox, "test")
    assert (sandbox.split, held_out.split) == ("train", "test")
    assert held_out.sample(0, 1)[0].id == "test/0/0"
    assert graded(held_out, "pid") == graded(sandbox, "pid")


def test_plain_tasks_can_be_switched_to_the_test_split_too():
    assert with_split(Arithmetic(seed=4), "test") == Arithmetic(seed=4, split="test")

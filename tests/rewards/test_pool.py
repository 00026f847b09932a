"""Test the pool of reward processes: results, errors, limits, isolation, and lifetime."""

import contextlib
import gc
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from pellucid.rewards import pool
from pellucid.rewards.grading import GradedTask
from pellucid.rewards.settings import RewardConfig
from pellucid.sandbox.values import MAX_NUMBER
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.types import Completion, Prompt, Reward, UserError, with_split

PROMPT = Prompt("train/0/0", "Behave as told.", "7")
FOREVER = 100_000.0
"""A timeout in seconds that no test reaches, so that something else must end the worker."""
KILLED = "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()"


class UnpicklableError(Exception):
    def __init__(self, first, second):
        super().__init__(first)


def fail(error):
    raise error


def hang():
    while True:
        time.sleep(1)


def said(word):
    """Print the word through Python, through a program, and through a file descriptor."""
    print(f"{word} on stdout")
    print(f"{word} on stderr", file=sys.stderr)
    subprocess.run(["echo", f"{word} by a program"], check=True)
    os.write(1, f"{word} by its number\n".encode())
    return Reward(1.0)


def leave_a_program(*, hangs):
    """Start a program and print its pid; then hang, or return the pid as the reward."""
    program = subprocess.Popen(["sleep", "1000"])
    print(program.pid)
    return hang() if hangs else Reward(float(program.pid))


def keep_busy_and_unread():
    """Start a thread that never releases the GIL, so that the process reads nothing more."""
    threading.Timer(0.1, pow, (9, 9**9)).start()
    return Reward(1.0)


def start_a_process():
    """Start a process and return its exit status as the reward."""
    process = multiprocessing.get_context("spawn").Process(target=sys.exit, args=(3,))
    process.start()
    process.join()
    return Reward(float(process.exitcode))


def recurse():
    return recurse()


class MuteError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Grudge:
    """An object that ends the process that unpickles it: the parent must not unpickle it."""

    def __reduce__(self):
        return os._exit, (3,)


SECRETS = {"PROBE_API_KEY", "PROBE_TOKEN", "probe_secret", "PROBE_PASSWORD"}
OTHERS = {"PROBE_KEYS", "PROBE_PATH", "TOKENS", "KEY"}


def names_seen():
    program = [sys.executable, "-c", "import os; print(*os.environ)"]
    told = subprocess.run(program, capture_output=True, text=True, check=True).stdout.split()
    return Reward(1.0, {name: float(name in told) for name in os.environ if name in SECRETS | OTHERS})


BEHAVIORS = {
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
    "signal without a name": lambda: os.kill(os.getpid(), 40),
    "closes what is open": lambda: os.closerange(3, 1000) or Reward(1.0),
    "nan": lambda: Reward(math.nan, {"a": math.nan}),
    "inf": lambda: Reward(math.inf),
    "text": lambda: Reward("1.0"),
    "none": lambda: Reward(None),
    "float": lambda: 1.0,
    "no result": lambda: None,
    "own error": lambda: Reward(math.nan, error="nothing applies"),
    "own error in lines": lambda: Reward(None, error="nothing\napplies"),
    "parts": lambda: Reward(1.0, {"a": math.nan, "b": np.float32(0.5)}, weights={"a": np.int64(2)}),
    "float32": lambda: Reward(np.float32(0.25), correct=np.bool_(False)),
    "int64": lambda: Reward(np.int64(1), correct=1),
    "decimal": lambda: Reward(Decimal("0.5"), correct=0.0),
    "a scalar of no dimension": lambda: Reward(np.array(0.5)),
    "largest": lambda: Reward(MAX_NUMBER, {"a": -MAX_NUMBER}),
    "no term": lambda: Reward(math.nan, applies=False),
    "huge": lambda: Reward(10**400),
    "huge digits": lambda: Reward("x", {"a": 10**5000}),
    "beyond float32": lambda: Reward(1e308),
    "part beyond float32": lambda: Reward(1.0, {"a": -1e308}),
    "array": lambda: Reward(np.zeros(3)),
    "complex": lambda: Reward(1j),
    "parts none": lambda: Reward(1.0, None),
    "parts text": lambda: Reward(1.0, "abc"),
    "parts list": lambda: Reward(1.0, [1.0]),
    "part none": lambda: Reward(1.0, {"a": None}),
    "part without a name": lambda: Reward(1.0, {1: 1.0}),
    "parts without end": lambda: Reward(1.0, {f"{i}": 1.0 for i in range(3000)}),
    "correct text": lambda: Reward(1.0, correct="no"),
    "correct array": lambda: Reward(1.0, correct=np.array([True, False])),
    "correct half": lambda: Reward(1.0, correct=0.5),
    "error number": lambda: Reward(1.0, error=5),
    "weights none": lambda: Reward(1.0, weights=None),
    "weight huge": lambda: Reward(1.0, {"a": 1.0}, weights={"a": 10**400}),
    "weight nan": lambda: Reward(1.0, {"a": 1.0}, weights={"a": math.nan}),
    "raise mute": lambda: fail(MuteError()),
    "raise long": lambda: fail(ValueError("x" * 10**6)),
    "raise deep": lambda: fail(RecursionError("deep")),
    "grudge": lambda: Reward(Grudge()),
    "raise grudge": lambda: fail(ValueError(Grudge())),
    "recurse": recurse,
    "memory": lambda: Reward(float(len(bytearray(8 * 10**8)))),
    "prints half an emoji": lambda: print("\ud83d") or Reward(1.0),
    "prints": lambda: said("hello"),
    "leaves a program": lambda: leave_a_program(hangs=False),
    "leaves a program and hangs": lambda: leave_a_program(hangs=True),
    "leaves a program and exits": lambda: (leave_a_program(hangs=False), os._exit(0)),
    "keeps busy": keep_busy_and_unread,
    "starts processes": start_a_process,
    "names": names_seen,
    "session": lambda: Reward(float(os.getsid(0)), {"group": float(os.getpgrp())}),
}


@dataclass(frozen=True)
class Probe:
    """A task whose reward behaves as the text of the completion says."""

    name: str = "probe"
    seed: int = 3
    split: str = "train"

    def sample(self, step, n):
        return [Prompt(f"{self.split}/{step}/{i}", "?", "7") for i in range(n)]

    def reward(self, prompt, completion):
        if completion.text.startswith("after "):
            time.sleep(float(completion.text.split()[1]))
            return Reward(float(completion.text.split()[2]), {"pid": float(os.getpid())})
        return BEHAVIORS[completion.text]()

    def solution(self, prompt):
        return prompt.answer


@pytest.fixture(scope="module")
def sandbox():
    sandboxed = GradedTask(Probe(), RewardConfig(timeout=2.0))
    yield sandboxed
    sandboxed.close()


def said_by(text):
    return Completion((1,), (-0.5,), text, True)


def graded(sandboxed, text):
    return sandboxed.reward(PROMPT, said_by(text))


def alive(pid):
    """Return whether the process runs. A zombie has ended and only waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition):
    """Wait until the condition holds. The time limit of the suite ends an endless wait."""
    while not condition():
        time.sleep(0.01)


def test_reward_is_returned_with_a_float_value(sandbox):
    assert graded(sandbox, "fine") == Reward(0.5, {"a": 1.0}, correct=True)
    assert type(graded(sandbox, "fraction").value) is float


def test_rewards_are_computed_in_one_other_process(sandbox):
    pids = {graded(sandbox, "pid").value for _ in range(3)}
    assert len(pids) == 1
    assert pids != {os.getpid()}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise", r"ZeroDivisionError: two lines \(test_pool.py, line \d+\)"),
        ("raise unpicklable", r"UnpicklableError: 1 \(test_pool.py, line \d+\)"),
        ("raise SystemExit", r"SystemExit: 3 .*"),
        ("raise TimeoutError", r"TimeoutError: of its own .*"),
        ("raise mute", r"MuteError: <exception str\(\) failed> \(test_pool.py, line \d+\)"),
        ("raise long", r"ValueError: x{300} .*"),
        ("raise deep", r"RecursionError: deep .*"),
        ("raise grudge", r"ValueError: <.*Grudge.*> .*"),
        ("recurse", r"RecursionError: maximum recursion depth exceeded.*"),
        ("hang", r"no reward within 2 s"),
        ("hang in a pattern", r"no reward within 2 s"),
        ("exit", r"the reward ended its process \(exit status 0\)"),
        ("segfault", r"the reward ended its process \(SIGSEGV\)"),
        ("signal without a name", r"the reward ended its process \(signal 40\)"),
        ("closes what is open", r"the reward ended its process \(exit status 1\)"),
        ("nan", r"the reward is nan, of parts \{'a': nan\}"),
        ("inf", r"the reward is inf"),
        ("text", r"the reward is '1\.0', where a number is needed"),
        ("none", r"the reward is None, where a number is needed"),
        ("array", r"the reward is array\(\[0\., 0\., 0\.\]\), where a number is needed"),
        ("complex", r"the reward is 1j, where a number is needed"),
        ("grudge", r"the reward is <test_.*>, where a number is needed"),
        ("huge", r"the reward is beyond 3\.4e\+38, the largest number that float32 holds"),
        ("huge digits", r"the reward is 'x', where a number is needed"),
        ("beyond float32", r"the reward is beyond 3\.4e\+38, .*"),
        ("part beyond float32", r'the part "a" is beyond 3\.4e\+38, .*'),
        ("parts none", r"the parts are None, where names with their numbers are needed"),
        ("parts text", r"the parts are 'abc', where names with their numbers are needed"),
        ("parts list", r"the parts are \[1\.0\], where names with their numbers are needed"),
        ("part none", r'the part "a" is None, where a number is needed'),
        ("part without a name", r"the parts are \{1: 1\.0\}, where names with their numbers are needed"),
        ("parts without end", r"there are 3000 parts; 500 are the most"),
        ("correct text", r"correct is 'no', where True, False or None is needed"),
        ("correct array", r"correct is array\(.*\), where True, False or None is needed"),
        ("correct half", r"correct is 0\.5, where True, False or None is needed"),
        ("error number", r"the error is 5, where a string is needed"),
        ("weights none", r"the weights are None, where names with their numbers are needed"),
        ("weight huge", r'the weight "a" is beyond 3\.4e\+38, .*'),
        ("weight nan", r'the weight "a" is nan'),
        ("float", r"the task returned a float, where a Reward is needed"),
        ("no result", r"the task returned a NoneType, where a Reward is needed"),
        ("own error", r"nothing applies"),
        ("own error in lines", r"nothing applies"),
    ],
)
def test_failed_reward_is_nan_with_an_error_and_the_next_one_works(sandbox, text, error):
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


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("parts", Reward(1.0, {"b": 0.5}, weights={"a": 2.0})),  # the NaN part is left out, since it equals nothing
        ("float32", Reward(0.25, correct=False)),
        ("int64", Reward(1.0, correct=True)),
        ("decimal", Reward(0.5, correct=False)),
        ("a scalar of no dimension", Reward(0.5)),
        ("largest", Reward(3.4028234663852886e38, {"a": -3.4028234663852886e38})),
    ],
)
def test_numbers_of_other_libraries_become_floats(sandbox, text, reward):
    got = graded(sandbox, text)
    finite = {name: part for name, part in got.parts.items() if math.isfinite(part)}
    assert replace(got, parts=finite) == reward
    assert {type(x) for x in (got.value, *got.parts.values(), *got.weights.values())} == {float}
    assert type(got.correct) in (bool, type(None))


def test_reward_without_applicable_terms_does_not_apply(sandbox):
    reward = graded(sandbox, "no term")
    assert (math.isnan(reward.value), reward.applies) == (True, False)
    assert graded(sandbox, "nan").applies


# ---------------------------------------------------------------- the reward process


@pytest.fixture
def logged(tmp_path):
    """Yield a sandbox and the path of its log."""
    log = tmp_path / "rewards.log"
    sandboxed = GradedTask(Probe(), RewardConfig(timeout=2.0, memory_gb=0.5), log)
    yield sandboxed, log
    sandboxed.close()


def test_output_of_rewards_goes_to_the_log(logged, capfd):
    sandboxed, log = logged
    assert graded(sandboxed, "prints").value == 1.0
    ways = ("on stdout", "on stderr", "by a program", "by its number")
    assert sorted(log.read_text().splitlines()) == sorted(f"hello {way}" for way in ways)
    graded(sandboxed, "raise")
    graded(sandboxed, "raise")
    assert log.read_text().count("Traceback") == 1, "of each kind, the first"
    assert "in fail" in log.read_text()
    assert capfd.readouterr() == ("", "")


def test_output_is_discarded_without_a_log(sandbox, capfd, tmp_path):
    nowhere = GradedTask(Probe(), log=tmp_path / "no folder" / "rewards.log")
    for each in (sandbox, nowhere):
        assert graded(each, "prints").value == 1.0
    nowhere.close()
    assert capfd.readouterr() == ("", "")


def test_reward_may_print_if_the_log_cannot_be_written():
    sandboxed = GradedTask(Probe(), log=Path("/dev/full"))
    assert graded(sandboxed, "prints half an emoji").value == 1.0
    sandboxed.close()


def test_worker_runs_in_its_own_session(sandbox):
    pid = graded(sandbox, "pid").value
    assert graded(sandbox, "session") == Reward(pid, {"group": pid})


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["leaves a program and hangs", "leaves a program and exits"])
def test_programs_of_a_lost_reward_are_ended(logged, ending):
    sandboxed, log = logged
    assert graded(sandboxed, ending).failed
    pid = int(log.read_text().split()[0])
    wait_until(lambda: not alive(pid))


def test_programs_of_rewards_are_ended_at_close(logged):
    sandboxed, _ = logged
    pid = int(graded(sandboxed, "leaves a program").value)
    assert alive(pid)
    sandboxed.close()
    wait_until(lambda: not alive(pid))


def test_a_reward_may_start_processes():
    sandboxed = GradedTask(Probe(), RewardConfig(timeout=60.0))
    assert graded(sandboxed, "starts processes").value == 3.0
    sandboxed.close()


@pytest.mark.slow
def test_memory_is_limited(logged):
    sandboxed, _ = logged
    assert graded(sandboxed, "memory").error.startswith("MemoryError")
    unlimited = GradedTask(Probe(), RewardConfig(memory_gb=0.0))
    assert graded(unlimited, "memory").value == 8e8
    unlimited.close()


def test_variables_that_look_like_secrets_are_removed(monkeypatch):
    for name in SECRETS | OTHERS:
        monkeypatch.setenv(name, "x")
    sandboxed = GradedTask(Probe(), RewardConfig(secrets=("PROBE_API_KEY",)))
    reward = graded(sandboxed, "names")
    sandboxed.close()
    assert reward.parts == dict.fromkeys(OTHERS | {"PROBE_API_KEY"}, 1.0)


def test_files_in_the_working_directory_do_not_shadow_modules(tmp_path, monkeypatch):
    """By default, Python puts the working directory on the path of the worker."""
    for name in ("pickle", "socket", "tomllib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    sandboxed = GradedTask(Probe())
    assert graded(sandboxed, "fine").value == 0.5
    assert "PYTHONSAFEPATH" not in os.environ
    sandboxed.close()


@pytest.mark.slow
def test_long_prompt_that_the_worker_does_not_read_times_out():
    sandboxed = GradedTask(Probe(), RewardConfig(timeout=2.0))
    assert graded(sandboxed, "keeps busy").value == 1.0
    time.sleep(1.0)
    long = Prompt("train/0/1", "x" * 10**7)
    assert sandboxed.reward(long, said_by("fine")).error == "no reward within 2 s"
    assert sandboxed.reward(long, said_by("fine")).value == 0.5
    sandboxed.close()


def test_unpicklable_prompt_is_a_failed_reward(sandbox):
    locked = Prompt("train/0/2", "?", columns={"lock": threading.Lock()})
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for prompt in (locked, Prompt("train/0/3", "?", columns={"deep": deep})):
        assert "cannot be sent to the reward process" in sandbox.reward(prompt, said_by("fine")).error
    assert graded(sandbox, "fine").value == 0.5


# ---------------------------------------------------------------- several workers


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_rewards_are_in_order_for_any_number_of_workers(workers):
    sandboxed = GradedTask(Probe(), RewardConfig(timeout=1.0, workers=workers))
    texts = ["after 0.2 0", "after 0 1", "hang", "after 0.1 3", "exit", "raise", "after 0 6", "after 0 7"]
    rewards = sandboxed.reward_all([(PROMPT, said_by(text)) for text in texts])
    sandboxed.close()
    assert [None if reward.failed else reward.value for reward in rewards] == [0, 1, None, 3, None, None, 6, 7]
    assert [reward.error.split(" (")[0] for reward in rewards if reward.failed] == [
        "no reward within 1 s",
        "the reward ended its process",
        "ZeroDivisionError: two lines",
    ]


@pytest.mark.slow
def test_workers_setting_is_the_number_of_parallel_workers():
    """Each reward takes 0.5 s, so that all three workers are busy at once."""
    sandboxed = GradedTask(Probe(), RewardConfig(workers=3))
    rewards = sandboxed.reward_all([(PROMPT, said_by(f"after 0.5 {i}")) for i in range(3)])
    assert len({reward.parts["pid"] for reward in rewards}) == 3
    pids = [int(reward.parts["pid"]) for reward in rewards]
    assert graded(sandboxed, "pid").value in pids
    sandboxed.close()
    assert not any(map(alive, pids))


@pytest.mark.slow
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
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not sandbox._executor._workers[0].is_alive)  # a reward sent earlier would be lost
    assert graded(sandbox, "fine").value == 0.5
    assert graded(sandbox, "pid").value != pid


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_worker_ignores_signals_to_stop(sandbox, number):
    """A supervisor sends SIGTERM to every process of a service, and the parent needs the worker to finish its step."""
    pid = int(graded(sandbox, "pid").value)
    os.kill(pid, number)
    assert graded(sandbox, "pid").value == pid


def test_ctrl_c_while_a_reward_hangs_stops_the_worker(monkeypatch):
    """The worker is ended long before the timeout of the reward."""
    sandboxed = GradedTask(Probe(), RewardConfig(timeout=FOREVER))
    pid = int(graded(sandboxed, "pid").value)
    wait = pool.wait

    def interrupted(*arguments):
        monkeypatch.setattr(pool, "wait", wait)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return wait(*arguments)

    monkeypatch.setattr(pool, "wait", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            graded(sandboxed, "hang")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not alive(pid)


@pytest.mark.slow
def test_close_ends_the_worker_and_a_later_reward_starts_another():
    sandboxed = GradedTask(Probe())
    sandboxed.close()
    pid = int(graded(sandboxed, "pid").value)
    sandboxed.close()
    assert not alive(pid)
    assert graded(sandboxed, "pid").value != pid
    sandboxed.close()


PARENT = """
    import os, signal, sys, threading, time
    from test_pool import PROMPT, Probe
    from pellucid.rewards.settings import RewardConfig
    from pellucid.rewards.grading import GradedTask
    from pellucid.types import Completion

    def graded(text):
        return sandboxed.reward(PROMPT, Completion((1,), (-0.5,), text, True)).value

    if __name__ == "__main__":
        sandboxed = GradedTask(Probe(), RewardConfig(timeout={timeout}))
        print(int(graded("pid")), flush=True)
        {ending}
"""


def output_of(script):
    """Run the script and return its output. It goes to a file, because an orphaned worker would hold a pipe open."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    output = script.with_suffix(".txt")
    with output.open("w") as file:
        subprocess.run([sys.executable, script], env=environment, stdout=file, stderr=file, check=False)
    return output.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "timeout"),
    [
        ("pass", FOREVER),
        ("raise ValueError", FOREVER),
        ("os.kill(os.getpid(), signal.SIGKILL)", FOREVER),
        (f"{KILLED}; graded('hang')", FOREVER),
        # The pattern holds the GIL, so no thread of the worker notices that the parent is gone.
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


NESTED = """
    import multiprocessing
    from test_pool import Probe, graded
    from pellucid.rewards.grading import GradedTask

    def grade():
        global sandboxed
        sandboxed = GradedTask(Probe())
        print(int(graded(sandboxed, "pid").value), flush=True)

    if __name__ == "__main__":
        process = multiprocessing.get_context("{method}").Process(target=grade)
        process.start()
        process.join()
        print(process.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing_child_that_graded_exits(tmp_path, method):
    """A multiprocessing child does not run functions that are registered with atexit."""
    script = tmp_path / "nested.py"
    script.write_text(textwrap.dedent(NESTED).format(method=method))
    pid, status = map(int, output_of(script).split())
    assert status == 0
    wait_until(lambda: not alive(pid))


def test_garbage_collected_sandbox_ends_its_worker():
    sandboxed = GradedTask(Probe())
    pid = int(graded(sandboxed, "pid").value)
    del sandboxed
    gc.collect()
    wait_until(lambda: not alive(pid))


@dataclass(frozen=True)
class Unloadable(Probe):
    def __reduce__(self):
        return fail, (ModuleNotFoundError("no module named riddles"),)


def test_task_that_the_worker_cannot_load_raises_a_one_line_error():
    with pytest.raises(UserError, match=r"^[^\n]*cannot load task Unloadable: ModuleNotFoundError[^\n]*$"):
        graded(GradedTask(Unloadable()), "fine")


def test_unpicklable_task_raises_a_one_line_error():
    @dataclass(frozen=True)
    class Local(Probe):
        pass

    with pytest.raises(UserError, match=r"^task Local cannot be sent to the reward process: [^\n]*$"):
        graded(GradedTask(Local()), "fine")


@pytest.mark.slow
def test_error_says_that_a_script_needs_a_main_guard(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent(PARENT).format(ending="", timeout=0.5).replace('if __name__ == "__main__"', "if True")
    )
    error = "the reward process cannot start: its process ended (exit status 1); a script that trains needs"
    assert f"{error} `if __name__" in output_of(script)


@pytest.mark.parametrize("timeout", [0, -1.0, 3e6, math.inf, math.nan])
def test_a_timeout_must_be_a_number_of_seconds(timeout):
    with pytest.raises(ValueError, match="must be a positive number of seconds, at most 1000000"):
        RewardConfig(timeout=timeout)


def test_other_attributes_of_the_task_are_forwarded():
    sandboxed = GradedTask(Probe())
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

"""`pellucid.train`: runs equal those of the command, can be left and resumed, and report mistakes in one line."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import types
from dataclasses import dataclass, replace
from pathlib import Path

import pandas
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import digits_task
import pellucid
from conftest import CountDigits, records
from forked import ran
from pellucid.policy import policy
from pellucid.reporting.run_files import list_checkpoints
from pellucid.rewards.terms import RewardTerm
from pellucid.tasks.curriculum import Curriculum
from pellucid.tasks.dataset import Dataset
from pellucid.tasks.prefixed import Prefixed
from pellucid.training import run, run_dir
from pellucid.types import NotBegunError, Prompt, Reward, UserError
from runs import asked_to_stop, in_processes, same_run, train, weights

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]


def digits(completions, **columns):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in texts]


def brevity(completions, **columns):
    return [-len(completion[0]["content"]) / 10 for completion in completions]


def each(run, act):
    for step in run:
        act(step)


@pytest.fixture
def small(model_dir, tmp_path):
    """Return settings for three steps of a tiny model, which take a fraction of a second."""
    return {
        "model": model_dir,
        "run": tmp_path / "run",
        "dtype": "float32",
        "steps": 3,
        "prompts_per_step": 2,
        "group_size": 4,
        "max_tokens": 8,
        "evaluate_every": 0,
    }


@pytest.mark.slow
def test_import_is_light_and_every_exported_name_resolves():
    heavy = "import sys; heavy = {'torch', 'transformers', 'datasets', 'pandas', 'numpy'}"
    names = "assert dir(pellucid) == pellucid.__all__ and not heavy & set(sys.modules)"
    begun = "pellucid.train(data=[{'question': '1+1=', 'answer': '2'}]); assert not heavy & set(sys.modules)"
    used = "[getattr(pellucid, name) for name in pellucid.__all__]; pellucid.algorithm.policy_loss"
    code = f"{heavy}; import pellucid; {names}; {begun}; {used}"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (Path(pellucid.__file__).parent / "py.typed").is_file()
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = pellucid.trian


# ---------------------------------------------------------------- runs like those of the command


@pytest.mark.slow
def test_steps_equal_those_of_the_command(recipe, tmp_path, undisturbed):
    whole, mine = undisturbed(recipe, "--algorithm.steps", 4), tmp_path / "mine"
    steps = list(pellucid.train(recipe=recipe, run=mine, steps=4))
    same_run(whole, mine)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    for step, logged in zip(steps, records(mine / "metrics.jsonl"), strict=True):
        assert step.metrics["reward/mean"] == logged["reward/mean"]
        assert len(step.groups) == 4 and len(step.groups[0].rewards) == 4
    settings = [json.loads((folder / "config.json").read_text()) for folder in (whole, mine)]
    assert settings[0] == settings[1]


@pytest.mark.slow
def test_loop_can_be_left_and_continued(recipe, tmp_path, capsys, undisturbed):
    whole, folder = undisturbed(recipe), tmp_path / "left"
    mine = pellucid.train(recipe=recipe, run=folder, checkpoint_every=4)
    for step in mine:
        if step.step == 3:
            break
    assert [path.name for path in list_checkpoints(folder)] == ["step-000003"]
    assert (folder / "report.html").is_file()
    assert not multiprocessing.active_children()
    run_dir.refuse_locked_run_dir(folder)
    told = f'stopped after step 3, nothing is lost; resume with: pellucid.train(resume="{folder}")\n'
    assert told in capsys.readouterr().out
    assert not mine.finished
    assert repr(mine) == f"<Run {folder}: 3 of 6 steps>"

    with pytest.raises(ZeroDivisionError):
        each(mine, lambda step: 1 / (4 - step.step))
    assert [path.name for path in list_checkpoints(folder)] == ["step-000003", "step-000004"]
    assert mine.finish() is mine
    assert mine.finished
    same_run(whole, folder)
    assert list(mine) == []
    assert "resume" not in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_leaving_the_loop_after_the_last_step_finishes_the_run(recipe, tmp_path, undisturbed):
    mine = pellucid.train(recipe=recipe, run=tmp_path / "run")
    for step in mine:
        if step.step == 6:
            break
    assert mine.finished
    same_run(undisturbed(recipe), tmp_path / "run")


@pytest.mark.slow
def test_new_loop_ends_the_open_loop(recipe, tmp_path, undisturbed):
    """A notebook cell that runs a second time finds the iterator of its first run under the same name."""
    mine = pellucid.train(recipe=recipe, run=tmp_path / "run")
    first = iter(mine)
    with pytest.raises(ZeroDivisionError):
        each(first, lambda step: 1 / (2 - step.step))
    second = iter(mine)
    assert next(second).step == 3
    assert list(first) == []
    assert mine.save(tmp_path / "between").is_dir()
    assert mine.finish().finished
    assert list(second) == []
    same_run(undisturbed(recipe), tmp_path / "run")


def test_step_inside_a_step_is_refused(small):
    """Here the reward function asks its own run for more steps."""

    def impatient(completions, **columns):
        try:
            mine.finish()
        except UserError as error:
            told.append(str(error))
        return digits(completions)

    told = []
    mine = pellucid.train(data=ROWS, reward=impatient, **small)
    assert mine.finish().finished
    assert set(told) == {f"the run in {mine.folder} is taking a step: wait for it"}


UNFINISHED = """
import sys
import pellucid
sys.path.append({tests!r})
from library.test_library import ROWS, digits

run = pellucid.train(
    model=sys.argv[1], run=sys.argv[2], data=ROWS, reward=digits, steps=3, prompts_per_step=2, group_size=4,
    max_tokens=8, evaluate_every=0, dtype="float32", lr=1e-3,
)
sys.kept = iter(run)
next(sys.kept)
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_script_that_ends_inside_a_loop_saves_a_checkpoint(processes, model_dir, tmp_path):
    (tmp_path / "script.py").write_text(UNFINISHED.format(tests=str(Path(__file__).parents[1])))
    done = in_processes(processes, tmp_path / "script.py", model_dir, tmp_path / "run")
    assert "Exception ignored" not in done.stderr + done.stdout
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-000001"]


FORKING = """
import os
import sys
import pellucid
from pellucid.types import UserError

if __name__ == "__main__":
    run = pellucid.train(
        model=sys.argv[1], run=sys.argv[2], data=[dict(question=f"{a}+1=", answer=str(a + 1)) for a in range(9)],
        reward=f"{os.path.dirname(__file__)}/rewards.py:digits", steps=4, prompts_per_step=2, group_size=4,
        max_tokens=8, evaluate_every=0, dtype="float32", lr=1e-3,
    )
    owner, ended = os.getpid(), []
    try:
        for number, step in enumerate(run):
            child = os.fork() if sys.argv[3] == "forks" else 1
            if not child:
                if number == 0:
                    sys.exit(3)
                if number == 1:
                    break
                continue
            if sys.argv[3] == "forks":
                ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    except UserError as error:
        told = str(error)
        sys.exit(5 if os.getpid() != owner and f"belongs to process {owner}" in told else told)
    if os.getpid() != owner:
        try:
            run.finish()
        except UserError:
            sys.exit(4)
    print("ENDED", ended, run.finished, flush=True)
"""


@pytest.mark.slow
def test_a_fork_of_a_loop_leaves_the_run_to_its_owner(model_dir, tmp_path):
    """The child exits, breaks out of the loop, or asks for another step: it writes nothing and ends no process."""
    (tmp_path / "rewards.py").write_text(
        "def digits(completions, **columns):\n"
        "    return [sum(c.isdigit() for c in completion[0]['content']) for completion in completions]\n"
    )
    (tmp_path / "script.py").write_text(FORKING)
    for how in ("forks", "alone"):
        done = in_processes(1, tmp_path / "script.py", model_dir, tmp_path / how, how)
        ended = [3, 4, 5, 5] if how == "forks" else []
        assert f"ENDED {ended} True" in done.stdout
    same_run(tmp_path / "forks", tmp_path / "alone")
    assert len(records(tmp_path / "forks" / "rollouts.jsonl")) == len(records(tmp_path / "alone" / "rollouts.jsonl"))


def forked():
    """Fork. Return the exit status of the child in the parent, and None in the child."""
    child = os.fork()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else None


@pytest.mark.slow
def test_forked_child_that_returns_into_a_step_ends(small):
    """Both in a reward that is computed in this process, and in other code that a step calls."""
    owner, ended = os.getpid(), []

    def forks(completions, **columns):
        ended.append(forked())
        return digits(completions)

    finished = pellucid.train(data=ROWS, reward=forks, **small).finish().finished
    steps = list(run.end_forked_copies(forked() for _ in range(2)))
    if os.getpid() != owner:
        os._exit(99)
    assert finished
    assert set(ended) == {0}
    assert steps == [0, 0]


@pytest.mark.slow
def test_command_and_library_continue_each_others_runs(recipe, tmp_path, undisturbed):
    for folder, first, second in (
        ("one", lambda run: next(iter(pellucid.train(recipe=recipe, run=run))), lambda run: train("--resume", run)),
        (
            "two",
            lambda run: train(recipe, "--run", run, "--algorithm.steps", 3, "--optimizer.schedule", "constant"),
            lambda run: pellucid.train(resume=run, steps=6, schedule="cosine").finish(),
        ),
    ):
        first(tmp_path / folder)
        second(tmp_path / folder)
    same_run(undisturbed(recipe), tmp_path / "one")
    assert len(records(tmp_path / "two" / "metrics.jsonl")) == 6


# ---------------------------------------------------------------- interrupts


@pytest.mark.slow
def test_interrupt_finishes_the_step_saves_and_is_raised(recipe, tmp_path, monkeypatch, capsys, undisturbed):
    mine, seen = pellucid.train(recipe=recipe, run=tmp_path / "run", checkpoint_every=0), []
    with asked_to_stop(monkeypatch), pytest.raises(KeyboardInterrupt):
        each(mine, lambda step: seen.append(step.step))
    assert seen == [1]
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-000001"]
    assert "stopped after step 1, nothing is lost" in capsys.readouterr().out
    pellucid.train(resume=tmp_path / "run", checkpoint_every=2).finish()
    same_run(undisturbed(recipe), tmp_path / "run")


class Interrupting:
    """An import finder that raises an interrupt when a module is imported for the first time."""

    def __init__(self, module):
        self.module, self.came = module, 0

    def find_spec(self, name, path=None, target=None):
        if name == self.module and not self.came:
            self.came += 1
            signal.raise_signal(signal.SIGINT)  # arrives in this thread immediately


def test_an_interrupt_waits_for_the_first_import_of_torch(small, monkeypatch):
    """A half-imported torch cannot be imported again: the process would end with a segmentation fault."""
    name = "pellucid.training.run"
    interrupting = Interrupting(name)
    monkeypatch.setattr(sys, "meta_path", [interrupting, *sys.meta_path])
    monkeypatch.setattr(importlib.import_module("pellucid.training"), "run", run)  # restored at the end
    monkeypatch.delitem(sys.modules, name)
    ours = pellucid.train(data=ROWS, reward=digits, **small)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs of a shell
    try:
        with pytest.raises(KeyboardInterrupt):
            next(iter(ours))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert interrupting.came == 1
    assert hasattr(sys.modules[name], "TrainingRun"), "the import went on to its end"
    assert len(list(ours)) == 3, "the same run can be iterated over"


def test_interrupt_between_steps_is_left_to_the_caller(recipe, tmp_path):
    def interrupted(_):
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        os.kill(os.getpid(), signal.SIGINT)

    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs of a shell
    try:
        with pytest.raises(KeyboardInterrupt):
            each(pellucid.train(recipe=recipe, run=tmp_path / "run"), interrupted)
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-000001"]


def test_second_interrupt_ends_the_run_at_once(recipe, tmp_path, monkeypatch, capsys):
    def twice(*_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run.grpo, "update_policy", twice)
    with pytest.raises(KeyboardInterrupt):
        pellucid.train(recipe=recipe, run=tmp_path / "run").finish()
    assert "stopped at once; saved files are kept; continue with: pellucid.train(" in capsys.readouterr().out
    run_dir.refuse_locked_run_dir(tmp_path / "run")


def test_interrupt_before_the_run_exists_offers_no_resume(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "build_components", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        pellucid.train(recipe=recipe, run=tmp_path / "run").finish()
    assert "saved files are kept; the same call starts the run again\n" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_training_works_in_a_thread(small):
    done = []
    small |= {"data": ROWS, "reward": digits}
    thread = threading.Thread(target=lambda: done.append(pellucid.train(**small).finish()))
    thread.start()
    thread.join()
    assert done[0].finished


def test_deterministic_mode_ends_with_the_loop(small):
    for _ in pellucid.train(data=ROWS, reward=digits, deterministic=True, **small):
        assert torch.are_deterministic_algorithms_enabled()
        break
    assert not torch.are_deterministic_algorithms_enabled()


# ---------------------------------------------------------------- the model


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"lora": 2}, {"offload": True, "dtype": "bfloat16"}], ids=["whole", "adapter", "offloaded"]
)
def test_model_of_the_run_equals_the_saved_weights(small, tmp_path, settings):
    mine = pellucid.train(data=ROWS, reward=digits, **{**small, **settings})
    with pytest.raises(UserError, match="take a step first"):
        _ = mine.model
    for step in mine:
        if step.step == 2:
            mine.model.save_pretrained(tmp_path / "between")
    mine.model.save_pretrained(tmp_path / "alone")
    assert mine.save(tmp_path / "both") == tmp_path / "both"
    expected = weights(mine.folder)
    for name in ("alone", "both"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    between = load_file(tmp_path / "between" / "model.safetensors")
    assert not all(torch.equal(between[key], expected[key]) for key in expected)
    AutoModelForCausalLM.from_pretrained(tmp_path / "both")
    assert AutoTokenizer.from_pretrained(tmp_path / "both").get_vocab() == mine.tokenizer.get_vocab()


def test_run_offers_metrics_evaluations_and_report(small):
    mine = pellucid.train(data=ROWS, reward=digits, **{**small, "evaluate_every": 2, "n": 2, "k": 0})
    assert (mine.metrics, mine.evaluations) == ([], {})
    with pytest.raises(UserError, match="nothing to report yet"):
        mine.report()
    mine.finish()
    assert [row["step"] for row in mine.metrics] == [1, 2, 3]
    assert list(mine.evaluations) == [0, 2, 3]
    assert mine.evaluations[0].task == "dataset"
    assert "<svg" in mine.report().read_text()


# ---------------------------------------------------------------- data and rewards


@pytest.mark.slow
def test_in_memory_rows_become_a_file_of_the_run(small, capsys):
    mine = pellucid.train(data=ROWS, reward="numeric", **small)
    assert not mine.folder.exists()
    for _ in mine:
        break
    settings = json.loads((mine.folder / "config.json").read_text())
    assert settings["task"]["data"] == str(mine.folder / "data.jsonl")
    assert len(settings["digests"]["task.data"]) == 64
    assert records(mine.folder / "data.jsonl") == ROWS
    with pytest.raises(UserError, match=r"data differs from .*data\.jsonl, the data of this run: leave out data="):
        pellucid.train(resume=mine.folder, data=ROWS[1:], reward="numeric")
    assert pellucid.train(resume=mine.folder, data=ROWS, reward="numeric").finish().finished
    assert train("--resume", mine.folder, "--algorithm.steps", 4) == 0


@pytest.mark.slow
def test_in_memory_test_rows_become_a_file_of_the_run(small, tmp_path):
    """They are evaluated but never trained on. A resume does not need them again, and refuses different rows."""
    test = ROWS[:5]
    settings = {**small, "evaluate_every": 2, "n": 0, "k": 0}
    mine = pellucid.train(data=ROWS, test_data=pandas.DataFrame(test), reward="numeric", **settings)
    for _ in mine:
        break
    section = json.loads((mine.folder / "config.json").read_text())["task"]
    assert section["test_data"] == str(mine.folder / "test_data.jsonl")
    assert records(mine.folder / "test_data.jsonl") == test
    with pytest.raises(UserError, match=r"test_data differs from .*test_data\.jsonl, .*: leave out test_data="):
        pellucid.train(resume=mine.folder, data=ROWS, test_data=ROWS[:4], reward="numeric")
    again = pellucid.train(resume=mine.folder, data=ROWS, test_data=test, reward="numeric", steps=4)
    assert next(iter(again)).step == 2
    assert pellucid.train(resume=mine.folder, steps=5).finish().finished
    assert mine.evaluations[0].n == 5
    asked = {row["prompt"] for row in records(mine.folder / "rollouts.jsonl")}
    assert asked and not asked & {row["question"] for row in test}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    named = {**settings, "run": tmp_path / "named", "steps": 1}
    assert pellucid.train(data=tmp_path / "train.jsonl", test_data=test, **named).finish().evaluations[0].n == 5


def test_a_run_that_cannot_begin_leaves_no_held_out_rows(small):
    small["run"].mkdir()
    with pytest.raises(UserError, match="there is no such file or folder"):
        pellucid.train(data=ROWS, test_data=ROWS[:5], reward=digits, **{**small, "model": "./no-such-model"}).finish()
    assert not list(small["run"].glob("*.jsonl"))
    (small["run"] / "test_data.jsonl").write_text("mine")
    with pytest.raises(UserError, match=r"holds test_data\.jsonl, not a run"):
        pellucid.train(data=ROWS, reward=digits, **small)


def test_function_reward_must_be_passed_again_on_resume(small, capsys):
    """Commands cannot load the function and say so. The run continues once the caller passes it again."""
    for _ in pellucid.train(data=ROWS, reward=digits, **small):
        break
    folder = small["run"]
    said = capsys.readouterr()
    assert f'pellucid.train(resume="{folder}"), with the functions and tasks that were given to it' in said.out
    line = (
        "this run's reward `digits` is a Python function, which commands cannot load: go on with the run in Python,"
        ' pellucid.train(resume="RUN", reward=...)'
    )
    assert train("--resume", folder) == 2
    assert capsys.readouterr().err == f"pellucid: {line}\n"
    with pytest.raises(SystemExit) as ended:
        pellucid_cli("eval", folder)
    assert ended.value.code == 2
    assert line in capsys.readouterr().err
    again = "this run's reward `digits` is a Python function: pass it again, reward=..."
    for arguments, line in ({}, again), ({"reward": brevity}, f"{again}; now there is `brevity`"):
        with pytest.raises(UserError) as told:
            pellucid.train(resume=folder, **arguments)
        assert str(told.value) == line
    edited = types.FunctionType(brevity.__code__, globals(), "digits")
    with pytest.raises(UserError, match=r'was trained with task\.rewards\.0\.name = .*, or .* with model=".*model"'):
        pellucid.train(resume=folder, reward=edited)
    assert len(pellucid.train(resume=folder, reward=digits).finish().metrics) == 3


def pellucid_cli(*arguments):
    from pellucid import cli  # noqa: PLC0415 - the library is tried without it

    cli.main(list(map(str, arguments)))


def test_several_rewards_have_weights_and_names(small):
    def digits(completions, **columns):
        return [0.25] * len(completions)

    here = globals()["digits"]
    [step] = pellucid.train(data=ROWS, reward=[here, (digits, 2), (brevity, 0.0), "tagged"], **{**small, "steps": 1})
    reward = step.groups[0].rewards[0]
    assert list(reward.parts) == ["digits", "digits-2", "brevity", "tagged"]
    assert dict(reward.weights) == {"digits": 1.0, "digits-2": 2.0, "brevity": 0.0, "tagged": 1.0}
    assert reward.value == pytest.approx(reward.parts["digits"] + 0.5)
    assert reward.parts["brevity"] < 0
    assert {r.parts["digits-2"] for group in step.groups for r in group.rewards} == {0.25}
    assert {r.parts["digits"] for group in step.groups for r in group.rewards} != {0.25}


def test_failed_reward_costs_only_its_own_group(small):
    """The reward raises for some questions. All samples of their groups fail, and no others."""
    odd = {row["question"] for row in ROWS[::2]}

    def careless(completions, question, **columns):
        return {}["no such key"] if odd & set(question) else digits(completions)

    mine = pellucid.train(data=ROWS, reward=careless, **small).finish()
    groups = [row["reward/failed"] / small["group_size"] for row in mine.metrics]
    assert 0 < sum(groups) < small["steps"] * small["prompts_per_step"]
    assert all(number == int(number) for number in groups)
    assert (mine.folder / "rewards.log").read_text().count("KeyError: 'no such key'") == 1


def test_run_with_only_failed_rewards_leaves_no_folder(small):
    with pytest.raises(
        NotBegunError, match="every reward of the first 8 samples failed, the first with lambda: KeyError"
    ):
        pellucid.train(data=ROWS, reward=lambda completions, **_: {}[0], **small).finish()
    assert not small["run"].exists()
    better = [{"question": "1=", "answer": "1"}, {"question": "2=", "answer": "2"}]
    [step] = pellucid.train(data=better, reward=digits, **{**small, "steps": 1})
    assert {group.prompt.answer for group in step.groups} <= {"1", "2"}, "the rows of the first attempt"


def test_a_run_that_cannot_begin_leaves_no_folder(small):
    with pytest.raises(UserError, match="there is no such file or folder"):
        pellucid.train(data=ROWS, reward=digits, **{**small, "model": "./no-such-model"}).finish()
    assert not small["run"].exists()


def test_failed_start_leaves_an_existing_folder_usable(small):
    small["run"].mkdir()
    with pytest.raises(UserError, match="there is no such file or folder"):
        pellucid.train(data=ROWS, reward=digits, **{**small, "model": "./no-such-model"}).finish()
    assert not (small["run"] / "data.jsonl").exists()
    assert pellucid.train(data=ROWS, reward=digits, **small).finish().finished


def test_second_run_in_a_folder_keeps_the_rows_of_the_first(small):
    """Both runs were created while the folder was free."""
    mine, other = (pellucid.train(data=rows, reward=digits, **small) for rows in (ROWS, ROWS[:20]))
    for _ in mine:
        break
    with pytest.raises(UserError, match=r'holds a run: resume with resume="'):
        next(iter(other))
    assert records(small["run"] / "data.jsonl") == ROWS
    assert pellucid.train(resume=small["run"], reward=digits).finish().finished


def test_prompts_may_have_the_forms_of_trl(small):
    """A string is the prompt text itself and gives string completions. A list of messages is a chat."""
    seen = []

    def reward(prompts, completions, solution, **columns):
        seen.append((prompts[0], completions[0], solution[0]))
        return [0.5 for _ in completions]

    for form in (str, lambda text: [{"role": "user", "content": text}]):
        rows = [{"prompt": form(text), "solution": text[0]} for text in ("1+1=", "2+2=", "3+3=")]
        for _ in pellucid.train(data=rows, reward=reward, **{**small, "run": small["run"] / str(len(seen))}):
            break
    texts, chats = ([each for each in seen if isinstance(each[0], kind)] for kind in (str, list))
    assert texts and all(isinstance(completion, str) for _, completion, _ in texts)
    assert chats and all(completion[0]["role"] == "assistant" for _, completion, _ in chats)
    assert {solution for *_, solution in seen} <= {"1", "2", "3"}


# ---------------------------------------------------------------- tasks


class Plain:
    """A task that is not a dataclass."""

    def sample(self, step, n):
        return [Prompt(f"{step}/{i}", f"{step + i}+1=") for i in range(n)]

    def reward(self, prompt, completion):
        return Reward(sum(c.isdigit() for c in completion.text) / 8)


class Split(Plain):
    def __init__(self, split="train", asked=None):
        self.split, self.seen, self.asked = split, 0, [] if asked is None else asked

    def with_split(self, split):
        return Split(split, self.asked)

    def sample(self, step, n):
        self.asked.append(self.split)
        return super().sample(step, n)

    def observe(self, step, groups):
        self.seen += len(groups)
        return {"seen": self.seen}

    def state(self):
        return {"seen": self.seen}

    def load_state(self, state):
        self.seen = state["seen"]


@pytest.mark.slow
def test_task_from_a_file_is_recorded_by_its_path(small, tmp_path):
    task = Curriculum(task=digits_task.Digits(), pool=8)
    mine = pellucid.train(task=task, seed=7, **small).finish()
    settings = json.loads((mine.folder / "config.json").read_text())
    assert settings["task"]["name"] == "curriculum"
    assert settings["task"]["pool"] == 8
    assert settings["task"]["task"]["name"] == f"{digits_task.__file__}:Digits"
    assert settings["task"]["task"]["seed"] == 7
    assert train("--resume", mine.folder, "--algorithm.steps", 4) == 0
    assert len(pellucid.train(task=task, resume=mine.folder, steps=5).finish().metrics) == 5


@pytest.mark.parametrize("evaluate_every", [0, 2])
def test_a_task_may_be_any_object(small, evaluate_every):
    task = Split()
    settings = {**small, "evaluate_every": evaluate_every, "n": 2, "k": 0}
    for _ in pellucid.train(task=task, **settings):
        break
    assert (task.seen, small["run"].joinpath("rewards.log").exists()) == (2, False)
    anew = Split()
    mine = pellucid.train(resume=small["run"], task=anew).finish()
    assert [row["seen"] for row in mine.metrics] == [2, 4, 6]
    assert list(mine.evaluations) == ([0, 2, 3] if evaluate_every else [])
    assert ("test" in task.asked) == bool(evaluate_every)


@pytest.mark.slow
def test_task_defined_in_a_function_is_graded_in_this_process(small):
    @dataclass(frozen=True)
    class Local(CountDigits):
        model: object = None

    assert pellucid.train(task=Local(model=torch.nn.Linear(1, 1)), **{**small, "steps": 1}).finish().finished
    assert pellucid.train(task=Local(), **{**small, "run": small["run"] / "two", "evaluate_every": 1}).finish().finished


def test_rows_go_to_the_innermost_task_of_a_recipe(small, tmp_path):
    file = tmp_path / "wrapped.toml"
    file.write_text('[task]\nname = "curriculum"\npool = 8\n[task.task]\nname = "dataset"\ndata = "none.jsonl"\n')
    rows = [{"question": f"{a}+1=", "solution": str(a + 1)} for a in range(9)]
    mine = pellucid.train(recipe=file, data=rows, reward=digits, **small)
    for step in mine:
        assert {group.prompt.answer for group in step.groups} <= {row["solution"] for row in rows}
        break
    section = json.loads((mine.folder / "config.json").read_text())["task"]
    assert (section["name"], section["pool"], section["task"]["name"]) == ("curriculum", 8, "dataset")
    assert section["task"]["data"] == str(mine.folder / "data.jsonl")
    assert section["task"]["rewards"][0]["name"] == "here:digits"


def test_shipped_recipe_can_be_given_by_name():
    mine = pellucid.train(recipe="variants/dapo")
    assert "dapo-" in mine.folder.name
    assert repr(mine) == repr(pellucid.train(recipe="dapo", run=mine.folder))


NESTED = """
from dataclasses import dataclass, field
import digits_task

@dataclass(frozen=True)
class Odd(digits_task.Digits):
    rewards: float = 1.0
    hidden: int = field(default=3, init=False)

@dataclass(frozen=True)
class Named(digits_task.Digits):
    name: str = "yours"
    def sample(self, step, n):
        assert self.name == "mine"
        return super().sample(step, n)

class Outer:
    @dataclass(frozen=True)
    class Inner(digits_task.Digits):
        pass
"""


@pytest.mark.parametrize("make", ["Odd()", "Outer.Inner()", "Named(name='mine')"])
def test_tasks_with_unusual_fields_or_locations_train(small, tmp_path, monkeypatch, make):
    (tmp_path / "nested_tasks.py").write_text(NESTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nested_tasks", raising=False)
    task = eval(make, vars(importlib.import_module("nested_tasks")))
    [step] = pellucid.train(task=task, **{**small, "steps": 1})
    assert all(reward.error == "" for group in step.groups for reward in group.rewards)
    name = json.loads((small["run"] / "config.json").read_text())["task"]["name"]
    assert name.startswith(str(tmp_path) if make == "Odd()" else "here:")


# ---------------------------------------------------------------- other objects


@pytest.mark.slow
def test_an_objective_may_be_a_function(small):
    """The second function has the same name as the first."""
    mine = []
    for sign in (1.0, -1.0):

        def objective(tokens, cfg, sign=sign):
            return sign * tokens.advantages * tokens.logprobs

        def advantage(grades, cfg):
            return grades.rewards - grades.rewards.mean(-1, keepdim=True)

        settings = {**small, "run": small["run"] / str(sign), "steps": 1, "lr": 1e-2}
        run = pellucid.train(data=ROWS, reward=digits, objective=objective, advantage=advantage, **settings).finish()
        mine.append(weights(run.folder))
        reference = {**settings, "objective": "reinforce", "advantage": "centered", "run": small["run"] / f"as {sign}"}
        theirs = weights(pellucid.train(data=ROWS, reward=digits, **reference).finish().folder)
        assert all(torch.equal(mine[-1][name], theirs[name]) for name in theirs) == (sign > 0)
    assert not all(torch.equal(mine[0][name], mine[1][name]) for name in mine[0])


OWN = """
from dataclasses import dataclass
from pellucid.types import Prompt, Reward

def objective(tokens, cfg):
    return {sign}1.0 * tokens.advantages * tokens.logprobs

def reward(completions, **columns):
    return [{sign}1.0 * len(completion) for completion in completions]

@dataclass(frozen=True)
class Task:
    seed: int = 0
    split: str = "train"
    def sample(self, step, n):
        return [Prompt(str(i), "{sign}1=") for i in range(n)]
    def reward(self, prompt, completion):
        return Reward(len(set(completion.text)) / 8)
"""


def written(path, sign):
    path.write_text(OWN.format(sign=sign))
    return path


def test_edited_objective_file_is_reloaded_in_the_same_session(small, tmp_path):
    """The edited file has the same size and was written in the same second."""
    mine = []
    for sign in "+-":
        file = written(tmp_path / "edited_objective.py", sign)
        settings = {**small, "run": small["run"] / sign, "steps": 1, "objective": f"{file}:objective"}
        mine.append(weights(pellucid.train(data=ROWS, reward=digits, **settings).finish().folder))
    assert not all(torch.equal(mine[0][name], mine[1][name]) for name in mine[0])


@pytest.mark.slow
def test_edited_task_and_reward_files_are_reloaded_in_the_same_session(small, tmp_path):
    seen = []
    for sign in "+-":
        file = written(tmp_path / "edited_task.py", sign)
        settings = {**small, "steps": 1}
        [asked] = pellucid.train(task=f"{file}:Task", **{**settings, "run": small["run"] / f"{sign}-task"})
        [graded] = pellucid.train(data=ROWS, reward=f"{file}:reward", **{**settings, "run": small["run"] / sign})
        seen.append((asked.groups[0].prompt.text, graded.groups[0].rewards[0].value))
    assert seen == [("+1=", 1.0), ("-1=", -1.0)]


@pytest.mark.slow
def test_edited_prefixes_are_read_again_in_the_same_session(small, tmp_path):
    file, given = tmp_path / "prefixes.jsonl", []
    for sign in "+-":
        prefix = {"question": "Q", "answer": "1", "source": "teacher", "index": 0, "text": sign}
        file.write_text("".join(json.dumps(line) + "\n" for line in ({"settings": {}}, prefix)))
        task = Prefixed(Dataset(data=str(tmp_path / "rows.jsonl"), rewards=(RewardTerm("exact"),)), file=str(file))
        (tmp_path / "rows.jsonl").write_text('{"question": "Q", "answer": "1"}\n' * 20)
        settings = {**small, "run": small["run"] / sign, "steps": 1}
        [step] = pellucid.train(task=replace(task, dropout=0.0), **settings)
        given.append(step.groups[0].prompt.prefix)
    assert given == ["+", "-"]


def test_run_refuses_code_edited_after_the_call(small, tmp_path):
    file = written(tmp_path / "edited_between.py", "+")
    mine = pellucid.train(data=ROWS, reward=digits, objective=f"{file}:objective", **small)
    for _ in mine:
        break
    written(file, "-")
    with pytest.raises(UserError, match=r"the file of objective was edited after pellucid\.train was called"):
        mine.finish()
    written(file, "+")
    assert mine.finish().finished


SCRIPT = """
import pellucid

rows = [{{"question": f"{{a}}+1=", "answer": str(a + 1)}} for a in range(9)]
{guard}
    pellucid.train(model={model!r}, data=rows, steps=1, group_size=2, max_tokens=2, evaluate_every=0).finish()
"""


@pytest.mark.slow
@pytest.mark.parametrize("guard", ['if __name__ == "__main__":', "if True:"])
def test_script_with_rewards_in_processes_needs_a_main_guard(guard, model_dir, tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT.format(model=str(model_dir), guard=guard))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    monkeypatch.chdir(tmp_path)
    done = ran(tmp_path / "script.py", env=environment)
    if "__main__" in guard:
        assert done.returncode == 0, done.stderr
    else:
        assert 'a reward process imports this script: put `if __name__ == "__main__":` around' in done.stderr
        told = "UserError: the reward process cannot start: its process ended (exit status 1); a script that trains"
        assert f'{told} needs `if __name__ == "__main__":` around it (docs/reference/python.md)' in done.stderr
        assert len(list((tmp_path / "runs").iterdir())) == 1, "none of the reward process"


TWO = """
import sys
import pellucid
sys.path.append({tests!r})
from library.test_library import ROWS, digits

run = pellucid.train(
    model=sys.argv[1], run=sys.argv[2], data=ROWS, reward=digits, steps=3, prompts_per_step=2, group_size=4,
    max_tokens=8, evaluate_every=0, dtype="float32", lr=1e-3,
)
for step in run:
    if step.step == 2:
        break
assert not run.finished
assert run.finish().finished
"""


@pytest.mark.slow
def test_two_processes_share_the_rows_and_leave_the_loop_together(model_dir, tmp_path):
    (tmp_path / "two.py").write_text(TWO.format(tests=str(Path(__file__).parents[1])))
    for processes in (1, 2):
        in_processes(processes, tmp_path / "two.py", model_dir, tmp_path / str(processes))
    one, two = (weights(tmp_path / name) for name in "12")
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- mistakes


def mistakes():
    data = {"data": ROWS, "reward": digits}
    return {
        "pellucid.train has no setting group_sise; did you mean group_size?": {**data, "group_sise": 4},
        "every is a setting of evaluate and checkpoint: use evaluate_every or checkpoint_every": {**data, "every": 4},
        "algorithm.group_size: Input should be a valid integer": {**data, "group_size": "many"},
        "pellucid.train: algorithm: group_size = 1 must be at least 2": {**data, "group_size": 1},
        "data is of type int: give a list of dicts": {"data": 7},
        "data is empty: give a list of dicts": {"data": []},
        "data is a pandas Series, which is one column: give a DataFrame, data.to_frame()": {
            "data": pandas.Series(["1+1=", "1+2="], name="question"),
            "reward": digits,
        },
        'data = "nope" is not a local file': {"data": "nope", "reward": digits},
        "nope.jsonl: there is no such file": {"data": "nope.jsonl", "reward": digits},
        "no.csv: there is no such file": {"data": ["no.csv", "nope.csv"], "reward": digits},
        "pellucid.train has no setting stpes; did you mean steps? pellucid.train has no setting bateau": {
            **data,
            "stpes": 3,
            "bateau": 1,
        },
        "data, row 2, is of type int": {"data": [{"question": "?"}, 3], "reward": digits},
        'test_data, row 1: no column "answer"': {"data": ROWS, "test_data": [{"question": "1+1="}]},
        "test.csv: there is no such file": {"data": ROWS, "test_data": "test.csv"},
        "test_data= needs a task that reads data: give data=, too": {"test_data": ROWS},
        "test_share=0 holds no row out for evaluations: set evaluate_every=0, a test_share above 0, or test_data": {
            **data,
            "test_share": 0,
        },
        "steps= and data_epochs= both say how long a run is: leave one out": {**data, "steps": 3, "data_epochs": 2},
        "optimizer.warmup: Input should be a valid integer, got a number with a fractional part (got 0.1); it counts"
        " optimizer steps: a share of the run is warmup_ratio * steps * epochs * minibatches": {**data, "warmup": 0.1},
        "no reward and no gold answers: give reward=": {"data": [{"question": "1"}, {"question": "2"}]},
        'data, row 1: no column "answer"': {"data": [{"question": "1"}, {"question": "2"}], "reward": "numeric"},
        'data, row 2: the answer "two" holds no number': {
            "data": [{"question": "1", "answer": "1"}, {"question": "2", "answer": "two"}]
        },
        'data, row 1: no column "question"; the columns are text, answer': {"data": [{"text": "?", "answer": "1"}] * 2},
        "data, row 1, has a column 0: the names of columns must be strings": {"data": [{0: "?"}], "reward": digits},
        "nowhere.toml: there is no such file, and no recipe of this name": {"recipe": "nowhere.toml"},
        'resume="no where": there is no run in that folder': {"resume": "no where"},
        "reward is of type int: give a function": {"data": ROWS, "reward": 3},
        "reward has a tuple that is not (term, weight)": {"data": ROWS, "reward": (digits, brevity)},
        "reward is an empty list": {"data": ROWS, "reward": []},
        'reward "numric" is unknown; did you mean "numeric"?': {"data": ROWS, "reward": "numric"},
        'reward= needs task "dataset", which data= selects': {"reward": digits},
        'data= needs task "dataset", which data= selects': {"data": ROWS, "task": "gsm8k"},
        'task "gsm9k" is unknown; did you mean "gsm8k"?': {"task": "gsm9k"},
        "task is of type object, which has no sample and no reward": {"task": object()},
        "model is a dict: give its folder or Hub id": {**data, "model": {}},
        "resume= continues with the settings of that run: leave out recipe= and run=": {"resume": "a", "run": "b"},
        'resume="nowhere": there is no run in that folder': {"resume": "nowhere"},
    }


@pytest.mark.parametrize("told", mistakes())
def test_mistake_raises_user_error_at_the_call(told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as error:
        pellucid.train(**mistakes()[told])
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [{}, {"data": ROWS}, {"steps": 3}])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("task = 'gsm8k'", "task: must be a table"),
        ("[task]\nname = ['a']", "task.name: must be a text"),
        ("[task]\nname = 'curriculum'\ntask = 3", "task.task: must be a table"),
        ("algorithm = 3", "algorithm: must be a table"),
    ],
)
def test_non_table_in_a_recipe_raises_user_error_at_the_call(text, told, arguments, tmp_path):
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(UserError, match=told):
        pellucid.train(recipe=tmp_path / "recipe.toml", run=tmp_path / "run", **arguments)


def test_wrong_reward_signature_raises_before_the_model_is_loaded(small, monkeypatch):
    monkeypatch.setattr(policy, "load_policy", None)
    mine = pellucid.train(data=ROWS, reward=lambda completions, answers: [0.0 for _ in completions], **small)
    with pytest.raises(UserError, match=r"reward lambda .*accept \*\*kwargs as well; it is called with question, ans"):
        mine.finish()


def test_finished_run_says_so_and_continues_with_more_steps(small, capsys, monkeypatch):
    folder = pellucid.train(data=ROWS, reward="numeric", **small).finish().folder
    capsys.readouterr()
    again = pellucid.train(resume=folder)
    told = f"{folder} is finished after step 3: nothing is left to do; "
    assert capsys.readouterr().out == f"{told}steps=6 would take more steps\n"
    assert again.finish().model, "its model can still be had"
    with monkeypatch.context() as patched:
        patched.setattr(policy, "load_policy", None)
        capsys.readouterr()
        assert train("--resume", folder) == 0
        assert capsys.readouterr().out == f"{told}--algorithm.steps 6 would take more steps\n"
    assert train("--resume", folder, "--algorithm.steps", 4) == 0
    assert len(again.metrics) == 4


def test_evaluating_a_task_without_held_out_questions_raises(small):
    with pytest.raises(UserError, match="task Plain has no held-out questions: give it with_split"):
        pellucid.train(task=Plain(), **{**small, "evaluate_every": 2}).finish()
    assert pellucid.train(task=Plain(), **small).finish().finished


def test_folder_with_a_run_or_data_is_refused(small, tmp_path):
    mine = pellucid.train(data=ROWS, reward=digits, **small)
    for _ in mine:
        break
    with pytest.raises(UserError, match=r'holds a run: resume with resume=".*run", or choose another folder with run='):
        pellucid.train(data=ROWS, reward=digits, **small)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "data.jsonl").write_text("mine")
    with pytest.raises(UserError, match=r"holds data\.jsonl, not a run"):
        pellucid.train(data=ROWS, reward=digits, **{**small, "run": tmp_path / "mine"})


@pytest.mark.slow
def test_loop_continues_after_its_folder_refuses_another_run(recipe, tmp_path, undisturbed):
    for _ in (mine := pellucid.train(recipe=recipe, run=tmp_path / "run")):
        break
    other = pellucid.train(resume=mine.folder)
    held = iter(mine)
    assert next(held).step == 2
    with pytest.raises(UserError, match=f"process {os.getpid()} trains in"):
        next(iter(other))
    assert [step.step for step in held] == [3, 4, 5, 6]
    same_run(undisturbed(recipe), mine.folder)


def test_runs_have_folders_of_their_own(tmp_path, monkeypatch, small):
    monkeypatch.chdir(tmp_path)
    settings = {name: value for name, value in small.items() if name != "run"}
    folders = {pellucid.train(data=ROWS, reward=digits, **settings).folder for _ in range(3)}
    assert len(folders) == 3
    assert {folder.parent for folder in folders} == {Path("runs")}
    assert not (tmp_path / "runs").exists()


def test_run_with_function_rewards_is_served_without_a_task(small, capsys):
    from pellucid.serve import api, command  # noqa: PLC0415 - the library is tried without it

    mine = pellucid.train(data=ROWS, reward=digits, **small).finish()
    served = api.load_served_model(command.ServeCommand((str(mine.folder),)))
    assert served.task is None
    assert "! this run's reward `digits` is a Python function, which" in capsys.readouterr().out

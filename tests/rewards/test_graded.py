"""Test the grading of a whole step: tasks that compare siblings, wrapped tasks, and several processes."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import sibling_task
from pickled import FIRST, Mine, Named
from sibling_task import Siblings

from conftest import records
from pellucid.api import ObjectRegistry, convert_task_to_section
from pellucid.rewards import pool
from pellucid.rewards.grading import GradedTask
from pellucid.rewards.parts import RewardPart
from pellucid.rewards.pool import PoolClosedError
from pellucid.rewards.settings import RewardConfig
from pellucid.rewards.terms import RewardTerm
from pellucid.tasks.curriculum import Curriculum
from pellucid.tasks.dataset import Dataset
from pellucid.tasks.given import make_task_class
from pellucid.tasks.prefixed import Prefixed
from pellucid.types import Completion, Group, Progress, Prompt, UserError, grade_groups
from pellucid.utils.plugins import provide_objects
from runs import in_two_processes, train

RANKED = f"{Path(__file__).with_name('trl_functions.py')}:ranked"
SECOND = Prompt("q", "second?")


def said(text):
    return Completion((1,), (-0.5,), text, True)


def pairs(*texts):
    """Return (prompt, completion) pairs of two groups of equal size."""
    return [(FIRST if i < len(texts) / 2 else SECOND, said(text)) for i, text in enumerate(texts)]


@pytest.fixture(params=[False, True], ids=["there", "here"])
def graded(request):
    made = []

    def make(task, cfg=None):
        made.append(GradedTask(task, cfg, in_process=request.param))
        return made[-1]

    yield make
    for each in made:
        each.close()


# ---------------------------------------------------------------- tasks that compare siblings


def test_task_may_grade_all_completions_of_a_step_in_one_call(graded):
    rewards = graded(Siblings()).reward_all(pairs("a", "bbb", "cc", "dddd", "ee", "ffff"))
    assert [reward.value for reward in rewards] == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    assert {reward.extra["of"] for reward in rewards} == {6}


def test_error_fails_only_its_group(graded):
    rewards = graded(Siblings()).reward_all(pairs("a", "bad", "cc", "d"))
    assert [reward.failed for reward in rewards] == [True, True, False, False]
    assert rewards[0].error == f"KeyError: 'bad' ({Path(sibling_task.__file__).name}, line 23)"
    assert [reward.value for reward in rewards[2:]] == [1.0, 0.0]


def test_a_wrong_number_of_rewards_is_an_error(graded):
    rewards = graded(Siblings(text="short")).reward_all(pairs("a", "b"))
    assert {reward.error for reward in rewards} == {
        "the task returned 1 rewards for 2 completions: return one reward per completion"
    }


def test_task_with_a_rewards_method_needs_no_reward_method():
    """This holds for a dataclass in a file and for any other object."""

    class Plain:
        sample = Siblings().sample

        def rewards(self, prompts, completions):
            return Siblings().rewards(prompts, completions)

    assert convert_task_to_section(Siblings(text="x"), ObjectRegistry())["name"].endswith("sibling_task.py:Siblings")
    around = make_task_class(Plain())()
    assert [reward.value for reward in GradedTask(around, in_process=True).reward_all(pairs("a", "bb"))] == [1.0, 1.0]

    class Nothing:
        sample = Siblings().sample

    with pytest.raises(UserError, match="no reward"):
        convert_task_to_section(Nothing(), ObjectRegistry())


def test_helper_named_rewards_is_not_the_batch_protocol(graded):
    said_so = [(FIRST, replace(said(text), sampling_mask=[[1]])) for text in ("a", "bb")]
    assert [reward.value for reward in graded(Named()).reward_all(said_so)] == [1.0, 2.0]


def test_dataset_subclass_uses_its_own_reward(rows, graded):
    assert [reward.value for reward in graded(Mine(data=rows)).reward_all(pairs("a", "b"))] == [7.0, 7.0]


@dataclass(frozen=True)
class Renamed(Dataset):
    """A dataset under another class name."""


def test_dataset_given_as_an_object_compares_siblings(rows):
    task = GradedTask(make_task_class(Renamed(data=rows, rewards=(RewardTerm(RANKED),), chat=False))(), in_process=True)
    assert [r.value for r in task.reward_all([(FIRST, said(text)) for text in ("", "aa", "aaaa")])] == [0.0, 0.5, 1.0]


def test_non_finite_sum_is_a_failed_reward(rows, graded):
    terms = (RewardTerm("exact", weight=1e300), RewardTerm("exact", weight=1e39))
    reward = graded(Dataset(data=rows, rewards=terms)).reward(Prompt("p", "?", "a"), said("a"))
    assert reward.failed
    assert reward.error.startswith("the reward is beyond 3.4e+38")
    reward = graded(Dataset(data=rows, rewards=(RewardTerm("exact", weight=math.nan),))).reward(FIRST, said("a"))
    assert reward.error.startswith("the reward is nan")


def test_grading_nothing_returns_an_empty_list(graded):
    assert graded(Siblings()).reward_all([]) == []


# ---------------------------------------------------------------- wrapped tasks


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}?", "answer": str(n)}) + "\n" for n in range(12)))
    return str(path)


@pytest.mark.parametrize("around", [lambda task: task, Curriculum, Prefixed, lambda t: Prefixed(Curriculum(t))])
def test_wrapped_task_compares_siblings(around, rows, graded):
    task = graded(around(Dataset(data=rows, rewards=(RewardTerm(RANKED),), chat=False)))
    assert task.is_batch_graded
    rewards = task.reward_all([(FIRST, said(text)) for text in ("", "aa", "aaaa")])
    assert [reward.value for reward in rewards] == [0.0, 0.5, 1.0]


def test_prefix_is_graded_as_part_of_the_answer(rows, graded):
    task = graded(Prefixed(Dataset(data=rows, rewards=(RewardTerm("exact"),), chat=False)))
    prompt = Prompt("p", "12?", "12", prefix="1")
    assert task.reward(prompt, said("2")).value == 1.0
    assert task.reward(prompt, said("12")).value == 0.0


# ---------------------------------------------------------------- graders and their failures


class Half:
    """A grader that fails for every other completion."""

    def grade(self, pairs):
        return [
            RewardPart(2.0, logged={"seen": 1.0}) if i % 2 else RewardPart(error="no answer") for i in range(len(pairs))
        ]


def test_grader_supplies_its_term_and_fails_only_its_completions(rows, graded):
    terms = (RewardTerm("exact"), RewardTerm("regex", pattern="x", weight=0.5), RewardTerm(RANKED, weight=0.1))
    task = GradedTask(Dataset(data=rows, rewards=terms, chat=False), graders={1: Half()})
    prompt = Prompt("p", "1?", "a")
    rewards = task.reward_all([(prompt, said(text)) for text in ("a", "a", "aa", "aa")])
    task.close()
    assert [reward.failures for reward in rewards] == [{"regex": "no answer"}, {}, {"regex": "no answer"}, {}]
    assert [reward.value for reward in rewards if not reward.failed] == [1.0 + 0.5 * 2.0, 0.5 * 2.0 + 0.1]
    assert rewards[0].error == "regex: no answer"
    assert rewards[1].logged == {"seen": 1.0}
    assert rewards[0].parts == {"exact": 1.0, "ranked": 0.0}


# ---------------------------------------------------------------- runs


COUNTING = '''
import json, os
from pathlib import Path


def counted(prompts, completions, question, trainer_state, **kwargs):
    """Longer than its siblings; a line in a file for each completion that is judged."""
    step, calls = trainer_state.global_step, Path(__file__).with_name("judged.jsonl")
    assert trainer_state.max_steps == 2
    with calls.open("a") as file:
        for asked, completion in zip(question, completions):
            file.write(json.dumps([step, asked, completion, os.getpid()]) + "\\n")
    kwargs["log_extra"]("siblings", [question.count(asked) for asked in question])
    kwargs["log_metric"]("calls", 1.0)
    mean = {q: sum(len(c) for o, c in zip(question, completions) if o == q) / question.count(q) for q in question}
    return [float(len(completion) > mean[asked]) for asked, completion in zip(question, completions)]
'''


def run_counting(folder, model_dir, starts):
    """Train a run whose reward compares siblings; return the graded completions and the run folder."""
    folder.mkdir()
    (folder / f"counting_{folder.name}.py").write_text(COUNTING)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"question": f"{n}?"}) + "\n" for n in range(12)))
    (folder / "recipe.toml").write_text(
        f"""
        [policy]
        model = "{model_dir}"
        dtype = "float32"
        [task]
        name = "dataset"
        data = "{folder}/rows.jsonl"
        chat = false
        rewards = [{{name = "{folder}/counting_{folder.name}.py:counted"}}]
        [algorithm]
        steps = 2
        prompts_per_step = 4
        group_size = 4
        [sampler]
        max_tokens = 6
        [evaluate]
        every = 0
        """
    )
    starts(folder / "recipe.toml", "--run", folder / "run", "--optimizer.lr", "1e-4")
    judged = [json.loads(line) for line in (folder / "judged.jsonl").read_text().splitlines()]
    return judged, folder / "run"


@pytest.mark.slow
def test_two_processes_grade_each_completion_once_with_equal_values(tmp_path, model_dir):
    alone, one = run_counting(tmp_path / "one", model_dir, train)
    shared, two = run_counting(
        tmp_path / "two", model_dir, lambda *words: in_two_processes("-m", "pellucid", "train", *words)
    )
    assert len({pid for *_, pid in alone}) == 1
    assert len({pid for *_, pid in shared}) == 2
    assert Counter(map(tuple, (j[:3] for j in alone))) == Counter(map(tuple, (j[:3] for j in shared)))
    for mine, theirs in zip(records(one / "rollouts.jsonl"), records(two / "rollouts.jsonl"), strict=True):
        assert mine["reward"] == theirs["reward"]
        assert mine["extra"] == theirs["extra"] == {"siblings": 4}
    assert [r["logged/calls"] for r in records(one / "metrics.jsonl")] == [1.0, 1.0]
    assert any(0 < r["reward/mean"] < 1 for r in records(one / "metrics.jsonl")), "siblings were compared"
    of_steps = Counter(step for step, *_ in shared)
    looked = len(shared) - 2 * 16
    assert of_steps == {0: 16 + looked, 1: 16}


def test_progress_is_passed_to_the_graded_task(graded):
    task, seen = Siblings(), []

    class Watched(GradedTask):
        def reward_all(self, pairs, progress):
            seen.append(progress)
            return super().reward_all(pairs, progress)

    grade_groups(Watched(task, in_process=True), [Group(FIRST, (1,), (said("a"),))], Progress(3, 9))
    assert seen == [Progress(3, 9)]


@pytest.mark.slow
def test_in_process_rewards_have_no_time_limit(rows):
    async def later(completions, **kwargs):
        await asyncio.sleep(0.5)
        return [1.0 for _ in completions]

    with provide_objects({"here:later": later}):
        task = Dataset(data=rows, rewards=(RewardTerm("here:later"),), chat=False)
        assert (
            GradedTask(task, RewardConfig(step_timeout=0.1), in_process=True).reward_all(pairs("a", "b"))[0].value
            == 1.0
        )


def test_closing_the_pool_during_grading_raises_pool_closed_error(rows):
    task = GradedTask(Dataset(data=rows, rewards=(RewardTerm(RANKED.replace("ranked", "hangs")),), chat=False))
    with ThreadPoolExecutor(1) as beside:
        computing = beside.submit(task.reward_all, pairs("a", "b"))
        while not task._executor._workers or not task._executor._workers[0].running_terms:
            time.sleep(0.01)
        task.close()
        with pytest.raises(PoolClosedError, match="still being computed when their processes were closed"):
            computing.result()


@pytest.mark.parametrize("moment", ["before", "behind"])
def test_closing_the_pool_around_a_wait_raises_pool_closed_error(rows, monkeypatch, moment):
    task = GradedTask(Dataset(data=rows, rewards=(RewardTerm(RANKED.replace("ranked", "hangs")),), chat=False))
    waited = pool.wait

    def closing(connections, timeout):
        task.close()
        return waited(connections, timeout)

    def closed(connections, timeout):
        ready = waited(connections, 0.1)
        task.close()
        return ready

    monkeypatch.setattr(pool, "wait", closing if moment == "before" else closed)
    with pytest.raises(PoolClosedError, match="still being computed when their processes were closed"):
        task.reward_all(pairs("a", "b"))


def test_provided_asynchronous_functions_are_found(rows):
    async def later(completions, **kwargs):
        return [1.0 for _ in completions]

    with provide_objects({"here:later": later}):
        task = GradedTask(
            Dataset(data=rows, rewards=(RewardTerm("here:later"),), chat=False), RewardConfig(), in_process=True
        )
        assert [reward.value for reward in task.reward_all(pairs("a", "b"))] == [1.0, 1.0]

"""Test the reasoning_gym task against the package itself."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from itertools import product

import pytest

from conftest import records
from pellucid.config import dump_config, load_config
from pellucid.rewards.grading import GradedTask
from pellucid.tasks.prompts import assign_split
from pellucid.tasks.reasoning_gym import TEST_SHARE, UNORDERED_FAMILIES, ReasoningGym
from pellucid.types import ROUND_STRIDE, Completion, UserError, with_split
from runs import train

package = pytest.importorskip("reasoning_gym")
FAMILIES = (
    *("arc_1d", "basic_arithmetic", "chain_sum", "countdown", "course_schedule", "family_relationships", "gcd"),
    *("gsm_symbolic", "leg_counting", "letter_counting", "maze", "mini_sudoku", "n_queens", "number_sorting"),
    *("prime_factorization", "simple_equations", "spell_backward", "syllogism", "time_intervals", "tower_of_hanoi"),
)
SUMS = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
"""Options of a chain_sum task that has 200 questions."""
MIXED = {
    "datasets": [
        {"name": "gcd", "weight": 3.0, "config": {}},
        {"name": "chain_sum", "weight": 1.0, "config": {"max_terms": 3}},
    ]
}


def said(text):
    return Completion((1,), (-0.5,), text, True)


@pytest.mark.parametrize("family", FAMILIES)
def test_gold_answers_score_1_and_others_score_what_the_package_gives(family):
    task, judge = ReasoningGym(family=family), package.create_dataset(family, seed=1, size=1)
    for prompt in task.sample(0, 4):
        right = task.reward(prompt, said(f"<think>Hm.</think> <answer>{prompt.answer}</answer>"))
        assert (right.value, right.correct) == (1.0, True)
        for wrong in (f"{prompt.answer} {prompt.answer}", prompt.answer[1:], "1", "no"):
            try:
                worth = judge.score_answer(wrong.strip(), prompt.columns["entry"])
            except ValueError:
                worth = 0.0
            reward = task.reward(prompt, said(f"<answer>{wrong}</answer>"))
            assert (reward.value, reward.correct) == (worth, worth >= 1.0), (prompt.question, wrong)


def test_scores_by_hand():
    [prompt] = ReasoningGym(options={"min_digits": 3, "max_digits": 3}).sample(0, 1)
    assert eval(prompt.columns["entry"]["metadata"]["expression"]) == int(prompt.answer)

    def score(text):
        return ReasoningGym().reward(prompt, said(text)).value

    assert score(f"<think>\\boxed{{0}}</think>{prompt.answer}") == 1.0
    assert score(f"<answer>\\boxed{{{prompt.answer}.00}}</answer>") == 1.0, "by value"
    assert score(f"<answer>{prompt.answer}xyz</answer>") == len(prompt.answer) / (len(prompt.answer) + 3)
    assert score(f"<answer>{int(prompt.answer) + 1}</answer>") == 0.0
    assert score("") == 0.0


def test_answer_that_raises_in_the_grader_scores_zero():
    task = ReasoningGym(family="prime_factorization")
    [prompt] = task.sample(0, 1)
    with pytest.raises(ValueError, match="invalid literal"):
        package.create_dataset("prime_factorization").score_answer("two", prompt.columns["entry"])
    reward = task.reward(prompt, said("<answer>two</answer>"))
    assert (reward.value, reward.failed, reward.correct) == (0.0, False, False)


def test_family_without_gold_answer_is_graded():
    task = ReasoningGym(family="graph_color")
    [prompt] = task.sample(0, 1)
    known = prompt.columns["entry"]["metadata"]["possible_answer"]
    assert prompt.answer == ""
    assert task.reward(prompt, said(str({str(k): v for k, v in known.items()}).replace("'", '"'))).correct
    assert task.reward(prompt, said("{}")).value == 0.01, "what the package gives for trying"


def test_splits_share_no_question_and_cover_all_questions():
    def asked(split):
        task = ReasoningGym(options=SUMS, split=split)
        return {prompt.question for step in range(30) for prompt in task.sample(step, 64)}

    train_, test = asked("train"), asked("test")
    assert train_.isdisjoint(test)
    every = {f"{a} {sign} {b}" for a, sign, b in product(range(10), "+-", range(10))}
    assert {re.search(r"\d [+-] \d", question)[0] for question in train_ | test} == every
    assert 0.2 < len(test) / len(train_ | test) < 0.3
    assert all(assign_split(question, TEST_SHARE) == "test" for question in test)


def test_empty_split_raises_an_error():
    empty = []
    for split in ("train", "test"):
        task = ReasoningGym(family="count_bits", options={"min_n": 5, "max_n": 5}, split=split)
        try:
            assert task.sample(0, 2)[0].answer == "2"
        except UserError as error:
            empty.append(str(error))
            assert f"count_bits generated no {split} question in 1000" in empty[0]
    assert len(empty) == 1


def test_sampling_is_a_function_of_seed_split_and_step():
    task = ReasoningGym(seed=3)
    for step in (0, 10**6, 41 * ROUND_STRIDE + 10**6):
        assert task.sample(step, 4) == ReasoningGym(seed=3).sample(step, 4) == task.sample(step, 9)[:4]
    others = [task.sample(1, 4), task.sample(10**8, 4), task.sample(ROUND_STRIDE, 4), ReasoningGym(seed=4).sample(0, 4)]
    others.append(with_split(task, "test").sample(0, 4))
    for prompts in others:
        assert {p.question for p in prompts}.isdisjoint(p.question for p in task.sample(0, 4))
    ids = [prompt.id for step in (0, 1, ROUND_STRIDE, ROUND_STRIDE + 1) for prompt in task.sample(step, 4)]
    assert len(set(ids)) == 16


def in_a_process(code, **environment):
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout


ALL = """
import hashlib, warnings
from reasoning_gym.factory import DATASETS, create_dataset
warnings.simplefilter("ignore")
slow = {"arc_agi", "composite", "figlet_font", "futoshiki", "group_anagrams", "knight_swap", "zebra_puzzles"}
for name in DATASETS.keys() - slow:
    made = [create_dataset(name, seed=seed, size=1)[0] for seed in range(0, 60000, 7919)]
    print(name, hashlib.sha256(repr([(each["question"], each["answer"]) for each in made]).encode()).hexdigest())
"""


@pytest.mark.slow
def test_families_that_are_not_refused_ask_the_same_in_each_process():
    one, other = (set(in_a_process(ALL, PYTHONHASHSEED=seed).splitlines()) for seed in ("1", "2"))
    unlike = {line.split()[0] for line in one ^ other}
    assert unlike == set(UNORDERED_FAMILIES.split()) - {"knight_swap"}, "which is among the slow ones"


@pytest.mark.parametrize("options", [{}, {"datasets": [{"name": "ransom_note", "weight": 1.0, "config": {}}]}])
def test_families_with_unstable_order_need_a_fixed_hash_seed(options, monkeypatch):
    task = {"family": "composite" if options else "ransom_note", "options": options}
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match=r'"ransom_note" .* set PYTHONHASHSEED=0'):
        ReasoningGym(**task)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert ReasoningGym(**task).sample(0, 1)


def test_composite_draws_by_weight_and_grades_each_by_its_own_family():
    task = ReasoningGym(family="composite", options=MIXED)
    prompts = task.sample(0, 200)
    families = [prompt.columns["entry"]["metadata"]["source_dataset"] for prompt in prompts]
    assert 0.65 < families.count("gcd") / 200 < 0.85
    assert {
        family: ("Common Divisor" in prompt.question) for family, prompt in zip(families, prompts, strict=True)
    } == {
        "gcd": True,
        "chain_sum": False,
    }
    assert all(task.reward(prompt, said(f"<answer>{prompt.answer}</answer>")).correct for prompt in prompts)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["chain_sum", "arc_1d", "composite"])
def test_reward_processes_give_the_same_rewards(family):
    task = ReasoningGym(family=family, options=MIXED if family == "composite" else {})
    prompts = task.sample(0, 3)
    pairs = [
        (prompt, said(text))
        for prompt in prompts
        for text in (f"<answer>{prompt.answer}</answer>", f"{prompt.answer}!", "?")
    ]
    graded = GradedTask(task)
    assert graded.reward_all(pairs) == [task.reward(*pair) for pair in pairs]
    graded.close()


@pytest.mark.slow
def test_unpickling_the_task_imports_the_package():
    code = f"import pickle, sys; pickle.loads({pickle.dumps(ReasoningGym())!r}); print('reasoning_gym' in sys.modules)"
    assert in_a_process(code) == "True\n"
    task = ReasoningGym(seed=2, split="test", family="composite", options=MIXED, system="")
    assert pickle.loads(pickle.dumps(task)) == task


def test_system_message_may_be_a_default_a_custom_one_or_empty():
    def roles(system):
        return [(each["role"], each["content"]) for each in ReasoningGym(system=system).sample(0, 1)[0].text]

    assert "<answer>answer here</answer>" in roles("default")[0][1]
    assert roles("direct")[0][1].startswith("Answer the question directly.")
    assert roles("Be brief.")[0] == ("system", "Be brief.")
    assert [role for role, _ in roles("")] == ["user"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"family": "chain_sm"}, 'family "chain_sm" is unknown; did you mean "chain_sum"?'),
        ({"family": "zzz"}, 'family "zzz" is unknown; there are ab, acre'),
        ({"options": {"max_trms": 3}}, "unexpected keyword argument 'max_trms'"),
        ({"options": {"min_terms": 5, "max_terms": 2}}, "max_terms must be >= min_terms; chain_sum has"),
        ({"options": {"min_terms": "few"}}, "not supported"),
        ({"options": {"seed": 1}}, "multiple values for keyword argument 'seed'"),
        ({"family": "composite"}, "at least one dataset; composite has datasets"),
        ({"family": "composite", "options": {"datasets": [{"name": "gcd"}]}}, "'weight' and 'config'"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(settings, told):
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        ReasoningGym(**settings)
    assert "\n" not in str(caught.value)


def test_missing_package_error_names_the_extra(monkeypatch):
    for module in ("reasoning_gym", "reasoning_gym.factory"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r'^task "reasoning_gym" needs reasoning_gym: pip install "pellucid\[gym\]"$'):
        ReasoningGym()


def test_options_are_read_from_recipes_and_the_command_line(tmp_path):
    recipe = tmp_path / "gym.toml"
    recipe.write_text('[task]\nname = "reasoning_gym"\n[task.options]\nmax_terms = 3\nallow_negation = true\n')
    assert load_config(recipe).task.options == {"max_terms": 3, "allow_negation": True}
    changed = load_config(recipe, ["--task.options.max-digits", "2"])
    assert changed.task.options == {"max_terms": 3, "allow_negation": True, "max_digits": 2}
    assert dump_config(changed)["task"]["options"] == changed.task.options
    mixed = "[[task.options.datasets]]\nname = 'gcd'\nweight = 3.0\nconfig = {}\n[[task.options.datasets]]\n"
    mixed += "name = 'chain_sum'\nweight = 1.0\nconfig = {max_terms = 3}\n"
    recipe.write_text(f'[task]\nname = "reasoning_gym"\nfamily = "composite"\n{mixed}')
    assert load_config(recipe).task == ReasoningGym(family="composite", options=MIXED)


@pytest.mark.slow
def test_reasoning_gym_task_is_trained(recipe, tmp_path):
    section = '[task]\nname = "reasoning_gym"\nsystem = ""\nfamily = "letter_counting"\n[task.options]\nmax_words = 5\n'
    text = re.sub(r"\[task\]\n\s*name = .*\n", section, recipe.read_text())
    recipe.write_text(text.replace("steps = 6", "steps = 5"))
    assert train(recipe, "--run", tmp_path / "run") == 0
    rollouts = records(tmp_path / "run" / "rollouts.jsonl")
    assert len({row["step"] for row in rollouts}) == 5
    assert [row["step"] for row in records(tmp_path / "run" / "evals.jsonl")] == [0, 2, 4, 5]

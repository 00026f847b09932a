import hashlib
import json
import math
import pickle
import sys
from collections import Counter
from dataclasses import replace
from uuid import uuid4

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from pydantic import ValidationError, create_model

from pellucid import config
from pellucid.algorithm.advantages import ADVANTAGES
from pellucid.algorithm.batch import collect_grades, collect_task_rewards
from pellucid.algorithm.settings import GRPOConfig
from pellucid.reporting.loggers import compute_group_metrics
from pellucid.rewards.grading import GradedTask
from pellucid.rewards.parts import validate_reward
from pellucid.rewards.settings import RewardConfig
from pellucid.rewards.terms import RewardTerm
from pellucid.tasks.dataset import Dataset
from pellucid.types import ROUND_STRIDE, Completion, Group, UserError

GSM8K = [
    ("Weng earns $12 an hour. In 90 hours?", "She earns 12 * 90 = $<<12*90=1080>>1080.\n#### 1,080"),
    ("Three ducks lay 16 eggs each. Eggs?", "3 * 16 = <<3*16=48>>48 eggs.\n#### 48"),
    ("It was 3 degrees and fell by 5. Now?", "3 - 5 = -2\n#### -2"),
]


NUMERIC = (RewardTerm("numeric"),)


def completion(text, tokens=4):
    return Completion((5,) * tokens, (-1.0,) * tokens, text, True)


@pytest.fixture
def write(tmp_path):
    def write_jsonl(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write_jsonl


def sums(n):
    return [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(n)]


def questions(task, n, step=0):
    return [prompt.question for prompt in task.sample(step, n)]


@pytest.fixture
def gsm8k(write):
    rows = [{"question": question, "answer": answer} for question, answer in GSM8K]
    held_out = [{"question": "What is 2 + 2?", "answer": "#### 4"}]
    return Dataset(data=write(rows), test_data=write(held_out, "test.jsonl"), answer_pattern="#### (.+)")


def test_answers_are_extracted_by_the_pattern(gsm8k):
    answers = {prompt.question: prompt.answer for prompt in gsm8k.sample(0, 3)}
    assert answers == dict(zip([q for q, _ in GSM8K], ["1,080", "48", "-2"], strict=True))


def test_right_number_scores_in_every_notation(gsm8k):
    prompt = next(prompt for prompt in gsm8k.sample(0, 3) if prompt.answer == "1,080")
    for right in ("1080", "1,080", "$1,080.00.", "12 * 90 = 1080", "#### 1,080"):
        assert gsm8k.reward(prompt, completion(right)).value == 1.0
    for wrong in ("1", "080", "80", "10 80", "-1080", "1080 or 1081", "0123456789", ""):
        assert gsm8k.reward(prompt, completion(wrong)).value == 0.0


TERMS = {
    "numeric": (RewardTerm("numeric"),),
    "exact": (RewardTerm("exact"),),
    "math": (RewardTerm("math"),),
    "numeric in tags": (RewardTerm("numeric"), RewardTerm("tagged", weight=0.5)),
    "exact in tags": (RewardTerm("tagged", weight=0.5), RewardTerm("exact")),
    "math in tags": (RewardTerm("math"), RewardTerm("tagged", weight=0.5)),
}
HOSTILE = [
    "",
    "no idea",
    "0123456789",
    "9" * 10_000,
    "<answer>" * 1_000,
    "\0\ud800",
    "1" + ",111" * 2_000,
    "-$" * 4_000,
]


@pytest.mark.parametrize("rewards", TERMS.values(), ids=TERMS)
def test_the_gold_answer_scores_1_in_every_term_and_garbage_in_none(gsm8k, rewards):
    task = replace(gsm8k, rewards=rewards)
    for prompt in task.sample(0, 3):
        forms = {"tagged": "<think>{}</think> <answer>{}</answer>", "math": r"{}\boxed{{{}}}", "exact": "{1}"}
        form = next((form for name, form in forms.items() if name in [term.name for term in rewards]), "{}")
        graded = task.reward(prompt, completion(form.format(prompt.columns["answer"], prompt.answer)))
        assert set(graded.parts.values()) == {1.0}
        assert graded.value == sum(term.weight for term in rewards)
        assert graded.is_correct
        for garbage in HOSTILE:
            assert task.reward(prompt, completion(garbage)).value == 0.0


def test_the_reward_is_the_weighted_sum_of_its_parts(write):
    rewards = (RewardTerm("tagged", 0.2), RewardTerm("numeric"), RewardTerm("length", 0.1, limit=8))
    task = Dataset(data=write(sums(20)), rewards=rewards, correct="numeric")
    (prompt,) = task.sample(0, 1)
    graded = task.reward(prompt, completion(prompt.answer, tokens=4))
    assert graded.parts == {"tagged": 0.0, "numeric": 1.0, "length": -0.5}
    assert graded.value == pytest.approx(0.95)
    assert graded.is_correct  # correct although the value is below 1
    wrong = task.reward(prompt, completion("<think></think><answer>0</answer>"))
    assert wrong.correct is False


@pytest.fixture
def multitask(write, tmp_path):
    (tmp_path / "multitask_rewards.py").write_text(
        "def math_reward(completions, task, **columns):\n"
        "    return [3.0 if t == 'math' else None for t in task]\n"
        "def code_reward(completions, task, **columns):\n"
        "    return [5.0 if t == 'code' else None for t in task]\n"
    )
    terms = tuple(RewardTerm(f"{tmp_path}/multitask_rewards.py:{name}_reward", 2.0) for name in ("math", "code"))
    rows = [{"question": kind, "task": kind} for kind in ("math", "code", "poetry", "x")]
    yield Dataset(data=write(rows), test_data=write([{"question": "?", "task": ""}], "t.jsonl"), rewards=terms)
    sys.modules.pop("multitask_rewards")


def test_terms_that_do_not_apply_are_left_out(multitask):
    graded = {p.question: multitask.reward(p, completion("x")) for p in multitask.sample(0, 4)}
    assert (graded["math"].value, graded["math"].parts) == (6.0, {"math_reward": 3.0})
    assert (graded["code"].value, graded["code"].parts) == (10.0, {"code_reward": 5.0})
    assert graded["math"].correct is True
    assert not graded["code"].is_judged, "the first term decides, and says nothing of it"
    assert math.isnan(graded["poetry"].value)
    assert "no reward applies" in graded["poetry"].error


@pytest.fixture
def scored_by_column(write, tmp_path):
    """Return the specs of a function that returns the column `score`, and of one that returns None, and a data set."""
    module = f"scores_{uuid4().hex}"  # a name for each test, because a second module with the same name is refused
    (tmp_path / f"{module}.py").write_text(
        "def scored(completions, score, **_):\n    return score\n"
        "def silent(completions, **_):\n    return [None for _ in completions]\n"
    )
    rows = [{"question": f"{i}", "answer": "7", "score": s} for i, s in enumerate([2, 1, None, None])]
    term = {name: f"{tmp_path}/{module}.py:{name}" for name in ("scored", "silent")}
    return term, Dataset(data=write(rows), test_data=write([rows[0] | {"question": "?"}], "t.jsonl"))


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_terms_of_weight_zero_change_no_reward_and_no_advantage(scored_by_column, advantage):
    """Rewards of 2, 1, None and None count as 2, 1, 1.5 and 1.5, with and without the logged terms."""
    term, task = scored_by_column
    logged = [RewardTerm("numeric", 0.0), RewardTerm("regex", 0.0, pattern="7")]
    found = []
    for rewards in ([RewardTerm(term["scored"])], [RewardTerm(term["scored"]), *logged]):
        own = replace(task, rewards=tuple(rewards))
        prompts = sorted(own.sample(0, 4), key=lambda prompt: prompt.question)
        said = completion("7")
        group = Group(prompts[0], (1,), (said,) * 4, tuple(own.reward(prompt, said) for prompt in prompts))
        assert collect_task_rewards([group]).tolist() == [[2.0, 1.0, 1.5, 1.5]]
        assert [reward.applies for reward in group.rewards] == [True, True, False, False]
        found.append(ADVANTAGES[advantage](collect_grades([group]), GRPOConfig(advantage=advantage, group_size=4)))
    torch.testing.assert_close(*found)
    assert compute_group_metrics([group])["reward/regex"] == 1.0, "it is logged for every completion"


@pytest.mark.parametrize(("weights", "value"), [((1.0, 1.0), 1.0), ((0.0, 1.0), 1.0), ((1.0, 0.0), None)])
def test_no_term_decides_if_the_deciding_term_returns_none(scored_by_column, weights, value):
    term, task = scored_by_column
    terms = (RewardTerm(term["silent"], weights[0]), RewardTerm("numeric", weights[1]))
    own = replace(task, rewards=terms, correct="silent")
    reward = own.reward(own.sample(0, 1)[0], completion("7"))
    assert not reward.is_correct
    assert not reward.is_judged, "it is not wrong, either"
    assert not reward.is_verdict
    assert reward.value == value if value else math.isnan(reward.value)
    group = Group(own.sample(0, 1)[0], (1,), (completion("7"),), (reward,))
    assert math.isnan(compute_group_metrics([group])["completion/correct"])
    assert "completion/length_wrong" not in compute_group_metrics([group])
    assert validate_reward(reward) == reward or value is None, "it comes back from a reward process as it is"


def test_rewards_with_only_zero_weights_are_refused(write):
    with pytest.raises(ValueError, match="every weight is 0"):
        Dataset(data=write(sums(2)), rewards=(RewardTerm("numeric", 0.0), RewardTerm("tagged", 0.0)))


def test_every_row_is_seen_once_per_epoch_at_any_step_size(write):
    task = Dataset(data=write(sums(25)), test_share=0.2)
    walk = [question for step in range(15) for question in questions(task, 4, step)]
    assert len(set(walk)) == 20
    for epoch in range(3):
        assert Counter(walk[20 * epoch : 20 * epoch + 20]) == Counter(set(walk))
    assert len({tuple(walk[20 * epoch : 20 * epoch + 20]) for epoch in range(3)}) == 3
    assert questions(task, 60) == walk


def test_more_prompts_than_rows_have_distinct_ids(write):
    prompts = Dataset(data=write(sums(5))).sample(2, 11)
    assert len({prompt.id for prompt in prompts}) == 11
    assert prompts[0].id == "train/2/0"


def test_sample_is_a_pure_function_of_seed_split_and_step(write):
    task = Dataset(data=write(sums(200)), test_share=0.5)
    assert questions(task, 8, 3) == questions(replace(task), 8, 3)
    assert questions(task, 8, 3) != questions(replace(task, seed=1), 8, 3)
    assert questions(task, 8, 3) != questions(task, 8, 4)


def everything(task):
    return set(questions(task, 500))


def test_the_splits_are_disjoint_and_complete_and_the_same_for_all_seeds(write):
    train = Dataset(data=write(sums(100)))
    test = replace(train, split="test")
    assert len(everything(test)) == 10
    assert everything(train).isdisjoint(everything(test))
    assert len(everything(train) | everything(test)) == 100
    assert everything(replace(test, seed=9)) == everything(test)


def test_equal_questions_fall_into_the_same_split(write):
    rows = [row | {"note": copy} for copy in range(5) for row in sums(20)]
    train = Dataset(data=write(rows), test_share=0.5)
    assert everything(train).isdisjoint(everything(replace(train, split="test")))


def test_rows_in_both_files_are_not_trained_on(write):
    train = Dataset(data=write(sums(20)), test_data=write(sums(5), "test.jsonl"))
    assert everything(replace(train, split="test")) == {row["question"] for row in sums(5)}
    assert everything(train) == {row["question"] for row in sums(20)[5:]}


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_two_rows_make_two_splits(write, share):
    task = Dataset(data=write(sums(2)), test_share=share)
    assert len(everything(task)) == len(everything(replace(task, split="test"))) == 1


def test_template_takes_any_column_and_keeps_other_braces(write):
    row = {"ask": r"Is \frac{a}{b} {answer}?", "unit": "{m}", "answer": "7", "none": None}
    template = r"{question} In {unit}{none}, as \boxed{} or {{x}}."
    task = Dataset(
        data=write([row] * 2), test_data=write([{"ask": "?", "unit": "", "answer": 1, "none": 1}], "t.jsonl")
    )
    task = replace(task, question="ask", template=template, system="Be {brief}.")
    (prompt,) = task.sample(0, 1)
    assert prompt.text == (
        {"role": "system", "content": "Be {brief}."},
        {"role": "user", "content": r"Is \frac{a}{b} {answer}? In {m}, as \boxed{} or {x}."},
    )
    assert prompt.columns == row


def test_plain_prompt_reaches_the_model_unchanged(write):
    (prompt,) = Dataset(data=write(sums(5)), chat=False, template="Q: {question}\nA:").sample(0, 1)
    assert isinstance(prompt.text, str)
    assert prompt.text.startswith("Q: What is")
    assert prompt.text.endswith("\nA:")


def test_message_column_becomes_the_prompt(write):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?", "name": None}]
    task = Dataset(data=write([{"chat": chat, "answer": "4"}, {"chat": chat[1:], "answer": "4"}]), messages="chat")
    texts = [prompt.text for split in ("train", "test") for prompt in replace(task, split=split).sample(0, 1)]
    user = {"role": "user", "content": "2 + 2?"}
    assert sorted(texts, key=len) == [(user,), ({"role": "system", "content": "Be brief."}, user)]


@pytest.mark.parametrize(
    "chat",
    [
        "hello",
        [],
        ["hello"],
        [{"role": "user"}],
        [{"role": "user", "content": []}],
        [{"role": "assistant", "content": "4"}],
    ],
)
def test_invalid_chats_are_refused(write, chat):
    with pytest.raises(UserError, match=r'^[^\n]*line 1: column "chat" must look like [^\n]*$'):
        Dataset(data=write([{"chat": chat, "answer": "4"}]), messages="chat").sample(0, 1)


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0, "question": "2 + 2?", "steps": ["2 + 2", "4"]},
}
"""A row as verl's scripts write it to Parquet."""


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_verl_files_are_read_unchanged(tmp_path, suffix):
    rows = [{**VERL, "prompt": [{"role": "user", "content": f"What is {n} + 2?"}]} for n in range(3)]
    path = tmp_path / f"train{suffix}"
    if suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) if suffix == ".jsonl" else json.dumps(rows))
    task = Dataset(data=str(path), messages="prompt", answer="reward_model.ground_truth")
    (prompt,) = task.sample(0, 1)
    assert prompt.text[0]["content"].startswith("What is ")
    assert prompt.answer == "4"
    assert prompt.columns["reward_model"] == VERL["reward_model"], "rewards are given whole columns"
    assert task.reward(prompt, completion("It is 4")).is_correct


def test_columns_may_be_nested_and_names_with_a_dot_take_precedence(write):
    row = {"a": {"b": "inside", "c": ["zero", {"d": "deep"}]}, "a.b": "outside", "answer": 4}
    task = Dataset(data=write([row, {**row, "a.b": "other"}]), template="{a.b} {a.c.0} {a.c.1.d}", rewards=NUMERIC)
    assert questions(task, 1)[0].split()[1:] == ["zero", "deep"]
    assert {questions(replace(task, split=split), 1)[0].split()[0] for split in ("train", "test")} == {
        "outside",
        "other",
    }


@pytest.mark.parametrize("column", ["reward_model.ground_truht", "reward_model", "reward_model.ground_truth.x"])
def test_missing_nested_column_error_names_the_existing_columns(write, column):
    row = {**VERL, "reward_model": {"ground_truth": "4"}} if "." in column else {"question": "2 + 2?", "rewards": {}}
    with pytest.raises(UserError) as caught:
        Dataset(data=write([row]), answer=column, template="2 + 2?").sample(0, 1)
    message = str(caught.value)
    assert f'line 1: no column "{column}"' in message
    if "." in column:
        assert 'did you mean "reward_model.ground_truth"?' in message
        assert "extra_info.index, extra_info.question" in message


def test_message_content_may_be_a_list_of_texts(write):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]
    as_parts = {"chat": [{"role": "user", "content": parts}], "answer": "4"}
    as_text = {"chat": [{"role": "user", "content": "What is 2 + 2?"}], "answer": "4"}
    other = {"chat": [{"role": "user", "content": [{"text": "3 + 3?"}]}], "answer": "6"}
    task = Dataset(data=write([as_parts, as_text, other]), messages="chat")
    prompts = [p for split in ("train", "test") for p in replace(task, split=split).sample(0, 3)]
    assert {prompt.question for prompt in prompts} == {"What is 2 + 2?", "3 + 3?"}
    holders = [split for split in ("train", "test") if "What is 2 + 2?" in questions(replace(task, split=split), 3)]
    assert len(holders) == 1, "the same question is in one split"


def test_image_content_is_refused(write):
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}]
    task = Dataset(data=write([{"chat": [{"role": "user", "content": content}], "answer": "4"}]), messages="chat")
    with pytest.raises(UserError, match=r'line 1: column "chat" holds a part of type "image": only text can be read$'):
        task.sample(0, 1)


def test_several_files_form_one_data_set_and_others_may_be_held_out(write, tmp_path):
    write(sums(3), "a.jsonl")
    write([{"question": f"What is {i} + 1?", "answer": i + 1} for i in range(3, 6)], "b.jsonl")
    write(sums(1), "held.jsonl")
    several = (str(tmp_path / "a.jsonl"), str(tmp_path / "b*.jsonl"))
    task = Dataset(data=several, test_data=(str(tmp_path / "h*.jsonl"),))
    assert sorted(questions(task, 5)) == [f"What is {i} + 1?" for i in range(1, 6)], "without the one held out"
    assert questions(replace(task, split="test"), 1) == ["What is 0 + 1?"]


def test_several_files_can_be_given_in_recipe_and_on_command_line(write, tmp_path):
    write(sums(3), "a.jsonl")
    recipe = tmp_path / "own.toml"
    first = str(tmp_path / "a.jsonl")  # a file beside the recipe; other paths stay unchanged
    for data, is_ in (('"a.jsonl"', first), ('["a.jsonl", "b/*.jsonl"]', (first, "b/*.jsonl"))):
        recipe.write_text(f'[task]\nname = "dataset"\ndata = {data}\n')
        cfg = config.load_config(recipe)
        assert cfg.task.data == is_
        (tmp_path / "config.json").write_text(json.dumps(config.dump_config(cfg)))
        assert config.load_config(tmp_path / "config.json").task.data == is_
    assert config.load_config(recipe, ["--task.data", "c.csv"]).task.data in ("c.csv", ("c.csv",))
    assert config.load_config(recipe, ["--task.data", "c.csv", "d.tsv"]).task.data == ("c.csv", "d.tsv")


@pytest.mark.parametrize("name", ["numeric", "math", "exact"])
def test_a_list_of_gold_answers_means_any_of_them(write, name):
    rows = [{"question": f"Which {i}?", "answers": ["73", 74, "73"]} for i in range(3)]
    task = Dataset(data=write(rows), answer="answers", rewards=(RewardTerm(name),))
    (prompt,) = task.sample(0, 1)
    assert prompt.gold_answers == ("73", "74")
    assert prompt.columns["answers"] == ["73", 74, "73"]
    values = {text: task.reward(prompt, completion(text)).value for text in ("73", "74", "75")}
    assert values == {"73": 1.0, "74": 1.0, "75": 0.0}


@pytest.mark.parametrize("answers", [[], [None], ["", "7"], ["seven", "7"]])
def test_unreadable_gold_answer_in_a_list_is_refused_with_its_line(write, answers):
    task = Dataset(data=write([{"question": str(i), "answer": answers if i else "7"} for i in range(3)]))
    with pytest.raises(UserError, match=r"data\.jsonl, line 2: the answer"):
        task.sample(0, 1)


def test_gold_answers_are_extracted_from_the_box_of_a_solution(write):
    solution = r"We add $1 + 1$ and halve it. Thus the answer is $\boxed{\frac{2}{2}}$."
    for name in ("math", "numeric", "exact"):
        data = write([{"question": str(i), "solution": solution} for i in range(3)])
        task = Dataset(data=data, answer="solution", rewards=(RewardTerm(name),))
        (prompt,) = task.sample(0, 1)
        assert prompt.answer == r"\frac{2}{2}"
        assert task.reward(prompt, completion(solution)).value == 1.0
        assert task.reward(prompt, completion(r"\boxed{2}")).value == 0.0


@pytest.mark.parametrize(
    ("name", "answer", "complaint"),
    [
        (
            "math",
            "He had $5 and then bought 3 apples",
            "is a sentence, not an answer: cut the answer out by answer_pattern",
        ),
        ("math", "some $ or other", "cannot be read by the reward math"),
        ("numeric", "seven", "holds no number"),
    ],
)
def test_gold_answer_that_a_reward_cannot_use_is_refused_with_its_line(write, name, answer, complaint):
    rows = [{"question": str(i), "answer": answer if i == 3 else str(i)} for i in range(5)]
    task = Dataset(data=write(rows), rewards=(RewardTerm(name),))
    with pytest.raises(UserError, match=rf"data\.jsonl, line 4: .*{complaint}"):
        task.sample(0, 1)


def test_gold_answer_may_be_missing_if_no_term_needs_it(write):
    task = Dataset(data=write([{"question": str(i)} for i in range(3)]), rewards=(RewardTerm("tagged"),))
    assert task.sample(0, 1)[0].answer == ""


def test_seeds_draw_the_same_prompts_as_version_0_1_0(write):
    """The digest is from version 0.1.0, which held all prompts in memory."""
    path = write([{"question": f"{i // 2} + {i % 7}?", "answer": str(i // 2 + i % 7)} for i in range(200)])
    drawn = hashlib.sha256()
    for split in ("train", "test"):
        for seed in (0, 3):
            for step in (0, 1, 5, ROUND_STRIDE + 2):
                for prompt in Dataset(data=path, split=split, seed=seed).sample(step, 16):
                    drawn.update(repr((prompt.id, prompt.text, prompt.answer, dict(prompt.columns))).encode())
    assert drawn.hexdigest() == "042f7e9798700bb634674de0b67f9bb2c3b41d6cc2ccc59d0c10ed43d29b5438"


def test_pickled_task_does_not_contain_the_data(write):
    task = Dataset(data=write(sums(2000)))
    task.sample(0, 4)
    assert len(pickle.dumps(task)) < 1000
    assert pickle.loads(pickle.dumps(task)) == task


@pytest.mark.slow
def test_hanging_reward_function_from_a_file_times_out(write, tmp_path):
    (tmp_path / "sandboxed_reward.py").write_text(
        "import time\n"
        "def boxed(completions, answer, **columns):\n"
        "    time.sleep(60 * ('hang' in completions[0][0]['content']))\n"
        "    return [float(a in c[0]['content']) for c, a in zip(completions, answer)]\n"
    )
    rewards = (RewardTerm("math"), RewardTerm(f"{tmp_path}/sandboxed_reward.py:boxed"))
    task = GradedTask(Dataset(data=write(sums(10)), rewards=rewards), RewardConfig(step_timeout=2.0))
    (prompt,) = task.sample(0, 1)
    assert task.reward(prompt, completion(rf"$\boxed{{{prompt.answer}}}$")).parts == {"math": 1.0, "boxed": 1.0}
    hung = task.reward(prompt, completion("hang"))
    task.close()
    assert math.isnan(hung.value)
    assert hung.error == "boxed: no reward within 2 s"


def test_task_is_its_own_config_section(write):
    config = create_model("Config", __config__={"extra": "forbid"}, task=(Dataset, ...))
    section = {"name": "dataset", "data": "x.jsonl", "rewards": [{"name": "exact"}, {"name": "length", "limit": 9}]}
    expected = Dataset(data="x.jsonl", rewards=(RewardTerm("exact"), RewardTerm("length", limit=9)))
    assert config.model_validate({"task": section}).task == expected
    with pytest.raises(ValidationError, match='did you mean "exact"'):
        config.model_validate({"task": section | {"rewards": [{"name": "exakt"}]}})
    with pytest.raises(ValidationError, match="wieght"):
        config.model_validate({"task": section | {"rewards": [{"name": "exact", "wieght": 1}]}})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"data": ""}, 'data = ""'),
        ({"test_share": 1.0}, "test_share = 1.0"),
        ({"test_share": -0.1}, "test_share = -0.1"),
        ({"messages": "chat", "system": "Be brief."}, "leave out system"),
        ({"messages": "chat", "chat": False}, "leave out system"),
        ({"chat": False, "system": "Be brief."}, "system needs chat = true"),
        ({"template": "{question} It is {answer}."}, "template shows {answer}, the gold answer; write {{...}} for"),
        ({"answer_pattern": "#### .+"}, "needs a group"),
        ({"answer_pattern": "#### (.+"}, "not a valid regular expression"),
        ({"rewards": ()}, "at least one term"),
        ({"correct": "exact"}, "must name a reward: numeric"),
        ({"rewards": (RewardTerm("length", limit=3),)}, "length is never 1"),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings, says):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        Dataset(**({"data": "x.jsonl"} | settings))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("row", "settings", "says"),
    [
        ({"qestion": "?", "answer": "1"}, {}, 'no column "question"; did you mean "qestion"?'),
        ({"question": "?", "gold": "1"}, {}, 'no column "answer"; the columns are question, gold'),
        ({"question": "?", "answer": "1"}, {"template": "{question} {unit}"}, 'no column "unit"'),
        ({"question": " ", "answer": "1"}, {}, "the question is empty"),
        ({"question": None, "answer": "1"}, {}, "the question is empty"),
        ({"question": "?", "answer": None}, {}, "the answer is empty"),
        ({"question": "?", "answer": "seven"}, {}, 'the answer "seven" holds no number'),
        ({"question": "?", "answer": r"\sqrt{2}"}, {}, r'the answer "\sqrt{2}" is not a single number'),
        ({"question": "?", "answer": "12:30"}, {}, 'the answer "12:30" is not a single number'),
        ({"question": "?", "answer": "3 or 5"}, {}, "is not a single number: cut it out by answer_pattern"),
        ({"question": "?", "answer": "x = 5"}, {}, "is not a single number"),
        ({"question": "?", "answer": "a\nb 7"}, {"answer_pattern": "#### (.+)"}, 'is not found in "a b 7"'),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_are_reported_in_one_line_with_their_line(write, row, settings, says):
    path = write([{"question": "ok?", "answer": "#### 1", "qestion": "", "unit": ""}, row])
    with pytest.raises(UserError, match=r"^[^\n]+$") as caught:
        Dataset(data=path, **settings).sample(0, 1)
    assert f"{path}, line 2: " in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (r"\frac{1}{2}", "0.5", "2"),
        ("5 m^2", "5", "2"),
        (r"3 \times 10^4", "30,000", "4"),
        ("1.5e3", "1500", "3"),
        ("\u20135", "-5", "5"),
        ("18 dollars", "$18", "17"),
    ],
)
def test_a_gold_number_is_read_whole(write, gold, right, wrong):
    task = Dataset(data=write([{"question": str(i), "answer": gold} for i in range(2)]))
    (prompt,) = task.sample(0, 1)
    assert task.reward(prompt, completion(right)).value == 1.0
    assert task.reward(prompt, completion(gold)).value == 1.0
    assert task.reward(prompt, completion(wrong)).value == 0.0


def test_split_without_rows_raises_an_error(write):
    with pytest.raises(UserError, match=r"^[^\n]*no row is left for the test split[^\n]*$"):
        Dataset(data=write(sums(1)), split="test").sample(0, 1)

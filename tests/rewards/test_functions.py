"""Test user-defined reward functions: their arguments and values must match those of TRL."""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
import trl_functions
from pickled import Grudge
from trl import GRPOConfig as TRLConfig
from trl import GRPOTrainer

from conftest import character_tokenizer, make_policy
from pellucid.reporting.loggers import JsonlLogger, format_json_line
from pellucid.rewards import pool
from pellucid.rewards.functions import build_trainer_state
from pellucid.rewards.grading import GradedTask
from pellucid.rewards.settings import RewardConfig
from pellucid.rewards.terms import RewardTerm
from pellucid.tasks.dataset import Dataset
from pellucid.types import Completion, Group, Progress, Prompt, UserError

FILE = Path(__file__).with_name("trl_functions.py")
ROWS = [{"question": f"{n} + {n}?", "answer": str(2 * n), "task": "math" if n % 2 else "code"} for n in range(8)]
TEXTS = [
    r"\boxed{2}",
    "4",
    "<think>4</think><answer>4</answer>",
    "",
    "a longer answer",
    "4",
    "44",
    "<think>\n</think> x",
]
NOW = Progress(3, 12)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def task(data):
    """Yield a function that makes a task graded by the given reward functions. The tasks are closed after the test."""
    made = []

    def make(*names, chat=False, cfg=None, **settings):
        terms = tuple(RewardTerm(f"{FILE}:{name}", **settings) for name in names)
        made.append(GradedTask(Dataset(data=str(data), rewards=terms, chat=chat), cfg))
        return made[-1]

    yield make
    for each in made:
        each.close()


def groups(task, texts=TEXTS):
    """Return (prompt, completion) pairs: two prompts with half of the texts each."""
    prompts = task.sample(0, 2)
    half = len(texts) // 2
    completions = [Completion((7,) * len(text), (-1.0,) * len(text), text, True) for text in texts]
    return [(prompts[i // half], completion) for i, completion in enumerate(completions)]


def values(task, name, pairs, progress=NOW):
    return [reward.parts.get(name) for reward in task.reward_all(pairs, progress)]


# ---------------------------------------------------------------- TRL


@pytest.fixture(scope="module")
def by_trl(tmp_path_factory):
    """Return a function that computes rewards with TRL's trainer: one row per completion, with NaN for None."""
    folder = str(tmp_path_factory.mktemp("trl"))
    make_policy().model.save_pretrained(folder)

    def compute(functions, pairs, progress=NOW):
        model = make_policy().model
        model.config._name_or_path = folder
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=functions,
            args=TRLConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                report_to=[],
                per_device_train_batch_size=8,
                num_generations=4,
                gradient_checkpointing=False,
            ),
            train_dataset=datasets.Dataset.from_list([{"prompt": "1+1?"}] * 8),
            processing_class=character_tokenizer(),
        )
        trainer.state.global_step, trainer.state.max_steps = progress.global_step, progress.max_steps
        chat = not isinstance(pairs[0][0].text, str)
        prompts = [[dict(m) for m in prompt.text] if chat else prompt.text for prompt, _ in pairs]
        texts = [[{"role": "assistant", "content": c.text}] if chat else c.text for _, c in pairs]
        rows = [{"prompt": text, **prompt.columns} for (prompt, _), text in zip(pairs, prompts, strict=True)]
        rewards = trainer._calculate_rewards(rows, prompts, texts, [list(c.token_ids) for _, c in pairs])
        return rewards.tolist(), trainer

    return compute


PLAIN = [
    "longer_reward",
    "unique_chars",
    "math_reward_func",
    "async_reward_func",
    "ranked",
    "unlike_the_others",
    "judge",
    "partly",
    "growing",
    "logging_reward",
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("names", "chat"), [(PLAIN, False), (["format_reward_func", "think_format_reward"], True)])
def test_reward_values_match_trl(names, chat, task, by_trl):
    ours = task(*names, chat=chat)
    pairs = groups(ours)
    found = [[reward.parts.get(name, math.nan) for name in names] for reward in ours.reward_all(pairs, NOW)]
    expected, trainer = by_trl([getattr(trl_functions, name) for name in names], pairs)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
    assert len({tuple(row) for row in found}) > 1
    if not chat:
        rewards = ours.reward_all(pairs)
        assert [reward.extra["letters"] for reward in rewards] == trainer._pending_extra_logs["letters"]
        assert rewards[0].logged == {"longest": sum(trainer._pending_metrics["longest"]) / 2}


def test_functions_receive_the_same_arguments_as_in_trl(task):
    ours = task("columns_seen", chat=True)
    rewards = ours.reward_all(groups(ours))
    first, last = (rewards[i].extra["seen"] for i in (0, -1))
    assert first["question"] != last["question"]
    assert {"question": last["question"], "answer": last["answer"], "task": last["task"]} in ROWS
    assert last["prompts"] == [{"role": "user", "content": last["question"]}]
    assert last["completion_ids"] == [7] * len(TEXTS[-1])
    of_trl = {"prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"}
    assert set(rewards[0].extra["keywords"]) == of_trl | set(ROWS[0])


def test_trainer_state_describes_the_run(task, data, tmp_path):
    """8 rows, 1 of them held out: at 2 prompts per step, an epoch of the other 7 takes 3.5 steps."""
    terms = (RewardTerm(f"{FILE}:state_seen"),)
    torn = '{"step": 2, "reward/me'
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "lr": 1e-5}\n' + torn)
    ours = GradedTask(Dataset(data=str(data), rewards=terms, chat=False), log=tmp_path / "rewards.log")
    [seen] = {str(reward.extra["state"]) for reward in ours.reward_all(groups(ours), Progress(7, 12, 2))}
    ours.close()
    history = [{"step": 1, "reward/mean": 0.5, "lr": 1e-5, "reward": 0.5, "learning_rate": 1e-5}]
    expected = {"global_step": 7, "max_steps": 12, "epoch": 2.0, "num_train_epochs": 4, "log_history": history}
    assert seen == str({**expected, "is_world_process_zero": True})


def test_trainer_state_has_one_epoch_without_a_dataset():
    state = build_trainer_state(Progress(3, 12, 4), None)
    assert (state.epoch, state.num_train_epochs, state.log_history) == (0.25, 1, [])


def test_missing_column_is_none(task):
    ours = task("columns_seen")
    [(first, said), *_, (second, _)] = groups(ours)
    lacking = Prompt("other", "?", columns={"question": "?"})
    rewards = ours.reward_all([(lacking, said), (first, said), (second, said)])
    assert [reward.extra["seen"]["task"] for reward in rewards] == [None, first.columns["task"], second.columns["task"]]


# ---------------------------------------------------------------- concurrency


@pytest.mark.slow
def test_asynchronous_functions_run_concurrently(task):
    """Two judges take 1 s per call. TRL takes 1 s for the step; 2 x 64 calls one after another would take 128 s."""
    ours = task("slow_judge", "another_slow_judge", "ranked")
    pairs = groups(ours, TEXTS * 8)
    ours.reward(*pairs[0])  # starts the process
    begun = time.monotonic()
    rewards = ours.reward_all(pairs)
    assert time.monotonic() - begun < 3.0
    assert [r.parts["slow_judge"] for r in rewards] == [float(len(c.text)) for _, c in pairs]
    assert [r.parts["another_slow_judge"] for r in rewards] == [-float(len(c.text)) for _, c in pairs]


def test_asynchronous_function_keeps_its_event_loop(task):
    ours = task("judge")
    for _ in range(2):
        assert values(ours, "judge", groups(ours)) == [0.5] * 8


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("name", ["fragile", "fragile_judge"])
def test_error_fails_only_its_own_group(name, task):
    """The empty answer, in the first group, raises. The second group is graded by a call of its own."""
    ours = task(name)
    rewards = ours.reward_all(groups(ours))
    assert [reward.failed for reward in rewards] == [True] * 4 + [False] * 4
    assert [reward.value for reward in rewards[4:]] == [1 / len(text) for text in TEXTS[4:]]
    line = next(n for n, text in enumerate(FILE.read_text().splitlines(), 1) if f"def {name}(" in text)
    error = f"ZeroDivisionError: division by zero (trl_functions.py, line {line + 1 + (name != 'fragile')})"
    assert rewards[0].error == f"{name}: {error}"
    assert rewards[0].failures == {name: error}


def test_error_inside_pellucid_names_the_line_of_user_code(task):
    line = next(n for n, text in enumerate(FILE.read_text().splitlines(), 1) if "numeric(None" in text)
    rewards = task("calls_what_is_ours").reward_all(groups(task("ranked"))[:1])
    assert rewards[0].error.startswith("calls_what_is_ours: AttributeError: ")
    assert rewards[0].error.endswith(f"(trl_functions.py, line {line})")


def test_unpicklable_row_fails_only_its_own_reward(task):
    ours = task("longer_reward")
    pairs = groups(ours)
    pairs[2] = (replace(pairs[2][0], id="locked", columns={"lock": threading.Lock()}), pairs[2][1])
    rewards = ours.reward_all(pairs)
    assert [i for i, reward in enumerate(rewards) if reward.failed] == [2]
    assert "cannot be sent to the reward process" in rewards[2].error
    values = [float(len(completion.token_ids)) for _, completion in pairs]
    assert [reward.value for reward in rewards if not reward.failed] == [*values[:2], *values[3:]]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("one_too_many", "one_too_many returned 9 rewards for 8 completions: it must return one for each"),
        ("no_list", "no_list returned 1.0, where a list with a number for each completion is needed"),
        ("takes_less", "takes_less got an unexpected keyword argument '"),
        ("wrong_extra", 'log_extra("short") has 1 values for 8 completions'),
    ],
)
def test_misbehaving_function_fails_all_rewards_and_is_named(name, error, task):
    ours = task("ranked", name)
    rewards = ours.reward_all(groups(ours))
    assert all(reward.failed and reward.error.startswith(f"{name}: {error}") for reward in rewards)
    assert all(set(reward.parts) == {"ranked"} for reward in rewards)


def test_deeply_nested_logged_value_becomes_a_short_text(task, tmp_path):
    ours = task("deep_extra")
    pairs = groups(ours)[:2]
    rewards = ours.reward_all(pairs)
    assert [reward.value for reward in rewards] == [1.0, 1.0]
    group = Group(pairs[0][0], (1,), tuple(completion for _, completion in pairs), tuple(rewards), (0.0, 0.0))
    log = JsonlLogger(tmp_path)
    log.log(1, {}, [group])
    log.close()
    [extra, _] = [json.loads(line)["extra"] for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert extra["plain"] == [1, [2, {"a": 3}]]
    assert all(isinstance(extra[name], str) and len(extra[name]) < 100 for name in ("lists", "objects"))


@pytest.mark.parametrize("nest", [lambda x: [x], lambda x: {"a": x}, lambda x: (x, math.nan)])
def test_json_line_may_be_nested_800_levels_deep(nest):
    value = 1.0
    for _ in range(800):
        value = nest(value)
    assert json.loads(format_json_line({"value": value, "none": math.inf}))["none"] is None


def test_invalid_reward_value_fails_only_its_completion(task):
    ours = task("one_is_no_number")
    rewards = ours.reward_all(groups(ours))
    assert [reward.error for reward in rewards[:2]] == [
        "one_is_no_number: the reward is nan",
        "one_is_no_number: the reward is 'a lot', where a number is needed",
    ]
    assert [reward.value for reward in rewards[2:]] == [0.0] * 6


def test_any_number_type_is_accepted_and_none_does_not_apply(task):
    ours = task("numbers_of_any_kind")
    rewards = ours.reward_all(groups(ours, ["a", "b", "c", "d"]))
    assert [reward.parts.get("numbers_of_any_kind") for reward in rewards] == [1.0, 2.0, 0.5, None]
    assert [reward.applies for reward in rewards] == [True, True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("hangs", "no reward within 1 s"),
        ("hangs_together", "no reward within 1 s"),
        ("ends_its_process", "the reward ended its process (exit status 3)"),
    ],
)
def test_hanging_or_exiting_function_does_not_affect_others(name, error, task):
    ours = task("ranked", name, "longer_reward", "slow_judge", cfg=RewardConfig(step_timeout=5.0))
    terms = [RewardTerm(term.name, timeout=1.0 * (term.name.endswith(name))) for term in ours.rewards]
    ours.close()
    ours = GradedTask(Dataset(data=ours.data, rewards=tuple(terms), chat=False), RewardConfig(step_timeout=5.0))
    pairs = groups(ours)
    rewards = ours.reward_all(pairs)
    ours.close()
    assert {reward.error for reward in rewards} == {f"{name}: {error}"}
    assert [r.parts["longer_reward"] for r in rewards] == [float(len(c.token_ids)) for _, c in pairs]
    assert [r.parts["slow_judge"] for r in rewards] == [float(len(c.text)) for _, c in pairs]
    assert all("ranked" in r.parts for r in rewards)


@pytest.mark.slow
def test_value_returned_before_the_event_loop_is_blocked_counts(task):
    ours = task("judge", "blocks_the_loop", timeout=1.0)
    rewards = ours.reward_all(groups(ours))
    assert [reward.parts for reward in rewards] == [{"judge": 0.5}] * 8
    assert {reward.error for reward in rewards} == {"blocks_the_loop: no reward within 1 s"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cancels_itself", "exits_in_a_task"])
def test_asynchronous_function_may_cancel_itself_or_exit(name, task):
    """The process, its event loop, and the next function continue."""
    ours = task("judge", name, "another_slow_judge")
    for _ in range(2):
        rewards = ours.reward_all(groups(ours))
        assert all(set(reward.parts) == {"judge", "another_slow_judge"} for reward in rewards)
        assert all(reward.failures[name].startswith(("CancelledError", "SystemExit")) for reward in rewards)


@pytest.mark.parametrize(
    ("name", "timeout", "values"),
    [
        ("slow_and_fragile", 30.0, [1.0, None, 1 / 3, 1 / 4]),
        ("slow_and_fragile", 1.0, [1.0, None, None, None]),  # 0.6 s for all, 0.6 s for the first alone
        ("hangs_alone", 1.0, [1.0, None, None, None]),
    ],
)
def test_groups_called_again_share_one_timeout(name, timeout, values, task):
    ours = task(name, timeout=timeout)
    [first] = ours.sample(0, 1)
    texts = ["a", "", "aaa", "aaaa"]
    prompts = [replace(first, id=str(i)) for i in range(4)]
    said = [Completion((1,), (-1.0,), text, True) for text in texts]
    rewards = ours.reward_all(list(zip(prompts, said, strict=True)))
    assert [reward.parts.get(name) for reward in rewards] == values
    late = [reward.error.endswith("no reward within 1 s") for reward in rewards]
    assert late == [timeout == 1.0 and value is None for value in values]


@pytest.mark.slow
def test_result_that_arrived_in_time_counts_if_read_late(task, monkeypatch):
    """This happens after Ctrl-Z, which stops the run but not its reward processes."""
    ours = task("slow_judge", "longer_reward", timeout=2.0)
    ours.reward_all(groups(ours)[:1])
    wait = pool.wait
    monkeypatch.setattr(pool, "wait", lambda ends, seconds: time.sleep(4.0) or wait(ends, seconds))
    assert not any(reward.failed for reward in ours.reward_all(groups(ours)))


@pytest.mark.slow
def test_import_time_does_not_count_toward_the_timeout(data, tmp_path):
    (tmp_path / "slow_to_import.py").write_text(
        "import multiprocessing, time\nif multiprocessing.parent_process(): time.sleep(2.5)\n"
        "def one(completions, **kwargs): return [1.0 for _ in completions]\n"
    )
    terms = (RewardTerm(f"{tmp_path}/slow_to_import.py:one", timeout=1.0),)
    ours = GradedTask(Dataset(data=str(data), rewards=terms, chat=False))
    assert [reward.value for reward in ours.reward_all(groups(ours))] == [1.0] * 8
    ours.close()


def test_row_that_cannot_be_unpickled_fails_only_its_group(task):
    ours = task("longer_reward", "exact_length")
    pairs = groups(ours)
    pairs = [
        (replace(prompt, columns={"grudge": Grudge(1, 2)}) if prompt is pairs[0][0] else prompt, c)
        for prompt, c in pairs
    ]
    rewards = ours.reward_all(pairs)
    assert [reward.failed for reward in rewards] == [True] * 4 + [False] * 4
    assert "it cannot be read in another process: TypeError" in rewards[0].error
    assert [r.parts["longer_reward"] for r in rewards[4:]] == [float(len(c.token_ids)) for _, c in pairs[4:]]


def test_forked_copy_of_the_process_sends_no_result(task):
    ours = task("forks")
    for texts in (["a", "b"], ["aa", "bbb"]):
        pairs = groups(ours, texts)
        assert [reward.parts["forks"] for reward in ours.reward_all(pairs)] == [float(len(text)) for text in texts]


@pytest.mark.filterwarnings("ignore")
def test_forked_process_exits_with_its_own_status(task):
    ours = task("waits_for_a_fork", "waits_for_a_fork_that_returns", timeout=20.0)
    rewards = ours.reward_all(groups(ours, ["a", "b"]))
    assert [tuple(reward.parts.values()) for reward in rewards] == [(7.0, 0.0)] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_unusual_function_forms_match_trl(task, by_trl):
    names = ["decorated", "logs_in_pieces", "tensors_of_one"]
    ours = task(*names)
    pairs = groups(ours)
    rewards = ours.reward_all(pairs)
    expected, trainer = by_trl([getattr(trl_functions, name) for name in names], pairs)
    assert [[reward.parts[name] for name in names] for reward in rewards] == expected
    assert [reward.extra["piece"] for reward in rewards] == trainer._pending_extra_logs["piece"]
    both = trainer._pending_metrics["shared"]
    assert rewards[0].logged == {"shared": sum(both) / len(both)}


def test_infinite_metric_is_an_error(task):
    rewards = task("logs_infinity").reward_all(groups(task("ranked")))
    assert {reward.error for reward in rewards} == {'logs_infinity: the metric "huge" is inf'}


def test_failed_term_of_weight_zero_fails_no_reward(data):
    terms = (RewardTerm("exact"), RewardTerm(f"{FILE}:one_too_many", weight=0.0))
    ours = GradedTask(Dataset(data=str(data), rewards=terms, chat=False))
    rewards = ours.reward_all(groups(ours))
    ours.close()
    assert not any(reward.failed for reward in rewards)
    assert all(set(reward.failures) == {"one_too_many"} for reward in rewards)


def test_non_function_is_refused():
    with pytest.raises(UserError, match=r"is a int: name a function"):
        RewardTerm(f"{FILE}:not_a_function")


def test_a_missing_function_is_refused_when_the_term_is_made():
    with pytest.raises(UserError, match='did you mean "unique_chars"'):
        RewardTerm(f"{FILE}:unique_char")

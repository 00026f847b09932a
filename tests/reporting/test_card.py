"""Tests of the model card, from run folders that are written here without training."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import ModelCard

from pellucid import config
from pellucid.reporting.eval_metrics import make_evaluation_record
from pellucid.reporting.loggers import format_json_line
from pellucid.share import find_base_model, make_model_card
from pellucid.training.run_dir import digest_named_files, dump_settings
from pellucid.types import Estimate, Evaluation

SUMS = '[task]\nname = "arithmetic"\n[algorithm]\nseed = 5\n'
FACTS = {"versions": {"pellucid": "0.1"}, "git": "", "hardware": {"cpu": "A | B", "gpus": ""}}


def evaluation(accuracy, reward, verdicts=True):
    right = Estimate(accuracy, accuracy - 0.125, accuracy + 0.125)
    worth = Estimate(reward, reward - 0.25, reward + 0.25)
    questions = Evaluation("arithmetic", "test", 16, 4, right, right, right, reward=worth, reward_at_k=worth)
    return make_evaluation_record(questions) | {"verdicts": verdicts}


@pytest.fixture
def written(tmp_path):
    """Return a function that makes a run's card from a recipe and evaluations, with steps of 30 and 300 seconds."""

    def write(recipe, *evaluations, **facts):
        (tmp_path / "recipe.toml").write_text(recipe)
        settings = dump_settings(config.resolve_config(config.load_config(tmp_path / "recipe.toml")))
        run_dir = tmp_path / "run"
        (run_dir / "model").mkdir(parents=True, exist_ok=True)
        known = {**settings, **FACTS, "digests": digest_named_files(settings), **facts}
        (run_dir / "config.json").write_text(json.dumps(known))
        steps = [{"step": 1, "time/step": 30.0}, {"step": 2, "time/step": 300.0}]
        (run_dir / "metrics.jsonl").write_text("".join(map(format_json_line, steps)))
        lines = [{"step": step, **record} for step, record in enumerate(evaluations)]
        (run_dir / "evals.jsonl").write_text("".join(map(format_json_line, lines)))
        return ModelCard(make_model_card(run_dir, "me/sums", "steps = 2\n"))

    return write


def test_card_reports_accuracies_if_rewards_are_verdicts(written):
    made = written(SUMS, evaluation(0.25, 0.25), evaluation(0.75, 0.75))
    measured = {result.metric_name: result for result in made.data.eval_results}
    assert {name: result.metric_type for name, result in measured.items()} == {
        "greedy accuracy": "accuracy",
        "mean@4": "accuracy",
        "pass@4": "pass@4",
    }
    assert "| greedy accuracy | 0.250 [0.12, 0.38] | 0.750 [0.62, 0.88] | apart |" in made.text
    assert "`arithmetic`: 16 prompts, 95% intervals" in made.text


def test_card_reports_the_mean_reward_without_verdicts(written):
    made = written(SUMS, evaluation(0.0, -0.5, verdicts=False), evaluation(0.0, -0.25, verdicts=False))
    [greedy, sampled] = made.data.eval_results
    assert (greedy.metric_type, greedy.metric_value, greedy.metric_args["low"]) == ("reward", -0.25, -0.5)
    assert sampled.metric_name == "reward@4"
    assert "| reward of greedy answers | -0.500 [-0.75, -0.25] | -0.250 [-0.50, 0.00] | overlap |" in made.text
    assert "accuracy" not in made.text


def test_a_run_that_was_never_evaluated_has_no_results(written):
    made = written(SUMS)
    assert made.data.eval_results is None and "Results" not in made.text


def test_card_describes_the_task_the_reward_and_the_training(written):
    text = written(SUMS, evaluation(0.5, 0.5)).text
    assert 'Task: `arithmetic`. Questions such as "What is 3 + 4?"' in text
    assert "Reward: Questions with two operands and one operator; the reward is 1 if" in text
    assert "2 steps of 4 prompts x 8 completions, 5.5 minutes, seed 5" in text
    assert text.startswith("\n# sums\n\nHuggingFaceTB/SmolLM2-135M-Instruct, trained with GRPO")
    assert "```toml\n# recipe.toml\nsteps = 2\n```" in text and "| cpu | A \\| B |" in text
    assert "gpus" not in text and "git revision" not in text and "sha256" not in text


def test_card_names_hub_data_weighted_rewards_adapter_and_resumes(written):
    terms = '[[task.rewards]]\nname = "numeric"\n[[task.rewards]]\nname = "length"\nweight = 0.1\nlimit = 9\n'
    recipe = f'[policy]\nlora = 8\n[task]\nname = "dataset"\ndata = "openai/gsm8k"\nsubset = "main"\n{terms}'
    made = written(recipe, evaluation(0.5, 0.4), resumes=[{"step": 7, "time": "2026-01-02"}])
    assert made.data.datasets == ["openai/gsm8k"] and "lora" in made.data.tags
    assert {result.dataset_type for result in made.data.eval_results} == {"openai/gsm8k"}
    assert "Reward: 1.0 x `numeric` + 0.1 x `length`" in made.text and "adapter of rank 8" in made.text
    assert "| resumed after step 7 | 2026-01-02 |" in made.text


def test_local_data_file_is_not_listed_as_a_hub_data_set(written, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    made = written(f'[task]\nname = "dataset"\ndata = "{tmp_path}/rows.jsonl"\n', evaluation(0.5, 0.5))
    assert made.data.datasets is None and "Data: `rows.jsonl`" in made.text
    assert "| `task.data` | `rows.jsonl` | `" in made.text and str(tmp_path) not in made.content


def test_python_objects_are_named_as_not_included(written):
    again = "With the files below in the working directory: `pellucid train recipe.toml`"
    assert f"## Train it again\n\n{again}" in written(SUMS).text
    terms = [{"name": "here:brief", "weight": 1.0}, {"name": "mine.py:long", "weight": 1.0}, {"name": "here:near-2"}]
    task = {"name": "dataset", "data": "here: a text", "rewards": [{"weight": 1.0, **term} for term in terms]}
    known = {"task.rewards.0.name": "1f", "task.rewards.1.name": "2f"}
    text = written(SUMS, task=task, digests=known).text
    said = (
        "`here:brief`, `here:near-2`: given to `pellucid.train` as Python objects, which are not included: put your own"
        " into files, and name them in the recipe as `path/to/file.py:name`."
    )
    assert f"## Train it again\n\n{said} {again}" in text
    assert "| `task.rewards.1.name` | `mine.py:long` | `2f` |" in text and "task.rewards.0.name" not in text
    only = written(SUMS, task={**task, "rewards": task["rewards"][:1]}, digests={"task.rewards.0.name": "1f"}).text
    assert "| setting | file | sha256 |" not in only


def test_file_path_of_a_secret_is_hidden(written):
    facts = {
        "task": {"name": "judged.py:Judged", "api_key": {"main": "/home/me/key.txt"}, "judge_token": "/home/me/it.txt"}
    }
    text = written(SUMS, **facts, digests={"task.api_key.main": "1f", "task.judge_token": "2f"}).text
    assert "| `task.api_key.main` | `...` | `1f` |" in text and "| `task.judge_token` | `...` | `2f` |" in text


def test_a_config_without_digests_names_no_files(written, tmp_path):
    whole, path = written(SUMS, digests={}).text, tmp_path / "run" / "config.json"
    settings = json.loads(path.read_text())
    del settings["digests"]
    path.write_text(json.dumps(settings))
    assert ModelCard(make_model_card(tmp_path / "run", "me/sums", "steps = 2\n")).text == whole


def test_wrapped_task_is_described_by_its_inner_task(written):
    text = written('[task]\nname = "curriculum"\n[task.task]\nname = "sorting"\n', evaluation(0.5, 0.5)).text
    assert "Task: `sorting`. Sort a few numbers" in text


def test_card_shows_chat_usage_if_the_model_has_a_chat_template(written, tmp_path):
    assert "messages" not in written(SUMS).text
    (tmp_path / "run" / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert 'messages = [{"role": "user"' in written(SUMS).text


def test_card_sets_trust_remote_code_for_custom_code(written, tmp_path):
    assert (
        "trust_remote_code" not in written(f"[policy]\ntrust_remote_code = true\n{SUMS}").text.partition("## Train")[0]
    )
    (tmp_path / "run" / "model" / "modeling_own.py").write_text("")
    text = written(f"[policy]\ntrust_remote_code = true\n{SUMS}").text
    assert 'pipeline("text-generation", model="me/sums", trust_remote_code=True)' in text
    (tmp_path / "run" / "model" / "chat_template.jinja").write_text("{{ messages }}")
    code = written(SUMS).text.partition("```python\n")[2].partition("```")[0]
    assert 'model="me/sums", trust_remote_code=True)' in code and compile(code, "card", "exec")


def test_python_code_of_the_card_compiles(written):
    code = written(SUMS).text.partition("```python\n")[2].partition("```")[0]
    assert compile(code, "card", "exec") and 'model="me/sums"' in code


def test_local_base_model_is_named_by_its_folder(written, tmp_path):
    folder = tmp_path / "my models" / "first one"
    folder.mkdir(parents=True)
    made = written(f'[policy]\nmodel = "{folder}"\n{SUMS}')
    assert made.text.startswith("\n# sums\n\nfirst one, trained")
    folder.rmdir()
    assert made.content == written(f'[policy]\nmodel = "{folder}"\n{SUMS}').content


@pytest.mark.parametrize(
    ("model", "known"),
    [
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("gpt2", "gpt2"),
        ("/home/me/model", None),
        ("./model", None),
        ("~/model", None),
        ("a/b/c", None),
        ("small.gguf", None),
        ("modelscope:Qwen/Qwen2.5-0.5B", None),
    ],
)
def test_find_base_model_returns_only_hub_models(model, known):
    assert find_base_model(model) == known

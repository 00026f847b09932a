"""Test the recipes of the systems with the settings of their sources: each is read and trains two steps."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import EOS, VOCAB, character_tokenizer, mostly_slow, records
from pellucid import cli, config

LENGTHS = ["--sampler.max-tokens", "12", "--algorithm.steps", "2", "--evaluate.n", "2", "--evaluate.k", "0"]
SMALLER = {"gsm8k": ["--algorithm.prompts-per-step", "16", "--algorithm.group-size", "3"]}
SMALLER["study_bench"] = ["--algorithm.prompts-per-step", "4", "--algorithm.group-size", "3"]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """Return a model with a context for the systems' prompts and enough layers for their settings."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=10,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=EOS,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(shape)
    # transformers sets the row of the padding token to 0, whose norm has unbounded gradients in its first layer.
    model.model.embed_tokens.weight.data[EOS].normal_(std=0.3)
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    rows = [{"question": f"What is {i} + 1?", "answer": f"Count on.\n#### {i + 1}"} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "name", mostly_slow(["gsm8k", "continuity", "expected", "study_bench", "sorting", "countdown"], every=6)
)
def test_recipe_of_a_system_trains(name, wide_model, questions, tmp_path):
    task = "task.task.task" if name == "study_bench" else "task"
    of_file = [f"--{task}.data", str(questions), f"--{task}.test-data", ""]
    data = of_file if name in ("gsm8k", "study_bench") else []
    run = tmp_path / "run"
    overrides = [
        *LENGTHS,
        *SMALLER.get(name, []),
        *data,
        "--policy.model",
        str(wide_model),
        "--policy.dtype",
        "float32",
    ]
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", f"recipes/{name}.toml", *overrides, "--run", str(run)])
    assert ended.value.code == 0
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["reward/failed"] == step["skipped"] == 0 for step in steps)
    assert (run / "model" / "model.safetensors").exists()


def test_defaults_of_the_systems():
    """The values are from part A8 of their descriptions."""
    one, trainer, by_hand = (
        config.load_config(Path(f"recipes/{name}.toml")) for name in ("continuity", "gsm8k", "expected")
    )
    assert (one.algorithm.group_size, one.algorithm.epochs, one.algorithm.kl_coef) == (4, 3, 0.02)
    assert (one.optimizer.lr, one.sampler.max_tokens, one.algorithm.steps) == (2e-6, 512, 20)
    assert (trainer.algorithm.group_size, trainer.algorithm.prompts_per_step, trainer.algorithm.kl_coef) == (
        12,
        32,
        0.01,
    )
    assert (trainer.optimizer.lr, trainer.sampler.max_tokens, trainer.algorithm.seed) == (5e-6, 1024, 42)
    assert (by_hand.algorithm.group_size, by_hand.algorithm.epochs, by_hand.algorithm.kl_coef) == (4, 2, 0.05)
    assert (by_hand.optimizer.lr, by_hand.sampler.max_tokens, by_hand.policy.reference) == (2e-6, 48, "cpu")


def test_defaults_of_the_study_bench_and_of_sorting(monkeypatch):
    bench = config.load_config(Path("recipes/study_bench.toml"))
    assert (bench.algorithm.prompts_per_step, bench.algorithm.group_size, bench.algorithm.kl_coef) == (32, 8, 0.01)
    assert (bench.algorithm.clip_low, bench.algorithm.clip_high) == (0.3, 0.3)
    assert (bench.algorithm.similarity_temperature, bench.algorithm.similarity_layer) == (1.0, 9)
    assert (bench.optimizer.lr, bench.sampler.temperature, bench.sampler.max_tokens) == (1e-5, 0.9, 1024)
    spec = importlib.util.spec_from_file_location("sorting_defaults", "examples/sorting_from_scratch.py")
    sorting = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sorting_defaults", sorting)
    spec.loader.exec_module(sorting)
    usual = sorting.parse_options([])
    assert (usual.epochs, usual.inner, usual.responses, usual.clip) == (100, 10, 10, 0.01)
    assert (usual.kl, usual.reference) == (0.0, 10)
    assert set(sorting.DELTAS) == {"raw", "centered", "normalized", "max"}
    assert {"naive", "unclipped", "clipped"} <= set(sorting.LOSSES)


CONFORMANCE = Path("docs/contributing/conformance.md")
FORMS = {"as described", "by a setting", "different", "absent"}


def test_every_item_of_the_systems_has_a_row_with_tests_or_commands():
    """A row names commands or test functions, with their file if others have the same name. All of them must exist."""
    rows = [line.strip("| ").split(" | ") for line in CONFORMANCE.read_text().splitlines() if re.match(r"\| \d", line)]
    assert [int(n) for row in rows for n in row[0].split(", ")] == list(range(1, 79))
    sources = {path: path.read_text() for path in Path("tests").rglob("test_*.py")}
    for number, _, _, form, shown in rows:
        assert form.split(";")[0] in FORMS, number
        named = re.findall(r"`([^`]+)`", shown)
        assert named, number
        for name in named:
            if name.startswith(("make ", "pellucid ", "python ")):
                check_command(name)
                continue
            file, _, function = name.rpartition("::")
            defined = [path for path, text in sources.items() if f"def {function}(" in text]
            found = [path for path in defined if not file or path == Path("tests") / file]
            assert len(found) == 1, f"row {number}: {name} is defined in {defined}"


def check_command(line):
    """Check that a Makefile target or a subcommand exists, and its files, too."""
    program, *words = line.split()
    if program == "make":
        assert re.search(rf"^{words[0]}:", Path("Makefile").read_text(), re.MULTILINE), line
    if program == "pellucid":
        assert f"pellucid {words[0]}" in Path("docs/reference/commands.md").read_text(), line
    for word in words:
        assert not word.startswith(("recipes/", "examples/", "benchmarks/")) or Path(word).exists(), line


EASY = '''
from dataclasses import dataclass

from pellucid.tasks.gsm8k import Gsm8k
from pellucid.types import Reward


@dataclass(frozen=True)
class Even(Gsm8k):
    """Its questions and solutions, and a reward that an untrained model earns sometimes."""

    name: str = "even"

    def reward(self, prompt, completion):
        share = sum(ord(c) % 2 == 0 for c in completion.text) / max(1, len(completion.text))
        return Reward(share, correct=share > 0.5)
'''


@pytest.mark.slow
def test_every_technique_of_the_study_bench_changes_something(wide_model, questions, tmp_path):
    """There are eight questions and four per step: the second epoch begins at step 3 and goes from easy to hard."""
    (tmp_path / "easy.py").write_text(EASY)
    run, steps = tmp_path / "run", 3
    settings = {
        "policy.model": wide_model, "policy.dtype": "float32", "task.task.pool": 8, "task.dropout": 0.3,
        "task.task.task.name": f"{tmp_path / 'easy.py'}:Even", "task.task.task.data": questions,
        "task.task.task.test_data": "", "task.task.task.format_reward": 0, "sampler.max_tokens": 16,
        "algorithm.steps": steps, "algorithm.prompts_per_step": 4, "evaluate.every": 0, "checkpoint.every": 0,
        "optimizer.lr": 0.01,
    }  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "recipes/study_bench.toml", *(f"--{k}={v}" for k, v in settings.items()), "--run", str(run)])
    assert ended.value.code == 0
    metrics = records(run / "metrics.jsonl")
    assert len(metrics) == steps
    assert all(step["skipped"] == 0 for step in metrics)
    effects = ("effect/advantage", "effect/difficulty", "effect/shaping", "effect/clip", "effect/kl")
    for name in (*effects, "prefix/share", "prefix/nll"):
        assert max(step[name] for step in metrics) > 0, name
    orders = [[r["id"] for r in records(run / "rollouts.jsonl") if r["step"] == step] for step in (1, 3)]
    assert metrics[2]["curriculum/epoch"] == 1
    assert [len(ids) for ids in orders] == [32, 32]
    assert set(orders[0]) != set(orders[1]), "the second epoch has another order"

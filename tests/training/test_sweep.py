"""Each value of each setting trains two steps to finite weights, or is refused in one line before a model is loaded.

The settings come from the dataclasses: a new one is tried without a change here, unless it is a string or a list, for
which EXAMPLES must have values. The model has two layers at a shape that compiled kernels compute.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conftest import records
from forked import ran
from pellucid.config import SECTIONS, get_field_types, list_type_alternatives
from runs import answered

BASE = {
    "algorithm.steps": 2,
    "algorithm.prompts_per_step": 2,
    "algorithm.group_size": 2,
    "sampler.max_tokens": 8,
    "evaluate.every": 0,
    "checkpoint.every": 0,
    "policy.dtype": "bfloat16",
    "log.rollouts": 0,
}
FEW_ANSWERS = {"evaluate.every": 1, "evaluate.n": 2, "evaluate.k": 2}
EXAMPLES: dict[str, list[Any]] = {
    "algorithm.betas": [],
    "algorithm.soft_temperature": [(0.5, 0.9)],
    "log.project": ["other"],
    "optimizer.betas": [(0.8, 0.99)],
    "policy.device": ["cpu"],
    "policy.lora_targets": [("q_proj", "v_proj")],
    "policy.model": [],
    "policy.reference": ["cpu"],
    "policy.revision": [],
    "policy.template": ["TEMPLATE"],
    "policy.template_kwargs": [("enable_thinking", "False")],
    "reward.secrets": [("SOME_KEY",)],
    "sampler.urls": [],
}
"""Values of settings that are strings, lists or tables; empty if a value needs a file or another machine."""
NUMBERS = {
    "algorithm.clip_cap": 5.0,
    "algorithm.correction_cap": 3.0,
    "algorithm.dual_clip": 3.0,
    "algorithm.group_size": 3,
    "algorithm.similarity_layer": 1,
    "evaluate.samples": 3,
    "optimizer.lr": 1e-4,
    "runtime.shards": 1,
}
"""Values of numbers for which the automatic value, half of the default or 2, is out of range."""
WITH: dict[str, dict[str, Any]] = {
    "algorithm.aggregate": {"algorithm.max_length": 8},
    "algorithm.clip_difficulty": {},
    "algorithm.clip_difficulty_low": {},
    "algorithm.data_epochs": {
        "algorithm.steps": None,
        "task.name": "dataset",
        "task.data": "ROWS",
        "task.test_share": 0,
    },
    "algorithm.constant_length": {"algorithm.aggregate": "constant"},
    "algorithm.clip_cap": {"algorithm.objective": "dcpo"},
    "algorithm.correction_cap": {"algorithm.correction": "token"},
    "algorithm.kl": {"algorithm.kl_coef": 0.1, "algorithm.kl_in": "loss"},
    "algorithm.kl_in": {"algorithm.kl_coef": 0.1},
    "algorithm.kl_target": {"algorithm.kl_coef": 0.1},
    "algorithm.length_buckets": {"algorithm.advantage": "length_grouped"},
    "algorithm.length_min_cell": {"algorithm.advantage": "length_grouped"},
    "algorithm.length_shrinkage": {"algorithm.advantage": "length_grouped"},
    "algorithm.minibatches": {"algorithm.epochs": 2},
    "algorithm.overlong_cache": {"algorithm.max_length": 8},
    "algorithm.reference_decay": {"algorithm.kl_coef": 0.1, "algorithm.reference_every": 1},
    "algorithm.reference_every": {"algorithm.kl_coef": 0.1},
    "algorithm.similarity_layer": {"algorithm.similarity": "smooth"},
    "algorithm.similarity_mix": {"algorithm.similarity": "smooth"},
    "algorithm.similarity_temperature": {"algorithm.similarity": "smooth"},
    "algorithm.soft_temperature": {"algorithm.objective": "sapo"},
    "checkpoint.keep_finished": {"checkpoint.every": 1},
    "checkpoint.keep_best": FEW_ANSWERS,
    "checkpoint.keep_last": {"checkpoint.every": 1},
    "log.token_steps": {"log.tokens": 1},
    "policy.load_in_4bit": {"policy.lora": 2},
    "policy.lora_alpha": {"policy.lora": 2},
    "policy.lora_targets": {"policy.lora": 2},
    "policy.reference": {"algorithm.kl_coef": 0.1},
    "policy.template_kwargs": {"policy.template": "TEMPLATE"},
    "runtime.shards": {"runtime.engine": "fsdp2"},
    "runtime.zero_stage": {"runtime.engine": "deepspeed"},
    "sampler.adapter": {"sampler.name": "vllm", "policy.lora": 2},
    "sampler.ahead": {"sampler.name": "vllm", "algorithm.correction": "token"},
    **{
        f"evaluate.{name}": FEW_ANSWERS
        for name in ("every", "n", "k", "patience", "samples", "top_k", "top_p", "min_p")
    },
}
"""Other settings that a setting needs to have an effect; None removes a setting of BASE."""
ROWS = "".join(json.dumps({"question": f"{i} + 1", "answer": str(i + 1)}) + "\n" for i in range(40))
"""The contents of the file that replaces the word ROWS above: a tenth of it is two steps of two prompts."""
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}="
    "{% if enable_thinking is defined and not enable_thinking %}?{% endif %}{% endif %}"
)
"""The chat template that replaces the word TEMPLATE above."""
NEEDS = {
    "policy.load_in_4bit": "bitsandbytes",
    "runtime.zero_stage": "deepspeed",
    "sampler.adapter": "vllm",
    "sampler.ahead": "vllm",
}
"""Settings that need a library, which may not be installed."""


def values_of(name: str, kind: Any, default: Any) -> list[Any]:
    """Return values of a setting other than its default. Fail for a string or a list without examples."""
    if name in EXAMPLES:
        return EXAMPLES[name]
    if name in NUMBERS:
        return [NUMBERS[name]]
    kinds = list_type_alternatives(kind)
    choices = [value for each in kinds if get_origin(each) is Literal for value in get_args(each)]
    if choices:
        return [value for value in choices if value != default]
    if bool in kinds:
        return [not default]
    if int in kinds:
        return [3 if default == 2 else 2]
    if float in kinds:
        return [default / 2 or 0.1]
    raise AssertionError(
        f"{name} is neither a number nor a choice: give it a value in EXAMPLES of {Path(__file__).name}"
    )


SETTINGS = {
    f"{section}.{key}": values_of(f"{section}.{key}", kind, fields[key])
    for section, cls in SECTIONS.items()
    if section != "task"
    for fields in [{field.name: field.default for field in dataclasses.fields(cls)}]
    for key, kind in get_field_types(cls).items()
}
TRIED = [name for name, values in SETTINGS.items() if values]
COMBINED = sorted({(name, value) for name in TRIED if name not in NEEDS for value in SETTINGS[name]}, key=str)


def combinations(count: int = 30, of: int = 4):
    """Return random combinations of settings, the same ones in each run."""
    chance = random.Random(57)
    # A process group needs its own process.
    quick = [each for each in COMBINED if not each[0].startswith("runtime.")]
    return [chance.sample(quick, of) for _ in range(count)]


def words(settings):
    """Return the settings as flags of the command line."""
    found = []
    for name, value in settings.items():
        if value is None:
            continue
        found += [f"--{name.replace('_', '-')}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return found


@pytest.fixture
def outcome(tmp_path, monkeypatch, capsys):
    """Return a function that runs `pellucid train`, and returns "trained" or the line of the refusal."""
    loaded, load = [], AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loaded.append(a) or load(*a, **k))
    files = {"TEMPLATE": tmp_path / "template.jinja", "ROWS": tmp_path / "rows.jsonl"}
    files["TEMPLATE"].write_text(TEMPLATE)
    files["ROWS"].write_text(ROWS)
    task = f"{Path(__file__).parents[1]}/digits_task.py:Digits"

    def train(model, settings):
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        flags = words({"task.name": task, "policy.model": model, **BASE, **settings})
        flags = [str(files.get(word, word)) for word in flags]
        loaded.clear()
        if any(name.startswith("runtime.") for name in settings):  # a process group needs its own process
            done = ran("-m", "pellucid", "train", "--run", folder, *flags)
            status, said, before_loading = done.returncode, done.stderr, True
        else:
            capsys.readouterr()
            status = answered("train", "--run", folder, *flags)
            said, before_loading = capsys.readouterr().err, not loaded
        lines = [line for line in said.splitlines() if line.strip() and "it/s]" not in line]
        if status == 2:
            assert len(lines) == 1, f"refused in more than one line: {said}"
            assert lines[0].startswith("pellucid: ")
            assert before_loading, f"refused when the model was loaded: {lines[0]}"
            assert not folder.exists(), "a run that was refused left a folder"
            return lines[0]
        assert status == 0, said
        assert "Traceback" not in said
        steps = records(folder / "metrics.jsonl")
        assert len(steps) == (settings.get("algorithm.steps") or 2)
        [file] = (folder / "model").glob("*.safetensors")
        assert all(bool(weight.isfinite().all()) for weight in load_file(file).values())
        shutil.rmtree(folder)
        return "trained"

    yield train
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.timeout(900)  # torch.compile takes minutes on shared cores, and emits warnings
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRIED)
def test_each_value_trains_or_is_refused_in_one_line(name, outcome, kernel_dirs):
    found = {
        str(value): outcome(kernel_dirs["llama, heads of 64"], {**WITH.get(name, {}), name: value})
        for value in SETTINGS[name]
    }
    print(name, found)
    assert name in NEEDS or "trained" in found.values(), f"no value but the default is accepted: {found}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chosen", combinations(), ids=lambda chosen: ", ".join(f"{n}={v}" for n, v in chosen))
def test_combinations_train_or_are_refused_in_one_line(chosen, outcome, kernel_dirs):
    settings = {k: v for name, _ in chosen for k, v in WITH.get(name, {}).items()} | dict(chosen)
    print(settings, outcome(kernel_dirs["llama, heads of 64"], settings))

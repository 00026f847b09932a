"""Test common mistakes of new users: each one prints one line that names the fix.

The exit status is 2, stderr has one line, stdout is empty, and no file is added or removed.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from conftest import tiny_recipe
from pellucid import cli
from pellucid.policy import policy
from runs import train

MISTAKES = {
    # commands and options
    "trian recipe.toml": 'trian.*did you mean "?train',
    "train recipe.toml --rnu runs/second": "--rnu.*--run",
    "train recipe.toml --run": "--run.*(value|argument)",
    "train recipe.toml --run runs/first": "runs/first holds a run: resume with --resume runs/first",
    "train recipe.toml another.toml": "another.toml",
    "eval": "(?i)model",
    "init": "(?i)dir|folder",
    "push runs/first": "(?i)user/name|repo",
    "prefixes recipe.toml": "--output|--teacher",
    # settings
    "train recipe.toml --algorithm.group-sise 8": "group_sise.*group_size",
    "train recipe.toml --algoritm.steps 3": "algoritm.*algorithm",
    "train recipe.toml --steps 3": "--steps.*algorithm.steps",
    "train recipe.toml --rnu a --reusme b": "--rnu.*--run.*--reusme.*--resume",
    "train recipe.toml --algorithm.stepz 3 --optimiser.lr 1": 'optimiser.*"optimizer".*stepz.*"steps"',
    "train recipe.toml --algorithm.steps many": "algorithm.steps.*many",
    "train recipe.toml --algorithm.steps 2.5": "algorithm.steps.*2.5",
    "train recipe.toml --algorithm.steps": "algorithm.steps.*(value|argument)",
    "train recipe.toml --algorithm.steps 3 4": r"\b4\b",
    "train recipe.toml --algorithm.steps 0": "steps = 0 must be at least 1",
    "train recipe.toml --algorithm.group-size 1": "group_size = 1 must be at least 2",
    "train recipe.toml --optimizer.lr -1": "lr = -1.0 must be positive",
    "train recipe.toml --optimizer.lr nan": "optimizer.lr.*finite.*nan",
    "train recipe.toml --policy.dtype float8": "dtype.*float16.*float8",
    "train recipe.toml --log.wandb on": "wandb.*online.*'on'",
    "train recipe.toml --algorithm.objective ppo_clp": 'ppo_clp.*did you mean "ppo_clip"',
    "train recipe.toml --task.name arithmatic": 'arithmatic.*did you mean "arithmetic"',
    # recipes and their files
    "train recpie.toml": 'recpie.toml.*did you mean "recipe.toml"',
    "train runs": "runs.*(directory|folder)",
    "train binary.toml": "binary.toml",
    "train unclosed.toml": "unclosed.toml: ",
    "train misspelt.toml": 'algorithm.stepz.*did you mean "steps"',
    "train reward.toml": 'numerc.*did you mean "numeric"',
    "train missing.toml": r'questons.jsonl.*did you mean "questions.jsonl"',
    "train empty.toml": "empty.jsonl: there are no rows",
    "train column.toml": 'questions.jsonl, line 1: no column "anwser"; did you mean "answer"',
    "doctor --plan recpie.toml": 'recpie.toml.*did you mean "recipe.toml"',
    # found before the model is loaded
    "train recipe.toml --sampler.max-tokens 4000": r"max_tokens = 4000 leaves no room for a prompt: .* context of",
    "train recipe.toml --policy.lora 4 --policy.lora-targets q_prj": "lora_targets: no linear layer is called q_prj",
    "train recipe.toml --policy.lora 4 --algorithm.kl-coef 0.1 --algorithm.reference-every 2": "reference_every: the",
    "train recipe.toml --algorithm.similarity smooth --algorithm.similarity-layer 40": "similarity_layer = 40",
    "train recipe.toml --sampler.ahead 1": 'ahead = 1 needs .* sampler.name = "vllm"',
    "train graded.toml --task.rewards takes_little.py:reward": "takes_little.py|reward .*unexpected keyword argument",
    "train graded.toml --task.rewards takes_litle.py:reward": "takes_litle.py: there is no such file",
    "train graded.toml --task.rewards takes_little.py:rewrad": 'takes_little.py has no "rewrad"; did you mean "reward"',
    "train graded.toml --task.rewards broken.py:reward": "broken.py.*(line 1|undefined_name)",
    # the wrong command
    "train takes_little.py": "takes_little.py is Python.*--task.rewards takes_little.py:FUNCTION",
    "train study.toml": "study.toml is a study.*pellucid study study.toml",
    "study recipe.toml": "recipe.toml is a recipe.*pellucid train recipe.toml",
    "compare recipe.toml": "recipe.toml is a recipe.*compare takes",
    "compare study.toml": "pellucid study study.toml trains the variants",
    "train --resume recipe.toml": "pellucid train recipe.toml begins a run",
    "eval recipe.toml": "pellucid eval MODEL_OR_RUN --task recipe.toml",
    "look recipe.toml": "pellucid train recipe.toml --log.tokens 4",
    "show recipe.toml": "pellucid train recipe.toml --log.tokens 4",
    "serve recipe.toml": "pellucid train recipe.toml makes one",
    "push recipe.toml me/model": "pellucid train recipe.toml makes one",
    # models
    "train recipe.toml --policy.model nobody/nothing": "policy.model = 'nobody/nothing'",
    "train recipe.toml --policy.model smollm2-153m": "smollm2-153m.*smollm2-135m",
    "train recipe.toml --policy.model damaged.gguf": "damaged.gguf",
    "train recipe.toml --policy.model missing.gguf": "missing.gguf",
    "train recipe.toml --policy.model runs": "runs.*folder without config.json",
    # runs
    "train --resume runs/frist": 'runs/frist.*did you mean "?(runs/)?first',
    "train --resume runs/first recipe.toml": "leave out the recipe",
    "train --resume runs/first --algorithm.steps 1": "steps = 1",
    "train --resume runs/first --algorithm.group-size 8": "algorithm.group_size = 4, now 8",
    "eval runs/frist": 'runs/frist.*did you mean "?(runs/)?first',
    "eval runs/first --show -1": "show.*-1",
    "eval runs/first --show three": "show.*three",
    "eval runs/first --output answers.jsonl": "answers.jsonl already exists",
    "eval runs/first --output answers.csv": "answers.csv must end in .jsonl",
    "eval runs/half": "runs/half has no model yet: finish it with pellucid train --resume runs/half",
    "compare runs/frist": 'runs/frist.*did you mean "?(runs/)?first',
    "compare runs/first --baseline plian": "plian",
    "push runs/half me/model": "runs/half.*finish it with pellucid train --resume runs/half",
    "push runs/frist me/model": 'runs/frist.*did you mean "runs/first"',
    "push runs/first model": "USER/NAME",
    # the service
    "serve runs/frist": 'runs/frist.*did you mean "?(runs/)?first',
    "serve runs/first --port 99999": "port.*99999|99999.*port",
    "serve runs/first --port http": "port.*http",
    "serve stpo": 'stpo.*did you mean "?stop',
    # studies, starters, lists
    "study stduy.toml": 'stduy.toml.*did you mean "study.toml"',
    "study study.toml --only plian": 'no variant "plian"; did you mean "plain"',
    "study study.toml --jobs 0": "jobs.*0",
    "init .": "recipe.toml already exists",
    "list rewrads": 'rewrads.*did you mean "rewards"',
}
"""Command lines, and the patterns that their error lines must match."""


@pytest.fixture(scope="module")
def worked(tmp_path_factory, model_dir):
    """Return a folder with a finished and an unfinished run, valid and broken recipes, and data."""
    folder = tmp_path_factory.mktemp("place")
    recipe = tiny_recipe(folder / "recipe.toml", model_dir)
    recipe.write_text(recipe.read_text().replace("tensorboard = true", ""))
    shutil.copy(recipe, folder / "another.toml")
    assert train(recipe, "--algorithm.steps", 2, "--run", folder / "runs" / "first") == 0
    shutil.copytree(folder / "runs" / "first", folder / "runs" / "half")
    shutil.rmtree(folder / "runs" / "half" / "model")
    write_files(folder)
    return folder


def write_files(folder: Path) -> None:
    model = (folder / "recipe.toml").read_text().partition("[task]")[0]
    dataset = model + '[task]\nname = "dataset"\ndata = "{}.jsonl"\nanswer = "{}"\n[[task.rewards]]\nname = "{}"\n'
    texts = {
        "questions.jsonl": '{"question": "1 + 1?", "answer": "2"}\n{"question": "1 + 2?", "answer": "3"}\n',
        "empty.jsonl": "",
        "answers.jsonl": "{}\n",
        "unclosed.toml": "[algorithm]\nsteps = 'three\n",
        "misspelt.toml": "[algorithm]\nstepz = 3\n",
        "reward.toml": dataset.format("questions", "answer", "numerc"),
        "missing.toml": dataset.format("questons", "answer", "numeric"),
        "empty.toml": dataset.format("empty", "answer", "numeric"),
        "graded.toml": dataset.format("questions", "answer", "numeric"),
        "takes_little.py": "def reward(completions):\n    return [0.0 for _ in completions]\n",
        "broken.py": "print(undefined_name)\n",
        "column.toml": dataset.format("questions", "anwser", "numeric"),
        "study.toml": 'base = "recipe.toml"\nseeds = [0]\n[variants.plain]\n[variants.long.algorithm]\nsteps = 9\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "binary.toml").write_bytes(bytes(range(256)))
    (folder / "damaged.gguf").write_bytes(b"GGUF" + bytes(60))


def files_in(place):
    """Return all files except bytecode, which Python writes at imports."""
    return sorted(path for path in place.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_exit_with_one_line_that_names_the_fix(line, worked, tmp_path, monkeypatch, capsys):
    place = shutil.copytree(worked, tmp_path / "place")
    monkeypatch.chdir(place)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("takes_little", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if "--policy.model" not in line:
        monkeypatch.setattr(policy, "load_policy", None)  # these mistakes are found before the model is loaded
    there = files_in(place)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(line))
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.out == ""
    assert re.fullmatch(r"pellucid: [^\n]+\n", said.err), said.err
    assert re.search(MISTAKES[line], said.err)
    assert files_in(place) == there

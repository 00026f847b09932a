"""Settings as keywords: each name leads to one setting, and unknown or ambiguous names raise an error."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from pellucid import config
from pellucid.algorithm import group_advantages, policy_loss
from pellucid.api import COMMON_TASK_FIELDS, find_section_and_key, group_settings_by_section, list_section_keys, train
from pellucid.config import SECTIONS
from pellucid.tasks import TASKS, load_task_class
from pellucid.tasks.dataset import Dataset
from pellucid.types import UserError
from pellucid.utils.text import format_option, write_options_as_keywords


@pytest.mark.parametrize(
    ("name", "place"),
    {
        "steps": ("algorithm", "steps"),
        "group_size": ("algorithm", "group_size"),
        "seed": ("algorithm", "seed"),
        "max_tokens": ("sampler", "max_tokens"),
        "lr": ("optimizer", "lr"),
        "lora": ("policy", "lora"),
        "n": ("evaluate", "n"),
        "k": ("evaluate", "k"),
        "evaluate_every": ("evaluate", "every"),
        "checkpoint_every": ("checkpoint", "every"),
        "sampler_name": ("sampler", "name"),
        "runtime_engine": ("runtime", "engine"),
        "algorithm_steps": ("algorithm", "steps"),
        "question": ("task", "question"),
        "task_template": ("task", "template"),
        "policy_template": ("policy", "template"),
    }.items(),
)
def test_a_name_leads_to_its_setting(name, place):
    assert find_section_and_key(name, list_section_keys(Dataset)) == place


@pytest.mark.parametrize("task", [None, *TASKS])
def test_every_setting_has_a_unique_name(task):
    """A bare key works if no other section has it. With its section, a key always works and clashes with no other."""
    cls = load_task_class(task) if task else None
    known = list_section_keys(cls)
    bare = [key for keys in known.values() for key in keys]
    for section, keys in known.items():
        for key in keys:
            assert find_section_and_key(f"{section}_{key}", known) == (section, key)
            assert f"{section}_{key}" not in bare
            if bare.count(key) == 1:
                assert find_section_and_key(key, known) == (section, key)
    fields = {section: cls for section, cls in SECTIONS.items() if section != "task"}
    assert {s: {f.name for f in dataclasses.fields(c)} for s, c in fields.items()} == {
        section: set(keys) for section, keys in known.items() if section != "task"
    }
    if cls:
        assert {f.name for f in dataclasses.fields(cls)} - set(known["task"]) <= set(COMMON_TASK_FIELDS)


def test_every_option_in_messages_has_a_matching_keyword():
    sources = "".join(path.read_text() for path in Path("src/pellucid").rglob("*.py"))
    named = set(re.findall(r"format_(?:option|setting)\(f?[\"']([a-z_]+\.[a-z_]+)[\"']", sources))
    assert {"evaluate.every", "evaluate.patience", "algorithm.steps"} <= named
    known = list_section_keys(Dataset)
    with write_options_as_keywords():
        for name in named - {"policy.model"}:
            assert find_section_and_key(format_option(name).removesuffix("="), known) == tuple(name.split("."))


MISTAKES = {
    "every": "every is a setting of evaluate and checkpoint: use evaluate_every or checkpoint_every",
    "top_k": "top_k is a setting of sampler and evaluate: use sampler_top_k or evaluate_top_k",
    "engine": "engine is a setting of policy and runtime: use policy_engine or runtime_engine",
    "template": "template is a setting of policy and task: use policy_template or task_template",
    "evaluate": "evaluate is a section: use evaluate_every=... for its setting every",
    "group_sise": "pellucid.train has no setting group_sise; did you mean group_size?",
    "evaluate_evry": "pellucid.train has no setting evaluate_evry; did you mean evaluate_every?",
    "questoin": "pellucid.train has no setting questoin; did you mean question?",
    "level": "pellucid.train has no setting level; docs/reference/python.md says how settings are named",
    "zzz": "pellucid.train has no setting zzz; docs/reference/python.md says how settings are named",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_unknown_or_ambiguous_name_raises_user_error(name):
    with pytest.raises(UserError) as told:
        group_settings_by_section({name: 1}, Dataset)
    assert str(told.value) == MISTAKES[name]


def test_keywords_become_a_recipe():
    sections = group_settings_by_section({"steps": 3, "lr": 1e-3, "evaluate_every": 5, "betas": [0.8, 0.9]}, None)
    cfg = config.build_config(sections, "here")
    assert (cfg.algorithm.steps, cfg.optimizer.lr, cfg.evaluate.every, cfg.optimizer.betas) == (3, 1e-3, 5, (0.8, 0.9))


def test_every_keyword_in_the_documentation_exists():
    """Each `name=` in the Python and TRL pages is a parameter of these functions, or leads to a setting."""
    pages = [Path(f"docs/{name}.md").read_text() for name in ("reference/python", "how-to/from-trl")]
    texts = [re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL) for page in pages]
    ours = texts[0] + re.sub(r"^\| [^|]*`[^|]*\|", "|", texts[1], flags=re.MULTILINE)
    named = set(re.findall(r"\b([a-z_]+)=", " ".join(re.findall(r"`[^`]*`", ours))))
    functions = (train, group_advantages, policy_loss)
    parameters = {name for function in functions for name in inspect.signature(function).parameters}
    refused = {"every", "group_sise"}
    assert len(named) > 50
    assert refused <= named
    for name in named - parameters - refused - {"limit"}:
        assert find_section_and_key(name, list_section_keys(Dataset))

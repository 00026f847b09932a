"""Test that settings come from defaults, recipe and command line, and that errors are one line and suggest a fix."""

from __future__ import annotations

import dataclasses
import json
import pickle
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from pellucid import config
from pellucid.algorithm import settings
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.tasks.curriculum import Curriculum
from pellucid.tasks.prefixed import Prefixed
from pellucid.types import UserError

RECIPES = sorted(path for path in Path("recipes").rglob("*.toml") if path.parent.name != "study")


def recipe(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def test_recipes_are_found():
    assert {"arithmetic", "arithmetic_hard"} <= {path.stem for path in RECIPES}


def contains(loaded, stated):
    """Return whether `loaded` has all values that the recipe states."""
    if isinstance(stated, dict):
        return all(contains(loaded[key], value) for key, value in stated.items())
    if isinstance(stated, list):
        return len(loaded) == len(stated) and all(map(contains, loaded, stated))
    return loaded == stated


def test_every_recipe_parses_and_states_only_what_differs():
    defaults = config.dump_config(config.load_config(None))
    for path in RECIPES:
        loaded = config.dump_config(config.load_config(path))
        for section, values in tomllib.loads(path.read_text()).items():
            for key, value in values.items():
                assert contains(loaded[section][key], value), path
                assert key == "name" or section == "task" or value != defaults[section][key], (
                    f"{path}: {section}.{key} is the default"
                )


def test_command_line_overrides_recipe_and_recipe_overrides_defaults(tmp_path):
    path = recipe(tmp_path, "[algorithm]\nsteps = 7\ngroup_size = 4\n[task]\nname = 'arithmetic'\ndigits = 2\n")
    cfg = config.load_config(path, ["--algorithm.group-size", "16", "--task.operators", "-", "*", "--policy.lora", "8"])
    assert (cfg.algorithm.steps, cfg.algorithm.group_size, cfg.algorithm.epochs) == (7, 16, 1)
    assert (cfg.task.digits, cfg.task.operators, cfg.policy.lora) == (2, ("-", "*"), 8)


def test_settings_survive_json(tmp_path):
    path = recipe(tmp_path, "[task]\nname = 'arithmetic'\noperators = ['-']\n[optimizer]\nbetas = [0.8, 0.9]\n")
    cfg = config.load_config(path)
    written = tmp_path / "config.json"
    written.write_text(json.dumps({**config.dump_config(cfg), "git": "abc"}))
    assert config.dump_config(config.load_config(written)) == config.dump_config(cfg)
    assert config.load_config(written).task == cfg.task


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[algorithm]\ngroup_sise = 4\n", 'algorithm.group_sise: no such key; did you mean "group_size"'),
        ("[algoritm]\nsteps = 4\n", 'algoritm: no such key; did you mean "algorithm"'),
        ("[algorithm]\nsteps = 'many'\n", "algorithm.steps: Input should be a valid integer"),
        ("[algorithm]\nsteps = 0\n", "algorithm: steps = 0 must be at least 1"),
        ("[algorithm]\nobjective = 'ppo'\n", 'algorithm: objective = "ppo" is unknown; there are ppo_clip, '),
        ("[sampler]\ntemperature = 0\n", "temperature = 0.0 must be positive"),
        ("[task]\nname = 'arithmetik'\n", 'did you mean "arithmetic"'),
        ("[task]\nname = 'arithmetic'\ndigit = 2\n", 'task.digit: no such key; did you mean "digits"'),
        ("[task]\nname = 'dataset'\ndata = 'x.jsonl'\nrewards = [{name = 'exact', wait = 1}]\n", "wait"),
        ("task = 'arithmetic'\n", "task: must be a table"),
        ("[task]\nname = 3\n", "task.name: must be a text (got 3)"),
        ("[task]\nname = ['a']\n", "task.name: must be a text (got ['a'])"),
        ("[task]\nname = 'curriculum'\n[task.task]\nname = 3\n", "task.task.name: must be a text"),
        ("[policy\n", "recipe.toml"),
    ],
)
def test_errors_in_a_recipe_are_one_line_with_a_hint(tmp_path, text, complaint):
    with pytest.raises(UserError) as error:
        config.load_config(recipe(tmp_path, text))
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


FLOATS = [
    f"{section}.{field.name}"
    for section, cls in {
        "algorithm": settings.GRPOConfig,
        "optimizer": settings.AdamWConfig,
        "sampler": config.SamplerConfig,
        "evaluate": config.EvaluateConfig,
    }.items()
    for field in dataclasses.fields(cls)
    if "float" in field.type.lower() or "Share" in field.type
]


def test_float_settings_are_collected():
    assert {"algorithm.kl_coef", "algorithm.soft_temperature", "optimizer.betas", "sampler.temperature"} <= set(FLOATS)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_float_settings_must_be_finite(tmp_path, value):
    for key in FLOATS:
        section, name = key.split(".")
        written = f"[{value}, 0.5]" if name in ("betas", "soft_temperature") else value
        with pytest.raises(UserError) as refused:
            config.load_config(recipe(tmp_path, f"[{section}]\n{name} = {written}\n"))
        assert name in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "name = 'dataset'\ndata = 'x.jsonl'\nrewards = [{name = 'exact', weight = nan}]",
            "task.rewards.0.weight: Input should be a finite number",
        ),
        ("name = 'gsm8k'\nformat_reward = inf", "task.format_reward: Input should be a finite number"),
        (
            "name = 'curriculum'\n[task.task]\nname = 'gsm8k'\nformat_reward = nan",
            "task.task.format_reward: Input should be a finite number",
        ),
    ],
)
def test_float_settings_of_tasks_must_be_finite(tmp_path, text, said):
    with pytest.raises(UserError, match=said):
        config.load_config(recipe(tmp_path, f"[task]\n{text}\n"))


@pytest.mark.parametrize(
    "text", ["betas = [2.0, 3.0]", "betas = [0.9, 1.0]", "betas = [-0.1, 0.9]", "eps = 0.0", "lr = -1.0"]
)
def test_optimizer_settings_out_of_range_are_refused(tmp_path, text):
    with pytest.raises(UserError, match=f"optimizer: {text.split(' ')[0]}"):
        config.load_config(recipe(tmp_path, f"[optimizer]\n{text}\n"))


def test_settings_file_with_a_list_is_refused(tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(UserError, match=r"list.json is not a JSON object of settings"):
        config.load_config(tmp_path / "list.json")


def test_float_settings_on_the_command_line_must_be_finite():
    with pytest.raises(UserError, match=r"algorithm.kl_coef: Input should be a finite number \(got 'nan'\)"):
        config.load_config(None, ["--algorithm.kl-coef", "nan"])


def test_missing_recipe_raises_a_one_line_error():
    with pytest.raises(UserError, match=r"nowhere.toml: cannot be read \(No such file"):
        config.load_config(Path("nowhere.toml"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--algorithm.group-sise 4", 'algorithm.group_sise: no such key; did you mean "group_size"?'),
        ("--algoritm.steps 4", 'algoritm: no such key; did you mean "algorithm"?'),
        ("--algorithm.steps", "algorithm.steps takes one value, got none"),
        ("--algorithm.steps 4 recipe.toml", "algorithm.steps takes one value, got 2: 4 recipe.toml"),
        ("--algorithm.steps many", "algorithm.steps: Input should be a valid integer"),
        ("--algorithm.steps 0", "algorithm: steps = 0 must be at least 1"),
        ("--algorithm.objective ppo", 'algorithm: objective = "ppo" is unknown'),
        ("--policy.dtype float8", "policy.dtype: Input should be 'auto', "),
        ("--policy.deterministic maybe", "policy.deterministic: Input should be a valid boolean"),
        ("--policy.template-kwargs thinking", "policy.template_kwargs takes names with their values, got thinking"),
        ("--task.name countdwn", 'task "countdwn" is unknown; did you mean "countdown"?'),
        ("--task.digit 2", 'task.digit: no such key; did you mean "digits"?'),
        ("--task 3", "task: must be a table"),
        ("--task.name curriculum --task.task 3", "task.task: must be a table"),
        ("--optimizer.betas 0.9", "optimizer.betas"),
    ],
)
def test_errors_on_the_command_line_are_one_line(words, said):
    with pytest.raises(UserError) as refused:
        config.load_config(None, words.split())
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_error_names_the_recipe_or_the_command_line_as_its_source(tmp_path):
    path = recipe(tmp_path, "[algorithm]\nsteps = 0\n[policy]\nlora = -1\n")
    with pytest.raises(UserError, match=r"recipe.toml: policy.lora: Input .* greater than or equal to 0 \(got -1\)"):
        config.load_config(path, ["--algorithm.steps", "3"])
    with pytest.raises(UserError, match="the command line: algorithm: steps = -2"):
        config.load_config(path, ["--policy.lora", "0", "--algorithm.steps", "-2"])


def test_command_line_can_fix_errors_of_a_recipe(tmp_path):
    path = recipe(tmp_path, "[algorithm]\nsteps = 0\n[task]\nname = 'dataset'\n")
    cfg = config.load_config(path, ["--algorithm.steps", "3", "--task.data", "x.jsonl"])
    assert (cfg.algorithm.steps, cfg.task.data) == (3, "x.jsonl")


@pytest.mark.parametrize(
    ("words", "section", "key", "value"),
    [
        ("--policy.deterministic", "policy", "deterministic", True),
        ("--policy.no-deterministic", "policy", "deterministic", False),
        ("--policy.deterministic False", "policy", "deterministic", False),
        ("--policy.deterministic=true", "policy", "deterministic", True),
        ("--algorithm.steps 3 --algorithm.steps=4", "algorithm", "steps", 4),
        ("--algorithm.soft-temperature 1 2.5", "algorithm", "soft_temperature", (1.0, 2.5)),
        ("--optimizer.lr 1e-3", "optimizer", "lr", 1e-3),
        ("--runtime.zero-stage 3", "runtime", "zero_stage", 3),
        ("--policy.model 8", "policy", "model", "8"),
        ("--policy.model true", "policy", "model", "true"),
        ("--policy.lora 2 --policy.lora-targets q_proj v_proj", "policy", "lora_targets", ("q_proj", "v_proj")),
        ("--policy.lora-targets", "policy", "lora_targets", ()),
        ("--policy.template-kwargs on False n 3 s 3b", "policy", "template_kwargs", {"on": False, "n": 3, "s": "3b"}),
        ('--policy.template-kwargs s "B" t null', "policy", "template_kwargs", {"s": '"B"', "t": "null"}),
        ("--algorithm.objective own.py:f", "algorithm", "objective", "own.py:f"),
        ("--task.name countdown --task.numbers 3", "task", "numbers", 3),
        ("--task.operators + -", "task", "operators", ("+", "-")),
    ],
)
def test_command_line_words_are_converted_to_the_type_of_the_setting(words, section, key, value):
    found = getattr(getattr(config.load_config(None, words.split()), section), key)
    assert found == value
    assert type(found) is type(value)


def test_task_named_on_the_command_line_ignores_the_task_of_the_recipe(tmp_path):
    path = recipe(tmp_path, "[task]\nname = 'arithmetic'\ndigits = 2\n")
    assert config.load_config(path, ["--task.name", "sorting"]).task_names == ("sorting",)
    assert config.load_config(path, ["--task.name", "arithmetic"]).task.digits == 2
    wrapped = config.load_config(path, ["--task.name", "curriculum", "--task.task.digits", "1"])
    assert wrapped.task_names == ("curriculum", "arithmetic")
    assert wrapped.task.task.digits == 1


def test_rewards_can_be_set_on_the_command_line(tmp_path):
    path = recipe(tmp_path, "[task]\nname = 'dataset'\ndata = 'x.jsonl'\n[[task.rewards]]\nname = 'math'\n")
    terms = config.load_config(path, ["--task.rewards", "exact", "tagged"]).task.rewards
    assert [(term.name, term.weight) for term in terms] == [("exact", 1.0), ("tagged", 1.0)]
    [term] = config.load_config(path, ["--task.rewards.0.weight", "0.5"]).task.rewards
    assert (term.name, term.weight) == ("math", 0.5)
    with pytest.raises(UserError, match=r"the command line: rewards.1: the last one is rewards.0"):
        config.load_config(path, ["--task.rewards.1.name", "exact"])


OWN_TASK = """
from dataclasses import dataclass
from pellucid.types import Completion, Prompt, Reward

@dataclass(frozen=True)
class Shout:
    seed: int = 0
    split: str = "train"
    word: str = "hey"

    def sample(self, step, n):
        return [Prompt(f"{step}/{i}", self.word) for i in range(n)]

    def reward(self, prompt, completion):
        return Reward(float(completion.text.isupper()))
"""


def test_custom_task_is_its_own_section(tmp_path):
    (tmp_path / "shout_task.py").write_text(OWN_TASK)
    path = recipe(tmp_path, f"[task]\nname = '{tmp_path}/shout_task.py:Shout'\nword = 'yo'\n")
    cfg = config.load_config(path, ["--task.seed", "3"])
    assert (cfg.task.word, cfg.task.seed) == ("yo", 3)
    assert config.dump_config(cfg)["task"]["name"].endswith("shout_task.py:Shout")
    with pytest.raises(UserError, match='did you mean "word"'):
        config.load_config(recipe(tmp_path, f"[task]\nname = '{tmp_path}/shout_task.py:Shout'\nwoord = 'yo'\n"))


# ---------------------------------------------------------------- tasks around tasks

NESTED = """
[task]
name = "prefixed"
dropout = 0.3
[task.task]
name = "curriculum"
pool = 40
[task.task.task]
name = "arithmetic"
digits = 2
"""


def test_wrappers_contain_their_tasks(tmp_path):
    loaded = config.load_config(recipe(tmp_path, NESTED), ["--task.task.pool", "50", "--task.task.task.seed", "3"])
    assert loaded.task == Prefixed(Curriculum(Arithmetic(digits=2, seed=3), pool=50), dropout=0.3)
    assert type(loaded.task) is Prefixed
    assert type(loaded.task.task) is Curriculum
    assert pickle.loads(pickle.dumps(loaded.task)) == loaded.task
    assert loaded.task_name == "arithmetic"


def test_wrappers_survive_config_json(tmp_path):
    loaded = config.load_config(recipe(tmp_path, NESTED))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.dump_config(loaded)))
    assert config.load_config(path).task == loaded.task
    assert config.load_config(path).task_names == ("prefixed", "curriculum", "arithmetic")


def test_custom_task_can_be_wrapped(tmp_path):
    own = f'[task]\nname = "curriculum"\n[task.task]\nname = "{Path(__file__).parent}/digits_task.py:Digits"\n'
    loaded = config.load_config(recipe(tmp_path, own))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.dump_config(loaded)))
    assert type(config.load_config(path).task.task).__name__ == "Digits"


def test_wrapper_without_a_task_wraps_the_default_task(tmp_path):
    assert config.load_config(recipe(tmp_path, '[task]\nname = "curriculum"\n')).task.task == Arithmetic()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[task]\nname = 'prefixed'\ndropot = 1", 'task.dropot: no such key; did you mean "dropout"?'),
        ("[task]\nname = 'prefixed'\n[task.task]\nname = 'curriculum'\nwindo = 3", "task.task.windo: no such key"),
        ("[task]\nname = 'curriculum'\n[task.task]\nname = 'prefixed'", "around it"),
        ("[task]\nname = 'prefixed'\n[task.task]\nname = 'nope'", 'task "nope" is unknown'),
        ("[task]\nname = 'prefixed'\ntask = 3", "task.task: must be a table"),
    ],
)
def test_errors_in_nested_tasks_name_their_section(tmp_path, text, said):
    with pytest.raises(UserError) as caught:
        config.load_config(recipe(tmp_path, text))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@examples(max_examples=10)
@given(
    seed=st.integers(0, 2**31),
    lr=st.floats(1e-9, 1.0),
    template=st.text(max_size=10).map(lambda text: text + "{a}{operator}{b}"),
    digits=st.integers(1, 1000),
)
def test_stated_settings_are_loaded_and_dumped_unchanged(tmp_path_factory, seed, lr, template, digits):
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    stated = {"algorithm": {"seed": seed}, "optimizer": {"lr": lr}, "task": {"template": template, "digits": digits}}
    # A JSON string is a TOML string, except for the control character that JSON does not escape.
    lines = (
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in section.items())
        for name, section in stated.items()
    )
    path.write_text("".join(lines).replace("\x7f", "\\u007f"), encoding="utf-8")
    loaded = config.load_config(path)
    assert contains(config.dump_config(loaded), stated)
    dumped = path.with_name("config.json")
    dumped.write_text(json.dumps(config.dump_config(loaded)))
    assert config.dump_config(config.load_config(dumped)) == config.dump_config(loaded)


@examples(max_examples=40)
@given(
    text=st.text(alphabet="[]=\"a.1-\n'{}", max_size=20)
    | st.sampled_from(["[task]\n", "[algorithm]\n"]).flatmap(
        lambda head: st.tuples(
            st.sampled_from(["seed", "name", "steps", "lr", "x"]),
            st.sampled_from(["1", "-1", "nan", '""', "[]", "true", "1e999"]),
        ).map(lambda pair: f"{head}{pair[0]} = {pair[1]}\n")
    )
)
def test_any_recipe_gives_settings_or_a_one_line_error(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    refusal = ""
    try:
        config.load_config(path)
    except UserError as error:
        refusal = str(error)
    assert len(refusal.splitlines()) <= 1


ODD_TASK = """
from dataclasses import dataclass, field

@dataclass
class Left:
    a: int = 1

@dataclass
class Right:
    b: int = 2

@dataclass
class Odd:
    either: Left | Right = field(default_factory=Left)
    seed: int = 0
    split: str = "train"
    hidden: int = field(init=False, default=3)
"""


def test_settings_inside_a_union_of_dataclasses_are_read(tmp_path):
    (tmp_path / "odd_task.py").write_text(ODD_TASK)
    path = recipe(tmp_path, f"[task]\nname = '{tmp_path}/odd_task.py:Odd'\n")
    assert config.load_config(path, ["--task.either.b", "5"]).task.either.b == 5
    with pytest.raises(UserError, match=r"task.either.*c: no such key"):
        config.load_config(path, ["--task.either.c", "5"])


def test_unknown_type_annotation_raises_a_one_line_error(tmp_path):
    text = "from dataclasses import dataclass\n@dataclass\nclass Lost:\n    x: 'Nope' = 1\n"
    (tmp_path / "lost_task.py").write_text(text)
    with pytest.raises(UserError, match="the types of the fields of Lost cannot be read: name 'Nope'"):
        config.load_config(recipe(tmp_path, f"[task]\nname = '{tmp_path}/lost_task.py:Lost'\n"))


@pytest.mark.parametrize(
    ("text", "correction"),
    [
        ("", "none"),
        ("[sampler]\nname = 'vllm'\n", "token"),
        ("[sampler]\nname = 'vllm'\n[algorithm]\nsteps = 3\n", "token"),
        ("[sampler]\nname = 'vllm'\n[algorithm]\ncorrection = 'none'\n", "none"),
        ("[sampler]\nname = 'vllm'\n[algorithm]\ncorrection = 'sequence'\n", "sequence"),
    ],
)
def test_vllm_sampling_is_corrected_unless_the_recipe_states_otherwise(tmp_path, text, correction):
    loaded = config.load_config(recipe(tmp_path, text))
    assert loaded.algorithm.correction == correction
    assert config.build_config(config.dump_config(loaded), "a run").algorithm.correction == correction


def test_vllm_on_the_command_line_is_corrected(tmp_path):
    path = recipe(tmp_path, "[algorithm]\nsteps = 3\n")
    assert config.load_config(path, ["--sampler.name", "vllm"]).algorithm.correction == "token"
    stated = ["--sampler.name", "vllm", "--algorithm.correction", "none"]
    assert config.load_config(path, stated).algorithm.correction == "none"

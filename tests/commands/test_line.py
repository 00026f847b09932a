"""Test the command line: the help of every command, and one-line errors that name the fix."""

from __future__ import annotations

import dataclasses
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import pellucid
from pellucid import __version__, cli, config
from pellucid.config import SECTIONS
from pellucid.tasks.dataset import Dataset
from pellucid.types import UserError
from pellucid.utils.files import WORKING_DIRECTORY_GONE

SETTING = re.compile(r"--([a-z]+\.[a-z0-9-]+)")
OWN_TASK = """
from dataclasses import dataclass

@dataclass
class Shout:
    word: str
    seed: int = 0
    split: str = "train"
    loud: bool = True

    def sample(self, step, n): ...
    def reward(self, prompt, completion): ...
"""

ODD = """
from dataclasses import dataclass, field
from pellucid.rewards.terms import RewardTerm

@dataclass
class Odd:
    rewards: tuple[RewardTerm, ...]
    seed: int = 0
    split: str = "train"
    hidden: int = field(init=False, default=3)
"""


@pytest.fixture
def said(capsys, monkeypatch):
    """Return a function that runs a command line and returns its status, stdout, and stderr."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            cli.main(list(map(str, words)))
        told = capsys.readouterr()
        return ended.value.code or 0, told.out, told.err

    return run


def settings_in(text):
    named = {name.replace("-", "_") for name in SETTING.findall(text)}
    return {name for name in named if not name.split(".")[1].startswith("no_")}


@pytest.mark.parametrize("flag", ["--help", "-h", "--help-all"])
def test_help_of_every_command_lists_its_options(flag, said):
    for command, function in cli.COMMANDS.items():
        status, out, err = said(command, flag)
        assert (status, err) == (0, "")
        assert out.startswith(f"usage: pellucid {command} ")
        described = " ".join(re.sub("[│ ]+", " ", out).split())
        assert all(f"{option} " in out or f"{option}," in out for option in cli.collect_option_types(command))
        assert function.__doc__ in described


def test_train_help_shows_the_common_settings_first(said):
    _, out, _ = said("train", "--help")
    everyday = {f"{section}.{key}" for section, keys in cli.COMMON_SETTINGS.items() for key in keys}
    assert len(everyday) == 20
    assert settings_in(out) - everyday == {name for name in settings_in(out) if name.startswith("task.")} != set()
    assert everyday <= settings_in(out)
    places = [out.index(word) for word in ("RECIPE", "--run", "--resume", "--policy.model")]
    assert places == sorted(places)


def test_help_all_has_every_setting(said):
    _, out, _ = said("train", "--help-all")
    known = {f"{section}.{key}" for section, cls in SECTIONS.items() for key in config.get_field_types(cls)}
    assert {name for name in settings_in(out) if not name.startswith("task.")} == known


def test_help_shows_values_of_the_recipe_and_the_command_line(said, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[algorithm]\nsteps = 17\n[task]\nname = 'curriculum'\n[task.task]\nname = 'countdown'\n")
    _, out, _ = said("train", recipe, "--algorithm.group-size", "5", "--help")
    rows = " ".join(re.sub("[│ ]+", " ", out).split())
    assert "Generate-update cycles. (default: 17)" in rows
    assert "G: completions of each prompt. (default: 5)" in rows
    assert {"task.pool", "task.task.numbers"} <= set(re.findall(r"--(task(?:\.[a-z]+)+)", out))


def test_help_shows_settings_of_an_incomplete_task(said):
    _, out, _ = said("train", "--task.name", "dataset", "--help")
    assert {f"task.{field.name}" for field in dataclasses.fields(Dataset)} <= settings_in(out)


def test_help_shows_settings_of_a_user_defined_task(said, tmp_path):
    (tmp_path / "shouting.py").write_text(OWN_TASK)
    status, out, _ = said("train", "--task.name", f"{tmp_path}/shouting.py:Shout", "--help")
    assert status == 0
    assert {"task.name", "task.word", "task.loud"} <= settings_in(out)
    assert "required" in out[out.index("--task.word") :].splitlines()[1]


CODE = """
raise SystemExit("help has imported it")
"""
NAMING_CODE = {
    "a task": '[task]\nname = "CODE:Riddles"',
    "a task in a wrapper": '[task]\nname = "curriculum"\n[task.task]\nname = "CODE:Riddles"',
    "a reward": '[task]\nname = "dataset"\ndata = "q.jsonl"\n[[task.rewards]]\nname = "CODE:brevity"',
    "a reward of a module": '[task]\nname = "dataset"\n[[task.rewards]]\nname = "CODE_MODULE:brevity"',
    "an environment": '[task]\nname = "environment"\nenvironment = "CODE:Game"',
    "environments": '[task]\nname = "environment"\ndata = "q.jsonl"\n[task.environment]\na = "CODE:Game"',
    "tools": '[task]\nname = "environment"\ndata = "q.jsonl"\ntools = ["CODE:search"]',
    "an agent": '[task]\nname = "agent"\ndata = "q.jsonl"\nrun = "CODE:solve"',
    "a command": '[task]\nname = "agent"\ndata = "q.jsonl"\nrun = "python CODE"',
    "an advantage": 'algorithm.advantage = "CODE:mine"',
    "an objective": 'algorithm.objective = "CODE:mine"',
    "a reward and a mistake": '[algorithm]\nsteps = -1\n[task]\nname = "dataset"\n[[task.rewards]]\nname = "CODE:f"',
}


@pytest.mark.parametrize("where", NAMING_CODE)
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_help_imports_no_code_that_a_recipe_names(where, flag, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "never_imported.py").write_text(CODE)
    (tmp_path / "mine.toml").write_text(
        NAMING_CODE[where].replace("CODE_MODULE", "never_imported").replace("CODE", "never_imported.py")
    )
    status, out, err = said("train", "mine.toml", "--algorithm.group-size", "5", flag)
    assert (status, err) == (0, "")
    assert "mine.toml names code, which help does not run: " in out
    assert "never_imported" in out.partition("\n")[0]
    assert "--task.name TASK" in out
    assert where in ("a reward and a mistake",) or "(default: 5)" in " ".join(re.sub("[│ ]+", " ", out).split())


@pytest.mark.parametrize("words", [["train", "mine.toml", "--dry-run"], ["doctor", "--plan", "mine.toml"]])
def test_notice_names_user_code_before_it_runs(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = f"{words[0]}_speaks.py"
    (tmp_path / file).write_text("print('it runs')\n")
    (tmp_path / "mine.toml").write_text(f'[task]\nname = "{file}:Nothing"\n')
    status, out, err = said(*words)
    assert out == f"! mine.toml runs code with your permissions: {file}:Nothing\nit runs\n"
    assert (status, f"{file} has no" in err) == (2, True)


JUDGED = """
[task]
name = "dataset"
data = "q.jsonl"
[[task.rewards]]
name = "judge"
[task.rewards.judge]
base_url = "https://judge.example/v1"
model = "m"
rubric = "R"
key = "{}"
"""


@pytest.mark.parametrize(
    ("variable", "taken"),
    [("OPENAI_API_KEY", True), ("JUDGE_KEY", True), ("HF_TOKEN", True), ("TOKEN", True)]
    + [(name, False) for name in ("HOME", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "SSH_PRIVATE_KEY", "MONKEY")],
)
def test_recipe_alone_sends_only_variables_named_like_keys(variable, taken, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, "value-of-it")
    (tmp_path / "q.jsonl").write_text("".join(f'{{"question": "{i}?", "answer": "1"}}\n' for i in range(9)))
    (tmp_path / "mine.toml").write_text(JUDGED.format(variable))
    rest = ["--dry-run", "--policy.model", "no/model"]  # the unknown model ends the dry run
    monkeypatch.setattr(socket, "create_connection", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sent = "! judge: prompts and completions go to https://judge.example/v1, with the key in the environment variable"
    note = f"{sent} {variable}\n"
    status, out, err = said("train", "mine.toml", *rest)
    assert (status, note in out, "looks like a key, *_KEY or *_TOKEN" in err) == (2, taken, not taken)
    assert "value-of-it" not in out + err
    if not taken:
        assert err.endswith("say so on the command line: --task.rewards.0.judge.key NAME\n")
        status, out, err = said("train", "mine.toml", *rest, "--task.rewards.0.judge.key", variable)
        assert (note in out, "looks like a key" in err) == (True, False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("task = 'gsm8k'", "task: must be a table"),
        ("[task]\nname = ['a']", "task.name: must be a text"),
        ("[algorithm]\nsteps = 0", ""),
    ],
)
def test_help_with_a_broken_recipe_prints_help_or_one_line(text, told, said, tmp_path):
    recipe = tmp_path / "wrong.toml"
    recipe.write_text(text)
    status, out, err = said("train", recipe, "--help")
    assert (status, bool(out), told in err) == ((2, False, True) if told else (0, True, True))
    assert err.count("\n") <= 1


def test_help_omits_task_fields_that_are_not_settings(said, tmp_path):
    odd = ODD.replace("class Odd", "class OddOne")
    (tmp_path / "odd_one.py").write_text(odd)
    status, out, _ = said("train", "--task.name", f"{tmp_path}/odd_one.py:OddOne", "--help")
    assert status == 0
    assert "--task.rewards" in out
    assert "--task.hidden" not in out


@pytest.mark.parametrize("words", [["train"], ["list", "tasks"], ["init", "mine"], ["doctor"]])
def test_deleted_working_directory_exits_with_one_line(words, said, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    status, out, err = said(*words)
    assert (status, out) == (2, "")
    assert err == f"pellucid: {WORKING_DIRECTORY_GONE}\n"
    with pytest.raises(UserError, match="the working directory is gone"):
        pellucid.train(model="any")


def test_working_directory_deleted_during_a_command_exits_with_one_line(said, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")

    def removed(name):
        (tmp_path / "gone").rmdir()
        return Path("anything").resolve(strict=True)

    monkeypatch.setattr(config, "find_recipe", removed)
    status, _, err = said("train", "arithmetic")
    assert (status, err) == (2, f"pellucid: {WORKING_DIRECTORY_GONE}\n")


def test_missing_command_prints_help_and_exits_with_2(said):
    status, out, _ = said()
    assert status == 2
    assert all(re.search(rf"^\W+{name}\b", out, re.MULTILINE) for name in cli.COMMANDS)


def test_version_option_works_with_and_without_a_command(said):
    for words in (["--version"], ["train", "--version"]):
        assert said(*words) == (0, f"pellucid {__version__}\n", "")


MISTAKES = {
    "trian": 'no such command: trian; did you mean "train"?',
    "xyz": "no such command: xyz; there are init, train, eval, ",
    "train --ruin here": 'train has no option --ruin; did you mean "--run"?',
    "train --steps 3": "train has no option --steps; did you mean --algorithm.steps?",
    "train --every 3": "did you mean --evaluate.every or --checkpoint.every?",
    "train --algorithm.stpes 3": 'the command line: algorithm.stpes: no such key; did you mean "steps"?',
    "train one.toml two.toml": "Unrecognized options: two.toml; see pellucid train --help",
    "train --run": "Missing value for argument '--run'. Expected 1 values; see pellucid train --help",
    "train --resume a b.toml": "--resume RUN continues with the settings of that run",
    "train --resume nowhere": "--resume nowhere: there is no run in that folder",
    "eval": "MODEL_OR_RUN",
    "eval x --show many": "Error parsing --show: invalid literal for int() with base 10: 'many'",
    "eval x --show -1": "--show -1 must not be negative",
    "eval x --output answers.txt": "--output answers.txt must end in .jsonl",
    "serve": "serve takes [start] MODEL_OR_RUN | stop | status | restart, got nothing",
    "serve start": "got start",
    "serve a b": "got a b",
    "serve x --port http": "Error parsing --port",
    "serve x --dtype float8": "invalid choice 'float8' for argument '--dtype'",
    "serve x --algorithm.steps 3": "serve takes no settings, got --algorithm.steps 3",
    "train --recipe x": 'train has no option --recipe; did you mean "--resume"?',
    "train --dry-run=true": "--dry-run takes no value, got true",
    "train --algorithm.steps=3 nowhere": "nowhere: there is no such file, and no recipe of this name",
    "train --task.name=3": 'task "3" is unknown',
    "compare": "compare needs a RUN, several, or the folder of a study",
    "compare nowhere": "nowhere: there is no such folder",
    "study nowhere.toml": "nowhere.toml: there is no such file",
    "study x.toml --jobs two": "Error parsing --jobs",
    "prefixes": "RECIPE",
    "doctor --algorithm.steps 3": "doctor takes settings with --plan RECIPE",
    "doctor --paln x": 'doctor has no option --paln; did you mean "--plan"?',
    "completion nosh": "invalid choice 'nosh'",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_exit_with_one_line(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = said(*words.split())
    assert (status, out) == (2, "")
    assert re.fullmatch(r"pellucid: [^\n]+\n", err)
    assert MISTAKES[words] in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_contains_commands_and_settings(shell, said):
    status, out, _ = said("completion", shell)
    assert status == 0
    assert all(name in out for name in (*cli.COMMANDS, "algorithm.group-size", "policy.template-kwargs", "task.digits"))


@pytest.mark.slow
def test_bash_completes_a_partial_option(tmp_path):
    script = tmp_path / "completion"
    words = [sys.executable, "-m", "pellucid", "completion", "bash"]
    script.write_text(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    begun = "COMP_WORDS=(pellucid train --algorithm.gr); COMP_CWORD=2"
    asked = f'source {script}; {begun}; _tyro_pellucid; echo "$COMPREPLY"'
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout == "--algorithm.group-size\n"


@pytest.mark.slow
def test_a_closed_pipe_is_silent():
    piped = f"{sys.executable} -m pellucid train --help-all | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")

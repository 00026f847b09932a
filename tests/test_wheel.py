"""Test that the wheel and the sdist are complete and work outside the repository."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from pellucid import config
from serving import chat, post

BESIDE = Path(__file__).parent
SMALL = [
    *("--algorithm.steps", "1", "--algorithm.prompts-per-step", "2", "--algorithm.group-size", "2"),
    *("--evaluate.n", "2", "--evaluate.k", "0", "--policy.dtype", "float32"),
]
COMMANDS = """
import sys

import pellucid
from pellucid import cli, config

def run(*arguments):
    try:
        cli.main(arguments)
    except SystemExit as ended:
        return ended.code

assert pellucid.__file__.startswith(sys.argv[1]), pellucid.__file__
"""
WITHOUT = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *of: None if name.partition(".")[0] in EXTRAS else find(name, *of))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the folder that `make dist` fills."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=BESIDE.parent, check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    [file] = built.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def sdist(built):
    [file] = built.glob("*.tar.gz")
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--target", folder, wheel)
    return folder


def pip(action, *arguments):
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", action, "--no-deps"]
    subprocess.run([*command, *map(str, arguments)], check=True)


def outside(installed, tmp_path, script, *arguments):
    """Run a script against the installed wheel, and return the finished process."""
    command = [sys.executable, "-P", "-c", script, str(installed), *map(str, arguments)]
    finished = subprocess.run(command, cwd=tmp_path, env=only(installed), capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished


def only(installed):
    return {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_wheel_contains_exactly_what_is_read_at_run_time(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {path for path in Path("src").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    own = {path.relative_to("src").as_posix() for path in sources}
    assert {"pellucid/py.typed", "pellucid/serve/page.html", "pellucid/reporting/report.html"} <= own
    shipped = {f"pellucid/_recipes/{name}.toml" for name in config.describe_recipes()}
    shapes = {f"pellucid/_{path.as_posix()}" for path in Path("recipes/shapes").rglob("*.json")}
    about = {name for name in names if name.startswith("pellucid-")}
    assert names == own | shipped | shapes | about
    assert {name.partition(".dist-info/")[2] for name in about} >= {"licenses/LICENSE", "entry_points.txt"}


@pytest.mark.slow
def test_sdist_contains_exactly_what_the_wheel_is_built_from(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    beside = {name for name in names if not name.startswith(("src/pellucid/", "recipes/"))}
    build = {".gitignore", "PKG-INFO", "pyproject.toml"}
    assert beside == build | {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"}
    assert not [name for name in names if name.startswith(("recipes/launch", "recipes/data")) or "__pycache__" in name]
    assert sdist.stat().st_size < 3e6


@pytest.mark.slow
def test_wheel_built_from_the_sdist_equals_the_wheel_built_from_the_clone(wheel, sdist, tmp_path):
    pip("wheel", "--no-build-isolation", "--wheel-dir", tmp_path, sdist)
    assert contents(tmp_path / wheel.name) == contents(wheel)


def contents(archive):
    with zipfile.ZipFile(archive) as files:
        return {name: files.read(name) for name in files.namelist()}


@pytest.mark.slow
def test_command_of_the_wheel_finds_its_recipes(installed, tmp_path):
    command = [sys.executable, installed / "bin" / "pellucid", "list", "recipes"]
    printed = subprocess.run(command, cwd=tmp_path, env=only(installed), capture_output=True, text=True, check=True)
    assert all(name in printed.stdout for name in config.describe_recipes())


@pytest.mark.slow
def test_wheel_trains_evaluates_and_draws_its_report(installed, tmp_path, model_dir):
    """A recipe and the base of a study are found by name."""
    script = f"""{COMMANDS}
from pellucid.study import plan
settings = ["--policy.model", sys.argv[2], *sys.argv[3:]]
assert run("train", str(config.find_recipe("arithmetic")), "--run", "run", *settings) == 0
assert run("eval", "run", "--show", "1") == 0
print(list(plan.load_variant_configs(plan.read_study(config.find_recipe("techniques"))))[0])
print(config.find_recipe("dapo"))
"""
    printed = outside(installed, tmp_path, script, model_dir, *SMALL).stdout
    assert printed.splitlines()[-2:] == ["grpo", f"{installed}/pellucid/_recipes/variants/dapo.toml"]
    assert "report   run/report.html" in printed
    [step] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert step["step"] == 1
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_wheel_answers_over_http(installed, tmp_path, model_dir):
    command = [sys.executable, "-P", "-m", "pellucid", "serve", str(model_dir), "--port", "0", "--max-tokens", "4"]
    with subprocess.Popen(command, cwd=tmp_path, env=only(installed), stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout
            url = re.search(r"http://\S+(?=,)", service.stdout.readline())[0]
            status, answer = post(f"{url}/v1/chat/completions", chat(temperature=0))
            assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
        finally:
            service.send_signal(signal.SIGTERM)


@pytest.mark.slow
def test_missing_extras_exit_with_one_line(installed, tmp_path, model_dir):
    settings = ["--run", "run", "--policy.model", str(model_dir)]
    task = '[task]\nname = "dataset"\nanswer = "a"\ntemplate = "{q}"\n'
    (tmp_path / "hub.toml").write_text(f'{task}data = "openai/gsm8k"\n')
    (tmp_path / "some.toml").write_text("")
    train = ["train", "some.toml", *settings]
    needing = {
        "peft": ("lora", [*train, "--policy.lora", "2"]),
        "datasets": ("data", ["train", "hub.toml", *settings]),
        "tensorboard": ("tensorboard", [*train, "--log.tensorboard"]),
        "wandb": ("wandb", [*train, "--log.wandb", "offline"]),
        "fastapi": ("serve", ["serve", str(model_dir)]),
        "openai": (
            "teacher",
            ["prefixes", "some.toml", "--teacher", "any", "--base-url", "http://127.0.0.1:1", "--output", "p.json"],
        ),
        "modelscope": ("modelscope", ["eval", "modelscope:some/one"]),
        "deepspeed": ("deepspeed", [*train, "--runtime.engine", "deepspeed"]),
    }
    script = f"""{COMMANDS}
EXTRAS = {list(needing)}
{WITHOUT}
for arguments in {[arguments for _, arguments in needing.values()]}:
    assert run(*arguments) == 2, arguments
"""
    told = outside(installed, tmp_path, script).stderr.splitlines()
    assert len(told) == len(needing), told
    for line, (library, (extra, _)) in zip(told, needing.items(), strict=True):
        assert line.startswith("pellucid: ")
        assert line.endswith(f'needs {library}: pip install "pellucid[{extra}]"'), line

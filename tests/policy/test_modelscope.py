"""Tests of ModelScope models: the folders where its package keeps them, and downloads; no network."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import records
from pellucid.config import PolicyConfig
from pellucid.policy import load
from pellucid.policy.access import ModelAccess
from pellucid.training import memory
from pellucid.types import UserError
from runs import answered

NAME = "modelscope:Some.One/Tiny-0.5B"
HIDDEN = "modelscope.hub.snapshot_download"
PLACES = {
    "1.38 and later": "models/Some.One--Tiny-0.5B/snapshots/master",
    "another default branch": "models/Some.One--Tiny-0.5B/snapshots/main",
    "the only revision": "models/Some.One--Tiny-0.5B/snapshots/v1.0.2",
    "1.22 to 1.37, MODELSCOPE_CACHE": "models/Some.One/Tiny-0___5B",
    "1.22 to 1.37": "hub/models/Some.One/Tiny-0___5B",
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the path of an empty cache; the package cannot be imported, as if it were not installed."""
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, HIDDEN, None)
    return tmp_path / "cache"


def kept(model_dir, folder):
    return Path(shutil.copytree(model_dir, folder))


class DownloadError(Exception):
    """Stands in for the package's own error class, which extends Exception directly."""


@pytest.fixture
def package(cache, model_dir, monkeypatch):
    """Replace the two modules that are used; return the list of requested downloads."""
    asked = []

    def snapshot_download(repository, revision=None, ignore_patterns=None):
        asked.append((repository, *([revision] if revision else []), ignore_patterns))
        if repository == "No/Body":
            raise DownloadError("HTTP 404\nnobody has it")
        folder = cache / "models/Some.One--Tiny-0.5B/snapshots" / (revision or "master")
        ignored = shutil.ignore_patterns(*(ignore_patterns or ()))
        return str(shutil.copytree(model_dir, folder, ignore=ignored, dirs_exist_ok=True))

    download, errors = ModuleType(HIDDEN), ModuleType("modelscope.hub.errors")
    download.snapshot_download, errors.DownloadError, errors.logger = snapshot_download, DownloadError, None
    for module in (download, errors):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return asked


# ---------------------------------------------------------------- locations


@pytest.mark.parametrize("place", PLACES)
def test_model_is_found_in_the_folders_of_every_package_version(cache, model_dir, place):
    folder = kept(model_dir, cache / PLACES[place])
    assert load.locate_model(NAME) == str(folder)
    assert load.load_tokenizer(NAME)("1+1=").input_ids == load.load_tokenizer(str(model_dir))("1+1=").input_ids


@pytest.mark.parametrize("place", PLACES)
def test_model_is_found_where_the_package_finds_it(tmp_path, model_dir, place, monkeypatch):
    """The package uses local files only, and gets `cache_dir` since it reads its variable only at import."""
    package = pytest.importorskip(HIDDEN)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path))
    folder = kept(model_dir, tmp_path / PLACES[place])
    found = package.snapshot_download("Some.One/Tiny-0.5B", cache_dir=tmp_path, local_files_only=True)
    assert Path(found) == folder == Path(load.locate_model(NAME))


def test_default_cache_is_in_the_home_directory(model_dir, monkeypatch, tmp_path):
    monkeypatch.delenv("MODELSCOPE_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    folder = kept(model_dir, tmp_path / ".cache" / "modelscope" / PLACES["1.22 to 1.37"])
    assert load.locate_model(NAME) == str(folder)


def test_ambiguous_revisions_are_not_guessed(cache, model_dir):
    for revision in ("v1.0.1", "v1.0.2"):
        kept(model_dir, cache / f"models/Some.One--Tiny-0.5B/snapshots/{revision}")
    with pytest.raises(UserError, match="is not in"):
        load.locate_model(NAME)


@pytest.mark.parametrize("missing", ["a shard", "all weights", "the configuration"])
def test_incomplete_downloads_are_skipped(cache, model_dir, tmp_path, missing):
    folder = cache / PLACES["1.22 to 1.37"]
    if missing == "a shard":
        AutoModelForCausalLM.from_pretrained(model_dir).save_pretrained(folder, max_shard_size="20KB")
        shards = sorted(folder.glob("*.safetensors"))
        assert len(shards) > 1
        shards[-1].unlink()
    else:
        name = {"all weights": "model.safetensors", "the configuration": "config.json"}[missing]
        kept(model_dir, folder)
        (folder / name).unlink()
    with pytest.raises(UserError, match="is not in"):
        load.locate_model(NAME)
    whole = kept(model_dir, cache / PLACES["1.38 and later"])
    assert load.locate_model(NAME) == str(whole), "the next place is looked into"


# ---------------------------------------------------------------- downloads


def test_missing_model_is_downloaded_once(package, cache, model_dir):
    for _ in range(2):
        model, _ = load.load_pretrained(NAME, torch.float32)
    assert package == [("Some.One/Tiny-0.5B", None)]
    expected = AutoModelForCausalLM.from_pretrained(model_dir)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_missing_revision_is_downloaded_once_by_its_name(package, cache, model_dir):
    kept(model_dir, cache / PLACES["1.38 and later"])
    kept(model_dir, cache / PLACES["1.22 to 1.37"])
    v2 = ModelAccess("v2")
    assert load.locate_model(NAME, revision="v2") == str(cache / "models/Some.One--Tiny-0.5B/snapshots/v2")
    load.load_pretrained(NAME, torch.float32, access=v2)
    load.load_tokenizer(NAME, v2)
    assert package == [("Some.One/Tiny-0.5B", "v2", None)]
    assert load.resolve_commit(NAME, v2) == "", "its folder has no commit's name"


def test_plan_and_tokenizer_download_no_weights(package, cache):
    assert memory.describe_model(PolicyConfig(NAME)).parameter_count > 0
    load.load_tokenizer(NAME)
    assert package == [("Some.One/Tiny-0.5B", list(load.WEIGHT_PATTERNS))], "once for both"
    assert not list(cache.rglob("*.safetensors"))
    load.load_pretrained(NAME, torch.float32)
    assert package[1:] == [("Some.One/Tiny-0.5B", None)]


def test_download_errors_are_reported_in_one_line(package):
    with pytest.raises(UserError) as told:
        load.locate_model("modelscope:No/Body")
    assert "cannot be downloaded (HTTP 404): fix the name or the connection" in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "name", ["modelscope:", "modelscope:Tiny", "modelscope:a/b/c", "modelscope:../b", "modelscope:a/"]
)
def test_malformed_names_are_refused(package, name):
    with pytest.raises(UserError, match=r"is called modelscope:OWNER/NAME$"):
        load.locate_model(name)
    assert not package


# ---------------------------------------------------------------- commands


def commands(recipe, tmp_path):
    return {
        "train": ["train", recipe, "--policy.model", NAME, "--run", tmp_path / "run"],
        "eval": ["eval", NAME, "--task", recipe],
        "serve": ["serve", NAME, "--port", 0],
        "prefixes": ["prefixes", recipe, "--student", NAME, "--output", tmp_path / "p.json", "--n", 2],
        "prefixes, by tokens": [
            *("prefixes", recipe, "--student", NAME, "--output", tmp_path / "q.json", "--n", 2),
            *("--truncate-tokens", 3),
        ],
        "plan": ["doctor", "--plan", recipe, "--policy.model", NAME],
    }


@pytest.mark.parametrize("command", commands("", Path()))
def test_every_command_names_the_extra_if_the_package_is_missing(cache, recipe, tmp_path, capsys, command):
    assert answered(*commands(recipe, tmp_path)[command]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pellucid: ")]
    assert line == (
        f"pellucid: policy.model = '{NAME}' is not in {cache}: downloading it needs modelscope:"
        ' pip install "pellucid[modelscope]"'
    )


@pytest.mark.slow
def test_a_run_trains_resumes_and_is_evaluated_from_the_cache_alone(cache, recipe, model_dir, tmp_path, capsys):
    kept(model_dir, cache / PLACES["1.38 and later"])
    run_dir = tmp_path / "run"
    settings = ["--policy.model", NAME, "--evaluate.every", 0, "--checkpoint.every", 1]
    assert answered("train", recipe, "--run", run_dir, *settings, "--algorithm.steps", 1) == 0
    assert answered("train", "--resume", run_dir, "--algorithm.steps", 2) == 0
    assert len(records(run_dir / "metrics.jsonl")) == 2
    assert json.loads((run_dir / "config.json").read_text())["policy"]["model"] == NAME, "as given"
    assert answered("eval", NAME, "--task", recipe, "--show", 1) == 0
    assert answered("doctor", "--plan", recipe, "--policy.model", NAME) == 0
    assert f"{NAME}: 0.0 M parameters" in capsys.readouterr().out

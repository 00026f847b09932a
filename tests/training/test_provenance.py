"""Tests of the provenance in config.json: package versions, git revision and hardware."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess

import pytest

from pellucid import __version__
from pellucid.training import run

GIT = ["git", "-c", "user.name=n", "-c", "user.email=n@example.com", "-c", "commit.gpgsign=false"]


def git(*arguments):
    return subprocess.run([*GIT, *arguments], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    git("init", "--quiet")
    (folder / "recipe.toml").write_text("one")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    return folder


def test_the_revision_is_that_of_the_working_folder(repository, monkeypatch):
    first = git("rev-parse", "HEAD")
    assert run.get_git_revision() == first
    git("commit", "--quiet", "--allow-empty", "--message", "two")
    assert run.get_git_revision() == git("rev-parse", "HEAD") != first
    (repository / "deeper").mkdir()
    monkeypatch.chdir(repository / "deeper")
    assert run.get_git_revision() == git("rev-parse", "HEAD")


def test_uncommitted_changes_mark_the_revision_as_dirty(repository):
    (repository / "recipe.toml").write_text("two")
    assert run.get_git_revision() == git("rev-parse", "HEAD") + "-dirty"


def test_revision_is_empty_outside_a_repository_or_without_git(repository, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "which", lambda name: None)
        assert run.get_git_revision() == ""
    assert run.get_git_revision() != ""
    monkeypatch.chdir(tmp_path)
    assert run.get_git_revision() == ""


def test_versions_match_the_installed_packages():
    found = run.collect_versions()
    assert (found["pellucid"], found["python"]) == (__version__, platform.python_version())
    for name in ("torch", "transformers", "accelerate"):
        assert found[name] == importlib.metadata.version(name)


def test_provenance_is_json_with_versions_git_and_hardware(repository):
    facts = run.collect_provenance()
    assert json.loads(json.dumps(facts)) == facts
    assert facts.keys() >= {"versions", "git", "hardware"}
    assert facts["git"] == git("rev-parse", "HEAD")
    assert facts["hardware"]["threads"] >= 1
    assert facts["hardware"]["memory_gb"] > 0

"""Tests that Pellucid falls back to cached files when the Hugging Face Hub is unreachable."""

from __future__ import annotations

import socket

import datasets
import pytest
import torch
from huggingface_hub import constants

from conftest import character_tokenizer, tiny_llama
from pellucid.policy import load
from pellucid.rewards.reward_model import RewardModel
from pellucid.rewards.settings import RewardModelSettings
from pellucid.tasks.data_files import read_hub_dataset
from pellucid.types import UserError
from pellucid.utils import plugins

COMMIT = "a" * 40


@pytest.fixture
def listening():
    """Yield a listening socket that notices every connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        yield server


@pytest.fixture
def look(listening, monkeypatch):
    """Return `check_hub_online` without a cached answer, for a Hub at the listening socket."""
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    plugins.is_reachable.cache_clear()
    return plugins.check_hub_online


def was_asked(server):
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def test_reachable_hub_is_contacted_once(look, listening, capsys):
    assert look()
    assert look()
    assert was_asked(listening)
    assert not was_asked(listening)
    assert not constants.HF_HUB_OFFLINE
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["http_proxy", "ALL_PROXY"])
def test_hub_behind_a_proxy_is_assumed_to_be_reachable(look, listening, monkeypatch, name):
    monkeypatch.setenv(name, "http://proxy.example:3128")
    assert look()
    assert not was_asked(listening)
    assert not constants.HF_HUB_OFFLINE


def test_offline_mode_makes_no_connection(look, listening, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not look()
    assert not was_asked(listening)


def test_cached_models_load_when_the_hub_is_unreachable(look, listening, capsys, monkeypatch, tmp_path):
    listening.close()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--some--tiny"
    tiny_llama().save_pretrained(folder / "snapshots" / COMMIT)
    character_tokenizer().save_pretrained(folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    model, _ = load.load_pretrained("some/tiny", torch.float32)
    assert model.config.hidden_size == 32
    with pytest.raises(UserError, match=r"policy\.model = 'some/other' cannot be loaded \(We couldn't connect"):
        load.load_pretrained("some/other", torch.float32)
    with pytest.raises(UserError, match=r"some/other.* cannot be loaded \(We couldn't connect"):
        RewardModel("some/other", RewardModelSettings())
    assert constants.HF_HUB_OFFLINE
    assert capsys.readouterr().out == (
        f"! {constants.ENDPOINT} cannot be reached (Connection refused): only cached files can be loaded\n"
    )


def test_hub_datasets_are_refused_when_the_hub_is_unreachable(look, listening, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    listening.close()
    with pytest.raises(UserError, match=r'"some/data" is not a local file .* the Hugging Face Hub cannot be reached'):
        read_hub_dataset("some/data", "", "train")
    assert datasets.config.HF_HUB_OFFLINE

"""The Hub, asked for nothing where it is not there."""

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
    """A socket that would hear whoever asks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        yield server


@pytest.fixture
def look(listening, monkeypatch):
    """As if for the first time in this process."""
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


def test_one_that_is_there_is_asked_once(look, listening, capsys):
    assert look()
    assert look()
    assert was_asked(listening)
    assert not was_asked(listening)
    assert not constants.HF_HUB_OFFLINE
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["http_proxy", "ALL_PROXY"])
def test_behind_a_proxy_nobody_can_know(look, listening, monkeypatch, name):
    monkeypatch.setenv(name, "http://proxy.example:3128")
    assert look()
    assert not was_asked(listening)
    assert not constants.HF_HUB_OFFLINE


def test_who_does_without_it_connects_with_nobody(look, listening, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not look()
    assert not was_asked(listening)


def test_where_it_is_not_there_what_is_cached_is_loaded(look, listening, capsys, monkeypatch, tmp_path):
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


def test_nor_is_it_asked_for_data(look, listening, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    listening.close()
    with pytest.raises(UserError, match=r'"some/data" is not a local file .* the Hugging Face Hub cannot be reached'):
        read_hub_dataset("some/data", "", "train")
    assert datasets.config.HF_HUB_OFFLINE

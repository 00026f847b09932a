"""Tests that unsupported settings of the vLLM sampler are refused before sampling, in one line that names the fix."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pellucid import config
from pellucid.rollout import vllm
from pellucid.rollout.native import NativeSampler
from pellucid.rollout.vllm import VLLMSampler
from pellucid.training import preflight
from pellucid.training.build import check_settings, pick_sampler
from pellucid.types import UserError

DECODED: Any = SimpleNamespace(decoder=object(), adapter=None, dtype=torch.float32)


def settings_of(*words):
    return config.load_config(None, ["--sampler.name", "vllm", *words])


def test_settings_reach_the_sampler():
    sampler = pick_sampler(settings_of("--sampler.rows", "7", "--sampler.cache-gb", "1.5"), DECODED, None)
    assert isinstance(sampler, VLLMSampler)
    assert (sampler.rows, sampler.cache_gb, sampler.deterministic, sampler.adapter) == (7, 1.5, False, "merged")
    for words in ([], ["--sampler.urls", "http://localhost:1"]):
        settings = settings_of("--sampler.adapter", "request", "--policy.lora", "4", *words)
        assert pick_sampler(settings, DECODED, None).adapter == "request"
    assert pick_sampler(settings_of("--policy.deterministic"), DECODED, None).deterministic
    assert isinstance(pick_sampler(config.load_config(None), DECODED, None), NativeSampler)


def test_adapter_requests_are_refused_without_lora_or_vllm():
    with pytest.raises(UserError, match=r"give policy\.lora"):
        check_settings(settings_of("--sampler.adapter", "request"))
    with pytest.raises(UserError, match='adapter = "request" is for name = "vllm", not "native"'):
        config.load_config(None, ["--sampler.adapter", "request", "--policy.lora", "4"])


def test_sampling_ahead_is_refused_without_vllm_or_a_correction():
    for words, says in (
        (["--sampler.name", "native", "--sampler.ahead", "1"], 'weights of its own: set sampler.name = "vllm"'),
        (["--sampler.ahead", "1", "--algorithm.correction", "none"], 'set algorithm.correction, such as "token"'),
    ):
        with pytest.raises(UserError, match=says):
            check_settings(settings_of(*words))
    assert settings_of("--sampler.ahead", "1").algorithm.correction == "token"
    assert isinstance(pick_sampler(settings_of("--sampler.ahead", "1"), DECODED, None), VLLMSampler)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--runtime.engine", "fsdp2"], 'needs runtime.engine = "ddp", not "fsdp2": name servers in sampler.urls'),
        (["--runtime.engine", "deepspeed"], "name servers in sampler.urls"),
        (["--policy.load-in-4bit", "--policy.lora", "8"], "does not support a 4-bit base"),
        (["--sampler.top-k", "5"], "top_k, top_p and min_p"),
        (["--sampler.min-p", "0.1"], "top_k, top_p and min_p"),
        (["--evaluate.top-p", "0.9"], "top_k, top_p and min_p"),
    ],
)
def test_unsupported_settings_are_refused_for_vllm(words, says):
    with pytest.raises(UserError, match=says) as raised:
        check_settings(settings_of(*words))
    assert "\n" not in str(raised.value)
    check_settings(replace(settings_of(*words), sampler=config.load_config(None).sampler))


def test_several_processes_may_use_their_own_engines_or_servers(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_settings(settings_of())
    for engine in ("ddp", "fsdp2", "deepspeed"):
        check_settings(settings_of("--runtime.engine", engine, "--sampler.urls", "http://localhost:1"))


def test_missing_vllm_is_reported_before_anything_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="make vllm"):
        preflight.run_preflight_checks(settings_of(), tmp_path)


def test_cache_size_of_zero_is_refused():
    with pytest.raises(UserError, match=r"sampler.cache_gb: Input should be greater than 0"):
        settings_of("--sampler.cache-gb", "0")

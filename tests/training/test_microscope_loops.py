"""Tests of the microscope's record with sampling ahead, on a device, and for answers without tokens."""

from __future__ import annotations

from collections import namedtuple
from copy import deepcopy
from dataclasses import replace

import pandas as pd
import pytest
import torch

from conftest import CountDigits, OneProcessRuntime, character_tokenizer, make_policy, tiny_llama
from pellucid.algorithm import async_grpo, grpo
from pellucid.algorithm.grpo import TrainingState
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.config import Config, LogConfig
from pellucid.distributed.runtime import Runtime
from pellucid.policy.policy import Policy
from pellucid.reporting import token_files
from pellucid.rollout.native import NativeSampler
from pellucid.training.token_recorder import record_steps
from pellucid.types import Completion, Group, Prompt, Reward, Sampling
from simulated_device import DEVICE

Parts = namedtuple("Parts", "policy runtime state")
SAMPLING = Sampling(max_tokens=6)


class Apart(NativeSampler):
    """A sampler with its own copy of the weights, as an engine has."""

    def sync(self, policy, version):
        super().sync(deepcopy(policy), version)


def frame_of(run_dir, step):
    return pd.DataFrame(token_files.read_tokens(run_dir, step).to_pylist())


def logprobs_of(model, frame):
    """Return the log-prob of each row that is no prompt, by a separate forward pass of the model for each answer."""
    prompts = {group: rows.token.tolist() for group, rows in frame[frame.kind == "prompt"].groupby("group")}
    found = {}
    for (group, *_), rows in frame[frame.kind != "prompt"].groupby(["group", "completion", "branch"]):
        ids = torch.tensor([[*prompts[group], *rows.token]])
        with torch.no_grad():
            every = model(input_ids=ids).logits[0, len(prompts[group]) - 1 : -1].float().log_softmax(-1)
        found |= dict(
            zip(rows.index, every.gather(-1, torch.tensor(rows.token.tolist())[:, None])[:, 0].tolist(), strict=True)
        )
    return found


def test_async_steps_are_scored_by_the_weights_before_and_after_each(tmp_path):
    """The sampler is a step behind: values before the update come from the scorer, with the sampler's beside them."""
    policy, cfg = make_policy(), GRPOConfig(steps=3, group_size=4, correction="token")
    runtime, state = OneProcessRuntime(policy, lr=0.002), TrainingState()
    runtime.max_micro_batch_rows, runtime.rank, runtime.is_main = 0, 0, True
    runtime.engine = namedtuple("Engine", "is_lockstep")(False)
    steps = async_grpo.train_async(CountDigits(), Apart(), policy, runtime, cfg, state=state, sampling=SAMPLING)
    config = Config(algorithm=cfg, log=LogConfig(tokens=2, token_steps=1))
    weights = [deepcopy(policy.model)]
    for _ in record_steps(steps, config, tmp_path, Parts(policy, runtime, state)):
        weights.append(deepcopy(policy.model))
    assert token_files.list_recorded_steps(tmp_path) == [1, 2, 3]
    for step in (1, 2, 3):
        frame = frame_of(tmp_path, step)
        sampled = frame[frame.kind == "sampled"]
        drawn = max(0, step - 2)
        by = {
            name: logprobs_of(weights[i], frame) for name, i in (("start", step - 1), ("after", step), ("drawn", drawn))
        }
        assert sampled.logprob_after.tolist() == pytest.approx([by["after"][i] for i in sampled.index], abs=1e-4)
        assert sampled.sampler_logprob.tolist() == pytest.approx([by["drawn"][i] for i in sampled.index], abs=1e-4)
        assert set(sampled.version) == {drawn}
        scored = sampled[sampled.logprob_start.notna()]
        assert len(scored)
        assert scored.logprob_start.tolist() == pytest.approx([by["start"][i] for i in scored.index], abs=1e-4)
        assert max(abs(by["after"][i] - by["start"][i]) for i in scored.index) > 0.005


def recorded_on(device, folder):
    """Return the record of one step of a policy on a device."""
    torch.manual_seed(0)
    policy = Policy(tiny_llama().to(device), character_tokenizer(), torch.float32)
    cfg = GRPOConfig(steps=1, prompts_per_step=2, group_size=4, micro_batch=4)
    runtime, state = Runtime(policy, AdamWConfig(lr=1e-3, warmup=0), total_updates=1), TrainingState()
    steps = grpo.train(CountDigits(), NativeSampler(), policy, runtime, cfg, state=state, sampling=SAMPLING)
    config = Config(algorithm=cfg, log=LogConfig(tokens=2, token_steps=1))
    list(record_steps(steps, config, folder, Parts(policy, runtime, state)))
    return frame_of(folder, 1)


def test_records_on_a_device_match_records_on_the_cpu(gpu, tmp_path):
    here, there = (recorded_on(device, tmp_path / device[:3]) for device in ("cpu", DEVICE))
    assert len(there) > 40
    assert there.token.tolist() == here.token.tolist()
    assert there.rule.tolist() == here.rule.tolist()
    for name in ("logprob_before", "logprob_after", "entropy_after", "push", "gradient", "ratio"):
        assert there[name].tolist() == pytest.approx(here[name].tolist(), rel=1e-3, abs=1e-4, nan_ok=True), name
    moved = (here.logprob_after - here.logprob_before).abs().max()
    assert moved > 0.01


def test_metadata_lists_answers_without_tokens(tmp_path):
    """A conversation that ends before the policy speaks has such an answer."""
    spoken, silent = (Completion(ids, (-1.0,) * len(ids), "", True) for ids in ((4, 5), ()))
    group = Group(Prompt("p", "?"), (1, 2), (silent, spoken, silent), tuple(map(Reward, (0.0, 1.0, 0.0))))
    other = replace(group, completions=(spoken,) * 3)
    said = token_files.make_group_metadata({1: group, 4: other})
    assert said["silent"] == {"1": [0, 2]}
    assert said["turns"] == {}

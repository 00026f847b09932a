"""Train three steps on engines, sampled by servers.

Usage: python served_engines.py FOLDER URL,URL CASE;CASE NAME=ENGINE/N ...

Without a URL, vLLM samples in each process. Rank 0 saves the parameters and the tokens of the last step.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from engines import policy_of
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import CountDigits
from pellucid.algorithm import async_grpo, grpo
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed import deepspeed
from pellucid.distributed.runtime import Runtime
from pellucid.distributed.settings import RuntimeConfig
from pellucid.models.linear import gather_full_tensor
from pellucid.rollout import vllm_client
from pellucid.rollout.sglang import SERVER_CLIENTS
from pellucid.rollout.vllm import VLLMSampler
from pellucid.rollout.vllm_client import ServerPool
from pellucid.types import Sampling

CASES = {
    "llama": {},
    "by transformers": {"engine": "transformers"},
    "adapter, merged": {"lora": 2},
    "adapter, alone": {"lora": 2, "adapter": "request"},
    "ahead": {"ahead": True},
    "adapter, ahead": {"lora": 2, "adapter": "request", "ahead": True},
    "small parts": {"part_bytes": 4000},
}
SGLANG = {"sglang": {"client": "sglang"}, "sglang, ahead": {"client": "sglang", "ahead": True}}
WIDE = {
    f"wide, {name}": {"architecture": "llama, heads of 64", **CASES[name]}
    for name in ("llama", "adapter, alone", "ahead")
}
"""Heads as wide as vLLM requires."""


def trained(runtime_config, urls, adapter="merged", ahead=False, part_bytes=2**28, client="vllm", **facts):
    """Return every trained parameter after three steps, unsharded, and the first tokens of the last completions."""
    vllm_client.MAX_PART_BYTES = part_bytes
    policy = policy_of(**facts)
    cfg = GRPOConfig(
        steps=3, prompts_per_step=4, group_size=4, micro_batch=3, minibatches=1, advantage="centered", max_length=12,
        correction="token",
    )  # fmt: skip
    pool = ServerPool(urls, 20.0, ahead, SERVER_CLIENTS[client]) if urls else None
    sampler = VLLMSampler(16, 0.1, adapter=adapter, engine=pool)
    runtime = Runtime(policy, AdamWConfig(lr=1e-3, eps=1e-4), 3, runtime_config)
    sampler.ranks = runtime
    if pool:
        pool.ranks = runtime
    train = async_grpo.train_async if ahead else grpo.train
    steps = list(train(CountDigits(), sampler, policy, runtime, cfg, sampling=Sampling(4, max_tokens=12)))
    sampler.close()
    tokens = [c.token_ids[0] * 1000 + len(c.token_ids) for g in steps[-1].groups for c in g.completions]
    whole = {name: gather_full_tensor(p.detach()).clone() for name, p in runtime.engine.masters().items()}
    return whole | {"tokens": torch.tensor(tokens), "grad_norm": torch.tensor([s.metrics["grad_norm"] for s in steps])}


def main(folder, urls, cases, *engines):
    deepspeed.PERSISTENCE_THRESHOLD_ELEMENTS = 0  # models this small would not be sharded otherwise
    for named in engines:
        label, _, engine = named.partition("=")
        engine, _, number = engine.partition("/")
        config = RuntimeConfig(engine, **{"zero_stage" if engine == "deepspeed" else "shards": int(number or 0)})
        for name in cases.split(";"):
            tensors = trained(config, list(filter(None, urls.split(","))), **(CASES | SGLANG | WIDE)[name])
            if torch.distributed.get_rank() == 0:
                save_file(tensors, Path(folder) / f"{label}-{name}.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])

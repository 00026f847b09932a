"""Compare loss and gradients with TRL's GRPOTrainer on the same model and the same rollouts."""

from __future__ import annotations

import copy
from dataclasses import replace

import datasets
import pytest
import torch
from trl import GRPOConfig as TRLConfig
from trl import GRPOTrainer

from conftest import CountDigits, OneProcessRuntime, character_tokenizer, make_policy
from pellucid.algorithm import grpo, policy_loss
from pellucid.algorithm.batch import collate
from pellucid.algorithm.settings import GRPOConfig
from pellucid.policy.policy import Policy
from pellucid.rollout.native import NativeSampler
from pellucid.types import Sampling

TOKENS = 12
CLIP = {"epsilon": 0.05, "epsilon_high": 0.08}
OURS = {"clip_low": 0.05, "clip_high": 0.08}
CASES = {
    "grpo": ({"loss_type": "grpo", **CLIP}, {"aggregate": "sequence", **OURS}),
    "dr_grpo": ({"loss_type": "dr_grpo", **CLIP}, {"aggregate": "constant", "constant_length": TOKENS, **OURS}),
    "dapo": ({"loss_type": "dapo", **CLIP}, {"aggregate": "token", **OURS}),
    "bnpo": ({"loss_type": "bnpo", **CLIP}, {"aggregate": "token", **OURS}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-3, "epsilon_high": 4e-3},
        {"objective": "gspo", "aggregate": "sequence", "clip_low": 3e-3, "clip_high": 4e-3},
    ),
    # For CISPO, TRL's epsilon_high is the bound itself; ours is its distance from 1.
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.05}, {"objective": "cispo", "clip_high": 0.05}),
    "sapo": ({"loss_type": "sapo"}, {"objective": "sapo", "aggregate": "sequence"}),
    "dual clip": ({"loss_type": "dapo", "delta": 1.1, **CLIP}, {"dual_clip": 1.1, **OURS}),
    "weighted KL": ({"loss_type": "dapo", "use_bias_correction_kl": True, **CLIP}, {"kl": "k3_weighted", **OURS}),
}


def moved(policy: Policy, seed: int) -> Policy:
    """Return a copy of the policy with slightly different weights."""
    torch.manual_seed(seed)
    model = copy.deepcopy(policy.model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return Policy(model, character_tokenizer())


@pytest.fixture(scope="module")
def rollouts():
    """Return a policy and an off-policy batch: two groups of four completions of different lengths."""
    torch.manual_seed(0)
    now = make_policy()
    old, reference = moved(now, 1), moved(now, 2)
    sampled = NativeSampler(policy=old).generate(CountDigits().sample(0, 2), Sampling(4, max_tokens=TOKENS, seed="0/0"))
    groups = [
        replace(g, completions=tuple(map(cut, g.completions, lengths)))
        for g, lengths in zip(sampled, ([12, 7, 1, 9], [3, 12, 5, 8]), strict=True)
    ]
    batch = collate(groups)
    with torch.no_grad():
        batch = replace(
            batch,
            old_logprobs=old.score(batch).logprobs,
            ref_logprobs=reference.score(batch).logprobs,
            advantages=batch.broadcast_to_tokens(
                torch.tensor([1.2, -0.7, 0.1, -0.6, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
            ),
        )
    return now, batch


def cut(completion, length):
    return replace(completion, token_ids=completion.token_ids[:length], logprobs=completion.logprobs[:length])


def trl_inputs(batch, extra):
    """Return the batch as TRL's inputs, with prompts padded on the left by `extra` more columns than needed."""
    longest = extra + max(len(ids) for ids in batch.prompt_ids)
    prompts = [batch.prompt_ids[p] for p in batch.prompt_indices.tolist()]
    lengths = torch.tensor([len(ids) for ids in prompts])
    return {
        "prompt_ids": torch.tensor([(0,) * (longest - len(ids)) + ids for ids in prompts]),
        "prompt_mask": (torch.arange(longest) >= longest - lengths[:, None]).long(),
        "completion_ids": batch.response_ids,
        "completion_mask": batch.response_mask.long(),
        "advantages": batch.advantages[:, 0].float(),
        "old_per_token_logps": batch.old_logprobs,
        "ref_per_token_logps": batch.ref_logprobs,
        "num_items_in_batch": batch.response_mask.sum(),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "kl_coef", "left_padding"),
    [*((c, k, 0) for c in CASES for k in (0.0, 0.3) if k or "KL" not in c), ("grpo", 0.3, 1), ("grpo", 0.3, 7)],
)
def test_loss_and_gradients_match_trl(case, kl_coef, left_padding, rollouts, tmp_path):
    theirs, ours = CASES[case]
    policy, batch = rollouts
    model = copy.deepcopy(policy.model)
    model.save_pretrained(tmp_path)  # TRL loads its reference model from this path
    model.config._name_or_path = str(tmp_path)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=TRLConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=8,
            gradient_accumulation_steps=1,
            num_generations=4,
            max_completion_length=TOKENS,
            beta=kl_coef,
            temperature=1.0,
            gradient_checkpointing=False,
            **{"use_bias_correction_kl": False, **theirs},
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "1+1?"}] * 8),
        processing_class=character_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    loss = trainer._compute_loss(model, trl_inputs(batch, left_padding))
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}

    cfg = GRPOConfig(**{"kl": "k3", **ours}, kl_in="loss", kl_coef=kl_coef, group_size=4, prompts_per_step=2)
    runtime = OneProcessRuntime(policy)
    metrics = grpo.update_policy(policy, batch, runtime, cfg)
    assert metrics["loss"] == pytest.approx(float(loss), abs=1e-5)
    assert metrics["clip/low"] + metrics["clip/high"] > 0 or case in ("sapo",), "the clip is not tried"
    for name, gradient in runtime.gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5)
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-2

    known = {"old_logprobs": batch.old_logprobs, "ref_logprobs": batch.ref_logprobs}
    logprobs, advantages = policy.score(batch).logprobs, batch.advantages[:, 0]
    alone = policy_loss(logprobs, advantages, batch.response_mask, **known, **{"kl": "k3", **ours}, kl_coef=kl_coef)
    assert float(alone.detach()) == pytest.approx(float(loss.detach()), abs=1e-5)
    trained = policy.trainable()
    for name, gradient in zip(trained, torch.autograd.grad(alone, list(trained.values())), strict=True):
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5)

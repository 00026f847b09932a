"""Tests of heads that transform their logits, mean hidden states, and tokens without a gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM, PhiConfig, PhiForCausalLM

from architectures import SMALL, batch_of, plain_logprobs, sequences
from conftest import make_policy
from pellucid.algorithm.grpo import Scores, compute_loss
from pellucid.algorithm.settings import GRPOConfig
from pellucid.policy.policy import Policy
from pellucid.policy.scorer import check_lm_head, get_lm_head

HEADS = {
    "multiplied, Cohere": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
    "divided, Granite": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)),
    "with a bias, Phi": lambda: PhiForCausalLM(PhiConfig(**SMALL)),
}


@pytest.mark.parametrize("name", HEADS)
def test_scores_include_the_logit_transforms_of_the_head(name):
    model, batch = HEADS[name]().eval(), batch_of()
    bias = model.get_output_embeddings().bias
    if bias is not None:
        torch.nn.init.normal_(bias)
    check_lm_head(model)
    hidden = model.base_model(input_ids=torch.tensor([batch.prompt_ids[0]])).last_hidden_state
    expected = model(torch.tensor([batch.prompt_ids[0]])).logits
    torch.testing.assert_close(
        get_lm_head(model, torch.float32).compute_logits(hidden[0]), expected[0], rtol=0, atol=1e-5
    )

    class Speechless:
        eos_token_id, chat_template = 0, None

    scores = Policy(model, Speechless(), engine="transformers").score(batch)
    torch.testing.assert_close(scores.logprobs[batch.response_mask], plain_logprobs(model, batch), rtol=0, atol=1e-5)


@torch.no_grad()
def test_mean_hidden_state_averages_the_tokens_of_each_response():
    policy, batch = make_policy(), batch_of()
    assert len(set(batch.response_mask.sum(-1).tolist())) > 3
    for layer in (0, 1, -1):
        measured = policy.embed(batch, layer)
        for row, (ids, start) in enumerate(sequences(batch)):
            states = policy.model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0]
            torch.testing.assert_close(measured[row], states[start:].mean(0), rtol=0, atol=1e-5)


def test_exact_kl_reference_keeps_no_autograd_graph():
    policy = make_policy()
    policy.set_kl_reference(make_policy(seed=3))
    hidden, _ = policy.scorer.compute_ref_hidden_states(batch_of())
    assert not hidden.requires_grad


LOSSES = {
    "plain": {},
    "an entropy": {"entropy_coef": 0.1},
    "a KL in the loss": {"kl_coef": 0.1, "kl_in": "loss"},
    "an exact KL": {"kl_coef": 0.1, "kl_in": "loss", "kl": "exact"},
}


@pytest.mark.parametrize("settings", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("is_masked", [False, True])
def test_find_trained_tokens_covers_all_tokens_with_a_gradient(is_masked, settings):
    """With the plain loss, the two sets of tokens are equal."""
    cfg, batch = GRPOConfig(**settings), batch_of()
    policy = make_policy(entropy_grad=bool(cfg.entropy_coef))
    policy.scorer.reference = make_policy().scorer if cfg.kl == "exact" else None
    shape, mask = batch.response_mask.shape, batch.action_mask

    def pick(share):
        return mask & (torch.rand(shape) < share)

    batch = replace(
        batch,
        token_weights=torch.rand(shape) * pick(0.8),
        advantages=torch.randn(shape) * pick(0.8),
        ref_logprobs=-torch.rand(shape) if cfg.kl_coef and cfg.kl != "exact" else None,
        loss_mask=pick(0.8) if is_masked else None,
        likelihood_weights=torch.rand(shape) * pick(0.1) if is_masked else None,
    )
    leaves = [(-torch.rand(shape)).requires_grad_() for _ in range(3 if cfg.kl == "exact" else 2)]
    loss, _ = compute_loss(Scores(*leaves), batch, cfg)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    has_gradient = torch.stack([g != 0 for g in gradients if g is not None]).any(0)[batch.scored_mask]
    found = policy.scorer.find_trained_tokens(batch)
    assert found is not None
    assert not (has_gradient & ~found).any()
    assert 0 < found.sum() < len(found)
    if not settings:
        assert torch.equal(found, has_gradient)
    assert policy.scorer.find_trained_tokens(batch_of()) is None, "of a batch that has not been weighted"

"""Heads that do something to logits, hidden states in the mean, and what a reference costs."""

from __future__ import annotations

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM, PhiConfig, PhiForCausalLM

from architectures import SMALL, batch_of, plain_logprobs, sequences
from conftest import make_policy
from pellucid.policy.policy import Policy
from pellucid.policy.scorer import check_lm_head, get_lm_head

HEADS = {
    "multiplied, Cohere": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
    "divided, Granite": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)),
    "with a bias, Phi": lambda: PhiForCausalLM(PhiConfig(**SMALL)),
}


@pytest.mark.parametrize("name", HEADS)
def test_what_a_head_does_to_its_logits_is_scored(name):
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
def test_the_mean_hidden_state_is_over_the_tokens_of_each_response():
    policy, batch = make_policy(), batch_of()
    assert len(set(batch.response_mask.sum(-1).tolist())) > 3
    for layer in (0, 1, -1):
        measured = policy.embed(batch, layer)
        for row, (ids, start) in enumerate(sequences(batch)):
            states = policy.model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0]
            torch.testing.assert_close(measured[row], states[start:].mean(0), rtol=0, atol=1e-5)


def test_the_reference_of_the_exact_kl_keeps_no_graph():
    policy = make_policy()
    policy.set_kl_reference(make_policy(seed=3))
    hidden, _ = policy.scorer.compute_ref_hidden_states(batch_of())
    assert not hidden.requires_grad

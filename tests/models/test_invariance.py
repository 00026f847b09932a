"""Tests of the check for batch invariance: it finds each place where a row's logits depend on other rows."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from conftest import character_tokenizer, make_policy, products_know_no_neighbors, tiny_llama
from pellucid import cli
from pellucid.models import decode, hf_decode
from pellucid.policy.policy import Policy
from pellucid.serve import api
from pellucid.types import UserError

ROWS = 16


def bf16_policy():
    return Policy(tiny_llama(), character_tokenizer(), torch.bfloat16)


def by_rows(x, weight, bias=None, _recomputation=None):
    """Return x @ weight.T + bias as sums of elementwise products in fp64, so that rows do not affect each other."""
    products = x[:, None].double() * weight.double()
    return (products.sum(-1) + (0 if bias is None else bias)).to(x.dtype)


@pytest.fixture
def products_of_rows(monkeypatch):
    """Compute every product of weights row by row in fp64. No kernel of this machine can mix these rows."""
    monkeypatch.setattr(decode, "project", by_rows)
    monkeypatch.setattr("pellucid.models.decoder.project", by_rows)
    monkeypatch.setattr(decode, "prepack_weights", lambda weights, rows: weights)


def test_decoding_is_batch_invariant_if_products_are():
    assert hf_decode.is_batch_invariant(bf16_policy(), ROWS) or not products_know_no_neighbors()


DISTURBED = {
    "the number of rows": lambda y: y + 0.01 * len(y),
    "many rows alone": lambda y: y + 0.1 * (len(y) > ROWS - 2),
    "the last of several": lambda y: torch.cat([y[:-1], y[-1:] + 0.1 * (len(y) > 1)]),
}


@pytest.mark.parametrize("name", DISTURBED)
def test_products_that_depend_on_other_rows_are_detected(products_of_rows, monkeypatch, name):
    monkeypatch.setattr(decode, "project", lambda x, weight: DISTURBED[name](by_rows(x, weight)))
    assert not hf_decode.is_batch_invariant(bf16_policy(), ROWS)


def test_attention_that_depends_on_rows_per_prompt_is_detected(products_of_rows, monkeypatch):
    by_prompt = decode.DecodeBatch._group_by_prompt
    monkeypatch.setattr(
        decode.DecodeBatch,
        "_group_by_prompt",
        lambda self, x: by_prompt(self, x) * (1 + self.rows_by_prompt.shape[1]),
    )
    assert not hf_decode.is_batch_invariant(bf16_policy(), ROWS)


def test_prefill_that_depends_on_longer_prompts_is_detected(products_of_rows, monkeypatch):
    attend = decode.attend
    monkeypatch.setattr(decode, "attend", lambda q, k, v, bias: attend(q, k, v, bias) * k.shape[2])
    assert not hf_decode.is_batch_invariant(bf16_policy(), ROWS)


def test_dependence_on_other_rows_is_an_error_of_one_line(monkeypatch):
    monkeypatch.setattr(hf_decode, "is_batch_invariant", lambda policy, rows: False)
    with pytest.raises(UserError, match=r"^--batch-invariant: [^\n]* in float32 [^\n]*--dtype bfloat16[^\n]*$"):
        hf_decode.check_batch_invariance(make_policy("llama"), ROWS)


def test_service_with_batch_invariant_starts_only_if_it_holds(model_dir, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "DEFAULT")
    monkeypatch.setattr(
        hf_decode, "is_batch_invariant", lambda policy, rows: policy.dtype == torch.bfloat16 and rows == 5
    )
    options = ["serve", str(model_dir), "--rows", "5", "--batch-invariant", "--dtype"]
    assert api.load_served_model(cli.parse_command_line([*options, "bfloat16"])).policy.dtype == torch.bfloat16
    with pytest.raises(UserError, match="float32 depend on the rows beside it"):
        api.load_served_model(cli.parse_command_line([*options, "float32"]))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    api.load_served_model(cli.parse_command_line([*options, "bfloat16"]))
    assert os.environ.pop("ONEDNN_MAX_CPU_ISA") == "AVX512_CORE_BF16"


@pytest.mark.slow
def test_onednn_uses_no_amx_unless_another_limit_is_set(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    hf_decode.disable_amx()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    script = (
        "from pellucid.models import hf_decode; hf_decode.disable_amx(); import torch;"
        " x = torch.randn(64, 64).bfloat16(); torch.nn.functional.linear(x, x)"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "ONEDNN_VERBOSE": "1"}, stdout=subprocess.PIPE, check=True
    ).stdout.decode()
    assert "amx" not in told.lower()

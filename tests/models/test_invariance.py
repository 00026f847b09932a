"""Whether a row's logits depend on the rows beside it: seen where they do, in each place where they might."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from conftest import character_tokenizer, make_policy, products_know_no_neighbours, tiny_llama
from pellucid import cli
from pellucid.models import decode, hf_decode
from pellucid.policy.policy import Policy
from pellucid.serve import api
from pellucid.types import UserError

ROWS = 16


def bf16_policy():
    return Policy(tiny_llama(), character_tokenizer(), torch.bfloat16)


def by_rows(x, weight, bias=None, _recomputation=None):
    """Products by multiplications and a sum over one dimension, of which each row has its own."""
    products = x[:, None].double() * weight.double()
    return (products.sum(-1) + (0 if bias is None else bias)).to(x.dtype)


@pytest.fixture
def products_of_rows(monkeypatch):
    """Every product of weights in fp64, which this machine's kernels cannot make depend on its neighbours."""
    monkeypatch.setattr(decode, "project", by_rows)
    monkeypatch.setattr("pellucid.models.decoder.project", by_rows)
    monkeypatch.setattr(decode, "prepack_weights", lambda weights, rows: weights)


def test_where_products_know_no_neighbours_all_of_it_is_invariant():
    assert hf_decode.is_batch_invariant(bf16_policy(), ROWS) or not products_know_no_neighbours()


DISTURBED = {
    "the number of rows": lambda y: y + 0.01 * len(y),
    "many rows alone": lambda y: y + 0.1 * (len(y) > ROWS - 2),
    "the last of several": lambda y: torch.cat([y[:-1], y[-1:] + 0.1 * (len(y) > 1)]),
}


@pytest.mark.parametrize("name", DISTURBED)
def test_a_product_that_knows_its_neighbours_is_seen(products_of_rows, monkeypatch, name):
    monkeypatch.setattr(decode, "project", lambda x, weight: DISTURBED[name](by_rows(x, weight)))
    assert not hf_decode.is_batch_invariant(bf16_policy(), ROWS)


def test_attention_that_knows_how_many_share_a_prompt_is_seen(products_of_rows, monkeypatch):
    by_prompt = decode.DecodeBatch._group_by_prompt
    monkeypatch.setattr(
        decode.DecodeBatch,
        "_group_by_prompt",
        lambda self, x: by_prompt(self, x) * (1 + self.rows_by_prompt.shape[1]),
    )
    assert not hf_decode.is_batch_invariant(bf16_policy(), ROWS)


def test_a_prompt_that_is_read_otherwise_among_longer_ones_is_seen(products_of_rows, monkeypatch):
    attend = decode.attend
    monkeypatch.setattr(decode, "attend", lambda q, k, v, bias: attend(q, k, v, bias) * k.shape[2])
    assert not hf_decode.is_batch_invariant(bf16_policy(), ROWS)


def test_where_it_is_not_so_one_line_says_what_to_do(monkeypatch):
    monkeypatch.setattr(hf_decode, "is_batch_invariant", lambda policy, rows: False)
    with pytest.raises(UserError, match=r"^--batch-invariant: [^\n]* in float32 [^\n]*--dtype bfloat16[^\n]*$"):
        hf_decode.check_batch_invariance(make_policy("llama"), ROWS)


def test_a_service_of_which_this_was_asked_starts_only_where_it_is_so(model_dir, monkeypatch):
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
def test_onednn_does_without_amx_unless_someone_has_set_a_limit(monkeypatch):
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

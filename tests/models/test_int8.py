"""Products in int8 against whole numbers of torch: the same bits, by every way, for any rows and threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from test_fused import MODELS, SMALL, model_of, prompts
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import CountDigits, character_tokenizer, make_policy
from pellucid import cli
from pellucid.config import SamplerConfig
from pellucid.environments.pool import InProcessEnvironments
from pellucid.environments.spec import EnvironmentSpec
from pellucid.models import decoder as layers
from pellucid.models import fused_check, native
from pellucid.models.decode import DecodeBatch
from pellucid.models.decoder import Decoder
from pellucid.models.fused_decode import pack_matrix
from pellucid.models.native import call_kernel
from pellucid.policy.policy import Policy
from pellucid.rollout.hf import HuggingFaceSampler
from pellucid.rollout.native import NativeSampler
from pellucid.rollout.select import enable_int8, find_policy_int8_fault
from pellucid.types import Sampling, UserError
from worlds import TEMPLATE, asked

pytestmark = pytest.mark.skipif(
    fused_check.load_fused_kernel()[0] is None or not torch.cpu._is_vnni_supported(),
    reason="needs fused decoding and AVX-512 VNNI",
)
TILES = [False, True] if native.has_amx() else [False]
SHAPES = [(96, 64), (160, 112), (576, 320), (1536, 96)]
"""Inputs and outputs: multiples of a tile and not, of a block and not."""


def matrices(n, width, outputs, seed=0):
    """Rows and weights whose 7th input is large, as it is in trained models."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(rows, width, generator=generator) for rows in (n, outputs))
    x[:, 7] *= 50
    return x.bfloat16(), weight.bfloat16()


def spread(x):
    """[n, K] in fp32, K filled up to a multiple of 64: Hadamard's matrix, pair by pair."""
    y = torch.cat([x.float(), x.new_zeros(len(x), -x.shape[1] % 64).float()], 1).view(len(x), -1, 64)
    place = torch.arange(64)
    for bit in (1, 2, 4, 8, 16, 32):
        other = y[..., place ^ bit]
        y = torch.where((place & bit).bool(), other - y, y + other)
    return y.flatten(1)


def whole_numbers(x):
    """What is multiplied, and by what it was divided, [n, 1]."""
    y = spread(x)
    largest = y.abs().amax(1, keepdim=True)
    scale = torch.where(largest == 0, torch.ones(()), largest / 127)
    return (y / scale).round().long(), scale


def product_of(x, weight):
    (rows, of_rows), (outputs, of_outputs) = whole_numbers(x), whole_numbers(weight)
    return (rows @ outputs.T).float() * of_rows * (of_outputs.T / 64)


def product_by(x, weight, tiles, threads=2):
    library, y = fused_check.load_fused_kernel()[0].library, torch.full((len(x), len(weight)), 7.0)
    matrix = pack_matrix(library, weight, int8=True)
    call_kernel(library.product_of_bytes, x, *x.shape, matrix, len(weight), y, tiles, threads)
    return y


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_has_the_bits_of_whole_numbers(tiles, shape):
    for n in (1, 2, 11, 12, 13, 16, 17, 25, 33, 64):
        x, weight = matrices(n, *shape, seed=n)
        wanted = product_of(x, weight)
        for threads in (1, 2, 3):
            assert torch.equal(product_by(x, weight, tiles, threads), wanted)
        assert torch.equal(fused_check.multiply_int8(x, weight), wanted)


@pytest.mark.parametrize("tiles", TILES)
def test_sums_as_large_as_they_can_be_are_exact(tiles):
    """Rows that are spread to one number of 64, which is 127."""
    signs = torch.ones(16, 1)
    signs[1] = -1
    x = (signs * torch.ones(64 * 256)).bfloat16()
    assert torch.equal(product_by(x, -x, tiles), -64 * 256 * signs @ signs.T)


@pytest.mark.parametrize("tiles", TILES)
def test_zeros_are_zeros_and_what_is_no_number_stays_none_in_its_row_alone(tiles):
    x, weight = matrices(5, 96, 64)
    x[1], x[2, 3], x[3, 5] = 0, torch.nan, torch.inf
    weight[9] = 0
    y = product_by(x, weight, tiles)
    assert not y[1].any()
    assert not y[[0, 4], 9].any()
    assert not y[2:4].isfinite().any()
    assert torch.equal(y[[0, 4]], product_of(x[[0, 4]], weight))


def test_to_spread_is_hadamards_matrix():
    signs = torch.tensor([[(-1) ** (i & j).bit_count() for j in range(64)] for i in range(64)])
    x = matrices(3, 128, 1)[0].double()
    assert torch.allclose(spread(x).double(), (x.view(3, 2, 64) @ signs.double()).flatten(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tiles", TILES)
def test_a_product_is_off_by_the_rounding_to_127_steps_alone(tiles):
    """At most half a step of each number, in what both have in common; in the mean 1.2% of a product's size."""
    x, weight = matrices(32, 576, 320)
    y, exact = product_by(x, weight, tiles).double(), x.double() @ weight.double().T
    (rows, of_rows), (outputs, of_outputs) = whole_numbers(x), whole_numbers(weight)
    a, b = (rows * of_rows).abs().double(), (outputs * of_outputs).abs().double()
    half_a, half_b = of_rows.double() / 2, of_outputs.double() / 2
    most = (half_a * b.sum(1) + a.sum(1, keepdim=True) * half_b.T + 576 * half_a * half_b.T) / 64
    assert ((y - exact).abs() <= most * 1.001).all()
    assert 0.004 < (y - exact).norm() / exact.norm() < 0.02


# ---------------------------------------------------------------- a step


def batch_of(model, rows=40, int8=True):
    decoder = Decoder(model.config, model, torch.bfloat16)
    return DecodeBatch(decoder, rows, fused_check.select_fused_decoder(decoder, int8))


def by_operators(batch, monkeypatch):
    """The batch with a step by torch's operators, products of the layers in whole numbers."""
    by_operator = batch.step_eager

    def linear(x, weight, bias=None):
        y = product_of(x, weight)
        return (y if bias is None else y + bias.float()).bfloat16()

    def step(*arguments):
        with monkeypatch.context() as patched:
            patched.setattr(layers, "project", linear)
            return by_operator(*arguments)

    batch.fused_decoder, batch._prepack, batch.step_eager = None, lambda rows: None, step
    return batch


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_step_has_the_bits_of_operators(name, monkeypatch):
    model = model_of(name)
    fused, plain = batch_of(model), by_operators(batch_of(model), monkeypatch)
    assert torch.equal(*(batch.admit(prompts(3, 17, 40), 3) for batch in (fused, plain)))
    for token in range(4):
        tokens = torch.arange(9) + token
        assert torch.equal(fused.step(tokens), plain.step(tokens))
    for batch in (fused, plain):
        batch.keep_rows(torch.tensor([0, 2, 3, 6]))
    assert torch.equal(*(batch.step(torch.arange(4)) for batch in (fused, plain)))
    assert fused.fused_decoder.kernel.int8
    assert not plain.fused_decoder


@pytest.mark.skipif(len(TILES) == 1, reason="needs a CPU with AMX, to go without")
def test_without_amx_a_whole_step_has_them_too():
    env = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "of_operators", __file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{len(MODELS)} passed" in done.stdout


@pytest.mark.parametrize("rows", [1, 15, 33, 64])
def test_a_row_has_the_same_bits_alone_and_among_others(rows):
    model = model_of("llama, wide")
    crowd, tokens = batch_of(model, rows), torch.arange(rows) % 97
    crowd.admit(prompts(5), rows)
    among = crowd.step(tokens)
    for place in {0, rows // 2, rows - 1}:
        alone = batch_of(model, 1)
        alone.admit(prompts(5), 1)
        assert torch.equal(alone.step(tokens[place : place + 1])[0], among[place])


def test_however_many_threads():
    before, logits = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            batch = batch_of(model_of("llama, wide"))
            batch.admit(prompts(3, 9), 7)
            logits.append(torch.stack([batch.step(torch.arange(14)) for _ in range(3)]))
            assert batch.fused_decoder.threads == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_near_those_of_bf16(name):
    """Each of the eight products of the two layers is off by 1.2%; together they were by 1.4% to 3.0%."""
    batches = [batch_of(model_of(name), int8=int8) for int8 in (True, False)]
    for batch in batches:
        batch.admit(prompts(3, 17, 40), 3)
    logits, exact = (batch.step(torch.arange(9)).double() for batch in batches)
    off = float((logits - exact).norm() / exact.norm())
    assert 0.003 < off < 0.012 * 8**0.5


def test_new_weights_are_quantised_for_the_next_batch():
    model = model_of("llama")
    policy = Policy(model, character_tokenizer(), torch.bfloat16)
    batches = []
    for by in (1.0, -1.0):
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(by)
        batch = policy.create_decode_batch(4, int8=True)
        batch.admit(prompts(3), 2)
        tokens = torch.tensor([1, 2])
        batches.append(batch.step(tokens))
        fresh = batch_of(model, 4)
        fresh.admit(prompts(3), 2)
        assert torch.equal(batches[-1], fresh.step(tokens))
    assert not torch.equal(*batches)


# ---------------------------------------------------------------- a sampler and a run


def test_log_probs_are_those_of_the_int8_policy_that_drew_them():
    policy = Policy(model_of("llama"), character_tokenizer(), torch.bfloat16)
    asked, sampling = CountDigits().sample(0, 3), Sampling(4, max_tokens=6, seed="0")
    sampler = enable_int8(NativeSampler(8, deterministic=True), policy)
    assert (sampler.rows, sampler.deterministic) == (8, True)
    sampler.sync(policy, 0)
    completion = sampler.generate(asked, sampling)[1].completions[2]
    for int8 in (True, False):
        batch = policy.create_decode_batch(1, int8)
        logits = [batch.admit([policy.encode(asked[1])], 1)]
        logits += [batch.step(torch.tensor([token])) for token in completion.token_ids[:-1]]
        logprobs = torch.cat(logits).double().log_softmax(-1)[range(len(logits)), list(completion.token_ids)]
        assert len(logits) > 2
        gaps = (logprobs - torch.tensor(completion.logprobs, dtype=torch.float64)).abs()
        assert float(gaps[0]) < 1e-5, "behind the prompt all is bf16"
        assert bool((gaps < 1e-5).all()) == int8


def test_conversations_are_sampled_in_int8_too():
    policy = Policy(model_of("llama"), character_tokenizer(), torch.bfloat16)
    policy.tokenizer.chat_template = TEMPLATE
    sampler = enable_int8(
        NativeSampler(8, environments=InProcessEnvironments(EnvironmentSpec("worlds:Parrot"))), policy
    )
    sampler.sync(policy, 0)
    made, decode_batch = [], policy.create_decode_batch
    policy.create_decode_batch = lambda *about: made.append(decode_batch(*about)) or made[-1]
    sampler.generate(asked(), Sampling(2, max_tokens=40, turns=3, turn_tokens=5, seed="0/0"))
    assert [batch.fused_decoder.kernel.int8 for batch in made] == [True]


@pytest.fixture
def folder(tmp_path):
    """A model that can be decoded in int8."""
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL | {"vocab_size": len(tokenizer)}))
    Policy(model, tokenizer).save(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def run(folder, name, *words):
    task = ["--task.name", "sorting", "--evaluate.n", "4", "--evaluate.k", "2", "--algorithm.steps", "1"]
    sizes = ["--sampler.max-tokens", "8", "--policy.model", str(folder), "--policy.dtype", "bfloat16"]
    with pytest.raises(SystemExit) as exit_:
        cli.main(["train", "--run", str(folder.parent / name), *task, *sizes, *words])
    return exit_.value.code


@pytest.mark.slow
def test_a_run_samples_in_int8_and_evaluates_in_its_own_dtype(folder, monkeypatch):
    generate, asked_in = NativeSampler.generate, []

    def watched(sampler, prompts, sampling):
        asked_in.append((sampling.n, sampler.int8))
        return generate(sampler, prompts, sampling)

    monkeypatch.setattr(NativeSampler, "generate", watched)
    gaps, corrected = [], []
    for dtype in ("auto", "int8"):
        asked_in.clear()
        assert not run(folder, dtype, "--sampler.dtype", dtype, "--algorithm.group-size", "4")
        assert {int8 for n, int8 in asked_in if n == 4} == {dtype == "int8"}
        assert {int8 for n, int8 in asked_in if n == 2} == {False}
        [step] = (json.loads(line) for line in (folder.parent / dtype / "metrics.jsonl").read_text().splitlines())
        gaps.append(step["sampler/gap_mean"])
        corrected.append("sampler/corrected" in step)
    assert gaps[1] > 1.5 * gaps[0]
    assert corrected == [False, True]


# ---------------------------------------------------------------- where it cannot be had


def test_a_run_that_cannot_have_it_is_refused_in_one_line(folder, capsys):
    for words, says in (
        (["--policy.dtype", "float32"], 'policy.dtype is "float32": set "bfloat16"'),
        (["--policy.engine", "transformers"], "this policy is computed by transformers: policy.engine"),
        (["--policy.lora", "2"], "this policy is computed by transformers: an adapter"),
    ):
        assert run(folder, "refused", "--sampler.dtype", "int8", *words) == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if "int8" in line]
        assert f'sampler.dtype = "int8" cannot be had ({says}): mend that, or set "auto"' in line


@pytest.mark.parametrize("name", ["hf", "vllm"])
def test_it_is_for_the_native_sampler(name):
    with pytest.raises(ValueError, match=f'dtype = "int8" is for name = "native", not "{name}"'):
        SamplerConfig(name=name, dtype="int8")


def test_a_policy_that_cannot_have_it_says_why(monkeypatch):
    unfit = Policy(LlamaForCausalLM(LlamaConfig(**SMALL | {"head_dim": 32})), character_tokenizer(), torch.bfloat16)
    fit = Policy(model_of("llama"), character_tokenizer(), torch.bfloat16)
    assert find_policy_int8_fault(unfit) == "heads of 32"
    assert find_policy_int8_fault(fit) == ""
    assert find_policy_int8_fault(make_policy()) == 'policy.dtype is "float32": set "bfloat16"'
    with pytest.raises(UserError, match="heads of 32"):
        enable_int8(NativeSampler(), unfit)
    with pytest.raises(UserError):
        enable_int8(HuggingFaceSampler(), fit)
    fused_check.find_int8_kernel_fault.cache_clear()
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert find_policy_int8_fault(fit) == "a CPU without AVX-512 for int8"
    fused_check.find_int8_kernel_fault.cache_clear()
    monkeypatch.setattr(fused_check, "load_fused_kernel", lambda: (None, "no g++"))
    assert find_policy_int8_fault(fit) == "no g++"


def test_other_sums_are_found_out(monkeypatch):
    class Off:
        pack_bytes = fused_check.load_fused_kernel()[0].library.pack_bytes

        def product_of_bytes(self, *_):
            return None

    assert (
        fused_check.find_int8_kernel_fault(fused_check.load_fused_kernel()[0]._replace(library=Off()))
        == "this processor multiplies int8 otherwise"
    )

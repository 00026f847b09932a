"""Tests of fused decoding against torch's operators: results have the same bits."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from conftest import EOS, CountDigits, character_tokenizer
from pellucid.models import decode, fused_check, native
from pellucid.models.decode import DecodeBatch
from pellucid.models.decoder import Decoder
from pellucid.models.fused_decode import ModelStruct, TokenPositions, TokensStruct, find_fused_fault
from pellucid.models.native import KernelUnavailableError, call_kernel
from pellucid.models.score import round_up
from pellucid.policy.load import add_adapter
from pellucid.policy.policy import Policy
from pellucid.rollout.native import NativeSampler
from pellucid.types import Sampling

pytestmark = pytest.mark.skipif(
    fused_check.load_fused_kernel()[0] is None,
    reason="needs g++ and a CPU with AVX-512 for bfloat16, whose sums are known",
)
SMALL = {
    "vocab_size": 99,  # neither a multiple of a block nor of a vector
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "pad_token_id": EOS,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
WIDE = {"hidden_size": 576, "intermediate_size": 2080}
"""More inputs than oneDNN sums in one block, and more than it sums in two."""
QWEN2 = {**SMALL, "num_attention_heads": 14, "num_key_value_heads": 2}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "llama, tied": (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "llama, wide": (LlamaForCausalLM, LlamaConfig(**SMALL | WIDE)),
    "llama, biases": (LlamaForCausalLM, LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
    "llama, a head of its own each": (LlamaForCausalLM, LlamaConfig(**SMALL | {"num_key_value_heads": 6})),
    "llama, heads of 128": (LlamaForCausalLM, LlamaConfig(**SMALL | {"head_dim": 128})),
    "llama, heads of 256": (LlamaForCausalLM, LlamaConfig(**SMALL | {"head_dim": 256, "num_attention_heads": 2})),
    "llama, many heads to a key": (
        LlamaForCausalLM,
        LlamaConfig(**SMALL | {"num_attention_heads": 24, "num_key_value_heads": 1}),
    ),
    "mistral, a window": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=9)),
    "qwen2, seven heads to a key": (Qwen2ForCausalLM, Qwen2Config(**QWEN2)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL)),
}


ADAPTED = (
    "llama + q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    "llama, wide + k_proj up_proj down_proj",
    "llama, biases + v_proj o_proj",
    "qwen2, seven heads to a key + q_proj gate_proj",
    "qwen3 + o_proj",
)
"""Models with an adapter on some layers."""


def model_of(name):
    name, _, targets = name.partition(" + ")
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = kind(config)
    if targets:
        add_adapter(model, 20, 31, targets.split())
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(1.0 if weight.ndim == 1 else 0.0, weight.shape[-1] ** -0.5)
    return model


def pair(name="llama", rows=40):
    """Return two batches of the same decoder: the first decodes by operators, the second is fused."""
    model = model_of(name)
    decoder = Decoder(model.config, model, torch.bfloat16)
    return DecodeBatch(decoder, rows), DecodeBatch(decoder, rows, fused_check.select_fused_decoder(decoder))


def both(batches, call):
    plain, fused = (call(batch) for batch in batches)
    assert fused.dtype == plain.dtype
    assert torch.equal(fused, plain)


def prompts(*lengths, start=0):
    return [[(7 * i + length + start) % 98 for i in range(length)] for length in lengths]


def admit(batches, *lengths, copies):
    """Admit prompts to both batches. With AMX they are admitted one at a time, since oneDNN sums only so many tokens in
    a known order, and operators prefill prompts of more than 32 tokens in both batches."""
    for asked in (
        [prompts(length) for length in lengths] if fused_check.load_fused_kernel()[0].uses_amx else [prompts(*lengths)]
    ):
        with pytest.MonkeyPatch.context() as patched:
            if fused_check.load_fused_kernel()[0].uses_amx and len(asked[0]) > 32:
                patched.setattr(DecodeBatch, "uses_fused_prefill", lambda batch: False)
            both(batches, lambda batch, asked=asked: batch.admit(asked, copies))


def run(batches, steps, seed=0):
    chance = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(98, (len(batches[0].generated_lengths),), generator=chance)
        both(batches, lambda batch, tokens=tokens: batch.step(tokens))
    assert batches[1].fused_decoder
    assert not batches[0].fused_decoder


@pytest.mark.parametrize("name", [*MODELS, *ADAPTED])
def test_every_architecture_has_the_bits_of_the_operators(name):
    batches = pair(name)
    assert batches[1].decoder.is_adapted == (name in ADAPTED)
    admit(batches, 3, 17, 30, 60, copies=3)
    run(batches, 20)


@pytest.mark.parametrize("rows", [1, 2, 11, 12, 13, 16, 17, 25, 32, 64])
def test_bits_are_equal_however_many_rows_decode(rows):
    if rows > 32 and fused_check.load_fused_kernel()[0].uses_amx:
        pytest.skip("so many rows oneDNN adds up in several parts by AMX")
    batches = pair("llama, wide", rows)
    both(batches, lambda batch: batch.admit(prompts(5), rows))
    run(batches, 3)


def one_by_one(batch, ids):
    """Return the logits [1, V] after a prompt that is read token by token, and the keys and values of each layer."""
    shape, size = batch.decoder.shape, round_up(len(ids))
    empty = torch.zeros(shape.key_heads, 0, 0, shape.head_size, dtype=torch.bfloat16)
    caches = [
        [torch.zeros(shape.key_heads, 1, size, shape.head_size, dtype=torch.bfloat16) for _ in "kv"]
        for _ in batch.caches
    ]
    for place, token in enumerate(ids):
        at = TokenPositions(*(torch.tensor([x]) for x in (0, place, 0, 0, 0)))
        logits = batch.run_fused(torch.tensor([token]), at, [(empty, empty, *pair) for pair in caches])
    return logits, caches


@pytest.mark.parametrize(
    ("name", "lengths"), [*((name, (3, 17, 40, 150, 1)) for name in [*MODELS, *ADAPTED]), ("llama", (600, 9))]
)
def test_prefill_has_the_bits_of_tokens_read_one_by_one(name, lengths):
    """Tokens read one by one have the bits of operators, and prefill has the same bits for any number of tokens."""
    [_, batch] = pair(name)
    asked = prompts(*lengths)
    logits = batch.admit(asked, 1)
    for p, ids in enumerate(asked):
        of_one, caches = one_by_one(batch, ids)
        assert torch.equal(logits[p : p + 1], of_one)
        for cache, (keys, values) in zip(batch.caches, caches, strict=True):
            assert torch.equal(cache.prompt_keys[:, p, : len(ids)], keys[:, 0, : len(ids)])
            assert torch.equal(cache.prompt_values[:, p, : len(ids)], values[:, 0, : len(ids)])


@pytest.mark.parametrize("name", [*MODELS, *ADAPTED[:2]])
def test_appended_tokens_have_the_bits_of_the_same_tokens_in_steps(name):
    """They are appended in two parts. One of them is longer than a block that is summed and read at once."""
    [_, told], [_, stepped] = pair(name), pair(name)
    ids = [(5 * i + 2) % 98 for i in range(70)]
    for batch in (told, stepped):
        batch.admit(prompts(20, 7), 2)
    decode.append_tokens(told, torch.tensor([1, 3]), [ids[:9], ids[:1]])
    logits = decode.append_tokens(told, torch.tensor([1, 3]), [ids[9:], ids[1:20]])
    for i, token in enumerate(ids):
        step = stepped.step(torch.full((4,), token), torch.tensor([False, True, False, i < 20]))
        for place, row, end in ((0, 1, 69), (1, 3, 19)):
            if i == end:
                assert torch.equal(logits[place], step[row])
    following = torch.tensor([1, 2, 3, 4])
    assert torch.equal(told.step(following), stepped.step(following))


@pytest.mark.parametrize("rows", [1, 15, 33, 40, 64])
def test_a_row_has_the_same_bits_alone_and_among_others(rows):
    [_, crowd] = pair(rows=rows)
    crowd.admit(prompts(5), rows)
    tokens = torch.arange(rows) % 97
    among = crowd.step(tokens)
    for place in {0, rows // 2, rows - 1}:
        [_, alone] = pair(rows=1)
        alone.admit(prompts(5), 1)
        assert torch.equal(alone.step(tokens[place : place + 1])[0], among[place])


@pytest.mark.parametrize("name", ["llama", ADAPTED[0]])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_are_equal_however_many_threads_decode(threads, name):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        batches = pair(name)
        both(batches, lambda batch: batch.admit(prompts(3, 9), 2))
        run(batches, 4)
        assert batches[1].fused_decoder.threads == threads
    finally:
        torch.set_num_threads(before)


def test_rows_beyond_one_block_have_the_same_bits():
    """With AMX weights are read again for these rows, some outputs at a time. Here a thread has more than that."""
    decoder = fused_check.build_self_check_decoder()
    several, few = (DecodeBatch(decoder, rows, fused_check.select_fused_decoder(decoder)) for rows in (40, 8))
    expected = few.admit(prompts(5), 8)
    assert torch.equal(several.admit(prompts(5), 40), expected.repeat(5, 1))
    for step in range(3):
        tokens = torch.arange(8) + 8 * step
        assert torch.equal(several.step(tokens.repeat(5)), few.step(tokens).repeat(5, 1))


def test_rows_that_come_leave_pause_and_are_restored_have_equal_bits():
    batches = pair(rows=20)
    admit(batches, 3, 18, copies=4)
    run(batches, 5)
    for batch in batches:
        batch.keep_rows(torch.tensor([0, 2, 3, 6]))
    run(batches, 4)
    both(batches, lambda batch: batch.admit(prompts(30, start=5), 3))
    run(batches, 30)  # rows of several lengths, beyond the initial size of the cache
    speaks = torch.tensor([True, False, True, True, False, True, False])
    both(batches, lambda batch: batch.step(torch.arange(7), speaks)[speaks])
    both(batches, lambda batch: decode.append_tokens(batch, torch.tensor([1, 4]), [[5, 6, 7], [8]]))
    run(batches, 3)
    asides = [decode.evict_rows(batch, [2, 5]) for batch in batches]
    for batch in batches:
        batch.keep_rows(torch.tensor([0, 1, 3, 4, 6]))
    run(batches, 2)
    for batch, aside in zip(batches, asides, strict=True):
        decode.restore_rows(batch, aside)
    run(batches, 3)


GAPS = {
    "a token": lambda batch: batch.step(torch.arange(5)),
    "a token of some": lambda batch: batch.step(torch.arange(5), torch.tensor([True, False, True, True, False]))[::3],
    "more tokens than there is room for": lambda batch: torch.cat([batch.step(torch.arange(5)) for _ in range(40)]),
    "prompts": lambda batch: batch.admit(prompts(30, 4, start=5), 3),
    "told something": lambda batch: decode.append_tokens(batch, torch.tensor([1, 4]), [[5, 6, 7], [8]]),
    "aside and back": lambda batch: decode.restore_rows(batch, decode.evict_rows(batch, [1, 3])) or torch.zeros(0),
    "one row": lambda batch: batch.keep_rows(torch.tensor([3])) or torch.zeros(0),
}


@pytest.mark.parametrize("then", GAPS)
def test_rows_leave_gaps_until_half_have_left_or_others_come(then):
    batches = pair(rows=20)
    admit(batches, 3, 18, copies=4)
    run(batches, 3)
    caches = [batch.caches[0].keys for batch in batches]
    for rows in ([1, 2, 3, 4, 5, 7], [0, 2, 3, 4, 5]):  # the first prompt stays in the cache with one row left
        for batch in batches:
            batch.keep_rows(torch.tensor(rows))
        run(batches, 2)
    assert [cache is batch.caches[0].keys for cache, batch in zip(caches, batches, strict=True)] == [False, True]
    both(batches, GAPS[then])
    run(batches, 2)
    for batch in batches:
        batch.keep_rows(torch.tensor([0]))
    run(batches, 2)
    assert [batch.caches[0].keys.shape[1] for batch in batches] == [1, 1]


@pytest.mark.parametrize(("length", "own"), [(600, 3), (1100, 2), (20, 540)])
def test_texts_longer_than_a_block_of_sums_have_equal_bits(monkeypatch, length, own):
    batches = pair(rows=2)
    admit(batches, length, copies=2)
    if own > 3:
        if fused_check.load_fused_kernel()[0].uses_amx:  # operators append so many tokens in both batches
            monkeypatch.setattr(DecodeBatch, "uses_fused_prefill", lambda batch: False)
        told = [[(3 * i) % 98 for i in range(own - 3)]] * 2
        both(batches, lambda batch: decode.append_tokens(batch, torch.tensor([0, 1]), told))
    run(batches, 3)


def test_policy_samples_the_same_completions_without_fusion(monkeypatch):
    policy = Policy(model_of("llama"), character_tokenizer(), torch.bfloat16)
    asked, sampling = CountDigits().sample(0, 5), Sampling(4, max_tokens=12, seed="0")

    def sampled():
        sampler = NativeSampler(rows=8)
        sampler.sync(policy, 0)
        return sampler.generate(asked, sampling)

    fused, made = sampled(), []
    monkeypatch.setattr(fused_check, "select_fused_decoder", lambda *about: made.append(about))
    assert sampled() == fused
    assert made


@pytest.mark.parametrize("rows", [4, 12, 40])
def test_rows_admitted_late_have_the_bits_of_rows_admitted_at_once(rows):
    policy = Policy(model_of("llama"), character_tokenizer(), torch.bfloat16)
    policy.eos_ids = (*range(0, 28, 3), EOS)  # so that rows end at different times
    asked, sampling = CountDigits().sample(0, 15), Sampling(4, max_tokens=40, seed="0")
    late, at_once = (NativeSampler(n, policy).generate(asked, sampling) for n in (rows, 60))
    assert len({len(c.token_ids) for group in at_once for c in group.completions}) > 5
    assert late == at_once


def test_next_batch_uses_new_weights():
    model = model_of("llama")
    policy = Policy(model, character_tokenizer(), torch.bfloat16)

    def decoded(policy):
        batch = policy.create_decode_batch(4)
        return batch.admit(prompts(3), 2), batch.step(torch.tensor([1, 2]))

    before = decoded(policy)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.5)
    after, afresh = decoded(policy), decoded(Policy(model, character_tokenizer(), torch.bfloat16))
    for old, new, other in zip(before, after, afresh, strict=True):
        assert torch.equal(new, other)
        assert not torch.equal(new, old)


def test_out_of_memory_in_a_kernel_raises_memory_error():
    model, tokens = ModelStruct(1, 96, 6, 2, 64, 160, 99, 1e-5), TokensStruct(n=2**44, logit_count=1)
    assert (
        call_kernel(
            fused_check.load_fused_kernel()[0].library.step,
            model,
            None,
            tokens,
            *[None] * 4,
            fused_check.load_fused_kernel()[0].uses_amx,
            0,
            1,
        )
        == 1
    )
    [_, batch] = pair()
    batch.fused_decoder.kernel = batch.fused_decoder.kernel._replace(library=Off("step", lambda *_: 1))
    with pytest.raises(MemoryError, match="compute 12 tokens"):
        batch.admit(prompts(3, 9), 1)


# ---------------------------------------------------------------- fallbacks, compilation and self-checks


def test_unsupported_shapes_and_dtypes_use_operators():
    for changed, why in (
        ({"head_dim": 32}, "heads of 32"),
        ({"head_dim": 320}, "heads of 320"),
        ({"hidden_size": 84}, "width 84 or 160"),
        ({"intermediate_size": 168}, "width 96 or 168"),
    ):
        config = LlamaConfig(**SMALL | changed)
        decoder = Decoder(config, LlamaForCausalLM(config), torch.bfloat16)
        batch = DecodeBatch(decoder, 4, fused_check.select_fused_decoder(decoder))
        assert find_fused_fault(batch.unpacked_weights, decoder.shape) == why
        batch.admit(prompts(3), 2)
        batch.step(torch.tensor([1, 2]))
        assert not batch.fused_decoder
    config = LlamaConfig(**SMALL)
    assert fused_check.select_fused_decoder(Decoder(config, LlamaForCausalLM(config), torch.float32)) is None
    wide = Decoder(config, LlamaForCausalLM(config).double(), torch.bfloat16)
    with torch.no_grad():
        assert find_fused_fault(wide.collect_weights(), wide.shape) == "norms in torch.float64"


def test_noncontiguous_weights_have_equal_bits():
    model = model_of("llama")
    with torch.no_grad():
        for weight in model.bfloat16().parameters():
            weight.data = weight.data.T.contiguous().T if weight.ndim > 1 else weight.data.float()
    decoder = Decoder(model.config, model, torch.bfloat16)
    batches = DecodeBatch(decoder, 4), DecodeBatch(decoder, 4, fused_check.select_fused_decoder(decoder))
    both(batches, lambda batch: batch.admit(prompts(3), 2))
    run(batches, 2)


@pytest.fixture
def at_home(monkeypatch, tmp_path):
    """Return a home folder without a compiled library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


@pytest.fixture
def compiler(at_home, monkeypatch):
    """Set CXX to a script that copies the loaded library. Return the file that lists what the script was asked for."""
    asked, script = at_home / "asked", at_home / "compiler"
    script.write_text(f'#!/bin/sh\nfor to; do :; done\necho "$to" >> {asked}\ncp {native.load_library()._name} "$to"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(at_home / "cache"))
    return asked


def passing(library, is_adapted=False):
    """Return the kernels of a library whose bits are equal to those of operators."""
    kernels = native.list_variants(library)
    return [x for x in kernels if not native.find_difference(fused_check.compare_fused_steps(x, is_adapted))]


def test_library_is_compiled_once_and_cached(at_home, compiler):
    assert passing(native.compile_library())
    [kept] = (at_home / "cache" / "pellucid").iterdir()
    assert passing(native.compile_library())
    assert kept.suffix == ".so"
    assert libraries(compiler) == 1


def libraries(asked):
    """Return how many libraries a compiler was asked for. Its other outputs are parts of them."""
    return asked.read_text().count(".so\n")


def test_missing_or_failing_compiler_raises_with_a_reason(at_home, monkeypatch):
    for compiler, why in ((None, "no g\\+\\+"), ("/bin/false", "/bin/false fails")):
        monkeypatch.setattr(native.shutil, "which", lambda name, compiler=compiler: compiler)
        with pytest.raises(KernelUnavailableError, match=why):
            native.compile_library()
    assert not list(at_home.rglob("*.so"))


def test_library_is_recompiled_if_the_cached_one_is_unusable(at_home, compiler, monkeypatch):
    native.compile_library()
    [kept] = (at_home / "cache" / "pellucid").iterdir()
    broken = at_home / "another" / "pellucid" / kept.name  # the loaded library would be found at its own path
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"")
    for home in ("/dev/null", at_home / "another"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        assert passing(native.compile_library())
    assert libraries(compiler) == 3


class Off:
    """A library with one function replaced."""

    def __init__(self, name, instead):
        self.__dict__ |= {"pack": native.compile_library().pack, "step": native.compile_library().step, name: instead}


@pytest.mark.skipif(not native.has_amx(), reason="needs a CPU with AMX, to go without")
def test_fused_decoding_uses_amx_only_if_onednn_may():
    """This includes the test with 64 rows, which is skipped with AMX."""
    # Parts of the names of tests in this file.
    bits = "of_the_operators or however_many or texts or rows_that_come"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", bits, __file__]
    env = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{len(MODELS) + len(ADAPTED) + 10 + 6 + 3 + 1} passed" in done.stdout


def pack_with_other_order(weight, outputs, width, interleaved, *rest):
    return native.compile_library().pack(weight, outputs, width, ctypes.c_int64(1 - interleaved.value), *rest)


def write_zeros(model, layers, tokens, norm, head, hidden, logits, *_):
    ctypes.memset(logits, 0, tokens._obj.logit_count * model._obj.vocabulary * 2)  # bf16
    return 0


@pytest.mark.parametrize(("part", "instead"), [("pack", pack_with_other_order), ("step", write_zeros)])
def test_kernel_with_other_bits_fails_the_self_check(part, instead):
    """Each function writes all of its output: unwritten memory may hold the right bits of an earlier check."""
    assert not passing(Off(part, instead))


@pytest.mark.slow
def test_another_order_of_sums_fails_the_self_check(at_home, monkeypatch):
    """It changes only the last bits of some sums."""
    assert shutil.which("g++")
    shutil.copytree(native.CPP_FOLDER, at_home / "cpp")
    for file, order, other in (
        ("pairs.h", "all > 1024 ? 1024 : 512", "all"),
        ("tiles.h", "k = 0; k < inputs; k += Tiles::INPUTS", "k = inputs - 32; k >= 0; k -= Tiles::INPUTS"),
    ):
        source = at_home / "cpp" / file
        assert order in source.read_text()
        source.write_text(source.read_text().replace(order, other))
    monkeypatch.setattr(native, "CPP_FOLDER", at_home / "cpp")
    assert not passing(native.compile_library())


@pytest.mark.slow
def test_step_without_the_adapter_fails_only_the_check_of_adapters(at_home, monkeypatch):
    shutil.copytree(native.CPP_FOLDER, at_home / "cpp")
    source = at_home / "cpp" / "decode.cpp"
    assert source.read_text().count("if (rank)") == 1
    source.write_text(source.read_text().replace("if (rank)", "if (rank < 0)"))
    monkeypatch.setattr(native, "CPP_FOLDER", at_home / "cpp")
    assert passing(native.compile_library())
    assert not passing(native.compile_library(), is_adapted=True)

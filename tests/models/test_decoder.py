"""Tests of the decoder against transformers: logits, gradients, rows that join and leave, and supported configs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from architectures import FAMILY, LLAMA3, SMALL, WINDOW, batch_of, model_of, plain_logprobs, sequences
from conftest import (
    EOS,
    VOCAB,
    CountDigits,
    character_tokenizer,
    mostly_slow,
    products_know_no_neighbors,
    tiny_gemma,
    tiny_gpt2,
)
from pellucid.algorithm.batch import collate
from pellucid.models import attention, native, ops
from pellucid.models import decoder as decoders
from pellucid.models.attention import attend
from pellucid.models.autograd_ops import add_and_rms_norm, apply_rms_norm, apply_rotary, apply_swiglu
from pellucid.models.decode import DecodeBatch
from pellucid.models.decoder import (
    Decoder,
    compute_layer_output,
    compute_qkv,
    find_fallback_reason,
    find_sliding_layers,
    get_context_length,
    project,
)
from pellucid.models.linear import TrainedMatrix, look_up_embeddings
from pellucid.models.score import compute_hidden_states
from pellucid.policy import logprobs
from pellucid.policy.policy import Policy
from pellucid.rollout.native import NativeSampler
from pellucid.types import Completion, Group, Prompt, Sampling, UserError
from runs import in_two_processes


def decoder_of(model, dtype=torch.float32):
    return Decoder(model.config, model, dtype)


@torch.no_grad()
def plain_logits(model, batch) -> Tensor:
    """Return the logits [N, V] of transformers, computed row by row."""
    return torch.cat([model(torch.tensor([ids])).logits[0, start - 1 : -1] for ids, start in sequences(batch)])


@pytest.mark.parametrize("name", FAMILY)
def test_logits_match_transformers(name):
    model, batch = model_of(name), batch_of()
    hidden, head = compute_hidden_states(decoder_of(model), batch)
    expected = plain_logits(model, batch)
    assert expected.std() > 0.5
    torch.testing.assert_close(hidden @ head.tensor.T, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILY)
def test_half_precision_is_as_close_to_fp32_as_transformers(name, dtype):
    """This compares mean errors. The residual stream of the decoder stays in fp32."""
    batch, model = batch_of(), model_of(name)
    exact = plain_logits(model, batch)
    hidden, head = compute_hidden_states(Decoder(model.config, model, dtype), batch)
    ours = (hidden.float() @ head.tensor.float().T - exact).abs().mean()
    theirs = (plain_logits(model.to(dtype), batch).float() - exact).abs().mean()
    assert 0 < ours < 1.1 * theirs


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", FAMILY)
def test_gradients_match_plain_autograd(name, recompute):
    """All parameters in fp32: relative errors are below 1e-5 overall and 5e-5 per tensor. 30% of the tokens weigh 0."""
    model, batch = model_of(name), batch_of()
    weights = torch.randn(int(batch.response_mask.sum())) * (torch.rand(int(batch.response_mask.sum())) > 0.3)
    (plain_logprobs(model, batch) * weights).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()

    policy = Policy(model, character_tokenizer(), gradient_checkpointing=recompute)
    assert policy.decoder is not None
    (policy.score(batch).logprobs[batch.response_mask] * weights).sum().backward()
    errors, sizes = [], []
    for part, p in model.named_parameters():
        errors.append(float((p.grad - expected[part]).norm()))
        sizes.append(float(expected[part].norm()))
        assert errors[-1] < 5e-5 * sizes[-1], part
    assert torch.tensor(errors).norm() < 1e-5 * torch.tensor(sizes).norm()


def test_recomputing_layers_keeps_only_the_residual_stream(monkeypatch):
    calls = []

    def before(layer, stream, rotary, shape):
        assert stream.pending is None  # otherwise it would be kept too
        return compute_qkv(layer, stream, rotary, shape)

    monkeypatch.setattr(decoders, "compute_qkv", before)
    monkeypatch.setattr(decoders, "compute_layer_output", lambda *a: calls.append(1) or compute_layer_output(*a))
    policy = Policy(model_of("llama"), character_tokenizer(), gradient_checkpointing=True)
    policy.score(batch_of()).logprobs.sum().backward()
    assert len(calls) == 2 * 2


def test_selected_rows_keep_their_scores():
    """The update selects rows when it leaves out dead groups. Here prompts have no row, one row or several rows."""
    policy, batch = Policy(model_of("qwen2"), character_tokenizer()), batch_of()
    whole = policy.score(batch).logprobs
    for rows in ([0], [1], [4, 8], [2, 3, 6, 7]):
        part = batch.select_rows(torch.tensor(rows))
        width = part.response_mask.shape[1]
        torch.testing.assert_close(policy.score(part).logprobs, whole[rows, :width], rtol=0, atol=1e-5)


def test_cast_copy_follows_its_master_weights():
    model = model_of("llama")
    policy, batch = Policy(model, character_tokenizer(), torch.bfloat16), batch_of()
    before = policy.score(batch).logprobs
    assert {x.dtype for layer in policy.decoder.collect_weights().layers for x in (layer.qkv, layer.down)} == {
        torch.bfloat16
    }
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()  # no gradients yet: nothing moves
    torch.testing.assert_close(policy.score(batch).logprobs, before, rtol=0, atol=0)
    policy.score(batch).logprobs.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
    after = policy.score(batch).logprobs
    fresh = Policy(model, character_tokenizer(), torch.bfloat16).score(batch).logprobs
    torch.testing.assert_close(after, fresh, rtol=0, atol=0)
    assert (after - before).abs().max() > 0.1


def test_weights_are_cast_once_per_optimizer_step():
    model = model_of("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    policy = Policy(model, character_tokenizer(), torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    weights = policy.decoder.layers[0].cast_weights["down"], policy.decoder.embedding
    cast, of_frozen = (part.get_cast_copy() for part in weights)
    counts = []
    for _ in range(3):
        before, frozen_before = cast._version, of_frozen._version
        for micro_batch in batch_of().split_into_chunks(2):
            policy.score(micro_batch).logprobs.sum().backward()
        optimizer.step()
        counts.append((cast._version - before, of_frozen._version - frozen_before))
    assert counts == [(0, 0), (1, 0), (1, 0)]


def test_bf16_log_probs_are_close_to_fp32():
    model, batch = model_of("llama"), batch_of()
    exact, rounded = (
        Policy(model, character_tokenizer(), dtype).score(batch).logprobs[batch.response_mask]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert 0 < (exact - rounded).abs().mean() < 0.05


def test_embedding_of_the_padding_token_is_trained():
    """If pad_token_id is the EOS token, transformers gives its embedding no gradient. The decoder reads no padding."""
    gradients = []
    for ours in (True, False):
        model = model_of("llama, untied")
        model.model.embed_tokens.padding_idx = EOS
        policy = Policy(model, character_tokenizer(), engine="auto" if ours else "transformers")
        prompt_ends = [Group(Prompt("p", "?"), (1, EOS), (Completion((2, 3), (0.0,) * 2, "", True),))]
        policy.score(collate(prompt_ends)).logprobs.sum().backward()
        gradients.append(model.model.embed_tokens.weight.grad)
    assert gradients[0][EOS].norm() > 0
    assert gradients[1][EOS].norm() == 0
    torch.testing.assert_close(gradients[0][:EOS], gradients[1][:EOS])


# ---------------------------------------------------------------- elementwise


def test_elementwise_backward_passes_match_numerical_differences():
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 4, 6, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    cos, sin = torch.randn(2, 3, 1, 6, dtype=torch.float64)
    sin[..., 3:] = -sin[..., :3]
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: apply_rms_norm(x, w, 1e-2, torch.float64), (x, w))
    more = torch.randn(3, 4, 6, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, y, w: add_and_rms_norm(x, y, w, 1e-2, torch.float64), (x, more, w))
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, cos, sin), (x,))
    assert torch.autograd.gradcheck(lambda x: apply_swiglu(x.flatten(1)), (x,))


def test_elementwise_results_are_the_same_without_gradient():
    x, weight = torch.randn(5, 2, 6).bfloat16(), torch.rand(6)
    cos, sin = torch.randn(2, 5, 1, 6).bfloat16()
    calls = (
        lambda: apply_rms_norm(x, weight, 1e-5, torch.bfloat16),
        lambda: add_and_rms_norm(x.float(), x, weight, 1e-5, torch.bfloat16)[0],
        lambda: add_and_rms_norm(x.float(), x, weight, 1e-5, torch.bfloat16)[1],
        lambda: apply_rotary(x, cos, sin),
        lambda: apply_swiglu(x.flatten(1)),
    )
    for call in calls:
        trained = call()
        with torch.no_grad():
            torch.testing.assert_close(call(), trained, rtol=0, atol=0)


# ---------------------------------------------------------------- attention


def test_backward_pass_of_attention_matches_autograd(monkeypatch):
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, heads, n, 8, dtype=torch.float64) for heads, n in ((4, 5), (2, 7), (2, 7)))
    seen = torch.rand(3, 1, 5, 7) > 0.4
    seen[..., 0] = True
    bias = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    leaves = [x.requires_grad_() for x in (query, key, value)]

    def plain(query, key, value):
        scores = query @ key.repeat_interleave(2, 1).mT / 8**0.5 + bias
        return scores.softmax(-1) @ value.repeat_interleave(2, 1)

    upstream = torch.randn(3, 4, 5, 8, dtype=torch.float64)
    theirs = plain(*leaves)
    expected = torch.autograd.grad((theirs * upstream).sum(), leaves)
    for shared, scores_at_once in ((0, 2**20), (3, 2**20), (3, 1), (0, 280)):  # all rows, one and two at a time
        monkeypatch.setattr(attention, "MAX_SCORES_PER_CHUNK", scores_at_once)
        ours = attend(*leaves, bias, shared)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        mine = torch.autograd.grad((ours * upstream).sum(), leaves)
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("std", [1, 9, 36])
def test_bf16_attention_gradient_is_closer_to_fp64_than_that_of_torch(std):
    """Probabilities recomputed from scores rounded to bf16 would be 2% off at a std of 9, and 9% at 36."""
    torch.manual_seed(0)
    query = (std * torch.randn(2, 6, 40, 64)).bfloat16()
    key, value, upstream = (torch.randn(2, heads, 40, 64).bfloat16() for heads in (2, 2, 6))
    seen = torch.ones(40, 40).tril().bool().expand(2, 1, -1, -1)
    bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)

    def gradients(dtype, attention):
        leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        out = attention(*leaves, bias.to(dtype))
        return [g.double() for g in torch.autograd.grad(out, leaves, upstream.to(dtype))]

    def by_torch(query, key, value, bias):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)

    exact = gradients(torch.float64, by_torch)

    def errors(attention):
        pairs = zip(gradients(torch.bfloat16, attention), exact, strict=True)
        return torch.stack([(ours - true).norm() / true.norm() for ours, true in pairs])

    assert errors(attend).max() < 0.005
    assert errors(attend).sum() < errors(by_torch).sum()


# ---------------------------------------------------------------- sums over many tokens


def test_gradient_of_an_embedding_read_4096_times_is_complete():
    """A sum in bf16 stops growing when a term is less than 1/256 of it."""
    master = torch.randn(3, 4).requires_grad_()
    ids = torch.cat([torch.ones(4096, dtype=torch.long), torch.tensor([2])])
    upstream = torch.rand(len(ids), 4).bfloat16()
    look_up_embeddings(ids, TrainedMatrix(master.detach().bfloat16(), (master,))).backward(upstream)
    expected = torch.stack([torch.zeros(4), upstream[:-1].double().sum(0), upstream[-1]])
    torch.testing.assert_close(master.grad, expected.float(), rtol=1e-5, atol=0)


def test_sparse_embedding_gradient_has_only_the_rows_that_were_read():
    master = torch.randn(50, 4).requires_grad_()
    matrix, ids, upstream = (
        TrainedMatrix(master.detach().bfloat16(), (master,)),
        torch.tensor([7, 3, 7, 49]),
        torch.rand(4, 4),
    )
    dense, sparse = (
        torch.autograd.grad(look_up_embeddings(ids, matrix, sparse), master, upstream.bfloat16())[0]
        for sparse in (False, True)
    )
    assert sparse.indices().tolist() == [[3, 7, 49]]
    assert torch.equal(sparse.to_dense(), dense)


@pytest.mark.parametrize("family", ["llama", "llama, untied", "qwen2"])
@pytest.mark.parametrize("recompute", [False, True])
def test_every_gradient_is_dense(family, recompute):
    """Optimizers need dense gradients. Nothing dense is added to a sparse gradient of an embedding that is not the
    head."""
    model = model_of(family)
    policy = Policy(model, character_tokenizer(), gradient_checkpointing=recompute)
    for _ in range(2):  # the second is added to the first
        policy.score(batch_of()).logprobs.sum().backward()
    assert {p.grad.layout for p in model.parameters() if p.grad is not None} == {torch.strided}


def test_gradient_of_the_head_is_not_rounded_to_bf16(monkeypatch):
    """It is summed in fp32 over chunks and reaches the master weights unrounded, in every compute dtype."""
    monkeypatch.setattr(logprobs, "MAX_MATMUL_LOGITS", 5 * VOCAB)
    monkeypatch.setattr(logprobs, "MAX_ELEMENTWISE_LOGITS", 2 * VOCAB)
    policy, batch = Policy(model_of("llama, untied"), character_tokenizer(), torch.bfloat16), batch_of()
    policy.score(batch).logprobs.sum().backward()
    for name in ("lm_head", "model.embed_tokens"):
        gradient = dict(policy.model.named_parameters())[f"{name}.weight"].grad
        assert (gradient.bfloat16() != gradient)[gradient.any(-1)].double().mean() > 0.3, name


def test_bf16_attention_backward_pass_rounds_only_factors_of_products():
    """All numbers are integers, so that every matrix product is exact. The gradient of the softmax is a difference of
    numbers near 64, which are 0.5 apart in bf16. It is rounded twice, by at most 0.2% each time."""
    torch.manual_seed(0)
    query, key, value, grad = (
        torch.randint(-1, 2, (2, heads, n, 16)).bfloat16() for heads, n in ((4, 6), (2, 9), (2, 9), (4, 6))
    )
    value[..., 0] = grad[..., 0] = 8
    bias = torch.zeros(2, 1, 6, 9, dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    measured = torch.autograd.grad(attend(*leaves, bias), leaves, grad)
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v = exact_leaves
    probs = (q @ k.repeat_interleave(2, 1).mT / 4).softmax(-1)
    exact = torch.autograd.grad(probs @ v.repeat_interleave(2, 1), exact_leaves, grad.double())
    for mine, expected in zip(measured, exact, strict=True):
        assert (mine - expected).norm() < 2**-8 * expected.norm()


# ---------------------------------------------------------------- rows that join and leave


class Check:
    """Compares logits with those of transformers, which reads the whole history of each row without a cache."""

    def __init__(self, model):
        self.model, self.histories = model, []

    def compare(self, logits):
        assert len(logits) == len(self.histories)
        for ids, row in zip(self.histories, logits, strict=True):
            with torch.no_grad():
                expected = self.model(torch.tensor([ids])).logits[0, -1]
            torch.testing.assert_close(row, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral, a window", "qwen3, biases, a window above"])
def test_rows_may_join_and_leave_at_any_time(name):
    model = model_of(name)
    flight, check, random = DecodeBatch(decoder_of(model), 12), Check(model), torch.Generator().manual_seed(0)

    def ids(n):
        return torch.randint(VOCAB, (n,), generator=random)

    def admit(*lengths, copies):
        prompts = [ids(n).tolist() for n in lengths]
        check.histories += [list(p) for p in prompts for _ in range(copies)]
        return flight.admit(prompts, copies)

    def step():
        tokens = ids(len(check.histories))
        check.histories = [[*h, t] for h, t in zip(check.histories, tokens.tolist(), strict=True)]
        check.compare(flight.step(tokens))

    def keep(*rows):
        flight.keep_rows(torch.tensor(rows, dtype=torch.long))
        check.histories = [check.histories[i] for i in rows]

    check.compare(admit(3, 8, copies=3))
    step()
    step()
    keep(1, 3, 4, 5)  # the first prompt has one row left
    step()
    assert flight.count_free_slots() == 8
    late = admit(14, 2, copies=4)
    check.histories, everyone = check.histories[4:], check.histories
    check.compare(late)
    check.histories = everyone
    assert flight.count_free_slots() == 0
    step()
    keep(1, 2, 3, 4, 11)  # the first prompt has no rows left
    step()
    keep(4)
    step()
    keep()
    check.histories = []
    check.compare(admit(5, copies=2))
    step()


@pytest.mark.parametrize("name", ["llama", "qwen2, a window above"])
def test_rows_may_outgrow_the_initial_cache(name):
    """Rows of the first prompt get 100 tokens. Those of the second join after 40. The cache grows at least twice."""
    model = model_of(name)
    flight, check, random = DecodeBatch(decoder_of(model), 4), Check(model), torch.Generator().manual_seed(0)
    check.histories = [[1, 2, 3]] * 2
    flight.admit([[1, 2, 3]], 2)
    rooms = set()
    for t in range(100):
        if t == 40:
            check.histories += [[4, 5]] * 2
            flight.admit([[4, 5]], 2)
        tokens = torch.randint(VOCAB, (len(check.histories),), generator=random)
        check.histories = [[*h, x] for h, x in zip(check.histories, tokens.tolist(), strict=True)]
        logits = flight.step(tokens)
        rooms.add(flight.caches[0].keys.shape[2])
        if t % 10 in (0, 9):
            check.compare(logits)
    assert len(rooms) > 2


@pytest.mark.parametrize("rows", [8, 16, 24, 256])
def test_completions_do_not_depend_on_the_rows_in_flight(rows):
    policy = Policy(model_of("llama"), character_tokenizer())
    prompts = CountDigits().sample(0, 6)
    few, many = (
        NativeSampler(n, policy).generate(prompts, Sampling(8, max_tokens=16, seed="s")) for n in (rows, 10**4)
    )
    assert [[c.token_ids for c in g.completions] for g in few] == [[c.token_ids for c in g.completions] for g in many]
    assert len({len(c.token_ids) for g in few for c in g.completions}) > 3


def test_group_larger_than_the_row_limit_is_sampled():
    policy = Policy(model_of("llama"), character_tokenizer())
    [group] = NativeSampler(2, policy).generate(CountDigits().sample(0, 1), Sampling(5, max_tokens=4, seed="s"))
    assert len(group.completions) == 5


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("name", FAMILY)
def test_scored_log_probs_match_the_sampled_ones(name, temperature):
    policy = Policy(model_of(name), character_tokenizer(), temperature=temperature)
    sampling = Sampling(8, temperature, max_tokens=24, seed="0/0")
    batch = collate(NativeSampler(16, policy).generate(CountDigits().sample(0, 4), sampling))
    gap = (policy.score(batch).logprobs.detach() - batch.sampler_logprobs)[batch.response_mask].abs().max()
    assert gap < 1e-4


def test_product_of_a_single_row_equals_that_among_others():
    """The last row of a step is alone. oneDNN splits such a product if the inner dimension is long."""
    x, w = torch.randn(200, 1536).bfloat16(), torch.randn(576, 1536).bfloat16()
    among_others = project(x, w)
    if products_know_no_neighbors():
        assert all(torch.equal(project(x[i : i + 1], w)[0], among_others[i]) for i in range(len(x)))
    torch.testing.assert_close(project(x[:1], w), among_others[:1], rtol=0.02, atol=0.1)


@pytest.mark.parametrize("name", mostly_slow(FAMILY, every=5))
def test_bf16_scorer_matches_the_sampler_bit_for_bit(name):
    """Prompts have several lengths, rows end and make room, and groups are scored together and alone. Only the last sum
    over the vocabulary differs."""
    policy = Policy(model_of(name), character_tokenizer(), torch.bfloat16)
    groups = NativeSampler(16, policy).generate(CountDigits().sample(0, 6), Sampling(8, max_tokens=40, seed="0/0"))
    assert len({len(group.prompt_ids) for group in groups}) > 1
    for some in (groups, *([group] for group in groups)):
        batch = collate(some)
        gap = (policy.score(batch).logprobs.detach() - batch.sampler_logprobs)[batch.response_mask].abs()
        assert gap.mean() < 0.02
        if products_know_no_neighbors():
            assert gap.max() < 5e-6


# ---------------------------------------------------------------- supported configs


REFUSED = {
    "architecture gemma3_text": lambda: tiny_gemma().config,
    "architecture gpt2": lambda: tiny_gpt2().config,
    "activation gelu": lambda: LlamaConfig(**SMALL, hidden_act="gelu"),
    "other layers than attention": lambda: Qwen3Config(
        **SMALL, **WINDOW, layer_types=["sliding_attention", "chunked_attention"]
    ),
    "rotary scaling dynamic": lambda: LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_unsupported_configs_have_a_fallback_reason(reason):
    assert find_fallback_reason(REFUSED[reason]()) == reason


def test_sliding_layers_follow_the_config():
    """Qwen has windows in its upper layers if it uses them at all, Mistral in all layers."""
    sliding = {"use_sliding_window": True, "sliding_window": 16}
    layers = {
        (False, False): [Qwen2Config(**SMALL), Qwen3Config(**SMALL, sliding_window=16, max_window_layers=0)],
        (False, True): [Qwen2Config(**SMALL, **sliding, max_window_layers=1)],
        (True, True): [MistralConfig(**SMALL, sliding_window=16), Qwen2Config(**SMALL, **sliding, max_window_layers=0)],
    }
    layers[False, False] += [MistralConfig(**SMALL, sliding_window=None), Qwen2Config(**SMALL, **sliding)]
    for expected, configs in layers.items():
        for config in configs:
            assert find_sliding_layers(config) == expected
            assert find_fallback_reason(config) == ""


@pytest.mark.parametrize("name", ["mistral, a window", "qwen2, a window above", "qwen3, biases, a window above"])
def test_window_hides_only_tokens_further_back(name):
    """The first response token is predicted from the end of the prompt. The prompts have five, nine and two tokens."""
    model, batch = model_of(name), batch_of()
    near = Policy(model, character_tokenizer()).score(batch).logprobs.detach()
    model.config.sliding_window = 10**6
    whole = Policy(model, character_tokenizer()).score(batch).logprobs.detach()
    same = near == whole
    starts = torch.tensor([len(batch.prompt_ids[p]) for p in batch.prompt_indices])
    read = starts[:, None] + torch.arange(near.shape[1])
    assert same[batch.response_mask & (read <= WINDOW["sliding_window"])].all()
    assert not same[batch.response_mask & (read > WINDOW["sliding_window"])].any()


@pytest.mark.parametrize("name", ["llama", "mistral, a window", "qwen3, biases, a window above"])
def test_unsupported_models_and_the_engine_setting_use_transformers(name):
    model = model_of(name)
    assert Policy(tiny_gpt2(), character_tokenizer()).decoder is None
    detour, ours = Policy(model, character_tokenizer(), engine="transformers"), Policy(model, character_tokenizer())
    assert detour.decoder is None
    batch = batch_of()
    torch.testing.assert_close(detour.score(batch).logprobs, ours.score(batch).logprobs, rtol=0, atol=1e-5)
    samples = [
        NativeSampler(policy=p).generate(CountDigits().sample(0, 3), Sampling(4, max_tokens=12, seed="s"))
        for p in (detour, ours)
    ]
    tokens = [[[c.token_ids for c in g.completions] for g in groups] for groups in samples]
    assert tokens[0] == tokens[1]


def test_saved_model_has_the_trained_weights(tmp_path):
    policy, batch = Policy(model_of("llama, untied"), character_tokenizer()), batch_of()
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(0.05)
    policy.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(
        plain_logprobs(loaded, batch), policy.score(replace(batch)).logprobs[batch.response_mask], rtol=0, atol=2e-5
    )


# ---------------------------------------------------------------- sharded layers

SHARDED = """
import itertools
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from architectures import batch_of, model_of
from conftest import character_tokenizer
from pellucid.policy.policy import Policy

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2,))
for name, recompute in itertools.product(sys.argv[1:], (False, True)):
    print(name, recompute)
    whole, parted = (
        Policy(model_of(name), character_tokenizer(), gradient_checkpointing=recompute) for _ in range(2)
    )
    parted.decoder.disable_cast_copies()
    for layer in parted.decoder.layers:
        fully_shard(layer, mesh=mesh)
    scores = [policy.score(batch_of()) for policy in (whole, parted)]
    torch.testing.assert_close(scores[1].logprobs, scores[0].logprobs, rtol=0, atol=1e-6)
    for each in scores:
        each.logprobs.square().sum().backward()
    sharded = 0
    for name, p in parted.model.named_parameters():
        expected = whole.model.get_parameter(name).grad
        grad = p.grad.full_tensor() if ".layers." in name else p.grad
        sharded += p.numel() > p._local_tensor.numel() if ".layers." in name else 0
        torch.testing.assert_close(grad, expected, rtol=0, atol=2e-5 * float(expected.norm()))
    assert sharded == sum(".layers." in name for name, _ in whole.model.named_parameters())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_layers_sharded_over_two_processes_match_whole_layers(tmp_path):
    """FSDP2 gathers parameters around the forward pass of a layer. Log-probs and gradients match a whole model."""
    (tmp_path / "two.py").write_text(SHARDED)
    done = in_two_processes(tmp_path / "two.py", "qwen2", "qwen3")
    assert [done.stdout.count(name) for name in ("qwen2", "qwen3")] == [4, 4]


# ---------------------------------------------------------------- precision


def test_residual_stream_of_a_bf16_decoder_is_fp32(monkeypatch):
    seen = set()

    def before(layer, stream, rotary, shape):
        seen.update((stream.hidden.dtype, stream.add_pending().dtype))
        return compute_qkv(layer, stream, rotary, shape)

    def after(layer, hidden, attended, shape):
        seen.add(hidden.dtype)
        return compute_layer_output(layer, hidden, attended, shape)

    decoder = decoder_of(model_of("llama"), torch.bfloat16)
    monkeypatch.setattr(decoders, "compute_qkv", before)
    monkeypatch.setattr(decoders, "compute_layer_output", after)
    compute_hidden_states(decoder, batch_of())
    assert seen == {torch.float32}


@torch.no_grad()
def test_bf16_norm_rounds_once():
    """The exact norm is in fp64. If the input were rounded too, a third of all numbers would differ."""
    x, weight = torch.randn(50, 64), torch.rand(64)
    exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt() * weight.double()
    assert (apply_rms_norm(x, weight, 0.0, torch.bfloat16) != exact.bfloat16()).double().mean() < 0.01
    assert (apply_rms_norm(x.bfloat16(), weight, 0.0, torch.bfloat16) != exact.bfloat16()).double().mean() > 0.2
    more = torch.randn(50, 64).bfloat16()
    for by in (ops, *filter(None, [native.load_kernels()[0]])):  # the sum of both is not rounded
        together, ours = by.add_norm_forward(x - more, more, weight, 0.0)
        torch.testing.assert_close(together, x)
        assert (ours != exact.bfloat16()).double().mean() < 0.01


def test_rotary_angles_are_exact_at_high_positions():
    """At position 100 angles in bf16 would be off by a quarter of a radian."""
    decoder = decoder_of(model_of("llama"), torch.bfloat16)
    positions = torch.arange(128)
    cos, sin = decoder.compute_rotary(positions)
    size = decoder.shape.head_size
    for i in range(size // 2):
        angles = positions.double() * 10000.0 ** (-2 * i / size)
        for measured, expected in ((cos[:, 0, i], angles.cos()), (sin[:, 0, i], -angles.sin())):
            torch.testing.assert_close(measured.double(), expected, rtol=0, atol=2**-8)


ROPES = [
    *({"rope_type": "default", "rope_theta": theta} for theta in (1e4, 1e5, 5e5, 1e6)),
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    LLAMA3,
    {**LLAMA3, "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192},
]


@pytest.mark.slow
@pytest.mark.parametrize("rope", [ROPES[2], ROPES[-1]], ids=str)
@torch.no_grad()
def test_logits_at_high_positions_are_as_close_to_fp64_as_transformers(rope):
    """Positions start at 1,900. The fp64 model has the fp32 frequencies that it was trained with. Other frequencies, as
    close to the formula, would raise the error to 1.4e-4."""
    shape = {**SMALL, "max_position_embeddings": 4096, "head_dim": 64, "rope_parameters": rope}
    model, ids = LlamaForCausalLM(LlamaConfig(**shape)).eval(), torch.randint(VOCAB, (1, 2000))
    completion = Completion(tuple(ids[0, 1900:].tolist()), (0.0,) * 100, "", True)
    batch = collate([Group(Prompt("p", "?"), tuple(ids[0, :1900].tolist()), (completion,))])
    hidden, head = compute_hidden_states(decoder_of(model), batch)
    ours, theirs = hidden @ head.tensor.T, model(ids).logits[0, 1899:-1]
    exact = model.double()(ids).logits[0, 1899:-1]
    assert (theirs - exact).abs().max() < 2e-5
    assert (ours - exact).abs().max() < 2e-5


def test_updated_weights_of_a_frozen_reference_are_used():
    """A moving reference has no parameter that requires a gradient."""
    reference, policy = (Policy(model_of("llama"), character_tokenizer(), torch.bfloat16) for _ in range(2))
    reference.model.requires_grad_(False)
    batch = batch_of()
    before = reference.score(batch).logprobs
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    reference.update_weights(policy.weights(), 0.0)
    torch.testing.assert_close(reference.score(batch).logprobs, policy.score(batch).logprobs.detach(), rtol=0, atol=0)
    assert (reference.score(batch).logprobs - before).abs().max() > 1e-2


# ---------------------------------------------------------------- more fallbacks to transformers

LAYERS = "other layers than attention"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: LlamaConfig(**SMALL, sliding_window=4, layer_types=["sliding_attention"] * 2), LAYERS),
        (lambda: Qwen2Config(**SMALL, layer_types=["full_attention", "sliding_attention"]), LAYERS),
        (
            lambda: LlamaConfig(
                **SMALL, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            ),
            "partial rotary",
        ),
        (lambda: LlamaConfig(**SMALL, quantization_config={"quant_method": "fp8"}), "quantized weights"),
    ],
)
def test_one_unsupported_part_of_a_config_is_a_fallback_reason(config, reason):
    assert find_fallback_reason(config()) == reason


@pytest.mark.parametrize("rows", [8, 16])
def test_completions_with_transformers_do_not_depend_on_rows_in_flight(rows):
    policy = Policy(model_of("llama"), character_tokenizer(), engine="transformers")
    prompts = CountDigits().sample(0, 4)
    few, many = (
        NativeSampler(n, policy).generate(prompts, Sampling(4, max_tokens=12, seed="s")) for n in (rows, 10**4)
    )
    assert [[c.token_ids for c in g.completions] for g in few] == [[c.token_ids for c in g.completions] for g in many]


def test_gradient_checkpointing_does_not_change_completions():
    """transformers disables the KV cache if it recomputes activations, and scoring leaves the model in this state."""
    plain, recomputing = (
        Policy(model_of("llama"), character_tokenizer(), gradient_checkpointing=on, engine="transformers")
        for on in (False, True)
    )
    recomputing.score(batch_of()).logprobs.sum().backward()
    prompts = CountDigits().sample(0, 3)
    one, other = (
        NativeSampler(policy=p).generate(prompts, Sampling(4, max_tokens=12, seed="s")) for p in (plain, recomputing)
    )
    assert [[c.token_ids for c in g.completions] for g in one] == [[c.token_ids for c in g.completions] for g in other]


def test_norms_use_the_eps_of_the_config():
    """The eps is large enough to change the logits, in scoring and in decoding."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL, rms_norm_eps=0.1)).eval()
    decoder, batch = decoder_of(model), batch_of()
    hidden, head = compute_hidden_states(decoder, batch)
    torch.testing.assert_close(hidden @ head.tensor.T, plain_logits(model, batch), rtol=0, atol=2e-5)
    flight, check = DecodeBatch(decoder, 4), Check(model)
    check.histories = [[1, 2, 3]] * 2
    check.compare(flight.admit([[1, 2, 3]], 2))
    check.histories = [[1, 2, 3, 4], [1, 2, 3, 5]]
    check.compare(flight.step(torch.tensor([4, 5])))


# ---------------------------------------------------------------- rotary frequencies that depend on the length

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
BY_LENGTH = {"dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "longrope": LONGROPE}


@pytest.mark.parametrize(("kind", "most"), [("dynamic", 128), ("longrope", 32)])
@torch.no_grad()
def test_context_length_stops_before_rotary_frequencies_change(kind, most):
    """In longer batches log-probs of a row change by nats with the longest row. Up to this length they do not."""
    policy = Policy(
        LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=BY_LENGTH[kind])).eval(), character_tokenizer()
    )
    assert policy.decoder is None
    assert policy.context_length == most
    prompts = CountDigits().sample(0, 4)
    longest_prompt = max(len(policy.encode(prompt)) for prompt in prompts)
    sampling = Sampling(4, max_tokens=most - longest_prompt, seed="0/0")
    groups = NativeSampler(policy=policy).generate(prompts, sampling)
    batch, alone = collate(groups), collate(groups[:1])
    scored = policy.score(batch).logprobs
    assert (scored - batch.sampler_logprobs)[batch.response_mask].abs().max() < 1e-4
    rows, length = alone.response_mask.shape
    assert (policy.score(alone).logprobs - scored[:rows, :length])[alone.response_mask].abs().max() < 1e-4
    with pytest.raises(UserError, match=r"shorten the prompts or sampler\.max_tokens"):
        NativeSampler(policy=policy).generate(prompts, replace(sampling, max_tokens=most - longest_prompt + 1))


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_scoring_a_row_longer_than_the_context_raises(kind):
    policy = Policy(
        LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=BY_LENGTH[kind])).eval(), character_tokenizer()
    )
    most = policy.context_length
    for response in (most - 3, most - 2):
        completion = Completion((1,) * response, (0.0,) * response, "", True)
        batch = collate([Group(Prompt("p", "?"), (1, 2, 3), (completion,))])
        if response + 3 <= most:
            assert bool(policy.score(batch).logprobs.isfinite().all())
        else:
            with pytest.raises(
                UserError, match=f"a row of {most + 1} tokens exceeds the context length of this model, {most}"
            ):
                policy.score(batch)


def test_context_length_is_the_shortest_of_all_layer_types():
    config = LlamaConfig(**SMALL)
    config.rope_parameters = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}
    assert get_context_length(config) == 32
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    assert get_context_length(config) == SMALL["max_position_embeddings"]

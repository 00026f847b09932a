"""Tests of the memory plan against a published calculation, the bytes that autograd keeps, and the bytes of a model."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    Qwen3MoeConfig,
    T5Config,
)

from architectures import SMALL
from conftest import VOCAB, character_tokenizer, kernel_llama, make_policy, mostly_slow, tiny_llama
from pellucid import cli
from pellucid.algorithm.batch import collate
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.config import Config, EvaluateConfig, PolicyConfig, SamplerConfig
from pellucid.distributed.settings import RuntimeConfig
from pellucid.models import attention
from pellucid.policy.policy import Policy
from pellucid.training import memory
from pellucid.types import Completion, Group, Prompt
from pellucid.utils import hardware
from runs import answered

GIB = 2**30 / 1e9
ONE_TOKEN = memory.BackwardSizes(1, 1, 1)


def configured(dtype="float32", engine="auto", **algorithm):
    return Config(
        policy=PolicyConfig(dtype=dtype, engine=engine),
        sampler=SamplerConfig(max_tokens=32),
        algorithm=GRPOConfig(prompts_per_step=2, group_size=4, **algorithm),
    )


def with_engine(cfg, runtime):
    return replace(cfg, runtime=runtime)


@pytest.fixture
def folder(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("devices", "gib"), [(1, 51.8), (2, 31.7), (4, 21.6), (6, 18.2)])
def test_zero_2_plan_of_a_3b_model_matches_published_calculation(devices, gib):
    """The published calculation has whole weights and a whole reference in bf16, and 14 bytes per parameter that are
    sharded. It contradicts the table of its own source. The plan adds 2 bytes for fp32 gradients, 4 bytes for the fp32
    masters of the transformers reference, and a bucket."""
    model = memory.ModelFacts(SimpleNamespace(model_type="other"), 3_090_000_000, 3_090_000_000)
    cfg = with_engine(configured(kl_coef=0.02, dtype="bfloat16", engine="transformers"), RuntimeConfig("deepspeed"))
    state = memory.estimate_training_state(model, cfg, devices)
    more = 3.09 * (2 / devices + 4) + 0.2
    assert (sum(state.values()) - more) / GIB == pytest.approx(gib, abs=0.1)


def test_planned_state_equals_bytes_of_policy_and_optimizer(folder):
    model = memory.describe_model(PolicyConfig(str(folder)))
    policy = make_policy()
    held = sum(p.numel() * p.element_size() for p in policy.model.parameters())
    optimizer = torch.optim.AdamW(policy.model.parameters())
    for p in policy.model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    moments = sum(x.numel() * 4 for state in optimizer.state.values() for x in state.values() if x.ndim)
    state = memory.estimate_training_state(model, configured())
    assert state["weights"] * 1e9 == pytest.approx(held)
    assert state["gradients"] * 1e9 == pytest.approx(held)
    assert state["optimizer"] * 1e9 == pytest.approx(moments)
    assert state["reference"] == 0
    assert memory.estimate_training_state(model, configured(kl_coef=0.1))["reference"] * 1e9 == pytest.approx(held)


def test_reference_counts_the_same_with_auto_and_with_a_named_device(folder):
    model, cfg = memory.describe_model(PolicyConfig(str(folder))), configured(kl_coef=0.1)
    cfg = replace(cfg, policy=replace(cfg.policy, device="cpu"))
    with_auto = memory.estimate_training_state(model, cfg)["reference"]
    named = replace(cfg, policy=replace(cfg.policy, reference="cpu"))
    assert memory.estimate_training_state(model, named)["reference"] == with_auto > 0


def test_trained_parameters_of_an_adapter_exclude_the_base(folder):
    adapted = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=4, target_modules="all-linear"))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert memory.describe_model(PolicyConfig(str(folder), lora=4)).trained_count == trained


def kept_by_autograd(policy, batch):
    """Return the bytes that a forward pass saves for its backward pass, without weights and attention masks."""
    copies = [part.get_cast_copy() for part in policy.decoder.list_cast_weights()]
    weights = {p.untyped_storage().data_ptr() for p in (*policy.weights().values(), *copies)}
    saved = {}

    def pack(x):
        storage = x.untyped_storage()
        is_mask = x.dim() == 4 and x.shape[1] == 1
        if storage.data_ptr() not in weights and not is_mask:
            saved[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden, _ = policy.compute_hidden_states(batch)
    assert hidden.requires_grad
    return sum(storage.nbytes() for storage in saved.values())


def batch_of(prompt, response, rows):
    completions = tuple(
        Completion(tuple((i + g) % 20 for i in range(response)), (-1.0,) * response, "", True) for g in range(rows)
    )
    return collate([Group(Prompt("p", "?"), tuple(range(prompt)), completions)])


WIDTHS = [
    (torch.float32, 4),
    pytest.param(
        *(torch.bfloat16, 2),
        marks=pytest.mark.skipif(
            attention.load_attention_kernel()[0] is None, reason="no compiled attention on this CPU"
        ),
    ),
]


@pytest.mark.parametrize(("dtype", "wide"), WIDTHS)
def test_planned_activations_match_bytes_kept_by_autograd(dtype, wide):
    policy = make_policy(dtype=dtype)
    batch = batch_of(prompt=8, response=41, rows=8)  # the last token of a response is not an input
    tokens = 8 + 8 * 40
    expected = tokens * policy.model.config.num_hidden_layers * memory.estimate_layer_bytes(policy.model.config, wide)
    assert kept_by_autograd(policy, batch) == pytest.approx(expected, rel=0.25 if wide == 4 else 0.15)


@pytest.mark.parametrize(("dtype", "wide"), WIDTHS)
def test_plan_with_checkpointing_matches_bytes_kept_by_autograd(dtype, wide):
    """The plan also counts one recomputed layer, which autograd does not keep."""
    policy = make_policy(dtype=dtype, gradient_checkpointing=True)
    batch = batch_of(prompt=8, response=41, rows=8)
    cfg = configured(dtype=str(dtype).removeprefix("torch."))
    cfg = replace(cfg, policy=replace(cfg.policy, gradient_checkpointing=True))
    planned = memory.estimate_activation_bytes(policy.model.config, cfg, True, ONE_TOKEN)
    layer = memory.estimate_layer_bytes(policy.model.config, wide)
    assert kept_by_autograd(policy, batch) / (8 + 8 * 40) == pytest.approx(planned - layer, rel=0.25)


def test_fsdp2_shards_state_and_samples_from_whole_weights(folder):
    """A model with P parameters on four processes: each of them keeps a quarter of the fp32 state. While sampling it
    has the gathered weights too: 4 P bytes in fp32, 2 P in bf16."""
    model = memory.describe_model(PolicyConfig(str(folder)))
    cfg = replace(configured(kl_coef=0.1), runtime=RuntimeConfig("fsdp2"))
    cfg = replace(cfg, policy=replace(cfg.policy, device="cuda"))
    p = model.parameter_count / 1e9
    expected = {"weights": p, "gradients": p, "optimizer": 2 * p, "reference": p}  # a quarter of 4, 4, 8 and 4 P bytes
    half = replace(cfg, policy=replace(cfg.policy, dtype="bfloat16"))
    for settings, width in ((cfg, 4), (half, 2)):
        assert memory.estimate_training_state(model, settings, 4) == pytest.approx(expected)
        whole = replace(settings, runtime=RuntimeConfig("ddp"))
        sampling, unsharded = (memory.estimate_phases(model, each, 4)["sampling"] for each in (settings, whole))
        # While sampling there are no gradients. ddp holds masters, moments and the reference, and in bf16 a copy: 16 P
        # bytes in either dtype. fsdp2 holds a quarter of 16 P, and the gathered weights.
        assert sampling - (4 + width) * p == pytest.approx(unsharded - 16 * p)
    hybrid = replace(cfg, runtime=RuntimeConfig("fsdp2", shards=2))
    assert memory.estimate_training_state(model, hybrid, 4)["gradients"] == pytest.approx(2 * p)


def test_zero_3_shards_more_state_than_zero_2(folder):
    """A model with P parameters in fp32 on four processes. ZeRO-2 keeps 4 P bytes of weights, a copy of the matrices
    that the decoder joins, and a quarter of 4 P + 12 P. ZeRO-3 keeps a quarter of the weights, which are its masters.
    """
    model = memory.describe_model(PolicyConfig(str(folder)))
    p, bucket = model.parameter_count / 1e9, 0.2
    two, three = (
        memory.estimate_training_state(
            model, with_engine(configured(kl_coef=0.1), RuntimeConfig("deepspeed", zero_stage=n)), 4
        )
        for n in (2, 3)
    )
    joined = sum(
        parameter.numel()
        for name, parameter in tiny_llama().named_parameters()
        if any(f"{part}_proj.weight" in name for part in ("q", "k", "v", "gate", "up"))
    )
    weights = 4 * p + 4 * joined / 1e9
    assert two == pytest.approx({"weights": weights, "gradients": p + bucket, "optimizer": 3 * p, "reference": 4 * p})
    assert three == pytest.approx({"weights": p, "gradients": p + bucket, "optimizer": 2 * p, "reference": p})
    away = replace(with_engine(configured(), RuntimeConfig("deepspeed")), optimizer=AdamWConfig(offload=True))
    away = replace(away, policy=replace(away.policy, device="cuda"))
    assert memory.estimate_training_state(model, away, 4) == pytest.approx(
        two | {"gradients": bucket, "optimizer": 0, "reference": 0}
    )


def test_loading_needs_the_shards_or_the_whole_model(folder):
    """A model with P parameters in fp32 on four processes. An engine that reads the model shard by shard needs a
    quarter of 4 P bytes for the policy and the same for the reference; ZeRO-3 adds gradients, moments, a bucket and one
    embedding. Other engines first load all 4 P of the policy, and then the whole reference beside a quarter of the
    policy."""
    model = memory.describe_model(PolicyConfig(str(folder)))
    p, libraries, embedding = model.parameter_count / 1e9, memory.LIBRARIES_GB, 4 * VOCAB * 32 / 1e9

    def start(runtime, engine="auto", **algorithm):
        cfg = with_engine(configured(engine=engine, **algorithm), runtime)
        return memory.estimate_phases(model, cfg, 4)["start"] - libraries

    fsdp2, zero_3 = RuntimeConfig("fsdp2"), RuntimeConfig("deepspeed", zero_stage=3)
    assert start(fsdp2) == pytest.approx(p)
    assert start(fsdp2, kl_coef=0.1) == pytest.approx(2 * p)
    assert start(RuntimeConfig("fsdp2", shards=2)) == pytest.approx(2 * p)
    assert start(zero_3) == pytest.approx(4 * p + 0.2 + embedding)
    assert start(zero_3, kl_coef=0.1) == pytest.approx(5 * p + 0.2 + embedding)
    for runtime, engine in (
        (RuntimeConfig("deepspeed", zero_stage=2), "auto"),
        (fsdp2, "transformers"),
        (zero_3, "transformers"),
    ):
        assert start(runtime, engine) == pytest.approx(4 * p)
        assert start(runtime, engine, kl_coef=0.1) == pytest.approx(5 * p)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "fsdp2 and ZeRO-3 read the model shard by shard. Before ZeRO-2 shards the state, each process loads"),
        (("--policy.engine", "transformers"), "Before fsdp2, ZeRO-2 or ZeRO-3 shards the state, each process loads"),
    ],
)
def test_plan_says_which_engines_load_the_whole_model(words, said, folder, tmp_path, capsys):
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'[policy]\nmodel = "{folder}"\n')
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--plan", str(recipe), *words])
    assert said in " ".join(capsys.readouterr().out.split())


def test_micro_batches_shards_and_offloading_reduce_memory(folder):
    model = memory.describe_model(PolicyConfig(str(folder)))

    def whole(cfg, **settings):
        return sum(memory.estimate_parts(model, cfg, **settings).values())

    assert whole(configured(micro_batch=2)) < whole(configured())
    fsdp2 = with_engine(configured(), RuntimeConfig("fsdp2"))
    assert whole(fsdp2, processes=2) < whole(fsdp2)
    offloaded = replace(configured(), optimizer=AdamWConfig(offload=True))
    on_gpu = replace(offloaded, policy=replace(offloaded.policy, device="cuda"))
    assert memory.estimate_training_state(model, on_gpu)["optimizer"] == 0
    assert memory.estimate_training_state(model, offloaded)["optimizer"] * 1e9 == 16 * model.parameter_count


def test_the_plan_is_a_table(folder, tmp_path, capsys):
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'[policy]\nmodel = "{folder}"\n')
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--plan", str(recipe), "--algorithm.group-size", "4"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "activations" in printed
    assert printed.count("\n") > 17
    assert "ZeRO-3" in printed


def verdict_on(recipe, capsys, *words):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--plan", str(recipe), *words])
    assert ended.value.code == 0
    return capsys.readouterr().out.rstrip().rpartition("\n")[2]


@pytest.mark.parametrize("lacking", mostly_slow([0.4, 0.98, 0.7, 0.2, 0.1, 0.05], every=6))
def test_advice_of_the_verdict_leads_to_a_run_that_fits(lacking, tmp_path, capsys, monkeypatch):
    """Apply the advice as it is printed: the next verdict says that the run fits."""
    shape = Path(__file__).parents[2] / "recipes" / "shapes" / "qwen2.5-3b"
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'[policy]\nmodel = "{shape}"\ndtype = "bfloat16"\n[sampler]\nmax_tokens = 2000\n')
    fits = verdict_on(recipe, capsys)
    needed = float(re.search(r"about ([\d.]+) GB are needed", fits)[1])
    monkeypatch.setattr(hardware, "get_available_memory_gb", lambda _: 1.01 * needed / memory.MEMORY_SHARE)
    assert verdict_on(recipe, capsys).startswith("Verdict for this machine: fits, about")
    monkeypatch.setattr(hardware, "get_available_memory_gb", lambda _: lacking * needed / memory.MEMORY_SHARE)
    verdict = verdict_on(recipe, capsys)
    assert verdict.startswith("Verdict for this machine: does not fit, about")
    if "It fits with" not in verdict:
        assert lacking == 0.05
        assert "choose a smaller model or a larger machine" in verdict
        return
    advice = verdict.partition("It fits with ")[2].rpartition(": ")[0]
    words = [word for setting in advice.split(", ") for word in ("--" + setting).split(" = ")]
    assert verdict_on(recipe, capsys, *words).startswith("Verdict for this machine: fits, about")


def test_advice_for_an_adapter_turns_offloading_off(folder, tmp_path, capsys, monkeypatch):
    """Offloading gains nothing with an adapter, so the memory in the advice is that without it."""
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'[policy]\nmodel = "{folder}"\n[optimizer]\noffload = true\n')
    monkeypatch.setattr(memory, "estimate_peak", lambda model, cfg, processes=1: 9.0 - 8.0 * (cfg.policy.lora > 0))
    monkeypatch.setattr(hardware, "get_available_memory_gb", lambda _: 2.0)
    assert "It fits with policy.lora = 16, optimizer.offload = false: 1.0 GB" in verdict_on(recipe, capsys)


def test_vllm_beside_the_trainer_is_counted(folder, capsys):
    """vLLM counts with its weights in the compute dtype and its cache, servers with nothing: their copy is on disk."""
    model = memory.describe_model(PolicyConfig(str(folder)))
    size = sum(p.numel() for p in tiny_llama().parameters())
    for dtype, wide in (("bfloat16", 2), ("float32", 4)):
        alone = configured(dtype=dtype)
        alone = replace(alone, policy=replace(alone.policy, device="cuda"))  # the CUDA allocator reuses memory
        for settings, more in (
            ({"cache_gb": 3.0}, {"vLLM": wide * size / 1e9 + 3.0 + 1.0}),
            ({"urls": ("http://a",)}, {}),
            ({"urls": ("http://a",), "ahead": 1}, {}),
        ):
            cfg = replace(alone, sampler=replace(alone.sampler, name="vllm", **settings))
            found, without = memory.estimate_parts(model, cfg), memory.estimate_parts(model, alone)
            assert found == pytest.approx(without | more)
            with_vllm, native = (memory.estimate_phases(model, each)["update"] for each in (cfg, alone))
            assert with_vllm == pytest.approx(native + sum(more.values()))
    recipe = folder / "r.toml"
    recipe.write_text(f'[policy]\nmodel = "{folder}"\n[sampler]\nname = "vllm"\ncache_gb = 2.5\n')
    served = "Servers sample; each of them needs 0.0 GB of weights and its own --cache-gb"
    for words, engines, says in (
        ([], ["ddp"], "2.5 GB of keys and values (sampler.cache_gb) beside the trainer"),
        (["--sampler.urls", "http://a:1"], ["ddp", "fsdp2", "ZeRO-2", "ZeRO-3"], served),
    ):
        with pytest.raises(SystemExit):
            cli.main(["doctor", "--plan", str(recipe), *words])
        printed = capsys.readouterr().out
        for devices in (1, 2):
            rows = [row.split(" | ") for row in printed.splitlines() if row.startswith(f"| {devices} |")]
            assert [row[1] for row in rows] == engines
        assert says in " ".join(printed.split())


def test_plan_of_a_missing_model_exits_with_an_error_that_names_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # otherwise the hub is asked repeatedly
    recipe = tmp_path / "r.toml"
    recipe.write_text('[policy]\nmodel = "nowhere/at-all"\n')
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--plan", str(recipe)])
    assert ended.value.code == 2
    assert "nowhere/at-all" in capsys.readouterr().err


MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": VOCAB}
SEEING = {**SMALL, "head_dim": 8}
SEES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
PARTLY_UNKNOWN = {
    "mamba": (lambda: MambaConfig(**MAMBA), "layers without attention"),
    "mamba2": (
        lambda: Mamba2Config(**MAMBA, num_heads=8, head_dim=8, n_groups=1, chunk_size=8),
        "layers without attention",
    ),
    "lfm2": (lambda: Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), "layers without attention"),
    "qwen3_moe": (
        lambda: Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
        "experts",
    ),
}


def planned(config, tmp_path, capsys):
    """Return what `doctor --plan` prints for a model with this config."""
    config.save_pretrained(tmp_path)
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'[policy]\nmodel = "{tmp_path}"\n')
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--plan", str(recipe)])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", PARTLY_UNKNOWN)
def test_plan_shows_unknown_for_parts_that_it_cannot_estimate(name, tmp_path, capsys):
    config, reason = PARTLY_UNKNOWN[name]
    printed = planned(config(), tmp_path, capsys)
    rows = [row.split(" | ") for row in printed.splitlines() if row.startswith("| ")]
    activations = rows[0].index("activations")
    assert {row[activations] for row in rows[2:]} == {"unknown"}
    assert all("at least" in row[-1] for row in rows[2:])
    assert f"The part of {name}'s memory that depends on its layers is unknown ({reason})" in printed
    assert "Sampling keeps unknown GB" in printed


def test_plan_of_a_vision_model_counts_its_text_model(tmp_path, capsys):
    """Gemma 3 has an image encoder; all layers of its text model have attention."""
    config = Gemma3Config(text_config=Gemma3TextConfig(**SEEING), vision_config=SEES, mm_tokens_per_image=4)
    printed = planned(config, tmp_path, capsys)
    assert "unknown" not in printed
    text = memory.estimate_activation_bytes(Gemma3TextConfig(**SEEING), configured(), False, ONE_TOKEN)
    assert memory.estimate_activation_bytes(config, configured(), False, ONE_TOKEN) == text > 0


def test_plan_of_a_noncausal_model_is_an_error_of_one_line(tmp_path, capsys):
    T5Config().save_pretrained(tmp_path)
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'[policy]\nmodel = "{tmp_path}"\n')
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--plan", str(recipe)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


# ---------------------------------------------------------------- phases, and what gradient checkpointing saves


def planned_run(tokens=512, **settings):
    """Return the config of a run in bfloat16 on the CPU. Its 8 rows are one micro-batch, or two if micro_batch is 4."""
    cfg = configured(dtype="bfloat16", **settings)
    cfg = replace(cfg, policy=replace(cfg.policy, device="cpu"), sampler=SamplerConfig(max_tokens=tokens))
    return replace(cfg, evaluate=EvaluateConfig(every=0))


def kernel_model(tmp_path):
    kernel_llama().save_pretrained(tmp_path)
    return memory.describe_model(PolicyConfig(str(tmp_path)))


def test_gradients_and_activations_add_up_from_the_second_micro_batch_on(tmp_path):
    """With a single micro-batch only the larger of the two counts."""
    model = kernel_model(tmp_path)
    for micro_batch, adds in ((0, max), (4, lambda *both: sum(both))):
        cfg = planned_run(micro_batch=micro_batch)
        cfg = replace(cfg, policy=replace(cfg.policy, device="cuda"))  # the CUDA allocator reuses memory of sampling
        found = memory.estimate_parts(model, cfg)
        passing = found["activations"] + found["logits"]
        steady = found["weights"] + found["optimizer"] + found["libraries"]
        expected = steady + adds(found["gradients"], passing)
        assert memory.estimate_phases(model, cfg)["update"] == pytest.approx(expected)


def test_checkpointing_saving_is_the_difference_of_two_plans(tmp_path):
    model, cfg = kernel_model(tmp_path), planned_run(tokens=100_000)
    on = replace(cfg, policy=replace(cfg.policy, gradient_checkpointing=True))
    saved = memory.estimate_peak(model, cfg) - memory.estimate_peak(model, on)
    assert saved > 0.1
    expected = (pytest.approx(saved), pytest.approx(memory.estimate_peak(model, cfg)))
    assert memory.estimate_checkpointing_saving(model, cfg) == expected
    assert memory.estimate_checkpointing_saving(model, on) == expected
    assert f"would save {saved:.1f} of {memory.estimate_peak(model, cfg):.1f} GB" in memory.describe_checkpointing(
        model, cfg
    )
    assert "set policy.gradient_checkpointing, which saves" in memory.suggest_memory_remedy(model, cfg)
    assert "gradient_checkpointing" not in memory.suggest_memory_remedy(model, on)


def test_checkpointing_is_not_recommended_if_it_saves_nothing(tmp_path, capsys):
    """It saves nothing if answers are short."""
    model, short = kernel_model(tmp_path), planned_run(tokens=8)
    assert "saves less than" in memory.describe_checkpointing(model, short)
    assert memory.suggest_memory_remedy(model, short) == "set a lower sampler.max_tokens"
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'[policy]\nmodel = "{tmp_path}"\ngradient_checkpointing = true\n')
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--plan", str(recipe), "--sampler.max-tokens", "8", "--policy.dtype", "bfloat16"])
    said = " ".join(capsys.readouterr().out.split())
    assert "policy.gradient_checkpointing saves less than 2% of the memory here: leave it out" in said


def test_out_of_memory_error_omits_checkpointing_if_it_saves_nothing(recipe, tmp_path, monkeypatch):
    def full(*_):
        raise MemoryError("cannot allocate memory")

    monkeypatch.setattr(Policy, "score", full)
    said = io.StringIO()
    with redirect_stderr(said):
        assert answered("train", recipe, "--run", tmp_path / "run", "--evaluate.every", 0) == 2
    [line] = [line for line in said.getvalue().splitlines() if line.startswith("pellucid: ")]
    assert line == "pellucid: memory ran out with one row in a forward pass: set a lower sampler.max_tokens"

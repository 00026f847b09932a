"""Tests of time estimates: operations against torch's counts, schedules against a loop, lines against hand results."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import character_tokenizer
from pellucid import cli, config
from pellucid.algorithm.batch import collate
from pellucid.algorithm.metrics import StageClock
from pellucid.policy import policy
from pellucid.rollout.native import NativeSampler
from pellucid.training import memory, run, time_estimate
from pellucid.training.preflight import describe_loaded_model
from pellucid.training.time_estimate import (
    REACHED_SHARE,
    FirstLook,
    Lengths,
    Remaining,
    RunTimes,
    Speed,
    TimeModel,
    Tokens,
    count_remaining,
    count_tokens,
    describe_measured_time,
    describe_planned_time,
    describe_time_after_first_look,
    describe_work,
    format_run_time,
    format_seconds,
)
from pellucid.types import Completion, Group, Prompt, Reward, Sampling
from runs import in_two_processes, train

VOCABULARY = 200
PROMPT_TOKENS, RESPONSE_TOKENS, PROMPTS, GROUP_SIZE = 7, 5, 2, 3
NO_READING = Speed(1 / REACHED_SHARE, float("inf"))
"""The speed of a device on which an operation takes a second, and reading takes no time."""


def settings(*arguments):
    return config.load_config(None, ["--policy.dtype", "float32", "--algorithm.micro_batch", "0", *arguments])


def load_policy(folder, tied=False, layers=2, **options):
    """Return a policy whose norms are below a percent of its weights."""
    model_config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=VOCABULARY - 1,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(model_config).save_pretrained(folder)
    character_tokenizer(size=VOCABULARY).save_pretrained(folder)
    loaded = policy.load_policy(str(folder), torch.device("cpu"), torch.float32, 1.0, **options)
    loaded.eos_ids = (-1,)
    return loaded


def make_group(index):
    rows = torch.randint(VOCABULARY - 1, (GROUP_SIZE, RESPONSE_TOKENS)).tolist()
    completions = tuple(Completion(tuple(ids), (-1.0,) * len(ids), "", finished=False) for ids in rows)
    return Group(Prompt(str(index), ""), tuple(range(index, index + PROMPT_TOKENS)), completions)


def count_products(compute):
    """Return torch's count of the operations with weights. Products in attention are batched, and not counted."""
    with FlopCounterMode(display=False) as counter:
        compute()
    counts = counter.get_flop_counts()["Global"]
    return sum(counts.get(operator, 0) for operator in (torch.ops.aten.mm, torch.ops.aten.addmm))


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"gradient_checkpointing": True}], ids=str)
def test_estimated_update_operations_match_torch(options, tmp_path):
    loaded, cfg = load_policy(tmp_path, **options), settings()
    batch = collate([make_group(i) for i in range(PROMPTS)])
    counted = count_products(lambda: loaded.score(batch).logprobs.sum().backward())
    work = describe_work(describe_loaded_model(loaded), cfg)._replace(attention=0.0)
    tokens = count_tokens(PROMPTS * GROUP_SIZE, PROMPTS, Lengths(PROMPT_TOKENS, RESPONSE_TOKENS))
    # Logits in fp32 are not kept for the backward pass.
    backward = work.count_backward(tokens, tokens.head, options.get("gradient_checkpointing", False))
    assert work.count_forward(tokens) + backward == pytest.approx(counted, rel=0.01)


def test_update_of_a_frozen_base_has_no_weight_gradients(tmp_path):
    """Uses transformers and peft: our decoder pads ranks with zeros, which is a large share in such a narrow model."""
    loaded = load_policy(tmp_path, layers=8, lora_rank=4, engine="transformers")
    batch = collate([make_group(i) for i in range(PROMPTS)])
    counted = count_products(lambda: loaded.score(batch).logprobs.sum().backward())
    work = describe_work(describe_loaded_model(loaded), settings("--policy.lora", "4"))._replace(attention=0.0)
    work = work._replace(layers=work.layers - work.adapters)  # a loaded model counts its adapters as parameters
    rows = PROMPTS * GROUP_SIZE
    tokens = Tokens(rows * (PROMPT_TOKENS + RESPONSE_TOKENS), rows * RESPONSE_TOKENS, 0)
    estimated = work.count_forward(tokens) + work.count_backward(tokens, tokens.head, checkpointing=False)
    # 1% are input gradients of the first layer's queries, keys and values: the frozen embedding needs none.
    assert estimated == pytest.approx(counted, rel=0.02)


def test_estimated_sampling_operations_match_torch(tmp_path):
    loaded = load_policy(tmp_path)
    prompts = [Prompt(str(i), f"{i}+345") for i in range(PROMPTS)]
    lengths = Lengths(len(loaded.encode(prompts[0])), RESPONSE_TOKENS)
    sampler = NativeSampler(4)
    sampler.sync(loaded, 0)
    counted = count_products(lambda: sampler.generate(prompts, Sampling(GROUP_SIZE, max_tokens=RESPONSE_TOKENS)))
    times = TimeModel(settings("--sampler.rows", "4"), describe_loaded_model(loaded), NO_READING, NO_READING)
    times.__dict__["work"] = times.work._replace(attention=0.0)
    assert times.estimate_sampling(PROMPTS, GROUP_SIZE, lengths) == pytest.approx(counted, rel=0.01)


def test_each_token_attends_to_those_before_it_and_to_itself():
    prompts, rows = 2, 6
    shared = sum(i + 1 for _ in range(prompts) for i in range(PROMPT_TOKENS))
    own = sum(PROMPT_TOKENS + i + 1 for _ in range(rows) for i in range(RESPONSE_TOKENS - 1))
    assert count_tokens(rows, prompts, Lengths(PROMPT_TOKENS, RESPONSE_TOKENS)) == Tokens(
        prompts * PROMPT_TOKENS + rows * (RESPONSE_TOKENS - 1), rows * RESPONSE_TOKENS, shared + own
    )


# A model without attention: a matrix of 100 weights, and an embedding of 10 x 4 that is also the head.
SMALL = memory.ModelFacts(
    SimpleNamespace(
        get_text_config=lambda: SimpleNamespace(vocab_size=10, hidden_size=4, tie_word_embeddings=True),
        model_type="small",
    ),
    parameter_count=140,
    trained_count=140,
)


@pytest.fixture
def small(monkeypatch):
    """Patch in facts about SMALL that its configuration does not contain."""
    monkeypatch.setattr(memory, "explain_unknown_memory", lambda _: "no attention")
    monkeypatch.setattr(memory, "predict_fallback_reason", lambda *_: "")


STEP = ["--algorithm.prompts_per_step", "2", "--algorithm.group_size", "4"]
LENGTHS = Lengths(3, 5)
FORWARD = 200 * (2 * 3 + 8 * 4) + 80 * (8 * 5)
BACKWARD = 2 * FORWARD + 80 * (8 * 5)  # logits are computed again
PROBE = 2 * FORWARD / 8  # before and after the update


@pytest.mark.parametrize(
    ("arguments", "dead", "scoring", "update"),
    [
        ([], 0.0, 0.0, PROBE + FORWARD + BACKWARD),
        ([], 0.5, 0.0, PROBE + (FORWARD + BACKWARD) / 2),
        (["--algorithm.entropy_coef", "0.1"], 0.5, 0.0, PROBE + FORWARD + BACKWARD),
        (["--algorithm.kl_coef", "0.1"], 0.0, 2 * FORWARD, PROBE + FORWARD + BACKWARD),
        (
            ["--algorithm.kl_coef", "0.1", "--algorithm.kl", "k3", "--algorithm.kl_in", "loss"],
            0.5,
            *(FORWARD, PROBE + FORWARD + BACKWARD),
        ),
        (
            ["--algorithm.kl_coef", "0.1", "--algorithm.kl", "exact", "--algorithm.kl_in", "loss"],
            0.0,
            *(0.0, PROBE + 2 * FORWARD + BACKWARD),
        ),
        (["--algorithm.epochs", "3"], 0.0, FORWARD, PROBE + 3 * (FORWARD + BACKWARD)),
        (["--algorithm.max_staleness", "2"], 0.0, FORWARD, PROBE + 2 * (FORWARD + BACKWARD)),
        # Two rows in a forward pass: the prompt of a group of four is computed twice.
        (
            ["--algorithm.micro_batch", "2"],
            0.0,
            *(0.0, 2 * (FORWARD + 1200) / 8 + FORWARD + BACKWARD + 3 * 1200),
        ),
    ],
)
def test_stage_estimates_match_hand_computation(small, arguments, dead, scoring, update):
    times = TimeModel(settings(*STEP, *arguments), SMALL, NO_READING, NO_READING)
    stages = times.estimate_stages(LENGTHS, dead)
    assert stages["scoring"] == pytest.approx(scoring)
    assert stages["update"] == pytest.approx(update)


def test_half_precision_logits_are_recomputed_unless_kept(small):
    cfg = replace(settings(*STEP), policy=replace(settings().policy, dtype="bfloat16"))
    times = TimeModel(cfg, SMALL, NO_READING, NO_READING)
    assert times.estimate_stages(LENGTHS)["update"] == pytest.approx(PROBE + 3 * FORWARD), "all 40 are kept"
    times.__dict__["work"] = times.work._replace(saved_logits=10.0)
    assert times.estimate_stages(LENGTHS)["update"] == pytest.approx(PROBE + 3 * FORWARD + 80 * 30)


def test_a_decode_step_takes_the_longer_of_reading_and_computing(small):
    cfg = settings(*STEP, "--sampler.rows", "4")
    reading = TimeModel(cfg, SMALL, Speed(1e30, 1.0), NO_READING)
    # Two batches of four rows, four decode steps each, which read 140 weights of 4 bytes.
    assert reading.estimate_round(LENGTHS) == pytest.approx(2 * 4 * 560)
    computing = TimeModel(cfg, SMALL, NO_READING, NO_READING)
    assert computing.estimate_round(LENGTHS) == pytest.approx(200 * 6 + 80 * 2 + 2 * 4 * 4 * (200 + 80))
    assert TimeModel(cfg, SMALL, NO_READING, NO_READING, 2).estimate_round(LENGTHS) == pytest.approx(
        computing.estimate_round(LENGTHS) / 2
    )
    # An evaluation of five prompts: one greedy answer to each, then two samples.
    evaluation = TimeModel(
        replace(cfg, evaluate=replace(cfg.evaluate, k=2)), SMALL, NO_READING, NO_READING, evaluated=5
    )
    assert evaluation.estimate_evaluation(LENGTHS) == pytest.approx(2 * (600 + 80) * 5 + (5 + 10) * 4 * 280)


def test_optimizer_time_counts_reads_and_writes(small):
    times = TimeModel(settings(*STEP, "--algorithm.minibatches", "2"), SMALL, Speed(1e30, 1.0), NO_READING)
    assert times.estimate_stages(LENGTHS)["update"] == pytest.approx(2 * 32 * 140)


def test_the_reference_may_be_on_a_slower_device(small):
    slow = Speed(NO_READING.flops / 10, 1.0)
    cfg = settings(*STEP, "--algorithm.kl_coef", "0.1", "--algorithm.kl", "k3", "--algorithm.kl_in", "loss")
    scoring = TimeModel(cfg, SMALL, NO_READING, slow).estimate_stages(LENGTHS)["scoring"]
    assert scoring == pytest.approx(10 * FORWARD)


def test_dynamic_sampling_samples_until_groups_differ(small):
    times = TimeModel(settings(*STEP, "--algorithm.max_rounds", "3"), SMALL, NO_READING, NO_READING)
    one = times.estimate_round(LENGTHS)
    assert [times.estimate_stages(LENGTHS, dead)["sampling"] / one for dead in (0.0, 0.5, 1.0)] == [1, 2, 3]
    assert times.estimate_stages(LENGTHS, 0.5)["update"] == pytest.approx(PROBE + FORWARD + BACKWARD)


# ---------------------------------------------------------------- the schedule


@pytest.mark.parametrize("minutes", [0.0, 3.0])
@pytest.mark.parametrize("done", [0, 4, 7])
def test_remaining_work_matches_a_simulated_run(minutes, done):
    """A run ends after its last step, or after the step in which its minutes are used up."""
    for steps, evaluate, save in itertools.product((7, 12), (0, 3, 4), (0, 2, 5)):
        cfg = settings("--algorithm.steps", str(steps), "--algorithm.minutes", str(minutes))
        cfg = replace(
            cfg, evaluate=replace(cfg.evaluate, every=evaluate), checkpoint=replace(cfg.checkpoint, every=save)
        )
        elapsed, taken, evaluations, saves = 25.0 * done, 0, 0, 0
        for step in range(done + 1, steps + 1):
            if minutes and elapsed >= 60 * minutes:
                break
            elapsed, taken = elapsed + 25.0, taken + 1
            is_last = step == steps or (minutes and elapsed >= 60 * minutes)
            evaluations += bool(evaluate and (is_last or step % evaluate == 0))
            saves += bool(save and (is_last or step % save == 0))
            if is_last:
                break
        assert count_remaining(cfg, 25.0, done, 25.0 * done) == Remaining(taken, evaluations, saves)


def test_format_run_time_writes_the_expected_sentences():
    times = RunTimes({"sampling": 33.0, "scoring": 1.0, "update": 62.0}, 96.0, 180.0, 2.0)
    assert format_run_time(times, Remaining(60, 4, 3), 60) == (
        "about 1 h 48 min, mostly update (57%): 60 steps of 96 s (update 62 s, sampling 33 s), 4 evaluations of 3 min"
    )
    assert format_run_time(times, Remaining(10, 8, 100), 60, before=33.0, word=" left") == (
        "about 44 min left, mostly evaluations (55%): 10 of 60 steps of 96 s (update 62 s, sampling 33 s),"
        " 8 evaluations of 3 min, 100 checkpoints of 2 s"
    )


def test_durations_have_about_two_digits():
    shown = [format_seconds(s) for s in (0.04, 1.94, 9.96, 96.4, 99.6, 119, 150, 180, 3540, 3599, 6610, 200_000)]
    assert shown == [
        *("0.04 s", "1.9 s", "10 s", "96 s", "100 s", "119 s", "2.5 min", "3 min", "59 min"),
        *("1 h 0 min", "1 h 50 min", "55 h 33 min"),
    ]


PLANS = {
    "one after the other": ({}, "about 37 h 23 min, mostly update (57%): 2 steps of 13 h 30 min", "no reward"),
    "ahead": ({"ahead": 1}, "about 31 h 39 min, mostly update (67%): 2 steps of 10 h 38 min", "no reward"),
    "servers": (
        {"name": "vllm", "urls": ("http://a",)},
        "about 21 h 17 min, mostly update (100%): 2 steps of 10 h 38 min",
        "neither",
    ),
}


@pytest.mark.parametrize("plan", PLANS)
def test_planned_time_matches_hand_computation(small, monkeypatch, plan):
    """A step samples for 10,320 seconds and updates for 38,300; an evaluation takes 9,000.

    One evaluation and the samples of a step come before the first step.
    """
    changes, time, assumed = PLANS[plan]
    monkeypatch.setattr(time_estimate, "measure_speed", lambda *_: NO_READING)
    cfg = settings(*STEP, "--algorithm.steps", "2", "--sampler.max_tokens", "5")
    cfg = replace(cfg, evaluate=replace(cfg.evaluate, every=1, n=5, k=0), sampler=replace(cfg.sampler, **changes))
    text = describe_planned_time(cfg, SMALL._replace(prompt_tokens=3))
    assert text.startswith(f"{time} (")
    assert ("3 evaluations of 2 h 30 min" in text) == (plan != "servers")
    assert f"as if every completion had sampler.max_tokens = 5 tokens, no group were dead, and {assumed}" in text


# ---------------------------------------------------------------- measured


def record(step, **seconds):
    return {
        "step": step,
        "completion/length_mean": 5.0,
        "time/step": sum(seconds.values()),
        **{f"time/{name}": s for name, s in seconds.items()},
    }


def test_measured_time_ignores_the_first_and_old_steps(small):
    cfg = settings(*STEP, "--algorithm.steps", "100", "--evaluate.every", "0", "--checkpoint.every", "0")
    steps = [record(1, generate=500.0, reward=50.0, update=450.0)]
    assert describe_measured_time(cfg, SMALL, steps, 0.0, 0).startswith(
        "about 27 h 30 min left, mostly sampling (50%): 99 steps of 17 min ("
    )
    steps += [record(2, generate=1.0, update=9.0)]
    assert "98 steps of 10 s (update 9 s, sampling 1 s)" in describe_measured_time(cfg, SMALL, steps, 0.0, 0)
    steps += [record(i, generate=100.0, update=100.0) for i in range(3, 30)]
    steps += [record(i, generate=10.0, reward=2.0, score=0.5, update=20.0) for i in range(30, 50)]
    assert describe_measured_time(cfg, SMALL, steps, 0.0, 0) == (
        "about 28 min left, mostly update (62%): 51 steps of 32 s (update 20 s, sampling 10 s, rewards 2 s)"
    )
    assert describe_measured_time(cfg, SMALL, [], 0.0, 0) == ""
    assert describe_measured_time(replace(cfg, algorithm=replace(cfg.algorithm, steps=49)), SMALL, steps, 0.0, 0) == ""


def test_unmeasured_evaluation_time_is_derived_from_sampling(small, monkeypatch):
    monkeypatch.setattr(time_estimate, "measure_speed", lambda *_: NO_READING)
    cfg = settings(*STEP, "--algorithm.steps", "3", "--evaluate.k", "0")
    facts = SMALL._replace(prompt_tokens=3)
    steps = [record(2, generate=4.0, reward=1.0, update=5.0)]
    # Five prompts take 5 (600 + 80) operations of prefill, and 5 * 4 * 280 of decode steps; a step takes 10,320.
    expected = 5.0 * (5 * 680 + 5600) / 10320
    assert f"1 evaluation of {expected:.1f} s" in describe_measured_time(cfg, facts, steps, 10.0, 5)
    assert "1 evaluation of 7 s" in describe_measured_time(cfg, facts, steps, 10.0, 5, evaluation_seconds=7.0)


def look_at(sampling_seconds):
    def make(values):
        completions = tuple(Completion((1,) * n, (0.0,) * n, "", True) for n in (4, 6))
        return Group(Prompt("", ""), (1, 2, 3), completions, tuple(map(Reward, values)))

    return FirstLook([make((0.0, 1.0)), make((1.0, 1.0))], 5, 60.0, sampling_seconds)


@pytest.mark.parametrize(("sampling_seconds", "sampling"), [(30.0, 30.0), (0.0, 60.0 * 5160 / 9000)])
def test_the_first_look_measures_sampling_and_lengths(small, monkeypatch, sampling_seconds, sampling):
    """Half of the groups are dead, and completions have five tokens on average."""
    monkeypatch.setattr(time_estimate, "measure_speed", lambda *_: Speed(1e3 / REACHED_SHARE, float("inf")))
    step = ["--algorithm.prompts_per_step", "2", "--algorithm.group_size", "2", "--algorithm.steps", "10"]
    cfg = settings(*step, "--evaluate.every", "0", "--evaluate.k", "0", "--checkpoint.every", "0")
    # A round: prefill of 2 (600 + 80), decode steps of 4 rows. The evaluation: 5 (600 + 80) and 5 rows.
    assert 2 * 680 + 4 * 4 * 280 == 5840
    sampling = 30.0 if sampling_seconds else 60.0 * 5840 / 9000
    forward = 200 * (2 * 3 + 4 * 4) + 80 * 20
    update = (2 * forward / 4 + (3 * forward + 80 * 20) / 2) / 1e3
    text = describe_time_after_first_look(cfg, SMALL, look_at(sampling_seconds))
    total = 10 * (sampling + update)
    assert text.startswith(f"about {format_seconds(total)}, ")
    assert f"(sampling and rewards {format_seconds(sampling)}, update {format_seconds(update)}" in text
    assert text.endswith("; sampling is measured, the rest estimated")


STAGES = {"time/generate": 20.0, "time/reward": 4.0, "time/score": 6.0, "time/update": 30.0, "time/step": 60.0}


@pytest.fixture
def patched_clock(monkeypatch):
    """Make steps take a minute, evaluations, checkpoints and samples ten seconds, and the device very fast."""
    ticks = itertools.count(0.0, 10.0)
    monkeypatch.setattr(StageClock, "get_times", lambda _: dict(STAGES))
    monkeypatch.setattr(run, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(time_estimate, "measure_speed", lambda *_: Speed(1e30, 1e30))


def list_times(printed):
    return [line.removeprefix("time      ") for line in printed.splitlines() if line.startswith("time  ")]


def test_run_prints_its_time_before_step_1_and_after_step_3(recipe, tmp_path, capsys, patched_clock):
    assert train(recipe, "--run", tmp_path / "run", "--algorithm.steps", "4") == 0
    assert list_times(capsys.readouterr().out) == [
        "about 60 s, mostly sampling and rewards (67%): 4 steps of 10 s (sampling and rewards 10 s), 2 evaluations of"
        " 10 s; sampling is measured, the rest estimated",
        "about 80 s left: 1 step of 60 s (update 30 s, sampling 20 s, scoring 6 s, rewards 4 s), 1 evaluation of 10 s,"
        " 1 checkpoint of 10 s",
    ]


@pytest.mark.slow
def test_resumed_run_estimates_its_time_from_recorded_steps(recipe, tmp_path, capsys, patched_clock):
    assert train(recipe, "--run", tmp_path / "run", "--algorithm.steps", "2") == 0
    assert len(list_times(capsys.readouterr().out)) == 1, "there is no third step"
    changes = ["--algorithm.steps", "9", "--algorithm.minutes", "4.5", "--evaluate.every", "0"]
    assert train("--resume", tmp_path / "run", *changes, "--checkpoint.every", "0") == 0
    assert list_times(capsys.readouterr().out) == [
        "about 3 min left, mostly update (50%): 3 of 7 steps of 60 s (update 30 s, sampling 20 s, scoring 6 s, rewards"
        " 4 s)",
        "about 2 min left, mostly update (50%): 2 of 6 steps of 60 s (update 30 s, sampling 20 s, scoring 6 s, rewards"
        " 4 s)",
    ]


@pytest.mark.slow
def test_only_the_main_process_prints_time_estimates(recipe, tmp_path):
    finished = in_two_processes("-m", "pellucid", "train", str(recipe), "--run", str(tmp_path / "run"))
    first, third = list_times(finished.stdout)
    assert first.endswith("; sampling is measured, the rest estimated")
    assert "3 steps of" in third


def test_dry_run_estimates_time_from_a_measured_matrix_product(recipe, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", str(recipe), "--dry-run"])
    assert ended.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "time about" in printed
    assert "6 steps of" in printed
    assert "TFLOP/s" in printed
    assert "as if every completion had sampler.max_tokens = 10 tokens, no group were dead" in printed


def test_measured_speeds_are_plausible():
    speed = time_estimate.measure_speed(torch.float32, torch.device("cpu"))
    assert 1e9 < speed.flops < 1e14
    assert 1e8 < speed.bytes < 1e13

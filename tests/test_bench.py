"""Test the scripts behind `make bench`, `trl-search`, `accuracy` and `growth` on made-up figures."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import string
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize

from conftest import OneProcessRuntime, character_tokenizer, make_policy, tiny_llama_of
from pellucid import config
from pellucid.policy.policy import Policy
from pellucid.rollout.native import NativeSampler
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.training.evaluate import make_greedy_sampling
from pellucid.training.run_dir import dump_settings
from pellucid.types import Sampling

BENCHMARKS = Path("benchmarks").absolute()
CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
settings = dict(zip(sys.argv[1::2], sys.argv[2::2]))

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say({{"status": "ok"}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/apply-template":
            self.say({{"prompt": asked["messages"][0]["content"]}})
            return
        with open({heard!r}, "a") as file:
            file.write(json.dumps([settings, asked]) + chr(10))
        self.say([{{"tokens_predicted": asked["n_predict"]}}] * asked["n_cmpl"])

    def say(self, answer):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

ThreadingHTTPServer(("127.0.0.1", int(settings["--port"])), Answers).serve_forever()
"""


@pytest.fixture
def of(monkeypatch, tmp_path):
    """Return an importer of modules in benchmarks/, without installed peers and with the test's own search results."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    setups, processes = importlib.import_module("trl_setups"), importlib.import_module("processes")
    monkeypatch.setattr(setups, "BEST_FILE", tmp_path / "trl_best.json")
    monkeypatch.setattr(processes, "VLLM", tmp_path / "no-vllm")
    monkeypatch.setattr(processes, "LLAMA", tmp_path / "llama")
    return importlib.import_module


# ---------------------------------------------------------------- tables


def turn(seconds, generate, update, reward=0.0):
    return {"seconds": seconds, "generate": generate, "update": update, "reward": reward}


def test_jobs_are_compared_by_sums_and_steps_by_medians(of):
    turns = [
        (turn(1, 0.5, 0.5, 0.25), turn(8, 4, 4)),
        (turn(2, 1, 1, 0.75), turn(4, 1, 3)),
        (turn(3, 1, 2), turn(3, 1, 2)),
    ]
    result = {"peer": "trl-x", "goal": None, "prompts": 4, "group": 16, "tokens": 24, "turns": turns, "peaks": (2, 4)}
    job = of("bench").make_row({**result, "work": "job"}).split(" | ")
    assert job[2:5] == ["6.00", "15.00", "**2.50x**"]
    assert job[6:10] == ["2.40x", "2.57x", "0.33", "0.00"]
    assert of("bench").make_row({**result, "work": "step"}).split(" | ")[2:5] == ["2.00", "4.00", "**2.00x**"]
    for work in ("job", "step", "sample"):
        rows = of("bench").make_row({**result, "work": work}), of("bench").make_heading(work).splitlines()[0]
        assert len({row.count("|") for row in rows}) == 1


def test_different_work_is_refused(of):
    bench = of("bench")
    duel = bench.make_sample_comparison("vllm-eager", 4, 8, 64, None)
    facts = {"dtype": "bfloat16"}, {"dtype": "float16"}
    bf16, fp16 = (argparse.Namespace(info=said) for said in facts)
    bench.check_same_work(duel, bf16, bf16, [({"tokens": 9}, {"tokens": 9})])
    with pytest.raises(SystemExit, match="vllm-eager did other work"):
        bench.check_same_work(duel, bf16, fp16, [({"tokens": 9}, {"tokens": 9})])
    with pytest.raises(SystemExit, match="vllm-eager did other work"):
        bench.check_same_work(duel, bf16, bf16, [({"tokens": 9}, {"tokens": 8})])


def test_missing_peers_are_reported_with_their_make_target(of, capsys, monkeypatch, tmp_path):
    tables = ["vllm-64", "llama-256", "step-256"]
    words = [
        "bench.py",
        *tables,
        "--peers",
        "vllm-eager",
        "llama-server",
        "trl-best-bf16",
        "--into",
        str(tmp_path / "x"),
    ]
    monkeypatch.setattr(sys, "argv", words)
    of("bench").main()
    said = capsys.readouterr().out.splitlines()
    assert "| vllm-eager | not installed: make vllm |" in said
    assert "| llama-server | not installed: make llama |" in said
    assert "| trl-best-bf16 | not searched yet: make trl-search |" in said
    assert not (tmp_path / "x").exists()
    targets = (BENCHMARKS.parent / "Makefile").read_text()
    assert all(f"\n{target}:" in targets for target in ("vllm", "llama", "trl-search", "setup"))


# ---------------------------------------------------------------- llama.cpp


def test_llama_server_gets_whole_groups_with_unrestricted_sampling(of, tmp_path):
    llama, heard = tmp_path / "llama", tmp_path / "heard.jsonl"
    server = llama / "build/bin/llama-server"
    server.parent.mkdir(parents=True)
    server.write_text(SERVER.format(python=sys.executable, heard=str(heard)))
    server.chmod(0o755)
    (llama / "smollm2-135m-bf16.gguf").touch()
    settings = {"tokens": 5, "prompts": 2, "group": 3}
    with of("processes").Contender("sample", "llama-server", settings, tmp_path) as contender:
        assert contender.info["dtype"] == "bfloat16"
        assert contender.take_turn()["tokens"] == 30
        contender.take_turn()
        assert contender.close()["peak_gb"] > 0
    rows = [json.loads(line) for line in heard.read_text().splitlines()]
    assert len(rows) == 4
    questions = Arithmetic(digits=2, operators=("+", "-"))
    asked = {prompt.text[0]["content"] for i in range(2) for prompt in questions.sample(i, 2)}
    assert {row["prompt"] for _, row in rows} == asked
    for words, body in rows:
        assert int(words["--parallel"]) == 6 and int(words["--ctx-size"]) >= 6 * (5 + 50)
        assert (
            int(words["--threads"]) == len(os.sched_getaffinity(0))
            or words["--threads"] == os.environ["OMP_NUM_THREADS"]
        )
        assert (body["n_cmpl"], body["ignore_eos"], body["temperature"]) == (3, True, 1.0)
        assert body["samplers"] == ["temperature"]
    assert len({body["seed"] for _, body in rows}) == 2


def test_weights_for_llama_are_the_weights_of_the_file_in_bfloat16(of, tmp_path):
    source, target = tmp_path / "small.gguf", tmp_path / "bf16.gguf"
    writer = GGUFWriter(source, "llama")
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_uint32("llama.block_count", 1)
    matrix, norm = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32), np.ones(5, np.float32) / 3
    kind = GGMLQuantizationType.Q4_1
    writer.add_tensor("matrix", quantize(matrix, kind), raw_dtype=kind)
    writer.add_tensor("norm", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    of("llama_weights").convert(source, target)
    made, read = GGUFReader(target), GGUFReader(source)
    for name, field in read.fields.items():
        if not name.startswith(("GGUF.", "general.")):
            assert made.fields[name].contents() == field.contents()
    expected = torch.from_numpy(dequantize(read.tensors[0].data, kind).copy()).bfloat16().float().numpy()
    tensors = {tensor.name: tensor for tensor in made.tensors}
    assert tensors["matrix"].tensor_type == GGMLQuantizationType.BF16
    assert (dequantize(tensors["matrix"].data, GGMLQuantizationType.BF16) == expected).all()
    assert (tensors["norm"].data == norm).all()


# ---------------------------------------------------------------- setups of TRL


def test_update_is_split_into_equal_micro_batches_of_the_largest_size(of):
    setups = of("trl_setups")
    pieces = {
        (rows, tokens): setups.count_micro_batches(setups.DOCUMENTED, rows, tokens)
        for rows, tokens in ((32, 64), (64, 24))
    }
    assert set(pieces.values()) == {1}
    assert setups.count_micro_batches(setups.DOCUMENTED, 32, 256) == 4
    assert setups.count_micro_batches(setups.DOCUMENTED, 192, 56) == 6
    assert setups.count_micro_batches(setups.DEFAULTS, 32, 64) == 4
    assert setups.count_micro_batches(setups.DEFAULTS, 12, 64) == 2


def test_setups_survive_formatting_and_parsing(of):
    setups = of("trl_setups")
    changed = setups.FORMATS["bf16"].override(
        {"rows": 8, "model": {"a": 1}, "environment": dict.fromkeys(setups.ALLOCATOR)}
    )
    assert setups.get_setup(setups.format_name(changed)) == changed
    assert changed.arguments == {"gradient_checkpointing": False, "bf16": False}
    assert set(changed.environment.values()) == {None}
    assert setups.get_setup("trl-as-it-comes").arguments == {} and setups.get_setup("trl-as-it-comes").environment == {}
    with pytest.raises(setups.NoSearchError):
        setups.get_setup("trl-best-bf16")


def test_search_keeps_options_that_gain_alone_and_together(of, monkeypatch, tmp_path, capsys):
    search = of("trl_search")
    monkeypatch.setattr(search, "OPTIONS", {name: {"model": {name: 1}} for name in "abcdef"})
    factors = {"a": 0.9, "b": 0.5, "c": 0.99, "d": 1.2, "e": 0.8}

    def run_setup(setup, work, repeats):
        names = sorted(setup.model)
        if names == ["f"]:
            return {"failed": "does not run: no"}
        x = math.prod(factors[name] for name in names) * (3 if {"b", "a"} <= set(names) else 1)
        return {"ours": 2.0, "theirs": 4 * x, "times": 2 * x, "gb": 1.0}

    monkeypatch.setattr(search, "run_setup", run_setup)
    monkeypatch.setattr(search, "BEST_FILE", tmp_path / "trl_best.json")
    into = tmp_path / "search.jsonl"
    monkeypatch.setattr(sys, "argv", ["trl_search.py", "--formats", "bf16", "--into", str(into)])
    search.main()
    found = json.loads((tmp_path / "trl_best.json").read_text())["bf16"]
    assert found["options"] == ["b", "e"]
    assert of("trl_setups").get_setup("trl-best-bf16").model == {"b": 1, "e": 1}
    said = capsys.readouterr().out
    assert "| b | 2.00 | 2.00 | 1.00x | 0.50x | 1.0 |" in said and "| f | does not run: no |" in said
    rows = into.read_text()
    monkeypatch.setattr(search, "run_setup", None)  # nothing is measured twice
    search.main()
    assert into.read_text() == rows


# ---------------------------------------------------------------- time to accuracy


def seed_of(peer, seed, seconds, reached=True, steps=3):
    return {"task": "one-digit", "peer": peer, "seed": seed, "seconds": seconds, "reached": reached, "steps": steps}


def test_time_to_accuracy_is_a_median_and_lists_unreached_seeds(of):
    accuracy = of("accuracy")
    ours = [{**seed_of("pellucid", i, 10 + i), "peak_gb": 3.0} for i in range(5)]
    theirs = [{**seed_of("trl-x", i, 60 + i, reached=i > 1, steps=30 - i), "peak_gb": 9.0} for i in range(5)]
    row = accuracy.make_row("one-digit", "trl-x", theirs, ours)
    assert row == "| one-digit | trl-x | 3 of 5 | 28 | 64 | not in 60, not in 61, 62, 63, 64 | 5.3x | 9.0 |"
    never = accuracy.make_row("one-digit", "trl-x", theirs[:3], ours)
    assert "| 1 of 3 | not reached in 30 steps |  | not in 60, not in 61, 62 |  |" in never


def test_finished_seeds_are_not_run_again(of, monkeypatch, tmp_path, capsys):
    accuracy, into, ran = of("accuracy"), tmp_path / "accuracy.jsonl", []

    class Trained:
        def __init__(self, work, peer, settings, folder, words):
            ran.append((peer, settings["seed"], words))
            self.info, self.taken = {"steps": 5}, 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def take_turn(self):
            right = 0.3 * self.taken if ran[-1][0] == "pellucid" else 0.1
            self.taken += 1
            return {"step": self.taken - 1, "seconds": min(self.taken - 1, 1), "mean": right, "greedy": 0, "k": 8}

        def close(self):
            return {"peak_gb": 1.0}

    monkeypatch.setattr(accuracy, "Contender", Trained)
    words = ["accuracy.py", "--tasks", "one-digit", "--peers", "pellucid", "trl-fp32", "trl-bf16", "--into", str(into)]
    monkeypatch.setattr(sys, "argv", [*words, "--seeds", "0", "--optimizer.lr", "1e-5"])
    accuracy.main()
    said = capsys.readouterr().out
    assert "| one-digit | pellucid | 1 of 1 | 3 | 3 | 3 |" in said
    assert "| one-digit | trl-bf16 | 0 of 1 | not reached in 5 steps |" in said
    monkeypatch.setattr(sys, "argv", [*words, "--seeds", "0", "1", "--optimizer.lr", "1e-5"])
    accuracy.main()
    lr = ("--optimizer.lr", "1e-5")
    assert ran == [(peer, seed, lr) for seed in (0, 1) for peer in ("pellucid", "trl-bf16")]
    monkeypatch.setattr(sys, "argv", [*words, "--seeds", "0", "--reach", "0.5"])
    accuracy.main()
    assert ran[4:] == [("pellucid", 0, ()), ("trl-bf16", 0, ())]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return a model that can read arithmetic questions and gives random answers."""
    folder, tokenizer = tmp_path_factory.mktemp("tiny"), character_tokenizer(string.printable)
    tokenizer.chat_template = CHAT
    torch.manual_seed(0)
    for part in (tiny_llama_of(tokenizer), tokenizer):
        part.save_pretrained(folder)
    return folder


def answers(turns, *arguments):
    """Return the output of a contender: when it is ready, for each turn, and at the end."""
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "contenders.py", *map(str, arguments)],
        input="\n" * turns,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_our_training_and_that_of_trl_are_graded_by_the_same_evaluation(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--policy.model", tiny, "--policy.dtype", "float32", "--sampler.max-tokens", "2", "--algorithm.steps", "2"]
    sizes = ["--algorithm.prompts-per-step", "2", "--algorithm.group-size", "2", "--evaluate.n", "8"]
    said = {
        peer: answers(3, "accuracy", peer, "--task", "one-digit", "--seed", "1", *words, *sizes)
        for peer in ("pellucid", "trl-fp32")
    }
    for ready, first, *trained, end in said.values():
        assert ready == {"ready": 1, "steps": 2} and end["peak_gb"] > 0
        assert first["seconds"] < 0.01 and [turn["step"] for turn in (first, *trained)] == [0, 1, 2]
        assert all(turn["seconds"] > 0 and turn["k"] == 8 for turn in trained)
    assert len({tuple(x[1][name] for name in ("mean", "greedy")) for x in said.values()}) == 1


@pytest.mark.slow
def test_trl_job_learns_from_real_rewards(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = [f"--{name}={n}" for name, n in {"prompts": 2, "group": 2, "tokens": 2}.items()]
    ready, *turns, _ = answers(2, "job", "trl-as-it-comes", f"--model={tiny}", *sizes)
    assert ready == {"ready": 1} and len(turns) == 2
    assert all(t["seconds"] == pytest.approx(t["generate"] + t["update"]) and 0 <= t["reward"] <= 1 for t in turns)


@pytest.mark.slow
def test_every_contender_trains_an_adapter(of, tiny, tmp_path, monkeypatch):
    """The contenders are our kernels, transformers' code and TRL with peft."""
    monkeypatch.chdir(tmp_path)
    duels = of("bench").TABLES["lora"]
    assert {duel.settings["lora"] for duel in duels} == {16}
    sizes = [f"--{name}={n}" for name, n in {"prompts": 2, "group": 2, "tokens": 2, "lora": 2, "units": 1}.items()]
    for name in ("pellucid", *(duel.peer for duel in duels)):
        ready, turn, _ = answers(1, "step", name, f"--model={tiny}", *sizes)
        assert ready["ready"] == 1 and turn["generate"] > 0 and turn["update"] > 0


def test_updated_weights_are_used_for_sampling(tiny):
    tokenizer = character_tokenizer(string.printable)
    tokenizer.chat_template = CHAT
    one, other = (Policy(tiny_llama_of(tokenizer), tokenizer) for _ in range(2))
    sampling, prompts = make_greedy_sampling(Sampling(1, max_tokens=12)), Arithmetic().sample(0, 4)

    def said(policy):
        groups = NativeSampler(policy=policy).generate(prompts, sampling)
        return [completion.token_ids for group in groups for completion in group.completions]

    before, expected = said(one), said(other)
    one.update_weights(dict(other.model.named_parameters()), 0.0)
    assert said(one) == expected != before


def test_two_digit_arithmetic_has_prefixes_only_for_our_training(of):
    course = of("course")
    ours, plain, theirs = (
        course.make_config("two-digit", peer, 3) for peer in ("pellucid", "pellucid-plain", "trl-bf16")
    )
    assert ours.task.name == "prefixed" and plain == theirs
    assert theirs.task == ours.task.task == Arithmetic(seed=3, digits=2, operators=("+", "-"))
    assert {cfg.algorithm.seed for cfg in (ours, theirs)} == {3} and {cfg.evaluate.k for cfg in (ours, theirs)} == {8}
    job = course.make_trl_job(theirs)
    assert (job.steps, job.prompts_per_step, job.group_size, job.lr, job.schedule) == (120, 24, 8, 8e-5, "linear")
    assert [prompt.text for prompt in job.prompts[24:48]] == [p.text for p in theirs.task.sample(1, 24)]


# ---------------------------------------------------------------- growth


def test_limit_of_a_part_is_the_longer_of_compute_and_memory_time(of):
    roofline = of("roofline")
    work = {"products": roofline.Work(100.0, 1.0), "reads": roofline.Work(1.0, 100.0)}
    assert roofline.compute_limits(work, speed=50.0, bandwidth=20.0) == {"products": 2.0, "reads": 5.0}


def test_every_part_of_a_step_is_measured(of):
    roofline, policy = of("roofline"), make_policy()
    sampler = NativeSampler()
    sampler.sync(policy)
    with roofline.time_parts(OneProcessRuntime(policy)) as seconds:
        sampler.generate(Arithmetic().sample(0, 1), Sampling(2, max_tokens=3))
    assert {"prompts", "tokens", "drawing"} <= seconds.keys()


def test_operations_per_token_follow_from_the_sizes_of_the_model(of):
    roofline, policy = of("roofline"), make_policy()
    cfg, parameters = policy.model.config, dict(policy.model.named_parameters())
    matrices = sum(x.numel() for name, x in parameters.items() if "_proj" in name)
    head = cfg.vocab_size * cfg.hidden_size
    work = roofline.estimate_work(policy, roofline.Options(tokens=2, prompts=1, group=1), prompt_length=3)
    reads = 4 * cfg.num_hidden_layers * cfg.hidden_size * (3 + 1)  # for the prompt's tokens and the one before it
    assert work["tokens"].gflop == pytest.approx((2 * matrices + reads + 2 * head) / 1e9)
    assert work["optimizer"].gb == pytest.approx(34 * sum(x.numel() for x in parameters.values()) / 1e9)


@pytest.mark.slow
def test_step_is_compared_with_its_limits(of, tmp_path, monkeypatch, capsys):
    """The whole script runs, except for the large matrix product, which takes minutes without bf16."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path)
    make_policy().save(tmp_path)
    roofline = of("roofline")
    monkeypatch.setattr(roofline, "measure_matmul_speed", lambda: 1.0)
    roofline.main(roofline.Options(tokens=2, prompts=2, group=2, repeats=1, model=str(tmp_path)))
    assert "| **step** |" in capsys.readouterr().out


def test_seeds_are_plotted_as_their_mean_and_range(of, tmp_path):
    seeds, runs = of("seeds"), [tmp_path / "0", tmp_path / "1"]
    for run, accuracy in zip(runs, (0.75, 0.95), strict=True):
        run.mkdir()
        estimate = {"value": accuracy, "low": accuracy - 0.1, "high": accuracy + 0.1}
        (run / "evals.jsonl").write_text(json.dumps({"step": 3, "k": 8, "greedy": estimate, "mean@k": estimate}) + "\n")
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": accuracy}) + "\n")
    one, two = seeds.draw_picture(runs[:1]), seeds.draw_picture(runs)
    assert one.count('class="first band') == 0 < one.count('class="bar" d="M')
    assert two.count('class="first band') == 2
    for text in ("greedy <tspan>0.85", "mean@8 <tspan>0.85", "reward <tspan>0.85", "mean and range of 2 runs"):
        assert text in two


def test_three_axes_and_their_limits_are_in_one_plot(of):
    growth = of("growth")
    parts = {"update": 2, "generate": 1, "peak": 1}
    rows = {
        axis: {n * base: {"seconds": 3.0 * n, "limit": n, **parts} for n in (1, 2, 4, 8)}
        for axis, base in growth.BASE.items()
    }
    lines = growth.make_axis_series(rows)
    assert [line.label for line in lines] == [
        "prompts",
        "group",
        "length",
        "prompts limit",
        "group limit",
        "length limit",
    ]
    assert [[(p.x, p.y) for p in line.points] for line in lines] == [[(1, 3), (2, 6), (4, 12)]] * 3 + [
        [(1, 1), (2, 2), (4, 4)]
    ] * 3
    assert growth.join_charts(growth.draw_charts(rows)).count("<svg class") == 3
    assert "| 128 | 6.00 | 2.00 | 1.00 | 2.00 | 3.00 | 1.0 |" in growth.format_table("tokens", rows["tokens"])


# ---------------------------------------------------------------- GSM8K


def test_finished_run_with_other_settings_is_detected(of, tmp_path):
    gsm8k = of("gsm8k")
    trial = ["--algorithm.steps", "2", "--algorithm.micro_batch", "4"]
    asked = config.load_config(gsm8k.RECIPE, [*map(str, gsm8k.list_data_flags()), *trial])
    (tmp_path / "config.json").write_text(json.dumps(dump_settings(config.resolve_config(asked))))
    assert gsm8k.list_other_settings(tmp_path, []) == []  # not finished, so it is resumed
    (tmp_path / "model").mkdir()
    assert gsm8k.list_other_settings(tmp_path, []) == []  # made by another script, so it is evaluated
    (tmp_path / "evals.jsonl").touch()
    assert gsm8k.list_other_settings(tmp_path, ["--algorithm.steps", "2"]) == []
    assert gsm8k.list_other_settings(tmp_path, []) == ["algorithm.steps = 2, not 160"]

"""Tests of whole runs of a tiny model by the command line: run folder, resume, interruption, two processes."""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import mostly_slow, records
from forked import Forked
from pellucid import cli, config
from pellucid.reporting.run_files import list_checkpoints
from pellucid.rollout.native import NativeSampler
from pellucid.serve import api
from pellucid.training import build, run
from pellucid.training.evaluate import make_greedy_sampling
from runs import asked_to_stop, in_two_processes, same_run, train, untimed, weights


@pytest.mark.slow
def test_run_folder_has_all_documented_files(recipe, tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert train(recipe, "--run", run_dir) == 0
    printed = capsys.readouterr().out
    for shown in (
        "4 prompts x 4 completions = 16",
        "prompt tokens |",
        "of groups of 4 will be dead",
        "before",
        "report.html",
    ):
        assert shown in printed

    settings = json.loads((run_dir / "config.json").read_text())
    assert {"policy", "task", "algorithm", "versions", "git", "hardware"} <= settings.keys()
    assert settings["algorithm"]["max_length"] == 10, "resolved, not repeated"

    steps = records(run_dir / "metrics.jsonl")
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6]
    for key in (
        "reward/mean",
        "groups/dead_all_right",
        "kl",
        "clip/high",
        "sampler/gap_max",
        "memory/peak_gb",
        "skipped",
    ):
        assert math.isfinite(steps[-1][key])
    assert steps[0]["lr"] != steps[-1]["lr"]

    rollouts = records(run_dir / "rollouts.jsonl")
    assert len(rollouts) == 6 * 16
    assert all(len(r["tokens"]) == len(r["logprobs"]) for r in rollouts)
    assert [e["step"] for e in records(run_dir / "evals.jsonl")] == [0, 2, 4, 6]
    assert [p.name for p in list_checkpoints(run_dir)] == ["step-000006"]
    assert list((run_dir / "tensorboard").iterdir())
    assert "<svg" in (run_dir / "report.html").read_text()
    AutoTokenizer.from_pretrained(run_dir / "model")
    plain = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    assert {p.dtype for p in plain.parameters()} == {torch.float32}


# All state that a step passes to the next: an adapted coefficient, and replayed rollouts or a moving reference.
STATEFUL = [
    *("--algorithm.max_rounds", "2", "--algorithm.entropy_share", "0.5"),
    *("--algorithm.kl", "k2", "--algorithm.kl_in", "loss", "--algorithm.kl_target", "0.001"),
    *("--optimizer.desired_kl", "1e-6", "--optimizer.schedule", "constant"),
]
LEFT_BEHIND = {
    "rollouts": ["--algorithm.max_staleness", "3"],
    "reference": ["--algorithm.reference_every", "2", "--algorithm.reference_decay", "0.5"],
    "masters on the CPU": ["--optimizer.offload", "--policy.dtype", "bfloat16"],
}


@pytest.mark.slow
@pytest.mark.parametrize("left", LEFT_BEHIND)
def test_checkpoint_holds_all_state_between_steps(recipe, tmp_path, monkeypatch, undisturbed, left):
    settings = ["--checkpoint.every", 1, "--evaluate.every", 3, *STATEFUL, *LEFT_BEHIND[left]]
    whole, killed = undisturbed(recipe, *settings), tmp_path / "killed"
    steps = records(whole / "metrics.jsonl")
    assert len({step["kl_coef"] for step in steps}) > 3
    assert len({step["lr"] for step in steps}) > 2
    assert steps[3]["kl"] > 0

    update, calls = run.grpo.update_policy, []

    def dying(*arguments):
        calls.append(arguments)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return update(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(run.grpo, "update_policy", dying)
        assert train(recipe, "--run", killed, *settings) == 130
    assert train("--resume", killed) == 0
    same_run(whole, killed)
    last = [json.loads((list_checkpoints(run)[-1] / "state.json").read_text()) for run in (whole, killed)]
    assert last[0]["lr_adaptation"] == last[1]["lr_adaptation"]


@pytest.mark.slow
@pytest.mark.parametrize("dies_in_step", [2, 5])
def test_checkpoint_holds_the_state_of_a_curriculum(recipe, tmp_path, monkeypatch, undisturbed, dies_in_step):
    text = recipe.read_text()
    inside = text.replace("[task]", '[task]\nname = "curriculum"\npool = 10\nwindow = 3\nrest = 1\n[task.task]')
    recipe.write_text(inside)
    settings = ["--checkpoint.every", 1, "--evaluate.every", 3, "--algorithm.max_rounds", 2]
    whole, killed = undisturbed(recipe, *settings), tmp_path / "killed"
    generate = NativeSampler.generate

    def dying(self, prompts, sampling):
        if sampling.seed == f"0/{dies_in_step}":
            raise KeyboardInterrupt
        return generate(self, prompts, sampling)

    with monkeypatch.context() as patched:
        patched.setattr(NativeSampler, "generate", dying)
        assert train(recipe, "--run", killed, *settings) == 130
    assert train("--resume", killed) == 0
    same_run(whole, killed)
    assert records(whole / "metrics.jsonl")[-1]["curriculum/epoch"] > 1
    served = api.load_served_model(cli.parse_command_line(["serve", str(whole)]))
    assert served.task.split == "test"
    assert type(served.task.task).__name__ == "Digits", "questions of the service come in no order"


@pytest.mark.parametrize("dies_in_step", mostly_slow([3, 1, 6], every=3))
def test_a_run_killed_anywhere_resumes_to_the_same_bits(recipe, tmp_path, monkeypatch, undisturbed, dies_in_step):
    settings = ["--checkpoint.every", 1, "--evaluate.every", 3]
    whole, killed = undisturbed(recipe, *settings), tmp_path / "killed"
    generate, calls = NativeSampler.generate, []

    def dying(self, prompts, sampling):
        calls.append(sampling.seed)
        if sampling.seed == f"0/{dies_in_step - 1}":
            raise KeyboardInterrupt
        return generate(self, prompts, sampling)

    with monkeypatch.context() as patched:
        patched.setattr(NativeSampler, "generate", dying)
        assert train(recipe, "--run", killed, *settings) == 130
    with (killed / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 99, "half a li')  # a crash may leave such a line
    assert train("--resume", killed) == 0
    same_run(whole, killed)


@pytest.mark.slow
def test_global_random_generators_continue_at_a_resume(recipe, tmp_path):
    recipe.write_text(recipe.read_text().replace("Digits", "Careless"))
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    fixed = ["--optimizer.schedule", "constant", "--evaluate.every", 0]
    assert train(recipe, "--run", whole, *fixed) == 0
    assert train(recipe, "--run", halves, *fixed, "--algorithm.steps", 3) == 0
    random.seed(99)
    assert train("--resume", halves, "--algorithm.steps", 6) == 0
    same_run(whole, halves)


@pytest.mark.slow
def test_minutes_count_the_steps_before_and_after_a_resume(recipe, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    monkeypatch.setattr(run.grpo.StageClock, "get_times", lambda clock: {"time/step": 30.0})
    assert train(recipe, "--run", run_dir, "--algorithm.minutes", 1) == 0
    assert [record["step"] for record in records(run_dir / "metrics.jsonl")] == [1, 2]
    assert [record["step"] for record in records(run_dir / "evals.jsonl")] == [0, 2]
    shutil.rmtree(run_dir / "model")  # as if killed before it was saved
    assert train("--resume", run_dir) == 0
    assert [record["step"] for record in records(run_dir / "metrics.jsonl")] == [1, 2]
    assert (run_dir / "model").is_dir()
    assert train("--resume", run_dir, "--algorithm.minutes", 2) == 0
    assert records(run_dir / "metrics.jsonl")[-1]["step"] == 4


def test_stop_request_saves_and_prints_the_resume_command(recipe, tmp_path, monkeypatch, capsys, undisturbed):
    whole, stopped = undisturbed(recipe), tmp_path / "stopped"
    with asked_to_stop(monkeypatch):
        assert train(recipe, "--run", stopped, "--checkpoint.every", 0) == 130
    assert f"pellucid train --resume {stopped}" in capsys.readouterr().out
    assert not (stopped / "model").exists()
    assert train("--resume", stopped, "--checkpoint.every", 2) == 0
    same_run(whole, stopped)


@pytest.mark.slow
def test_a_run_killed_by_the_system_resumes(recipe, tmp_path):
    """SIGKILL comes from another process, at an arbitrary moment."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    longer = ["--algorithm.steps", "40", "--checkpoint.every", "3", "--evaluate.every", "10"]
    longer += ["--algorithm.epochs", "1", "--algorithm.minibatches", "1", "--algorithm.micro_batch", "0"]
    assert train(recipe, "--run", whole, *longer) == 0
    process = Forked("-m", "pellucid", "train", recipe, "--run", killed, *longer)
    while not list((killed / "checkpoints").glob("step-*[0-9]")):
        time.sleep(0.05)
        assert process.poll() is None
    process.kill()
    process.wait()
    assert train("--resume", killed) == 0
    same_run(whole, killed)


ACROSS_GROUPS = ["--algorithm.advantage", "difficulty", "--algorithm.max_staleness", "2", "--algorithm.max_rounds", "2"]


@pytest.mark.parametrize(
    "settings",
    mostly_slow([[], [*ACROSS_GROUPS, "--algorithm.entropy_share", "0.5"]], every=2),
    ids=["plain", "across"],
)
def test_two_processes_take_the_same_steps_as_one(recipe, tmp_path, settings):
    one, two = tmp_path / "one", tmp_path / "two"
    # A low learning rate, since Adam turns the rounding error of a gradient near 0 into a full step of either sign.
    steps = ["--algorithm.steps", "3", "--evaluate.every", "3", "--optimizer.lr", "1e-3", *settings]
    steps += ["--algorithm.micro_batch", "3"]  # the four rows of one process need two micro-batches, too
    assert train(recipe, "--run", one, *steps) == 0
    in_two_processes("-m", "pellucid", "train", recipe, "--run", two, *steps)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(two)[name], tensor, rtol=0, atol=1e-6)
    for mine, theirs in zip(records(one / "rollouts.jsonl"), records(two / "rollouts.jsonl"), strict=True):
        assert mine["tokens"] == theirs["tokens"], "whole groups, in the global order"
        assert mine["advantage"] == pytest.approx(theirs["advantage"], abs=1e-6)
    for mine, theirs in zip(records(one / "metrics.jsonl"), records(two / "metrics.jsonl"), strict=True):
        assert untimed(theirs) == pytest.approx(untimed(mine), abs=1e-4), "counts are global"
    assert records(one / "evals.jsonl") == records(two / "evals.jsonl")


TIMINGS = """
import json, os, sys
from pathlib import Path
import torch
from pellucid import config
from pellucid.utils import hardware
from pellucid.training import build

rank, said = int(os.environ["RANK"]), []
for faster in (0, 1):  # the rank on which bf16 is
    speeds = {torch.float32: 1.0, torch.bfloat16: 2.0 if rank == faster else 1.0}
    hardware.measure_matmul_tflops = speeds.get
    alone = str(hardware.pick_dtype("auto", torch.device("cpu")))
    cfg = config.load_config(Path(sys.argv[1]), ["--policy.dtype", "auto"])
    said.append([alone, build.resolve_machine_settings(cfg).policy.dtype])
Path(sys.argv[2], f"rank-{rank}.json").write_text(json.dumps(said))
"""


@pytest.mark.slow
def test_two_processes_compute_in_the_dtype_that_the_first_finds_faster(recipe, tmp_path):
    """On shared machines, the measurements of two processes may disagree about bf16."""
    script = tmp_path / "timings.py"
    script.write_text(TIMINGS)
    in_two_processes(script, recipe, tmp_path)
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first == [["torch.bfloat16", "bfloat16"], ["torch.float32", "float32"]]
    assert second == [["torch.float32", "bfloat16"], ["torch.bfloat16", "float32"]]


def test_minibatches_must_divide_prompts_per_step(recipe, tmp_path, capsys):
    assert (
        train(recipe, "--run", tmp_path / "run", "--algorithm.prompts-per-step", 6, "--algorithm.minibatches", 4) == 2
    )
    assert "minibatches = 4 must divide prompts_per_step = 6" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_not_overwritten(recipe, tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert train(recipe, "--run", run_dir, "--algorithm.steps", 1) == 0
    before = (run_dir / "metrics.jsonl").read_text()
    assert train(recipe, "--run", run_dir) == 2
    assert f"--resume {run_dir}" in capsys.readouterr().err
    assert (run_dir / "metrics.jsonl").read_text() == before


def test_a_run_that_cannot_begin_leaves_no_folder(recipe, tmp_path):
    there = list(tmp_path.iterdir())
    assert train(recipe, "--run", tmp_path / "runs" / "one", "--policy.model", "./nowhere") == 2
    assert list(tmp_path.iterdir()) == there
    (tmp_path / "runs" / "other").mkdir(parents=True)
    assert train(recipe, "--run", tmp_path / "runs" / "one", "--policy.model", "./nowhere") == 2
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train", "nowhere.toml"], "nowhere.toml: there is no such file"),
        (["train", "--resume", "nowhere"], "there is no run in that folder"),
        (["train", "recipes/arithmetic.toml", "--policy.model", "./nowhere"], "there is no such file or folder"),
        (["train", "recipes/arithmetic.toml", "--policy.device", "gpu"], 'policy.device = "gpu"'),
        (["train", "recipes/arithmetic.toml", "--resume", "nowhere"], "leave out the recipe"),
        (["eval", "./nowhere", "--task", "recipes/arithmetic.toml"], "there is no such file or folder"),
        (["fly"], "no such command: fly"),
        (["doctor", "now"], "Unrecognized options: now; see pellucid doctor --help"),
    ],
)
def test_usage_errors_exit_with_code_2_and_one_line(arguments, complaint, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    complaints = capsys.readouterr().err
    assert complaint in complaints
    assert complaints.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("layer", [3, -4])
def test_similarity_layer_out_of_range_exits_with_one_line(layer, recipe, tmp_path, capsys):
    similar = ["--algorithm.similarity", "smooth", "--algorithm.steps", 1, "--evaluate.every", 0]
    for there in (2, -3):
        settings = [*similar, "--algorithm.similarity-layer", there]
        assert train(recipe, "--run", tmp_path / str(there), *settings) == 0
    capsys.readouterr()
    assert train(recipe, "--run", tmp_path / "run", *similar, "--algorithm.similarity-layer", layer) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"pellucid: algorithm.similarity_layer = {layer}: this model has layers 0, the embedding, to 2"


@pytest.mark.slow
def test_eval_of_a_run_repeats_its_last_evaluation(recipe, tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert train(recipe, "--run", run_dir, "--algorithm.steps", 2) == 0
    last = records(run_dir / "evals.jsonl")[-1]
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        cli.main(["eval", str(run_dir)])
    assert exit_.value.code == 0
    table = capsys.readouterr().out
    for name in ("greedy", "mean@k", "pass@k"):
        assert f"{last[name]['value']:.3f}" in table
    assert "mean@2" in table


def test_evaluation_top_p_does_not_affect_training_samples(recipe):
    """Evaluation samples that are limited to the likeliest token equal greedy answers."""
    cfg = config.load_config(recipe, ["--evaluate.top-p", "1e-6"])
    parts = build.build_components(cfg)
    parts.sampler.sync(parts.policy)
    prompts = parts.task.sample(0, 2)

    def drawn(sampling):
        groups = parts.sampler.generate(prompts, replace(sampling, n=4, seed="s"))
        return [[c.token_ids for c in g.completions] for g in groups]

    of_training, of_evaluation = build.make_training_sampling(cfg), build.make_evaluation_sampling(cfg)
    assert drawn(of_evaluation) == drawn(make_greedy_sampling(of_training)) != drawn(of_training)


@pytest.mark.slow
def test_adapter_trains_with_the_exact_kl_to_its_base(recipe, tmp_path):
    run_dir = tmp_path / "run"
    lora = ["--policy.lora", 2, "--algorithm.steps", 2, "--algorithm.kl", "exact", "--algorithm.kl_in", "loss"]
    assert train(recipe, "--run", run_dir, *lora) == 0
    first, second = records(run_dir / "metrics.jsonl")
    assert 0 < first["kl"] < second["kl"]


def test_moving_reference_is_refused_for_an_adapter(recipe, tmp_path, capsys):
    assert train(recipe, "--run", tmp_path / "run", "--policy.lora", 2, "--algorithm.reference_every", 1) == 2
    assert "its base, which never changes" in capsys.readouterr().err


@pytest.mark.slow
def test_lora_trains_through_the_same_recipe(recipe, tmp_path):
    run_dir = tmp_path / "run"
    assert train(recipe, "--run", run_dir, "--policy.lora", 4, "--algorithm.steps", 2) == 0
    saved = load_file(run_dir / "checkpoints" / "step-000002" / "policy.safetensors")
    assert all("lora_" in name for name in saved)
    AutoModelForCausalLM.from_pretrained(run_dir / "model")


@pytest.mark.slow
def test_the_settings_of_a_run_can_be_changed_on_resume(recipe, tmp_path):
    run_dir = tmp_path / "run"
    assert train(recipe, "--run", run_dir, "--algorithm.steps", 2) == 0
    assert train("--resume", run_dir, "--algorithm.steps", 4) == 0
    assert [s["step"] for s in records(run_dir / "metrics.jsonl")] == [1, 2, 3, 4]
    assert config.load_config(run_dir / "config.json").algorithm.steps == 4


@pytest.mark.slow
def test_an_offloaded_optimizer_takes_the_same_steps(recipe, tmp_path):
    assert train(recipe, "--run", tmp_path / "here", "--optimizer.lr", "1e-3") == 0
    assert train(recipe, "--run", tmp_path / "there", "--optimizer.lr", "1e-3", "--optimizer.offload") == 0
    there = weights(tmp_path / "there")
    for name, tensor in weights(tmp_path / "here").items():
        torch.testing.assert_close(there[name], tensor, rtol=1e-5, atol=1e-6)


def killed_in_step(number, monkeypatch, *arguments):
    """Train with a checkpoint at every step, and die in the given step."""
    update, calls = run.grpo.update_policy, []

    def dying(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise KeyboardInterrupt
        return update(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(run.grpo, "update_policy", dying)
        assert train(*arguments, "--checkpoint.every", 1) == 130


MOVES = pytest.mark.parametrize(
    ("here", "there"), [("offload", "no-offload"), ("no-offload", "offload")], ids=["from the CPU", "to the CPU"]
)


@pytest.mark.slow
@MOVES
def test_optimizer_offload_may_change_at_a_resume(recipe, tmp_path, monkeypatch, here, there):
    """The weights equal those of a run without the change, up to rounding."""
    stayed, moved = tmp_path / "stayed", tmp_path / "moved"
    settings = ["--optimizer.lr", "1e-3", "--evaluate.every", 0]
    assert train(recipe, "--run", stayed, *settings, f"--optimizer.{here}") == 0
    killed_in_step(4, monkeypatch, recipe, "--run", moved, *settings, f"--optimizer.{here}")
    assert train("--resume", moved, f"--optimizer.{there}") == 0
    assert config.load_config(moved / "config.json").optimizer.offload is (there == "offload")
    for name, tensor in weights(stayed).items():
        torch.testing.assert_close(weights(moved)[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@MOVES
def test_offload_change_at_a_resume_loses_no_bit_of_bf16_training(recipe, tmp_path, monkeypatch, here, there):
    run_dir = tmp_path / "run"
    settings = ["--policy.dtype", "bfloat16", "--evaluate.every", 0]
    killed_in_step(4, monkeypatch, recipe, "--run", run_dir, *settings, f"--optimizer.{here}")
    before = load_file(run_dir / "checkpoints" / "step-000003" / "policy.safetensors")
    assert any(not torch.equal(x, x.bfloat16().float()) for x in before.values())
    assert train("--resume", run_dir, f"--optimizer.{there}", "--algorithm.steps", 3) == 0
    assert all(torch.equal(weights(run_dir)[name], x) for name, x in before.items())


@pytest.mark.slow
def test_offloaded_masters_are_fp32_and_saved_unrounded(recipe, tmp_path):
    run_dir = tmp_path / "run"
    assert train(recipe, "--run", run_dir, "--optimizer.offload", "--policy.dtype", "bfloat16") == 0
    folder = run_dir / "checkpoints" / "step-000006"
    assert not (folder / "optimizer.master.safetensors").exists(), "once is enough"
    masters, saved = load_file(folder / "policy.safetensors"), weights(run_dir)
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())
    for name, master in masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(saved[name], master), name


def test_empty_prompt_exits_with_one_line(recipe, tmp_path, capsys):
    recipe.write_text(recipe.read_text().replace("Digits", "Silent"))
    assert train(recipe, "--run", tmp_path / "run") == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "pellucid" in line]
    assert len(said) == 1
    assert 'prompt train/0/0, "": it is empty, and this tokenizer puts no token before a text' in said[0]


def test_missing_prefix_file_is_reported_before_a_model_is_loaded(recipe, tmp_path, capsys):
    recipe.write_text('[policy]\nmodel = "nowhere"\n[task]\nname = "prefixed"\nfile = "no.json"\n')
    assert train(recipe, "--run", tmp_path / "run") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == "pellucid: task.file = no.json: cannot be read (No such file or directory)"
    assert not (tmp_path / "run").exists()


def test_an_evaluation_shows_questions_answers_and_verdicts(recipe, model_dir, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", str(model_dir), "--task", str(recipe), "--show", "2"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.count("question") == 2
    assert printed.count("verdict") == 2
    assert "reward 0." in printed

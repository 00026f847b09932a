"""Test that two processes with DeepSpeed's ZeRO train what one process trains. Run with `make deepspeed`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines import CASES, numbers, rough_steps, same_steps, tensors_of, trained
from safetensors.torch import load_file

from pellucid.distributed.settings import RuntimeConfig
from runs import in_processes, launch, same_run, same_weights, train, weights

STAGES = (2, 3)
EPS = ["--optimizer.eps", 1e-4]
"""With this eps, AdamW takes no full steps for gradients that are only rounding errors."""


pytestmark = pytest.mark.usefixtures("deepspeed_on_cpus")


ROUGH = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
import torch
from safetensors.torch import save_file
from engines import rough_steps
from pellucid.distributed.settings import RuntimeConfig
tensors = rough_steps(RuntimeConfig("deepspeed", zero_stage=int(sys.argv[2])), 2)
if torch.distributed.get_rank() == 0:
    save_file(tensors, sys.argv[1])
"""


@pytest.mark.deepspeed
def test_three_steps_equal_those_of_one_process(tmp_path):
    named = [f"zero{stage}=deepspeed/{stage}" for stage in STAGES]
    in_processes(2, Path(__file__).with_name("engines.py"), tmp_path, ";".join(CASES), *named)
    for case, facts in CASES.items():
        runtime, metrics = trained(RuntimeConfig(), **facts)
        alone = tensors_of(runtime, metrics)
        if facts.get("dtype") == torch.bfloat16:  # the engine's own weights are bf16, so only joined ones are copied
            copies = runtime.policy.decoder.list_cast_weights()
            joined = [part.get_cast_copy() for part in copies if len(part.locations) > 1]
            alone["cast"] = torch.tensor(numbers(joined))
        for stage, shares in {2: (1, 2), 3: (2, 2)}.items():
            found = load_file(tmp_path / f"zero{stage}-{case}.safetensors")
            same_steps(found, alone, shares, (f"zero{stage}", case))


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_zero_and_nan_gradients_skip_only_their_own_step(stage, tmp_path):
    """As with torch's optimizer, momentum moves nothing in these steps, and the next step is unaffected."""
    (tmp_path / "rough.py").write_text(ROUGH)
    in_processes(2, tmp_path / "rough.py", tmp_path / "found.safetensors", stage)
    found, expected = load_file(tmp_path / "found.safetensors"), rough_steps(RuntimeConfig(), 1)
    assert found["idle"].tolist() == [0, 1, 0, 0]
    assert found["skipped"].tolist() == [0, 0, 1, 0]
    same_weights(found, expected, 1e-6)


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_runs_resume_exactly_on_two_processes_and_closely_on_other_setups(recipe, tmp_path, stage):
    runs = {name: tmp_path / name for name in ("whole", "two", "one", "four", "ddp", "fsdp2")}
    settings = ["--runtime.engine", "deepspeed", "--runtime.zero-stage", stage, "--evaluate.every", 0]
    settings += ["--algorithm.prompts_per_step", 8, "--optimizer.schedule", "constant", *EPS]
    launch(2, recipe, "--run", runs["whole"], *settings, "--algorithm.steps", 4)
    launch(2, recipe, "--run", runs["two"], *settings, "--algorithm.steps", 2)
    for name in ("one", "four", "ddp", "fsdp2"):
        shutil.copytree(runs["two"], runs[name])
    for name, processes in {"two": 2, "four": 4, "one": 1, "fsdp2": 2}.items():
        engine = ["--runtime.engine", "fsdp2"] if name == "fsdp2" else []
        launch(processes, "--resume", runs[name], "--algorithm.steps", 4, *engine)
    assert train("--resume", runs["ddp"], "--algorithm.steps", 4, "--runtime.engine", "ddp") == 0
    same_run(runs["whole"], runs["two"])
    for name in ("one", "four", "ddp", "fsdp2"):
        same_weights(weights(runs[name]), weights(runs["whole"]), 1e-5)
    assert not list(runs["whole"].rglob("*.pt"))


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_resume_exactly_in_bf16(recipe, tmp_path, stage):
    """The checkpoint holds masters, from which the rounded weights are computed."""
    settings = ["--runtime.engine", "deepspeed", "--runtime.zero-stage", stage, "--policy.dtype", "bfloat16"]
    settings += ["--evaluate.every", 0, "--optimizer.schedule", "constant", "--algorithm.steps"]
    launch(2, recipe, "--run", tmp_path / "whole", *settings, 3)
    launch(2, recipe, "--run", tmp_path / "parted", *settings, 2)
    launch(2, "--resume", tmp_path / "parted", "--algorithm.steps", 3)
    same_run(tmp_path / "whole", tmp_path / "parted")


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("more", [["--policy.lora", 2], ["--optimizer.offload"]], ids=["adapter", "offload"])
def test_saved_model_equals_that_of_one_process(recipe, tmp_path, stage, more):
    """The cases are an adapter that is merged into its base, and moments on the CPU."""
    settings, engine = [*more, *EPS, "--evaluate.every", 0, "--algorithm.steps", 2], ["--runtime.engine", "deepspeed"]
    launch(2, recipe, "--run", tmp_path / "two", *settings, *engine, "--runtime.zero-stage", stage)
    assert train(recipe, "--run", tmp_path / "one", *settings) == 0
    for saved in ("model", "adapter")[: 1 + ("--policy.lora" in more)]:
        same_weights(weights(tmp_path / "two", saved), weights(tmp_path / "one", saved), 1e-6)


@pytest.mark.deepspeed
def test_masters_of_bf16_weights_are_not_rounded(recipe, tmp_path, model_dir):
    """With a negligible step they equal the checkpoint, and a step too small for bf16 moves them."""
    settings = ["--runtime.engine", "deepspeed", "--policy.dtype", "bfloat16", "--evaluate.every", 0]
    settings += ["--algorithm.steps", 1, "--optimizer.warmup", 0, "--optimizer.lr"]
    launch(2, recipe, "--run", tmp_path / "still", *settings, 1e-30)
    launch(2, recipe, "--run", tmp_path / "moved", *settings, 1e-6)
    still, moved = weights(tmp_path / "still"), weights(tmp_path / "moved")
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        assert (still[name] - tensor).abs().max() < 1e-29, name
        assert 0 < (moved[name] - tensor).abs().max() < 1e-5, name


@pytest.mark.deepspeed
def test_single_process_without_a_launcher_may_use_deepspeed(recipe, tmp_path):
    settings = ["--algorithm.steps", 1, "--evaluate.every", 0, "--runtime.engine", "deepspeed"]
    command = [sys.executable, "-m", "pellucid", "train", recipe, "--run", tmp_path / "run", *settings]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-000001" / "policy").is_dir()


def test_missing_deepspeed_error_names_the_extra(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert train(recipe, "--run", tmp_path / "run", "--runtime.engine", "deepspeed") == 2
    assert 'needs deepspeed: pip install "pellucid[deepspeed]"' in capsys.readouterr().err
    assert "LOCAL_RANK" not in os.environ, "what is started from here is of no group"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (("--policy.dtype", "float16"), 'policy.dtype = "float16" needs runtime.engine = "ddp"'),
        (("--algorithm.reference-every", 2), "algorithm.reference_every does not work with runtime.engine"),
    ],
)
def test_unsupported_settings_exit_with_one_line(settings, complaint, recipe, tmp_path, capsys):
    assert train(recipe, "--run", tmp_path / "run", "--runtime.engine", "deepspeed", *settings) == 2
    assert complaint in capsys.readouterr().err

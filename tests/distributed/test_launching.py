"""Test that examples/transparent_grpo.py trains the same model with every launcher, in one process or two.

`accelerate launch` and DeepSpeed start every process. The other launchers and their processes are forked from one that
has already imported the package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from conftest import character_tokenizer, tiny_llama
from forked import python

EXAMPLE = Path("examples/transparent_grpo.py").resolve()
sys.path.append(str(EXAMPLE.parent))

import transparent_grpo  # noqa: E402 - an example, not a part of the package

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")
# Any free port, because workers of the suite launch concurrently.
ACCELERATE = ("accelerate.commands.launch", "--main_process_port", "0")
STEPS, GROUP = 3, 4

DRIVER = f"""
import gc, importlib.util, json, os, sys
from pathlib import Path

gc.disable()
import torch

spec = importlib.util.spec_from_file_location("transparent_grpo", {str(EXAMPLE)!r})
sys.modules["transparent_grpo"] = example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
gc.enable(), gc.freeze()  # as pellucid.utils.hardware does
step = 0


def drawn(model, tokenizer, prompts, config):
    '''The same two groups for the run whatever its processes: of two, each gets one.'''
    global step
    step += 1
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(20, (2 * config.group_size, 10), generator=random)
    lengths = torch.randint(2, 6, (2 * config.group_size, 1), generator=random)
    mask = (torch.arange(5) < lengths).float()
    own = slice(None) if example.count_processes() == 1 else slice(example.get_rank() * config.group_size, None)
    rows = slice(own.start, None if own.start is None else own.start + config.group_size)
    return example.Rollout(ids[rows], torch.cat([torch.ones(len(ids), 5), mask], 1).long()[rows], mask[rows])


class Digits:
    prompt = "2+3="

    def reward(self, text):
        return sum(c.isdigit() for c in text) / max(1, len(text))


steps, train = [], example.train


def noted(*arguments):
    for row in train(*arguments):
        steps.append(row)
        yield row


example.generate, example.train = drawn, noted
example.PROBLEMS["three_pieces"] = lambda _: Digits()
example.main()
if int(os.environ.get("RANK", "0")) == 0:
    Path(__file__).with_name("steps.json").write_text(json.dumps(steps))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tiny_llama().save_pretrained(folder)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def launched(how, model, into, processes, *options, environment=(), starting=False):
    """Run the driver, which trains into a folder, and return its result. It is forked unless `starting` is set."""
    into.mkdir(exist_ok=True)
    driver = into / "driver.py"
    driver.write_text(DRIVER)
    settings = {"steps": STEPS, "group_size": GROUP, "prompts": 2 // processes, "lr": 1e-3, "beta": 0.1}
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    launcher, all_started = ("-m", *how) if how else (), starting or "--use_deepspeed" in how
    program = sys.executable if all_started else python()
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHON_EXEC": program}  # read by torchrun and accelerate
    return subprocess.run(
        [program, *launcher, driver, "--model", model, "--save", into / "model", *flags, *options],
        env={**os.environ, **paths, "OMP_NUM_THREADS": "1", "ACCELERATE_LOG_LEVEL": "error", **dict(environment)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def curve(finished, into):
    """Return [steps, 5]: step, loss, reward, reward after KL, KL per token."""
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = torch.tensor(json.loads((into / "steps.json").read_text()), dtype=torch.float64)
    assert len(found) == STEPS
    assert len([line for line in finished.stdout.splitlines() if line.count("|") == 4]) == STEPS + 1
    return found


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    into = tmp_path_factory.mktemp("alone")
    return curve(launched((), model, into, 1), into), load_file(into / "model" / "model.safetensors")


def config_file(folder, kind, **settings):
    path = folder / "accelerate.json"
    facts = {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind, "machine_rank": 0, "num_machines": 1}
    facts |= {"num_processes": 2, "mixed_precision": "no", "main_training_function": "main", "use_cpu": False}
    path.write_text(json.dumps(facts | settings))
    return path


WAYS = {
    "torchrun": (TORCHRUN, ()),
    "torchrun, told to stay on CPUs": (TORCHRUN, (("ACCELERATE_USE_CPU", "true"),)),
    "accelerate launch": ((*ACCELERATE, "--multi_gpu", "--num_processes", "2"), ()),
    "accelerate launch with a config file": ("MULTI_GPU", ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_the_model_of_one(way, model, alone, tmp_path):
    """Compares the curve and the weights. Without a group, each process would train its own model, and the curve would
    be their mean.
    """
    how, environment = WAYS[way]
    if isinstance(how, str):
        how = (*ACCELERATE, "--config_file", str(config_file(tmp_path, how)))
    finished = launched(how, model, tmp_path, 2, environment=environment, starting=way == "accelerate launch")
    same_training(finished, tmp_path, alone)


def same_training(finished, into, alone):
    torch.testing.assert_close(curve(finished, into), alone[0], rtol=0, atol=1e-5)
    weights = load_file(into / "model" / "model.safetensors")
    for name, expected in alone[1].items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_kl_of_equal_weights_is_zero_in_every_precision(precision, model, tmp_path):
    """If the reference ran outside autocast and the policy inside, they would differ by 0.01 per token before the first
    step.
    """
    finished = launched((), model, tmp_path, 1, environment=[("ACCELERATE_MIXED_PRECISION", precision)])
    moved = curve(finished, tmp_path)[:, 4]
    assert float(moved[0]) == 0.0
    assert bool((moved[1:] != 0).all())


@pytest.mark.slow
def test_kl_may_be_charged_before_normalizing(model, alone, tmp_path):
    found = curve(launched((), model, tmp_path, 1, "--kl_in", "raw_reward", "--beta", "5"), tmp_path)
    torch.testing.assert_close(found[0], alone[0][0], rtol=0, atol=1e-6)  # the KL is still 0
    assert float((found[1:, 1:] - alone[0][1:, 1:]).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("kind", "environment", "complaint"),
    [
        (DistributedType.FSDP, {}, "launched as FSDP"),
        (DistributedType.MEGATRON_LM, {}, "launched as MEGATRON_LM"),
        (DistributedType.NO, {"WORLD_SIZE": "2"}, "accelerate formed no process group"),
        (DistributedType.NO, {"ACCELERATE_USE_DEEPSPEED": "true"}, "accelerate ignores DeepSpeed"),
    ],
)
def test_unsupported_launchers_exit_with_one_line(kind, environment, complaint, monkeypatch):
    class Launched:
        def __init__(self, **_):
            self.distributed_type = kind

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(transparent_grpo, "Accelerator", Launched)
    with pytest.raises(SystemExit, match=complaint):
        transparent_grpo.make_accelerator(transparent_grpo.Config())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        (("--problem", "sheep"), "--problem one of three_pieces, seam"),
        (("--kl_in", "air"), "--kl_in one of reward, raw"),
    ],
)
def test_unknown_settings_exit_with_one_line(option, complaint, model, tmp_path):
    finished = launched((), model, tmp_path, 1, *option)
    assert finished.returncode == 2
    assert complaint in " ".join(finished.stderr.split())


# ---------------------------------------------------------------- DeepSpeed

ZERO = (*ACCELERATE, "--num_processes", "2", "--use_deepspeed", "--zero_stage")


@pytest.mark.deepspeed
@pytest.mark.usefixtures("deepspeed_on_cpus")
@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_deepspeed_trains_the_model_of_one_process(stage, model, alone, tmp_path):
    same_training(launched((*ZERO, stage), model, tmp_path, 2), tmp_path, alone)


@pytest.mark.deepspeed
@pytest.mark.usefixtures("deepspeed_on_cpus")
def test_deepspeed_clips_the_gradient(model, tmp_path):
    """The limit is far below the epsilon in Adam's denominator, so the norm determines the size of a step."""
    clipped, into = ("--max_grad_norm", "1e-8"), [tmp_path / name for name in ("one", "two")]
    alone = curve(launched((), model, into[0], 1, *clipped), into[0])
    same_training(
        launched((*ZERO, "2"), model, into[1], 2, *clipped),
        into[1],
        (alone, load_file(into[0] / "model" / "model.safetensors")),
    )


@pytest.mark.deepspeed
@pytest.mark.usefixtures("deepspeed_on_cpus")
def test_kl_of_equal_weights_is_zero_with_deepspeed_in_bf16(model, tmp_path):
    how = (*ZERO[:-1], "--mixed_precision", "bf16", ZERO[-1], "2")
    moved = curve(launched(how, model, tmp_path, 2), tmp_path)[:, 4]
    assert float(moved[0]) == 0.0
    assert bool((moved[1:] != 0).all())


@pytest.mark.deepspeed
@pytest.mark.usefixtures("deepspeed_on_cpus")
def test_deepspeed_on_cpus_by_accelerate_is_refused(model, tmp_path):
    finished = launched((*ZERO, "2"), model, tmp_path, 2, environment=[("ACCELERATE_USE_CPU", "true")])
    assert finished.returncode != 0
    assert "set DS_ACCELERATOR=cpu instead" in finished.stderr


@pytest.mark.deepspeed
@pytest.mark.usefixtures("deepspeed_on_cpus")
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("3",), "--zero_stage 3 shards the weights, and sampling needs all of them: use --zero_stage 2"),
        (("2", "--gradient_accumulation_steps", "2"), "--gradient_accumulation_steps must be 1"),
    ],
)
def test_unsupported_deepspeed_options_exit_with_one_line(options, complaint, model, tmp_path):
    finished = launched((*ZERO, *options), model, tmp_path, 2)
    assert finished.returncode != 0
    assert complaint in finished.stderr

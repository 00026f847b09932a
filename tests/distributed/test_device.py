"""Test that every recipe trains, evaluates, saves, resumes and serves on an accelerator with the numbers of the CPU.

The accelerator is the one of simulated_device.py. Tests that need a real one are in test_cuda.py.
"""

from __future__ import annotations

import json
import re
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchgen
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchgen.gen import parse_native_yaml
from torchgen.model import DispatchKey
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import EOS, VOCAB, character_tokenizer, mostly_slow, records
from pellucid import cli
from pellucid.models import attention
from pellucid.models.score import pack_prompts
from pellucid.policy.logprobs import ScoreContext
from pellucid.rollout import native, scheduler
from pellucid.rollout.hf import HuggingFaceSampler
from pellucid.rollout.native import NativeSampler
from pellucid.serve import api
from pellucid.serve.engine import GenerationRequest
from pellucid.training import time_estimate
from pellucid.utils import hardware
from runs import at_home
from simulated_device import (
    BLOCK_BYTES,
    DEVICE,
    HAS_REAL_DEVICE,
    RAISE,
    STAGED_BYTES,
    WITHOUT_DETERMINISTIC_KERNEL,
    Decomposed,
    Device,
)

pytestmark = pytest.mark.skipif(HAS_REAL_DEVICE, reason="there is a real one")

ALL = [*Path("recipes").glob("*.toml"), *Path("recipes/variants").glob("*.toml")]
RECIPES = sorted(path for path in ALL if path.stem != "judge")  # it needs a running service
SMALL = {
    "sampler.max_tokens": 5,
    "algorithm.steps": 3,
    "algorithm.prompts_per_step": 4,
    "algorithm.group_size": 3,
    "algorithm.micro_batch": 4,
    "evaluate.every": 3,
    "evaluate.n": 1,
    "evaluate.k": 2,
    "checkpoint.every": 2,
    "policy.dtype": "float32",
}
WAYS = {
    "full weights": {},
    "an adapter": {"policy.lora": 2},
    "an adapter held to its base": {
        "policy.lora": 2,
        "algorithm.kl": "exact",
        "algorithm.kl_in": "loss",
        "algorithm.kl_coef": 0.1,
    },
    "masters on the CPU": {"optimizer.offload": True, "policy.dtype": "bfloat16"},
    "bf16": {"policy.dtype": "bfloat16"},
    "fp16": {"policy.dtype": "float16"},
    "transformers": {"policy.engine": "transformers", "policy.gradient_checkpointing": True},
    "generate()": {"sampler.name": "hf"},
    "recomputed": {"policy.gradient_checkpointing": True},
    "entropy, cooler": {"algorithm.entropy_coef": 0.01, "sampler.temperature": 0.8},
    "truncated rollouts": {"sampler.top_k": 9, "sampler.top_p": 0.9, "sampler.min_p": 0.01, "algorithm.kl_coef": 0.01},
    "truncated answers": {"evaluate.top_k": 9, "evaluate.top_p": 0.9, "evaluate.min_p": 0.01},
    "a reference on the CPU": {"policy.reference": "cpu", "algorithm.kl_coef": 0.1, "algorithm.reference_every": 1},
    "an exact KL from the CPU": {
        "policy.reference": "cpu",
        "algorithm.kl": "exact",
        "algorithm.kl_in": "loss",
        "algorithm.kl_coef": 0.1,
    },
}
OWN = {
    "continuity": {"algorithm.prompts_per_step": 1},
    "expected": {"algorithm.prompts_per_step": 1},
    "gsm8k": {"algorithm.minibatches": 2},
    "study_bench": {"algorithm.similarity_layer": 1},
}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """Return the folder of a model with one token per character and a context long enough for every recipe's prompt."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=EOS,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    rows = [{"question": f"What is {i} + 1?", "answer": f"Count on.\n#### {i + 1}"} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def one_way(monkeypatch):
    """Make the CPU use the code paths of an accelerator, and compute rewards in this process."""

    def attend(query, key, value, bias, shared):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)

    monkeypatch.setattr(attention.ChunkedAttention, "apply", attend)
    monkeypatch.setattr(attention, "attend_chunked", attend)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(
        NativeSampler, "_count_steps_per_check", lambda self: native.TOKENS_PER_EOS_CHECK
    )  # the rounding of products depends on the number of rows
    # The products that measure a GPU take minutes on a CPU without instructions for half precision.
    monkeypatch.setattr(time_estimate, "measure_speed", lambda *_: time_estimate.Speed(1e12, 1e11))
    at_home(monkeypatch)
    monkeypatch.setenv(hardware.CUBLAS_WORKSPACE_VARIABLE, hardware.DETERMINISTIC_WORKSPACES[0])
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


def train(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *map(str, arguments)])
    return ended.value.code


def options(settings):
    return [
        part for key, value in settings.items() for part in ([f"--{key}"] if value is True else [f"--{key}", value])
    ]


def trained(recipe, run_dir, settings):
    """Run three steps without interruption."""
    assert train(recipe, *options(settings), "--run", run_dir) == 0
    return run_dir


def resumed(recipe, run_dir, settings, monkeypatch):
    """Run three steps, interrupted in the third and resumed after the second."""

    def dying(generate):
        def generated(self, prompts, sampling):
            if sampling.seed.split("/")[1] == "2":
                raise KeyboardInterrupt
            return generate(self, prompts, sampling)

        return generated

    with monkeypatch.context() as patched:
        for sampler in (NativeSampler, HuggingFaceSampler):
            patched.setattr(sampler, "generate", dying(sampler.generate))
        assert train(recipe, *options(settings), "--run", run_dir) == 130
    assert train("--resume", run_dir) == 0
    return run_dir


def served(run_dir, device):
    """Return the responses of a service with the model of that run."""
    service = api.load_served_model(
        cli.parse_command_line(["serve", str(run_dir), "--dtype", "float32", "--device", device])
    )
    told, engine = [], service.engine
    engine.submit(GenerationRequest([1, 2, 3], told.append, n=2, max_tokens=8, seed=7))
    engine.step()
    while engine.running.requests:
        engine.step()
    return told


def numbers(run_dir):
    """Return every number in a run's folder by its location, except times and memory."""
    logged = {
        f"{name}/{i}/{key}": value
        for name in ("metrics", "rollouts", "evals")
        for i, row in enumerate(records(run_dir / f"{name}.jsonl"))
        for key, value in row.items()
        if not key.startswith(("time/", "memory/"))
    }
    return logged | {name: x.tolist() for name, x in load_file(run_dir / "model" / "model.safetensors").items()}


def with_task(recipe, folder):
    """Give a variant, which names no task, a task in which a random model earns some reward."""
    if recipe.parent.name != "variants":
        return recipe
    copy = folder / recipe.name
    copy.write_text(f'{recipe.read_text()}\n[task]\nname = "{Path(__file__).parents[1]}/digits_task.py:Digits"\n')
    return copy


def same_numbers(recipe, settings, device, folder, monkeypatch):
    """Train on the CPU without interruption and on the device with one, and compare all numbers."""
    patient = partial(
        scheduler.ConversationScheduler, deterministic=True
    )  # otherwise the clock would decide which rows share a batch
    monkeypatch.setattr(native, "ConversationScheduler", lambda policy, talks, rows, *_: patient(policy, talks, rows))
    monkeypatch.setattr(
        ScoreContext, "pick_kernels", lambda *_: None
    )  # a device has no kernels, and the head's kernels on the CPU sum more precisely
    with Decomposed():
        here = trained(recipe, folder / "here", settings | {"policy.device": "cpu"})
        said_here = served(here, "cpu")
    with device:
        on_it = {"policy.device": DEVICE, "policy.deterministic": not device.float64}
        there = resumed(
            recipe, folder / "there", {k: v for k, v in (settings | on_it).items() if v is not False}, monkeypatch
        )
        assert not torch.are_deterministic_algorithms_enabled()
        said_there = served(there, DEVICE)
    of_cpu, of_device = numbers(here), numbers(there)
    assert of_device.keys() == of_cpu.keys()
    assert [place for place, value in of_cpu.items() if of_device[place] != value] == []
    assert said_there == said_here
    return of_cpu


@pytest.mark.parametrize("recipe", mostly_slow(RECIPES, every=40), ids=lambda path: path.stem)
@pytest.mark.usefixtures("one_way")
def test_recipe_on_an_accelerator_has_the_numbers_of_the_cpu(recipe, small_model, questions, tmp_path, monkeypatch):
    """The device refuses what any real one refuses: float64 and nondeterministic operators."""
    settings = {"policy.model": small_model} | SMALL | OWN.get(recipe.stem, {})
    if recipe.stem in ("gsm8k", "gsm8k_dataset", "gsm8k_laptop", "study_bench"):
        task = "task.task.task" if recipe.stem == "study_bench" else "task"
        settings |= {f"{task}.data": questions, f"{task}.test_data": ""}
    recipe = with_task(recipe, tmp_path)
    strict = Device(float64=False)
    seen = same_numbers(recipe, settings, strict, tmp_path, monkeypatch)
    if recipe.parent == tmp_path:
        assert any(seen[f"metrics/{i}/grad_norm"] > 0 for i in range(2)), "something is learned before the resume"
    assert without_kernel(strict.operators, DispatchKey.CUDA) == set()
    assert without_kernel(strict.operators, DispatchKey.MPS) == set()


@pytest.mark.parametrize("way", mostly_slow(WAYS, every=8))
@pytest.mark.usefixtures("one_way")
def test_every_setting_on_an_accelerator_has_the_numbers_of_the_cpu(way, small_model, tmp_path, monkeypatch):
    settings = {"policy.model": small_model} | SMALL | WAYS[way]
    device = Device(float64=way != "truncated answers")
    same_numbers(Path("recipes/arithmetic.toml"), settings, device, tmp_path, monkeypatch)
    assert without_kernel(device.operators, DispatchKey.CUDA) == set()


# ---------------------------------------------------------------- the simulated device


@cache
def kernels():
    """Return torch's own table of operators and their kernels."""
    table = Path(torchgen.__file__).parent / "packaged/ATen/native"
    parsed = parse_native_yaml(str(table / "native_functions.yaml"), str(table / "tags.yaml"))
    return {str(f.func.name): f for f in parsed.native_functions}, parsed.backend_indices


def without_kernel(operators, key):
    """Return the operators for which the real device has no kernel."""
    functions, indices = kernels()

    def known(name):
        f = functions[name]
        composite = (
            f.has_composite_implicit_autograd_kernel
            or f.has_composite_explicit_autograd_kernel
            or f.has_composite_explicit_autograd_non_functional_kernel
        )
        through = f.structured_delegate and functions[str(f.structured_delegate)]
        return composite or indices[key].has_kernel(f) or bool(through and indices[key].has_kernel(through))

    names = {str(op).removeprefix("aten.").removesuffix(".default") for op in operators}
    return {name for name in names if not known(name)}


def test_kernel_table_finds_missing_kernels():
    operators = {torch.ops.aten.ormqr.default, torch.ops.aten.mm.default}
    assert without_kernel(operators, DispatchKey.CUDA) == set()
    assert without_kernel(operators, DispatchKey.MPS) == {"ormqr"}


def test_operators_that_raise_in_deterministic_mode_are_those_torch_documents():
    documented = (
        str(torch.use_deterministic_algorithms.__doc__).split("operations will throw a")[1].split("In addition")[0]
    )
    named = {name.rpartition(".")[2] for name in re.findall(r"\* :\w+:`torch\.([\w.]+)`", documented)}
    assert named - {"MaxPool3d"} == WITHOUT_DETERMINISTIC_KERNEL.keys()  # torch 2.11 names it, too
    assert all(hasattr(torch.ops.aten, name.removeprefix("aten::")) for name in RAISE)


def ones(*shape, **facts):
    return torch.ones(*shape, device=DEVICE, **facts)


REFUSED = {
    "a tensor of the CPU": lambda: ones(3) + torch.ones(3),
    "one of one element": lambda: ones(3) + torch.ones(1),
    "a number of the CPU that is no operand": lambda: torch.stack([ones(()), torch.ones(())]),
    "a matrix of the CPU": lambda: torch.ones(3, 3) @ ones(3, 3),
    "an index beyond": lambda: torch.ones(3)[ones(1, dtype=torch.long)],
    "numpy": lambda: ones(3).numpy(),
    "a generator of the CPU": lambda: torch.rand(3, generator=torch.Generator(), device=DEVICE),
    "a step count on the CPU": lambda: torch._fused_adamw_(
        *([ones(3)] for _ in range(4)), [], [torch.ones(())],
        lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_simulated_device_refuses_what_cuda_refuses(what, gpu):
    with pytest.raises((RuntimeError, TypeError), match="gpu:0"):
        REFUSED[what]()


def test_simulated_device_allows_what_cuda_allows(gpu):
    x = ones(3)
    assert (x + torch.tensor(2.0)).tolist() == [3.0] * 3
    assert x[torch.tensor([0, 1])].tolist() == [1.0] * 2
    x[[0]] = torch.tensor(5.0)
    assert x.masked_fill(x > 1, torch.tensor(0.0)).tolist() == [0.0, 1.0, 1.0]


def test_float64_is_refused_on_devices_without_it():
    with Device(float64=False):
        for wanted in (
            lambda: ones(2, dtype=torch.float64),
            lambda: ones(2).double(),
            lambda: torch.ones(2).double().to(DEVICE),
        ):
            with pytest.raises(TypeError, match="float64"):
                wanted()
        assert hardware.pick_float64_device(torch.device(DEVICE)) == torch.device("cpu")
    with Device():
        assert hardware.pick_float64_device(torch.device(DEVICE)) == torch.device(DEVICE)


@pytest.mark.usefixtures("one_way")
def test_deterministic_mode_refuses_a_nondeterministic_sum(gpu):
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match="deterministic"):
        ones(3).cumsum(0)
    assert ones(3, dtype=torch.long).cumsum(0).tolist() == [1, 2, 3]
    assert hardware.pick_float64_device(torch.device(DEVICE)) == torch.device("cpu")


def test_waits_and_copies_are_counted_by_line(gpu):
    x = ones(4)
    float(x.sum()), x.tolist(), x.cpu(), x[x > 0], bool((x > 0).all())
    assert gpu.waits == {"elsewhere": 5}
    x[[0, 1]], x[torch.tensor([0, 1])], torch.tensor([1]).to(DEVICE)
    assert gpu.copies == {"elsewhere": 3}
    hardware.pick_float64_device(x.device)
    gpu.copies.clear()
    pack_prompts([[1, 2]], torch.float32, x.device)
    assert {line.split(":")[0] for line in gpu.copies} == {"algorithm/batch.py"}


STAGED = STAGED_BYTES // 4
WAIT = {
    "a copy to the device": (True, lambda: torch.ones(1).to(DEVICE)),
    "a new tensor with numbers of the host": (True, lambda: torch.tensor([1.0], device=DEVICE)),
    "a copy into a tensor": (True, lambda: ones(3).copy_(torch.ones(3))),
    "numbers of the host as indices": (True, lambda: ones(3)[torch.tensor([0])]),
    "a copy that is not blocking": (False, lambda: torch.ones(STAGED).to(DEVICE, non_blocking=True)),
    "one that is too large for staging": (True, lambda: torch.ones(STAGED + 1).to(DEVICE, non_blocking=True)),
    "one into a tensor": (False, lambda: ones(3).copy_(torch.ones(3), non_blocking=True)),
    "a copy to pageable memory": (True, lambda: torch.ones(3).copy_(ones(3), non_blocking=True)),
    "a number beside a tensor": (False, lambda: ones(3) * 2 + torch.tensor(1.0)),
}


@pytest.mark.parametrize(("waits", "act"), WAIT.values(), ids=WAIT)
def test_host_waits_for_copies_as_in_pytorch(waits, act, gpu):
    """See `memcpy_and_sync` in c10/cuda/CUDAFunctions.h."""
    act()
    assert gpu.waits.total() == waits


def test_kernels_are_counted_and_views_are_not(gpu):
    x = ones(4, 6)
    y = torch.empty_like(x).copy_(x[:2].repeat(2, 1)).mT.unflatten(1, (2, 2))[:, 0]
    (x @ y).add_(1)
    assert gpu.kernels == {"ones": 1, "repeat": 1, "copy_": 1, "mm": 1, "add_": 1}


def test_memory_counts_the_tensors_that_are_alive():
    """A view takes no memory of its own, and tensors that autograd saves are alive."""
    with Device(memory_bytes=8 * BLOCK_BYTES) as gpu:
        size = BLOCK_BYTES // 4
        x = ones(size, requires_grad=True)
        view = x.detach()[1:]
        y = (x * 2).exp()
        assert gpu.memory.allocated == gpu.memory.peak - BLOCK_BYTES == 2 * BLOCK_BYTES, "the product was freed"
        del x, view
        assert gpu.memory.allocated == 2 * BLOCK_BYTES, "autograd needs the first"
        z = y.square()
        del y
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 4096 bytes"):
            ones(8 * size)
        z.sum().backward()
        del z
        assert gpu.memory.peak == 8 * BLOCK_BYTES
    assert gpu.memory.allocated == 0


def test_reads_of_tensor_addresses_are_counted_by_line(gpu):
    x = ones(3)
    assert x.data_ptr() == x[:1].data_ptr() != x[1:].data_ptr()
    assert gpu.addresses == {"elsewhere": 3}

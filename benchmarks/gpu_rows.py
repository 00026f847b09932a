"""The rows of gpu.py: each measures something and reports its findings as they come.

A row is a function of a folder for files and of `report(**finding)`, in a process of its own. Models have the shapes of
Qwen2.5 and random weights; no completion ends before its last token. Simulated, ours run on the pretended cuda:0 of the
tests, and peers, whose libraries do not know it, on the CPU; all shapes are tiny.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import socket
import string
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import contenders
import pytest
import torch
import turns
from processes import check_available
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

import pretended_cuda
import pretended_graph
from conftest import character_tokenizer
from pellucid.algorithm import grpo
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.config import load_config
from pellucid.distributed.runtime import Runtime
from pellucid.models import native, ops
from pellucid.models.decode import DecodeBatch
from pellucid.models.native import LogitStatistics, ScaledLogits, StatisticsGradients
from pellucid.models.triton_check import find_decoder_fault
from pellucid.policy.load import move_to_device
from pellucid.policy.logprobs import score_logits
from pellucid.policy.policy import Policy
from pellucid.rollout import nccl_transfer
from pellucid.rollout.native import NativeSampler
from pellucid.rollout.vllm import get_push_weights
from pellucid.rollout.vllm_client import SECRET_VARIABLE, SamplerClient, ServerLostError, serialize_model
from pellucid.training import memory
from pellucid.types import Sampling
from pellucid.utils import hardware
from simulated_device import DEVICE, Device

ROOT = Path(__file__).parents[1]
GPU = torch.device("cuda:0")
Work = Callable[[Path, Callable[..., None]], None]
CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
ACCURACY = 0.85
PEER = "trl-autocast"
"""TRL as precise as ours: weights in fp32, products in bf16."""


class Scale(NamedTuple):
    """How much the rows do."""

    shapes: dict[str, dict[str, int]]
    """What tells the sizes of Qwen2.5 from the one in recipes/shapes."""
    prompts: int = 8
    group_size: int = 8
    tokens: int = 512
    turns: int = 3
    update_tokens: int = 3072
    """Tokens whose layers are timed."""
    logits: int = 1024
    """Tokens whose logits are timed."""
    copied: int = 2**31
    """Bytes."""
    matrix: int = 8192
    repeats: int = 20
    """Calls in a graph that is timed."""
    evaluations: int = 40
    """Steps of `make train` at most, until ACCURACY is reached."""
    is_simulated: bool = False


REAL = Scale({
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
})  # fmt: skip
TINY = Scale(
    {
        "0.5B": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
        "1.5B": {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
    *(2, 2, 8, 2, 3, 4, 2**10, 8, 1, 2, True),
)
MICRO_BATCHES = {"0.5B": (0, 16, 5), "1.5B": (16, 5)}
"""Rows of a forward pass beside the number that is planned; 0 is all."""


def make_rows(simulated: bool) -> dict[str, Work]:
    """Return the rows by name, the most valuable first: if the time is short, the last ones are left out."""
    scale = TINY if simulated else REAL

    def on_gpu(work: Callable[..., None], *arguments: Any) -> Work:
        def row(_: Path, report: Callable[..., None]) -> None:
            if simulated and work is not measure_kernels:
                hide_triton()  # its interpreter takes minutes
            with pretended_gpu(simulated):
                work(*arguments, scale, report)

        return row

    def step(contender: str, size: str, **settings: Any) -> Work:
        return Play("step", contender, scale, size, settings)

    small, large = "0.5B", "1.5B"
    few, many = ({"pieces": 1 if simulated else n} for n in (4, 16))  # of TRL's update, else memory runs out
    return {
        "machine": on_gpu(measure_machine),
        f"kernels-{small}": on_gpu(measure_kernels, small),
        f"sample-{small}": on_gpu(measure_sampling, small, "kernels in a graph"),
        f"steps-{small}": on_gpu(measure_steps, small),
        f"sample-{large}": on_gpu(measure_sampling, large, "kernels in a graph"),
        f"steps-{large}": on_gpu(measure_steps, large),
        "tests": run_tests,
        f"sample-operators-{small}": on_gpu(measure_sampling, small, "operators in a graph"),
        f"sample-eager-{small}": on_gpu(measure_sampling, small, "eager operators"),
        f"generate-{small}": Play("sample", "generate", scale, small),
        f"batching-{small}": Play("sample", "generate-batch", scale, small),
        f"trl-{small}": step(PEER, small, **few),
        "accuracy-pellucid": Play("accuracy", "pellucid", scale),
        f"lora-{small}": step("pellucid", small, lora=16),
        f"trl-lora-{small}": step(PEER, small, lora=16, **few),
        f"push-{small}": on_gpu(measure_pushes, small),
        f"kernels-{large}": on_gpu(measure_kernels, large),
        f"sample-operators-{large}": on_gpu(measure_sampling, large, "operators in a graph"),
        f"generate-{large}": Play("sample", "generate", scale, large),
        f"batching-{large}": Play("sample", "generate-batch", scale, large),
        f"trl-{large}": step(PEER, large, **many),
        f"push-{large}": on_gpu(measure_pushes, large),
        f"accuracy-{PEER}": Play("accuracy", PEER, scale),
    }


@contextmanager
def pretended_gpu(simulated: bool) -> Iterator[None]:
    """In here there is a GPU. A real one always is."""
    if not simulated:
        yield
        return
    with pytest.MonkeyPatch.context() as patched, Device():
        pretended_graph.Graphs(patched)
        yield


def hide_triton() -> None:
    """Behave as if Triton was not installed."""
    sys.modules["triton"] = None  # pyright: ignore[reportArgumentType]
    warnings.filterwarnings("ignore", message=".*without Triton")


# ---------------------------------------------------------------- models and clocks


def make_model(scale: Scale, size: str) -> tuple[Any, Any]:
    """Return a config and a tokenizer that knows as many words as it has."""
    largest = json.loads((ROOT / "recipes/shapes/qwen2.5-3b/config.json").read_text())
    config = AutoConfig.for_model(**largest | scale.shapes[size] | ({"vocab_size": 128} if scale.is_simulated else {}))
    tokenizer = character_tokenizer(string.printable, config.vocab_size)
    tokenizer.chat_template = CHAT
    config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    return config, tokenizer


def build_policy(scale: Scale, size: str) -> Policy:
    config, tokenizer = make_model(scale, size)
    torch.manual_seed(0)
    with torch.device("cpu" if scale.is_simulated else GPU):  # a GPU draws 1.5 billion numbers at once
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    move_to_device(model, torch.device(DEVICE))
    policy = Policy(model, tokenizer, torch.bfloat16)
    policy.eos_ids = (-1,)  # no token ends a completion
    return policy


def clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def time_call(act: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of a call, replayed in a graph as decoding does."""
    for _ in range(2):
        act()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            act()
    seconds = []
    for _ in range(3):
        start = clock()
        graph.replay()
        seconds.append(clock() - start)
    return min(seconds) / repeats


def free_memory() -> None:
    """Free what is no longer used, and begin to measure the next peak. A policy and its runtime refer to each other."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def get_peak_gb() -> float:
    return round(torch.cuda.max_memory_allocated() / 1e9, 2)


class GradedArithmetic:
    """Arithmetic whose rewards differ in nearly every group, so that every row has a gradient."""

    seed, split = 0, "train"
    sample = staticmethod(contenders.make_task().sample)
    reward = staticmethod(contenders.make_graded_task().reward)


# ---------------------------------------------------------------- the machine and the kernels


def measure_machine(scale: Scale, report: Callable[..., None]) -> None:
    """The limits that other rows are compared with."""
    properties = torch.cuda.get_device_properties(0)
    report(gpu=torch.cuda.get_device_name(0), memory_gb=round(properties.total_memory / 1e9, 1))
    report(copied_tb_s=round(measure_bandwidth(scale) / 1e12, 3))
    a, b = torch.randn(2, scale.matrix, scale.matrix, device=GPU).bfloat16()
    report(bf16_tflops=round(2 * scale.matrix**3 / time_call(lambda: a @ b, 1) / 1e12, 1))


def measure_bandwidth(scale: Scale) -> float:
    """Return the bytes that are read and written in a second."""
    x = torch.ones(scale.copied // 2, dtype=torch.bfloat16, device=GPU)
    return 2 * scale.copied / time_call(x.clone, 1)


@torch.no_grad()
def measure_kernels(size: str, scale: Scale, report: Callable[..., None]) -> None:
    """Whether Triton's kernels are right on this GPU, and their times beside those of PyTorch's operators."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        policy = build_policy(scale, size)
        kernels = native.load_triton_kernels(GPU, torch.bfloat16)
        fault = find_decoder_fault(policy.decoder)
    report(
        update="right" if kernels else "not used", decoding=fault or "right", warnings=[str(w.message) for w in caught]
    )
    if kernels is None or fault:
        return
    from pellucid.models import triton_decode  # noqa: PLC0415 - there is no Triton in other rows

    shape, n = policy.model.config, scale.update_tokens

    def noise(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(sizes, device=GPU).to(dtype)

    fp32 = torch.float32
    width, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_attention_heads
    x, more, weight = noise(n, width, dtype=fp32), noise(n, width), noise(width, dtype=fp32)
    rotation = (noise(n, heads, width // heads), noise(n, 1, width // heads), noise(n, 1, width // heads))
    few = scale.prompts * scale.group_size
    for name, arguments in {
        "add_norm_forward": (x, more, weight, 1e-6),
        "add_norm_backward": (x, weight, 1e-6, x, more),
        "rotate_forward": rotation,
        "rotate_backward": rotation,
        "swiglu_forward": (noise(n, 2 * inner),),
        "swiglu_backward": (noise(n, 2 * inner), noise(n, inner)),
        "add_norm_forward of a token": (x[:few], more[:few], weight, 1e-6),
        "swiglu_forward of a token": (noise(few, 2 * inner),),
    }.items():
        function = name.split()[0]
        seconds = [time_call(partial(getattr(of, function), *arguments), scale.repeats) for of in (kernels, ops)]
        report(kernel=name, triton_us=round(seconds[0] * 1e6, 1), operators_us=round(seconds[1] * 1e6, 1))
    logits, tokens = noise(scale.logits, shape.vocab_size, dtype=fp32), torch.arange(scale.logits, device=GPU)
    tokens = tokens % shape.vocab_size
    uniforms = torch.rand(few, dtype=torch.float64, device=GPU)
    scaled, gradients = ScaledLogits(logits, 1.0), StatisticsGradients(logits[:, 0].clone(), None, None)
    statistics = kernels.compute_statistics(scaled, tokens, None)
    out = logits.view(torch.bfloat16)[:, : shape.vocab_size]
    known = LogitStatistics(*(x.clone() for x in statistics))
    for name, act, operators in (
        (
            "compute_statistics",
            lambda: kernels.compute_statistics(scaled, tokens, None),
            lambda: score_logits(logits, tokens, None),
        ),
        (
            "compute_product_gradient",
            lambda: kernels.compute_product_gradient(scaled, tokens, None, known, gradients, out),
            lambda: (logits - known.log_normalizer[:, None]).exp_().mul_(-1).bfloat16(),
        ),
        (
            "sample_tokens",
            lambda: triton_decode.sample_tokens(logits[:few], uniforms, 1.0),
            lambda: ops.sample_with_masses(logits[:few], uniforms, 1.0),
        ),
    ):
        seconds = [time_call(each, 1) for each in (act, operators)]
        report(kernel=name, triton_us=round(seconds[0] * 1e6, 1), operators_us=round(seconds[1] * 1e6, 1))
    batches = policy.create_decode_batch(few), DecodeBatch(policy.decoder, few)
    seconds = [time_step(batch, policy, scale) for batch in batches]
    report(kernel="a decode step", triton_us=round(seconds[0] * 1e6, 1), operators_us=round(seconds[1] * 1e6, 1))


def time_step(batch: DecodeBatch, policy: Policy, scale: Scale) -> float:
    """Return the seconds of a decode step of all rows, by a graph."""
    prompts = [policy.encode(prompt) for prompt in GradedArithmetic.sample(0, scale.prompts)]
    tokens = batch.admit(prompts, scale.group_size).argmax(-1)
    for _ in range(4):  # the third captures the graph
        batch.step(tokens)
    start = clock()
    for _ in range(scale.turns):
        batch.step(tokens)
    return (clock() - start) / scale.turns


# ---------------------------------------------------------------- sampling and steps


def measure_sampling(size: str, way: str, scale: Scale, report: Callable[..., None]) -> None:
    """Sampling alone, and what the GPU does meanwhile."""
    if way != "kernels in a graph":
        hide_triton()
    policy = build_policy(scale, size)
    if way == "eager operators":
        policy.decoder.uses_cuda_graphs = False
    sampler, task = NativeSampler(policy=policy), GradedArithmetic()

    def generate(turn: int, tokens: int = scale.tokens) -> None:
        sampling = Sampling(scale.group_size, max_tokens=tokens, seed=str(turn))
        sampler.generate(task.sample(turn, scale.prompts), sampling)

    report(way=way, floor_s=round(count_read_bytes(policy, scale) / measure_bandwidth(scale), 3))
    generate(0)
    for turn in range(1, scale.turns + 1):
        start = clock()
        generate(turn)
        seconds = clock() - start
        rate = scale.prompts * scale.group_size * scale.tokens / seconds
        report(way=way, seconds=round(seconds, 3), tokens_per_s=round(rate), peak_gb=get_peak_gb())
    tokens = max(1, scale.tokens // 8)
    report(way=way, tokens=tokens, **profile_call(lambda: generate(0, tokens)))


def count_read_bytes(policy: Policy, scale: Scale) -> int:
    """Return the bytes that sampling has to read: in each step all weights, and the keys and values of each row."""
    shape, weights = policy.model.config, sum(p.numel() for p in policy.model.parameters())
    prompts = [len(policy.encode(prompt)) for prompt in GradedArithmetic.sample(0, scale.prompts)]
    keys = 2 * shape.num_hidden_layers * shape.num_key_value_heads * (shape.hidden_size // shape.num_attention_heads)
    cached = sum(prompts) + scale.prompts * scale.group_size * scale.tokens // 2
    return 2 * scale.tokens * (weights + keys * cached)


def profile_call(act: Callable[[], Any]) -> dict[str, Any]:
    """Return what the GPU and the host do in a call: times in ms, and names with their count and ms."""
    gpu = torch.autograd.DeviceType.CUDA
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    before, start = torch.cuda.memory_stats().get("num_device_alloc", 0), clock()
    with profile(activities=[a for a in activities if a in torch.profiler.supported_activities()]) as profiled:
        act()
        seconds = clock() - start
    events = profiled.key_averages()
    kernels = [e for e in events if e.device_type == gpu]
    calls = [e for e in events if e.device_type != gpu and e.key.startswith("cuda")]

    def list_longest(events: list[Any], attribute: str) -> list[list[Any]]:
        longest = sorted(events, key=lambda e: -getattr(e, attribute))[:12]
        return [[e.key[:70], e.count, round(getattr(e, attribute) / 1e3, 2)] for e in longest]

    return {
        "ms": round(seconds * 1e3, 1),
        "busy_ms": round(sum(e.self_device_time_total for e in kernels) / 1e3, 1),
        "kernels": sum(e.count for e in kernels),
        "allocations": torch.cuda.memory_stats().get("num_device_alloc", 0) - before,
        "longest_kernels": list_longest(kernels, "self_device_time_total"),
        "longest_calls": list_longest(calls, "self_cpu_time_total"),
    }


def measure_steps(size: str, scale: Scale, report: Callable[..., None]) -> None:
    """Whole steps by micro-batch, their peaks beside the plan, and a profile of one and of the sampling in it."""
    plans = list_plans(scale, size)
    for rows, planned_gb in plans.items():
        free_memory()
        steps = train(scale, build_policy(scale, size), NativeSampler(), rows)
        for _ in range(scale.turns):
            times = {k: round(x, 3) for k, x in next(steps).metrics.items() if k.startswith("time/") and x is not None}
            report(micro_batch=rows, **times, peak_gb=get_peak_gb(), planned_gb=planned_gb)
        del steps
    free_memory()
    sampler = ProfiledSampler()
    steps = train(scale, build_policy(scale, size), sampler, next(iter(plans)))
    next(steps)
    report(profile="step", **profile_call(lambda: next(steps)))
    sampler.profiles = []
    next(steps)
    report(profile="sampling in a step", **sampler.profiles[-1])
    next(steps)
    sampler.generate(GradedArithmetic.sample(9, scale.prompts), make_sampling(scale))
    report(profile="sampling again", **sampler.profiles[-1])


class ProfiledSampler(NativeSampler):
    """Profiles its calls once there is a list for them."""

    profiles: list[dict[str, Any]] | None = None

    def generate(self, prompts: Any, sampling: Sampling) -> Any:
        if self.profiles is None:
            return super().generate(prompts, sampling)
        groups: list[Any] = []
        self.profiles.append(profile_call(lambda: groups.extend(NativeSampler.generate(self, prompts, sampling))))
        return groups


def make_sampling(scale: Scale) -> Sampling:
    return Sampling(scale.group_size, max_tokens=scale.tokens)


def train(scale: Scale, policy: Policy, sampler: NativeSampler, micro_batch: int) -> Iterator[grpo.StepResult]:
    sizes = {"prompts_per_step": scale.prompts, "group_size": scale.group_size, "max_length": scale.tokens}
    cfg = GRPOConfig(steps=scale.turns + 2, micro_batch=micro_batch, **sizes)
    runtime = Runtime(policy, AdamWConfig(lr=1e-6), cfg.steps)
    return grpo.train(GradedArithmetic(), sampler, policy, runtime, cfg, sampling=make_sampling(scale))


def list_plans(scale: Scale, size: str) -> dict[int, float]:
    """Return the rows of micro-batches to measure, first those chosen for this GPU, and their planned peaks in GB."""
    config, _ = make_model(scale, size)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    words = {"algorithm.prompts-per-step": scale.prompts, "algorithm.group-size": scale.group_size}
    words |= {"sampler.max-tokens": scale.tokens, "policy.dtype": "bfloat16", "policy.device": "cuda"}
    cfg = load_config(ROOT / "recipes/arithmetic.toml", [w for key, x in words.items() for w in (f"--{key}", str(x))])
    model = memory.ModelFacts(config, count, count)
    chosen = memory.choose_micro_batch(model, cfg, hardware.get_available_memory_gb(GPU))
    return {
        rows: round(memory.estimate_changed_peak(model, cfg, {"algorithm.micro_batch": rows}), 1)
        for rows in (chosen, *MICRO_BATCHES[size])
    }


# ---------------------------------------------------------------- pushes to a server


def measure_pushes(size: str, scale: Scale, report: Callable[..., None]) -> None:
    """Pushes of all weights to a sampler server, over HTTP and over NCCL, which needs vLLM and a second GPU."""
    policy = build_policy(scale, size)
    weights = get_push_weights(policy)
    gb = round(sum(weight.nbytes for weight in weights.values()) / 1e9, 6)
    has_vllm = not scale.is_simulated and importlib.util.find_spec("vllm") is not None
    second = has_vllm and torch.cuda.device_count() > 1
    with start_sampler(has_vllm, "1" if second else "0") as url, pytest.MonkeyPatch.context() as patched:
        client = SamplerClient(url, 120.0)
        client.load_model(serialize_model(policy))
        for way in ("http", "nccl"):
            if way == "nccl" and not second:
                report(way=way, left_out="it needs vLLM and two GPUs: NCCL cannot have both of its ranks on one")
                return
            patched.setattr(nccl_transfer, "TRANSFER_DEVICE", "cuda" if way == "nccl" else "none")
            for _ in range(scale.turns):
                start = clock()
                client.push(weights)
                server = "vllm" if has_vllm else "stand-in"
                report(way=way, server=server, seconds=round(clock() - start, 3), gb=gb)


@contextmanager
def start_sampler(has_vllm: bool, gpu: str) -> Iterator[str]:
    """Start a server on a GPU, or without vLLM one that only keeps the weights in memory, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["-m", "pellucid", "sampler", "--rows", "8", "--cache-gb", "1"] if has_vllm else ["push_server.py"]
    own = {"CUDA_VISIBLE_DEVICES": gpu, SECRET_VARIABLE: "of-this-benchmark"}
    environment = {name: x for name, x in os.environ.items() if name != pretended_cuda.LIBRARY_VARIABLE} | own
    os.environ |= {SECRET_VARIABLE: own[SECRET_VARIABLE]}
    words += ["--port", port]
    process = subprocess.Popen([sys.executable, *words], env=environment, cwd=Path(__file__).parent)
    try:
        url = f"http://127.0.0.1:{port}"
        while True:
            with suppress(ServerLostError):
                SamplerClient(url, 5.0).get_state()
                break
            if process.poll() is not None:
                raise SystemExit(f"the server ended with status {process.returncode}")
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- tests and peers


class TestReporter:
    """A plugin of pytest that reports each test."""

    def __init__(self, report: Callable[..., None]) -> None:
        self.report = report

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.partition("::")[2]
            self.report(test=name, outcome=report.outcome, seconds=round(report.duration, 1))


def run_tests(folder: Path, report: Callable[..., None]) -> None:
    """The tests that need a GPU: numbers of the CPU, runs that are resumed, NCCL."""
    options = ["-q", "-n", "0", "-m", "cuda", "-p", "no:cacheprovider", "--basetemp", str(folder / "tests")]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    file = ROOT / "tests/distributed/test_cuda.py"
    if status := pytest.main([*options, "-c", str(ROOT / "pyproject.toml"), str(file)], [TestReporter(report)]):
        raise SystemExit(f"pytest ended with status {status}")


class Play(NamedTuple):
    """A contender of bench.py. Its turns are findings."""

    work: str
    contender: str
    scale: Scale
    size: str = ""
    """Of the model; without it the task has its own."""
    settings: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def __call__(self, folder: Path, report: Callable[..., None]) -> None:
        """Run contenders.py in this process."""
        check_available(self.contender)
        count = 0

        def answer(**facts: Any) -> None:
            nonlocal count
            if "ready" in facts:
                return
            count = -1 if facts.get("mean", 0.0) >= ACCURACY else count + 1
            numbers = {key: round(x, 3) for key, x in facts.items()}
            report(work=self.work, contender=self.contender, **numbers)

        def wait() -> None:
            if count in (-1, self.scale.turns if self.size else self.scale.evaluations):
                raise EOFError

        turns.redirect_output, turns.send_answer, turns.wait_for_turn = lambda: None, answer, wait
        settings = {"device": "cpu" if self.scale.is_simulated else "cuda", **self.settings}
        if self.scale.is_simulated and not self.size:
            model = save_model(self.scale, "0.5B", folder)
            settings |= {"policy.model": model, "evaluate.n": 2, "algorithm.steps": self.scale.evaluations}
        if self.size:
            sizes = {"prompts": self.scale.prompts, "group": self.scale.group_size, "tokens": self.scale.tokens}
            settings |= {"model": save_model(self.scale, self.size, folder), **sizes}
        sys.argv = ["contenders.py", self.work, self.contender, *(f"--{key}={x}" for key, x in settings.items())]
        contenders.main()


def save_model(scale: Scale, size: str, folder: Path) -> Path:
    """Return the folder of a model, which is made if it is not there."""
    path = folder / size
    if not path.exists():
        config, tokenizer = make_model(scale, size)
        with torch.device("cpu" if scale.is_simulated else GPU):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for part in (model, tokenizer):
            part.save_pretrained(folder / f"{size}.unfinished")
        (folder / f"{size}.unfinished").rename(path)
    return path

"""Estimates how long a run takes, at three times.

Before a run there are only its settings: the floating-point operations and the bytes of a step are counted, and divided
by speeds that are measured here (`describe_planned_time`). The look at the policy before step 1 measures sampling, and
tells how long completions are (`describe_time_after_first_look`). Later, recorded steps are the measure
(`describe_measured_time`).

P prompts, B = P * G rows. A product of [n, k] by [k, m] has 2 n k m operations.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import fmean
from typing import NamedTuple

import torch

from pellucid.algorithm.update_size import ROWS_PER_PROBE_ROW
from pellucid.config import Config
from pellucid.policy.logprobs import MAX_MATMUL_LOGITS
from pellucid.reporting.charts import format_count
from pellucid.reporting.loggers import predict_zero_variance_share
from pellucid.reporting.run_files import Record
from pellucid.training import memory
from pellucid.training.build import make_evaluation_sampling
from pellucid.training.evaluate import sample_held_out_prompts
from pellucid.types import Group, UserError, with_split
from pellucid.utils import hardware

MEASURED_STEP = 3
"""The step after which measured steps replace the estimate."""
REACHED_SHARE = 0.7
"""The share of the speed of one large product that sampling and update reach, as measured
(docs/contributing/performance.md)."""
_GPU_PRODUCT_SIZE, _GPU_PRODUCT_SECONDS = 2048, 0.02
_COPIES = 16
_COPIED_BYTES, _COPIED_PIECE_BYTES = 2**25, 2**22
_DISK_BYTES_PER_SECOND = 5e8
_OPTIMIZER_BYTES = 32
"""Bytes that an optimizer step reads and writes per parameter: master, gradient and two moments in fp32, in and out."""
_RECORDED_STEPS = 20
"""How many of the last steps are averaged."""
_SHOWN_SHARE = 0.02
"""Parts below this share of a step or of the run are not shown."""
_DOMINATING_SHARE = 0.5
_STAGES = {"generate": "sampling", "reward": "rewards", "score": "scoring", "update": "update"}


# ---------------------------------------------------------------- speeds


class Speed(NamedTuple):
    """The speeds that a device reaches."""

    flops: float
    """Operations of a large matrix product per second."""
    bytes: float
    """Bytes of memory read or written per second."""

    def divide(self, flops: float) -> float:
        """Return the seconds that so many operations of a model take."""
        return flops / (REACHED_SHARE * self.flops)


@cache
def measure_speed(dtype: torch.dtype, device: torch.device) -> Speed:
    """Measure the speeds of a device once, which takes less than a second.

    On a CPU the aim is the speed of an idle machine. Each measured piece is so short that other programs seldom
    interrupt it. Products run on one thread, and the result is multiplied by the number of threads, because threads
    that wait for one another are interrupted more often.
    """
    is_cpu, threads = device.type == "cpu", torch.get_num_threads()
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    size = _COPIED_PIECE_BYTES if is_cpu else _COPIED_BYTES
    # All pieces in turn: by the time that a piece is copied again, it is no longer in the processor's cache.
    pieces = itertools.cycle(zip(torch.zeros_like(source).split(size), source.split(size), strict=True))

    def copy_piece() -> torch.Tensor:
        target, piece = next(pieces)
        return target.copy_(piece)

    copying = _measure_fastest(copy_piece)
    if is_cpu:
        torch.set_num_threads(1)
        try:
            copying = min(copying, _measure_fastest(copy_piece))
        finally:
            torch.set_num_threads(threads)
        flops = threads * 1e12 * hardware.measure_matmul_tflops(dtype)
    else:
        flops = _measure_gpu_flops(dtype, device)
    return Speed(flops, 2 * size / copying)


def _measure_gpu_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Return the operations per second of a series of products that takes at least _GPU_PRODUCT_SECONDS."""
    x = torch.ones(_GPU_PRODUCT_SIZE, _GPU_PRODUCT_SIZE, dtype=dtype, device=device)
    torch.mm(x, x)[0, 0].item()  # loads the kernel; reading an element waits for the device
    count, seconds = 1, 0.0
    while seconds < _GPU_PRODUCT_SECONDS:
        start, count = time.perf_counter(), 2 * count
        product = x
        for _ in range(count):
            product = torch.mm(x, x)
        product[0, 0].item()
        seconds = time.perf_counter() - start
    return count * 2 * _GPU_PRODUCT_SIZE**3 / seconds


def _measure_fastest(compute: Callable[[], torch.Tensor]) -> float:
    """Return the seconds of the fastest of a few calls."""
    seconds = []
    for _ in range(_COPIES):
        start = time.perf_counter()
        compute().flatten()[0].item()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


# ---------------------------------------------------------------- operations


class Lengths(NamedTuple):
    """Tokens of a prompt and of a completion."""

    prompt: float
    completion: float


class Tokens(NamedTuple):
    """The tokens of a forward pass."""

    layers: float
    """Tokens that pass through the layers."""
    head: float
    """Tokens whose logits are computed."""
    pairs: float
    """Pairs of a token and a token that it attends to."""


class ModelWork(NamedTuple):
    """The operations and bytes that a token costs in a model."""

    layers: float
    """Operations of the weights of all layers."""
    adapters: float
    """Operations of the LoRA matrices."""
    head: float
    """Operations of the output matrix."""
    attention: float
    """Operations of a token for each token that it attends to."""
    weight_bytes: float
    """The weights that a decode step reads."""
    cache_bytes: float
    """Keys and values of a token."""
    saved_logits: float
    """How many tokens of a micro-batch keep their logits for the backward pass, which computes the others again."""

    def count_forward(self, tokens: Tokens) -> float:
        """Return the operations of a forward pass."""
        body = tokens.layers * (self.layers + self.adapters) + tokens.pairs * self.attention
        return body + tokens.head * self.head

    def count_backward(self, tokens: Tokens, recomputed_logits: float, checkpointing: bool) -> float:
        """Return the operations of a backward pass.

        A product has two gradients, that of its input and that of its weight; a frozen base has no second one.
        """
        passes = 1 if self.adapters else 2
        body = tokens.layers * (passes * self.layers + 2 * self.adapters) + 2 * tokens.pairs * self.attention
        head = (passes * tokens.head + recomputed_logits) * self.head
        again = self.count_forward(tokens._replace(head=0)) if checkpointing else 0.0
        return body + head + again


def describe_work(model: memory.ModelFacts, cfg: Config) -> ModelWork:
    """Return the work of a model per token. A model with experts is counted as if a token used all of them."""
    config, dtype_bytes = model.config.get_text_config(), 4 if cfg.policy.dtype == "float32" else 2
    vocabulary, width = getattr(config, "vocab_size", 0), getattr(config, "hidden_size", 0)
    head = vocabulary * width
    layers = model.parameter_count - (1 if getattr(config, "tie_word_embeddings", False) else 2) * head
    attention = cache_bytes = 0.0
    if not memory.explain_unknown_memory(model.config):
        heads, key_heads, size = memory.get_head_sizes(config)
        attention = 4 * heads * size * config.num_hidden_layers  # two products: queries by keys, weights by values
        cache_bytes = 2 * key_heads * size * config.num_hidden_layers * dtype_bytes
    quantized = model.quantized_count
    weight_bytes = (layers + head - quantized) * dtype_bytes + quantized * memory.BYTES_PER_4BIT_WEIGHT
    saved_logits = MAX_MATMUL_LOGITS / max(1, vocabulary) if dtype_bytes == 2 else 0.0
    adapters = 2.0 * model.trained_count if cfg.policy.lora else 0.0
    return ModelWork(2 * layers, adapters, 2 * head, attention, weight_bytes, cache_bytes, saved_logits)


def count_tokens(rows: float, prompts: float, lengths: Lengths) -> Tokens:
    """Return the tokens of a forward pass over responses, whose prompts are computed `prompts` times.

    The last token of a response is predicted and not read.
    """
    p, t = lengths.prompt, lengths.completion
    pairs = prompts * p * (p + 1) / 2 + rows * ((t - 1) * p + (t - 1) * t / 2)
    return Tokens(prompts * p + rows * (t - 1), rows * t, pairs)


# ---------------------------------------------------------------- seconds


@dataclass(frozen=True)
class TimeModel:
    """Counts how long the parts of a run take in one process, without what processes send to one another."""

    cfg: Config
    model: memory.ModelFacts
    speed: Speed
    reference_speed: Speed
    """That of the device that has the reference."""
    processes: int = 1
    evaluated: int = 0
    """The number of prompts of an evaluation."""

    @cached_property
    def work(self) -> ModelWork:
        return describe_work(self.model, self.cfg)

    @property
    def shares_prompts(self) -> bool:
        """Whether the prompt of a group is computed once."""
        return not memory.predict_fallback_reason(self.model, self.cfg.policy)

    def estimate_sampling(self, prompts: int, group_size: int, lengths: Lengths) -> float:
        """Return the seconds in which the processes sample groups: prefill, then decode steps of sampler.rows rows.

        A decode step reads all weights and the keys and values of its rows, and takes the time of that or of its
        operations, whichever is longer.
        """
        rows, (p, t), work = prompts * group_size / self.processes, lengths, self.work
        read = rows / group_size if self.shares_prompts else rows
        batch, context = max(1.0, min(rows, self.cfg.sampler.rows)), p + t / 2
        computing = self.speed.divide(work.count_forward(Tokens(batch, batch, batch * context)))
        reading = (work.weight_bytes + batch * context * work.cache_bytes) / self.speed.bytes
        prefill = self.speed.divide(work.count_forward(Tokens(read * p, read, read * p * (p + 1) / 2)))
        return prefill + max(0.0, t - 1) * rows / batch * max(computing, reading)

    def estimate_round(self, lengths: Lengths) -> float:
        """Return the seconds in which algorithm.prompts_per_step groups are sampled."""
        return self.estimate_sampling(self.cfg.algorithm.prompts_per_step, self.cfg.algorithm.group_size, lengths)

    def estimate_evaluation(self, lengths: Lengths) -> float:
        """Return the seconds of an evaluation: a greedy answer and k samples of each prompt."""
        sizes = [1, make_evaluation_sampling(self.cfg).n] if self.cfg.evaluate.k else [1]
        return sum(self.estimate_sampling(self.evaluated, n, lengths) for n in sizes)

    def estimate_stages(self, lengths: Lengths, dead_share: float = 0.0) -> dict[str, float]:
        """Return the seconds of the stages of a step, without rewards; `dead_share` is that of zero-variance groups."""
        a, work = self.cfg.algorithm, self.work
        rounds = min(float(a.max_rounds), 1 / max(1 - dead_share, 1 / a.max_rounds))
        rows = a.prompts_per_step * a.group_size / self.processes
        rows_of_prompt = min(a.group_size, a.micro_batch_rows or a.group_size) if self.shares_prompts else 1
        tokens = count_tokens(rows, rows / rows_of_prompt, lengths)
        forward = work.count_forward(tokens)
        probe = min(math.ceil(rows / ROWS_PER_PROBE_ROW), a.micro_batch_rows or rows) / rows * forward
        # Rows of dead groups have no gradient, unless entropy or KL has one.
        is_kl_in_loss = a.kl_coef > 0 and a.kl_in == "loss"
        live = 1.0 if a.entropy_coef or is_kl_in_loss or a.max_rounds > 1 else 1 - dead_share
        trained = Tokens(*(a.epochs * a.max_staleness * live * n for n in tokens))
        micro_batch_tokens = memory.count_backward_rows(self.cfg, self.processes) * lengths.completion
        recomputed = trained.head * max(0.0, 1 - work.saved_logits / micro_batch_tokens)
        scored, updated = 0.0, 2 * probe + work.count_forward(trained)
        updated += work.count_backward(trained, recomputed, self.cfg.policy.gradient_checkpointing)
        if a.is_off_policy or (a.kl_coef and not is_kl_in_loss) or a.entropy_share < 1:
            scored += forward
        if a.similarity != "none":
            scored += work.count_forward(count_tokens(rows, rows, lengths)._replace(head=0.0))
        scoring, update = self.speed.divide(scored), self.speed.divide(updated)
        shards = self.processes if self.cfg.runtime.engine in ("fsdp2", "deepspeed") else 1
        update += a.inner_steps * _OPTIMIZER_BYTES * self.model.trained_count / shards / self.speed.bytes
        if a.kl_coef and a.kl == "exact":
            update += self.reference_speed.divide(work.count_forward(trained))
        elif a.kl_coef:
            scoring += self.reference_speed.divide(forward)
        return {"sampling": rounds * self.estimate_round(lengths), "scoring": scoring, "update": update}


def estimate_checkpoint(model: memory.ModelFacts, cfg: Config) -> float:
    """Return the seconds in which a checkpoint is written, by the speed of a usual disk."""
    return memory.count_checkpoint_bytes(model, cfg) / _DISK_BYTES_PER_SECOND


# ---------------------------------------------------------------- the run


class RunTimes(NamedTuple):
    """Seconds of what a run repeats."""

    stages: Mapping[str, float]
    """The stages of a step, by name."""
    step: float
    evaluation: float
    checkpoint: float


class Remaining(NamedTuple):
    """The steps, evaluations and checkpoints that are left."""

    steps: int
    evaluations: int
    checkpoints: int


def count_remaining(cfg: Config, step_seconds: float, done: int = 0, elapsed: float = 0.0) -> Remaining:
    """Return what follows after `done` steps, which took `elapsed` seconds.

    algorithm.minutes ends the run after the step in which it is used up. The last step is evaluated and saved, too.
    """
    limit, steps = 60 * cfg.algorithm.minutes, cfg.algorithm.steps - done
    if limit:
        steps = min(steps, max(0, math.ceil((limit - elapsed) / max(step_seconds, 1e-9))))
    last = done + steps

    def count_due(every: int) -> int:
        return last // every - done // every + (last % every > 0) if every and steps > 0 else 0

    return Remaining(steps, count_due(cfg.evaluate.every), count_due(cfg.checkpoint.every))


def format_run_time(times: RunTimes, left: Remaining, total_steps: int, before: float = 0.0, word: str = "") -> str:
    """Return a sentence about the time of a run.

    Args:
        times: Seconds of what is repeated.
        left: What is to be done.
        total_steps: The number of steps without algorithm.minutes.
        before: Seconds before the first step, besides an evaluation.
        word: What follows the duration, such as " left".
    """
    parts = {stage: left.steps * seconds for stage, seconds in times.stages.items()}
    parts |= {"evaluations": left.evaluations * times.evaluation, "checkpoints": left.checkpoints * times.checkpoint}
    total = left.steps * times.step + parts["evaluations"] + parts["checkpoints"] + before
    largest = max(parts, key=parts.__getitem__)
    share = parts[largest] / total if total else 0.0
    mostly = f", mostly {largest} ({share:.0%})" if share >= _DOMINATING_SHARE else ""
    ordered = sorted(times.stages.items(), key=lambda item: -item[1])
    shown = [f"{stage} {format_seconds(s)}" for stage, s in ordered if s >= _SHOWN_SHARE * times.step]
    of_total = f"{left.steps} of " if left.steps < total_steps else ""
    items = [f"{of_total}{format_count(total_steps, 'step')} of {format_seconds(times.step)} ({', '.join(shown)})"]
    repeated = {
        "evaluation": (left.evaluations, times.evaluation),
        "checkpoint": (left.checkpoints, times.checkpoint),
    }
    for name, (count, seconds) in repeated.items():
        if count * seconds >= _SHOWN_SHARE * total:
            items.append(f"{format_count(count, name)} of {format_seconds(seconds)}")
    return f"about {format_seconds(total)}{word}{mostly}: {', '.join(items)}"


def format_seconds(seconds: float) -> str:
    """Return a duration with about two digits: "1.9 s", "96 s", "2.5 min", "1 h 50 min"."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 99.5 else f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 59.5:
        return f"{minutes:.2g} min"
    return f"{round(minutes) // 60} h {round(minutes) % 60} min"


# ---------------------------------------------------------------- what is printed


def describe_planned_time(cfg: Config, model: memory.ModelFacts, processes: int = 1) -> str:
    """Return how long a run takes by its settings and the speed of this machine, if completions have full length."""
    times = make_time_model(cfg, model, processes, _count_evaluated(cfg))
    lengths = Lengths(model.prompt_tokens, cfg.sampler.max_tokens)
    stages, evaluation, assumed = times.estimate_stages(lengths), times.estimate_evaluation(lengths), "no reward"
    if cfg.sampler.urls:
        stages, evaluation, assumed = {**stages, "sampling": 0.0}, 0.0, "neither rewards nor servers"
    repeated = RunTimes(stages, _sum_stages(cfg, stages), evaluation, estimate_checkpoint(model, cfg))
    left = count_remaining(cfg, repeated.step)
    left = left._replace(evaluations=left.evaluations + (cfg.evaluate.every > 0))
    text = format_run_time(repeated, left, cfg.algorithm.steps, stages["sampling"])
    return (
        f"{text}. An estimate from {times.speed.flops / 1e12:.2g} TFLOP/s and {times.speed.bytes / 1e9:.2g} GB/s,"
        f" measured here, as if every completion had sampler.max_tokens = {cfg.sampler.max_tokens} tokens, no group"
        f" were dead, and {assumed} took time"
    )


class FirstLook(NamedTuple):
    """The measurements before step 1."""

    groups: Sequence[Group]
    """Graded samples."""
    evaluated: int
    """The number of prompts of the evaluation."""
    evaluation_seconds: float
    sampling_seconds: float
    """How long the samples of a step took; 0 if they are those of the evaluation."""


def describe_time_after_first_look(cfg: Config, model: memory.ModelFacts, look: FirstLook, processes: int = 1) -> str:
    """Return how long the run will take, with measured sampling and an estimated update."""
    a, times = cfg.algorithm, make_time_model(cfg, model, processes, look.evaluated)
    completion = fmean(max(1, len(c.token_ids)) for group in look.groups for c in group.completions)
    lengths = Lengths(fmean(len(group.prompt_ids) for group in look.groups), completion)
    rewards = [[math.nan if r.failed else float(r.value) for r in group.rewards] for group in look.groups]
    stages = times.estimate_stages(lengths, predict_zero_variance_share(rewards, a.group_size, a.min_reward_range))
    sampling = stages.pop("sampling")
    if look.sampling_seconds:
        sampling *= look.sampling_seconds / times.estimate_round(lengths)
    else:
        sampling *= look.evaluation_seconds / times.estimate_evaluation(lengths)
    stages = {"sampling and rewards": sampling, **stages}
    repeated = RunTimes(stages, _sum_stages(cfg, stages), look.evaluation_seconds, estimate_checkpoint(model, cfg))
    text = format_run_time(repeated, count_remaining(cfg, repeated.step), a.steps)
    return f"{text}; sampling is measured, the rest estimated"


def describe_measured_time(
    cfg: Config,
    model: memory.ModelFacts,
    steps: Sequence[Record],
    elapsed: float,
    evaluated: int,
    evaluation_seconds: float = 0.0,
    checkpoint_seconds: float = 0.0,
    processes: int = 1,
) -> str:
    """Return how long the rest of a run will take, from recorded steps; empty if no step is left or recorded.

    The first step, in which caches are filled, only counts if there is no other. An evaluation that was not measured
    takes as many times as long as the sampling of a step as was counted for both.

    Args:
        steps: The records of metrics.jsonl, in order.
        elapsed: Seconds spent in steps.
        evaluated: The number of prompts of an evaluation.
        evaluation_seconds: The seconds of the last evaluation; 0 if none was measured.
        checkpoint_seconds: The seconds of the last checkpoint; 0 if none was measured.
    """
    timed = [step for step in steps if "time/step" in step]
    recent = timed[1:][-_RECORDED_STEPS:] or timed
    if not recent:
        return ""
    done, seconds = timed[-1]["step"], fmean(step["time/step"] for step in recent)
    left = count_remaining(cfg, seconds, done, elapsed)
    if not left.steps:
        return ""
    stages = {name: fmean(step.get(f"time/{key}") or 0.0 for step in recent) for key, name in _STAGES.items()}
    if not evaluation_seconds and left.evaluations:
        completion = fmean(step.get("completion/length_mean") or cfg.sampler.max_tokens for step in recent)
        lengths = Lengths(model.prompt_tokens, max(1.0, completion))
        times = make_time_model(cfg, model, processes, evaluated)
        ratio = times.estimate_evaluation(lengths) / times.estimate_round(lengths)
        evaluation_seconds = ratio * (stages["sampling"] + stages["rewards"])
    repeated = RunTimes(stages, seconds, evaluation_seconds, checkpoint_seconds or estimate_checkpoint(model, cfg))
    return format_run_time(repeated, left, cfg.algorithm.steps - done, word=" left")


def make_time_model(cfg: Config, model: memory.ModelFacts, processes: int, evaluated: int) -> TimeModel:
    """Return the time model of this machine, whose speeds it measures."""
    p, device = cfg.policy, hardware.pick_device(cfg.policy.device)
    dtype = hardware.pick_dtype(p.dtype, device)
    speed = reference_speed = measure_speed(dtype, device)
    if cfg.algorithm.kl_coef and not p.lora and p.reference != "auto":
        reference_speed = measure_speed(dtype, hardware.pick_device(p.reference))
    return TimeModel(cfg, model, speed, reference_speed, processes, evaluated)


def _count_evaluated(cfg: Config) -> int:
    """Return the number of prompts of an evaluation; evaluate.n if the data are not found."""
    with suppress(UserError):
        return len(sample_held_out_prompts(with_split(cfg.task, "test"), cfg.evaluate.n)) if cfg.evaluate.every else 0
    return cfg.evaluate.n


def _sum_stages(cfg: Config, stages: Mapping[str, float]) -> float:
    """Return the seconds of a step. Rollouts that are generated ahead take no time, unless all else takes less."""
    sampling, *others = stages.values()
    return max(sampling, sum(others)) if cfg.sampler.ahead else sampling + sum(others)

"""Runs one contender of bench.py or accuracy.py: a unit of work per line on stdin, and a line of JSON with its results.

    python benchmarks/contenders.py step pellucid --tokens 64

A unit of each kind of work:

step      sampling, rewards and an update of P prompts x G completions. No completion ends before its last token, and
          rewards differ in every group, so that all contenders do the same work
job       a training step of `make train`, with real rewards and completions that end
sample    sampling only
accuracy  several training steps of a recipe, then an evaluation: see course.py
"""

from __future__ import annotations

import argparse
import os

import course
import torch
import turns
from contender_trl import Job, StepRecord, make_trainer, read_clock
from trl_setups import get_setup

from pellucid.types import Reward
from pellucid.utils import hardware


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["step", "job", "sample", "accuracy"])
    parser.add_argument(
        "contender",
        help="pellucid, or a name of trl_setups.py; for step also transformers (Pellucid with the model code of"
        " transformers) and whole-weights (no adapter); for sample also without-graphs, generate and generate-batch",
    )
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lora", type=int, default=0, help="rank of the adapter that a step trains")
    parser.add_argument("--units", type=int, default=100)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pieces", type=int, default=0, help="micro-batches of TRL's update; 0: see trl_setups.py")
    parser.add_argument("--task", choices=course.TASKS, default="one-digit", help="for accuracy")
    parser.add_argument("--seed", type=int, default=0, help="for accuracy")
    parser.add_argument("--every", type=int, default=1, help="steps between evaluations, for accuracy")
    options, overrides = parser.parse_known_args()
    turns.redirect_output()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    if options.work == "accuracy":
        course.run_accuracy(options, overrides)
    elif overrides:
        parser.error(f"{overrides[0]}: only accuracy takes settings of a recipe")
    elif options.contender.startswith("trl"):
        run_trl(options)
    else:
        CONTENDERS[options.work, options.contender](options)
    turns.send_answer(peak_gb=hardware.get_peak_memory_gb(torch.device(options.device)))


def compute_reward(text: str) -> float:
    """Return a number that differs between texts and is the same in every process."""
    return sum(text.encode()) % 97 / 97


# ---------------------------------------------------------------- pellucid


def load_policy(model: str, device: str, dtype: str, lora_rank: int = 0, engine: str = "auto"):
    """Load the policy that Pellucid trains or samples from. Its completions never end early."""
    from pellucid.policy import policy  # noqa: PLC0415

    hardware.keep_freed_memory()
    learner = policy.load_policy(
        model, torch.device(device), getattr(torch, dtype), 1.0, lora_rank=lora_rank, engine=engine
    )
    learner.eos_ids = (-1,)
    return learner


def load_contender_policy(options: argparse.Namespace):
    engine = "transformers" if options.contender == "transformers" else "auto"
    lora_rank = 0 if options.contender == "whole-weights" else options.lora
    return load_policy(options.model, options.device, options.dtype, lora_rank, engine)


def make_task():
    from pellucid.tasks.arithmetic import Arithmetic  # noqa: PLC0415

    return Arithmetic(digits=2, operators=("+", "-"))


def make_graded_task():
    """Return arithmetic whose rewards differ in nearly every group, so that every step has a gradient."""

    class Task:
        seed, split = 0, "train"
        sample = staticmethod(make_task().sample)

        def reward(self, _prompt, completion):
            return Reward(compute_reward(completion.text))

    return Task()


def run_step(options: argparse.Namespace) -> None:
    from pellucid.algorithm import grpo  # noqa: PLC0415
    from pellucid.algorithm.settings import AdamWConfig, GRPOConfig  # noqa: PLC0415
    from pellucid.distributed.runtime import Runtime  # noqa: PLC0415
    from pellucid.rollout.native import NativeSampler  # noqa: PLC0415
    from pellucid.types import Sampling  # noqa: PLC0415

    learner = load_contender_policy(options)
    cfg = GRPOConfig(
        steps=options.units,
        prompts_per_step=options.prompts,
        group_size=options.group,
        max_length=options.tokens,
    )
    runtime = Runtime(learner, AdamWConfig(lr=1e-6), total_updates=options.units)
    sampling = Sampling(max_tokens=options.tokens)
    steps = grpo.train(make_graded_task(), NativeSampler(), learner, runtime, cfg, sampling=sampling)
    turns.take_turns(lambda _: course.summarize_step(next(steps)), read_clock)


def run_job(options: argparse.Namespace) -> None:
    cfg = course.make_job_config(options)
    steps = course.train(course.build_parts(cfg), cfg)
    turns.take_turns(lambda _: course.summarize_step(next(steps)), read_clock)


def run_sample(options: argparse.Namespace) -> None:
    from pellucid.rollout.native import NativeSampler  # noqa: PLC0415
    from pellucid.types import Sampling  # noqa: PLC0415

    learner, task = load_contender_policy(options), make_task()
    sampler = NativeSampler(policy=learner)

    def run_unit(i: int) -> dict[str, float]:
        sampling = Sampling(options.group, max_tokens=options.tokens, seed=str(i))
        groups = sampler.generate(task.sample(i, options.prompts), sampling)
        return {"tokens": float(sum(len(c.token_ids) for g in groups for c in g.completions))}

    turns.take_turns(run_unit, read_clock, dtype=options.dtype)


def run_sample_without_graphs(options: argparse.Namespace) -> None:
    from pellucid.models.decoder import Decoder  # noqa: PLC0415

    initialize = Decoder.__init__

    def initialize_without_graphs(self: Decoder, *arguments: object) -> None:
        initialize(self, *arguments)
        self.uses_cuda_graphs = False

    Decoder.__init__ = initialize_without_graphs
    run_sample(options)


# ---------------------------------------------------------------- transformers


def load_transformers(options: argparse.Namespace):
    """Return a model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    from pellucid.policy.load import locate_model  # noqa: PLC0415

    folder = locate_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype))
    return model.to(options.device).eval(), tokenizer


def run_generate(options: argparse.Namespace) -> None:
    (model, tokenizer), task = load_transformers(options), make_task()

    @torch.no_grad()
    def run_unit(i: int) -> dict[str, float]:
        chats = [list(map(dict, p.text)) for p in task.sample(i, options.prompts) for _ in range(options.group)]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
        )
        output = model.generate(
            **inputs.to(options.device),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            max_new_tokens=options.tokens,
            min_new_tokens=options.tokens,
            pad_token_id=tokenizer.eos_token_id,
        )
        return {"tokens": float(output[:, inputs["input_ids"].shape[1] :].numel())}

    turns.take_turns(run_unit, read_clock, dtype=options.dtype)


def run_generate_batch(options: argparse.Namespace) -> None:
    """Sample by continuous batching, with one manager for all turns and one request per prompt.

    The KV cache holds twice what a turn needs, since the manager admits requests only while a part of it is free.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: PLC0415

    (model, tokenizer), task = load_transformers(options), make_task()
    rows, cache = options.prompts * options.group, ContinuousBatchingConfig()
    pages = options.tokens // cache.page_size + 2  # a prompt is shorter than a page
    cache.num_blocks, cache.max_requests_per_batch = 2 * rows * pages, rows
    settings = GenerationConfig(
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        max_new_tokens=options.tokens,
        num_return_sequences=options.group,
        eos_token_id=-1,  # no token ends a completion
    )

    def run_unit(i: int) -> dict[str, float]:
        chats = [list(map(dict, p.text)) for p in task.sample(i, options.prompts)]
        manager.add_requests(tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"])
        done, count = 0, 0
        while done < rows:
            result = manager.get_result(timeout=1)
            if result is None and manager.is_running():
                continue
            if result is None or result.error:
                raise RuntimeError(f"continuous batching ended: {result and result.error}")
            done, count = done + 1, count + len(result.generated_tokens)
        return {"tokens": float(count)}

    manager = model.init_continuous_batching(settings, cache)
    manager.warmup()
    manager.start()
    try:
        turns.take_turns(run_unit, read_clock, dtype=options.dtype)
    finally:
        manager.stop(hard_stop=True)


# ---------------------------------------------------------------- TRL


def run_trl(options: argparse.Namespace) -> None:
    """Run a step of "step" or "job" per turn."""
    record = StepRecord()

    def start_step() -> None:
        turns.wait_for_turn()
        record.start = read_clock()

    def report_step(_: object) -> bool:
        seconds = read_clock() - record.start
        parts = {"generate": record.generate_seconds, "update": seconds - record.generate_seconds}
        turns.send_answer(seconds=seconds, reward=record.mean_reward, **parts)
        return True

    job = course.make_trl_job(course.make_job_config(options)) if options.work == "job" else make_step_job(options)
    trainer = make_trainer(job, get_setup(options.contender), record, start_step, report_step)
    turns.send_answer(ready=1)
    try:
        trainer.train()
    except EOFError:
        return


def make_step_job(options: argparse.Namespace) -> Job:
    from pellucid.policy.load import locate_model  # noqa: PLC0415

    return Job(
        model=locate_model(options.model),
        prompts=[p for i in range(options.units) for p in make_task().sample(i, options.prompts)],
        reward=lambda _, completion: compute_reward(completion.text),
        prompts_per_step=options.prompts,
        group_size=options.group,
        max_tokens=options.tokens,
        steps=options.units,
        full_length=True,
        device=options.device,
        micro_batches=options.pieces,
        lora=options.lora,
    )


CONTENDERS = {
    **dict.fromkeys((("step", name) for name in ("pellucid", "transformers", "whole-weights")), run_step),
    ("job", "pellucid"): run_job,
    ("sample", "pellucid"): run_sample,
    ("sample", "without-graphs"): run_sample_without_graphs,
    ("sample", "generate"): run_generate,
    ("sample", "generate-batch"): run_generate_batch,
}

if __name__ == "__main__":
    main()

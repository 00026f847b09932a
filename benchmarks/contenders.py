"""One contender in a process of its own: does a unit of work for every line on stdin and answers with a line of JSON.

    python benchmarks/contenders.py step pellucid --tokens 64

The orchestrator is bench.py. What a unit is:

step      sampling, rewards and an update of P prompts x G completions; none ends before its last token, and rewards
          differ in every group, so that all contenders do the same work
job       a step of `make train` as it is, learning: real rewards, completions that end
sample    sampling alone
accuracy  so many steps of a recipe, and then held-out accuracy: course.py
"""

from __future__ import annotations

import argparse
import os

import course
import torch
import turns
from contender_trl import Job, Laps, clock, trainer
from trl_setups import setup_of

from pellucid.types import Reward
from pellucid.utils import hardware


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["step", "job", "sample", "accuracy"])
    parser.add_argument(
        "contender",
        help="pellucid; of a step transformers, whose code then computes ours, or whole-weights in place of an adapter;"
        " of sampling without-graphs, generate or generate-batch; or what trl_setups.py knows",
    )
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter that a step trains")
    parser.add_argument("--units", type=int, default=100)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pieces", type=int, default=0, help="of TRL's update; 0 leaves it to trl_setups.py")
    parser.add_argument("--task", choices=course.TASKS, default="one-digit", help="of accuracy")
    parser.add_argument("--seed", type=int, default=0, help="of accuracy")
    parser.add_argument("--every", type=int, default=1, help="steps between evaluations")
    options, overrides = parser.parse_known_args()
    turns.begin()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    if options.work == "accuracy":
        course.take(options, overrides)
    elif overrides:
        parser.error(f"{overrides[0]}: only accuracy takes settings of a recipe")
    elif options.contender.startswith("trl"):
        trl_step(options)
    else:
        CONTENDERS[options.work, options.contender](options)
    turns.answer(peak_gb=hardware.get_peak_memory_gb(torch.device(options.device)))


def reward_of(text: str) -> float:
    """Different for different texts, and the same in every process."""
    return sum(text.encode()) % 97 / 97


# ---------------------------------------------------------------- pellucid


def our_policy(options: argparse.Namespace):
    from pellucid.policy import policy  # noqa: PLC0415

    hardware.keep_freed_memory()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    engine = "transformers" if options.contender == "transformers" else "auto"
    lora_rank = 0 if options.contender == "whole-weights" else options.lora
    learner = policy.load_policy(options.model, device, dtype, 1.0, lora_rank=lora_rank, engine=engine)
    learner.eos_ids = (-1,)  # no token ends a completion
    return learner


def our_task():
    from pellucid.tasks.arithmetic import Arithmetic  # noqa: PLC0415

    return Arithmetic(digits=2, operators=("+", "-"))


def our_graded_task():
    class Task:
        seed, split = 0, "train"
        sample = staticmethod(our_task().sample)

        def reward(self, _prompt, completion):
            return Reward(reward_of(completion.text))

    return Task()


def our_step(options: argparse.Namespace) -> None:
    from pellucid.algorithm import grpo  # noqa: PLC0415
    from pellucid.algorithm.settings import AdamWConfig, GRPOConfig  # noqa: PLC0415
    from pellucid.distributed.runtime import Runtime  # noqa: PLC0415
    from pellucid.rollout.native import NativeSampler  # noqa: PLC0415
    from pellucid.types import Sampling  # noqa: PLC0415

    learner = our_policy(options)
    cfg = GRPOConfig(
        steps=options.units,
        prompts_per_step=options.prompts,
        group_size=options.group,
        max_length=options.tokens,
    )
    runtime = Runtime(learner, AdamWConfig(lr=1e-6), total_updates=options.units)
    sampling = Sampling(max_tokens=options.tokens)
    steps = grpo.train(our_graded_task(), NativeSampler(), learner, runtime, cfg, sampling=sampling)
    turns.take(lambda _: course.seconds_of(next(steps)), clock)


def our_job(options: argparse.Namespace) -> None:
    parts, cfg = course.composed(course.job_settings(options))
    steps = course.trained(parts, cfg)
    turns.take(lambda _: course.seconds_of(next(steps)), clock)


def our_sample(options: argparse.Namespace) -> None:
    from pellucid.rollout.native import NativeSampler  # noqa: PLC0415
    from pellucid.types import Sampling  # noqa: PLC0415

    learner, task = our_policy(options), our_task()
    sampler = NativeSampler(policy=learner)

    def unit(i: int) -> dict[str, float]:
        sampling = Sampling(options.group, max_tokens=options.tokens, seed=str(i))
        groups = sampler.generate(task.sample(i, options.prompts), sampling)
        return {"tokens": float(sum(len(c.token_ids) for g in groups for c in g.completions))}

    turns.take(unit, clock, dtype=options.dtype)


def our_sample_without_graphs(options: argparse.Namespace) -> None:
    from pellucid.models.decoder import Decoder  # noqa: PLC0415

    begin = Decoder.__init__

    def without(self: Decoder, *arguments: object) -> None:
        begin(self, *arguments)
        self.uses_cuda_graphs = False

    Decoder.__init__ = without
    our_sample(options)


# ---------------------------------------------------------------- transformers


def load_transformers(options: argparse.Namespace):
    """Return a model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    from pellucid.policy.load import locate_model  # noqa: PLC0415

    folder = locate_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype))
    return model.to(options.device).eval(), tokenizer


def generate(options: argparse.Namespace) -> None:
    (model, tokenizer), task = load_transformers(options), our_task()

    @torch.no_grad()
    def unit(i: int) -> dict[str, float]:
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

    turns.take(unit, clock, dtype=options.dtype)


def generate_batch(options: argparse.Namespace) -> None:
    """Continuous batching by one manager for all turns, whose KV cache holds twice what a turn needs, since it admits
    requests only while some of it is free. A prompt is a request for several sequences."""
    from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: PLC0415

    (model, tokenizer), task = load_transformers(options), our_task()
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

    def unit(i: int) -> dict[str, float]:
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
        turns.take(unit, clock, dtype=options.dtype)
    finally:
        manager.stop(hard_stop=True)


# ---------------------------------------------------------------- TRL


def trl_step(options: argparse.Namespace) -> None:
    """A step or one of the job, at a turn."""
    laps = Laps()

    def before() -> None:
        turns.wait()
        laps.began = clock()

    def after(_: object) -> bool:
        seconds = clock() - laps.began
        parts = {"generate": laps.generated, "update": seconds - laps.generated}
        turns.answer(seconds=seconds, reward=laps.rewards, **parts)
        return True

    job = course.trl_job(course.job_settings(options)) if options.work == "job" else same_work(options)
    made = trainer(job, setup_of(options.contender), laps, before, after)
    turns.answer(ready=1)
    try:
        made.train()
    except EOFError:
        return


def same_work(options: argparse.Namespace) -> Job:
    from pellucid.policy.load import locate_model  # noqa: PLC0415

    return Job(
        model=locate_model(options.model),
        prompts=[p for i in range(options.units) for p in our_task().sample(i, options.prompts)],
        reward=lambda _, completion: reward_of(completion.text),
        per_step=options.prompts,
        group=options.group,
        tokens=options.tokens,
        steps=options.units,
        whole=True,
        device=options.device,
        pieces=options.pieces,
        lora=options.lora,
    )


CONTENDERS = {
    **dict.fromkeys((("step", name) for name in ("pellucid", "transformers", "whole-weights")), our_step),
    ("job", "pellucid"): our_job,
    ("sample", "pellucid"): our_sample,
    ("sample", "without-graphs"): our_sample_without_graphs,
    ("sample", "generate"): generate,
    ("sample", "generate-batch"): generate_batch,
}

if __name__ == "__main__":
    main()

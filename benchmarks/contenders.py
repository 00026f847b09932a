"""One contender in a process of its own: does a unit of work for every line on stdin and answers with a line of JSON.

    python benchmarks/contenders.py step pellucid --tokens 64

The orchestrator is bench.py. Completions never end before the last token, and rewards differ in every group, so that
all contenders do the same work: P prompts x G completions, as many tokens each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

import torch

from pellucid.machine import hardware

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # whatever a library prints goes to stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["step", "sample"])
    parser.add_argument("contender")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--units", type=int, default=100)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pieces", type=int, default=0, help="of TRL's update; 0: a piece for 64 tokens")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    CONTENDERS[options.work, options.contender](options)
    answer(peak_gb=hardware.peak_gb(torch.device(options.device)))


def answer(**facts: float) -> None:
    print(json.dumps(facts), file=ANSWERS)


def wait() -> None:
    """For the next turn; the orchestrator ends the process by closing stdin."""
    if not sys.stdin.readline():
        raise EOFError


def clock() -> float:
    """Seconds, read when a GPU has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def take_turns(unit: Callable[[int], dict[str, float]]) -> None:
    answer(ready=1)
    i = 0
    try:
        while True:
            wait()
            start = clock()
            facts = unit(i)
            answer(seconds=clock() - start, **facts)
            i += 1
    except EOFError:
        return


def reward_of(text: str) -> float:
    """Different for different texts, and the same in every process."""
    return sum(text.encode()) % 97 / 97


# ---------------------------------------------------------------- pellucid


def our_policy(options: argparse.Namespace):
    from pellucid.policy import policy  # noqa: PLC0415

    hardware.keep_freed_memory()
    learner = policy.load(options.model, torch.device(options.device), getattr(torch, options.dtype), temperature=1.0)
    learner.eos_ids = (-1,)  # no token ends a completion
    return learner


def our_task():
    from pellucid.tasks.arithmetic import Arithmetic  # noqa: PLC0415

    return Arithmetic(digits=2, operators=("+", "-"))


def our_graded_task():
    from pellucid.types import Reward  # noqa: PLC0415

    class Task:
        seed, split = 0, "train"
        sample = staticmethod(our_task().sample)

        def reward(self, _prompt, completion):
            return Reward(reward_of(completion.text))

    return Task()


def our_step(options: argparse.Namespace) -> None:
    from pellucid.algorithm import grpo  # noqa: PLC0415
    from pellucid.algorithm.settings import AdamWConfig, GRPOConfig  # noqa: PLC0415
    from pellucid.runtimes.runtime import Runtime  # noqa: PLC0415
    from pellucid.samplers.native import Native  # noqa: PLC0415
    from pellucid.types import Sampling  # noqa: PLC0415

    learner = our_policy(options)
    cfg = GRPOConfig(
        steps=options.units,
        prompts_per_step=options.prompts,
        group_size=options.group,
        max_length=options.tokens,
    )
    runtime = Runtime(learner, AdamWConfig(lr=1e-6), total=options.units)
    sampling = Sampling(max_tokens=options.tokens)
    steps = grpo.train(our_graded_task(), Native(), learner, runtime, cfg, sampling=sampling)

    def unit(_: int) -> dict[str, float]:
        metrics = next(steps).metrics
        return {"generate": metrics["time/generate"], "update": metrics["time/update"]}

    take_turns(unit)


def our_sample(options: argparse.Namespace) -> None:
    from pellucid.samplers.native import Native  # noqa: PLC0415
    from pellucid.types import Sampling  # noqa: PLC0415

    learner, task = our_policy(options), our_task()
    sampler = Native(policy=learner)

    def unit(i: int) -> dict[str, float]:
        sampling = Sampling(options.group, max_tokens=options.tokens, seed=str(i))
        groups = sampler.generate(task.sample(i, options.prompts), sampling)
        return {"tokens": float(sum(len(c.token_ids) for g in groups for c in g.completions))}

    take_turns(unit)


# ---------------------------------------------------------------- transformers


def generate(options: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    from pellucid.policy.pretrained import locate  # noqa: PLC0415

    folder, task = locate(options.model), our_task()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype)).to(options.device).eval()

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

    take_turns(unit)


# ---------------------------------------------------------------- TRL


def trl_step(options: argparse.Namespace, weights: str, autocast: bool) -> None:
    """GRPOTrainer as its documentation sets it up; without KL, one update for each set of rollouts.

    Unless told otherwise in as many pieces as keep its logits near those of 32 rows of 64 tokens: whole, 256 tokens do
    not fit into 24 GB.
    """
    import datasets  # noqa: PLC0415
    from transformers import TrainerCallback  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    from pellucid.policy.pretrained import locate  # noqa: PLC0415

    pieces = options.pieces or max(1, options.tokens // 64)
    prompts = [p for i in range(options.units) for p in our_task().sample(i, options.prompts)]
    rows = [{"prompt": list(map(dict, p.text))} for p in prompts]
    laps: dict[str, float] = {}

    class Turns(TrainerCallback):
        def on_train_begin(self, *_, **__):
            answer(ready=1)

        def on_step_end(self, *_, **__):
            seconds = clock() - laps["turn"]
            answer(seconds=seconds, generate=laps["generate"], update=seconds - laps["generate"])

    trainer = GRPOTrainer(
        model=locate(options.model),
        reward_funcs=lambda completions, **_: [reward_of(c[0]["content"]) for c in completions],
        args=GRPOConfig(
            output_dir="runs/bench-trl",
            use_cpu=options.device == "cpu",
            bf16=autocast,
            model_init_kwargs={"dtype": weights},
            per_device_train_batch_size=options.prompts * options.group // pieces,
            gradient_accumulation_steps=pieces,
            num_generations=options.group,
            max_completion_length=options.tokens,
            generation_kwargs={"min_new_tokens": options.tokens},
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-6,
            max_steps=options.units,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            report_to=[],
            logging_steps=10**6,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[Turns()],
    )
    inner = trainer._generate_and_score_completions

    def timed(inputs):
        wait()
        laps["turn"] = clock()
        outputs = inner(inputs)
        laps["generate"] = clock() - laps["turn"]
        return outputs

    trainer._generate_and_score_completions = timed
    try:
        trainer.train()
    except EOFError:
        return


CONTENDERS = {
    ("step", "pellucid"): our_step,
    ("step", "trl-bf16"): lambda o: trl_step(o, "bfloat16", autocast=False),
    ("step", "trl-autocast"): lambda o: trl_step(o, "float32", autocast=True),
    ("step", "trl-fp32"): lambda o: trl_step(o, "float32", autocast=False),
    ("sample", "pellucid"): our_sample,
    ("sample", "generate"): generate,
}

if __name__ == "__main__":
    main()

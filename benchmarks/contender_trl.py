"""Runs TRL's GRPOTrainer as a contender, with a callback before and after each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from trl_setups import Setup, count_micro_batches

from pellucid.types import Completion, Prompt


class Job(NamedTuple):
    """The training, which is the same for all contenders."""

    model: str
    prompts: Sequence[Prompt]
    """The prompts of all steps, in order."""
    reward: Callable[[Prompt, Completion], float]
    prompts_per_step: int
    group_size: int
    max_tokens: int
    steps: int
    lr: float = 1e-6
    schedule: str = "constant"
    warmup: int = 0
    temperature: float = 1.0
    full_length: bool = False
    """Whether every completion has max_tokens tokens."""
    seed: int = 0
    device: str = "cpu"
    micro_batches: int = 0
    """Micro-batches of an update. 0 leaves the number to the setup."""
    lora: int = 0
    """The rank of an adapter with the settings of Pellucid's. 0 trains all weights."""


class StepRecord:
    """The time at which a step started, its seconds of generation and rewards, and its mean reward."""

    def __init__(self) -> None:
        self.start, self.generate_seconds, self.mean_reward = 0.0, 0.0, 0.0


def make_trainer(
    job: Job, setup: Setup, record: StepRecord, before: Callable[[], None], after: Callable[[Any], bool]
) -> Any:
    """Return a GRPOTrainer as its documentation sets it up, without KL and with one update per step.

    Args:
        job: The training.
        setup: The settings of TRL that change its speed.
        record: Receives the generation time and the mean reward of each step. `before` sets its start.
        before: Called before each step.
        after: Called with the model after each step. Training stops if it returns False.
    """
    import datasets  # noqa: PLC0415
    from transformers import TrainerCallback  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    rows = job.prompts_per_step * job.group_size
    micro_batches = job.micro_batches or count_micro_batches(setup, rows, job.max_tokens)

    class StepCallback(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):  # noqa: ARG002
            if not after(trainer.accelerator.unwrap_model(trainer.model)):
                control.should_training_stop = True

    def compute_rewards(completions, completion_ids, row, **_):
        if job.full_length and any(len(ids) < job.max_tokens for ids in completion_ids):
            raise SystemExit(f"a completion has fewer than {job.max_tokens} tokens: the work is not the same")
        texts = [completion[0]["content"] for completion in completions]
        graded = [Completion((), (), text, finished=True) for text in texts]
        values = [job.reward(job.prompts[i], completion) for i, completion in zip(row, graded, strict=True)]
        record.mean_reward = sum(values) / len(values)
        return values

    arguments = {
        "output_dir": "runs/bench-trl",
        "use_cpu": job.device == "cpu",
        "per_device_train_batch_size": rows // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "num_generations": job.group_size,
        "max_completion_length": job.max_tokens,
        "learning_rate": job.lr,
        "lr_scheduler_type": job.schedule,
        "warmup_steps": job.warmup,
        "temperature": job.temperature,
        "max_steps": job.steps,
        "seed": job.seed,
        "shuffle_dataset": False,
        "report_to": [],
        "logging_steps": 10**6,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if job.full_length:
        arguments["generation_kwargs"] = {"min_new_tokens": job.max_tokens}
    model = setup.model | ({"dtype": setup.weights} if setup.weights else {})
    questions = [{"prompt": list(map(dict, p.text)), "row": i} for i, p in enumerate(job.prompts)]
    trainer = GRPOTrainer(
        model=job.model,
        reward_funcs=compute_rewards,
        args=GRPOConfig(**arguments, **setup.arguments, model_init_kwargs=model or None),
        train_dataset=datasets.Dataset.from_list(questions),
        callbacks=[StepCallback()],
        peft_config=make_adapter_config(job),
    )
    generate = trainer._generate_and_score_completions

    def generate_timed(inputs):
        before()
        start = read_clock()
        outputs = generate(inputs)
        record.generate_seconds = read_clock() - start
        return outputs

    trainer._generate_and_score_completions = generate_timed
    return trainer


def make_adapter_config(job: Job) -> Any:
    if not job.lora:
        return None
    import peft  # noqa: PLC0415

    return peft.LoraConfig(r=job.lora, lora_alpha=2 * job.lora, target_modules="all-linear", task_type="CAUSAL_LM")


def read_clock() -> float:
    """Return the time in seconds, after a GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()

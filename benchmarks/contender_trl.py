"""TRL's GRPOTrainer as a contender: a step at a turn, or steps and an evaluation of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from trl_setups import Setup, pieces_of

from pellucid.types import Completion, Prompt


class Job(NamedTuple):
    """What is trained, which is the same for all contenders."""

    model: str
    prompts: Sequence[Prompt]
    """Those of all steps, in their order."""
    reward: Callable[[Prompt, Completion], float]
    per_step: int
    group: int
    tokens: int
    steps: int
    lr: float = 1e-6
    schedule: str = "constant"
    warmup: int = 0
    temperature: float = 1.0
    whole: bool = False
    """No completion ends before its last token."""
    seed: int = 0
    device: str = "cpu"
    pieces: int = 0
    """Of an update; 0 leaves it to the setup."""
    lora: int = 0
    """The rank of an adapter with the settings of ours; 0 trains whole weights."""


class Laps:
    """Seconds of a step, and of the sampling and the rewards in it."""

    def __init__(self) -> None:
        self.began, self.generated, self.rewards = 0.0, 0.0, 0.0


def trainer(job: Job, setup: Setup, laps: Laps, before: Callable[[], None], after: Callable[[Any], bool]) -> Any:
    """GRPOTrainer as its documentation sets it up; without KL, one update for each set of rollouts.

    before: called before each step. after: with the model, after each; whether the training goes on.
    """
    import datasets  # noqa: PLC0415
    from transformers import TrainerCallback  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    rows = job.per_step * job.group
    pieces = job.pieces or pieces_of(setup, rows, job.tokens)

    class Steps(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):  # noqa: ARG002
            if not after(made.accelerator.unwrap_model(made.model)):
                control.should_training_stop = True

    def graded(completions, completion_ids, row, **_):
        if job.whole and any(len(ids) < job.tokens for ids in completion_ids):
            raise SystemExit(f"a completion ended before its {job.tokens} tokens: the work is not the same")
        texts = [completion[0]["content"] for completion in completions]
        said = [Completion((), (), text, finished=True) for text in texts]
        values = [job.reward(job.prompts[i], completion) for i, completion in zip(row, said, strict=True)]
        laps.rewards = sum(values) / len(values)
        return values

    arguments = {
        "output_dir": "runs/bench-trl",
        "use_cpu": job.device == "cpu",
        "per_device_train_batch_size": rows // pieces,
        "gradient_accumulation_steps": pieces,
        "num_generations": job.group,
        "max_completion_length": job.tokens,
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
    if job.whole:
        arguments["generation_kwargs"] = {"min_new_tokens": job.tokens}
    model = setup.model | ({"dtype": setup.weights} if setup.weights else {})
    questions = [{"prompt": list(map(dict, p.text)), "row": i} for i, p in enumerate(job.prompts)]
    made = GRPOTrainer(
        model=job.model,
        reward_funcs=graded,
        args=GRPOConfig(**arguments, **setup.arguments, model_init_kwargs=model or None),
        train_dataset=datasets.Dataset.from_list(questions),
        callbacks=[Steps()],
        peft_config=adapter_of(job),
    )
    inner = made._generate_and_score_completions

    def timed(inputs):
        before()
        start = clock()
        outputs = inner(inputs)
        laps.generated = clock() - start
        return outputs

    made._generate_and_score_completions = timed
    return made


def adapter_of(job: Job) -> Any:
    if not job.lora:
        return None
    import peft  # noqa: PLC0415

    return peft.LoraConfig(r=job.lora, lora_alpha=2 * job.lora, target_modules="all-linear", task_type="CAUSAL_LM")


def clock() -> float:
    """Seconds, read when a GPU has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()

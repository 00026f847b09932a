"""A reward model beside transformers and TRL, and its share of a step's time.

    python benchmarks/reward_model.py [--steps 5] [--batch 16]

The reward model is the policy's with a random head, in fp32, and is the whole of the reward. Its values for the
completions of the last step are compared with those of transformers, one sequence at a time and without padding, and
with those of TRL's trainer.
"""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import datasets
import torch
import tyro
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error
from trl import GRPOConfig, GRPOTrainer

import pellucid
from pellucid.policy import load
from pellucid.rewards.parts import PromptCompletion
from pellucid.rewards.reward_model import RewardModel
from pellucid.rewards.settings import RewardModelSettings
from pellucid.utils import hardware

ROWS = [{"question": f"Write a sentence about the number {n}.", "answer": ""} for n in range(40)]


@dataclass
class Options:
    model: str = "smollm2-135m"
    steps: int = 5
    prompts: int = 4
    group: int = 8
    tokens: int = 64
    batch: int = 16


def main(options: Options) -> None:
    hardware.keep_freed_memory()
    disable_progress_bar()
    set_verbosity_error()
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "rewards"
        make(options.model, folder)
        pairs = train(options, folder, Path(home) / "run")
        parts = RewardModel(str(folder), RewardModelSettings(batch=options.batch)).grade(pairs)
        values = torch.tensor([part.value for part in parts])
        print(f"{len(pairs)} completions, rewards {values.mean():.3f} +- {values.std():.3f}; greatest difference")
        print(f"from transformers, one at a time  {(values - alone(folder, pairs)).abs().max():.1e}")
        print(f"from TRL, all at once             {(values - by_trl(options.model, folder, pairs)).abs().max():.1e}")


def make(name: str, folder: Path) -> None:
    """Put a classifier with one label into the folder, on the body of a language model."""
    torch.manual_seed(0)
    body = load.locate_model(name)
    words = AutoTokenizer.from_pretrained(body)
    how = {"num_labels": 1, "dtype": torch.float32, "pad_token_id": words.pad_token_id}
    AutoModelForSequenceClassification.from_pretrained(body, **how).save_pretrained(folder)
    words.save_pretrained(folder)


def train(options: Options, folder: Path, run: Path) -> list[PromptCompletion]:
    """Train with the model as the reward, and print its share. Return the completions of the last step."""
    run_of_it = pellucid.train(
        model=options.model,
        data=ROWS,
        reward=pellucid.RewardTerm(f"model:{folder}", reward_model=RewardModelSettings(batch=options.batch)),
        run=run,
        steps=options.steps,
        prompts_per_step=options.prompts,
        group_size=options.group,
        sampler_max_tokens=options.tokens,
        evaluate_every=0,
        checkpoint_every=0,
    )
    steps = list(run_of_it)
    spent = [(step.metrics["time/reward"], step.metrics["time/step"]) for step in steps]
    share = median(reward / step for reward, step in spent)
    reward, step = (median(column) for column in zip(*spent, strict=True))
    print(
        f"{options.prompts}x{options.group} completions of up to {options.tokens} tokens, medians of {len(spent)}"
        f" steps: {step:.2f} s a step, {reward:.2f} s of them the reward model, {share:.0%}"
    )
    return [(group.prompt, completion) for group in steps[-1].groups for completion in group.completions]


def alone(folder: Path, pairs: list[PromptCompletion]) -> torch.Tensor:
    model, words = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    values = []
    for prompt, completion in pairs:
        messages = [*prompt.text, {"role": "assistant", "content": completion.text}]
        told = words.apply_chat_template(messages, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            values.append(float(model(**told).logits[0, 0]))
    return torch.tensor(values)


def by_trl(policy: str, folder: Path, pairs: list[PromptCompletion]) -> torch.Tensor:
    """By the method of its trainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = GRPOConfig(str(folder), report_to=[], use_cpu=True, bf16=False)
        rows = datasets.Dataset.from_list([{"prompt": "?"}])
        trainer = GRPOTrainer(load.locate_model(policy), str(folder), args=settings, train_dataset=rows)
    prompts = [list(prompt.text) for prompt, _ in pairs]
    answers = [[{"role": "assistant", "content": completion.text}] for _, completion in pairs]
    return trainer._calculate_rewards([{"prompt": prompt} for prompt in prompts], prompts, answers, None)[:, 0]


if __name__ == "__main__":
    main(tyro.cli(Options))

"""Measures the share of a step that a reward model takes, and compares its rewards with transformers and TRL.

    python benchmarks/reward_model.py [--steps 5] [--batch 16]

The reward model is the policy's model with a random head, in fp32, and the only reward. Its rewards for the completions
of the last step are compared with those of transformers, which scores one sequence at a time without padding, and with
those of TRL's trainer.
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
        make_reward_model(options.model, folder)
        pairs = train(options, folder, Path(home) / "run")
        parts = RewardModel(str(folder), RewardModelSettings(batch=options.batch)).grade(pairs)
        values = torch.tensor([part.value for part in parts])
        by_transformers = score_with_transformers(folder, pairs)
        by_trl = score_with_trl(options.model, folder, pairs)
        print(f"{len(pairs)} completions, rewards {values.mean():.3f} +- {values.std():.3f}; largest difference")
        print(f"from transformers, one at a time  {(values - by_transformers).abs().max():.1e}")
        print(f"from TRL, all at once             {(values - by_trl).abs().max():.1e}")


def make_reward_model(name: str, folder: Path) -> None:
    """Save a language model with a random head for one label."""
    torch.manual_seed(0)
    path = load.locate_model(name)
    tokenizer = AutoTokenizer.from_pretrained(path)
    settings = {"num_labels": 1, "dtype": torch.float32, "pad_token_id": tokenizer.pad_token_id}
    AutoModelForSequenceClassification.from_pretrained(path, **settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(options: Options, folder: Path, run: Path) -> list[PromptCompletion]:
    """Train with the reward model, print its share of a step, and return the completions of the last step."""
    training = pellucid.train(
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
    steps = list(training)
    times = [(step.metrics["time/reward"], step.metrics["time/step"]) for step in steps]
    share = median(reward / step for reward, step in times)
    reward, step = (median(column) for column in zip(*times, strict=True))
    print(
        f"{options.prompts}x{options.group} completions of up to {options.tokens} tokens, medians of {len(times)}"
        f" steps: {step:.2f} s per step, {reward:.2f} s of it in the reward model ({share:.0%})"
    )
    return [(group.prompt, completion) for group in steps[-1].groups for completion in group.completions]


def score_with_transformers(folder: Path, pairs: list[PromptCompletion]) -> torch.Tensor:
    """Return a reward for each completion, scored alone and without padding. Shape: (completions,)."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer, values = AutoTokenizer.from_pretrained(folder), []
    for prompt, completion in pairs:
        messages = [*prompt.text, {"role": "assistant", "content": completion.text}]
        inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            values.append(float(model(**inputs).logits[0, 0]))
    return torch.tensor(values)


def score_with_trl(policy: str, folder: Path, pairs: list[PromptCompletion]) -> torch.Tensor:
    """Return a reward for each completion, scored by a method of TRL's trainer. Shape: (completions,)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = GRPOConfig(str(folder), report_to=[], use_cpu=True, bf16=False)
        rows = datasets.Dataset.from_list([{"prompt": "?"}])
        trainer = GRPOTrainer(load.locate_model(policy), str(folder), args=settings, train_dataset=rows)
    prompts = [list(prompt.text) for prompt, _ in pairs]
    completions = [[{"role": "assistant", "content": completion.text}] for _, completion in pairs]
    return trainer._calculate_rewards([{"prompt": prompt} for prompt in prompts], prompts, completions, None)[:, 0]


if __name__ == "__main__":
    main(tyro.cli(Options))

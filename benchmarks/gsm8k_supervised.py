"""Supervised training on GSM8K's own solutions, to compare with what a reward teaches: the same loss without a reward.

    python benchmarks/gsm8k_supervised.py --run runs/supervised --tokens 900000 --optimizer.lr 2e-4
    python benchmarks/gsm8k.py --run runs/supervised

It is also the first phase of benchmarks/gsm8k.py. The model, its adapter and the optimizer are those of
recipes/gsm8k_laptop.toml; settings may follow. The loss is the mean negative log-likelihood of the solutions' tokens,
which is the objective `reinforce` with an advantage of 1. The learning rate is constant, and the temperature 1. The
second command evaluates.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import time
from dataclasses import replace
from pathlib import Path

from gsm8k import RECIPE, list_data_flags
from transformers.utils.logging import disable_progress_bar

from pellucid.algorithm.batch import Batch, collate
from pellucid.algorithm.grpo import update_policy
from pellucid.config import Config, build_config, parse_setting_flags, read_settings, resolve_config
from pellucid.policy.lora import save_adapter
from pellucid.policy.policy import Policy
from pellucid.training.build import build_components, resolve_machine_settings
from pellucid.training.run_dir import dump_settings
from pellucid.types import Completion, Group, Prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/supervised"))
    parser.add_argument("--tokens", type=int, default=900_000, help="how many tokens of solutions are trained on")
    parser.add_argument("--solutions", type=int, default=64, help="per optimizer step")
    options, overrides = parser.parse_known_args()
    disable_progress_bar()
    own = ["--sampler.temperature", "1", "--optimizer.desired_kl", "0", "--algorithm.objective", "reinforce"]
    flags = [*map(str, list_data_flags()), *own, *overrides]
    settings = build_config(read_settings(RECIPE), str(RECIPE), parse_setting_flags(flags))
    cfg = resolve_config(resolve_machine_settings(settings))
    parts = build_components(cfg)
    options.run.mkdir(parents=True, exist_ok=True)
    trained, step = 0, 0
    with (options.run / "metrics.jsonl").open("w", encoding="utf-8") as lines:
        while trained < options.tokens:
            start = time.monotonic()
            prompts = parts.task.sample(step, options.solutions)
            batch = collate([make_gold_group(parts.policy, prompt) for prompt in prompts])
            trained, step = trained + int(batch.action_mask.sum()), step + 1
            metrics = update_policy(parts.policy, give_equal_advantages(batch), parts.runtime, cfg.algorithm)
            seconds = time.monotonic() - start
            print(f"step {step}  {trained:,} tokens  loss {metrics['loss']:.3f}  {seconds:.1f} s", flush=True)
            record = {"step": step, "tokens": trained, "loss": metrics["loss"], "time/step": seconds}
            lines.write(json.dumps({**record, "memory/peak_gb": read_peak_gb()}) + "\n")
            lines.flush()
    save_run(options.run, cfg, parts.policy)


def save_run(run: Path, cfg: Config, policy: Policy) -> None:
    """Save the model, its adapter and the settings as `pellucid train` does, so that `pellucid eval RUN` loads them."""
    (run / "config.json").write_text(json.dumps(dump_settings(cfg), indent=2) + "\n", encoding="utf-8")
    save_adapter(policy.adapter, policy.trainable(), run / "adapter")
    policy.save(run / "model.partial")
    (run / "model.partial").rename(run / "model")


def read_peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def give_equal_advantages(batch: Batch) -> Batch:
    return replace(batch, advantages=batch.action_mask.float())


def make_gold_group(policy: Policy, prompt: Prompt) -> Group:
    """Return a prompt with its solution as the only answer; the final number is in a box, as the prompt asks."""
    solution, _, number = prompt.columns["answer"].partition("\n#### ")
    text = f"{re.sub('<<.*?>>', '', solution)}\nThe answer is \\boxed{{{number}}}."
    ids = (*policy.tokenizer.encode(text, add_special_tokens=False), policy.eos_ids[0])
    return Group(prompt, policy.encode(prompt), (Completion(ids, (0.0,) * len(ids), text, True),))


if __name__ == "__main__":
    main()

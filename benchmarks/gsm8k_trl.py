"""GSM8K by TRL: the job of recipes/gsm8k_laptop.toml, so that its time and its result can be compared with ours.

    python benchmarks/gsm8k_trl.py --run runs/trl --optimizer.desired_kl 0 --algorithm.overlong_cache 0
    python benchmarks/gsm8k.py --run runs/trl

Model, prompts and their order, group size, tokens, temperature, adapter, optimizer and schedule are those of the
recipe; settings may follow. Two are switched off: TRL does not adapt its learning rate to the update KL, and has the
penalty of long answers only as a reward of its own. TRL's warmup starts at 0, so its first step trains nothing. Rewards
come from the same function. Each step is a line of metrics.jsonl, with its seconds and the peak memory. The second
command evaluates.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from pathlib import Path
from typing import Any

from contender_trl import Job, StepRecord, make_trainer, read_clock
from course import make_trl_job
from gsm8k import RECIPE, list_data_flags
from trl_setups import get_setup

from pellucid.config import Config, build_config, parse_setting_flags, read_settings, resolve_config
from pellucid.training.run_dir import dump_settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/trl"))
    parser.add_argument("--setup", default="trl-bf16", help="how TRL is set up: see trl_setups.py")
    options, overrides = parser.parse_known_args()
    if (options.run / "model").is_dir():
        sys.exit(f"{options.run} is there already: give another --run, or remove it")
    flags = parse_setting_flags([*map(str, list_data_flags()), *overrides])
    cfg = resolve_config(build_config(read_settings(RECIPE), str(RECIPE), flags))
    if cfg.optimizer.desired_kl or cfg.algorithm.overlong_cache:
        sys.exit(
            "TRL has no desired_kl and no overlong_cache: give --optimizer.desired_kl 0 --algorithm.overlong_cache 0"
        )
    job = make_job(cfg)
    record, steps = StepRecord(), 0

    def start_clock() -> None:
        record.start = read_clock()

    def report_step(_: Any) -> bool:
        nonlocal steps
        steps += 1
        seconds, peak = read_clock() - record.start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        print(
            f"step {steps}  reward {record.mean_reward:.3f}  {seconds:.1f} s, sampling {record.generate_seconds:.1f} s",
            flush=True,
        )
        times = {"time/step": seconds, "time/generate": record.generate_seconds, "memory/peak_gb": peak}
        lines.write(json.dumps({"step": steps, "reward/mean": record.mean_reward, **times}) + "\n")
        lines.flush()
        return True

    options.run.mkdir(parents=True, exist_ok=True)
    with (options.run / "metrics.jsonl").open("w", encoding="utf-8") as lines:
        grpo = make_trainer(job, get_setup(options.setup), record, start_clock, report_step)
        grpo.train()
    (options.run / "config.json").write_text(json.dumps(dump_settings(cfg), indent=2) + "\n", encoding="utf-8")
    model = grpo.accelerator.unwrap_model(grpo.model)
    model.save_pretrained(options.run / "adapter")
    model.float().merge_and_unload().save_pretrained(options.run / "model")
    grpo.processing_class.save_pretrained(options.run / "model")
    print(options.run / "model")


def make_job(cfg: Config) -> Job:
    """Return the recipe's work, with the prompts of all steps."""
    rows = cfg.algorithm.prompts_per_step * cfg.algorithm.group_size
    if cfg.algorithm.micro_batch == "auto":
        sys.exit("TRL cannot choose it: give --algorithm.micro_batch a number")
    micro_batches = rows // cfg.algorithm.micro_batch
    return make_trl_job(cfg)._replace(micro_batches=micro_batches, lora=cfg.policy.lora)


if __name__ == "__main__":
    main()

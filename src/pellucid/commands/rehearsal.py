"""`pellucid train --dry-run`: what a run would be. No weights are loaded, and nothing is written."""

from __future__ import annotations

import os
from pathlib import Path

import rich
from rich.markup import escape

from pellucid import config
from pellucid.algorithm.advantages import advantage_of
from pellucid.algorithm.objectives import objective_of
from pellucid.commands.rerun import toml
from pellucid.config import Config
from pellucid.doctor import memory
from pellucid.machine.harmless import harmless
from pellucid.policy import pretrained
from pellucid.policy.template import prefix_ids, question_ids
from pellucid.protocols import with_split
from pellucid.training import preflight
from pellucid.training.compose import settled, template_of
from pellucid.types import UserError


def show(cfg: Config, run_dir: Path) -> int:
    """Print the recipe with all of its settings, the numbers that follow from it, and the first prompt as it is read.

    UserError for what a run would refuse before it loads the model.
    """
    cfg = settled(config.resolved(cfg))
    preflight.check(cfg, run_dir)
    advantage_of(cfg.algorithm.advantage)
    objective_of(cfg.algorithm.objective)
    model = memory.of_policy(cfg.policy)
    words = pretrained.tokenizer(cfg.policy.model, cfg.policy.access)
    template_of(cfg).put_into(words)
    prompt = next(iter(with_split(cfg.task, "train").sample(0, 1)), None)
    if prompt is None:
        raise UserError("the task has no prompt for step 0: its sample(step, n) must return n of them")
    print(harmless(toml(config.dump(cfg))), flush=True)
    preflight.show_plan(cfg, model, memory.why_not_ours(model, cfg), int(os.environ.get("WORLD_SIZE", "1")), run_dir)
    asked = harmless(str(words.decode([*question_ids(words, prompt), *prefix_ids(words, prompt)])))
    rich.print(f"\n[dim]{escape(asked)}[/dim][bold cyan]|[/bold cyan]")
    return 0

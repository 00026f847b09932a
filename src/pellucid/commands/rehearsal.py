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
from pellucid.environments.agent import AgentTalk
from pellucid.environments.worlds import world_of
from pellucid.machine.harmless import harmless
from pellucid.policy import pretrained
from pellucid.policy.template import prefix_ids, question_ids
from pellucid.protocols import with_split
from pellucid.tasks.wrappers import innermost, only_here
from pellucid.training import preflight
from pellucid.training.compose import settled, template_of
from pellucid.types import Prompt, UserError

STARTUP = 60.0
"""Seconds that the processes of an environment may take to start, besides the time limit of a call."""


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
    template_of(cfg).apply_to_tokenizer(words)
    prompt = next(iter(with_split(cfg.task, "train").sample(0, 1)), None)
    if prompt is None:
        raise UserError("the task has no prompt for step 0: its sample(step, n) must return n of them")
    print(harmless(toml(config.dump(cfg))), flush=True)
    preflight.show_plan(cfg, model, memory.why_not_ours(model, cfg), int(os.environ.get("WORLD_SIZE", "1")), run_dir)
    task = innermost(cfg.task)
    if isinstance(getattr(task, "environment_spec", None), AgentTalk):
        print("\nThe agent writes its prompts by itself: they are shown when it runs. The row that it is given first:")
    else:
        prompt = as_asked(cfg, prompt)
    asked = harmless(str(words.decode([*question_ids(words, prompt), *prefix_ids(words, prompt)])))
    rich.print(f"\n[dim]{escape(asked)}[/dim][bold cyan]|[/bold cyan]")
    return 0


def as_asked(cfg: Config, prompt: Prompt) -> Prompt:
    """Return the prompt with its tools and with what the environment adds to it, where there is one.

    UserError where the environment cannot begin a conversation.
    """
    task = innermost(cfg.task)
    world = world_of(task, cfg.reward, in_process=only_here(cfg.task))
    if not world:
        return prompt
    try:
        world.start_conversation(0, prompt, 0)
        replies = world.receive_replies(task.environment_spec.timeout + STARTUP)
        if not replies:
            raise UserError("the environment did not say its question: run it by itself, or raise task.timeout")
        reply = replies[0][1]
        if reply.prompt is None:
            why = reply.outcome.error if reply.outcome else ""
            raise UserError(f"the environment cannot begin a conversation: {why or 'it was over at once'}")
        return reply.prompt
    finally:
        world.close()

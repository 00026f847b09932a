"""`pellucid train --dry-run`: what a run would be. No weights are loaded, and nothing is written."""

from __future__ import annotations

import os
from pathlib import Path

import rich
from rich.markup import escape

from pellucid import config
from pellucid.algorithm.advantages import get_advantage_function
from pellucid.algorithm.objectives import get_objective_function
from pellucid.config import Config, format_toml
from pellucid.environments.agents import AgentSpec
from pellucid.environments.pool import create_environments
from pellucid.policy import load
from pellucid.policy.chat_template import encode_prefix, encode_question
from pellucid.tasks.wrappers import get_innermost_task, is_process_bound
from pellucid.training import memory, preflight
from pellucid.training.build import make_template, resolve_machine_settings
from pellucid.types import Prompt, UserError, with_split
from pellucid.utils.text import escape_controls

ENVIRONMENT_STARTUP_SECONDS = 60.0
"""Seconds that the processes of an environment may take to start, besides the time limit of a call."""


def show_dry_run(cfg: Config, run_dir: Path) -> int:
    """Print the recipe with all of its settings, the numbers that follow from it, and the first prompt as it is read.

    UserError for what a run would refuse before it loads the model.
    """
    cfg = resolve_machine_settings(config.resolve_config(cfg))
    preflight.run_preflight_checks(cfg, run_dir)
    get_advantage_function(cfg.algorithm.advantage)
    get_objective_function(cfg.algorithm.objective)
    model = memory.describe_policy_model(cfg.policy)
    words = load.load_tokenizer(cfg.policy.model, cfg.policy.access)
    make_template(cfg).apply_to_tokenizer(words)
    prompt = next(iter(with_split(cfg.task, "train").sample(0, 1)), None)
    if prompt is None:
        raise UserError("the task has no prompt for step 0: its sample(step, n) must return n of them")
    print(escape_controls(format_toml(config.dump_config(cfg))), flush=True)
    preflight.show_plan(
        cfg, model, memory.predict_fallback_reason(model, cfg), int(os.environ.get("WORLD_SIZE", "1")), run_dir
    )
    task = get_innermost_task(cfg.task)
    if isinstance(getattr(task, "environment_spec", None), AgentSpec):
        print("\nThe agent writes its prompts by itself: they are shown when it runs. The row that it is given first:")
    else:
        prompt = get_environment_prompt(cfg, prompt)
    asked = escape_controls(str(words.decode([*encode_question(words, prompt), *encode_prefix(words, prompt)])))
    rich.print(f"\n[dim]{escape(asked)}[/dim][bold cyan]|[/bold cyan]")
    return 0


def get_environment_prompt(cfg: Config, prompt: Prompt) -> Prompt:
    """Return the prompt with its tools and with what the environment adds to it, where there is one.

    UserError where the environment cannot begin a conversation.
    """
    task = get_innermost_task(cfg.task)
    world = create_environments(task, cfg.reward, in_process=is_process_bound(cfg.task))
    if not world:
        return prompt
    try:
        world.start_conversation(0, prompt, 0)
        replies = world.receive_replies(task.environment_spec.timeout + ENVIRONMENT_STARTUP_SECONDS)
        if not replies:
            raise UserError("the environment did not say its question: run it by itself, or raise task.timeout")
        reply = replies[0][1]
        if reply.prompt is None:
            why = reply.outcome.error if reply.outcome else ""
            raise UserError(f"the environment cannot begin a conversation: {why or 'it was over at once'}")
        return reply.prompt
    finally:
        world.close()

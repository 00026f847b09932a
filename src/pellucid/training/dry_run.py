"""`pellucid train --dry-run`: prints what a run would do. It loads no weights and writes no files."""

from __future__ import annotations

import os
from pathlib import Path

import rich
from rich.markup import escape

from pellucid.config import Config, dump_config, format_toml, resolve_config
from pellucid.environments.agents import AgentSpec
from pellucid.environments.pool import create_environments
from pellucid.policy.chat_template import encode_prefix, encode_question
from pellucid.tasks.wrappers import get_innermost_task, is_process_bound
from pellucid.training.build import resolve_machine_settings
from pellucid.training.memory import describe_model, predict_fallback_reason
from pellucid.training.preflight import load_run_tokenizer, run_preflight_checks, show_plan
from pellucid.training.time_estimate import describe_planned_time
from pellucid.types import Prompt, UserError, with_split
from pellucid.utils.text import escape_controls

_ENVIRONMENT_STARTUP_SECONDS = 60.0
"""The time limit for starting the processes of an environment, added to the time limit of a call."""


def show_dry_run(cfg: Config, run_dir: Path) -> int:
    """Print all settings, the numbers that follow from them, and the first prompt as the policy reads it.

    Return the exit status, 0. Raise UserError if a run would refuse these settings before it loads the model.
    """
    cfg = resolve_machine_settings(resolve_config(cfg))
    cfg, prompt_tokens = run_preflight_checks(cfg, run_dir)
    model = describe_model(cfg.policy)._replace(prompt_tokens=prompt_tokens)
    tokenizer = load_run_tokenizer(cfg.policy)
    prompt = next(iter(with_split(cfg.task, "train").sample(0, 1)), None)
    if prompt is None:
        raise UserError("the task has no prompt for step 0: its sample(step, n) must return n prompts")
    print(escape_controls(format_toml(dump_config(cfg))), flush=True)
    fallback, processes = predict_fallback_reason(model, cfg.policy), int(os.environ.get("WORLD_SIZE", "1"))
    show_plan(cfg, model, fallback, processes, run_dir, describe_planned_time(cfg, model, processes))
    task = get_innermost_task(cfg.task)
    if isinstance(getattr(task, "environment_spec", None), AgentSpec):
        print("\nThe agent writes its own prompts, which are shown when it runs. Its first data row:")
    else:
        prompt = _get_environment_prompt(cfg, prompt)
    text = str(tokenizer.decode([*encode_question(tokenizer, prompt), *encode_prefix(tokenizer, prompt)]))
    rich.print(f"\n[dim]{escape(escape_controls(text))}[/dim][bold cyan]|[/bold cyan]")
    return 0


def _get_environment_prompt(cfg: Config, prompt: Prompt) -> Prompt:
    """Return the prompt with the tools and messages that its environment adds; unchanged without an environment."""
    task = get_innermost_task(cfg.task)
    environments = create_environments(task, cfg.reward, in_process=is_process_bound(cfg.task))
    if not environments:
        return prompt
    try:
        environments.start_conversation(0, prompt, 0)
        replies = environments.receive_replies(task.environment_spec.timeout + _ENVIRONMENT_STARTUP_SECONDS)
        if not replies:
            raise UserError("the environment sent no question in time: test it alone, or raise task.timeout")
        reply = replies[0][1]
        if reply.prompt is None:
            why = reply.outcome.error if reply.outcome else ""
            raise UserError(f"the environment cannot begin a conversation: {why or 'it ended at once'}")
        return reply.prompt
    finally:
        environments.close()

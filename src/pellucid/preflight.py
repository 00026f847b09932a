"""What a person sees before step 1: the derived numbers, one real exchange, and whether there is anything to learn."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import rich
from rich.markup import escape
from rich.table import Table

from pellucid import memory
from pellucid.batch import task_rewards
from pellucid.config import Config
from pellucid.effects import known_inert
from pellucid.hardware import memory_gb
from pellucid.metrics import predicted_dead_share
from pellucid.policy import Policy
from pellucid.types import Group


def show_numbers(cfg: Config, policy: Policy, world: int) -> None:
    a = cfg.algorithm
    completions = a.prompts_per_step * a.group_size
    parameters, trained = count(policy)
    model = memory.Model(policy.model.config, parameters, trained)
    expected = sum(memory.parts(model, cfg, world).values())
    table = Table.grid(padding=(0, 2))
    for name, value in {
        "model": f"{cfg.policy.model}: {parameters / 1e6:.1f} M parameters, {trained / 1e6:.1f} M trained",
        "computes": f"in {cfg.policy.dtype} on {policy.device}, {world} process{'es' if world > 1 else ''}, by"
        + (" our decoder" if policy.decoder else f" transformers ({policy.detour()})"),
        "a step": f"{a.prompts_per_step} prompts x {a.group_size} completions = {completions}, up to"
        f" {cfg.sampler.max_tokens} tokens each, {a.inner_steps} optimizer step{'s' if a.inner_steps > 1 else ''}",
        "the run": f"{a.steps} steps = {a.steps * completions} completions"
        + (f", or {a.minutes:g} minutes" if a.minutes else "")
        + f", seed {a.seed}",
        "memory": f"about {expected:.1f} GB expected"
        + (f" of {memory_gb():.0f} GB: lower algorithm.micro_batch" if expected > memory_gb() else ""),
    }.items():
        table.add_row(f"[dim]{name}", escape(value))
    rich.print(table)
    for line in known_inert(a):
        print(f"! {line}", flush=True)


def show_exchange(policy: Policy, group: Group) -> None:
    """The exact strings, special tokens included; the bar is where the prompt's tokens end and sampling began."""
    completion = group.completions[0]
    prompt, answer = policy.decode(group.prompt_ids, special=True), policy.decode(completion.token_ids, special=True)
    rich.print(f"\n[dim]{escape(prompt)}[/dim][bold cyan]|[/bold cyan]{escape(answer)}")
    reward = group.rewards[0]
    verdict = ("the reward failed" if reward.failed else f"reward {reward.value:g}") + (
        f", gold answer {group.prompt.answer}" if group.prompt.answer else ""
    )
    rich.print(f"[dim]{len(group.prompt_ids)} prompt tokens | {len(completion.token_ids)} sampled; {escape(verdict)}\n")


def show_signal(groups: Sequence[Group], group_size: int, min_spread: float) -> None:
    """How many groups of `group_size` will be dead, estimated from at least as many samples of each prompt."""
    graded = [reward for group in groups for reward in group.rewards if not reward.failed]
    if not graded:
        print("! no sample could be graded: every reward failed", flush=True)
        return
    dead = predicted_dead_share(task_rewards(groups).tolist(), group_size, min_spread)
    right = fmean(reward.is_correct for reward in graded)
    print(f"{right:.0%} of samples are right; {dead:.0%} of groups of {group_size} will be dead.", advice(dead, right))


def advice(dead: float, right: float) -> str:
    """A dead group, all right or all wrong, has no gradient."""
    if dead < 0.5:
        return "That is enough contrast to learn from."
    easier_or_harder = "easier prompts or a better-prompted start" if right < 0.5 else "harder prompts"
    return (
        "Most sampling will teach nothing: use a larger algorithm.group_size, algorithm.max_rounds to draw dead groups"
        f" anew, or {easier_or_harder}."
    )


def count(policy: Policy) -> tuple[int, int]:
    return sum(p.numel() for p in policy.model.parameters()), sum(p.numel() for p in policy.trainable().values())

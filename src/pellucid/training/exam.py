"""`pellucid eval`: what a model answers to held-out questions, without training it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import rich

from pellucid.config import Config
from pellucid.machine import disk, hardware
from pellucid.machine.harmless import harmless
from pellucid.policy import policy
from pellucid.policy.access import Access
from pellucid.protocols import with_split
from pellucid.reporting.console import accuracy_table
from pellucid.reporting.conversations import conversation_of
from pellucid.reporting.loggers import json_line
from pellucid.reporting.verdict import verdict
from pellucid.training import bad_rows, preflight
from pellucid.training.compose import evaluation_sampling, graded, pick_sampler, progress_of, template_of, world_in
from pellucid.training.evaluate import OneProcess, evaluate, held_out
from pellucid.types import Group


def examine(cfg: Config, model: str, access: Access, show: int, output: Path | None = None) -> int:
    """Print `show` greedy answers to the task's held-out questions, and the accuracy over all.

    output: a file that gets every answer, greedy and sampled.
    """
    hardware.keep_freed_memory()
    device = hardware.pick_device(cfg.policy.device)
    dtype = hardware.pick_dtype(cfg.policy.dtype, device)
    if os.path.isdir(model):
        access = access._replace(revision="")  # it is that of the base which the folder's model was trained from
    for note in filter(None, (access.format_warning(model), *preflight.notes_on_others(cfg))):
        print(harmless(f"! {note}"), flush=True)
    task = with_split(cfg.task, "test")
    prompts = held_out(task, cfg.evaluate.n)
    preflight.check_rewards(cfg, prompts)
    frozen = policy.load_frozen(
        model, device, dtype, cfg.sampler.temperature, cfg.policy.engine, template_of(cfg), access
    )
    bad_rows.check(cfg, frozen.tokenizer, frozen.context_length, frozen.vocabulary_size, ("test",))
    prompts = held_out(task, cfg.evaluate.n)  # without the bad rows, if these are to be skipped
    task = graded(task, cfg.reward)
    world = world_in(cfg, frozen)
    sampler, sampling = pick_sampler(cfg, frozen, world), evaluation_sampling(cfg)
    sampler.sync(frozen, 0)
    trained = progress_of(cfg, cfg.algorithm.steps)
    evaluation, groups, best = evaluate(
        cfg.task_name, task, prompts, sampler, sampling, cfg.evaluate.k, OneProcess(), trained
    )
    if world:
        world.close()
    for group in best[:show]:
        rich.print(verdict(group, evaluation.has_verdicts))
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        answers = [
            *said(best, "greedy", evaluation.has_verdicts),
            *said(groups, "sample", evaluation.has_verdicts),
        ]
        disk.write_whole(output, "".join(map(json_line, answers)))
        print(harmless(f"answers {output}"))
    preflight.refuse_failing([*best, *groups])
    preflight.refuse_none([*best, *groups])
    rich.print(accuracy_table(harmless(model), evaluation))
    return 0


def said(groups: Sequence[Group], sampling_kind: str, verdicts: bool) -> Iterator[dict[str, Any]]:
    """A record of each answer, group by group: what was asked and said, and how it was graded.

    Of a conversation all that was said is in it; `answer` is its last turn.

    `correct` is null where the reward failed or rewards are a matter of degree, and `reward` where it failed.
    """
    for group in groups:
        prompt = group.prompt
        for i, (completion, reward) in enumerate(zip(group.completions, group.rewards, strict=True)):
            yield {
                "drawn": sampling_kind,
                "sample": i,
                "question": prompt.question,
                "gold": " or ".join(prompt.gold_answers),
                "answer": completion.text,
                **conversation_of(completion),
                "finished": completion.finished,
                "tokens": completion.length,
                "reward": None if reward.failed else float(reward.value),
                "correct": reward.is_correct if verdicts and not reward.failed else None,
                "parts": {name: float(value) for name, value in reward.parts.items()},
                "error": reward.error,
                **({"extra": dict(reward.extra)} if reward.extra else {}),
            }

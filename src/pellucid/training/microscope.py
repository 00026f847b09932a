"""The token microscope's record of a run: what each step did to the tokens of a few of its groups, into tokens/.

The numbers before come from the update's own forward passes (seen.py), those after from one more of the recorded rows.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pellucid.algorithm.advantages import zero_variance
from pellucid.algorithm.batch import Batch, collate, task_rewards
from pellucid.algorithm.explained import RULES
from pellucid.algorithm.grpo import StepResult
from pellucid.algorithm.settings import GRPOConfig
from pellucid.config import Config
from pellucid.machine import hardware
from pellucid.policy.examined import Examined
from pellucid.policy.first_order import first_order, kept
from pellucid.policy.texts import Texts
from pellucid.reporting import tokens
from pellucid.reporting.loggers import finite_or_null
from pellucid.training.compose import Components
from pellucid.training.seen import Columns, Seen, by_row, of_distributions
from pellucid.types import Completion, Group, Reward

Table = dict[str, list[Any]]
"""Columns of reporting/tokens.py, those that every token has and any of the others."""


def recorded(steps: Iterator[StepResult], cfg: Config, run_dir: Path, parts: Components) -> Iterator[StepResult]:
    """Pass the steps through, and write down what each did; time/record of its metrics is how long the writing took."""
    if not cfg.log.tokens:
        return steps
    return Microscope(cfg, run_dir, parts).record_steps(steps)


class Microscope:
    def __init__(self, cfg: Config, run_dir: Path, parts: Components) -> None:
        self.cfg, self.run_dir, self.parts = cfg, run_dir, parts
        self.watcher = Seen(self.get_step_settings, cfg.log.tokens)
        self.texts = Texts(lambda ids: parts.policy.decode(ids, special=True))
        self.weights_before: Mapping[str, Tensor] = {}
        """The weights before the step, where its movement is to be predicted; else empty."""
        reason = unpredictable(cfg)
        self.makes_predictions = cfg.log.predictions > 0 and not reason
        if cfg.log.predictions and reason and parts.runtime.is_main:
            print(f"! log.predictions: {reason}: tokens are recorded without predictions", flush=True)

    def get_step_settings(self) -> GRPOConfig:
        """Those of the step that is being made: kl_coef may follow kl_target."""
        kl_coef = self.parts.state.kl_coef
        return self.cfg.algorithm if kl_coef is None else replace(self.cfg.algorithm, kl_coef=kl_coef)

    def record_steps(self, steps: Iterator[StepResult]) -> Iterator[StepResult]:
        scorer = self.parts.policy.scorer
        try:
            self.prepare_step()
            for result in steps:
                start = time.perf_counter()
                if scorer.score_hook:
                    self.record_step(result)
                spent = {"time/record": time.perf_counter() - start}
                yield result._replace(metrics=result.metrics | spent)
                self.prepare_step()
        finally:
            scorer.score_hook = None

    def prepare_step(self) -> None:
        """Before a step."""
        self.watcher.clear()
        step, log = self.parts.state.step + 1, self.cfg.log
        watched = step <= self.cfg.algorithm.steps and (step == 1 or step % log.token_steps == 0)
        self.parts.policy.scorer.score_hook = self.watcher if watched else None
        due = watched and self.makes_predictions and (step == 1 or step % log.predictions == 0)
        self.weights_before = kept(self.parts.policy) if due else {}

    def record_step(self, result: StepResult) -> None:
        """Write the file of a finished step. All processes call this; each contributes what it trained on."""
        runtime, groups = self.parts.runtime, result.groups
        chosen = chosen_of(groups, self.cfg.log.tokens)
        ours = {i: groups[i] for i in chosen if i % runtime.world_size == runtime.rank}
        origins = origins_of(groups[runtime.rank :: runtime.world_size])
        after = self.compute_columns_after(list(ours.values()), groups)
        tables = {}
        for i, group in ours.items():
            rows = [self.watcher.rows_by_origin.get(origin, {}) for origin in origins[i // runtime.world_size]]
            tables[i] = self.make_group_table(result.step, i, group, rows, [after.pop(0) for _ in rows])
        every = {i: table for of_process in runtime.gather([tables]) for i, table in of_process.items()}
        if runtime.is_main:
            said = tokens.said_of({i: groups[i] for i in chosen})
            tokens.write(self.run_dir, result.step, joined([every[i] for i in chosen]), self.describe_step() | said)

    def describe_step(self) -> dict[str, Any]:
        """What a file says of its step. dtype: that of the logits, by whose grid log-probs move."""
        a, dtype = self.cfg.algorithm, str(self.parts.policy.dtype).removeprefix("torch.")
        facts = {"objective": a.objective, "clip_low": a.clip_low, "clip_high": a.clip_high, "group_size": a.group_size}
        return {**facts, "temperature": self.cfg.sampler.temperature, "dtype": dtype}

    # ------------------------------------------------------------ after the update

    @torch.no_grad()
    def compute_columns_after(self, ours: Sequence[Group], groups: Sequence[Group]) -> list[Columns]:
        """Of each row of these groups, as `collate` orders the rows of one group after another, columns after the step.

        Where processes share parameters, all make as many forward passes: one that has nothing to look at makes them
        for one row.
        """
        policy, runtime = self.parts.policy, self.parts.runtime
        together = runtime.engine.is_lockstep
        if not ours and not together:
            return []
        batches = [collate([group]) for group in ours] or [collate(groups[:1]).select_rows(slice(1))]

        most = runtime.max_micro_batch_rows or self.cfg.algorithm.micro_batch  # what the update has had room for
        chunks = [chunk for batch in batches for chunk in batch.split_into_chunks(most)]
        rounds = max(runtime.gather([len(chunks)])) if together else len(chunks)
        found = [columns for chunk in chunks for columns in self.compute_row_columns(chunk)]
        for _ in range(rounds - len(chunks)):
            policy.module(policy.scorer.examine, chunks[-1].select_rows(slice(1)))
        return found if ours else []

    def compute_row_columns(self, batch: Batch) -> list[Columns]:
        """The columns of each row of a batch."""
        policy, together = self.parts.policy, self.parts.runtime.engine.is_lockstep
        # A module that brings processes together would wait for those that have nothing to look at.
        examine = policy.scorer.examine
        looked: Examined = policy.module(examine, batch) if together else examine(batch)
        flat = {"logprob_after": looked.logprobs, "entropy_after": looked.entropy, **of_distributions(looked, "after")}
        return by_row(flat | self.predict_columns(batch), batch.scored_mask.sum(-1).tolist())

    def predict_columns(self, batch: Batch) -> dict[str, Tensor]:
        """The columns of a prediction, where one is made; none from now on where memory runs out for it."""
        if not self.weights_before:
            return {}
        try:
            start, change = first_order(self.parts.policy, batch, self.weights_before)
            return {"logprob_start": start, "predicted": change}
        except (RuntimeError, MemoryError) as error:
            if not hardware.out_of_memory(error):
                raise
        self.weights_before, self.makes_predictions = {}, False
        print("! memory ran out in a prediction: none is made from now on, as of log.predictions = 0", flush=True)
        return {}

    # ------------------------------------------------------------ tables

    def make_group_table(
        self, step: int, index: int, group: Group, before: Sequence[Columns], after: Sequence[Columns]
    ) -> Table:
        """The rows of a file that speak of a group. before and after: of its sequences, completions before branches."""
        silent = self.explain_zero_advantage(group)
        tables = [self.make_prompt_table(group.prompt_ids)]
        known = [{**later, **seen} for seen, later in zip(before, after, strict=True)]
        branches = len(group.completions)
        for number, (completion, reward, advantage) in enumerate(
            zip(group.completions, group.rewards, group.advantages, strict=True)
        ):
            of_branches = known[branches : branches + len(completion.branches)]
            branches += len(completion.branches)
            sequences = [(completion, known[number]), *zip(completion.branches, of_branches, strict=True)]
            for branch, (sequence, columns) in enumerate(sequences):
                table = self.make_sequence_table(sequence, columns)
                untold = "overlong_filter" if advantage else "no_advantage"
                tell_rules(table, advantage, silent, untold)
                same = {"completion": number, "branch": branch, **of_answer(completion, reward)}
                tables.append(repeated(table, same))
        return repeated(joined(tables), {"step": step, "group": index, "prompt_id": group.prompt.id})

    def explain_zero_advantage(self, group: Group) -> str:
        """The rule that makes an advantage of this group 0."""
        if all(reward.failed for reward in group.rewards):
            return "all_failed"
        dead = bool(zero_variance(task_rewards([group]), self.cfg.algorithm.min_reward_range))
        return "zero_variance" if dead else "no_advantage"

    def make_prompt_table(self, ids: Sequence[int]) -> Table:
        table = {"position": list(range(len(ids))), "token": list(ids), "text": self.texts.decode_each(ids)}
        return repeated(table, {"kind": tokens.PROMPT, "completion": -1, "branch": 0})

    def make_sequence_table(self, sequence: Completion, columns: Columns) -> Table:
        """What is known of the tokens of one sequence."""
        ids = sequence.token_ids
        given = {t for start, end in sequence.given_spans for t in range(start, end)}
        sampled = [t for t in range(len(ids)) if t not in given]
        table: Table = {"position": list(range(len(ids))), "token": list(ids), "text": self.texts.decode_each(ids)}
        table["kind"] = [tokens.GIVEN if t in given else tokens.SAMPLED for t in range(len(ids))]
        table["sampler_logprob"] = [None if t in given else sequence.logprobs[t] for t in range(len(ids))]
        for name, values in self.convert_columns(columns).items():
            spread = dict(zip(sampled, values, strict=True))
            table[name] = [spread.get(t) for t in range(len(ids))]
        return table

    def convert_columns(self, columns: Columns) -> Table:
        """The columns as lists, with the texts of the likeliest tokens, and without what is not there."""
        values: Table = {name: x.tolist() for name, x in columns.items()}
        for when in ("before", "after"):
            if f"top_{when}" in values:
                there = [[x > -torch.inf for x in row] for row in values[f"top_{when}_logprob"]]
                for name in (f"top_{when}", f"top_{when}_logprob"):
                    pairs = zip(values[name], there, strict=True)
                    values[name] = [[x for x, is_ in zip(*pair, strict=True) if is_] for pair in pairs]
                values[f"top_{when}_text"] = [
                    [self.texts.decode_token(x) for x in row] for row in values[f"top_{when}"]
                ]
        if "bound" in values:
            values["bound"] = [None if math.isnan(x) else x for x in values["bound"]]
            values["rule"] = [RULES[i] for i in values["rule"]]
        return values


def tell_rules(table: Table, advantage: float, zero_rule: str, unscored_rule: str) -> None:
    """Add rules and advantages to the table of a sequence. silent: why an advantage of its group is 0, where one is;
    untold: why it was not scored, where it was not.
    """
    sampled = [kind == tokens.SAMPLED for kind in table["kind"]]
    scored = table.get("rule") or [unscored_rule] * len(sampled)
    told = [zero_rule if rule == "no_advantage" else rule for rule in scored]
    table["rule"] = [rule if is_ else "given" for rule, is_ in zip(told, sampled, strict=True)]
    table.setdefault("advantage", [advantage if is_ else None for is_ in sampled])


def of_answer(completion: Completion, reward: Reward) -> dict[str, Any]:
    """What every token of a completion, and of its branches, is said to have led to."""
    parts = {name: float(value) for name, value in reward.parts.items()}
    return {
        "reward": None if reward.failed else float(reward.value),
        "correct": reward.is_correct if reward.is_verdict and not reward.failed else None,
        "finished": completion.finished,
        "parts": json.dumps(finite_or_null(parts)),
        "error": reward.error or None,
        "version": completion.version,
    }


def repeated(table: Table, same: Mapping[str, Any]) -> Table:
    """The table with columns that have one value."""
    length = len(table["token"])
    return {**table, **{name: [value] * length for name, value in same.items()}}


def joined(tables: Sequence[Table]) -> Table:
    """Tables one below the other; what one of them lacks is null there."""
    names = dict.fromkeys(name for table in tables for name in table)
    whole: defaultdict[str, list[Any]] = defaultdict(list)
    for table in tables:
        for name in names:
            whole[name] += table.get(name) or [None] * len(table["token"])
    return dict(whole)


# ---------------------------------------------------------------- which groups, which rows, which runs


def chosen_of(groups: Sequence[Group], max_groups: int) -> list[int]:
    """The indices of the first groups with a signal, filled up with others; in the order of the step."""
    live = [i for i, group in enumerate(groups) if any(group.advantages)]
    others = [i for i, group in enumerate(groups) if not any(group.advantages)]
    return sorted([*live, *others][:max_groups])


def origins_of(groups: Sequence[Group]) -> list[list[int]]:
    """Of each of a process's groups the origins of its rows, completions before branches."""
    counts = [len(group.completions) for group in groups]
    branches = [[len(completion.branches) for completion in group.completions] for group in groups]
    origins, first, behind = [], 0, sum(counts)
    for count, of_group in zip(counts, branches, strict=True):
        origins.append([*range(first, first + count), *range(behind, behind + sum(of_group))])
        first, behind = first + count, behind + sum(of_group)
    return origins


def unpredictable(cfg: Config) -> str:
    """Why movements cannot be predicted to first order in this run; empty where they can."""
    if cfg.runtime.engine in ("fsdp2", "deepspeed"):
        return f'runtime.engine = "{cfg.runtime.engine}" shares out the weights that a prediction reads whole'
    return "a base in 4 bits has no forward-mode gradient" if cfg.policy.load_in_4bit else ""

"""Records what each step did to the tokens of a few of its groups, for the token microscope (tokens/).

Values before the update come from the forward passes of the update (`UpdateWatcher`), values after it from one more
pass over the recorded rows.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pellucid.algorithm.advantages import is_zero_variance
from pellucid.algorithm.batch import Batch, collate, collect_task_rewards
from pellucid.algorithm.explained import GRADIENT_RULES, LossExplanation, explain_loss
from pellucid.algorithm.grpo import Scores, StepResult
from pellucid.algorithm.settings import GRPOConfig
from pellucid.config import Config
from pellucid.policy.logprobs import ScoreContext
from pellucid.policy.text import TokenTexts
from pellucid.policy.token_stats import LossGradients, TokenStatistics, compute_token_statistics, select_rows
from pellucid.reporting.loggers import replace_non_finite
from pellucid.reporting.token_files import KIND_GIVEN, KIND_PROMPT, KIND_SAMPLED, make_group_metadata, write_tokens
from pellucid.training.build import Components
from pellucid.types import Completion, Group, Reward

_METADATA_SETTINGS = ("objective", "clip_low", "clip_high", "group_size")
_TokenTable = dict[str, list[Any]]
"""Columns of `token_files.TOKEN_SCHEMA`."""
_RowColumns = Mapping[str, Tensor]
"""Columns of the n sampled tokens of one row: [n] each, or [n, K]."""


def record_steps(steps: Iterator[StepResult], cfg: Config, run_dir: Path, parts: Components) -> Iterator[StepResult]:
    """Yield the steps and record them if log.tokens is set. The metric time/record is the time that this takes."""
    return _TokenRecorder(cfg, run_dir, parts).record_steps(steps) if cfg.log.tokens else steps


class _TokenRecorder:
    """Records the steps of a run into tokens/."""

    def __init__(self, cfg: Config, run_dir: Path, parts: Components) -> None:
        self.cfg, self.run_dir, self.parts = cfg, run_dir, parts
        self.watcher = UpdateWatcher(self.get_step_settings, cfg.log.tokens)
        self.texts = TokenTexts(lambda ids: parts.policy.decode(ids, special=True))

    def get_step_settings(self) -> GRPOConfig:
        """Return the settings of the current step, in which kl_coef may follow kl_target."""
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
                yield result._replace(metrics={**result.metrics, "time/record": time.perf_counter() - start})
                self.prepare_step()
        finally:
            scorer.score_hook = None

    def prepare_step(self) -> None:
        """Watch the update of the next step if it is to be recorded."""
        self.watcher.clear()
        step = self.parts.state.step + 1
        is_recorded = step <= self.cfg.algorithm.steps and (step == 1 or step % self.cfg.log.token_steps == 0)
        self.parts.policy.scorer.score_hook = self.watcher if is_recorded else None

    def record_step(self, result: StepResult) -> None:
        """Write the file of a finished step. All processes must call this, since it gathers their tables."""
        runtime, groups = self.parts.runtime, result.groups
        chosen = _choose_groups(groups, self.cfg.log.tokens)
        own_groups = {i: groups[i] for i in chosen if i % runtime.world_size == runtime.rank}
        origins = _list_row_origins(groups[runtime.rank :: runtime.world_size])
        after = self.compute_columns_after(list(own_groups.values()), groups)
        own_tables = {}
        for i, group in own_groups.items():
            before = [self.watcher.rows_by_origin.get(origin, {}) for origin in origins[i // runtime.world_size]]
            own_tables[i] = self.make_group_table(result.step, i, group, before, [after.pop(0) for _ in before])
        tables = {i: table for process_tables in runtime.gather([own_tables]) for i, table in process_tables.items()}
        if runtime.is_main:
            metadata = {
                **{name: getattr(self.cfg.algorithm, name) for name in _METADATA_SETTINGS},
                "temperature": self.cfg.sampler.temperature,
                "dtype": str(self.parts.policy.dtype).removeprefix("torch."),
                **make_group_metadata({i: groups[i] for i in chosen}),
            }
            write_tokens(self.run_dir, result.step, _join_tables([tables[i] for i in chosen]), metadata)

    # ------------------------------------------------------------ after the update

    @torch.no_grad()
    def compute_columns_after(self, own_groups: Sequence[Group], groups: Sequence[Group]) -> list[_RowColumns]:
        """Return the columns after the update for each row of these groups, each group in the row order of `collate`.

        If parameters are sharded, all processes must make the same number of forward passes. A process with fewer
        chunks repeats a single row.
        """
        policy, runtime = self.parts.policy, self.parts.runtime
        is_lockstep = runtime.engine.is_lockstep
        if not own_groups and not is_lockstep:
            return []
        batches = [collate([group]) for group in own_groups] or [collate(groups[:1]).select_rows(slice(1))]
        max_rows = runtime.max_micro_batch_rows or self.cfg.algorithm.micro_batch_rows  # memory sufficed for these
        chunks = [chunk for batch in batches for chunk in batch.split_into_chunks(max_rows)]
        rounds = max(runtime.gather([len(chunks)])) if is_lockstep else len(chunks)
        rows = [columns for chunk in chunks for columns in self.compute_row_columns(chunk)]
        for _ in range(rounds - len(chunks)):
            policy.module(policy.scorer.examine, chunks[-1].select_rows(slice(1)))
        return rows if own_groups else []

    def compute_row_columns(self, batch: Batch) -> list[_RowColumns]:
        """Return the columns of each row of a batch."""
        policy, examine = self.parts.policy, self.parts.policy.scorer.examine
        # The module of ddp would wait for processes that have no group, so it is only called if parameters are sharded.
        is_lockstep = self.parts.runtime.engine.is_lockstep
        statistics: TokenStatistics = policy.module(examine, batch) if is_lockstep else examine(batch)
        flat = {"logprob_after": statistics.logprobs, "entropy_after": statistics.entropy}
        flat |= _make_distribution_columns(statistics, "after")
        return _split_by_row(flat, batch.scored_mask.sum(-1).tolist())

    # ------------------------------------------------------------ tables

    def make_group_table(
        self, step: int, index: int, group: Group, before: Sequence[_RowColumns], after: Sequence[_RowColumns]
    ) -> _TokenTable:
        """Return the rows of a group. `before` and `after` have its completions first and then their branches."""
        zero_rule = self.explain_zero_advantage(group)
        tables = [self.make_prompt_table(group.prompt_ids)]
        columns_by_row = [{**later, **earlier} for earlier, later in zip(before, after, strict=True)]
        next_branch = len(group.completions)
        for number, (completion, reward, advantage) in enumerate(
            zip(group.completions, group.rewards, group.advantages, strict=True)
        ):
            branch_columns = columns_by_row[next_branch : next_branch + len(completion.branches)]
            next_branch += len(completion.branches)
            sequences = [(completion, columns_by_row[number]), *zip(completion.branches, branch_columns, strict=True)]
            for branch, (sequence, columns) in enumerate(sequences):
                table = self.make_sequence_table(sequence, columns)
                _add_rules(table, advantage, zero_rule, "overlong_filter" if advantage else "no_advantage")
                answer = {"completion": number, "branch": branch, **_make_answer_columns(completion, reward)}
                tables.append(_add_constant_columns(table, answer))
        return _add_constant_columns(_join_tables(tables), {"step": step, "group": index, "prompt_id": group.prompt.id})

    def explain_zero_advantage(self, group: Group) -> str:
        """Return the rule for tokens of this group with advantage 0."""
        if all(reward.failed for reward in group.rewards):
            return "all_failed"
        dead = bool(is_zero_variance(collect_task_rewards([group]), self.cfg.algorithm.min_reward_range))
        return "zero_variance" if dead else "no_advantage"

    def make_id_columns(self, ids: Sequence[int]) -> _TokenTable:
        return {"position": list(range(len(ids))), "token": list(ids), "text": self.texts.decode_each(ids)}

    def make_prompt_table(self, ids: Sequence[int]) -> _TokenTable:
        return _add_constant_columns(self.make_id_columns(ids), {"kind": KIND_PROMPT, "completion": -1, "branch": 0})

    def make_sequence_table(self, sequence: Completion, columns: _RowColumns) -> _TokenTable:
        """Return the columns of the tokens of one sequence."""
        ids = sequence.token_ids
        given = {t for start, end in sequence.given_spans for t in range(start, end)}
        table = self.make_id_columns(ids)
        table["kind"] = [KIND_GIVEN if t in given else KIND_SAMPLED for t in range(len(ids))]
        table["sampler_logprob"] = [None if t in given else sequence.logprobs[t] for t in range(len(ids))]
        sampled = [t for t in range(len(ids)) if t not in given]
        for name, values in self.convert_columns(columns).items():
            by_position = dict(zip(sampled, values, strict=True))
            table[name] = [by_position.get(t) for t in range(len(ids))]
        return table

    def convert_columns(self, columns: _RowColumns) -> _TokenTable:
        """Return the columns as lists, with the texts of the top tokens, and without truncated top tokens."""
        values: _TokenTable = {name: x.tolist() for name, x in columns.items()}
        for when in ("before", "after"):
            if f"top_{when}" in values:
                is_possible = [[x > -torch.inf for x in row] for row in values[f"top_{when}_logprob"]]
                for name in (f"top_{when}", f"top_{when}_logprob"):
                    rows = zip(values[name], is_possible, strict=True)
                    values[name] = [list(itertools.compress(row, selectors)) for row, selectors in rows]
                values[f"top_{when}_text"] = [
                    [self.texts.decode_token(x) for x in row] for row in values[f"top_{when}"]
                ]
        if "bound" in values:
            values["bound"] = [None if math.isnan(x) else x for x in values["bound"]]
            values["rule"] = [GRADIENT_RULES[i] for i in values["rule"]]
        return values


def _add_rules(table: _TokenTable, advantage: float, zero_rule: str, unscored_rule: str) -> None:
    """Add rules and advantages to the table of a sequence. See `explain_zero_advantage` for the rule of advantage 0."""
    is_sampled = [kind == KIND_SAMPLED for kind in table["kind"]]
    rules = [
        zero_rule if rule == "no_advantage" else rule for rule in table.get("rule") or [unscored_rule] * len(is_sampled)
    ]
    table["rule"] = [rule if sampled else "given" for rule, sampled in zip(rules, is_sampled, strict=True)]
    table.setdefault("advantage", [advantage if sampled else None for sampled in is_sampled])


def _make_answer_columns(completion: Completion, reward: Reward) -> dict[str, Any]:
    """Return the columns that are the same for all tokens of a completion and of its branches."""
    parts = {name: float(value) for name, value in reward.parts.items()}
    return {
        "reward": None if reward.failed else float(reward.value),
        "correct": reward.is_correct if reward.is_verdict and not reward.failed else None,
        "finished": completion.finished,
        "parts": json.dumps(replace_non_finite(parts)),
        "error": reward.error or None,
        "version": completion.version,
    }


def _add_constant_columns(table: _TokenTable, values: Mapping[str, Any]) -> _TokenTable:
    """Return the table with more columns, each with one value in all rows."""
    length = len(table["token"])
    return {**table, **{name: [value] * length for name, value in values.items()}}


def _join_tables(tables: Sequence[_TokenTable]) -> _TokenTable:
    """Return the rows of all tables; a column that one of them lacks is null there."""
    names = dict.fromkeys(name for table in tables for name in table)
    return {
        name: [value for table in tables for value in table.get(name) or [None] * len(table["token"])] for name in names
    }


def _choose_groups(groups: Sequence[Group], max_groups: int) -> list[int]:
    """Return the indices of the first groups with an advantage, filled up with other groups, in ascending order."""
    with_advantage_first = sorted(range(len(groups)), key=lambda i: not any(groups[i].advantages))
    return sorted(with_advantage_first[:max_groups])


def _list_row_origins(groups: Sequence[Group]) -> list[list[int]]:
    """Return for each group of a process the indices of its rows in the batch, completions before branches."""
    branch_counts = [sum(len(completion.branches) for completion in group.completions) for group in groups]
    rows = itertools.count()
    origins = [list(itertools.islice(rows, len(group.completions))) for group in groups]
    return [[*row_indices, *itertools.islice(rows, n)] for row_indices, n in zip(origins, branch_counts, strict=True)]


# ---------------------------------------------------------------- during the update


class UpdateWatcher:
    """A score hook that records the effect of the loss on each token, in the last optimizer step that used its row.

    It records the rows of the first prompts of a step, in their order, until `max_prompts` have an advantage.
    """

    def __init__(self, get_settings: Callable[[], GRPOConfig], max_prompts: int) -> None:
        self.get_settings, self.max_prompts = get_settings, max_prompts
        self.signal_prompts = set[int]()
        self.rows_by_origin = dict[int, _RowColumns]()
        """The columns of each row by its index in the batch of the step."""

    def clear(self) -> None:
        self.signal_prompts.clear()
        self.rows_by_origin.clear()

    def __call__(self, batch: Batch, scores: Scores, hidden: Tensor, context: ScoreContext) -> None:
        rows = self.select_rows(batch)
        if not bool(rows.any()):
            return
        scored = batch.scored_mask
        tokens = rows[:, None].expand_as(scored)[scored]  # a mask over the tokens that have hidden states
        explanation = explain_loss(scores, batch, self.get_settings())
        loss_gradients = (explanation.logprob_grad, explanation.entropy_grad, explanation.kl_grad)
        gradients = LossGradients(*(x[scored][tokens].to(hidden.device) for x in loss_gradients))
        ids = batch.response_ids[scored][tokens].to(hidden.device)
        selected = tokens.to(hidden.device)
        statistics = compute_token_statistics(hidden[selected], ids, select_rows(context, selected), gradients)
        columns = _make_update_columns(scores, batch, explanation)
        flat = {name: x[scored][tokens] for name, x in columns.items()}
        flat |= _make_distribution_columns(statistics, "before")
        flat["gradient"] = statistics.gradient_norm
        counts = scored[rows].sum(-1).tolist()
        assert batch.step_row_indices is not None
        self.rows_by_origin |= dict(
            zip(batch.step_row_indices[rows].tolist(), _split_by_row(flat, counts), strict=True)
        )

    def select_rows(self, batch: Batch) -> Tensor:
        """Return a mask [B] of the rows to record."""
        assert batch.advantages is not None
        if batch.step_row_indices is None:  # all rows are replayed from earlier steps
            return batch.advantages.new_zeros(len(batch)).bool()
        is_new = batch.step_row_indices >= 0
        has_signal = is_new & (batch.advantages != 0).any(-1)
        self.signal_prompts |= set(batch.prompt_indices[has_signal].tolist())
        first = sorted(self.signal_prompts)[: self.max_prompts]
        return is_new & (batch.prompt_indices <= first[-1]) if len(first) == self.max_prompts else is_new


def _make_update_columns(scores: Scores, batch: Batch, explanation: LossExplanation) -> dict[str, Tensor]:
    """Return columns of TOKEN_SCHEMA, [B, T] each."""
    assert batch.advantages is not None and batch.token_weights is not None
    reference = {} if batch.ref_logprobs is None else {"ref_logprob": batch.ref_logprobs}
    return {
        "logprob_start": scores.logprobs if batch.old_logprobs is None else batch.old_logprobs,
        "logprob_before": scores.logprobs,
        "entropy_before": scores.entropy,
        **reference,
        "ratio": explanation.ratio,
        "advantage": batch.advantages,
        "weight": batch.token_weights,
        "importance": explanation.importance,
        "push": 0.0 - explanation.logprob_grad,
        "rule": explanation.rule,
        "bound": explanation.bound,
    }


def _make_distribution_columns(statistics: TokenStatistics, when: str) -> dict[str, Tensor]:
    """Return the columns of the top tokens, [N, K] each; `when` is "before" or "after"."""
    return {f"top_{when}": statistics.top_ids, f"top_{when}_logprob": statistics.top_logprobs}


def _split_by_row(flat: _RowColumns, counts: list[int]) -> list[_RowColumns]:
    """Split columns of the tokens of all rows into those of each row, on the CPU."""
    split = {name: x.cpu().split(counts) for name, x in flat.items()}
    return [{name: parts[i] for name, parts in split.items()} for i in range(len(counts))]

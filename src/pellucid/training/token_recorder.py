"""The token microscope's record of a run: what each step did to the tokens of a few of its groups, into tokens/.

The numbers before come from the update's own forward passes (seen.py), those after from one more of the recorded rows.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from pellucid.algorithm.advantages import is_zero_variance
from pellucid.algorithm.batch import Batch, collate, collect_task_rewards
from pellucid.algorithm.explained import GRADIENT_RULES, LossExplanation, explain_loss
from pellucid.algorithm.grpo import Scores, StepResult
from pellucid.algorithm.settings import GRPOConfig
from pellucid.config import Config
from pellucid.models.score import compute_hidden_states
from pellucid.policy.logprobs import MAX_ELEMENTWISE_LOGITS, LMHead, ScoreContext, count_chunk_rows, score_products
from pellucid.policy.policy import Policy
from pellucid.policy.scorer import Scorer
from pellucid.policy.text import TokenTexts
from pellucid.policy.token_stats import LossGradients, TokenStatistics, compute_token_statistics, select_rows
from pellucid.reporting import token_files
from pellucid.reporting.loggers import replace_non_finite
from pellucid.training.build import Components
from pellucid.types import Completion, Group, Reward
from pellucid.utils import hardware

TokenTable = dict[str, list[Any]]
"""Columns of reporting/tokens.py, those that every token has and any of the others."""


def record_steps(steps: Iterator[StepResult], cfg: Config, run_dir: Path, parts: Components) -> Iterator[StepResult]:
    """Pass the steps through, and write down what each did; time/record of its metrics is how long the writing took."""
    if not cfg.log.tokens:
        return steps
    return TokenRecorder(cfg, run_dir, parts).record_steps(steps)


class TokenRecorder:
    def __init__(self, cfg: Config, run_dir: Path, parts: Components) -> None:
        self.cfg, self.run_dir, self.parts = cfg, run_dir, parts
        self.watcher = UpdateWatcher(self.get_step_settings, cfg.log.tokens)
        self.texts = TokenTexts(lambda ids: parts.policy.decode(ids, special=True))
        self.weights_before: Mapping[str, Tensor] = {}
        """The weights before the step, where its movement is to be predicted; else empty."""
        reason = explain_no_prediction(cfg)
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
        self.weights_before = copy_trained_weights(self.parts.policy) if due else {}

    def record_step(self, result: StepResult) -> None:
        """Write the file of a finished step. All processes call this; each contributes what it trained on."""
        runtime, groups = self.parts.runtime, result.groups
        chosen = choose_groups(groups, self.cfg.log.tokens)
        ours = {i: groups[i] for i in chosen if i % runtime.world_size == runtime.rank}
        origins = list_row_origins(groups[runtime.rank :: runtime.world_size])
        after = self.compute_columns_after(list(ours.values()), groups)
        tables = {}
        for i, group in ours.items():
            rows = [self.watcher.rows_by_origin.get(origin, {}) for origin in origins[i // runtime.world_size]]
            tables[i] = self.make_group_table(result.step, i, group, rows, [after.pop(0) for _ in rows])
        every = {i: table for of_process in runtime.gather([tables]) for i, table in of_process.items()}
        if runtime.is_main:
            said = token_files.make_group_metadata({i: groups[i] for i in chosen})
            token_files.write_tokens(
                self.run_dir, result.step, join_tables([every[i] for i in chosen]), self.describe_step() | said
            )

    def describe_step(self) -> dict[str, Any]:
        """What a file says of its step. dtype: that of the logits, by whose grid log-probs move."""
        a, dtype = self.cfg.algorithm, str(self.parts.policy.dtype).removeprefix("torch.")
        facts = {"objective": a.objective, "clip_low": a.clip_low, "clip_high": a.clip_high, "group_size": a.group_size}
        return {**facts, "temperature": self.cfg.sampler.temperature, "dtype": dtype}

    # ------------------------------------------------------------ after the update

    @torch.no_grad()
    def compute_columns_after(self, ours: Sequence[Group], groups: Sequence[Group]) -> list[RowColumns]:
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

    def compute_row_columns(self, batch: Batch) -> list[RowColumns]:
        """The columns of each row of a batch."""
        policy, together = self.parts.policy, self.parts.runtime.engine.is_lockstep
        # A module that brings processes together would wait for those that have nothing to look at.
        examine = policy.scorer.examine
        looked: TokenStatistics = policy.module(examine, batch) if together else examine(batch)
        flat = {
            "logprob_after": looked.logprobs,
            "entropy_after": looked.entropy,
            **make_distribution_columns(looked, "after"),
        }
        return split_by_row(flat | self.predict_columns(batch), batch.scored_mask.sum(-1).tolist())

    def predict_columns(self, batch: Batch) -> dict[str, Tensor]:
        """The columns of a prediction, where one is made; none from now on where memory runs out for it."""
        if not self.weights_before:
            return {}
        try:
            start, change = predict_logprob_changes(self.parts.policy, batch, self.weights_before)
            return {"logprob_start": start, "predicted": change}
        except (RuntimeError, MemoryError) as error:
            if not hardware.is_out_of_memory(error):
                raise
        self.weights_before, self.makes_predictions = {}, False
        print("! memory ran out in a prediction: none is made from now on, as of log.predictions = 0", flush=True)
        return {}

    # ------------------------------------------------------------ tables

    def make_group_table(
        self, step: int, index: int, group: Group, before: Sequence[RowColumns], after: Sequence[RowColumns]
    ) -> TokenTable:
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
                add_rules(table, advantage, silent, untold)
                same = {"completion": number, "branch": branch, **make_answer_columns(completion, reward)}
                tables.append(add_constant_columns(table, same))
        return add_constant_columns(join_tables(tables), {"step": step, "group": index, "prompt_id": group.prompt.id})

    def explain_zero_advantage(self, group: Group) -> str:
        """The rule that makes an advantage of this group 0."""
        if all(reward.failed for reward in group.rewards):
            return "all_failed"
        dead = bool(is_zero_variance(collect_task_rewards([group]), self.cfg.algorithm.min_reward_range))
        return "zero_variance" if dead else "no_advantage"

    def make_prompt_table(self, ids: Sequence[int]) -> TokenTable:
        table = {"position": list(range(len(ids))), "token": list(ids), "text": self.texts.decode_each(ids)}
        return add_constant_columns(table, {"kind": token_files.KIND_PROMPT, "completion": -1, "branch": 0})

    def make_sequence_table(self, sequence: Completion, columns: RowColumns) -> TokenTable:
        """What is known of the tokens of one sequence."""
        ids = sequence.token_ids
        given = {t for start, end in sequence.given_spans for t in range(start, end)}
        sampled = [t for t in range(len(ids)) if t not in given]
        table: TokenTable = {"position": list(range(len(ids))), "token": list(ids), "text": self.texts.decode_each(ids)}
        table["kind"] = [token_files.KIND_GIVEN if t in given else token_files.KIND_SAMPLED for t in range(len(ids))]
        table["sampler_logprob"] = [None if t in given else sequence.logprobs[t] for t in range(len(ids))]
        for name, values in self.convert_columns(columns).items():
            spread = dict(zip(sampled, values, strict=True))
            table[name] = [spread.get(t) for t in range(len(ids))]
        return table

    def convert_columns(self, columns: RowColumns) -> TokenTable:
        """The columns as lists, with the texts of the likeliest tokens, and without what is not there."""
        values: TokenTable = {name: x.tolist() for name, x in columns.items()}
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
            values["rule"] = [GRADIENT_RULES[i] for i in values["rule"]]
        return values


def add_rules(table: TokenTable, advantage: float, zero_rule: str, unscored_rule: str) -> None:
    """Add rules and advantages to the table of a sequence. silent: why an advantage of its group is 0, where one is;
    untold: why it was not scored, where it was not.
    """
    sampled = [kind == token_files.KIND_SAMPLED for kind in table["kind"]]
    scored = table.get("rule") or [unscored_rule] * len(sampled)
    told = [zero_rule if rule == "no_advantage" else rule for rule in scored]
    table["rule"] = [rule if is_ else "given" for rule, is_ in zip(told, sampled, strict=True)]
    table.setdefault("advantage", [advantage if is_ else None for is_ in sampled])


def make_answer_columns(completion: Completion, reward: Reward) -> dict[str, Any]:
    """What every token of a completion, and of its branches, is said to have led to."""
    parts = {name: float(value) for name, value in reward.parts.items()}
    return {
        "reward": None if reward.failed else float(reward.value),
        "correct": reward.is_correct if reward.is_verdict and not reward.failed else None,
        "finished": completion.finished,
        "parts": json.dumps(replace_non_finite(parts)),
        "error": reward.error or None,
        "version": completion.version,
    }


def add_constant_columns(table: TokenTable, same: Mapping[str, Any]) -> TokenTable:
    """The table with columns that have one value."""
    length = len(table["token"])
    return {**table, **{name: [value] * length for name, value in same.items()}}


def join_tables(tables: Sequence[TokenTable]) -> TokenTable:
    """Tables one below the other; what one of them lacks is null there."""
    names = dict.fromkeys(name for table in tables for name in table)
    whole: defaultdict[str, list[Any]] = defaultdict(list)
    for table in tables:
        for name in names:
            whole[name] += table.get(name) or [None] * len(table["token"])
    return dict(whole)


# ---------------------------------------------------------------- which groups, which rows, which runs


def choose_groups(groups: Sequence[Group], max_groups: int) -> list[int]:
    """The indices of the first groups with a signal, filled up with others; in the order of the step."""
    live = [i for i, group in enumerate(groups) if any(group.advantages)]
    others = [i for i, group in enumerate(groups) if not any(group.advantages)]
    return sorted([*live, *others][:max_groups])


def list_row_origins(groups: Sequence[Group]) -> list[list[int]]:
    """Of each of a process's groups the origins of its rows, completions before branches."""
    counts = [len(group.completions) for group in groups]
    branches = [[len(completion.branches) for completion in group.completions] for group in groups]
    origins, first, behind = [], 0, sum(counts)
    for count, of_group in zip(counts, branches, strict=True):
        origins.append([*range(first, first + count), *range(behind, behind + sum(of_group))])
        first, behind = first + count, behind + sum(of_group)
    return origins


def explain_no_prediction(cfg: Config) -> str:
    """Why movements cannot be predicted to first order in this run; empty where they can."""
    if cfg.runtime.engine in ("fsdp2", "deepspeed"):
        return f'runtime.engine = "{cfg.runtime.engine}" shares out the weights that a prediction reads whole'
    return "a base in 4 bits has no forward-mode gradient" if cfg.policy.load_in_4bit else ""


# ---------------------------------------------------------------- seen
# What is seen of an update while it is made: of chosen rollouts, what the loss did to each token.


RowColumns = Mapping[str, Tensor]
"""Of the sampled tokens of one row: [n] each, or [n, K]."""


class UpdateWatcher:
    """A watcher of the scorer. It keeps what it sees last of a row: the last optimizer step that the row took part in.

    Seen are the rows of this step's prompts up to the one that is the last of the first `most` with a signal; prompts
    come in their order. settings: those of the step that is being made.
    """

    def __init__(self, get_settings: Callable[[], GRPOConfig], max_prompts: int) -> None:
        self.get_settings, self.max_prompts = get_settings, max_prompts
        self.signal_prompts = set[int]()
        self.rows_by_origin = dict[int, RowColumns]()
        """By their origin."""

    def clear(self) -> None:
        """Begin with the next step."""
        self.signal_prompts.clear()
        self.rows_by_origin.clear()

    def __call__(self, batch: Batch, scores: Scores, hidden: Tensor, reading: ScoreContext) -> None:
        rows = self.select_rows(batch)
        if not bool(rows.any()):
            return
        scored = batch.scored_mask
        tokens = rows[:, None].expand_as(scored)[scored]  # of those that have hidden states
        told = explain_loss(scores, batch, self.get_settings())
        pulls = (told.logprob_grad, told.entropy_grad, told.kl_grad)
        gradients = LossGradients(*(x[scored][tokens].to(hidden.device) for x in pulls))
        ids = batch.response_ids[scored][tokens].to(hidden.device)
        among = tokens.to(hidden.device)
        looked = compute_token_statistics(hidden[among], ids, select_rows(reading, among), gradients)
        columns = make_update_columns(scores, batch, told)
        flat = {name: x[scored][tokens] for name, x in columns.items()} | make_distribution_columns(looked, "before")
        flat["gradient"] = looked.gradient_norm
        counts = scored[rows].sum(-1).tolist()
        assert batch.step_row_indices is not None
        self.rows_by_origin |= dict(zip(batch.step_row_indices[rows].tolist(), split_by_row(flat, counts), strict=True))

    def select_rows(self, batch: Batch) -> Tensor:
        """[B] bool"""
        assert batch.advantages is not None
        ours = (
            batch.advantages.new_zeros(len(batch)).bool()
            if batch.step_row_indices is None
            else batch.step_row_indices >= 0
        )
        signal = ours & (batch.advantages != 0).any(-1)
        self.signal_prompts |= set(batch.prompt_indices[signal].tolist())
        first = sorted(self.signal_prompts)[: self.max_prompts]
        return ours & (batch.prompt_indices <= first[-1]) if len(first) == self.max_prompts else ours


def make_update_columns(scores: Scores, batch: Batch, explanation: LossExplanation) -> dict[str, Tensor]:
    """[B, T] each, by the names of the columns of reporting/tokens.py."""
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


def make_distribution_columns(examined_rows: TokenStatistics, when: str) -> dict[str, Tensor]:
    """[N] or [N, K] each, by the names of columns that end with `when`."""
    return {f"top_{when}": examined_rows.top_ids, f"top_{when}_logprob": examined_rows.top_logprobs}


def split_by_row(flat: RowColumns, counts: list[int]) -> list[RowColumns]:
    """Columns of all tokens, row by row, to those of each row, on the CPU."""
    split = {name: x.cpu().split(counts) for name, x in flat.items()}
    return [{name: parts[i] for name, parts in split.items()} for i in range(len(counts))]


# ---------------------------------------------------------------- first_order
# What an update should have done to log-probs if they were linear in the weights: grad log pi . (after - before).


def copy_trained_weights(policy: Policy) -> dict[str, Tensor]:
    """A copy of the trained weights, unrounded, in the memory of the CPU."""
    return {name: x.detach().to("cpu", torch.float32, copy=True) for name, x in policy.masters().items()}


@torch.no_grad()
def predict_logprob_changes(policy: Policy, batch: Batch, before: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """[N] the log-probs of the N sampled tokens at these weights, and [N] their change to first order, from these
    weights to those of now.

    One forward pass at the weights before, with what they have moved by as the direction of a forward-mode gradient.
    The policy's own weights are left as they are. In one process: not for parameters that are shared out.
    """
    names, now = {id(p): name for name, p in policy.trainable().items()}, policy.masters()
    with forward_ad.dual_level(), use_parameters_in_place(policy.scorer), sdpa_kernel(SDPBackend.MATH):
        moving = {}
        for place, p in policy.scorer.named_parameters():
            if name := names.get(id(p)):
                step = now[name].detach() - before[name].to(now[name].device)
                moving[place] = forward_ad.make_dual(before[name].to(p), step.to(p))
        logprobs = functional_call(policy.scorer, moving, (compute_sampled_logprobs, policy.scorer, batch))
        primal, tangent = forward_ad.unpack_dual(logprobs)
        assert tangent is not None
        return primal.clone(), tangent.clone()


@contextmanager
def use_parameters_in_place(scorer: Scorer) -> Iterator[None]:
    """The decoder reads the parameters that stand in its modules, and none of the copies that it keeps. Nothing is
    recomputed: a forward pass keeps no activations, and torch 2.8 has no forward-mode gradient of a recomputed one.
    """
    parts = scorer.decoder.list_cast_weights() if scorer.decoder else []
    recomputes, scorer.gradient_checkpointing = scorer.gradient_checkpointing, False
    for part in parts:
        part.is_uncached = True
    try:
        yield
    finally:
        scorer.gradient_checkpointing = recomputes
        for part in parts:
            part.is_uncached = False


def compute_sampled_logprobs(scorer: Scorer, batch: Batch) -> Tensor:
    """[N] of the sampled tokens, by operations that have forward-mode gradients."""
    if scorer.decoder:
        hidden, matrix = compute_hidden_states(scorer.decoder, batch)
        head = LMHead(*matrix)
    else:
        hidden, head = scorer.compute_hidden_states(batch)
    head = head._replace(weight=head.master.to(hidden.dtype))
    tokens = batch.response_ids[batch.scored_mask].to(hidden.device)
    reading = ScoreContext(head, scorer.temperature, False, None, None, batch.get_sampling_mask(hidden.device))
    found = []
    for rows in torch.arange(len(tokens), device=tokens.device).split(
        count_chunk_rows(head.weight, MAX_ELEMENTWISE_LOGITS)
    ):
        every = torch.arange(len(rows), device=rows.device)
        found.append(score_products(head.project(hidden[rows]), tokens[rows], select_rows(reading, rows), every)[0])
    return torch.cat(found)

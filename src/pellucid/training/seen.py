"""What is seen of an update while it is made: of chosen rollouts, what the loss did to each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from pellucid.algorithm.batch import Batch
from pellucid.algorithm.explained import Explained, explained
from pellucid.algorithm.grpo import Scores
from pellucid.algorithm.settings import GRPOConfig
from pellucid.policy.examined import Examined, Gradients, examined, rows_of
from pellucid.policy.logprobs import Reading

Columns = Mapping[str, Tensor]
"""Of the sampled tokens of one row: [n] each, or [n, K]."""


class Seen:
    """A watcher of the scorer. It keeps what it sees last of a row: the last optimizer step that the row took part in.

    Seen are the rows of this step's prompts up to the one that is the last of the first `most` with a signal; prompts
    come in their order. settings: those of the step that is being made.
    """

    def __init__(self, get_settings: Callable[[], GRPOConfig], max_prompts: int) -> None:
        self.get_settings, self.max_prompts = get_settings, max_prompts
        self.signal_prompts = set[int]()
        self.rows_by_origin = dict[int, Columns]()
        """By their origin."""

    def clear(self) -> None:
        """Begin with the next step."""
        self.signal_prompts.clear()
        self.rows_by_origin.clear()

    def __call__(self, batch: Batch, scores: Scores, hidden: Tensor, reading: Reading) -> None:
        rows = self.select_rows(batch)
        if not bool(rows.any()):
            return
        scored = batch.scored_mask
        tokens = rows[:, None].expand_as(scored)[scored]  # of those that have hidden states
        told = explained(scores, batch, self.get_settings())
        pulls = (told.logprob_grad, told.entropy_grad, told.kl_grad)
        gradients = Gradients(*(x[scored][tokens].to(hidden.device) for x in pulls))
        ids = batch.response_ids[scored][tokens].to(hidden.device)
        among = tokens.to(hidden.device)
        looked = examined(hidden[among], ids, rows_of(reading, among), gradients)
        columns = of_update(scores, batch, told)
        flat = {name: x[scored][tokens] for name, x in columns.items()} | of_distributions(looked, "before")
        flat["gradient"] = looked.gradient_norm
        counts = scored[rows].sum(-1).tolist()
        assert batch.step_row_indices is not None
        self.rows_by_origin |= dict(zip(batch.step_row_indices[rows].tolist(), by_row(flat, counts), strict=True))

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


def of_update(scores: Scores, batch: Batch, explanation: Explained) -> dict[str, Tensor]:
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


def of_distributions(examined_rows: Examined, when: str) -> dict[str, Tensor]:
    """[N] or [N, K] each, by the names of columns that end with `when`."""
    return {f"top_{when}": examined_rows.top_ids, f"top_{when}_logprob": examined_rows.top_logprobs}


def by_row(flat: Columns, counts: list[int]) -> list[Columns]:
    """Columns of all tokens, row by row, to those of each row, on the CPU."""
    split = {name: x.cpu().split(counts) for name, x in flat.items()}
    return [{name: parts[i] for name, parts in split.items()} for i in range(len(counts))]

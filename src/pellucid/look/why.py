"""Why nothing happens: what a run's numbers say where its users are lost, each in a plain sentence with a mend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from pellucid.look.summaries import ALL_RIGHT, ALL_WRONG, EQUAL, PARTIAL
from pellucid.look.words import figure
from pellucid.reporting.curves import NOT_TERMS
from pellucid.reporting.report import at
from pellucid.reporting.run_folder import Record

WINDOW = 20
"""How many of the last steps are judged."""
NEARLY_ALL = 0.95
MOSTLY = 0.8
"""The share of groups without a signal from which a run has little to learn from."""
MANY_CUT_OFF, MOST_CUT_OFF = 0.1, 0.5
"""The shares of answers that were cut off from which that is noted, and from which it holds a run back."""
MOST_CLIPPED = 0.5
"""The share of clipped tokens from which the clip is what holds the run back."""
NEXT_TO_NOTHING = 1e-3
"""A loss smaller than this is read as 0."""
TROUBLE, NOTE, FINE = "trouble", "note", "fine"


@dataclass(frozen=True, slots=True)
class Finding:
    key: str
    """why.KEY of the words."""
    level: str
    step: int
    """Where it is best seen."""
    values: Mapping[str, Any] = field(default_factory=dict)


def findings(
    config: Record, metrics: Sequence[Record], summaries: Sequence[Record], error: str = ""
) -> list[dict[str, Any]]:
    """What explains a run that does not learn, then what looks wrong and is right.

    summaries: of the last steps whose groups are known. error: why the last reward failed, where one did.
    """
    if not metrics:
        return [asdict(Finding("no_step", TROUBLE, 0))]
    recent, last = metrics[-WINDOW:], metrics[-1]["step"]
    found = [
        *failures(config, recent, error),
        *without_signal(recent, summaries),
        *cut_off(config, recent),
        *never_sampled(metrics),
        *clipped(config, recent),
        *no_steps(recent),
        *loss_of_zero(config, recent),
    ]
    steps = {"steps": len(recent), "first": recent[0]["step"], "last": last}
    return [asdict(Finding(each.key, each.level, each.step, {**steps, **each.values})) for each in found]


def mean(rows: Sequence[Record], name: str) -> float | None:
    values = [value for row in rows if (value := row.get(name)) is not None]
    return fmean(values) if values else None


def share(value: float) -> str:
    return f"{value:.0%}"


def failures(config: Record, rows: Sequence[Record], error: str) -> Iterator[Finding]:
    failed = mean(rows, "reward/failed") or 0.0
    completions = at(config, "algorithm.prompts_per_step", 0) * at(config, "algorithm.group_size", 0)
    if not failed:
        return
    where = next(row["step"] for row in reversed(rows) if row.get("reward/failed"))
    part = min(1.0, failed / completions) if completions else 0.0
    key = "reward_fails" if part >= NEARLY_ALL else "reward_fails_sometimes"
    told = {"failed": figure(failed), "share": share(part), "error": error.strip().partition("\n")[0] or "?"}
    yield Finding(key, TROUBLE, where, told)


def without_signal(rows: Sequence[Record], summaries: Sequence[Record]) -> Iterator[Finding]:
    """All groups of equal rewards: which reward, where the groups themselves are known."""
    right, wrong, equal = (mean(rows, f"groups/dead_{name}") or 0.0 for name in (ALL_RIGHT, ALL_WRONG, EQUAL))
    if right + wrong + equal < MOSTLY:
        return
    kinds = [group["signal"] for each in summaries for group in each["groups"]]
    partial = kinds.count(PARTIAL) / len(kinds) if kinds else 0.0
    last = rows[-1]["step"]
    told = {"share": share(right + wrong + equal), "right": share(right), "wrong": share(wrong)}
    if equal:
        yield Finding("all_equal", TROUBLE, last, told)
    elif partial > 0.5:
        reward = next(g["rewards"][0] for each in summaries for g in each["groups"] if g["signal"] == PARTIAL)
        yield Finding("all_partial", TROUBLE, last, {**told, "reward": figure(reward)})
    elif right >= MOSTLY:
        yield Finding("all_right", TROUBLE, last, told)
    elif wrong >= MOSTLY:
        yield Finding("all_wrong", TROUBLE, last, told)
    else:
        yield Finding("no_signal", TROUBLE, last, told)


def cut_off(config: Record, rows: Sequence[Record]) -> Iterator[Finding]:
    ended = mean(rows, "completion/finished")
    if ended is not None and 1 - ended >= MANY_CUT_OFF:
        limit, level = at(config, "sampler.max_tokens", "?"), TROUBLE if 1 - ended >= MOST_CUT_OFF else NOTE
        yield Finding("cut_off", level, rows[-1]["step"], {"share": share(1 - ended), "limit": limit})


def never_sampled(rows: Sequence[Record]) -> Iterator[Finding]:
    """Terms of the reward that were 0 in every completion of the run."""
    terms = {name: None for row in rows for name in row if name.startswith("reward/") and name not in NOT_TERMS}
    for name in terms:
        values = [value for row in rows if (value := row.get(name)) is not None]
        if values and not any(values):
            told = {"term": name.removeprefix("reward/"), "all": len(values)}
            yield Finding("never_sampled", TROUBLE, rows[-1]["step"], told)


def clipped(config: Record, rows: Sequence[Record]) -> Iterator[Finding]:
    low, high = (mean(rows, f"clip/{side}") or 0.0 for side in ("low", "high"))
    if low + high >= MOST_CLIPPED:
        bounds = {name: figure(at(config, f"algorithm.{name}", None)) for name in ("clip_low", "clip_high")}
        worst = max(rows, key=lambda row: (row.get("clip/low") or 0.0) + (row.get("clip/high") or 0.0))
        yield Finding("clipped", TROUBLE, worst["step"], {"share": share(low + high), **bounds})


def no_steps(rows: Sequence[Record]) -> Iterator[Finding]:
    """Updates that were not taken, or by a learning rate of 0."""
    if (skipped := mean(rows, "skipped") or 0.0) >= 0.5:
        yield Finding("skipped", TROUBLE, rows[-1]["step"], {"share": share(skipped)})
    rates = [rate for row in rows[:-1] if (rate := row.get("lr")) is not None]  # the last one of a schedule may be 0
    if rates and not any(rates):
        yield Finding("lr_zero", TROUBLE, rows[-1]["step"])


def loss_of_zero(config: Record, rows: Sequence[Record]) -> Iterator[Finding]:
    """A loss of 0 whose gradient is not: with one optimizer step on each set of rollouts every ratio is 1."""
    loss, norm = mean(rows, "loss"), mean(rows, "grad_norm")
    ratio = mean(rows, "ratio/mean")
    if loss is None or not norm or abs(loss) >= NEXT_TO_NOTHING:
        return
    once = at(config, "algorithm.epochs", 1) == 1 and at(config, "algorithm.minibatches", 1) == 1
    told = {"loss": figure(loss), "norm": figure(norm), "ratio": figure(ratio)}
    yield Finding("loss_zero" if once else "loss_small", FINE, rows[-1]["step"], told)

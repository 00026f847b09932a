"""Writes the JSON lines of a run, sends them to TensorBoard and Weights & Biases, and computes the metrics of groups.

`step` counts finished steps: the first step of a run is logged as 1, an evaluation before it as 0.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import comb, isfinite, nan
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from pellucid.reporting.conversations import (
    count_turns,
    get_tool_events,
    make_branch_columns,
    make_conversation_columns,
    make_token_columns,
)
from pellucid.reporting.eval_metrics import get_measures, make_evaluation_record
from pellucid.types import (
    Completion,
    Evaluation,
    Group,
    Logger,
    Reward,
    UserError,
    are_rewards_equal,
    get_equal_rewards,
    rewards_are_verdicts,
)
from pellucid.utils import files
from pellucid.utils.plugins import import_extra
from pellucid.utils.text import escape_controls

DISPLAY_ERRORS = (OSError, ValueError, ArithmeticError, LookupError, TypeError)
"""Errors that do not end a run if a display, a chart or a dashboard raises them: failed writes, and unexpected values.
NameError and AttributeError do end it, since they are bugs."""


@contextmanager
def guard_display(what: str) -> Iterator[None]:
    """Print a warning instead of raising an error in code that only displays a run."""
    try:
        yield
    except DISPLAY_ERRORS as error:
        with suppress(OSError):
            reason = escape_controls(f"{type(error).__name__}: {error}")
            print(f"! {what} could not be shown ({reason}); nothing is lost", flush=True)


class CompositeLogger:
    """Several loggers as one. Errors of `files` end the run; errors of `displays` are printed."""

    def __init__(self, files: Sequence[Logger], displays: Sequence[Logger] = ()):
        self.files, self.displays = files, displays

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        for logger in self.files:
            logger.log(step, metrics, groups)
        for logger in self.displays:
            with guard_display(f"step {step}"):
                logger.log(step, metrics, groups)

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        for logger in self.files:
            logger.log_evaluation(step, evaluation)
        for logger in self.displays:
            with guard_display(f"the evaluation after step {step}"):
                logger.log_evaluation(step, evaluation)

    def close(self) -> None:
        for logger in (*self.displays, *self.files):
            with guard_display("the end of the run"):
                logger.close()


class JsonlLogger:
    """Appends to metrics.jsonl, rollouts.jsonl and evals.jsonl of a run directory.

    When `log` returns, the step is in the page cache and survives a kill. `sync_logs` writes it to disk: a power
    failure loses only lines after the last checkpoint, which a resumed run writes again. Rollouts are written at step 1
    and at multiples of `every`; 0 means never.
    """

    FILE_NAMES = ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl")

    def __init__(self, run_dir: Path, every: int = 1):
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir, self.every = run_dir, every
        for name in self.FILE_NAMES:
            self._append(name, [])

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        if self.every and (step == 1 or step % self.every == 0):
            rollouts = (rollout for group in groups for rollout in _make_rollout_records(group))
            self._append("rollouts.jsonl", ({"step": step, **rollout} for rollout in rollouts))
        self._append("metrics.jsonl", [{"step": step, **metrics}])

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._append("evals.jsonl", [{"step": step, **make_evaluation_record(evaluation)}])

    def close(self) -> None:
        pass

    def _append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        with (self.run_dir / name).open("a", encoding="utf-8") as file:
            file.writelines(map(format_json_line, records))


def sync_logs(run_dir: Path) -> None:
    """Write the logs of a run to disk."""
    for name in JsonlLogger.FILE_NAMES:
        files.sync_path(run_dir / name)


def _make_rollout_records(group: Group) -> list[dict[str, Any]]:
    """Return a record of each completion of a group, as in rollouts.jsonl. Rewards may be NumPy numbers."""
    return [
        {
            "id": group.prompt.id,
            "prompt": group.prompt.question,
            **({"prefix": group.prompt.prefix} if group.prompt.prefix else {}),
            "completion": completion.text,
            **make_conversation_columns(completion),
            "finished": completion.finished,
            "correct": reward.is_correct if reward.is_verdict and not reward.failed else None,
            "reward": None if reward.failed else float(reward.value),
            "parts": {name: float(value) for name, value in reward.parts.items()},
            "advantage": advantage,
            **({"error": reward.error} if reward.error else {}),
            **({"extra": dict(reward.extra)} if reward.extra else {}),
            **make_token_columns(completion),
            **make_branch_columns(completion),
        }
        for completion, reward, advantage in zip(group.completions, group.rewards, group.advantages, strict=True)
    ]


def format_json_line(record: Mapping[str, Any]) -> str:
    return json.dumps(replace_non_finite(record), allow_nan=False) + "\n"


def replace_non_finite(value: Any) -> Any:
    """Return a value in a form that JSON can represent, with None for NaN and infinities."""
    # A recursive function would run out of stack for deeply nested values; the JSON parser does not.
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def truncate_logs(run_dir: Path, step: int) -> list[str]:
    """Remove lines logged after `step`, and lines that a crash damaged. A resumed run writes later steps again.

    The files are changed in place, so this works on a full disk. If the process is killed, the next call finishes it.
    Return warnings that say which records up to `step` are lost.
    """
    warnings = []
    for path in (run_dir / name for name in JsonlLogger.FILE_NAMES):
        steps, unreadable = _truncate_log_file(path, step) if path.exists() else (set(), 0)
        if unreadable:
            warnings.append(f"{path}: {unreadable} lines could not be read and were removed")
        if path.name == "metrics.jsonl" and (missing := [n for n in range(1, step + 1) if n not in steps]):
            warnings.append(f"{path} lacks {len(missing)} of {step} steps, the first of them step {missing[0]}")
    return warnings


def _truncate_log_file(path: Path, step: int) -> tuple[set[int], int]:
    """Truncate a log, and blank lines removed before its end. Return its steps and the number of unreadable lines."""
    removed, steps, start, end = list[tuple[int, int, bool]](), set[int](), 0, 0
    with path.open("r+b") as file:
        for line in file:
            line_step = _parse_step(line)
            if line_step is None or line_step > step:
                removed.append((start, len(line), line_step is None))
            else:
                steps.add(line_step)
                end = start + len(line)
            start += len(line)
        gaps = [gap for gap in removed if gap[0] < end]
        for offset, length, _ in gaps:
            file.seek(offset)
            file.write(b" " * length)
        file.truncate(end)
        file.flush()
        os.fsync(file.fileno())
    return steps, sum(is_unreadable for _, _, is_unreadable in gaps)


def _parse_step(line: bytes) -> int | None:
    """Return the step of a line; None if the line is incomplete or is not a record."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"}\n") else None
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return step if isinstance(step, int) else None


# ---------------------------------------------------------------- TensorBoard and Weights & Biases


_FIELD_TAGS = {
    "loss": "train/loss",
    "kl": "train/kl_divergence",
    "grad_norm": "train/grad_norm",
    "reward/mean": "rollout/returns",
    "completion/correct": "rollout/success_rate",
}
"""The names of metrics in other trainers, for dashboards that compare runs of several trainers."""


def _add_field_tags(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics under our names, and again under those of other trainers."""
    return {**metrics, **{tag: metrics[name] for name, tag in _FIELD_TAGS.items() if name in metrics}}


class TensorBoardLogger:
    """Writes scalars for TensorBoard in the calling thread; errors in the thread of torch's writer would come too late.

    If its file cannot be written, as on a full disk, it prints a warning and stops writing. Scalars of steps after
    `first_step`, which a resumed run writes again, are purged.
    """

    def __init__(self, log_dir: Path, first_step: int = 0):
        import_extra("tensorboard", "tensorboard", "log.tensorboard")
        from tensorboard.compat.proto import event_pb2  # noqa: PLC0415 - an extra
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415 - an extra

        protos: Any = event_pb2  # it has no type hints
        self.path = log_dir / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
        self.make_event, self.make_writer, self.failed = protos.Event, RecordWriter, False
        self._write_event(file_version="brain.Event:2")
        if first_step:
            self._write_event(step=first_step + 1, session_log=protos.SessionLog(status=protos.SessionLog.START))

    def log(self, step: int, metrics: Mapping[str, float], _groups: Sequence[Group]) -> None:
        self._write_scalars(step, _add_field_tags(metrics))

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        measures = get_measures(evaluation)
        self._write_scalars(step, {f"heldout/{name.replace('@', '_at_')}": e.value for name, e in measures.items()})

    def close(self) -> None:
        pass

    def _write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in scalars.items()]
        self._write_event(step=step, summary={"value": values})

    def _write_event(self, **fields: Any) -> None:
        if self.failed:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                self.make_writer(file).write(self.make_event(wall_time=time.time(), **fields).SerializeToString())
        except OSError as error:
            self.failed = True
            reason = f"{self.path.parent} cannot be written ({error.strerror or error})"
            print(escape_controls(f"! {reason}: the run goes on without TensorBoard"), flush=True)


def check_wandb(mode: str) -> None:
    """Raise UserError if wandb is not installed, or if it is online and nobody is logged in."""
    wandb = import_extra("wandb", "wandb", "log.wandb")
    if mode == "online" and not wandb.login(prompt=False):
        raise UserError('log.wandb = "online" needs a login: run wandb login, or set "offline", which needs no account')


class WandbLogger:
    """Logs to Weights & Biases, or into a folder that `wandb sync` uploads.

    The id of the run comes from the path of the run directory, so that a resumed run continues it.
    """

    def __init__(self, run_dir: Path, project: str, mode: str, config: Mapping[str, Any]):
        wandb = import_extra("wandb", "wandb", "log.wandb")
        try:
            self.run = wandb.init(
                project=project,
                name=run_dir.name,
                id=uuid5(NAMESPACE_URL, run_dir.resolve().as_uri()).hex,
                dir=run_dir,
                mode=mode,
                resume="allow" if mode == "online" else None,
                config=dict(config),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except (wandb.errors.UsageError, wandb.errors.CommError) as error:
            raise UserError(
                f'log.wandb = "{mode}": {str(error).splitlines()[0]}; "offline" needs no account'
            ) from error
        self.run.define_metric("*", step_metric="step")
        self.error_class = wandb.errors.Error

    def log(self, step: int, metrics: Mapping[str, float], _groups: Sequence[Group]) -> None:
        self._send({"step": step, **_add_field_tags(metrics)})

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._send({"step": step, **{f"heldout/{name}": e.value for name, e in get_measures(evaluation).items()}})

    def _send(self, record: dict[str, float]) -> None:
        try:
            self.run.log(record)
        except self.error_class as error:  # a class of wandb, which is not always installed
            raise OSError(f"Weights & Biases: {error}") from error

    def close(self) -> None:
        self.run.finish()


# ---------------------------------------------------------------- metrics of the groups of a step
#
# `reward/*` and `*/correct` are computed over graded completions: a failed reward has no value, and counts in
# `reward/failed`, or in `reward/no_term` if no term applies to the prompt. If rewards do not say which answers are
# right (`rewards_are_verdicts`), there is no `*/correct`, no `*_right` and no `*_wrong`, and groups with equal rewards
# count in `groups/dead_equal`. `failed/NAME` is the share of completions for which that term failed. `logged/NAME` is
# the mean of the values that rewards logged under that name. Lengths count sampled tokens, including the EOS token.


def compute_group_metrics(groups: Sequence[Group], min_reward_range: float = 0.0) -> dict[str, float]:
    """Return the metrics of the graded groups of a step. Shares are in [0, 1]; the mean of no values is NaN.

    A group whose rewards differ by at most `min_reward_range` counts as equal (zero variance, "dead").
    """
    pairs = [pair for group in groups for pair in zip(group.completions, group.rewards, strict=True)]
    completions, rewards = [completion for completion, _ in pairs], [reward for _, reward in pairs]
    graded = [(completion, reward) for completion, reward in pairs if not reward.failed]
    values = [reward.value for _, reward in graded]
    inapplicable = sum(not reward.applies for reward in rewards)
    return {
        **_compute_logged_means(rewards),
        **compute_prefix_length(groups),
        **compute_term_means([reward for reward in rewards if not (reward.failed and reward.applies)]),
        "reward/mean": fmean(values) if values else nan,
        "reward/std": pstdev(values) if values else nan,
        "reward/failed": float(sum(reward.failed and reward.applies for reward in rewards)),
        **({"reward/no_term": float(inapplicable)} if inapplicable else {}),
        **compute_failed_shares(rewards),
        **compute_zero_variance_shares(groups, min_reward_range),
        **_compute_correctness(graded),
        "completion/finished": fmean(completion.finished for completion in completions),
        "completion/length_mean": fmean(completion.length for completion in completions),
        **_compute_turn_metrics(completions),
        "tokens": float(sum(each.length for completion in completions for each in (completion, *completion.branches))),
    }


def compute_zero_variance_shares(groups: Sequence[Group], min_reward_range: float) -> dict[str, float]:
    """Return the share of groups with equal rewards, split into all right and all wrong if rewards are verdicts."""
    dead = [rewards for group in groups if (rewards := get_equal_rewards(group, min_reward_range))]
    if not rewards_are_verdicts(reward for group in groups for reward in group.rewards):
        return {"groups/dead_equal": len(dead) / len(groups)}
    all_right = sum(all(reward.is_correct for reward in rewards) for rewards in dead)
    return {
        "groups/dead_all_right": all_right / len(groups),
        "groups/dead_all_wrong": (len(dead) - all_right) / len(groups),
    }


def _compute_correctness(graded: Sequence[tuple[Completion, Reward]]) -> dict[str, float]:
    """Return the share of right answers, and the lengths of right and wrong ones; empty if rewards are not verdicts."""
    judged = [(completion, reward) for completion, reward in graded if reward.is_judged]
    if not rewards_are_verdicts(reward for _, reward in judged):
        return {}
    right = [completion.length for completion, reward in judged if reward.is_correct]
    wrong = [completion.length for completion, reward in judged if not reward.is_correct]
    lengths = {"completion/length_right": right, "completion/length_wrong": wrong}
    return {
        "completion/correct": len(right) / len(judged) if judged else nan,
        **{name: fmean(values) for name, values in lengths.items() if values},
    }


def _compute_turn_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the mean turns and tool calls per conversation, and the share of tool calls with each fault."""
    conversations = [completion for completion in completions if completion.messages]
    if not conversations:
        return {}
    total = sum((Counter(get_tool_events(completion)) for completion in conversations), Counter())
    calls = total.pop("calls", 0)
    faults = {f"tools/{kind}": count / calls for kind, count in total.items() if calls}
    calls_mean = {"tools/calls": calls / len(conversations)} if calls else {}
    return {"turns/mean": fmean(map(count_turns, conversations)), **calls_mean, **faults}


def have_all_failed(groups: Sequence[Group]) -> bool:
    """Return whether no completion has a reward: each reward failed, or is None since no term applies to the prompt."""
    rewards = [reward for group in groups for reward in group.rewards]
    return bool(rewards) and all(reward.failed for reward in rewards)


def compute_prefix_length(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean length of prefixes in tokens. Later given spans are messages of a conversation."""
    first_spans = [
        c.given_spans[0] for group in groups if group.demonstration for c in group.completions[:1] if c.given_spans
    ]
    lengths = [end for start, end in first_spans if start == 0]
    return {"prefix/length_mean": fmean(lengths)} if lengths else {}


def compute_term_means(rewards: Sequence[Reward]) -> dict[str, float]:
    """Return the mean of each term over the rewards in which it is finite; NaN if there is none."""
    names = {name: None for reward in rewards for name in reward.parts}
    finite = {name: [x for reward in rewards if isfinite(x := reward.parts.get(name, nan))] for name in names}
    return {f"reward/{name}": fmean(values) if values else nan for name, values in finite.items()}


def compute_failed_shares(rewards: Sequence[Reward]) -> dict[str, float]:
    """Return the share of completions for which a term failed, for each term that failed at all."""
    names = Counter(name for reward in rewards for name in reward.failures)
    return {f"failed/{name}": count / len(rewards) for name, count in names.items()}


def _compute_logged_means(rewards: Sequence[Reward]) -> dict[str, float]:
    """Return the mean of each number that rewards logged, over the completions that have one."""
    logged = defaultdict(list)
    for reward in rewards:
        for name, value in reward.logged.items():
            logged[f"logged/{name}"].append(value)
    return {name: fmean(values) for name, values in logged.items()}


def predict_zero_variance_share(
    rewards: Sequence[Sequence[float]], group_size: int, min_reward_range: float = 0.0
) -> float:
    """Predict the share of groups of `group_size` G with equal rewards, from n >= G rewards of each prompt.

    This is the mean probability that G of the n samples of a prompt, drawn without replacement, have equal rewards.
    For each sample as the lowest of the G, the others are drawn from the higher ones that count as equal. With two
    values v, each n_v times, it is the sum of C(n_v, G) / C(n, G), which is unbiased for p^G + (1 - p)^G. A failed
    reward, NaN, equals any other.

    Inserting p = n_v / n would overestimate the share: with p = 0.1, 8 samples are all wrong 43% of the time, and then
    p = 0 predicts equal rewards for every G.

    Raises:
        ValueError: n < G, from which p^G cannot be estimated without bias.
    """
    samples = min(map(len, rewards))
    if samples < group_size:
        raise ValueError(
            f"{samples} samples per prompt cannot predict groups of {group_size}: draw at least {group_size}"
        )
    return fmean(_compute_zero_variance_chance(values, group_size, min_reward_range) for values in rewards)


def _compute_zero_variance_chance(values: Sequence[float], group_size: int, min_reward_range: float) -> float:
    ascending = sorted(value for value in values if isfinite(value))
    failed = len(values) - len(ascending)
    above = [
        sum(are_rewards_equal(low, high, min_reward_range) for high in ascending[i + 1 :])
        for i, low in enumerate(ascending)
    ]
    dead = comb(failed, group_size) + sum(comb(n + failed, group_size - 1) for n in above)
    return dead / comb(len(values), group_size)

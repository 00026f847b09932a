"""Loggers: a run as JSON lines, and whatever else shows it.

`step` counts finished steps: the first step of a run is logged as 1, an evaluation before it as 0.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import comb, isfinite, nan
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from pellucid.reporting.conversations import (
    count_turns,
    make_branch_columns,
    make_conversation_columns,
    make_token_columns,
)
from pellucid.reporting.eval_metrics import get_measures, make_evaluation_record, parse_evaluation
from pellucid.reporting.run_files import read_records
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
from pellucid.utils import files as disk
from pellucid.utils.plugins import import_extra
from pellucid.utils.text import escape_controls

DISPLAY_ERRORS = (OSError, ValueError, ArithmeticError, LookupError, TypeError)
"""What may go wrong with a display, a chart or a board: no place to write to, or numbers and records as no one thought
of. Mistakes in names are ours, and not among them."""


@contextmanager
def guard_display(what: str) -> Iterator[None]:
    """Guard what only shows a run: where it fails, that costs a line and not the run."""
    try:
        yield
    except DISPLAY_ERRORS as error:
        with suppress(OSError):
            told = escape_controls(f"{type(error).__name__}: {error}")
            print(f"! {what} could not be shown ({told}); nothing is lost", flush=True)


class CompositeLogger:
    """Several loggers as one: `files` hold the run, `boards` only show it."""

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
            with guard_display("the end"):
                logger.close()


class JsonlLogger:
    """metrics.jsonl, rollouts.jsonl and evals.jsonl of a run folder.

    Each step is with the system when `log` returns, where a kill does not reach it, and on disk after `sync`: a power
    failure costs lines that come after the last checkpoint, which a resumed run writes again.

    every: steps between those whose rollouts are written, besides step 1; 0 is none at all.
    """

    FILE_NAMES = ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl")

    def __init__(self, run_dir: Path, every: int = 1):
        run_dir.mkdir(parents=True, exist_ok=True)
        self.every = every
        self.metrics_file, self.rollouts_file, self.evals_file = (
            (run_dir / name).open("a", encoding="utf-8") for name in self.FILE_NAMES
        )

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        for group in groups if self.every and (step == 1 or step % self.every == 0) else ():
            self.rollouts_file.writelines(
                format_json_line({"step": step, **rollout}) for rollout in make_rollout_records(group)
            )
        self.rollouts_file.flush()
        self.metrics_file.write(format_json_line({"step": step, **metrics}))
        self.metrics_file.flush()

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.evals_file.write(format_json_line({"step": step, **make_evaluation_record(evaluation)}))
        self.evals_file.flush()

    def close(self) -> None:
        for file in (self.metrics_file, self.rollouts_file, self.evals_file):
            file.close()


def sync_logs(run_dir: Path) -> None:
    """Sync to disk what was logged so far."""
    for name in JsonlLogger.FILE_NAMES:
        disk.sync_path(run_dir / name)


def make_rollout_records(group: Group) -> list[dict[str, Any]]:
    """A JSON-like record of each completion of a group; rewards may come as numpy's numbers."""
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
    """Return a value as JSON has it, with None in place of NaN and infinities, which it does not have."""
    # The parser does it however deep they stand, where a function that calls itself would run out of stack.
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def truncate_logs(run_dir: Path, step: int) -> list[str]:
    """Forgets what was logged after `step`, and what a crash or a power failure made of lines: a resumed run writes
    them again. Lines that say which steps up to `step` are missing for good.

    In place, so that a full disk is no hindrance; where it is killed half-way, the next time does the rest.
    """
    missing = []
    for path in (run_dir / name for name in JsonlLogger.FILE_NAMES):
        kept, unreadable = truncate_log_file(path, step) if path.exists() else (set(), 0)
        if unreadable:
            missing.append(f"{path}: {unreadable} lines could not be read, and are gone")
        if path.name == "metrics.jsonl" and (gaps := [n for n in range(1, step + 1) if n not in kept]):
            missing.append(f"{path} lacks {len(gaps)} of {step} steps, the first of them step {gaps[0]}")
    return missing


def truncate_log_file(path: Path, step: int) -> tuple[set[int], int]:
    """The steps that are left, and how many lines between them could not be read.

    What goes from between other lines becomes spaces before the next one.
    """
    dropped, steps, start, end = list[tuple[int, int, bool]](), set[int](), 0, 0
    with path.open("r+b") as file:
        for line in file:
            of_line = parse_step(line)
            if of_line is None or of_line > step:
                dropped.append((start, len(line), of_line is None))
            else:
                steps.add(of_line)
                end = start + len(line)
            start += len(line)
        between = [gap for gap in dropped if gap[0] < end]
        for place, length, _ in between:
            file.seek(place)
            file.write(b" " * length)
        file.truncate(end)
        file.flush()
        os.fsync(file.fileno())
    return steps, sum(unreadable for _, _, unreadable in between)


def parse_step(line: bytes) -> int | None:
    """The record of a line; None where it is half-written or no record."""
    try:
        record = json.loads(line) if line.endswith(b"}\n") else None
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


def read_evaluations(run_dir: Path) -> dict[int, Evaluation]:
    """What `Jsonl` wrote into evals.jsonl, by step; empty where there is none."""
    return {record["step"]: parse_evaluation(record) for record in read_records(run_dir / "evals.jsonl")}


# ---------------------------------------------------------------- boards
# Boards that show a run: TensorBoard and Weights & Biases.


FIELD_TAGS = {
    "loss": "train/loss",
    "kl": "train/kl_divergence",
    "grad_norm": "train/grad_norm",
    "reward/mean": "rollout/returns",
    "completion/correct": "rollout/success_rate",
}
"""What other trainers call our metrics, on the boards where runs of several trainers are compared."""


def add_field_tags(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics under our names, and under those of other trainers."""
    return {**metrics, **{tag: metrics[name] for name, tag in FIELD_TAGS.items() if name in metrics}}


class TensorBoardLogger:
    """Scalars for TensorBoard. Raises UserError where it is not installed.

    If its files cannot be written, as on a full disk, that is one line, and nothing more is written.

    first_step: finished steps at the start; on resume, what was logged after it is purged.
    """

    def __init__(self, log_dir: Path, first_step: int = 0):
        board = import_extra("torch.utils.tensorboard", "tensorboard", "log.tensorboard")
        self.log_dir, self.failed = log_dir, False
        self.previous_hook = threading.excepthook
        threading.excepthook = self._on_thread_error  # its thread prints a traceback, and raises again in `log`
        self.writer: Any = None
        with self._report_failure_once():
            self.writer = board.SummaryWriter(str(log_dir), purge_step=first_step + 1 if first_step else None)

    def log(self, step: int, metrics: Mapping[str, float], _groups: Sequence[Group]) -> None:
        self._write_scalars(step, add_field_tags(metrics))

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        found = get_measures(evaluation)
        self._write_scalars(step, {f"heldout/{name.replace('@', '_at_')}": found[name].value for name in found})

    def close(self) -> None:
        with self._report_failure_once():
            if self.writer:
                self.writer.close()
        if threading.excepthook == self._on_thread_error:
            threading.excepthook = self.previous_hook

    def _write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        if self.failed:
            return
        with self._report_failure_once():
            for name, value in scalars.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()

    @contextmanager
    def _report_failure_once(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self.failed:
                why = error.strerror or error
                line = f"! {self.log_dir} cannot be written ({why}): the run goes on without TensorBoard"
                print(escape_controls(line), flush=True)
            self.failed = True

    def _on_thread_error(self, args: Any) -> None:
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
            self.previous_hook(args)


def check_wandb(mode: str) -> None:
    """Raise UserError where wandb is not installed, or where it is online and nobody is logged in."""
    wandb = import_extra("wandb", "wandb", "log.wandb")
    if mode == "online" and not wandb.login(prompt=False):
        raise UserError('log.wandb = "online": nobody is logged in: run wandb login; "offline" needs no account')


class WandbLogger:
    """A run at Weights & Biases, or a folder that `wandb sync` uploads. UserError where it is not installed or refuses.

    The id comes from the run folder, so that a resumed run goes on where it was.
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
        self._send({"step": step, **add_field_tags(metrics)})

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._send({"step": step, **{f"heldout/{name}": e.value for name, e in get_measures(evaluation).items()}})

    def _send(self, record: Mapping[str, float]) -> None:
        try:
            self.run.log(dict(record))
        except self.error_class as error:  # of wandb's own kind, which only wandb knows
            raise OSError(f"Weights & Biases: {error}") from error

    def close(self) -> None:
        self.run.finish()


# ---------------------------------------------------------------- metrics
# Metrics of the graded groups of a step: pure functions, no torch.
#
# `reward/*` and `*/correct` speak of the completions that got a grade: a reward that failed has no value to average, and
# is counted in `reward/failed` instead, or in `reward/no_term` where no term is meant for the prompt. Where rewards are
# a matter of degree (`state_correctness`), there is no `*/correct`, no `*_right` and no `*_wrong`: groups with equal
# rewards are counted in `groups/dead_equal`. `failed/NAME` is the share of completions for which that term failed,
# `logged/NAME` the mean of what rewards logged by that name. Lengths are in sampled tokens, the end-of-sequence token
# included.


def compute_group_metrics(groups: Sequence[Group], min_reward_range: float = 0.0) -> dict[str, float]:
    """The metrics of a step's groups, each with its rewards. Shares are in [0, 1]; the mean of no grades is NaN.

    A group is dead, and teaches nothing, when the rewards in it are equal: see `alike`.
    """
    pairs = [pair for group in groups for pair in zip(group.completions, group.rewards, strict=True)]
    graded = [(completion, reward) for completion, reward in pairs if not reward.failed]
    values = [reward.value for _, reward in graded]
    unmeant = sum(not reward.applies for _, reward in pairs)
    return {
        **compute_logged_means([reward for _, reward in pairs]),
        **compute_prefix_length(groups),
        **compute_term_means([reward for _, reward in pairs if not (reward.failed and reward.applies)]),
        "reward/mean": fmean(values) if values else nan,
        "reward/std": pstdev(values) if values else nan,
        "reward/failed": float(sum(reward.failed and reward.applies for _, reward in pairs)),
        **({"reward/no_term": float(unmeant)} if unmeant else {}),
        **compute_failed_shares([reward for _, reward in pairs]),
        **compute_zero_variance_shares(groups, min_reward_range),
        **compute_correctness(graded),
        "completion/finished": fmean(completion.finished for completion, _ in pairs),
        "completion/length_mean": compute_mean_length([completion for completion, _ in pairs]),
        **compute_turn_metrics([completion for completion, _ in pairs]),
        "tokens": float(sum(each.length for completion, _ in pairs for each in (completion, *completion.branches))),
    }


def compute_zero_variance_shares(groups: Sequence[Group], min_reward_range: float) -> dict[str, float]:
    """The share of groups with equal rewards: of all right and all wrong answers, or of answers graded by degree."""
    dead = [rewards for group in groups if (rewards := get_equal_rewards(group, min_reward_range))]
    if not rewards_are_verdicts(reward for group in groups for reward in group.rewards):
        return {"groups/dead_equal": len(dead) / len(groups)}
    all_right = sum(all(reward.is_correct for reward in rewards) for rewards in dead)
    return {
        "groups/dead_all_right": all_right / len(groups),
        "groups/dead_all_wrong": (len(dead) - all_right) / len(groups),
    }


def compute_correctness(graded: Sequence[tuple[Completion, Reward]]) -> dict[str, float]:
    """The share of right answers, and the lengths of right and wrong ones; empty where rewards are degrees."""
    judged = [(completion, reward) for completion, reward in graded if reward.is_judged]
    if not rewards_are_verdicts(reward for _, reward in judged):
        return {}
    share = fmean(reward.is_correct for _, reward in judged) if judged else nan
    return {"completion/correct": share, **compute_lengths_by_grade(judged)}


def compute_turn_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Of conversations the turns of the policy, the calls of tools, and how many of these came to nothing, and why."""
    held = [completion for completion in completions if completion.messages]
    if not held:
        return {}
    events = [completion.outcome.events for completion in held if completion.outcome]
    total = sum((Counter(each) for each in events), Counter())
    calls = total.pop("calls", 0)
    faults = {f"tools/{kind}": count / calls for kind, count in total.items() if calls}
    return (
        {"turns/mean": fmean(map(count_turns, held))} | ({"tools/calls": calls / len(held)} if calls else {}) | faults
    )


def have_all_failed(groups: Sequence[Group]) -> bool:
    """Whether no completion has a reward: each one failed, or is None since no term is meant for the prompt."""
    rewards = [reward for group in groups for reward in group.rewards]
    return bool(rewards) and all(reward.failed for reward in rewards)


def compute_prefix_length(groups: Sequence[Group]) -> dict[str, float]:
    """The mean length of the prefixes that were given, in tokens; later messages of a conversation are no prefix."""
    first = [
        c.given_spans[0] for group in groups if group.demonstration for c in group.completions[:1] if c.given_spans
    ]
    lengths = [end for start, end in first if start == 0]
    return {"prefix/length_mean": fmean(lengths)} if lengths else {}


def compute_term_means(rewards: Sequence[Reward]) -> dict[str, float]:
    """The mean of each term, over the rewards in which it is finite; NaN where there is none."""
    names = {name: None for reward in rewards for name in reward.parts}
    known = {name: [x for reward in rewards if isfinite(x := reward.parts.get(name, nan))] for name in names}
    return {f"reward/{name}": fmean(values) if values else nan for name, values in known.items()}


def compute_failed_shares(rewards: Sequence[Reward]) -> dict[str, float]:
    """The share of completions for which each term failed, of the terms that did."""
    names = Counter(name for reward in rewards for name in reward.failures)
    return {f"failed/{name}": count / len(rewards) for name, count in names.items()}


def compute_logged_means(rewards: Sequence[Reward]) -> dict[str, float]:
    """The mean of each number that rewards logged, over the completions that have one."""
    names = {name: None for reward in rewards for name in reward.logged}
    known = {name: [reward.logged[name] for reward in rewards if name in reward.logged] for name in names}
    return {f"logged/{name}": fmean(values) for name, values in known.items()}


def compute_mean_length(completions: Sequence[Completion]) -> float:
    return fmean(completion.length for completion in completions)


def compute_lengths_by_grade(judged: Sequence[tuple[Completion, Reward]]) -> dict[str, float]:
    right = [completion for completion, reward in judged if reward.is_correct]
    wrong = [completion for completion, reward in judged if not reward.is_correct]
    lengths = {"completion/length_right": right, "completion/length_wrong": wrong}
    return {name: compute_mean_length(completions) for name, completions in lengths.items() if completions}


def predict_zero_variance_share(
    rewards: Sequence[Sequence[float]], group_size: int, min_reward_range: float = 0.0
) -> float:
    """The share of groups of `group_size` that would be dead, from n >= `group_size` rewards of each prompt.

    Averages the chance that G of a prompt's n samples, drawn without replacement, were rewarded alike: for the sample
    that is the lowest of the G, the others are among those above that are like it. With two values that is
    sum of C(n_v, G) / C(n, G), unbiased for p^G + (1 - p)^G. NaN, a reward that failed, is like any other.
    Plugging in p = n_v / n would exaggerate: 8 samples of a prompt with p = 0.1 are all wrong 43% of the time, and
    p = 0 calls it dead at every G.

    Raises ValueError where n < group_size: p^G cannot be estimated without bias from fewer than G samples.
    """
    samples = min(map(len, rewards))
    if samples < group_size:
        raise ValueError(
            f"{samples} samples a prompt cannot predict groups of {group_size}: draw at least {group_size}"
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

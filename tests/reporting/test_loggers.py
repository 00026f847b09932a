"""Tests of the loggers: JSONL files, TensorBoard, Weights & Biases, plain lines and the live display."""

import io
import json
import math
import re
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import rich.console
import wandb
from tensorboard.backend.event_processing import event_accumulator
from wandb.proto import wandb_internal_pb2

from pellucid.reporting import loggers
from pellucid.reporting.console import (
    ConsoleLogger,
    PlainLogger,
    format_sparkline,
    make_comparison_table,
    make_screen_logger,
)
from pellucid.reporting.loggers import (
    CompositeLogger,
    JsonlLogger,
    TensorBoardLogger,
    WandbLogger,
    compute_group_metrics,
    truncate_logs,
)
from pellucid.reporting.run_files import read_evaluations
from pellucid.types import Completion, Estimate, Evaluation, Group, Prompt, Reward, UserError

TIMES = {"time/generate": 3.0, "time/reward": 0.0, "time/score": 0.5, "time/update": 1.0, "time/step": 5.0}
EVALUATION = Evaluation(
    "arithmetic", "test", 64, 8, Estimate(0.25, 0.16, 0.37), Estimate(0.2, 0.1, 0.3), Estimate(0.5, 0.4, 0.6)
)
BETTER = Evaluation(
    "arithmetic", "test", 64, 8, Estimate(0.9, 0.8, 0.95), Estimate(0.3, 0.2, 0.4), Estimate(0.9, 0.8, 0.99)
)


def groups_of(*rewards: tuple[Reward, ...]) -> list[Group]:
    return [
        Group(
            Prompt(f"train/1/{p}", ({"role": "user", "content": f"What is {p} + 1?"},), str(p + 1)),
            (1, 2),
            tuple(
                Completion((5,) * (g + 2), (-0.123456789,) * (g + 2), f"{p}-{g}", g % 2 == 0) for g in range(len(some))
            ),
            some,
            tuple(float(g) for g in range(len(some))),
        )
        for p, some in enumerate(rewards)
    ]


RIGHT, WRONG = Reward(1.0, {"numeric": 1.0}, True), Reward(0.25, {"numeric": 0.0}, False)
FAILED = Reward(math.nan, error="ValueError: \x1b[31mno number\nTraceback: long")


def read(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text(encoding="utf-8").splitlines()]


def test_metrics_recomputed_from_the_saved_rollouts_equal_the_logged_ones(tmp_path: Path):
    groups = groups_of((RIGHT, WRONG, FAILED), (RIGHT, RIGHT, RIGHT), (WRONG, WRONG, WRONG))
    log = JsonlLogger(tmp_path)
    log.log(1, compute_group_metrics(groups), groups)
    log.close()
    logged, rows = read(tmp_path / "metrics.jsonl")[0], read(tmp_path / "rollouts.jsonl")
    graded = [row for row in rows if row["reward"] is not None]
    by_prompt = defaultdict(list)
    for row in graded:
        by_prompt[row["id"]].append(row)
    dead = [some for some in by_prompt.values() if len({row["reward"] for row in some}) == 1]
    all_right = sum(all(row["correct"] for row in some) for some in dead)
    assert logged["step"] == 1
    assert logged["reward/mean"] == statistics.fmean(row["reward"] for row in graded)
    assert logged["reward/std"] == statistics.pstdev(row["reward"] for row in graded)
    assert logged["reward/numeric"] == statistics.fmean(row["parts"]["numeric"] for row in graded)
    assert logged["reward/failed"] == sum("error" in row for row in rows) == 1
    assert logged["completion/length_mean"] == statistics.fmean(len(row["tokens"]) for row in rows)
    assert logged["completion/finished"] == statistics.fmean(row["finished"] for row in rows)
    assert logged["tokens"] == sum(len(row["tokens"]) for row in rows)
    assert logged["groups/dead_all_right"] * len(groups) == all_right == 1
    assert logged["groups/dead_all_wrong"] * len(groups) == len(dead) - all_right == 1


def test_rollout_record_holds_prompt_completion_and_reward(tmp_path: Path):
    log = JsonlLogger(tmp_path)
    log.log(3, {}, groups_of((RIGHT, FAILED)))
    log.close()
    first, second = read(tmp_path / "rollouts.jsonl")
    assert first == {
        "step": 3,
        "id": "train/1/0",
        "prompt": "What is 0 + 1?",
        "completion": "0-0",
        "finished": True,
        "correct": True,
        "reward": 1.0,
        "parts": {"numeric": 1.0},
        "advantage": 0.0,
        "tokens": [5, 5],
        "logprobs": [-0.123457, -0.123457],
    }
    assert second["reward"] is None
    assert second["error"].startswith("ValueError")


def test_non_finite_numbers_become_null(tmp_path: Path):
    log = JsonlLogger(tmp_path)
    sampled = Completion((5, 6), (-math.inf, -0.5), "?", True)
    log.log(
        1,
        {"reward/mean": math.nan, "grad_norm": math.inf},
        [Group(Prompt("p", "?"), (1,), (sampled,), (RIGHT,), (0.0,))],
    )
    log.close()
    assert read(tmp_path / "rollouts.jsonl")[0]["logprobs"] == [None, -0.5]
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": None, "grad_norm": None}]


def test_numpy_rewards_are_logged_as_plain_numbers(tmp_path: Path):
    log = JsonlLogger(tmp_path)
    log.log(1, {}, groups_of((Reward(np.float32(0.5), {"n": np.int64(2)}, np.bool_(True)),)))
    log.close()
    (row,) = read(tmp_path / "rollouts.jsonl")
    assert (row["reward"], row["parts"], row["correct"]) == (0.5, {"n": 2.0}, True)


def test_a_step_is_on_disk_before_close(tmp_path: Path):
    log = JsonlLogger(tmp_path)
    log.log(1, {"loss": 0.0}, groups_of((RIGHT,)))
    log.log_evaluation(1, EVALUATION)
    assert all(read(tmp_path / name) for name in JsonlLogger.FILE_NAMES)
    log.close()


def test_an_evaluation_holds_its_intervals(tmp_path: Path):
    log = JsonlLogger(tmp_path)
    log.log_evaluation(10, EVALUATION)
    log.close()
    (row,) = read(tmp_path / "evals.jsonl")
    assert list(row) == [
        "step",
        "task",
        "split",
        "n",
        "k",
        "greedy",
        "mean@k",
        "pass@k",
        "questions",
        "right",
        "failed",
        "left_out",
        "undecided",
        "rewards",
        "verdicts",
    ]
    assert row["greedy"] == {"value": 0.25, "low": 0.16, "high": 0.37}


def test_truncate_keeps_complete_lines_up_to_the_step(tmp_path: Path):
    log = JsonlLogger(tmp_path)
    for step in (1, 2, 3):
        log.log(step, {"loss": 0.0}, groups_of((RIGHT, WRONG)))
    log.log_evaluation(0, EVALUATION)
    log.log_evaluation(3, EVALUATION)
    log.close()
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 2, "prompt": "half wri')
    truncate_logs(tmp_path, 2)
    log = JsonlLogger(tmp_path)
    log.log(3, {"loss": 1.0}, groups_of((RIGHT,)))
    log.close()
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [row["step"] for row in read(tmp_path / "rollouts.jsonl")] == [1, 1, 2, 2, 3]
    assert [row["step"] for row in read(tmp_path / "evals.jsonl")] == [0]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("half", ['{"step": 1', '{"step": 1, "loss": 0.5}'])
def test_truncate_drops_half_lines_that_could_be_complete(tmp_path: Path, half: str):
    """The second one lacks only its newline: the next record would be appended to it."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n' + half)
    truncate_logs(tmp_path, 5)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.5}\n'


def test_truncate_drops_later_steps_anywhere_in_the_file(tmp_path: Path):
    """Two processes that write into one folder leave the steps in such an order."""
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines_of(1, 4, 2, 3)))
    assert truncate_logs(tmp_path, 2) == []
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2]


def lines_of(*steps: int) -> list[bytes]:
    return [b'{"step": %d, "loss": 0.5}\n' % step for step in steps]


BAD = {
    "zeros of a power failure": bytes(40) + b"\n",
    "zeros and the end of a line": bytes(20) + b'"loss": 0.5}\n',
    "half a line": b'{"step": 2, "lo\n',
    "no record": b"[2]\n",
    "no text": b'{"step": 2, "loss": "\xff\xfe"}\n',
}


@pytest.mark.parametrize("bad", BAD)
def test_truncate_removes_bad_lines_in_place_and_reports_missing_steps(tmp_path: Path, bad: str):
    path = tmp_path / "metrics.jsonl"
    one, three, four = lines_of(1, 3, 4)
    path.write_bytes(one + BAD[bad] + three + four + BAD[bad])
    number = path.stat().st_ino
    said = truncate_logs(tmp_path, 3)
    assert [row["step"] for row in read(path)] == [1, 3]
    assert path.stat().st_ino == number, "no copy: the disk may be full"
    assert said == [
        f"{path}: 1 lines could not be read and were removed",
        f"{path} lacks 1 of 3 steps, the first of them step 2",
    ]


def test_truncate_drops_a_tail_of_zeros(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines_of(1, 2)) + bytes(100))
    assert truncate_logs(tmp_path, 2) == []
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(lines_of(1, 2))


def test_truncate_reports_a_log_shorter_than_the_checkpoint(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines_of(1)))
    assert truncate_logs(tmp_path, 3) == [f"{tmp_path / 'metrics.jsonl'} lacks 2 of 3 steps, the first of them step 2"]


def test_interrupted_truncate_is_finished_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The interrupted call may have written any number of its spaces."""
    path = tmp_path / "metrics.jsonl"
    bad = BAD["zeros and the end of a line"]
    for written in range(len(bad) + 1):
        path.write_bytes(b"".join([lines_of(1)[0], b" " * written + bad[written:], lines_of(2)[0], lines_of(3)[0]]))
        truncate_logs(tmp_path, 2)
        assert [row["step"] for row in read(path)] == [1, 2]


def test_truncate_works_on_a_full_disk(tmp_path: Path):
    """The limit forbids writing beyond the end of the file."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines_of(1)[0] + BAD["no record"] + b"".join(lines_of(2, 3)))
    size = path.stat().st_size
    code = (
        "import resource, sys; from pathlib import Path; from pellucid.reporting.loggers import truncate_logs\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size - 1},) * 2); truncate_logs(Path(sys.argv[1]), 2)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert [row["step"] for row in read(path)] == [1, 2]


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4]), (2, [1, 2, 4]), (3, [1, 3]), (0, [])])
def test_rollouts_can_be_thinned_or_left_out(tmp_path: Path, every: int, steps: list[int]):
    log = JsonlLogger(tmp_path, every)
    for step in (1, 2, 3, 4):
        log.log(step, {"loss": 0.0}, groups_of((RIGHT,)))
    log.close()
    assert [row["step"] for row in read(tmp_path / "rollouts.jsonl")] == steps
    assert len(read(tmp_path / "metrics.jsonl")) == 4


class Broken:
    """A logger that always raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def log(self, *_: object) -> None:
        raise self.error

    log_evaluation = close = log


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), BrokenPipeError(32, "pipe"), KeyError("reward")])
def test_failing_display_prints_a_line_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture, error: Exception
):
    log = CompositeLogger([JsonlLogger(tmp_path)], [Broken(error), board := PlainLogger(3)])
    log.log(1, {"loss": 0.5}, [])
    log.log_evaluation(1, EVALUATION)
    log.close()
    lines = capsys.readouterr().out.splitlines()
    assert board.total_steps == 3
    assert [line.startswith("! ") for line in lines] == [True, False, True, False, True]
    assert type(error).__name__ in lines[0]
    assert len(read(tmp_path / "metrics.jsonl")) == len(read(tmp_path / "evals.jsonl")) == 1


def test_failing_file_logger_raises(tmp_path: Path):
    with pytest.raises(ZeroDivisionError):
        CompositeLogger([Broken(ZeroDivisionError())]).log(1, {}, [])


def test_composite_logger_passes_records_to_all_loggers(tmp_path: Path):
    log = CompositeLogger([JsonlLogger(tmp_path / "a"), JsonlLogger(tmp_path / "b")])
    log.log(1, {"loss": 0.0}, [])
    log.log_evaluation(1, EVALUATION)
    log.close()
    for name in ("a", "b"):
        assert read(tmp_path / name / "metrics.jsonl")
        assert read(tmp_path / name / "evals.jsonl")


def test_tensorboard_drops_the_steps_that_a_resumed_run_repeats(tmp_path: Path):
    for first_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        log = TensorBoardLogger(tmp_path, first_step)
        for step in steps:
            log.log(step, {"reward/mean": first_step + step / 10}, [])
        log.log_evaluation(steps[-1], EVALUATION)
        log.close()
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    scalars = [(event.step, round(event.value, 3)) for event in events.Scalars("reward/mean")]
    assert scalars == [(1, 0.1), (2, 0.2), (3, 2.3), (4, 2.4)]
    assert events.Scalars("heldout/greedy")[-1].value == 0.25


def test_full_disk_under_tensorboard_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    hook, limit = threading.excepthook, resource.getrlimit(resource.RLIMIT_FSIZE)
    log = TensorBoardLogger(tmp_path)
    log.log(1, {"loss": 1.0}, [])
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limit[1]))
    try:
        for step in (2, 3):
            log.log(step, {f"metric/{i}": 1.0 for i in range(100)}, [])
        log.log_evaluation(3, EVALUATION)
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    told = capsys.readouterr()
    assert told.out == f"! {tmp_path} cannot be written (File too large): the run goes on without TensorBoard\n"
    assert told.err == ""
    assert threading.excepthook is hook


def test_tensorboard_also_has_common_names_of_metrics(tmp_path: Path):
    metrics = {"loss": 0.5, "kl": 0.25, "grad_norm": 2.0, "reward/mean": 0.75, "completion/correct": 0.5, "tokens": 9.0}
    board = TensorBoardLogger(tmp_path)
    board.log(1, metrics, [])
    board.close()
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    tags = ("train/loss", "train/kl_divergence", "train/grad_norm", "rollout/returns", "rollout/success_rate")
    assert [events.Scalars(tag)[0].value for tag in tags] == [0.5, 0.25, 2.0, 0.75, 0.5]


@pytest.mark.slow
def test_offline_wandb_run_is_written_completely(tmp_path: Path):
    log = WandbLogger(tmp_path, "pellucid", "offline", {"algorithm": {"steps": 2}})
    log.log_evaluation(0, EVALUATION)
    log.log(1, {"loss": 0.5, "reward/mean": 0.25}, [])
    log.log(2, {"loss": 0.25, "reward/mean": 0.75}, [])
    log.close()
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history = [
        {
            item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in written(file)
        if record.WhichOneof("record_type") == "history"
    ]
    assert [row["step"] for row in history] == [0, 1, 2]
    assert history[0]["heldout/greedy"] == 0.25
    assert [row["train/loss"] for row in history[1:]] == [0.5, 0.25]
    assert [row["rollout/returns"] for row in history[1:]] == [0.25, 0.75]


def written(file: Path):
    """Return all records up to the exit record, which wandb's own process writes after `finish` has returned."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        records = list(wandb_records(file))
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError


def wandb_records(file: Path):
    """Yield what `wandb sync` uploads: LevelDB's log format, 32 KiB blocks, pieces behind a 7-byte header."""
    data, at, pieces = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if kind == 0:  # the rest of the block is empty
            at = -(-(at + 1) // 32768) * 32768
            continue
        if at + 7 + length > len(data):  # still being written
            return
        pieces += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pieces)
            yield record
            pieces = b""


def test_a_missing_wandb_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pellucid\[wandb\]"):
        WandbLogger(tmp_path, "pellucid", "offline", {})


def test_a_missing_tensorboard_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r'^log.tensorboard needs tensorboard: pip install "pellucid\[tensorboard\]"$'):
        TensorBoardLogger(tmp_path)


def test_plain_logger_formats_steps_and_evaluations(capsys: pytest.CaptureFixture[str]):
    groups = groups_of((RIGHT, RIGHT), (WRONG, WRONG), (RIGHT, WRONG))
    log = PlainLogger(30)
    log.log(2, {**compute_group_metrics(groups), **TIMES, "sampler/gap_mean": 0.031, "loss": 7.0}, groups)
    log.log_evaluation(10, EVALUATION)
    step, evaluation = capsys.readouterr().out.splitlines()
    assert step == (
        "step  2/30  reward  0.625  dead 1/3 right  1/3 wrong  len    2.5  fin 0.50  gap 0.0310    5.0 s      3 tok/s"
    )
    assert evaluation == "eval step 10  greedy 0.25 [0.16, 0.37]  mean@8 0.20 [0.10, 0.30]  pass@8 0.50 [0.40, 0.60]"


def test_plain_logger_shows_problems_and_the_first_error_once(capsys: pytest.CaptureFixture[str]):
    groups = groups_of((RIGHT, FAILED))
    log = PlainLogger(3)
    for step in (1, 2):
        log.log(step, {"reward/failed": 1.0, "skipped": 2.0, "skipped/overflow": 3.0}, groups)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "step 1/3  ! failed rewards: 1  ! skipped updates: 2  ! updates too large for fp16 at this loss_scale: 3"
    )
    assert lines[1] == "! the first failed reward says ValueError: \\x1b[31mno number"
    assert len(lines) == 3


def test_only_greedy_accuracy_is_shown_without_samples(capsys: pytest.CaptureFixture[str]):
    none = Estimate(math.nan, math.nan, math.nan)
    PlainLogger(3).log_evaluation(0, Evaluation("sorting", "test", 64, 0, Estimate(0.5, 0.1, 0.9), none, none))
    assert capsys.readouterr().out == "eval step 0  greedy 0.50 [0.10, 0.90]\n"


def test_lines_after_a_continuous_reward_omit_right_and_wrong(capsys: pytest.CaptureFixture[str]):
    log, none = PlainLogger(3), Estimate()
    for step, rewards in enumerate(((0.0, 0.0), (0.8, 0.8), (0.0, 0.0)), start=1):
        groups = groups_of(tuple(Reward(reward) for reward in rewards))
        log.log(step, compute_group_metrics(groups), groups)
    log.log_evaluation(3, Evaluation("tone", "test", 3, 0, Estimate(0.0), none, none, reward=Estimate(0.8)))
    first, *others, last = capsys.readouterr().out.splitlines()
    assert "dead 0/1 right  1/1 wrong" in first, "so far each reward was 0"
    for line in others:
        assert "dead 1/1  len" in line
    assert last == "eval step 3  reward 0.80  (too few prompts for an interval)"


def picture_of(log: ConsoleLogger) -> str:
    paper = rich.console.Console(file=io.StringIO(), width=100)
    paper.print(log.render())
    return paper.file.getvalue()


def shown(steps: int, first_step: int = 0, groups: list[Group] | None = None, **extra: float) -> str:
    """Return the last picture of a live display after `steps` steps."""
    groups = groups or groups_of((RIGHT, RIGHT), (WRONG, WRONG), (RIGHT, WRONG))
    screen = rich.console.Console(file=io.StringIO(), force_terminal=True, width=100)
    log = ConsoleLogger(30, first_step, screen)
    log.log_evaluation(0, EVALUATION)
    for step in range(first_step + 1, first_step + steps + 1):
        log.log(
            step, {**compute_group_metrics(groups), **TIMES, **extra, "reward/mean": step / 10, "loss": 123.0}, groups
        )
    log.log_evaluation(first_step + steps, BETTER)
    log.close()
    return picture_of(log)


def test_the_live_display_shows_the_headlines_and_no_loss():
    picture = shown(5)
    assert "5/30" in picture
    assert "0.500" in picture
    assert "+0.400 over 5 steps" in picture
    assert "33% all right, 33% all wrong" in picture
    assert "[0.80, 0.95]  +0.65" in picture
    assert "3 tokens per second" in picture
    assert "generate 60%  reward 0%  score 10%  update 20%  other 10%" in picture
    assert "loss" not in picture
    assert "123" not in picture
    assert "!" not in picture


def test_both_displays_show_the_groups_drawn_by_dynamic_sampling(capsys: pytest.CaptureFixture[str]):
    picture = shown(2, **{"groups/drawn": 12.0, "groups/drawn_dead": 0.75})
    assert re.search(r"groups drawn +12 +75% of them dead", picture)
    assert "groups drawn" not in shown(2)
    capsys.readouterr()
    PlainLogger(3).log(1, {"groups/drawn": 12.0, "groups/drawn_dead": 0.75}, groups_of((RIGHT, WRONG)))
    assert capsys.readouterr().out == "step 1/3  drawn  12\n"


def test_live_display_of_a_resumed_run_continues_its_count():
    log = ConsoleLogger(30, 10, rich.console.Console(file=io.StringIO(), force_terminal=True))
    log.close()
    assert "10/30" in picture_of(log)
    assert "12/30" in shown(2, first_step=10)


def test_the_live_display_warns_of_failed_rewards_and_skipped_updates():
    picture = shown(2, groups=groups_of((RIGHT, FAILED)), skipped=1.0)
    assert "! failed rewards: 2, the first with ValueError: \\x1b[31mno number" in picture
    assert "! skipped updates: 2" in picture


def test_live_display_works_without_metrics():
    log = ConsoleLogger(3, screen=rich.console.Console(file=io.StringIO(), force_terminal=True))
    log.log(1, {}, [])
    log.close()


def test_output_to_a_file_uses_the_plain_logger():
    assert isinstance(make_screen_logger(3), PlainLogger)


def test_sparkline_reaches_from_the_lowest_to_the_highest():
    assert format_sparkline([0.0, 1.0, math.nan, 0.5]) == "▁█ ▅"
    assert format_sparkline([2.0, 2.0]) == "▁▁"
    assert format_sparkline([math.nan]) == " "


def test_comparison_table_shows_gains_and_overlaps():
    paper = rich.console.Console(file=io.StringIO(), width=100)
    paper.print(make_comparison_table(EVALUATION, BETTER))
    rows = {line.split()[0]: line for line in paper.file.getvalue().splitlines() if "@" in line or "greedy" in line}
    assert "0.250 [0.16, 0.37]" in rows["greedy"]
    assert "+0.650" in rows["greedy"]
    assert "apart" in rows["greedy"]
    assert "overlap" in rows["mean@8"]


def test_live_display_that_fails_shows_one_line(monkeypatch: pytest.MonkeyPatch):
    """A thread of Rich, which catches no errors, also draws it."""
    log = ConsoleLogger(3, screen=rich.console.Console(file=io.StringIO(), force_terminal=True))
    monkeypatch.setattr(log, "render", lambda: 1 / 0)
    log.log(1, {}, [])
    log.close()
    assert "cannot be drawn (ZeroDivisionError" in str(log.render_safely())


def test_evaluations_are_read_past_damage_by_a_power_failure(tmp_path: Path):
    log = JsonlLogger(tmp_path)
    log.log_evaluation(0, EVALUATION)
    log.close()
    with (tmp_path / "evals.jsonl").open("ab") as file:
        file.write(bytes(50) + b"}\n[1]\n")
    log = JsonlLogger(tmp_path)
    log.log_evaluation(2, EVALUATION)
    log.close()
    assert list(read_evaluations(tmp_path)) == [0, 2]


def test_wandb_errors_are_raised_as_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(_: object) -> None:
        raise wandb.errors.CommError("no route")

    log = WandbLogger(tmp_path, "pellucid", "offline", {})
    with monkeypatch.context() as patched:
        patched.setattr(log.run, "log", refuse)
        for logs in (lambda: log.log(1, {"loss": 0.5}, []), lambda: log.log_evaluation(1, EVALUATION)):
            with pytest.raises(OSError, match="no route"):  # `guard_display` prints it as one line
                logs()
    log.close()
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    written(file)


def test_wandb_login_is_required_only_online(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wandb, "login", lambda prompt: prompt)
    loggers.check_wandb("offline")
    with pytest.raises(UserError, match="wandb login"):
        loggers.check_wandb("online")
    monkeypatch.setattr(wandb, "login", lambda prompt: not prompt)
    loggers.check_wandb("online")

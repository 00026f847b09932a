"""Helpers that write the three files of a finished run without training."""

from __future__ import annotations

import json

STEPS = 4


def write_run(run_dir, right, questions="q", steps=STEPS, seed=0, settings=None, metrics=None):
    """Write a finished run whose greedy answers are all wrong at first and `right` at the end. Return its folder."""
    run_dir.mkdir(parents=True)
    algorithm = {"steps": STEPS, "minutes": 0, "seed": seed, **(settings or {})}
    config = {"algorithm": algorithm, "evaluate": {"every": STEPS}, "policy": {"model": "tiny"}}
    (run_dir / "config.json").write_text(json.dumps(config))
    rows = [{"step": step, **step_metrics(step), **(metrics or {})} for step in range(1, steps + 1)]
    write_lines(run_dir / "metrics.jsonl", rows)
    evals = [evaluation(0, [0] * len(right), questions), evaluation(steps, right, questions)]
    write_lines(run_dir / "evals.jsonl", evals)
    return run_dir


def step_metrics(step):
    dead = {"groups/dead_all_right": 0.25, "groups/dead_all_wrong": 0.5}
    return {"reward/mean": step / 10, "tokens": 100, "time/step": 30.0, **dead}


def evaluation(step, right, questions):
    share = sum(right) / len(right)
    measure = {"value": share, "low": share - 0.1, "high": share + 0.1}
    about = {"step": step, "task": "digits", "split": "test", "n": len(right), "k": 2}
    return {**about, "greedy": measure, "mean@k": measure, "questions": questions, "right": right}


def with_rewards(run_dir, rewards, verdicts=False):
    """Add graded rewards to a run: 0 for the first greedy answers and `rewards` for the last. Return its folder."""
    path = run_dir / "evals.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, values in zip(rows, ([0.0] * len(rewards), rewards), strict=True):
        graded = [value for value in values if value is not None]
        mean = sum(graded) / len(graded)
        measure = {"value": mean, "low": mean - 0.2, "high": mean + 0.2}
        row |= {"reward": measure, "rewards": values, "verdicts": verdicts}
    write_lines(path, rows)
    return run_dir


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

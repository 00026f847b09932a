"""Make run folders with invented tokens: small ones by hand, and large ones like those of a real run."""

from __future__ import annotations

import json
import math
import random

from pellucid.reporting import token_files

CONFIG = {
    "policy": {"model": "tiny"},
    "task": {"name": "arithmetic"},
    "sampler": {"max_tokens": 24},
    "algorithm": {"steps": 9, "prompts_per_step": 3, "group_size": 4, "clip_low": 0.2, "clip_high": 0.2},
}
ABOUT = {"objective": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "group_size": 4, "temperature": 1.0}
WORDS = [" the", " sum", " is", " 7", " 8", "\n", "答案", " So", " we", " add", ".", " 12"]


def id_of(text):
    return abs(hash(text)) % 50000 if text not in WORDS else WORDS.index(text)


def row(group, completion, position, text, **more):
    """Return a sampled token that was pushed up and rose, with changes in `more`."""
    return {
        "group": group,
        "prompt_id": f"train/{group}",
        "completion": completion,
        "branch": 0,
        "position": position,
        "token": id_of(text),
        "text": text,
        "kind": "sampled",
        "reward": 1.0,
        "correct": True,
        "finished": True,
        "parts": "{}",
        "version": 0,
        "sampler_logprob": -0.5,
        "logprob_before": -0.5,
        "logprob_after": -0.4,
        "ref_logprob": -0.7,
        "entropy_before": 0.9,
        "entropy_after": 0.8,
        "ratio": 1.0,
        "advantage": 0.5,
        "weight": 0.01,
        "importance": 1.0,
        "push": 0.005,
        "gradient": 0.004,
        "rule": "",
        **more,
    }


def prompt(group, position, text):
    nothing = dict.fromkeys([name for name in row(0, 0, 0, "") if name not in row_keys()], None)
    kept = {"group": group, "prompt_id": f"train/{group}", "completion": -1, "branch": 0, "position": position}
    return {**nothing, **kept, "token": position, "text": text, "kind": "prompt", "rule": ""}


def row_keys():
    return {"group", "prompt_id", "completion", "branch", "position", "token", "text", "kind", "rule"}


def write_tokens(run, step, rows, **about):
    names = {name: None for each in rows for name in each}
    token_files.write_tokens(
        run, step, {"step": [step] * len(rows), **{n: [r.get(n) for r in rows] for n in names}}, ABOUT | about
    )


def lines(path, records):
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def metric(step, **more):
    shares = {"groups/dead_all_right": 0.0, "groups/dead_all_wrong": 1 / 3, "completion/finished": 0.9}
    numbers = {"reward/mean": 0.3 + 0.05 * step, "reward/failed": 0.0, "loss": 1e-8, "grad_norm": 0.7, "lr": 1e-5}
    return {"step": step, **numbers, **shares, "ratio/mean": 1.0, "entropy": 0.9, "tokens": 96.0, **more}


def rollout(step, name, said, reward, asked="What is 3 + 4?", **more):
    """Return a row of rollouts.jsonl."""
    return {
        "step": step, "id": name, "prompt": asked, "completion": said, "finished": True, "correct": reward == 1.0,
        "reward": reward, "parts": {}, "advantage": 0.5, "tokens": [1, 2, 3, 4], "logprobs": [-0.5] * 4, **more,
    }  # fmt: skip


def run_folder(run, config=CONFIG):
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.json").write_text(json.dumps(config))
    for name in ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl"):
        (run / name).touch()
    return run


def add_step(run, step, groups=3, completions=4, length=10, seed=0, said=None):
    """Write a step as a run does. The last group has no signal and no tokens."""
    draw, rows, rolled = random.Random(1000 * seed + step), [], []
    for g in range(groups):
        asked = f"What is {3 + g} + 4?"
        dead = g == groups - 1
        rows += [] if dead else [prompt(g, i, text) for i, text in enumerate((asked, "\n"))]
        for c in range(completions):
            reward = 0.25 if dead else float(c % 2 == 0)
            texts = [" So", " we", *(draw.choice(WORDS) for _ in range(length - 2))]
            texts = said if said and c == 0 and g == 0 else texts
            many = {"tokens": [1] * len(texts), "logprobs": [-0.5] * len(texts)}
            rolled.append(rollout(step, f"train/{g}", "".join(texts), reward, asked, **many))
            rows += [] if dead else [made(draw, g, c, i, text, reward) for i, text in enumerate(texts)]
    write_tokens(run, step, rows)
    lines(run / "rollouts.jsonl", rolled)
    lines(run / "metrics.jsonl", [metric(step)])


def made(draw, group, completion, position, text, reward):
    """Return a token with realistic numbers."""
    before, change = -draw.expovariate(1.5), draw.gauss(0, 0.05)
    ratio = math.exp(draw.gauss(0, 0.12))
    advantage = 0.9 if reward else -0.9
    rule = "clip_high" if advantage > 0 and ratio > 1.2 else "clip_low" if advantage < 0 and ratio < 0.8 else ""
    others = {other: -draw.expovariate(0.5) - 0.1 for other in (" a", " b", " c")}
    entropy = draw.expovariate(1.0)
    push = 0.0 if rule else advantage * ratio * 0.01
    alternatives = likeliest("before", {**others, text: before})
    after = likeliest(
        "after", {**{other: x + draw.gauss(0, 0.02) for other, x in others.items()}, text: before + change}
    )
    return row(
        group, completion, position, text, reward=reward, correct=reward == 1.0, advantage=advantage, ratio=ratio,
        rule=rule, bound={"clip_high": 1.2, "clip_low": 0.8}.get(rule), push=push,
        gradient=abs(push) * (1 - math.exp(before)), sampler_logprob=before + draw.gauss(0, 1e-4),
        logprob_before=before,
        logprob_after=before + change, ref_logprob=before + draw.gauss(0, 0.2),
        entropy_before=entropy, entropy_after=entropy + draw.gauss(0, 0.02), **alternatives, **after,
    )  # fmt: skip


def likeliest(when, logprobs):
    """Return the columns of the alternatives, the likeliest first."""
    texts = sorted(logprobs, key=lambda text: -logprobs[text])
    return {
        f"top_{when}": [id_of(text) for text in texts],
        f"top_{when}_text": texts,
        f"top_{when}_logprob": [logprobs[text] for text in texts],
    }


def small_run(run, steps=9, seed=0):
    run_folder(run)
    for step in range(1, steps + 1):
        add_step(run, step, seed=seed)
    return run

"""Train for two small steps, for commands and programs of the documents: `python shortened.py train RECIPE ...`."""

from __future__ import annotations

import os
import sys

STEPS = 2
GROUPS = {"prompts_per_step": 2, "group_size": 4}
"""Settings of a step, which a command may name itself."""


def shorten() -> None:
    """Make `pellucid.train` in this process take two steps, and ask two questions in evaluations."""
    import pellucid  # noqa: PLC0415 - the documents import it themselves

    train = pellucid.train

    def shortened(*args, **keywords):
        steps = keywords.pop("steps", keywords.pop("algorithm_steps", STEPS))
        least = 3 if "resume" in keywords else STEPS
        added = {"steps": min(steps, least), **_few_questions(keywords), **_small_groups(keywords)}
        return train(*args, **{**keywords, **added})

    pellucid.train = shortened


def _few_questions(keywords):
    if keywords.get("evaluate_every") == 0 or "resume" in keywords:
        return {}
    return {name: 2 for name in ("evaluate_n", "evaluate_k") if name not in keywords}


def _small_groups(keywords):
    if "resume" in keywords:
        return {}
    return {name: n for name, n in GROUPS.items() if name not in keywords and f"algorithm_{name}" not in keywords}


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["train"] and "--dry-run" not in words and "--help" not in words and "--help-all" not in words:
        if "--resume" not in words:
            words += [f"--algorithm.steps={STEPS}", "--evaluate.n=2", "--evaluate.k=0", "--evaluate.samples=0"]
            flags = {f"--algorithm.{name.replace('_', '-')}": n for name, n in GROUPS.items()}
            named = {word.partition("=")[0] for word in words}
            words += [f"{flag}={n}" for flag, n in flags.items() if flag not in named]
        elif any(word.startswith("--algorithm.steps") for word in words):
            words += [f"--algorithm.steps={STEPS + 1}"]
    os.execv(sys.executable, [sys.executable, "-m", "pellucid", *words])


if __name__ == "__main__":
    main()

"""The table of what the reward `math` must credit, and how much of it the package that is imported judges rightly.

python tests/rewards/math_pairs.py            # counts by kind, and every row that is judged wrongly
"""

from __future__ import annotations

import multiprocessing
import tomllib
from pathlib import Path
from typing import NamedTuple

from pellucid.rewards.terms import grade_math

LIMIT = 10
"""Seconds of a comparison, as the sandbox has it: what takes longer is judged wrongly."""
FORMS = {"boxed": "So it is $\\boxed{%s}$.", "tagged": "<answer>%s</answer>", "bare": "%s"}


class Row(NamedTuple):
    kind: str
    gold: str
    completion: str
    equal: bool
    known: str
    """Why it is judged wrongly; empty where it is not."""
    answer: str = ""
    """The answer without the box or the tag around it."""


def rows() -> list[Row]:
    table = tomllib.loads((Path(__file__).parent / "math_pairs.toml").read_text(encoding="utf-8"))
    found = []
    for kind in table["kind"]:
        for verdict in ("equal", "different"):
            for gold, answer, *known in kind[verdict]:
                completion = FORMS[kind["form"]] % answer
                why = known[0] if known else ""
                found.append(Row(kind["name"], gold, completion, verdict == "equal", why, answer))
    return found


def is_right(row: Row) -> bool:
    return grade_math(row.completion, row.gold) == float(row.equal)


def judged_wrongly(table: list[Row]) -> list[Row]:
    """In a process of its own, which is ended where a comparison does not."""
    wrong, pool = [], multiprocessing.Pool(1)
    for row in table:
        try:
            right = pool.apply_async(is_right, (row,)).get(LIMIT)
        except multiprocessing.TimeoutError:
            right = False
            pool.terminate()
            pool = multiprocessing.Pool(1)
        if not right:
            wrong.append(row)
    pool.terminate()
    return wrong


def main() -> None:
    table = rows()
    wrong = judged_wrongly(table)
    for row in wrong:
        print(f"{row.kind}: {row.gold!r} {'=' if row.equal else '!='} {row.completion!r}")
    for equal, name in ((True, "equal"), (False, "different")):
        of = [row for row in table if row.equal == equal]
        print(f"{name}: {len(of) - sum(row.equal == equal for row in wrong)} of {len(of)} right")


if __name__ == "__main__":
    main()

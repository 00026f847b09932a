"""Read the table of answer pairs for the reward `math`, and report which pairs it grades incorrectly.

python tests/rewards/math_pairs.py            # prints every incorrectly graded row, and counts
"""

from __future__ import annotations

import multiprocessing
import tomllib
from pathlib import Path
from typing import NamedTuple

from pellucid.rewards.terms import grade_math

LIMIT = 10
"""Time limit of a comparison in seconds, as in the sandbox. A slower comparison counts as incorrect."""
FORMS = {"boxed": "So it is $\\boxed{%s}$.", "tagged": "<answer>%s</answer>", "bare": "%s"}


class Row(NamedTuple):
    kind: str
    gold: str
    completion: str
    equal: bool
    known: str
    """Why the row is graded incorrectly; empty if it is graded correctly."""
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
    """Return the rows that are graded incorrectly. A worker process that exceeds LIMIT is replaced."""
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

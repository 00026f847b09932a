"""How TRL is set up as a contender: as its documentation says, as it comes, and as a search found it to be fastest."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
FOUND = HERE / "trl_best.json"
"""What trl_search.py wrote: the fastest setup for each format of numbers, and where and when it was found."""
# What performance guides tell users of peers to set; ours sets its own.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "500000000"}
TOKENS_A_PIECE = 2048
"""Of completions in one forward pass: with 256 tokens 32 rows at once do not fit into 24 GB."""


class Setup(NamedTuple):
    weights: str = ""
    """The dtype of the parameters; empty is TRL's own choice."""
    rows: int = 0
    """Of one forward pass; 0: as many as keep its logits near those of 32 rows of 64 tokens."""
    arguments: dict[str, Any] = {}  # noqa: RUF012 - never changed
    """Of GRPOConfig, beside those that say what is trained."""
    model: dict[str, Any] = {}  # noqa: RUF012
    """model_init_kwargs."""
    environment: dict[str, str | None] = {**ALLOCATOR}  # noqa: RUF012
    """None: not to be set."""

    def over(self, changes: dict[str, Any]) -> Setup:
        """This one with the changes of an option, table by table."""
        mine = self._asdict()
        return self._replace(**{
            key: mine[key] | value if isinstance(value, dict) else value for key, value in changes.items()
        })  # fmt: skip


DOCUMENTED = Setup(arguments={"gradient_checkpointing": False})
FORMATS = {
    "bf16": DOCUMENTED.over({"weights": "bfloat16", "arguments": {"bf16": False}}),
    "autocast": DOCUMENTED.over({"weights": "float32", "arguments": {"bf16": True}}),
    "fp32": DOCUMENTED.over({"weights": "float32", "arguments": {"bf16": False}}),
}
AS_IT_COMES = Setup(rows=8, environment={})
"""Nothing but what is trained: eight rows at once, checkpoints of activations and autocast are TRL's own defaults."""


class NoSearchError(Exception):
    """There is no trl_best.json that has this format."""


def setup_of(name: str) -> Setup:
    """Of a contender called trl-FORMAT, trl-best-FORMAT, trl-as-it-comes, or trl: and a setup in JSON.

    NoSearchError where nobody has searched for the best.
    """
    _, _, kind = name.partition("-")
    if name.startswith("trl:"):
        return Setup(**json.loads(name.removeprefix("trl:")))
    if kind == "as-it-comes":
        return AS_IT_COMES
    if kind.startswith("best-"):
        found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
        if (which := kind.removeprefix("best-")) not in found:
            raise NoSearchError(name)
        return Setup(**found[which]["setup"])
    return FORMATS[kind]


def named(setup: Setup) -> str:
    """The contender that has this setup."""
    return f"trl:{json.dumps(setup._asdict(), sort_keys=True)}"


def pieces_of(setup: Setup, rows: int, tokens: int) -> int:
    """In how many forward passes so many completions go through an update: equal ones, as few as the setup lets."""
    least = math.ceil(rows / setup.rows) if setup.rows else math.ceil(rows * tokens / TOKENS_A_PIECE)
    return next(n for n in range(max(1, least), rows + 1) if rows % n == 0)

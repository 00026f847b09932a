"""Defines how TRL is set up as a contender: as documented, with its defaults, or as fast as trl_search.py made it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

BEST_FILE = Path(__file__).parent / "trl_best.json"
"""Written by trl_search.py: the fastest setup for each number format, and where and when it was measured."""
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "500000000"}
"""The glibc settings that performance guides recommend. Pellucid sets its own."""
TOKENS_PER_MICRO_BATCH = 2048
"""The most completion tokens in one forward pass: 32 rows of 256 tokens do not fit into 24 GB."""


class Setup(NamedTuple):
    """The settings of TRL that change its speed, but not what it trains."""

    weights: str = ""
    """The dtype of the parameters. Empty leaves it to TRL."""
    rows: int = 0
    """The most rows of one forward pass. 0 limits them by TOKENS_PER_MICRO_BATCH."""
    arguments: dict[str, Any] = {}  # noqa: RUF012 - never changed
    """More arguments of GRPOConfig."""
    model: dict[str, Any] = {}  # noqa: RUF012
    """model_init_kwargs of GRPOConfig."""
    environment: dict[str, str | None] = {**ALLOCATOR}  # noqa: RUF012
    """Environment variables. None removes a variable."""

    def override(self, changes: dict[str, Any]) -> Setup:
        """Return a copy with some fields replaced. Dicts are merged."""
        fields = self._asdict()
        return self._replace(**{
            key: fields[key] | value if isinstance(value, dict) else value for key, value in changes.items()
        })  # fmt: skip


DOCUMENTED = Setup(arguments={"gradient_checkpointing": False})
FORMATS = {
    "bf16": DOCUMENTED.override({"weights": "bfloat16", "arguments": {"bf16": False}}),
    "autocast": DOCUMENTED.override({"weights": "float32", "arguments": {"bf16": True}}),
    "fp32": DOCUMENTED.override({"weights": "float32", "arguments": {"bf16": False}}),
}
DEFAULTS = Setup(rows=8, environment={})
"""TRL's own defaults: eight rows in a forward pass, gradient checkpointing, autocast."""


class NoSearchError(Exception):
    """trl_best.json has no setup for the format."""


def get_setup(name: str) -> Setup:
    """Return the setup of a contender.

    Args:
        name: trl-FORMAT, trl-best-FORMAT, trl-as-it-comes, or trl: followed by a setup in JSON.

    Raises:
        NoSearchError: No best setup is known for the format.
    """
    _, _, kind = name.partition("-")
    if name.startswith("trl:"):
        return Setup(**json.loads(name.removeprefix("trl:")))
    if kind == "as-it-comes":
        return DEFAULTS
    if kind.startswith("best-"):
        best = json.loads(BEST_FILE.read_text()) if BEST_FILE.exists() else {}
        if (number_format := kind.removeprefix("best-")) not in best:
            raise NoSearchError(name)
        return Setup(**best[number_format]["setup"])
    return FORMATS[kind]


def format_name(setup: Setup) -> str:
    """Return the name of the contender with this setup, which `get_setup` reads."""
    return f"trl:{json.dumps(setup._asdict(), sort_keys=True)}"


def count_micro_batches(setup: Setup, rows: int, tokens: int) -> int:
    """Return the smallest number of equal micro-batches in an update that the setup allows.

    Args:
        setup: Limits the rows of a micro-batch.
        rows: Completions of a step.
        tokens: Tokens of each completion.
    """
    least = math.ceil(rows / setup.rows) if setup.rows else math.ceil(rows * tokens / TOKENS_PER_MICRO_BATCH)
    return next(n for n in range(max(1, least), rows + 1) if rows % n == 0)

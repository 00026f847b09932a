"""A run in a notebook: one picture that grows in its place, instead of a line a step; and the page of a run."""

from __future__ import annotations

import sys
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pellucid.reporting.charts import chart, shown
from pellucid.reporting.console import WARNINGS, Screen, first_error, plain_cells
from pellucid.reporting.curves import held_out, lines, picture
from pellucid.reporting.measures import record_of
from pellucid.types import Evaluation, Group

PAUSE = 0.5
"""Seconds between two pictures at least: each is a message to the browser."""


def is_running() -> bool:
    """Return whether this process is the kernel of a notebook. Nothing is imported for it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


class Notebook(Screen):
    """Reward and held-out accuracy as curves, and the last step in words, in one place of a notebook.

    metrics: the records of the steps before, when a run goes on.
    """

    def __init__(self, total_steps: int, metrics: Sequence[Mapping[str, Any]] = ()) -> None:
        self.total_steps = total_steps
        self.rewards = [{"step": row["step"], "reward/mean": row.get("reward/mean")} for row in metrics]
        self.evaluations: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.status_line, self.first_error = "", ""
        self.warning_counts: dict[str, int] = {}
        self._display: Any = None
        self._shown_at = 0.0

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        metrics = self.adapt_metrics(metrics, groups)
        self.rewards.append({"step": step, "reward/mean": metrics.get("reward/mean")})
        self.status_line = "  ".join([f"step {step}/{self.total_steps}", *plain_cells(metrics, len(groups))])
        for name, what in WARNINGS.items():
            self.warning_counts[what] = self.warning_counts.get(what, 0) + int(metrics.get(name, 0))
        self.first_error = self.first_error or first_error(groups)
        if time.monotonic() - self._shown_at > PAUSE:
            self.redraw()

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        rows = self.evaluations.setdefault((evaluation.task, evaluation.split), [])
        rows.append({"step": step, **record_of(self.adapt_evaluation(evaluation))})
        self.redraw()

    def close(self) -> None:
        self.redraw()

    def redraw(self) -> None:
        """Draw, in the place of what was drawn before."""
        from IPython.display import display  # noqa: PLC0415 - there is one where this runs

        bundle = self.make_bundle()
        if self._display is None:
            self._display = display(bundle, raw=True, display_id=True)
        else:
            self._display.update(bundle, raw=True)
        self._shown_at = time.monotonic()

    def make_bundle(self) -> dict[str, str]:
        """Return what there is to see as HTML, and in words for whoever shows none."""
        warnings = [f"! {what}: {count}" for what, count in self.warning_counts.items() if count]
        warnings += [f"! the first failed reward says {self.first_error}"] if self.first_error else []
        drawn = [chart("Reward", "mean of a step", lines(self.rewards, {"reward/mean": "reward"}))]
        drawn += [each for key, rows in self.evaluations.items() for each in held_out(*key, rows)]
        charts = [each for each in drawn if each]
        image = as_image(picture(charts), self.status_line) if charts else ""
        text = "\n".join([self.status_line, *warnings])
        return {"text/html": f'{image}<pre style="margin:0">{shown(text)}</pre>', "text/plain": text}


def as_image(svg: str, about: str) -> str:
    """Return HTML with a picture of its own: its colours are not those of the notebook, nor do they change them."""
    data = b64encode(svg.encode()).decode()
    return f'<img alt="{shown(about)}" style="max-width:100%" src="data:image/svg+xml;base64,{data}">'


def show_page(path: Path) -> None:
    """Show a page in a frame of its own, in which no script runs."""
    from IPython.display import display  # noqa: PLC0415 - as above

    page = escape(path.read_text(encoding="utf-8"))
    style = "width:100%;height:640px;border:1px solid #8884"
    frame = f'<iframe sandbox title="{shown(path.parent.name)}" style="{style}" srcdoc="{page}"></iframe>'
    display({"text/html": frame, "text/plain": str(path)}, raw=True)

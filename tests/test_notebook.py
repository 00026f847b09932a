"""The notebook is its source, carries outputs, and runs from the first cell to the last on the embedded model."""

from __future__ import annotations

import re
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

SOURCE, NOTEBOOK = Path("examples/grpo_by_hand.py"), Path("examples/grpo_by_hand.ipynb")


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.get("outputs", []))


def test_the_notebook_is_its_source_with_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert cells == [(cell.cell_type, cell.source) for cell in jupytext.read(SOURCE).cells]
    assert sum(bool(printed(cell)) for cell in notebook.cells) >= 9
    text = NOTEBOOK.read_text()
    assert "Traceback" not in text
    assert "/home/" not in text and "/root/" not in text and "/tmp/" not in text


@pytest.mark.model
@pytest.mark.timeout(950)
@pytest.mark.filterwarnings("ignore")  # of the kernel's own libraries
def test_it_runs_and_learns():
    notebook = jupytext.read(SOURCE)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": "."}}).execute()
    [losses] = [printed(cell) for cell in notebook.cells if printed(cell).startswith("step  0")]
    rewards = [float(r) for r in re.findall(r"reward ([+-][\d.]+)", losses)]
    assert len(rewards) == 4
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 1

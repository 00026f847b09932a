"""Test that the shipped notebook runs, and that the ten lines of the documentation run in a new notebook."""

from __future__ import annotations

import base64
import html
import re
import warnings
from pathlib import Path
from xml.etree import ElementTree

import jupytext
import nbformat
import pytest
import torch
from nbclient import NotebookClient
from transformers import AutoModelForCausalLM

from conftest import character_tokenizer, records, tiny_llama

SOURCE, NOTEBOOK = Path("examples/grpo_by_hand.py"), Path("examples/grpo_by_hand.ipynb")


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.get("outputs", []))


def test_notebook_equals_its_source_with_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert cells == [(cell.cell_type, cell.source) for cell in jupytext.read(SOURCE).cells]
    assert sum(bool(printed(cell)) for cell in notebook.cells) >= 9
    text = NOTEBOOK.read_text()
    assert "Traceback" not in text
    assert "/home/" not in text and "/root/" not in text and "/tmp/" not in text


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(950)
@pytest.mark.filterwarnings("ignore")  # warnings of the kernel's own libraries
def test_notebook_runs_and_learns():
    notebook = jupytext.read(SOURCE)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": "."}}).execute()
    [losses] = [printed(cell) for cell in notebook.cells if printed(cell).startswith("step  0")]
    rewards = [float(r) for r in re.findall(r"reward ([+-][\d.]+)", losses)]
    assert len(rewards) == 4
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 1


# ---------------------------------------------------------------- a new notebook

TINY = 'model="tiny", data=rows, reward=my_reward, steps=4, group_size=4, max_tokens=8, evaluate_every=2'
"""Replaces the embedded model and thirty steps."""
REWARD = """
async def my_reward(completions, answer, **columns):
    return [sum(c.isdigit() for c in chat[0]["content"]) / 8 for chat in completions]
"""
LEFT_AND_GONE_ON_WITH = """
for step in run:
    print("never", step.step)
again = pellucid.train(model="tiny", data=rows, reward=my_reward, steps=3, group_size=4, max_tokens=8, evaluate_every=0)
for step in again:
    if step.step == 1:
        break
for step in again:
    print("again", step.step)
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Return the folder and the cells of a notebook that ran the ten lines and a stopped run in its own kernel."""
    folder = tmp_path_factory.mktemp("notebook")
    torch.manual_seed(0)
    tiny_llama().save_pretrained(folder / "tiny")
    character_tokenizer().save_pretrained(folder / "tiny")
    cells = [nbformat.v4.new_code_cell(code) for code in (ten_lines(), LEFT_AND_GONE_ON_WITH)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the kernel's own libraries
        NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(folder)}}).execute()
    return folder, notebook.cells


def ten_lines() -> str:
    """Return the ten lines of the page with a tiny model, which produces some digits but never the right number."""
    page = Path("docs/reference/python.md").read_text()
    [code] = re.findall(r"```python\n(import re\nimport pellucid.*?)```", page, re.DOTALL)
    shown = 'model="smollm2-135m", data=rows, reward=my_reward, steps=30, group_size=16'
    assert shown in code
    return code.replace(shown, TINY).replace("run = ", f"{REWARD}\nrun = ")


def charts(cell) -> list[str]:
    """Return the charts of a cell as SVG. A chart that was redrawn in place counts once."""
    pages = [output.data.get("text/html", "") for output in cell.outputs if output.output_type == "display_data"]
    found = [re.search(r"data:image/svg\+xml;base64,([^\"]+)", page) for page in pages]
    return [base64.b64decode(image[1]).decode() for image in found if image]


def stdout(cell) -> str:
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


@pytest.mark.slow
def test_ten_lines_in_a_notebook_train_a_model(executed):
    folder, (cell, _) = executed
    [run_dir] = [
        path.parent for path in (folder / "runs").glob("*/model") if len(records(path.parent / "metrics.jsonl")) == 4
    ]
    metrics = records(run_dir / "metrics.jsonl")
    means = [float(line) for line in stdout(cell).splitlines() if re.fullmatch(r"[\d.]+", line)]
    assert means == [row["reward/mean"] for row in metrics]
    assert "step 1/4" not in stdout(cell), "a chart in place of a line a step"
    model = AutoModelForCausalLM.from_pretrained(folder / "sums")
    saved = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    for mine, theirs in zip(model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert records(run_dir / "data.jsonl")[0] == {
        "question": "What is 0 + 0? Answer with the number only.",
        "answer": "0",
    }
    [frame] = [o for o in cell.outputs if "<iframe sandbox" in str(o.get("data", {}).get("text/html"))]
    assert "Content-Security-Policy" in html.unescape(frame.data["text/html"])


def test_chart_of_a_notebook_is_updated_in_place(executed):
    cell, _ = executed[1]
    [chart] = charts(cell)
    assert "Reward" in chart and "Held-out reward" in chart
    assert all(f"reward, step {step}: " in chart for step in (1, 2, 3, 4))
    assert all(f"reward, step {step}: " in chart for step in (0, 2, 4))
    [words] = [o.data["text/plain"] for o in cell.outputs if "svg+xml" in str(o.get("data", {}).get("text/html"))]
    assert words.startswith("step 4/4  reward ")
    ElementTree.fromstring(chart)


def test_continued_run_in_a_notebook_has_one_chart_of_all_its_steps(executed):
    _, cell = executed[1]
    lines = stdout(cell).splitlines()
    assert [line for line in lines if line.startswith(("never", "again"))] == ["again 2", "again 3"]
    assert any(line.startswith("stopped after step 1, nothing is lost") for line in lines)
    first, second = charts(cell)
    assert "step 2: " not in first
    assert all(f"reward, step {step}: " in second for step in (1, 2, 3))

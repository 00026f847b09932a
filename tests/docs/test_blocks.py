"""Test that every command and program of the user pages runs, in the order of its page and in a separate folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from doc_blocks import ROOT, USER_PAGES, read_blocks

SKIPPED = ("needs", "fragment", "from")
LINKED = ("recipes", "examples", "benchmarks", "docs", "tests", "src")
PAGES = {str(page.relative_to(ROOT)): page for page in USER_PAGES}
RUN = {
    name: [
        b
        for b in read_blocks(page)
        if b.marker not in SKIPPED and (b.marker == "file" or b.language in ("sh", "python"))
    ]
    for name, page in PAGES.items()
}
SHELL = """set -eo pipefail
trap 'pwd > "$PAGE_FOLDER/.cwd"' EXIT
{}"""


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name, blocks in RUN.items() if any(b.marker != "file" for b in blocks)])
def test_commands_and_programs_of_a_page_run(name, tmp_path):
    for folder in LINKED:
        (tmp_path / folder).symlink_to(ROOT / folder)
    shims = tmp_path / ".bin"
    shims.mkdir()
    # A symbolic link to the interpreter of a virtual environment would not find its packages.
    for shim, script in {"pellucid": f'"{ROOT}/tests/shortened.py"', "python": ""}.items():
        (shims / shim).write_text(f'#!/bin/sh\nexec "{sys.executable}" {script} "$@"\n')
        (shims / shim).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(shims), os.path.dirname(sys.executable), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        "PAGE_FOLDER": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "BROWSER": "true",
    }
    groups = []
    try:
        run_page(RUN[name], tmp_path, environment, groups)
    finally:
        for group in groups:  # a server in the background answers later blocks
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        shutil.rmtree(tmp_path, ignore_errors=True)  # checkpoints take gigabytes


def run_page(blocks, folder, environment, groups):
    cwd, program = folder, ""
    for number, block in enumerate(blocks):
        if block.marker == "file":
            (cwd / block.value).parent.mkdir(parents=True, exist_ok=True)
            (cwd / block.value).write_text(block.text, encoding="utf-8")
            continue
        if block.language == "sh":
            command = ["bash", "-c", SHELL.format(block.text)]
        else:
            program = f"{program}\n{block.text}" if block.marker == "continues" else block.text
            script = folder / f".block{number}.py"
            script.write_text(f"import shortened; shortened.shorten()\n{program}", encoding="utf-8")
            command = [sys.executable, str(script)]
        output = folder / f".output{number}"
        with output.open("w") as stream:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            groups.append(process.pid)
            status = process.wait(timeout=900)
        shown = output.read_text(encoding="utf-8", errors="replace")[-3000:]
        assert status == 0, f"{block.place}\n{block.text}\n{shown}"
        if block.language == "sh" and (folder / ".cwd").exists():
            cwd = Path((folder / ".cwd").read_text().strip())

"""Test the error of `pellucid look` when a page cannot be written."""

from __future__ import annotations

import pytest

from made_runs import small_run
from pellucid.inspect import single_file
from pellucid.inspect.server import run_look
from pellucid.reporting import token_files
from pellucid.types import UserError


def test_step_deleted_by_a_resume_meanwhile_raises_user_error(tmp_path, monkeypatch):
    run = small_run(tmp_path / "run", steps=3)
    of_files = single_file.count_file_bytes

    def deleting(runs, step):
        token_files.get_tokens_path(run, 3).unlink(missing_ok=True)
        return of_files(runs, step)

    monkeypatch.setattr(single_file, "count_file_bytes", deleting)
    with pytest.raises(UserError, match=r"step-000003\.parquet was deleted while it was read, .*: look again"):
        run_look([run], 0, tmp_path / "page.html", open_browser=False)
    assert not (tmp_path / "page.html").exists()

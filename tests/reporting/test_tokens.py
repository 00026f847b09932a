"""Tests of token files: round trips, pandas, damaged files, and deletion by a resume."""

import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

from pellucid.reporting import token_files
from pellucid.types import UserError

ABOUT = {"objective": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "group_size": 4, "temperature": 1.0}


def columns(step: int) -> dict[str, list]:
    return {
        "step": [step, step],
        "group": [0, 0],
        "prompt_id": ["train/0/0"] * 2,
        "completion": [-1, 0],
        "token": [5, 7],
        "text": ["", "你"],
        "kind": [token_files.KIND_PROMPT, token_files.KIND_SAMPLED],
        "ratio": [None, 0.5],
        "correct": [None, True],
        "rule": [None, "clip_low"],
        "top_before": [None, [7, 5]],
        "top_before_text": [None, ["你", ""]],
        "top_before_logprob": [None, [-0.25, -2.0]],
    }


def test_written_tokens_are_read_back_with_metadata(tmp_path: Path) -> None:
    token_files.write_tokens(tmp_path, 12, columns(12), ABOUT)
    table = token_files.read_tokens(tmp_path, 12)
    assert table.schema.equals(token_files.TOKEN_SCHEMA)
    assert json.loads(table.schema.metadata[b"pellucid"]) == {"version": 1, "step": 12, **ABOUT}
    found = table.to_pydict()
    assert {name: found[name] for name in columns(12)} == columns(12)
    assert found["advantage"] == [None, None]


def test_pandas_reads_all_steps_and_no_partial_file(tmp_path: Path) -> None:
    token_files.write_tokens(tmp_path, 2, columns(2), ABOUT)
    token_files.write_tokens(tmp_path, 1_000_000, columns(1_000_000), ABOUT)
    (tmp_path / "tokens" / ".step-000003.parquet.partial").write_bytes(b"PAR1")
    frame = pd.read_parquet(tmp_path / "tokens")
    assert sorted(frame.step) == [2, 2, 1_000_000, 1_000_000]
    assert frame.ratio.isna().tolist() == [True, False, True, False]
    (tmp_path / "tokens" / "step-000012.txt").touch()
    assert token_files.list_recorded_steps(tmp_path) == [2, 1_000_000]


def test_delete_tokens_removes_later_steps_and_partial_files(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        token_files.write_tokens(tmp_path, step, columns(step), ABOUT)
    partial = tmp_path / "tokens" / ".step-000004.parquet.partial"
    partial.touch()
    token_files.delete_tokens(tmp_path, 2)
    assert token_files.list_recorded_steps(tmp_path) == [1, 2]
    assert not partial.exists()
    token_files.delete_tokens(tmp_path / "elsewhere", 0)


def test_a_run_without_tokens_has_no_steps(tmp_path: Path) -> None:
    assert token_files.list_recorded_steps(tmp_path) == []
    with pytest.raises(UserError, match="no tokens of step 3"):
        token_files.read_tokens(tmp_path, 3)


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_damaged_file_raises_one_line(tmp_path: Path, keep: int) -> None:
    token_files.write_tokens(tmp_path, 1, columns(1), ABOUT)
    path = token_files.get_tokens_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="is damaged") as error:
        token_files.read_tokens(tmp_path, 1)
    assert "\n" not in str(error.value)


def test_file_of_another_version_is_refused(tmp_path: Path) -> None:
    token_files.write_tokens(tmp_path, 1, columns(1), {**ABOUT, "version": 2})
    with pytest.raises(UserError, match="another version"):
        token_files.read_tokens(tmp_path, 1)


def test_lone_surrogate_in_an_error_message_is_replaced(tmp_path: Path) -> None:
    token_files.write_tokens(tmp_path, 1, columns(1) | {"error": [None, "bad \ud83d"]}, ABOUT)
    assert token_files.read_tokens(tmp_path, 1)["error"].to_pylist() == [None, "bad ?"]


def test_a_value_that_does_not_fit_its_column_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(pa.ArrowException):
        token_files.write_tokens(tmp_path, 1, columns(1) | {"group": [0, 2**15]}, ABOUT)
    assert token_files.list_recorded_steps(tmp_path) == []

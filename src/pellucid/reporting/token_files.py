"""The files of tokens/: a Parquet file for each recorded step, with what the step did to each token.

`pandas.read_parquet("RUN/tokens")` and `duckdb "select * from 'RUN/tokens/*.parquet'"` read all of them;
docs/reference/run-folder.md describes the columns. A file is written under another name and renamed, so it is never
incomplete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pellucid.reporting.conversations import list_turn_names
from pellucid.types import Group, UserError
from pellucid.utils import files

_TOKENS_FOLDER = "tokens"
_TOKENS_FILE_NAME = re.compile(r"step-(\d{6,})\.parquet")
METADATA_KEY = b"pellucid"
"""The key of the metadata of a file, a JSON object with the `version` of the format, the `step`, and what else the
writer adds."""
_FORMAT_VERSION = 1
KIND_SAMPLED, KIND_GIVEN, KIND_PROMPT = "sampled", "given", "prompt"
"""The values of the column `kind`."""

_TEXTS, _IDS, _NUMBERS = pa.list_(pa.string()), pa.list_(pa.int32()), pa.list_(pa.float32())
TOKEN_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("group", pa.int16()),
        ("prompt_id", pa.string()),
        ("completion", pa.int16()),
        ("branch", pa.int16()),
        ("position", pa.int32()),
        ("token", pa.int32()),
        ("text", pa.string()),
        ("kind", pa.string()),
        ("reward", pa.float64()),
        ("correct", pa.bool_()),
        ("finished", pa.bool_()),
        ("parts", pa.string()),
        ("error", pa.string()),
        ("version", pa.int32()),
        ("sampler_logprob", pa.float32()),
        ("logprob_start", pa.float32()),
        ("logprob_before", pa.float32()),
        ("logprob_after", pa.float32()),
        ("ref_logprob", pa.float32()),
        ("entropy_before", pa.float32()),
        ("entropy_after", pa.float32()),
        ("ratio", pa.float32()),
        ("advantage", pa.float32()),
        ("weight", pa.float32()),
        ("importance", pa.float32()),
        ("push", pa.float32()),
        ("gradient", pa.float32()),
        ("rule", pa.string()),
        ("bound", pa.float32()),
        ("top_before", _IDS),
        ("top_before_text", _TEXTS),
        ("top_before_logprob", _NUMBERS),
        ("top_after", _IDS),
        ("top_after_text", _TEXTS),
        ("top_after_logprob", _NUMBERS),
    ]
)
"""One row is one token."""


def get_tokens_path(run_dir: Path, step: int) -> Path:
    return run_dir / _TOKENS_FOLDER / f"step-{step:06}.parquet"


def write_tokens(run_dir: Path, step: int, columns: Mapping[str, Sequence[Any]], metadata: Mapping[str, Any]) -> None:
    """Write the file of a step; `sync_tokens` flushes it to disk. Missing columns of TOKEN_SCHEMA are null."""
    length = len(next(iter(columns.values())))
    arrays = [_make_column(columns.get(field.name), length, field.type) for field in TOKEN_SCHEMA]
    facts = json.dumps({"version": _FORMAT_VERSION, "step": step, **metadata})
    table = pa.table(arrays, schema=TOKEN_SCHEMA.with_metadata({METADATA_KEY: facts}))
    path = get_tokens_path(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")  # readers of the folder ignore names with a dot
    pq.write_table(table, partial, compression="zstd")
    partial.replace(path)


def make_group_metadata(groups: Mapping[int, Group]) -> dict[str, Any]:
    """Return the metadata of groups: their questions, the speakers and tool calls of each turn by group, completion and
    branch, and the completions without tokens.
    """
    turns, silent = {}, {}
    for i, group in groups.items():
        for number, completion in enumerate(group.completions):
            if not completion.token_ids:
                silent.setdefault(str(i), []).append(number)
            for branch, sequence in enumerate((completion, *completion.branches)):
                if names := list_turn_names(sequence):
                    turns[f"{i}/{number}/{branch}"] = names
    questions = {str(i): group.prompt.question for i, group in groups.items()}
    return {"questions": questions, "turns": turns, "silent": silent}


def _make_column(values: Sequence[Any] | None, length: int, kind: pa.DataType) -> pa.Array:
    """Return an array of these values. Surrogates, which UTF-8 cannot encode, become question marks."""
    if values is None:
        return pa.nulls(length, kind)
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        replaced = [None if text is None else text.encode("utf-8", "replace").decode() for text in values]
        return pa.array(replaced, kind)


def list_recorded_steps(run_dir: Path) -> list[int]:
    """Return the recorded steps in ascending order."""
    return sorted(
        int(match[1])
        for path in (run_dir / _TOKENS_FOLDER).glob("*")
        if (match := _TOKENS_FILE_NAME.fullmatch(path.name))
    )


def read_tokens(run_dir: Path, step: int, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the tokens of a step, with the metadata in the schema (`get_token_metadata`).

    Raises:
        UserError: The step is not recorded, or its file is damaged or of another version.
    """
    path = get_tokens_path(run_dir, step)
    if not path.is_file():
        raise UserError(f"{run_dir} has no tokens of step {step}: set [log] tokens above 0 to record them")
    try:
        table = pq.ParquetFile(path).read(columns)
        version = get_token_metadata(table)["version"]
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: delete it, and the other steps can be read") from error
    if version != _FORMAT_VERSION:
        raise UserError(f"{path} was written by another version of Pellucid: read it with that one")
    return table


def get_token_metadata(table: pa.Table) -> dict[str, Any]:
    """Return the metadata that the writer gave to the file of a table."""
    return json.loads((table.schema.metadata or {})[METADATA_KEY])


def delete_tokens(run_dir: Path, after: int) -> None:
    """Remove the files of the steps after this one, and incomplete files that a crash left."""
    for step in list_recorded_steps(run_dir):
        if step > after:
            get_tokens_path(run_dir, step).unlink()
    for partial in (run_dir / _TOKENS_FOLDER).glob(".step-*.partial"):
        partial.unlink()


def sync_tokens(run_dir: Path, after: int) -> None:
    """Flush the files of the steps after this one to disk."""
    later = [step for step in list_recorded_steps(run_dir) if step > after]
    for step in later:
        files.sync_path(get_tokens_path(run_dir, step))
    if later:
        files.sync_path(run_dir / _TOKENS_FOLDER)

"""tokens/: what each recorded step did to each token, a Parquet file a step.

`pandas.read_parquet("RUN/tokens")` and `duckdb "select * from 'RUN/tokens/*.parquet'"` read all of them;
docs/run-folder.md says what a column means. A file is whole or not there: it is written beside its place and renamed.
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

TOKENS_FOLDER = "tokens"
TOKENS_FILE_NAME = re.compile(r"step-(\d{6,})\.parquet")
METADATA_KEY = b"pellucid"
"""The key of a file's metadata, a JSON object: `version` of the format, `step`, and what the writer adds."""
FORMAT_VERSION = 1
KIND_SAMPLED, KIND_GIVEN, KIND_PROMPT = "sampled", "given", "prompt"
"""The kinds of tokens."""

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
        ("predicted", pa.float32()),
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
    return run_dir / TOKENS_FOLDER / f"step-{step:06}.parquet"


def write_tokens(run_dir: Path, step: int, rows: Mapping[str, Sequence[Any]], metadata: Mapping[str, Any]) -> None:
    """Write the file of a step. rows: the columns of SCHEMA, or any of them: those that are missing are null.

    about: facts of the step for the file's metadata. The content is on disk after `sync`.
    """
    length = len(next(iter(rows.values())))
    table = pa.table(
        [make_column(rows.get(field.name), length, field.type) for field in TOKEN_SCHEMA], schema=TOKEN_SCHEMA
    )
    facts = json.dumps({"version": FORMAT_VERSION, "step": step, **metadata})
    path = get_tokens_path(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")  # readers of the folder pass over names with a dot
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: facts}), partial, compression="zstd")
    partial.replace(path)


def make_group_metadata(groups: Mapping[int, Group]) -> dict[str, Any]:
    """What a file says of its groups besides their tokens: each question; by group, completion and branch who spoke and
    which tools were called, turn by turn; and the completions that have no token.
    """
    turns, silent = {}, {}
    for i, group in groups.items():
        for number, completion in enumerate(group.completions):
            for branch, sequence in enumerate((completion, *completion.branches)):
                if names := list_turn_names(sequence):
                    turns[f"{i}/{number}/{branch}"] = names
        if without := [number for number, completion in enumerate(group.completions) if not completion.token_ids]:
            silent[str(i)] = without
    return {
        "questions": {str(i): group.prompt.question for i, group in groups.items()},
        "turns": turns,
        "silent": silent,
    }


def make_column(values: Sequence[Any] | None, length: int, kind: pa.DataType) -> pa.Array:
    """An array of these values; texts that are no Unicode, as half a surrogate pair, with a question mark there."""
    if values is None:
        return pa.nulls(length, kind)
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        spelled = [None if text is None else text.encode("utf-8", "replace").decode() for text in values]
        return pa.array(spelled, kind)


def list_recorded_steps(run_dir: Path) -> list[int]:
    """The recorded steps, in their order."""
    return sorted(
        int(named[1])
        for path in (run_dir / TOKENS_FOLDER).glob("*")
        if (named := TOKENS_FILE_NAME.fullmatch(path.name))
    )


def read_tokens(run_dir: Path, step: int, columns: Sequence[str] | None = None) -> pa.Table:
    """The tokens of a step, all columns or these, with what `about` said in the metadata of the schema.

    UserError where the step is not recorded, or its file is damaged.
    """
    path = get_tokens_path(run_dir, step)
    if not path.is_file():
        raise UserError(f"{run_dir} has no tokens of step {step}: [log] tokens says how many groups are recorded")
    try:
        file = pq.ParquetFile(path)
        table, names = file.read(columns), set(file.schema_arrow.names)
        version = get_token_metadata(table)["version"]
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: delete it, and the other steps can be read") from error
    missing = [name for name in TOKEN_SCHEMA.names if name not in names]
    if version != FORMAT_VERSION or missing:
        raise UserError(f"{path} was written by another version of Pellucid: read it with that one")
    return table


def get_token_metadata(table: pa.Table) -> dict[str, Any]:
    """What the writer said of the file that a table was read from."""
    return json.loads((table.schema.metadata or {})[METADATA_KEY])


def delete_tokens(run_dir: Path, after: int) -> None:
    """Remove what was recorded of the steps after this one, and what a crash left half-written."""
    for step in list_recorded_steps(run_dir):
        if step > after:
            get_tokens_path(run_dir, step).unlink()
    for partial in (run_dir / TOKENS_FOLDER).glob(".step-*.partial"):
        partial.unlink()


def sync_tokens(run_dir: Path, after: int) -> None:
    """Sync to disk what was recorded of the steps after this one."""
    later = [step for step in list_recorded_steps(run_dir) if step > after]
    for step in later:
        files.sync_path(get_tokens_path(run_dir, step))
    if later:
        files.sync_path(run_dir / TOKENS_FOLDER)

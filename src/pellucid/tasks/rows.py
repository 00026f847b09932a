"""Rows of data: mappings from column names to values, from a file or from the Hugging Face Hub."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pellucid.extras import extra
from pellucid.tasks import did_you_mean, names_beside
from pellucid.types import UserError

Row = Mapping[str, Any]


@lru_cache(maxsize=4)
def rows_of(source: str, subset: str, hub_split: str) -> list[tuple[str, Row]]:
    """The rows of a file or of a Hub split, each with the words that say where it stands."""
    rows = read_file(Path(source).expanduser()) if is_file_name(source) else read_hub(source, subset, hub_split)
    if not rows:
        raise UserError(f"{source}: there are no rows")
    return rows


def is_file_name(source: str) -> bool:
    return Path(source).suffix.lower() in READERS or Path(source).expanduser().is_file()


def read_file(path: Path) -> list[tuple[str, Row]]:
    if path.suffix.lower() not in READERS:
        raise UserError(f"{path}: unknown format; {', '.join(READERS)} can be read")
    if not path.is_file():
        raise UserError(f"{path}: there is no such file{did_you_mean(path.name, names_beside(path))}")
    try:
        return list(READERS[path.suffix.lower()](path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def read_jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}, line {number}", json_object(line, f"{path}, line {number}")


def json_object(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f'{where}: a {type(row).__name__}, where an object {{"column": value}} is needed')
    return row


def read_csv(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise UserError(f"{where}: not as many fields as the {len(reader.fieldnames or ())} of the header")
                yield where, row
        except csv.Error as error:
            raise UserError(f"{path}, after line {reader.line_num}: not CSV: {error}") from error


def read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    pyarrow, parquet = (extra(module, "data", f"{path}: Parquet") for module in ("pyarrow", "pyarrow.parquet"))
    try:
        rows = parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not Parquet: {one_line(error)}") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


READERS = {".jsonl": read_jsonl, ".csv": read_csv, ".parquet": read_parquet}


def read_hub(source: str, subset: str, split: str) -> list[tuple[str, Row]]:
    datasets = extra("datasets", "data", f'data = "{source}" on the Hugging Face Hub')
    no_file = f'data = "{source}" is no local file ({", ".join(READERS)})'
    try:
        rows = datasets.load_dataset(source, name=subset or None, split=split)
    except ConnectionError as error:
        raise UserError(f"{no_file}, and the Hugging Face Hub cannot be reached: {one_line(error)}") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{no_file}, and the Hugging Face Hub says: {one_line(error)}") from error
    return [(f"{source}, {split} row {number}", dict(row)) for number, row in enumerate(rows, start=1)]


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def column_text(row: Row, column: str, where: str) -> str:
    value = column_value(row, column, where)
    return "" if value is None else str(value)


def column_value(row: Row, column: str, where: str) -> Any:
    if column not in row:
        raise UserError(f'{where}: no column "{column}"{did_you_mean(column, row)}; the columns are {", ".join(row)}')
    return row[column]

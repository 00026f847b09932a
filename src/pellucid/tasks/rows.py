"""Rows of data: mappings from column names to values, from a file or from the Hugging Face Hub.

Of a large file only the positions of its rows are kept in memory, and a row is read when it is accessed. Arrow would
take more memory: its library alone needs more than most files have bytes (docs/lab-book.md).
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pellucid.machine.extras import extra
from pellucid.machine.plugins import did_you_mean, names_beside
from pellucid.types import UserError

Row = Mapping[str, Any]
Rows = Sequence[tuple[str, Row]]
"""Rows, each with a text that says where it stands, for error messages."""

LARGE = 8 * 2**20
"""The size of a file in bytes from which on its rows are not kept in memory."""
DEEPEST = 100
"""The deepest nesting of JSON that is accepted: no data is deeper, and some libraries overflow the stack."""
HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Escape sequences of surrogates: two of them are one character."""


@lru_cache(maxsize=4)
def rows_of(source: str, subset: str, hub_split: str) -> Rows:
    """Return the rows of a file or of a Hub split. UserError, with its place, for an invalid row."""
    rows = read_file(Path(source).expanduser()) if is_file_name(source) else read_hub(source, subset, hub_split)
    if not rows:
        raise UserError(f"{source}: there are no rows")
    return rows


def is_file_name(source: str) -> bool:
    return Path(source).suffix.lower() in READERS or Path(source).expanduser().is_file()


def read_file(path: Path) -> Rows:
    if path.suffix.lower() not in READERS:
        raise UserError(f"{path}: unknown format; {', '.join(READERS)} can be read")
    if not path.is_file():
        raise UserError(f"{path}: there is no such file{did_you_mean(path.name, names_beside(path))}")
    try:
        return READERS[path.suffix.lower()](path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


class Record(NamedTuple):
    """A row and its place in a file: bytes `start` to `end`, and the number of its last line, counted from 1."""

    start: int
    end: int
    line: int
    row: Row


class OnDisk(Sequence[tuple[str, Row]]):
    """Rows that stay in their file. Each takes 24 bytes of memory.

    parse: makes a row from its text and a text that says where it stands.
    """

    def __init__(self, path: Path, records: Iterable[Record], parse: Callable[[str, str], Row]) -> None:
        self._path, self._parse = path, parse
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._file)
        self._stamp = self._stamped()
        self._places = array("q", (number for record in records for number in record[:3]))

    def __len__(self) -> int:
        return len(self._places) // 3

    def __getitem__(self, index: int) -> tuple[str, Row]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, end, line = self._places[3 * index : 3 * index + 3]
        where = f"{self._path}, line {line}"
        if self._stamped() != self._stamp:
            raise UserError(f"{self._path} was changed while it was read: bring it back as it was, or start anew")
        os.lseek(self._file, start, os.SEEK_SET)
        return where, self._parse(os.read(self._file, end - start).decode(), where)

    def _stamped(self) -> tuple[int, int]:
        """Return size in bytes and modification time in ns of the open file, by which a change is seen."""
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns


class InArrow(Sequence[tuple[str, Row]]):
    """Rows that stay in the columns of an Arrow table. `row` makes the row of an index."""

    def __init__(self, place: str, table: Any, row: Callable[[Any, int], Row]) -> None:
        self._place, self._table, self._row = place, table, row

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> tuple[str, Row]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(index)
        where = f"{self._place} row {index + 1}"
        try:
            return where, self._row(self._table, index)
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 text: {error.reason}") from error


def kept(path: Path, records: Iterator[Record], parse: Callable[[str, str], Row]) -> Rows:
    """Return the rows of a file: those of a small one are kept in memory, those of a large one stay on disk."""
    if path.stat().st_size >= LARGE:
        return OnDisk(path, records, parse)
    return [(f"{path}, line {record.line}", record.row) for record in records]


def lines_of(path: Path) -> Iterator[tuple[int, int, str]]:
    """Yield start byte, end byte and text of each line of a UTF-8 file, with the \\n, \\r or \\r\\n that ends it."""
    start, number = 0, 0
    with path.open("rb") as file:
        for lines in file:
            for line in lines.splitlines(keepends=True):
                number, end = number + 1, start + len(line)
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                try:
                    yield end - len(text), end, text.decode()
                except UnicodeDecodeError as error:
                    raise UserError(f"{path}, line {number}: not UTF-8 text: {error.reason}") from error
                start = end


def read_jsonl(path: Path) -> Rows:
    return kept(path, jsonl_records(path), json_object)


def jsonl_records(path: Path) -> Iterator[Record]:
    for number, (start, end, line) in enumerate(lines_of(path), start=1):
        if line.strip():
            yield Record(start, end, number, json_object(line, f"{path}, line {number}"))


def json_object(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    except RecursionError as error:
        raise UserError(f"{where}: lists or objects more than {DEEPEST} deep in one another") from error
    if not isinstance(row, dict):
        raise UserError(f'{where}: a {type(row).__name__}, where an object {{"column": value}} is needed')
    if line.count("[") + line.count("{") > DEEPEST and depth(row) > DEEPEST:
        raise UserError(f"{where}: lists or objects more than {DEEPEST} deep in one another")
    for column, value in row.items() if HALF.search(line) else ():
        refuse_halves(column, value, where)
    return row


def depth(value: Any) -> int:
    """Return how deep lists and objects are nested."""
    levels, inside = 0, [value]
    while inside := [each for each in inside if isinstance(each, dict | list)]:
        levels += 1
        inside = [item for each in inside for item in (each.values() if isinstance(each, dict) else each)]
    return levels


def refuse_halves(column: str, value: Any, where: str) -> None:
    """Raise UserError where a text holds half a surrogate pair, mostly of a cut emoji, which no tokenizer takes."""
    try:
        json.dumps({column: value}, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise UserError(f'{where}: column "{column}" holds {half}, half of a character') from error


def read_csv(path: Path) -> Rows:
    fields: list[str] = []
    return kept(path, csv_records(path, fields), lambda text, _: next(csv.DictReader(io.StringIO(text, ""), fields)))


def csv_records(path: Path, fields: list[str]) -> Iterator[Record]:
    """Yield the records of a CSV file. The names in its header are added to `fields`."""
    end = 0

    def lines() -> Iterator[str]:
        nonlocal end
        for _, place, line in lines_of(path):
            end = place
            yield line

    reader = csv.DictReader(lines(), strict=True)
    try:
        fields += reader.fieldnames or ()
        start = end
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                raise UserError(f"{where}: not as many fields as the {len(fields)} of the header")
            yield Record(start, end, reader.line_num, row)
            start = end
    except csv.Error as error:
        raise UserError(f"{path}, after line {reader.line_num}: not CSV: {error}") from error


def read_parquet(path: Path) -> Rows:
    pyarrow, parquet = (extra(module, "data", f"{path}: Parquet") for module in ("pyarrow", "pyarrow.parquet"))
    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not Parquet: {one_line(error)}") from error
    return InArrow(f"{path},", table, lambda table, index: table.slice(index, 1).to_pylist()[0])


READERS = {".jsonl": read_jsonl, ".csv": read_csv, ".parquet": read_parquet}


def read_hub(source: str, subset: str, split: str) -> Rows:
    datasets = extra("datasets", "data", f'data = "{source}" on the Hugging Face Hub')
    no_file = f'data = "{source}" is no local file ({", ".join(READERS)})'
    try:
        rows = datasets.load_dataset(source, name=subset or None, split=split)
    except ConnectionError as error:
        raise UserError(f"{no_file}, and the Hugging Face Hub cannot be reached: {one_line(error)}") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{no_file}, and the Hugging Face Hub says: {one_line(error)}") from error
    return InArrow(f"{source}, {split}", rows, lambda rows, index: dict(rows[index]))


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def column_text(row: Row, column: str, where: str) -> str:
    value = column_value(row, column, where)
    return "" if value is None else str(value)


def column_value(row: Row, column: str, where: str) -> Any:
    if column not in row:
        raise UserError(f'{where}: no column "{column}"{did_you_mean(column, row)}; the columns are {", ".join(row)}')
    return row[column]

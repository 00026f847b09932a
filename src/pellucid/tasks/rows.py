"""Rows of data: mappings from column names to values, from a file of any of the formats in READERS.

Of a large file only the positions of its rows are kept in memory, and a row is read when it is accessed. Arrow would
take more memory: its library alone needs more than most files have bytes (docs/lab-book.md).
"""

from __future__ import annotations

import codecs
import csv
import importlib
import io
import json
import os
import re
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pellucid.types import DataError, UserError

Row = Mapping[str, Any]
Rows = Sequence[tuple[str, Row]]
"""Rows, each with a text that says where it stands, for error messages."""

LARGE = 8 * 2**20
"""The size of a file in bytes from which on its rows are not kept in memory."""
DEEPEST = 100
"""The deepest nesting of JSON that is accepted: no data is deeper, and some libraries overflow the stack."""
LONGEST_FIELD = 2**31 - 1
"""The longest field of a CSV file in characters, which is the largest limit that Python takes everywhere."""
HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Escape sequences of surrogates: two of them are one character."""
SEPARATORS = {".csv": ",", ".tsv": "\t"}
_WHITE = re.compile(r"[ \t\r\n]*")


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
        self._stamp = self._read_stamp()
        self._offsets = array("q", (number for record in records for number in record[:3]))

    def __len__(self) -> int:
        return len(self._offsets) // 3

    def __getitem__(self, index: int) -> tuple[str, Row]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, end, line = self._offsets[3 * index : 3 * index + 3]
        where = f"{self._path}, line {line}"
        if self._read_stamp() != self._stamp:
            raise DataError(f"{self._path} was changed while it was read: bring it back as it was, or start anew")
        os.lseek(self._file, start, os.SEEK_SET)
        return where, self._parse(os.read(self._file, end - start).decode(), where)

    def _read_stamp(self) -> tuple[int, int]:
        """Return size in bytes and modification time in ns of the open file, by which a change is seen."""
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns


class InArrow(Sequence[tuple[str, Row]]):
    """Rows that stay in the columns of an Arrow table. `row` makes the row of an index."""

    def __init__(self, source_name: str, table: Any, get_row: Callable[[Any, int], Row]) -> None:
        self._source_name, self._table, self._get_row = source_name, table, get_row

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> tuple[str, Row]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(index)
        where = f"{self._source_name} row {index + 1}"
        try:
            return where, self._get_row(self._table, index)
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
                    raise UserError(f"{path}, line {number}: {not_utf8(line, error)}") from error
                start = end


def not_utf8(line: bytes, error: UnicodeDecodeError) -> str:
    """Return what a line that is not UTF-8 may be instead, and how to convert its file."""
    utf_16 = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    likely = "UTF-16" if utf_16 else "WINDOWS-1252"
    return (
        f"not UTF-8 text: {error.reason} (byte 0x{error.object[error.start]:02x}); it may be {likely}"
        f"{'' if utf_16 else ' or latin-1'}: save it as UTF-8, or convert it with iconv -f {likely} -t UTF-8"
    )


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
    return checked(row, line, where)


def checked(row: Any, line: str, where: str) -> Row:
    """Return a value that was read from `line`. UserError where it is no row."""
    if not isinstance(row, dict):
        raise UserError(f'{where}: of type {type(row).__name__}, where an object {{"column": value}} is needed')
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


def read_json(path: Path) -> Rows:
    return kept(path, json_records(path), json_object)


def json_records(path: Path) -> Iterator[Record]:
    """Yield the elements of a file that is one JSON array; its text is in memory as a whole until all are read."""
    lines = list(lines_of(path))
    text, byte = "".join(line for *_, line in lines), lines[0][0] if lines else 0
    place, line, end = _WHITE.match(text, 0).end(), 1, 0  # pyright: ignore[reportOptionalMemberAccess]
    if text[place : place + 1] != "[":
        what = "an object" if text[place : place + 1] == "{" else "no list"
        mend = "a file with an object a line is named .jsonl"
        raise UserError(f'{path}: {what}, where a list [{{"column": value}}, ...] is needed; {mend}')
    while (place := _after(text, place)) < len(text) and text[place] != "]":
        byte, line = byte + place - end, line + text.count("\n", end, place)  # only signs of one byte
        where = f"{path}, line {line}"
        value, end = _element(text, place, where)
        size = len(text[place:end].encode())
        yield Record(byte, byte + size, line, checked(value, text[place:end], where))
        byte, line = byte + size, line + text.count("\n", place, end)
        place = _WHITE.match(text, end).end()  # pyright: ignore[reportOptionalMemberAccess]
        if text[place : place + 1] not in (",", "]"):
            raise UserError(f"{path}, line {line}: a comma or ] must follow this row")
        if text[place] == "]":
            break
    if text[place : place + 1] != "]" or text[place + 1 :].strip():
        raise UserError(f"{path}: the list must end with ], and the file with it")


def _after(text: str, position: int) -> int:
    """Return the place of what follows a bracket or a comma."""
    return _WHITE.match(text, position + 1).end()  # pyright: ignore[reportOptionalMemberAccess]


def _element(text: str, position: int, where: str) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON in the row that begins here: {error.msg}") from error
    except ValueError as error:  # a number with thousands of digits
        raise UserError(f"{where}: not JSON: {one_line(error)}") from error
    except RecursionError as error:
        raise UserError(f"{where}: lists or objects more than {DEEPEST} deep in one another") from error


def read_csv(path: Path) -> Rows:
    fields: list[str] = []
    mark = SEPARATORS[path.suffix.lower()]

    def parse(text: str, _: str) -> Row:
        return next(csv.DictReader(io.StringIO(text, ""), fields, delimiter=mark))

    return kept(path, csv_records(path, fields, mark), parse)


def csv_records(path: Path, fields: list[str], separator: str) -> Iterator[Record]:
    """Yield the records of a CSV or TSV file. The names in its header are added to `fields`."""
    end = 0

    def lines() -> Iterator[str]:
        nonlocal end
        for _, place, line in lines_of(path):
            end = place
            yield line

    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.DictReader(lines(), strict=True, delimiter=separator)
    try:
        fields += reader.fieldnames or ()
        if separator == "," and len(fields) == 1 and "\t" in fields[0]:
            raise UserError(f"{path}, line 1: the header has tabs and no commas: name the file .tsv")
        if len(fields) == 1 and ";" in fields[0]:
            wanted = "commas" if separator == "," else "tabs"
            raise UserError(f"{path}, line 1: the header has semicolons and no {wanted}: save it with {wanted} instead")
        start = end
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                raise UserError(f"{where}: not as many fields as the {len(fields)} of the header")
            yield Record(start, end, reader.line_num, row)
            start = end
    except csv.Error as error:
        raise UserError(f"{path}, after line {reader.line_num}: not {path.suffix[1:].upper()}: {error}") from error


def read_parquet(path: Path) -> Rows:
    pyarrow, parquet = (importlib.import_module(module) for module in ("pyarrow", "pyarrow.parquet"))
    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not Parquet: {one_line(error)}") from error
    return InArrow(f"{path},", table, lambda table, index: table.slice(index, 1).to_pylist()[0])


READERS = {".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv, ".tsv": read_csv, ".parquet": read_parquet}


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())

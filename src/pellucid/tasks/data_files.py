"""Rows of data: mappings from column names to values, from a file of any of the formats in READERS.

Of a large file only the positions of its rows are kept in memory, and a row is read when it is accessed. Arrow would
take more memory: its library alone needs more than most files have bytes (docs/lab-book.md).
"""

from __future__ import annotations

import codecs
import csv
import glob
import importlib
import io
import json
import os
import re
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from pellucid.types import DataError, Message, UserError
from pellucid.utils.plugins import check_hub_online, did_you_mean, import_extra
from pellucid.utils.text import describe_searched_folders, find_nearby_files, suggest_file, suggest_path_quoting

DataRow = Mapping[str, Any]
DataRows = Sequence[tuple[str, DataRow]]
"""Rows, each with a text that says where it stands, for error messages."""

LARGE_FILE_BYTES = 8 * 2**20
"""The size of a file in bytes from which on its rows are not kept in memory."""
MAX_JSON_DEPTH = 100
"""The deepest nesting of JSON that is accepted: no data is deeper, and some libraries overflow the stack."""
MAX_CSV_FIELD_CHARS = 2**31 - 1
"""The longest field of a CSV file in characters, which is the largest limit that Python takes everywhere."""
SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
"""Escape sequences of surrogates: two of them are one character."""
CSV_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_WHITESPACE = re.compile(r"[ \t\r\n]*")


class RowRecord(NamedTuple):
    """A row and its place in a file: bytes `start` to `end`, and the number of its last line, counted from 1."""

    start: int
    end: int
    line: int
    row: DataRow


class DiskRows(Sequence[tuple[str, DataRow]]):
    """Rows that stay in their file. Each takes 24 bytes of memory.

    parse: makes a row from its text and a text that says where it stands.
    """

    def __init__(self, path: Path, records: Iterable[RowRecord], parse: Callable[[str, str], DataRow]) -> None:
        self._path, self._parse = path, parse
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._file)
        self._stamp = self._read_stamp()
        self._offsets = array("q", (number for record in records for number in record[:3]))

    def __len__(self) -> int:
        return len(self._offsets) // 3

    def __getitem__(self, index: int) -> tuple[str, DataRow]:  # pyright: ignore[reportIncompatibleMethodOverride]
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


class ArrowRows(Sequence[tuple[str, DataRow]]):
    """Rows that stay in the columns of an Arrow table. `row` makes the row of an index."""

    def __init__(self, source_name: str, table: Any, get_row: Callable[[Any, int], DataRow]) -> None:
        self._source_name, self._table, self._get_row = source_name, table, get_row

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> tuple[str, DataRow]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(index)
        where = f"{self._source_name} row {index + 1}"
        try:
            return where, self._get_row(self._table, index)
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 text: {error.reason}") from error


def open_rows(path: Path, records: Iterator[RowRecord], parse: Callable[[str, str], DataRow]) -> DataRows:
    """Return the rows of a file: those of a small one are kept in memory, those of a large one stay on disk."""
    if path.stat().st_size >= LARGE_FILE_BYTES:
        return DiskRows(path, records, parse)
    return [(f"{path}, line {record.line}", record.row) for record in records]


def iter_lines(path: Path) -> Iterator[tuple[int, int, str]]:
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
                    raise UserError(f"{path}, line {number}: {describe_encoding_error(line, error)}") from error
                start = end


def describe_encoding_error(line: bytes, error: UnicodeDecodeError) -> str:
    """Return what a line that is not UTF-8 may be instead, and how to convert its file."""
    utf_16 = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    likely = "UTF-16" if utf_16 else "WINDOWS-1252"
    return (
        f"not UTF-8 text: {error.reason} (byte 0x{error.object[error.start]:02x}); it may be {likely}"
        f"{'' if utf_16 else ' or latin-1'}: save it as UTF-8, or convert it with iconv -f {likely} -t UTF-8"
    )


def read_jsonl(path: Path) -> DataRows:
    return open_rows(path, iter_jsonl_records(path), parse_json_row)


def iter_jsonl_records(path: Path) -> Iterator[RowRecord]:
    for number, (start, end, line) in enumerate(iter_lines(path), start=1):
        if line.strip():
            yield RowRecord(start, end, number, parse_json_row(line, f"{path}, line {number}"))


def parse_json_row(line: str, where: str) -> DataRow:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    except RecursionError as error:
        raise UserError(f"{where}: lists or objects more than {MAX_JSON_DEPTH} deep in one another") from error
    return check_row(row, line, where)


def check_row(row: Any, line: str, where: str) -> DataRow:
    """Return a value that was read from `line`. UserError where it is no row."""
    if not isinstance(row, dict):
        raise UserError(f'{where}: of type {type(row).__name__}, where an object {{"column": value}} is needed')
    if line.count("[") + line.count("{") > MAX_JSON_DEPTH and measure_depth(row) > MAX_JSON_DEPTH:
        raise UserError(f"{where}: lists or objects more than {MAX_JSON_DEPTH} deep in one another")
    for column, value in row.items() if SURROGATE_ESCAPE.search(line) else ():
        reject_lone_surrogates(column, value, where)
    return row


def measure_depth(value: Any) -> int:
    """Return how deep lists and objects are nested."""
    levels, inside = 0, [value]
    while inside := [each for each in inside if isinstance(each, dict | list)]:
        levels += 1
        inside = [item for each in inside for item in (each.values() if isinstance(each, dict) else each)]
    return levels


def reject_lone_surrogates(column: str, value: Any, where: str) -> None:
    """Raise UserError where a text holds half a surrogate pair, mostly of a cut emoji, which no tokenizer takes."""
    try:
        json.dumps({column: value}, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise UserError(f'{where}: column "{column}" holds {half}, half of a character') from error


def read_json(path: Path) -> DataRows:
    return open_rows(path, iter_json_records(path), parse_json_row)


def iter_json_records(path: Path) -> Iterator[RowRecord]:
    """Yield the elements of a file that is one JSON array; its text is in memory as a whole until all are read."""
    lines = list(iter_lines(path))
    text, byte = "".join(line for *_, line in lines), lines[0][0] if lines else 0
    place, line, end = _WHITESPACE.match(text, 0).end(), 1, 0  # pyright: ignore[reportOptionalMemberAccess]
    if text[place : place + 1] != "[":
        what = "an object" if text[place : place + 1] == "{" else "no list"
        mend = "a file with an object a line is named .jsonl"
        raise UserError(f'{path}: {what}, where a list [{{"column": value}}, ...] is needed; {mend}')
    while (place := _skip_separator(text, place)) < len(text) and text[place] != "]":
        byte, line = byte + place - end, line + text.count("\n", end, place)  # only signs of one byte
        where = f"{path}, line {line}"
        value, end = _parse_element(text, place, where)
        size = len(text[place:end].encode())
        yield RowRecord(byte, byte + size, line, check_row(value, text[place:end], where))
        byte, line = byte + size, line + text.count("\n", place, end)
        place = _WHITESPACE.match(text, end).end()  # pyright: ignore[reportOptionalMemberAccess]
        if text[place : place + 1] not in (",", "]"):
            raise UserError(f"{path}, line {line}: a comma or ] must follow this row")
        if text[place] == "]":
            break
    if text[place : place + 1] != "]" or text[place + 1 :].strip():
        raise UserError(f"{path}: the list must end with ], and the file with it")


def _skip_separator(text: str, position: int) -> int:
    """Return the place of what follows a bracket or a comma."""
    return _WHITESPACE.match(text, position + 1).end()  # pyright: ignore[reportOptionalMemberAccess]


def _parse_element(text: str, position: int, where: str) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON in the row that begins here: {error.msg}") from error
    except ValueError as error:  # a number with thousands of digits
        raise UserError(f"{where}: not JSON: {format_error_line(error)}") from error
    except RecursionError as error:
        raise UserError(f"{where}: lists or objects more than {MAX_JSON_DEPTH} deep in one another") from error


def read_csv(path: Path) -> DataRows:
    fields: list[str] = []
    mark = CSV_SEPARATORS[path.suffix.lower()]

    def parse(text: str, _: str) -> DataRow:
        return next(csv.DictReader(io.StringIO(text, ""), fields, delimiter=mark))

    return open_rows(path, iter_csv_records(path, fields, mark), parse)


def iter_csv_records(path: Path, fields: list[str], separator: str) -> Iterator[RowRecord]:
    """Yield the records of a CSV or TSV file. The names in its header are added to `fields`."""
    end = 0

    def lines() -> Iterator[str]:
        nonlocal end
        for _, place, line in iter_lines(path):
            end = place
            yield line

    csv.field_size_limit(MAX_CSV_FIELD_CHARS)
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
            yield RowRecord(start, end, reader.line_num, row)
            start = end
    except csv.Error as error:
        raise UserError(f"{path}, after line {reader.line_num}: not {path.suffix[1:].upper()}: {error}") from error


def read_parquet(path: Path) -> DataRows:
    pyarrow, parquet = (importlib.import_module(module) for module in ("pyarrow", "pyarrow.parquet"))
    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not Parquet: {format_error_line(error)}") from error
    return ArrowRows(f"{path},", table, lambda table, index: table.slice(index, 1).to_pylist()[0])


READERS = {".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv, ".tsv": read_csv, ".parquet": read_parquet}


def format_error_line(error: BaseException) -> str:
    return " ".join(str(error).split())


# ---------------------------------------------------------------- columns
# Columns of a data row: by name, by a dotted name where they are nested, and chats in the forms that people have.


_MISSING = object()


def get_column_text(row: DataRow, column: str, where: str) -> str:
    value = get_column_value(row, column, where)
    return "" if value is None else str(value)


def get_column_value(row: DataRow, column: str, where: str) -> Any:
    """Return the value of a column, or of what lies in one: "reward_model.ground_truth", "choices.0"."""
    value = _get_nested_value(row, column)
    if value is _MISSING:
        hint = did_you_mean(column, _list_column_names(row))
        if column == "question" and "prompt" in row:
            setting = "question" if isinstance(row["prompt"], str) else "messages"
            hint = f'; give {setting} = "prompt"'
        raise UserError(f'{where}: no column "{column}"{hint}; the columns are {", ".join(_list_column_names(row))}')
    return value


def has_column(row: DataRow, column: str) -> bool:
    return _get_nested_value(row, column) is not _MISSING


def _get_nested_value(row: DataRow, column: str) -> Any:
    """Return what a name stands for; a column that has a dot in its own name comes first."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return _MISSING
    return value


def _list_column_names(row: DataRow) -> list[str]:
    """Return the names of the columns, with those of objects in them in their place."""

    def names() -> Iterator[str]:
        for name, value in row.items():
            if isinstance(value, Mapping) and value:
                yield from (f"{name}.{inner}" for inner in value)
            else:
                yield name

    return list(names())


def parse_chat(value: Any, column: str, where: str) -> tuple[Message, ...]:
    """Return the role and content of each message of a chat. UserError where it does not end with the user's.

    A content may be a list of parts, [{"type": "text", "text": "..."}]: their texts are joined.
    """
    messages = [_parse_message(each, column, where) for each in value] if isinstance(value, list) else []
    if not messages or None in messages or messages[-1] is None or messages[-1]["role"] != "user":
        form = '[{"role": "user", "content": "..."}], with the user\'s message last'
        raise UserError(f'{where}: column "{column}" must look like {form}')
    return tuple(message for message in messages if message is not None)


def _parse_message(value: Any, column: str, where: str) -> Message | None:
    """Return a message in its plain form; None for what is none."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return None
    content = value.get("content")
    if isinstance(content, list):
        content = _join_text_parts(content, column, where)
    return {"role": value["role"], "content": content} if isinstance(content, str) else None


def _join_text_parts(parts: list[Any], column: str, where: str) -> str | None:
    for part in parts:
        if isinstance(part, Mapping) and part.get("type", "text") != "text":
            raise UserError(f'{where}: column "{column}" holds a part of type "{part["type"]}": only text can be read')
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    whole = [text for text in texts if isinstance(text, str)]
    return "".join(whole) if whole and len(whole) == len(texts) else None


# ---------------------------------------------------------------- sources
# What the setting `data` of a task names: a file, several, all that match a pattern, or a data set on the Hub.


DataSource = str | tuple[str, ...]


@lru_cache(maxsize=4)
def load_rows(source: DataSource, subset: str, hub_split: str) -> DataRows:
    """Return the rows of files or of a Hub split. UserError, with its place, for an invalid row."""
    if isinstance(source, str) and not is_file_source(source):
        rows = read_hub_dataset(source, subset, hub_split)
    else:
        parts = [read_data_file(path) for path in list_source_files(source)]
        rows = parts[0] if len(parts) == 1 else ConcatenatedRows(parts)
    if not rows:
        raise UserError(f"{format_source(source)}: there are no rows")
    return rows


def is_file_source(source: DataSource) -> bool:
    """Return whether a source stands for files: several always do."""
    return not isinstance(source, str) or Path(source).suffix.lower() in READERS or Path(source).expanduser().is_file()


def format_source(source: DataSource) -> str:
    return source if isinstance(source, str) else ", ".join(source)


def is_file_pattern(name: str) -> bool:
    """Return whether a name such as "parts/*.jsonl" stands for all data files that match it."""
    path = os.path.expanduser(name)
    return glob.has_magic(path) and Path(path).suffix.lower() in READERS and not os.path.isfile(path)


def list_matching_files(pattern: str) -> list[Path]:
    """Return the files that match a pattern, by name; ** goes through folders of any depth."""
    found = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    return [Path(path) for path in found if os.path.isfile(path)]


def list_source_files(source: DataSource) -> list[Path]:
    """Return the files of a source, each once. UserError where a pattern matches none."""
    found: dict[Path, Path] = {}
    for name in (source,) if isinstance(source, str) else source:
        paths = list_matching_files(name) if is_file_pattern(name) else [Path(name).expanduser()]
        if not paths:
            hint = format_suggestions(find_nearby_files(Path(name).expanduser(), READERS))
            raise UserError(f"{name}: no file matches{hint}{describe_searched_folders(Path(name))}")
        for path in paths:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def read_data_file(path: Path) -> DataRows:
    if path.suffix.lower() not in READERS:
        raise UserError(f"{path}: unknown format; {', '.join(READERS)} can be read{suggest_path_quoting(str(path))}")
    if not path.is_file():
        hint = suggest_path_quoting(str(path)) or suggest_data_files(path)
        raise UserError(f"{path!s}: there is no such file{hint}{describe_searched_folders(path)}".replace("\n", "\\n"))
    try:
        return READERS[path.suffix.lower()](path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


class ConcatenatedRows(Sequence[tuple[str, DataRow]]):
    """The rows of several files, one after the other."""

    def __init__(self, parts: Sequence[DataRows]) -> None:
        self._parts, self._ends = parts, list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[str, DataRow]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = bisect_right(self._ends, index)
        return self._parts[part][index - (self._ends[part - 1] if part else 0)]


def read_hub_dataset(source: str, subset: str, split: str) -> DataRows:
    datasets = import_extra("datasets", "data", f'data = "{source}" on the Hugging Face Hub')
    datasets.config.HF_HUB_OFFLINE |= not check_hub_online()  # it has looked at the environment when it was imported
    try:
        rows = datasets.load_dataset(source, name=subset or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        close = suggest_file(Path(source), find_nearby_files(Path(source), READERS))
        what = "cannot be reached" if isinstance(error, ConnectionError) else "says"
        raise UserError(
            f'data = "{source}" is no local file ({", ".join(READERS)}){close}, and the Hugging Face Hub {what}:'
            f" {format_error_line(error)}"
        ) from error
    return ArrowRows(f"{source}, {split}", rows, lambda rows, index: dict(rows[index]))


# ---------------------------------------------------------------- what may have been meant


def suggest_data_files(path: Path) -> str:
    """Return a hint at data files near a place where there is none: the one that is meant, or some that there are."""
    found = find_nearby_files(path, READERS)
    return suggest_file(path, found) or format_suggestions(found)


def format_suggestions(paths: Sequence[Path]) -> str:
    return f"; data files near it: {', '.join(map(str, paths[:3]))}" if paths else ""

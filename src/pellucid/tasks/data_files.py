"""Rows of data: mappings from column names to values, from files in one of the formats in READERS or from the Hub.

For a large file only the positions of its rows are in memory, and a row is read when it is accessed. Arrow would take
more memory: its library alone needs more bytes than most files have (docs/lab-book.md).
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
"""Rows, each with its location, such as "train.jsonl, line 3", for error messages."""

LARGE_FILE_BYTES = 8 * 2**20
"""Rows of files of this size and above stay on disk."""
_MAX_JSON_DEPTH = 100
"""The deepest nesting of JSON that is accepted. No data is deeper, and some libraries overflow the stack."""
_MAX_CSV_FIELD_CHARS = 2**31 - 1
"""The longest field of a CSV file, in characters. It is the largest limit that Python takes on every platform."""
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape sequence of a surrogate. Two of them are one character."""
_CSV_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_WHITESPACE = re.compile(r"[ \t\r\n]*")


class _RowRecord(NamedTuple):
    """A row and its position in a file: bytes `start` to `end`, and the number of its last line, counted from 1."""

    start: int
    end: int
    line: int
    row: DataRow


class DiskRows(Sequence[tuple[str, DataRow]]):
    """Rows that stay in their file. Each takes 24 bytes of memory.

    Args:
        path: The file.
        records: The rows of the file, by which their positions are found.
        parse: Makes a row from its text and its location.
    """

    def __init__(self, path: Path, records: Iterable[_RowRecord], parse: Callable[[str, str], DataRow]) -> None:
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
        location = f"{self._path}, line {line}"
        if self._read_stamp() != self._stamp:
            raise DataError(f"{self._path} was changed while it was read: restore it, or start anew")
        os.lseek(self._file, start, os.SEEK_SET)
        return location, self._parse(os.read(self._file, end - start).decode(), location)

    def _read_stamp(self) -> tuple[int, int]:
        """Return the size in bytes and the modification time in ns of the open file, which show a change."""
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns


class _ArrowRows(Sequence[tuple[str, DataRow]]):
    """Rows that stay in the columns of an Arrow table. `get_row` makes the row of an index."""

    def __init__(self, source_name: str, table: Any, get_row: Callable[[Any, int], DataRow]) -> None:
        self._source_name, self._table, self._get_row = source_name, table, get_row

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> tuple[str, DataRow]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(index)
        location = f"{self._source_name} row {index + 1}"
        try:
            return location, self._get_row(self._table, index)
        except UnicodeDecodeError as error:
            raise UserError(f"{location}: not UTF-8 text: {error.reason}") from error


def _open_rows(path: Path, records: Iterator[_RowRecord], parse: Callable[[str, str], DataRow]) -> DataRows:
    """Return the rows of a file: those of a small file are in memory, those of a large one stay on disk."""
    if path.stat().st_size >= LARGE_FILE_BYTES:
        return DiskRows(path, records, parse)
    return [(f"{path}, line {record.line}", record.row) for record in records]


def _iter_lines(path: Path) -> Iterator[tuple[int, int, str]]:
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
                    raise UserError(f"{path}, line {number}: {_describe_encoding_error(line, error)}") from error
                start = end


def _describe_encoding_error(line: bytes, error: UnicodeDecodeError) -> str:
    """Return the likely encoding of a line that is not UTF-8, and how to convert its file."""
    utf_16 = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    likely = "UTF-16" if utf_16 else "WINDOWS-1252"
    return (
        f"not UTF-8 text: {error.reason} (byte 0x{error.object[error.start]:02x}); it may be {likely}"
        f"{'' if utf_16 else ' or latin-1'}: save it as UTF-8, or convert it with iconv -f {likely} -t UTF-8"
    )


def read_jsonl(path: Path) -> DataRows:
    return _open_rows(path, _iter_jsonl_records(path), _parse_json_row)


def _iter_jsonl_records(path: Path) -> Iterator[_RowRecord]:
    for number, (start, end, line) in enumerate(_iter_lines(path), start=1):
        if line.strip():
            yield _RowRecord(start, end, number, _parse_json_row(line, f"{path}, line {number}"))


def _parse_json_row(line: str, location: str) -> DataRow:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{location}: not JSON: {error}") from error
    except RecursionError as error:
        raise UserError(f"{location}: lists or objects more than {_MAX_JSON_DEPTH} deep in one another") from error
    return _check_row(row, line, location)


def _check_row(row: Any, line: str, location: str) -> DataRow:
    """Return a value that was read from `line`. UserError if it is no row."""
    if not isinstance(row, dict):
        raise UserError(f'{location}: of type {type(row).__name__}, where an object {{"column": value}} is needed')
    if line.count("[") + line.count("{") > _MAX_JSON_DEPTH and _measure_depth(row) > _MAX_JSON_DEPTH:
        raise UserError(f"{location}: lists or objects more than {_MAX_JSON_DEPTH} deep in one another")
    for column, value in row.items() if _SURROGATE_ESCAPE.search(line) else ():
        _reject_lone_surrogates(column, value, location)
    return row


def _measure_depth(value: Any) -> int:
    """Return how deep lists and objects are nested."""
    depth, values = 0, [value]
    while containers := [each for each in values if isinstance(each, dict | list)]:
        depth += 1
        values = [item for each in containers for item in (each.values() if isinstance(each, dict) else each)]
    return depth


def _reject_lone_surrogates(column: str, value: Any, location: str) -> None:
    """Raise UserError if a text holds half a surrogate pair, mostly of a cut emoji, which no tokenizer takes."""
    try:
        json.dumps({column: value}, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise UserError(f'{location}: column "{column}" holds {half}, half of a character') from error


def read_json(path: Path) -> DataRows:
    return _open_rows(path, _iter_json_records(path), _parse_json_row)


def _iter_json_records(path: Path) -> Iterator[_RowRecord]:
    """Yield the elements of a file that is one JSON array. Its whole text is in memory until all are read."""
    lines = list(_iter_lines(path))
    text, byte = "".join(line for *_, line in lines), lines[0][0] if lines else 0
    position, line, end = _WHITESPACE.match(text, 0).end(), 1, 0  # pyright: ignore[reportOptionalMemberAccess]
    if text[position : position + 1] != "[":
        found = "an object" if text[position : position + 1] == "{" else "no list"
        hint = "a file with an object a line is named .jsonl"
        raise UserError(f'{path}: {found}, where a list [{{"column": value}}, ...] is needed; {hint}')
    while (position := _skip_separator(text, position)) < len(text) and text[position] != "]":
        # Between two elements there are only characters of one byte.
        byte, line = byte + position - end, line + text.count("\n", end, position)
        location = f"{path}, line {line}"
        value, end = _parse_element(text, position, location)
        size = len(text[position:end].encode())
        yield _RowRecord(byte, byte + size, line, _check_row(value, text[position:end], location))
        byte, line = byte + size, line + text.count("\n", position, end)
        position = _WHITESPACE.match(text, end).end()  # pyright: ignore[reportOptionalMemberAccess]
        if text[position : position + 1] not in (",", "]"):
            raise UserError(f"{path}, line {line}: a comma or ] must follow this row")
        if text[position] == "]":
            break
    if text[position : position + 1] != "]" or text[position + 1 :].strip():
        raise UserError(f"{path}: the list must end with ], and the file with it")


def _skip_separator(text: str, position: int) -> int:
    """Return the position of what follows a bracket or a comma."""
    return _WHITESPACE.match(text, position + 1).end()  # pyright: ignore[reportOptionalMemberAccess]


def _parse_element(text: str, position: int, location: str) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise UserError(f"{location}: not JSON in the row that begins here: {error.msg}") from error
    except ValueError as error:  # a number with thousands of digits
        raise UserError(f"{location}: not JSON: {format_error_line(error)}") from error
    except RecursionError as error:
        raise UserError(f"{location}: lists or objects more than {_MAX_JSON_DEPTH} deep in one another") from error


def read_csv(path: Path) -> DataRows:
    fields: list[str] = []
    separator = _CSV_SEPARATORS[path.suffix.lower()]

    def parse(text: str, _: str) -> DataRow:
        return next(csv.DictReader(io.StringIO(text, ""), fields, delimiter=separator))

    return _open_rows(path, _iter_csv_records(path, fields, separator), parse)


def _iter_csv_records(path: Path, fields: list[str], separator: str) -> Iterator[_RowRecord]:
    """Yield the records of a CSV or TSV file. The names in its header are added to `fields`."""
    end = 0

    def lines() -> Iterator[str]:
        nonlocal end
        for _, line_end, line in _iter_lines(path):
            end = line_end
            yield line

    csv.field_size_limit(_MAX_CSV_FIELD_CHARS)
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
            location = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                raise UserError(f"{location}: not as many fields as the {len(fields)} of the header")
            yield _RowRecord(start, end, reader.line_num, row)
            start = end
    except csv.Error as error:
        raise UserError(f"{path}, after line {reader.line_num}: not {path.suffix[1:].upper()}: {error}") from error


def read_parquet(path: Path) -> DataRows:
    pyarrow, parquet = (importlib.import_module(module) for module in ("pyarrow", "pyarrow.parquet"))
    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not Parquet: {format_error_line(error)}") from error
    return _ArrowRows(f"{path},", table, lambda table, index: table.slice(index, 1).to_pylist()[0])


READERS = {".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv, ".tsv": read_csv, ".parquet": read_parquet}


def format_error_line(error: BaseException) -> str:
    return " ".join(str(error).split())


# ---------------------------------------------------------------- columns of a row


_MISSING = object()


def get_column_text(row: DataRow, column: str, location: str) -> str:
    value = get_column_value(row, column, location)
    return "" if value is None else str(value)


def get_column_value(row: DataRow, column: str, location: str) -> Any:
    """Return the value of a column, which may be nested in another: "reward_model.ground_truth", "choices.0"."""
    value = _get_nested_value(row, column)
    if value is _MISSING:
        hint = did_you_mean(column, _list_column_names(row))
        if column == "question" and "prompt" in row:
            setting = "question" if isinstance(row["prompt"], str) else "messages"
            hint = f'; give {setting} = "prompt"'
        raise UserError(f'{location}: no column "{column}"{hint}; the columns are {", ".join(_list_column_names(row))}')
    return value


def has_column(row: DataRow, column: str) -> bool:
    return _get_nested_value(row, column) is not _MISSING


def _get_nested_value(row: DataRow, column: str) -> Any:
    """Return the value of a dotted name. A column whose own name has the dot takes precedence."""
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
    """Return the names of the columns. A column that holds an object is replaced by the dotted names of its fields."""

    def names() -> Iterator[str]:
        for name, value in row.items():
            if isinstance(value, Mapping) and value:
                yield from (f"{name}.{inner}" for inner in value)
            else:
                yield name

    return list(names())


def parse_chat(value: Any, column: str, location: str) -> tuple[Message, ...]:
    """Return the role and content of each message of a chat.

    A content may be a list of parts, [{"type": "text", "text": "..."}], whose texts are joined.

    Raises:
        UserError: The value is no chat, or does not end with a message of the user.
    """
    messages = [_parse_message(each, column, location) for each in value] if isinstance(value, list) else []
    if not messages or None in messages or messages[-1] is None or messages[-1]["role"] != "user":
        form = '[{"role": "user", "content": "..."}], with the user\'s message last'
        raise UserError(f'{location}: column "{column}" must look like {form}')
    return tuple(message for message in messages if message is not None)


def _parse_message(value: Any, column: str, location: str) -> Message | None:
    """Return a message in its plain form; None if the value is no message."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return None
    content = value.get("content")
    if isinstance(content, list):
        content = _join_text_parts(content, column, location)
    return {"role": value["role"], "content": content} if isinstance(content, str) else None


def _join_text_parts(parts: list[Any], column: str, location: str) -> str | None:
    for part in parts:
        if isinstance(part, Mapping) and part.get("type", "text") != "text":
            raise UserError(
                f'{location}: column "{column}" holds a part of type "{part["type"]}": only text can be read'
            )
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    known = [text for text in texts if isinstance(text, str)]
    return "".join(known) if known and len(known) == len(texts) else None


# ---------------------------------------------------------------- sources: files, patterns and Hub data sets


DataSource = str | tuple[str, ...]
"""The setting `data` of a task: a file, several, all that match a pattern, or a data set on the Hub."""


@lru_cache(maxsize=4)
def load_rows(source: DataSource, subset: str, hub_split: str) -> DataRows:
    """Return the rows of files or of a Hub split. UserError, with the location, for an invalid row."""
    if isinstance(source, str) and not is_file_source(source):
        rows = read_hub_dataset(source, subset, hub_split)
    else:
        parts = [_read_data_file(path) for path in _list_source_files(source)]
        rows = parts[0] if len(parts) == 1 else _ConcatenatedRows(parts)
    if not rows:
        raise UserError(f"{format_source(source)}: there are no rows")
    return rows


def is_file_source(source: DataSource) -> bool:
    """Whether a source stands for files. A tuple always does."""
    return not isinstance(source, str) or Path(source).suffix.lower() in READERS or Path(source).expanduser().is_file()


def format_source(source: DataSource) -> str:
    return source if isinstance(source, str) else ", ".join(source)


def is_file_pattern(name: str) -> bool:
    """Whether a name such as "parts/*.jsonl" stands for all data files that match it."""
    path = os.path.expanduser(name)
    return glob.has_magic(path) and Path(path).suffix.lower() in READERS and not os.path.isfile(path)


def list_matching_files(pattern: str) -> list[Path]:
    """Return the files that match a pattern, by name; ** goes through folders of any depth."""
    found = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    return [Path(path) for path in found if os.path.isfile(path)]


def _list_source_files(source: DataSource) -> list[Path]:
    """Return the files of a source, each once. UserError if a pattern matches none."""
    found: dict[Path, Path] = {}
    for name in (source,) if isinstance(source, str) else source:
        paths = list_matching_files(name) if is_file_pattern(name) else [Path(name).expanduser()]
        if not paths:
            hint = _format_suggestions(find_nearby_files(Path(name).expanduser(), READERS))
            raise UserError(f"{name}: no file matches{hint}{describe_searched_folders(Path(name))}")
        for path in paths:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _read_data_file(path: Path) -> DataRows:
    if path.suffix.lower() not in READERS:
        raise UserError(f"{path}: unknown format; {', '.join(READERS)} can be read{suggest_path_quoting(str(path))}")
    if not path.is_file():
        hint = suggest_path_quoting(str(path)) or _suggest_data_files(path)
        raise UserError(f"{path!s}: there is no such file{hint}{describe_searched_folders(path)}".replace("\n", "\\n"))
    try:
        return READERS[path.suffix.lower()](path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


class _ConcatenatedRows(Sequence[tuple[str, DataRow]]):
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
    datasets.config.HF_HUB_OFFLINE |= not check_hub_online()  # it read the environment when it was imported
    try:
        rows = datasets.load_dataset(source, name=subset or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        close = suggest_file(Path(source), find_nearby_files(Path(source), READERS))
        verb = "cannot be reached" if isinstance(error, ConnectionError) else "says"
        raise UserError(
            f'data = "{source}" is no local file ({", ".join(READERS)}){close}, and the Hugging Face Hub {verb}:'
            f" {format_error_line(error)}"
        ) from error
    return _ArrowRows(f"{source}, {split}", rows, lambda rows, index: dict(rows[index]))


def _suggest_data_files(path: Path) -> str:
    """Return a hint for a path without a file: the data file that was probably meant, or some that are nearby."""
    found = find_nearby_files(path, READERS)
    return suggest_file(path, found) or _format_suggestions(found)


def _format_suggestions(paths: Sequence[Path]) -> str:
    return f"; data files near it: {', '.join(map(str, paths[:3]))}" if paths else ""

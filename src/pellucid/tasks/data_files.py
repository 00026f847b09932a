"""Data rows: mappings from column names to values, read from files in one of the formats in READERS or from the Hub.

Rows of files are copied to a temporary file, and read from it when they are accessed: as dicts they would take five
times as much memory as they take disk space (docs/contributing/lab-book.md).
"""

from __future__ import annotations

import codecs
import csv
import glob
import importlib
import json
import os
import pickle
import re
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import SpooledTemporaryFile
from threading import Lock
from typing import Any

from pellucid.types import Message, UserError
from pellucid.utils.plugins import check_hub_online, did_you_mean, import_extra
from pellucid.utils.text import describe_searched_folders, find_nearby_files, suggest_file, suggest_path_quoting

DataRow = Mapping[str, Any]
DataRows = Sequence[tuple[str, DataRow]]
"""Rows, each with its location, such as "train.jsonl, line 3", for error messages."""
_Records = Iterator[tuple[int, DataRow]]
"""The rows of a file, each with its line or row number, counted from 1."""

_MAX_BYTES_IN_MEMORY = 8 * 2**20
"""Above this size, the temporary file is on disk instead of in memory."""
_MAX_CSV_FIELD_CHARS = 2**31 - 1
"""The largest field size limit that Python accepts on every platform."""
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
"""A JSON escape of a UTF-16 surrogate. Two of them make one character."""
_TOO_DEEP = "lists or objects are nested too deeply"
_CSV_SEPARATORS = {".csv": ",", ".tsv": "\t"}


class _FileRows(Sequence[tuple[str, DataRow]]):
    """The rows of one or more files, one file after the other, pickled in a temporary file."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._file = SpooledTemporaryFile(max_size=_MAX_BYTES_IN_MEMORY)  # noqa: SIM115 - open as long as the rows exist
        weakref.finalize(self, self._file.close)
        self._lock = Lock()
        self._units = [f"{path}, {'line' if path.suffix.lower() in _LINE_FORMATS else 'row'}" for path in paths]
        self._file_indices, self._numbers, self._starts = array("l"), array("q"), array("q")
        for file_index, path in enumerate(paths):
            for number, row in _read_data_file(path):
                self._file_indices.append(file_index)
                self._numbers.append(number)
                self._starts.append(self._file.tell())
                try:
                    self._file.write(pickle.dumps(row))
                except RecursionError as error:
                    raise UserError(f"{self._units[file_index]} {number}: {_TOO_DEEP}") from error

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[str, DataRow]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with self._lock:  # rollouts may be generated in a thread while another evaluates
            self._file.seek(self._starts[index])
            row = pickle.load(self._file)
        return f"{self._units[self._file_indices[index]]} {self._numbers[index]}", row


class _HubRows(Sequence[tuple[str, DataRow]]):
    """The rows of a split of a Hub data set, which stay on disk."""

    def __init__(self, name: str, dataset: Any) -> None:
        self._name, self._dataset = name, dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[str, DataRow]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"{self._name} row {index + 1}", dict(self._dataset[index])


def _iter_lines(path: Path) -> Iterator[str]:
    """Yield each line of a UTF-8 file, with the \\n, \\r or \\r\\n that ends it."""
    with path.open("rb") as file:
        lines = (line for chunk in file for line in chunk.splitlines(keepends=True))
        for number, line in enumerate(lines, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}, line {number}: {_describe_encoding_error(line, error)}") from error


def _describe_encoding_error(line: bytes, error: UnicodeDecodeError) -> str:
    """Return the likely encoding of a line that is not UTF-8, and how to convert its file."""
    utf_16 = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    likely = "UTF-16" if utf_16 else "WINDOWS-1252"
    return (
        f"not UTF-8 text: {error.reason} (byte 0x{error.object[error.start]:02x}); it may be {likely}"
        f"{'' if utf_16 else ' or latin-1'}: save it as UTF-8, or convert it with iconv -f {likely} -t UTF-8"
    )


def read_jsonl(path: Path) -> _Records:
    for number, line in enumerate(_iter_lines(path), start=1):
        if line.strip():
            location = f"{path}, line {number}"
            yield number, _check_json_row(_parse_json(line, location), location, _SURROGATE_ESCAPE.search(line))


def read_json(path: Path) -> _Records:
    text = "".join(_iter_lines(path))
    if not text.lstrip().startswith("["):
        hint = "name a file with one object per line .jsonl"
        raise UserError(f'{path}: must be a list [{{"column": value}}, ...]; {hint}')
    has_surrogates = _SURROGATE_ESCAPE.search(text)
    for number, row in enumerate(_parse_json(text, str(path)), start=1):
        yield number, _check_json_row(row, f"{path}, row {number}", has_surrogates)


def _parse_json(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:  # not JSON, or a number with thousands of digits
        raise UserError(f"{location}: not JSON: {format_error_line(error)}") from error
    except RecursionError as error:
        raise UserError(f"{location}: {_TOO_DEEP}") from error


def _check_json_row(row: Any, location: str, has_surrogates: object) -> DataRow:
    """Return the row. UserError if it is not an object, or has half a surrogate pair, which no tokenizer accepts."""
    if not isinstance(row, dict):
        raise UserError(f'{location}: must be an object {{"column": value}}, not of type {type(row).__name__}')
    for column, value in row.items() if has_surrogates else ():
        try:
            json.dumps({column: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:  # usually from an emoji that was cut in half
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise UserError(f'{location}: column "{column}" holds {half}, half of a character') from error
    return row


def read_csv(path: Path) -> _Records:
    separator = _CSV_SEPARATORS[path.suffix.lower()]
    csv.field_size_limit(_MAX_CSV_FIELD_CHARS)
    reader = csv.DictReader(_iter_lines(path), strict=True, delimiter=separator)
    try:
        names = reader.fieldnames or ()
        if separator == "," and len(names) == 1 and "\t" in names[0]:
            raise UserError(f"{path}, line 1: the header has tabs and no commas: name the file .tsv")
        if len(names) == 1 and ";" in names[0]:
            wanted = "commas" if separator == "," else "tabs"
            raise UserError(f"{path}, line 1: the header has semicolons and no {wanted}: save it with {wanted} instead")
        for row in reader:
            if None in row or None in row.values():
                location = f"{path}, line {reader.line_num}"
                raise UserError(f"{location}: the number of fields is not {len(names)} as in the header")
            yield reader.line_num, row
    except csv.Error as error:
        raise UserError(f"{path}, after line {reader.line_num}: not {path.suffix[1:].upper()}: {error}") from error


def read_parquet(path: Path) -> _Records:
    pyarrow, parquet = (importlib.import_module(module) for module in ("pyarrow", "pyarrow.parquet"))
    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not Parquet: {format_error_line(error)}") from error
    for index in range(len(table)):
        try:
            [row] = table.slice(index, 1).to_pylist()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, row {index + 1}: not UTF-8 text: {error.reason}") from error
        yield index + 1, row


READERS: dict[str, Callable[[Path], _Records]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
}
_LINE_FORMATS = (".jsonl", ".csv", ".tsv")
"""The formats whose errors give the line number. The errors of the others give the row number."""


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
            hint = f'; set {setting} = "prompt"'
        raise UserError(f'{location}: no column "{column}"{hint}; the columns are {", ".join(_list_column_names(row))}')
    return value


def has_column(row: DataRow, column: str) -> bool:
    return _get_nested_value(row, column) is not _MISSING


def _get_nested_value(row: DataRow, column: str) -> Any:
    """Return the value at a dotted path. A column whose own name has the dots takes precedence."""
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
    nested = ([f"{name}.{key}" for key in value] if isinstance(value, Mapping) else [] for name, value in row.items())
    return [each for name, inner in zip(row, nested, strict=True) for each in inner or [name]]


def parse_chat(value: Any, column: str, location: str) -> tuple[Message, ...]:
    """Return the messages of a chat, each with role and content. UserError if the last is not the user's.

    The content may be a list of parts, [{"type": "text", "text": "..."}], whose texts are joined.
    """
    try:
        messages = [_parse_message(message, f'{location}: column "{column}"') for message in value]
        if messages[-1]["role"] == "user":
            return tuple(messages)
    except (AttributeError, IndexError, KeyError, TypeError):  # not a chat
        pass
    form = '[{"role": "user", "content": "..."}], with the user\'s message last'
    raise UserError(f'{location}: column "{column}" must look like {form}')


def _parse_message(message: Any, column: str) -> Message:
    role, content = message["role"], message["content"]
    if isinstance(content, list) and content:
        for part in content:
            if part.get("type", "text") != "text":
                raise UserError(f'{column} holds a part of type "{part["type"]}": only text can be read')
        content = "".join(part["text"] for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise TypeError
    return {"role": role, "content": content}


# ---------------------------------------------------------------- sources: files, patterns and Hub data sets


DataSource = str | tuple[str, ...]
"""The setting `data` of a task: a file, several files, a file pattern, or a data set on the Hub."""


@lru_cache(maxsize=4)
def load_rows(source: DataSource, subset: str, hub_split: str) -> DataRows:
    """Return the rows of files or of a Hub split. For an invalid row, raise UserError with its location."""
    if isinstance(source, str) and not is_file_source(source):
        rows = read_hub_dataset(source, subset, hub_split)
    else:
        rows = _FileRows(_list_source_files(source))
    if not rows:
        raise UserError(f"{format_source(source)}: there are no rows")
    return rows


def is_file_source(source: DataSource) -> bool:
    """Whether a source names files. A tuple always does."""
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


def _read_data_file(path: Path) -> _Records:
    """Yield the rows of a file. UserError if it is missing, or cannot be read."""
    if path.suffix.lower() not in READERS:
        raise UserError(f"{path}: unknown format; {', '.join(READERS)} can be read{suggest_path_quoting(str(path))}")
    if not path.is_file():
        found = find_nearby_files(path, READERS)
        hint = suggest_path_quoting(str(path)) or suggest_file(path, found) or _format_suggestions(found)
        raise UserError(f"{path!s}: there is no such file{hint}{describe_searched_folders(path)}".replace("\n", "\\n"))
    try:
        yield from READERS[path.suffix.lower()](path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def read_hub_dataset(source: str, subset: str, split: str) -> DataRows:
    datasets = import_extra("datasets", "data", f'data = "{source}" on the Hugging Face Hub')
    datasets.config.HF_HUB_OFFLINE |= not check_hub_online()  # datasets reads the environment only at import
    try:
        rows = datasets.load_dataset(source, name=subset or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        close = suggest_file(Path(source), find_nearby_files(Path(source), READERS))
        verb = "cannot be reached" if isinstance(error, ConnectionError) else "says"
        raise UserError(
            f'data = "{source}" is not a local file ({", ".join(READERS)}){close}, and the Hugging Face Hub {verb}:'
            f" {format_error_line(error)}"
        ) from error
    return _HubRows(f"{source}, {split}", rows)


def _format_suggestions(paths: Sequence[Path]) -> str:
    return f"; data files near it: {', '.join(map(str, paths[:3]))}" if paths else ""

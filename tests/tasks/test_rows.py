import csv
import gc
import itertools
import json
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import datasets
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from pellucid.tasks import data_files
from pellucid.tasks.data_files import load_rows
from pellucid.tasks.dataset import Dataset
from pellucid.types import UserError

ROWS = [{"question": 'Say "hi",\nplease: 7', "answer": "7"}, {"question": "2 + 2? \u2028 é", "answer": "4"}]
DEEP = 50_000 if sys.version_info >= (3, 14) else 8_000 if sys.version_info >= (3, 13) else 900
"""A depth of nested lists that json reads and pickle cannot write."""
TOO_DEEP = 100_000


def write_jsonl(path):
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), encoding="utf-8")


def write_csv(path):
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path):
    parquet.write_table(pa.Table.from_pylist(ROWS), path)


def write_tsv(path):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["question", "answer"], dialect="excel-tab")
        writer.writeheader()
        writer.writerows(ROWS)


def write_json(path):
    path.write_text(json.dumps(ROWS, indent=1, ensure_ascii=False), encoding="utf-8")


WRITERS = {".jsonl": write_jsonl, ".json": write_json, ".csv": write_csv, ".tsv": write_tsv}
WRITERS |= {".parquet": write_parquet, ".JSONL": write_jsonl}


@pytest.mark.parametrize("suffix", WRITERS)
def test_all_formats_give_the_same_rows(tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    WRITERS[suffix](path)
    assert [row for _, row in load_rows(str(path), "", "train")] == ROWS


@pytest.mark.parametrize(("suffix", "place"), [(".jsonl", "line 3"), (".csv", "line 4"), (".parquet", "row 2")])
def test_each_row_has_its_location(tmp_path, suffix, place):
    path = tmp_path / f"data{suffix}"
    WRITERS[suffix](path)
    assert load_rows(str(path), "", "train")[1][0] == f"{path}, {place}"


def error_of(source, subset="", split="train"):
    with pytest.raises(UserError) as caught:
        load_rows(source if isinstance(source, tuple) else str(source), subset, split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "a.jsonl, line 2: not JSON: Expecting value"),
        ("b.jsonl", b'{"a": 1}\n[1]\n', 'b.jsonl, line 2: must be an object {"column": value}, not of type list'),
        ("c.jsonl", b"\n\n", "c.jsonl: there are no rows"),
        ("d.jsonl", b'{"a": "\xff"}', "d.jsonl, line 1: not UTF-8 text: invalid start byte"),
        ("e.jsonl", b'{"a": ' + b"9" * 5000 + b"}", "e.jsonl, line 1: not JSON"),
        ("f.jsonl", b'{"a": 1}\n{"a": 1, "b": "\\ud83d"}', r'f.jsonl, line 2: column "b" holds \ud83d, half of a'),
        ("g.jsonl", b'{"a": [{"b": "x\\uDE00y"}]}', r'g.jsonl, line 1: column "a" holds \ude00, half of a character'),
        ("h.jsonl", b'{"\\udc00": 1}', r"h.jsonl, line 1: column"),
        ("i.jsonl", b"{}\n" + b'{"a": ' * TOO_DEEP + b"}" * TOO_DEEP, "i.jsonl, line 2: lists or objects are nested"),
        ("j.jsonl", b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}", "j.jsonl, line 1: lists or objects are nested"),
        ("a.csv", b"", "a.csv: there are no rows"),
        ("b.csv", b"a,b\n", "b.csv: there are no rows"),
        ("c.csv", b"a,b\n1,2\n1,2,3\n", "c.csv, line 3: the number of fields is not 2 as in the header"),
        ("d.csv", b"a,b\n1\n", "d.csv, line 2: the number of fields"),
        ("e.csv", b'a,b\n"1"x,2\n', "e.csv, after line 1: not CSV"),
        ("g.csv", b"a\tb\n1\t2\n", "g.csv, line 1: the header has tabs and no commas: name the file .tsv"),
        ("a.tsv", b"a\tb\n1\n", "a.tsv, line 2: the number of fields is not 2 as in the header"),
        ("b.tsv", b'a\tb\n"1"x\t2\n', "b.tsv, after line 1: not TSV"),
        ("a.json", b'{"a": 1}\n{"a": 2}', "a.json: must be a list [{"),
        ("b.json", b"", "b.json: must be a list [{"),
        ("c.json", b"[]", "c.json: there are no rows"),
        ("d.json", b'[{"a": 1},\n\n {"a": }]', "d.json: not JSON: Expecting value: line 3"),
        ("e.json", b'[{"a": 1},\n {"a": 2}\n {"a": 3}]', "e.json: not JSON: Expecting ',' delimiter: line 3"),
        ("f.json", b'[{"a": 1},\n 2]', 'f.json, row 2: must be an object {"column": value}, not of type int'),
        ("g.json", b'[{"a": 1}] []', "g.json: not JSON: Extra data: line 1"),
        ("h.json", b'[{"a": 1},', "h.json: not JSON: "),
        ("i.json", b'[\n{"a": "\xff"}]', "i.json, line 2: not UTF-8 text: invalid start byte"),
        ("j.json", b'[\n{"a": "\\ud83d"}]', 'j.json, row 1: column "a" holds'),
        ("k.json", b'[{"a": ' + b"[" * TOO_DEEP + b"]" * TOO_DEEP + b"}]", "k.json: lists or objects are nested"),
        ("l.json", b'[{"a": ' + b"9" * 5000 + b"}]", "l.json: not JSON"),
        ("a.parquet", b"not parquet", "a.parquet: not Parquet"),
        ("a.txt", b"hello", "a.txt: unknown format; .jsonl, .json, .csv, .tsv, .parquet can be read"),
    ],
)
def test_broken_files_are_reported_with_place_and_reason(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    assert says in error_of(tmp_path / name)


def test_surrogate_pairs_and_deep_nesting_are_read(tmp_path):
    text = r'{"a": "\ud83d\ude00", "b": "\\ud83d", "c": ' + "[" * 99 + "]" * 99 + "}"
    (tmp_path / "a.jsonl").write_text(text)
    [(_, row)] = load_rows(str(tmp_path / "a.jsonl"), "", "train")
    assert (row["a"], row["b"]) == ("😀", r"\ud83d")


AWKWARD = {
    "a.jsonl": b'\xef\xbb\xbf{"q": "\xc3\xa9"}\r\n\n  \r{"q": "\xe2\x80\xa8", "n": [1.5, {}]}\r{"q": 3}\n{"q": 4}',
    "a.csv": b'\xef\xbb\xbfq,n\r\n\r\n"two\r\nlines, ""quoted""",1\r\n\xc3\xa9,2\n\n\xef\xbb\xbfx,3\r4,"\n"',
    "b.csv": b"q,n\n1,2",
    "a.tsv": b'q\tn\r\n"two\r\nlines,\tand a tab"\t1\r\n\xc3\xa9\t2',
    "a.json": b'\xef\xbb\xbf [ {"q": "\xc3\xa9"},\r\n\n{"q": "\xe2\x80\xa8", "n": [1, {"a": "]"}]}\r,\n\n{"q": 3} ]\n',
}
EXPECTED = {
    "a.jsonl": [
        ("line 1", {"q": "é"}),
        ("line 4", {"q": "\u2028", "n": [1.5, {}]}),
        ("line 5", {"q": 3}),
        ("line 6", {"q": 4}),
    ],
    "a.csv": [
        ("line 4", {"q": 'two\r\nlines, "quoted"', "n": "1"}),
        ("line 5", {"q": "é", "n": "2"}),
        ("line 7", {"q": "\ufeffx", "n": "3"}),
        ("line 9", {"q": "4", "n": "\n"}),
    ],
    "b.csv": [("line 2", {"q": "1", "n": "2"})],
    "a.tsv": [("line 3", {"q": "two\r\nlines,\tand a tab", "n": "1"}), ("line 4", {"q": "é", "n": "2"})],
    "a.json": [("row 1", {"q": "é"}), ("row 2", {"q": "\u2028", "n": [1, {"a": "]"}]}), ("row 3", {"q": 3})],
}


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_files_are_read(tmp_path, monkeypatch, name, in_memory):
    path = tmp_path / name
    monkeypatch.setattr(data_files, "_MAX_BYTES_IN_MEMORY", 2**20 if in_memory else 1)
    path.write_bytes(AWKWARD[name])
    rows = load_rows(str(path), "", "train")
    expected = [(f"{path}, {location}", row) for location, row in EXPECTED[name]]
    assert list(rows) == expected
    assert [rows[i] for i in reversed(range(len(rows)))] == expected[::-1]
    with pytest.raises(IndexError):
        rows[len(expected)]


def test_edited_or_removed_file_is_still_read_unchanged(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    rows = load_rows(str(path), "", "train")
    path.write_text('{"a": 3, "b": 2}\n')
    assert rows[1] == (f"{path}, line 2", {"a": 2})
    path.unlink()
    assert rows[0] == (f"{path}, line 1", {"a": 1})


def test_threads_may_read_concurrently(tmp_path):
    path, n = tmp_path / "a.jsonl", 300
    path.write_text("".join(f'{{"a": {i}}}\n' for i in range(n)))
    rows = load_rows(str(path), "", "train")
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(lambda i: rows[i % n][1]["a"], range(10 * n)))
    assert read == [i % n for i in range(10 * n)]


@pytest.mark.slow
def test_rows_of_a_large_file_are_not_held_in_memory(tmp_path):
    """Measured by tracemalloc, in which a row of this file takes more than 300 bytes."""
    path, n = tmp_path / "a.jsonl", 30_000  # the caches of 1,024 answers are small compared with this
    with path.open("w") as file:
        file.writelines(json.dumps({"question": f"{i} " + "x" * 500, "answer": str(i)}) + "\n" for i in range(n))
    assert path.stat().st_size > data_files._MAX_BYTES_IN_MEMORY
    tracemalloc.start()
    task = Dataset(data=str(path))
    prompts = task.sample(3, 4)
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 60 * n
    assert [prompt.question.split()[0] for prompt in prompts] == [prompt.answer for prompt in prompts]


def test_missing_file_error_names_the_nearest_file(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    (tmp_path / "trian.toml").write_text("")
    message = error_of(tmp_path / "trian.jsonl")
    assert "trian.jsonl: there is no such file" in message
    assert f'did you mean "{tmp_path}/train.jsonl"?' in message


def test_missing_file_error_proposes_data_files_but_no_recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "questions.toml").write_text("")
    assert error_of("questions.jsonl") == "questions.jsonl: there is no such file"
    for name in ("a.csv", "b.tsv", "c.json", "d.jsonl"):
        (tmp_path / "data" / name).write_text("")
    assert error_of("questions.jsonl").endswith("; data files near it: data/a.csv, data/b.tsv, data/c.json")
    assert error_of("nowhere/questions.jsonl").endswith("near it: data/a.csv, data/b.tsv, data/c.json")
    (tmp_path / "data" / "questions.jsonl").write_text("")
    assert error_of("questions.jsonl").endswith('; did you mean "data/questions.jsonl"?')
    assert error_of("parts/*.csv").startswith("parts/*.csv: no file matches; data files near it")


# ---------------------------------------------------------------- several files


@pytest.fixture
def parts(tmp_path):
    (tmp_path / "more").mkdir()
    for name, first in {"a.jsonl": 0, "more/b.jsonl": 2, "more/c.jsonl": 4}.items():
        (tmp_path / name).write_text("".join(f'{{"n": {n}}}\n' for n in (first, first + 1)))
    (tmp_path / "d.tsv").write_text("n\n6\n")
    return tmp_path


@pytest.mark.parametrize(
    ("source", "numbers"),
    [
        (("a.jsonl", "more/*.jsonl"), [0, 1, 2, 3, 4, 5]),
        (("more/c.jsonl", "d.tsv"), [4, 5, "6"]),
        (("more/*.jsonl", "more/b.jsonl", "./more/../more/c.jsonl"), [2, 3, 4, 5]),
        ("**/*.jsonl", [0, 1, 2, 3, 4, 5]),
        ("more/[c]*.jsonl", [4, 5]),
    ],
)
def test_several_files_are_read_in_order_and_each_only_once(parts, monkeypatch, source, numbers):
    monkeypatch.chdir(parts)
    rows = load_rows(source, "", "train")
    assert [row["n"] for _, row in rows] == numbers
    assert [rows[i][1]["n"] for i in reversed(range(len(rows)))] == numbers[::-1]
    assert rows[len(rows) - 1][0].endswith(("line 2",))
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_file_whose_name_looks_like_a_pattern_is_read(tmp_path):
    (tmp_path / "a[1].jsonl").write_text('{"n": 1}')
    (tmp_path / "a1.jsonl").write_text('{"n": 2}')
    assert [row for _, row in load_rows(str(tmp_path / "a[1].jsonl"), "", "train")] == [{"n": 1}]


def test_error_in_one_of_several_files_names_file_and_line(parts):
    (parts / "more" / "c.jsonl").write_text('{"n": 1}\n{"n"\n')
    assert f"{parts}/more/c.jsonl, line 2: not JSON" in error_of(f"{parts}/**/*.jsonl")
    assert "there is no such file" in error_of((f"{parts}/a.jsonl", f"{parts}/z.jsonl"))
    assert "unknown format" in error_of((f"{parts}/a.jsonl", "owner/name"))


def test_json_arrays_are_read_in_any_layout(tmp_path):
    """Python's json module, which reads the whole file, is the reference."""
    path = tmp_path / "a.json"
    for i, indent in enumerate((None, 0, 3)):
        text = "\ufeff\n " + json.dumps(ROWS, indent=indent, ensure_ascii=False) + "\r\n"
        path = tmp_path / f"{i}.json"
        path.write_bytes(text.encode())
        assert [row for _, row in load_rows(str(path), "", "train")] == json.loads(text.strip("\ufeff"))
    assert [where for where, _ in load_rows(str(path), "", "train")] == [f"{path}, row {n}" for n in (1, 2)]


def test_folder_is_not_read_as_a_file(tmp_path):
    (tmp_path / "data.csv").mkdir()
    assert "there is no such file" in error_of(tmp_path / "data.csv")


@pytest.fixture
def hub(monkeypatch):
    """Replace the Hub by "owner/sums" with splits train and test. Return the list of requests."""
    asked = []

    def load_dataset(path, name=None, split=None):
        asked.append((path, name, split))
        if path == "owner/away":
            raise ConnectionError("Couldn't reach 'owner/away' on the Hub\n(LocalEntryNotFoundError)")
        if split not in ("train", "test"):
            raise ValueError(f"Unknown split \"{split}\". Should be one of ['train', 'test'].")
        first = 0 if split == "train" else 100
        return datasets.Dataset.from_list([{"question": f"{first + i} + 0?", "answer": first + i} for i in range(9)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    load_rows.cache_clear()
    return asked


def test_a_hub_id_is_loaded_by_subset_and_split(hub):
    train = Dataset(data="owner/sums", subset="main", test_data="test")
    test = Dataset(data="owner/sums", subset="main", test_data="test", split="test")
    assert {int(prompt.answer) for prompt in train.sample(0, 9)} == set(range(9))
    assert {int(prompt.answer) for prompt in test.sample(0, 9)} == set(range(100, 109))
    assert hub == [("owner/sums", "main", "train"), ("owner/sums", "main", "test")]


def test_rows_of_the_hub_have_their_location(hub):
    where, row = load_rows("owner/sums", "", "test")[2]
    assert (where, row["answer"]) == ("owner/sums, test row 3", 102)


def test_a_local_file_can_be_held_out_from_a_hub_data_set(hub, tmp_path):
    write_jsonl(tmp_path / "held.jsonl")
    task = Dataset(data="owner/sums", test_data=str(tmp_path / "held.jsonl"), split="test")
    assert {prompt.answer for prompt in task.sample(0, 2)} == {"7", "4"}


def test_unreachable_hub_error_names_the_local_formats(hub):
    message = error_of("owner/away")
    assert 'data = "owner/away" is not a local file (.jsonl, .json, .csv, .tsv, .parquet)' in message
    assert "the Hugging Face Hub cannot be reached" in message


def test_error_of_the_hub_is_reported_in_one_line(hub):
    assert 'the Hugging Face Hub says: Unknown split "dev"' in error_of("owner/sums", split="dev")


def test_missing_library_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert 'pip install "pellucid[data]"' in error_of("owner/sums", subset="nothing cached")


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Return a function that makes a new path for each example, because rows are cached by name."""
    folder, count = tmp_path_factory.mktemp("rows"), itertools.count()
    return lambda suffix: folder / f"{next(count)}{suffix}"


VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(max_size=8)
    | st.lists(st.text(max_size=3), max_size=3)
)


@given(rows=st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), min_size=1, max_size=4))
def test_json_lines_are_read_back_unchanged(numbered, rows):
    path = numbered(".jsonl")
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert [row for _, row in load_rows(str(path), "", "train")] == rows


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv"])
@given(content=st.binary(max_size=40) | st.text(alphabet='{}[]":,a1\n\r \\\0\ufeff', max_size=40).map(str.encode))
def test_any_file_content_gives_rows_or_a_one_line_error(numbered, suffix, content):
    path = numbered(suffix)
    path.write_bytes(content)
    refusal, rows = "", []
    try:
        rows = load_rows(str(path), "", "train")
    except UserError as error:
        refusal = str(error)
    assert rows or str(path) in refusal
    assert len(refusal.splitlines()) <= 1
    assert all(isinstance(row, dict) and str(path) in where for where, row in rows)

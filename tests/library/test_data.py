"""In-memory rows: the accepted types, and the equivalence with a file of the same rows."""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
import sys

import datasets
import numpy as np
import pandas as pd
import pytest

from pellucid.api import encode_row, infer_columns, make_in_memory_rows
from pellucid.tasks.data_files import load_rows
from pellucid.types import UserError

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "¿2*2?\u2028", "answer": "4"}]
KINDS = {
    "list": list,
    "tuple": tuple,
    "datasets": datasets.Dataset.from_list,
    "pandas": pd.DataFrame,
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_type_write_the_same_file(kind, tmp_path):
    lines, path = make_in_memory_rows(KINDS[kind](ROWS), "test_data"), tmp_path / "data.jsonl"
    lines.write_file(path)
    assert [row for _, row in load_rows(str(path), "", "train")] == ROWS
    assert lines.digest == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["rows.jsonl", "parts/*.csv", "openai/gsm8k", ["a.jsonl", "b.jsonl"]])
def test_file_and_dataset_names_are_not_in_memory_rows(name):
    assert make_in_memory_rows(name) is None


def test_values_are_converted_to_json():
    row = {
        "number": np.float32(0.5),
        "count": np.int64(3),
        "array": np.arange(3),
        "nothing": float("nan"),
        "day": datetime.date(2026, 1, 31),
        "nested": {"chat": ({"role": "user", "content": "hi"},)},
        "yes": np.bool_(True),
    }
    assert json.loads(encode_row(1, row)) == {
        "number": 0.5,
        "count": 3,
        "array": [0, 1, 2],
        "nothing": None,
        "day": "2026-01-31",
        "nested": {"chat": [{"role": "user", "content": "hi"}]},
        "yes": True,
    }


MISTAKES = {
    "data is of type set: give a list of dicts": {1},
    "data is of type function: give": lambda: None,
    "data is empty: give": [],
    'data holds the splits train, test: give one, data["train"]': datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS)
    ),
    "data, row 2, is of type str, where a dict of columns is needed": [{"question": "?"}, "?"],
    'data, row 1: column "picture" cannot be kept as JSON: Object of type object': [{"picture": object()}],
    'data, row 1: column "half" cannot be kept as JSON: ': [{"half": "\ud83d"}],
}


@pytest.mark.parametrize("told", MISTAKES)
def test_invalid_data_raises_user_error(told):
    with pytest.raises(UserError) as error:
        make_in_memory_rows(MISTAKES[told])
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_split_error_for_test_data_names_the_test_split():
    with pytest.raises(UserError) as error:
        make_in_memory_rows(MISTAKES['data holds the splits train, test: give one, data["train"]'], "test_data")
    assert str(error.value) == 'test_data holds the splits train, test: give one, test_data["test"]'


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("row", "section", "found"),
    [
        ({"question": "?", "answer": "1"}, {}, {}),
        ({"prompt": "?", "answer": "1"}, {}, {"question": "prompt", "chat": False}),
        ({"prompt": "?", "answer": "1"}, {"chat": True}, {"question": "prompt", "chat": True}),
        ({"prompt": CHAT, "solution": "1"}, {}, {"messages": "prompt", "answer": "solution"}),
        ({"prompt": "?", "question": "?"}, {}, {}),
        ({"prompt": CHAT, "solution": "1"}, {"template": "{text}", "answer": "text"}, {}),
        ({"question": "?", "answer": "1", "solution": "one"}, {}, {}),
    ],
)
def test_columns_named_as_in_trl_are_found(row, section, found):
    assert infer_columns(row, section) == found


def test_neither_pandas_nor_datasets_is_imported():
    code = "import sys; from pellucid import api; api.make_in_memory_rows([{'question': '?'}]);"
    seen = "print({'pandas', 'datasets', 'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code + seen], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

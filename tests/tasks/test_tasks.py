import os
import pickle
import subprocess
import sys

import pytest

from pellucid.tasks import TASKS, load_task_class
from pellucid.types import UserError
from pellucid.utils.plugins import load_object


@pytest.mark.parametrize("name", TASKS)
def test_alias_is_the_default_name_of_its_class(name):
    assert {field: default.default for field, default in load_task_class(name).__dataclass_fields__.items()}[
        "name"
    ] == name


def test_a_class_in_a_file_can_be_loaded_and_unpickled_by_its_module_name(tmp_path):
    (tmp_path / "riddles_for_pickle.py").write_text("class Riddles:\n    answer = 42\n")
    riddles = load_task_class(f"{tmp_path}/riddles_for_pickle.py:Riddles")
    assert riddles.__module__ == "riddles_for_pickle"
    assert type(pickle.loads(pickle.dumps(riddles()))) is riddles
    assert load_task_class(f"{tmp_path}/riddles_for_pickle.py:Riddles") is riddles


def test_a_file_may_import_its_neighbors(tmp_path):
    (tmp_path / "neighbor_of_task.py").write_text("VALUE = 7\n")
    (tmp_path / "task_with_neighbor.py").write_text("from neighbor_of_task import VALUE\n")
    assert load_object(f"{tmp_path}/task_with_neighbor.py:VALUE") == 7


def test_file_written_a_moment_ago_is_found(tmp_path):
    (tmp_path / "written_first.py").write_text("VALUE = 1\n")
    assert load_object(f"{tmp_path}/written_first.py:VALUE") == 1
    before = tmp_path.stat().st_mtime_ns
    (tmp_path / "written_second.py").write_text("VALUE = 2\n")
    os.utime(tmp_path, ns=(before, before))  # A coarse clock leaves the time of the folder unchanged.
    assert load_object(f"{tmp_path}/written_second.py:VALUE") == 2


def test_an_object_of_an_installed_module_can_be_loaded():
    assert load_object("json:loads")("[1]") == [1]


def error_of(spec, load=load_object):
    with pytest.raises(UserError) as caught:
        load(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_unknown_task_error_names_the_nearest_and_all_tasks():
    message = error_of("arithmetik", load_task_class)
    assert 'did you mean "arithmetic"?' in message
    assert "dataset" in message
    assert "file.py:Class" in message


def test_a_task_must_be_a_class():
    assert "name a class" in error_of("json:loads", load_task_class)


@pytest.mark.parametrize("spec", ["noname", "json:", ":loads", "a b:c", ".relative:x", "a..b:c"])
def test_malformed_spec_error_shows_the_form(spec):
    assert "path/to/file.py:Name" in error_of(spec)


def test_missing_file_error_names_the_nearest_file(tmp_path):
    (tmp_path / "my_rewards.py").write_text("")
    message = error_of(f"{tmp_path}/my_reward.py:f")
    assert f"{tmp_path}/my_reward.py" in message
    assert f'did you mean "{tmp_path}/my_rewards.py"?' in message


def test_missing_module_error_names_the_module():
    assert "no_such_module_here" in error_of("no_such_module_here:f")


def test_missing_name_error_names_the_nearest_name(tmp_path):
    (tmp_path / "names_to_miss.py").write_text("def brevity(): ...\n")
    assert 'no "brevty"; did you mean "brevity"?' in error_of(f"{tmp_path}/names_to_miss.py:brevty")


def test_syntax_error_names_file_and_line(tmp_path):
    (tmp_path / "broken_syntax.py").write_text("x = 1\ndef f(:\n")
    message = error_of(f"{tmp_path}/broken_syntax.py:f")
    assert "broken_syntax.py, line 2" in message


def test_failed_import_within_the_file_is_named(tmp_path):
    (tmp_path / "imports_nothing.py").write_text("import surely_not_installed\n")
    assert "surely_not_installed" in error_of(f"{tmp_path}/imports_nothing.py:f")


@pytest.mark.parametrize("name", ["OwnError", "StopIteration"])
def test_error_within_the_file_is_reported_with_its_line(tmp_path, name):
    (tmp_path / f"raises_{name}.py").write_text(f"class OwnError(Exception): ...\nraise {name}('no\\nluck')\n")
    message = error_of(f"{tmp_path}/raises_{name}.py:f")
    assert message.endswith(f"raises_{name}.py cannot be imported: {name}: no luck (raises_{name}.py, line 2)")


@pytest.mark.parametrize("taken", ["json", "math", "colorsys"])  # imported, built in, and installed but not imported
def test_a_file_whose_module_name_is_taken_is_refused(tmp_path, taken):
    (tmp_path / f"{taken}.py").write_text("def f(): ...\n")
    assert "rename the file" in error_of(f"{tmp_path}/{taken}.py:f")


def test_two_files_with_one_module_name_are_refused(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same_stem.py").write_text(f"where = '{folder}'\n")
    assert load_object(f"{tmp_path}/one/same_stem.py:where") == "one"
    message = error_of(f"{tmp_path}/two/same_stem.py:where")
    assert "one/same_stem.py" in message
    assert "rename" in message


def test_invalid_module_name_is_refused(tmp_path):
    (tmp_path / "my-reward.py").write_text("")
    assert "rename the file" in error_of(f"{tmp_path}/my-reward.py:f")


def test_tasks_do_not_import_torch():
    modules = ", ".join(
        f"pellucid.{name}" for name in ("tasks.arithmetic", "tasks.dataset", "rewards.pool", "rewards.worker")
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Test `pellucid prefixes` with a real service behind a faulty proxy, including kills and resumes."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch

from conftest import character_tokenizer, records, tiny_llama
from forked import Forked
from pellucid import cli, config
from pellucid.policy.policy import Policy
from pellucid.prefixes import command as prefixes
from pellucid.prefixes.journal import Journal
from pellucid.prefixes.teacher import INSTRUCTION, RequestOptions, Teacher, UnansweredError
from pellucid.tasks.curriculum import Curriculum
from pellucid.types import Prompt, UserError, with_split
from pellucid.utils import endpoint
from proxies import KEY, proxied, says
from serving import running

POSITIONS = 512
"""The instruction alone has 170 characters, and each character is a token here."""


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    tiny_llama(positions=POSITIONS).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def service():
    """Serve a model without EOS: an empty answer would be requested again, and the tests count requests."""
    torch.manual_seed(0)
    policy = Policy(tiny_llama(positions=POSITIONS), character_tokenizer())
    policy.eos_ids = (-1,)
    with running(policy=policy) as (_, url):
        yield url


def command(recipe, output, url="", n=6, per_question=3, **options):
    teacher = {"teacher": "tiny", "base_url": url} if url else {}
    settings = {"n": n, "per_question": per_question, "max_tokens": 12, **teacher, **options}
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return ["prefixes", str(recipe), "--output", str(output), *flags]


def options(url, **others):
    return RequestOptions(teacher="tiny", base_url=url, max_tokens=8, **others)


def status(arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    return exit_.value.code


def entries(output):
    """Return the complete lines of the file after the settings."""
    return [json.loads(line) for line in output.read_bytes().split(b"\n")[1:-1]] if output.exists() else []


def header(output):
    return json.loads(output.read_bytes().split(b"\n")[0])


def rows_of(output):
    """Return each question with its prefixes, in the order of the file."""
    rows = {}
    for entry in entries(output):
        row = {"question": entry["question"], "answer": entry["answer"], "teacher": [], "student": []}
        rows.setdefault(entry["question"], row)[entry["source"]].append(entry["text"])
    return list(rows.values())


def check_whole(output, recipe, n=6, **sources):
    """Check that each question appears once, in the task's order, with all prefixes of each source. Return the rows."""
    rows = rows_of(output)
    assert list(header(output)) == ["settings", "complete"]
    assert header(output)["complete"]
    assert header(output)["settings"]["recipe"] == str(recipe)
    expected = [prompt.question for prompt in config.load_config(recipe).task.sample(0, n)]
    assert [row["question"] for row in rows] == expected
    assert {tuple(entry) for entry in entries(output)} == {("question", "answer", "source", "index", "text")}
    for source in ("teacher", "student"):
        assert {len(row[source]) for row in rows} == {sources.get(source, 0)}
        assert all(text == " ".join(text.split()) != "" for row in rows for text in row[source])
    assert [path.name for path in output.parent.glob("*.tmp")] == []
    return rows


# ---------------------------------------------------------------- pellucid serve as the teacher


@pytest.fixture(scope="module")
def served(wide_dir):
    """Run `pellucid serve` from its command line and yield the URL that it prints."""
    command = ["-m", "pellucid", "serve", wide_dir, "--port", "0", "--name", "tiny"]
    command += ["--dtype", "float32"]  # the dtype of the recipe
    heard, told = os.pipe()
    process = Forked(*command, stdout=told)
    os.close(told)
    try:
        with os.fdopen(heard) as lines:
            said = lines.readline()
            assert said.startswith("tiny on http://"), said
            yield f"{said.split()[2].rstrip(',')}/v1"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


@pytest.mark.slow
def test_served_teacher_answers_like_the_same_model_as_a_student(served, recipe, wide_dir, tmp_path):
    """Both are greedy. The teacher answers over HTTP in a batch of requests, the student in this process."""
    output = tmp_path / "prefixes.jsonl"
    assert status(command(recipe, output, served, student=wide_dir, temperature=0, per_question=2)) == 0
    held = check_whole(output, recipe, teacher=2, student=2)
    for row in held:
        assert row["teacher"] == row["student"]
    assert len({text for row in held for text in row["teacher"]}) > 3


@pytest.mark.slow
def test_training_continues_prefixes_of_a_teacher_and_a_student(served, recipe, wide_dir, tmp_path):
    output, run_dir = tmp_path / "prefixes.jsonl", tmp_path / "run"
    recipe.write_text(
        f'[policy]\nmodel = "{wide_dir}"\ndtype = "float32"\n[task]\nname = "prefixed"\nfile = "{output}"\n'
        'dropout = 0.0\n[task.task]\nname = "arithmetic"\n[sampler]\nmax_tokens = 8\n'
        "[algorithm]\nsteps = 2\nprefix_coef = 0.1\ngroup_size = 2\nprompts_per_step = 8\n[evaluate]\nevery = 0\n"
    )
    assert status(command(recipe, output, served, student=wide_dir, n=400, per_question=1)) == 0
    rows = {row["question"]: row for row in rows_of(output)}
    assert status(["train", str(recipe), "--run", str(run_dir)]) == 0
    begun = dict.fromkeys(("teacher", "student"), 0)
    for said in records(run_dir / "rollouts.jsonl"):
        from_file = {source: said["prefix"] in rows[said["prompt"]][source] for source in begun}
        assert any(from_file.values())
        begun = {source: count + from_file[source] for source, count in begun.items()}
    assert min(begun.values()) > 0
    steps = records(run_dir / "metrics.jsonl")
    assert all(step["prefix/share"] > 0 and step["prefix/nll"] > 0 for step in steps)


# ---------------------------------------------------------------- a faulty endpoint


@pytest.mark.slow
def test_every_question_is_answered_when_a_third_of_requests_fail(service, recipe, tmp_path):
    output, often = tmp_path / "out" / "prefixes.jsonl", {1: "500", 4: "drop", 8: "500"}
    special = {2: "stall", 5: "429 1", 7: "empty", 9: "empty", 13: "garbage"}

    def fault(number, body):
        return special.get(number) or often.get(number % 10, "")

    with proxied(service, fault) as proxy:
        # A stalled request lasts until the proxy closes, so the command must not wait for it.
        assert status(command(recipe, output, proxy.url, timeout=1, n=8)) == 0
        assert all(proxy.count(what) for what in ("500", "drop", "stall", "429 1", "empty", "garbage"))
    check_whole(output, recipe, n=8, teacher=3)


ODD = {
    "no message": {"choices": [None]},
    "no list": {"choices": {"message": {"content": "a"}}},
    "a string": {"choices": [{"message": "a"}]},
    "no choice": {"choices": []},
    "a number": {"choices": [{"message": {"role": "assistant", "content": 7}}]},
    "an error": {"error": {"message": "overloaded"}},
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_malformed_answer_is_requested_again(odd, service, recipe, tmp_path):
    with proxied(service, lambda number, body: json.dumps(odd) if number == 1 else "") as proxy:
        assert status(command(recipe, tmp_path / "p.jsonl", proxy.url, n=2, per_question=2)) == 0
        assert len(proxy.seen) == 5
    check_whole(tmp_path / "p.jsonl", recipe, n=2, teacher=2)


def test_answer_in_parts_is_used_without_its_thinking(service, recipe, tmp_path):
    parts = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "First "}, {"type": "text", "text": "add."}]
    body = json.dumps({"choices": [{"message": {"role": "assistant", "content": parts}}]})
    with proxied(service, lambda number, _: body) as proxy:
        assert status(command(recipe, tmp_path / "p.jsonl", proxy.url, n=1, per_question=1)) == 0
    [row] = check_whole(tmp_path / "p.jsonl", recipe, n=1, teacher=1)
    assert row["teacher"] == ["First add."]


def test_messages_are_those_of_the_task_plus_the_instruction(service, tmp_path):
    recipe = tmp_path / "own.toml"
    recipe.write_text('[task]\nname = "expected"\nsystem = "Be brief."\n')
    with proxied(service) as proxy:
        assert status(command(recipe, tmp_path / "p.jsonl", proxy.url, n=1, per_question=1)) == 0
        [body] = proxy.bodies
    system, user = body["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    [prompt] = config.load_config(recipe).task.sample(0, 1)
    assert user == {"role": "user", "content": f"{prompt.question}\n\n{INSTRUCTION}"}
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("tiny", 1.2, 12)
    written = (tmp_path / "p.jsonl").read_text(encoding="utf-8")
    [row] = rows_of(tmp_path / "p.jsonl")
    assert prompt.question in written, "Chinese as it is read"
    assert (row["question"], row["answer"]) == (prompt.question, prompt.answer)


@pytest.mark.slow
def test_client_waits_as_long_as_retry_after_asks(service, recipe, tmp_path):
    with proxied(service, lambda number, body: "429 1" if number == 0 else "") as proxy:
        assert status(command(recipe, tmp_path / "p.jsonl", proxy.url, n=1, per_question=1)) == 0
        (first, _), (second, _) = proxy.seen
    assert second - first >= 1, "its own back-off is half a second at most"


@pytest.mark.parametrize(
    ("status", "body", "headers", "kind", "told"),
    [
        (200, "[" * 100_000, {}, UnansweredError, "nested too deeply"),
        (200, says(f"First, {KEY[3:20]}."), {}, None, "First, [key]."),
        (200, says("x" * 200_000), {}, UnansweredError, "longer than 100,000 bytes"),
        (200, gzip.compress(b" " * 10**7), {"Content_Encoding": "gzip"}, UserError, "compressed"),
        (307, "", {"Location": "http://teacher.example/v1"}, UserError, "redirects to http://teacher.example"),
    ],
    ids=["nested", "key", "long", "gzip", "elsewhere"],
)
def test_answers_of_a_teacher_are_limited_and_redacted(status, body, headers, kind, told, monkeypatch):
    monkeypatch.setattr(endpoint, "MAX_ANSWER_BYTES", 100_000)
    monkeypatch.setenv("TEACHER_KEY", KEY)

    with proxied("", lambda *_: lambda handler: handler.reply(status, body, **headers)) as proxy:
        teacher = Teacher(options(proxy.url, key_env="TEACHER_KEY", timeout=5, retries=0), str.strip)
        with pytest.raises(kind, match=told) if kind else nullcontext():
            assert teacher.ask(Prompt("p", "2+3=")) == told
        teacher.close()


@pytest.mark.slow
def test_requests_start_no_faster_than_allowed(service, recipe, tmp_path):
    with proxied(service, lambda number, body: "500" if number == 1 else "") as proxy:
        assert status(command(recipe, tmp_path / "p.jsonl", proxy.url, n=2, per_question=2, per_minute=300)) == 0
        times = sorted(when for when, _ in proxy.seen)
    assert len(times) == 5
    assert times[-1] - times[0] >= 4 * 0.2 - 0.05, "a retry is a request as well"


@pytest.mark.slow
def test_failed_requests_stop_no_others_and_only_they_are_repeated(service, recipe, tmp_path, capsys):
    output = tmp_path / "prefixes.jsonl"
    first, hopeless, *_ = [prompt.question for prompt in config.load_config(recipe).task.sample(0, 6)]

    def fault(number, body):
        """Also fail the first request of another question, whose other prefixes must keep their places."""
        return "500" if body["messages"][-1]["content"].startswith(hopeless) else "400" if number == 0 else ""

    with proxied(service, fault) as proxy:
        assert status(command(recipe, output, proxy.url, retries=0, workers=1)) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "4 prefixes are missing (HTTP 400" in line and "the same command asks only for the missing ones" in line
    held = rows_of(output)
    assert {len(row["teacher"]) for row in held} == {2, 3}
    assert len(held) == 5
    assert not header(output)["complete"]
    with proxied(service) as proxy:
        assert status(command(recipe, output, proxy.url, retries=0)) == 0
        asked = [body["messages"][-1]["content"].split("\n")[0] for body in proxy.bodies]
        assert sorted(asked) == sorted([hopeless] * 3 + [first])
    whole = check_whole(output, recipe, teacher=3)
    before = {row["question"]: row["teacher"] for row in held}
    assert whole[0]["teacher"][1:] == before[first]
    assert [row["teacher"] for row in whole[2:]] == [before[row["question"]] for row in whole[2:]]


# ---------------------------------------------------------------- errors that stop the command


# A request that is canceled while it connects leaves its socket to the garbage collector, as httpx's pool is closed.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("fault", "mend"),
    [
        ("401", "put a valid key into the environment variable PELLUCID_TEST_KEY"),
        ("403", "put a valid key into the environment variable PELLUCID_TEST_KEY"),
        ("404", "choose another with --teacher"),
        ("402", "the quota of PELLUCID_TEST_KEY is used up"),
    ],
)
def test_a_wrong_key_and_a_wrong_model_stop_at_once(fault, mend, service, recipe, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PELLUCID_TEST_KEY", KEY)
    with proxied(service, lambda number, body: fault) as proxy:
        arguments = command(recipe, tmp_path / "p.jsonl", proxy.url, key_env="PELLUCID_TEST_KEY", n=40, workers=2)
        assert status(arguments) == 2
        assert proxy.keys[0] == f"Bearer {KEY}"
        assert len(proxy.seen) < 12
    out, err = capfd.readouterr()
    [line] = err.splitlines()
    assert mend in line
    written = out + err + "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY[:7] not in written


def test_error_message_that_quotes_the_key_is_redacted(service, recipe, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PELLUCID_TEST_KEY", KEY)
    with proxied(service, lambda number, body: "400") as proxy:
        assert status(command(recipe, tmp_path / "p.jsonl", proxy.url, key_env="PELLUCID_TEST_KEY")) == 2
    err = capfd.readouterr().err
    assert "HTTP 400 Wrong: [key] and [key]" in err
    assert KEY[:7] not in err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"base_url": "http://127.0.0.1:9/v1"}, "http://127.0.0.1:9/v1 cannot be reached"),
        ({"base_url": "https://api.example.com/v1"}, "put it into the environment variable NO_SUCH_KEY"),
        ({"base_url": "api.example.com"}, "write http://HOST:PORT/v1"),
        ({"base_url": "http://[/v1"}, "write http://HOST:PORT/v1"),
        ({"base_url": "http://me:secret@127.0.0.1/v1"}, "must not contain a secret"),
        ({"base_url": "http://me:secret@127.0.0.1:99999/v1"}, "--base-url is not an address"),
        ({"base_url": "me:secret@127.0.0.1/v1"}, "--base-url is not an address"),
        ({"teacher": ""}, "pass --teacher MODEL, --student MODEL, or both"),
        ({"n": 0}, "--n 0 must be at least 1"),
        ({"per_question": 0}, "--per-question 0 must be at least 1"),
        ({"workers": -1}, "--workers -1 must be at least 1"),
        ({"timeout": 0}, "--timeout 0.0 must be a positive number"),
        ({"temperature": "nan"}, "--temperature nan must be at least 0"),
        ({"per_minute": "inf"}, "--per-minute inf must be at least 0"),
        ({"sentences": 0}, "--sentences 0 must be at least 1"),
    ],
)
def test_invalid_options_exit_with_one_line(options, complaint, recipe, tmp_path, capfd):
    arguments = command(recipe, tmp_path / "p.jsonl", key_env="NO_SUCH_KEY", **{"teacher": "tiny", **options})
    assert status(arguments) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert complaint in line
    assert "secret@" not in line
    assert {path.name for path in tmp_path.iterdir()} - {".p.jsonl.lock"} == {recipe.name}


@pytest.mark.slow
def test_service_that_goes_away_raises_user_error(service):
    with proxied(service) as proxy:
        teacher = Teacher(options(proxy.url, key_env="NO_KEY", timeout=5, retries=1), str.strip)
    with pytest.raises(UserError, match="cannot be reached"):
        teacher.ask(Prompt("p", "2+3="))
    teacher.close()


def test_socket_that_connects_while_the_teacher_closes_is_closed(service, monkeypatch):
    opened, connected, closed, open_one = [], threading.Event(), threading.Event(), socket.create_connection

    def slow(*arguments, **options):
        opened.append(open_one(*arguments, **options))
        connected.set()
        assert closed.wait(60)
        return opened[-1]

    teacher = Teacher(options(f"{service}/v1", key_env="NO_KEY", timeout=60, retries=0), str.strip)
    monkeypatch.setattr(socket, "create_connection", slow)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(teacher.ask, Prompt("p", "2+3="))
        assert connected.wait(60)
        teacher.close()
        closed.set()
    assert isinstance(asked.exception(), UnansweredError)
    assert [one.fileno() for one in opened] == [-1]


@pytest.mark.parametrize("key", ["sk-ключ", "sk-a\nsk-b"])
def test_invalid_key_is_refused_without_showing_it(key, monkeypatch):
    monkeypatch.setenv("PELLUCID_TEST_KEY", key)
    with pytest.raises(UserError, match="holds no valid key") as told:
        Teacher(options("https://api.example.com/v1", key_env="PELLUCID_TEST_KEY"), str.strip)
    assert "sk-" not in str(told.value)


# ---------------------------------------------------------------- resuming


def start(arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "pellucid", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_entries(process, output, n):
    while len(entries(output)) < n:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def seen_by(proxy):
    """Return the number of requests, including those of an ended process that the proxy reads a little later."""
    while (before := len(proxy.seen)) != (time.sleep(0.5) or len(proxy.seen)):
        pass
    return before


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_command_requests_only_what_is_missing(how, service, recipe, tmp_path):
    output = tmp_path / "prefixes.jsonl"
    with proxied(service, delay=0.1) as proxy:
        arguments = command(recipe, output, proxy.url, n=10, workers=2)
        process = start(arguments)
        wait_for_entries(process, output, 7)
        process.send_signal(how)
        out, err = process.communicate()
        assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
        assert err == ""
        assert ("run the same command to continue" in out) == (how == signal.SIGINT)
        kept, asked = entries(output), seen_by(proxy)
        assert 7 <= len(kept) < 30
        assert not header(output)["complete"]
        with output.open("ab") as file:
            file.write('{"question": "a", "source": "teacher", "index": 0, "text": "数'.encode()[:-1])
        proxy.delay, proxy.fault = 0, lambda number, body: "400" if number == asked + 2 else ""
        assert status(arguments) == 2, "and what is begun a third time reads what was added the second time"
        assert status(arguments) == 0
        assert len(proxy.seen) - asked == 30 - len(kept) + 1
    held = check_whole(output, recipe, n=10, teacher=3)
    rows = {row["question"]: row for row in held}
    assert all(rows[entry["question"]]["teacher"][entry["index"]] == entry["text"] for entry in kept)


@pytest.mark.slow
def test_second_process_cannot_write_the_same_output(service, recipe, tmp_path, capsys):
    output = tmp_path / "prefixes.jsonl"
    with proxied(service, delay=0.1) as proxy:
        arguments = command(recipe, output, proxy.url, workers=2)
        process = start(arguments)
        wait_for_entries(process, output, 1)
        assert status(arguments) == 2
        assert f"process {process.pid} writes {output}: wait for it" in capsys.readouterr().err
        assert process.communicate()[1] == ""
        assert len(proxy.seen) == 18
    check_whole(output, recipe, teacher=3)


def test_failure_of_the_final_write_repeats_no_request(service, recipe, tmp_path, monkeypatch, capsys):
    output = tmp_path / "prefixes.jsonl"
    with proxied(service) as proxy:
        arguments = command(recipe, output, proxy.url)
        with monkeypatch.context() as patched:
            full = OSError(errno.ENOSPC, "No space left on device", str(output))
            patched.setattr(Journal, "finish", lambda *_: (_ for _ in ()).throw(full))
            assert status(arguments) == 2
        assert "No space left on device" in capsys.readouterr().err
        assert len(entries(output)) == 18
        assert status(arguments) == 0
        assert len(proxy.seen) == 18
    check_whole(output, recipe, teacher=3)


@pytest.mark.slow
def test_complete_output_sends_no_request_and_larger_one_only_the_rest(service, recipe, wide_dir, tmp_path, capsys):
    output = tmp_path / "prefixes.jsonl"
    with proxied(service) as proxy:
        assert status(command(recipe, output, proxy.url, n=4, per_question=2)) == 0
        first = check_whole(output, recipe, n=4, teacher=2)
        capsys.readouterr()
        assert status(command(recipe, output, proxy.url, n=4, per_question=2)) == 0
        assert status(command(recipe, output, proxy.url, n=3, per_question=1)) == 0
        assert capsys.readouterr().out.count("is complete: nothing to do") == 2
        assert len(proxy.seen) == 8
        assert status(command(recipe, output, proxy.url, n=6, per_question=3, student=wide_dir)) == 0
        assert len(proxy.seen) == 18
    held = check_whole(output, recipe, n=6, teacher=3, student=3)
    for before, now in zip(first, held, strict=False):
        assert now["teacher"][:2] == before["teacher"]
    bytes_before = output.read_bytes()
    with proxied(service) as proxy:
        assert status(command(recipe, output, proxy.url, n=2, per_question=4)) == 0
        assert len(proxy.seen) == 2
    held = rows_of(output)
    assert [len(row["teacher"]) for row in held] == [4, 4, 3, 3, 3, 3], "nothing that was there is thrown away"
    assert output.read_bytes() != bytes_before


@pytest.mark.slow
def test_kill_while_an_output_is_extended_keeps_its_prefixes(service, recipe, tmp_path):
    output = tmp_path / "prefixes.jsonl"
    with proxied(service) as proxy:
        assert status(command(recipe, output, proxy.url, n=3, per_question=2)) == 0
        first = check_whole(output, recipe, n=3, teacher=2)
        proxy.delay = 0.1
        arguments = command(recipe, output, proxy.url, n=6, per_question=3, workers=2)
        process = start(arguments)
        wait_for_entries(process, output, 9)
        process.kill()
        process.communicate()
        kept, asked = entries(output), len(proxy.seen)
        proxy.delay = 0
        assert status(arguments) == 0
        assert len(proxy.seen) - asked == 18 - len(kept)
    held = check_whole(output, recipe, teacher=3)
    assert [row["teacher"][:2] for row in held[:3]] == [row["teacher"] for row in first]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"teacher": "other"}, 'teacher = "tiny", now it is "other"'),
        ({"sentences": 1}, "sentences = 2, now it is 1"),
        ({"truncate_tokens": 4}, "truncate_tokens = 0, now it is 4"),
        ({"temperature": 0.5}, "temperature = 1.2, now it is 0.5"),
        ({"task.seed": 5}, "task ="),
    ],
)
def test_journal_with_other_settings_is_refused(changes, named, service, recipe, tmp_path, capsys):
    output = tmp_path / "prefixes.jsonl"
    with proxied(service, lambda number, body: "400" if number == 3 else "") as proxy:
        assert status(command(recipe, output, proxy.url, n=2)) == 2
        before, asked = output.read_bytes(), len(proxy.seen)
        capsys.readouterr()
        assert status(command(recipe, output, proxy.url, n=2, **changes)) == 2
        assert len(proxy.seen) == asked
    [line] = capsys.readouterr().err.splitlines()
    assert named in line
    assert "finish it with its own settings" in line
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "mend"),
    [
        ('{"settings": {"recipe": "other.toml"}, "complete": true}\n', 'begun with recipe = "other.toml"'),
        ("[]", "is not a prefix file"),
        ("[]\n", "is not a prefix file"),
        ("{half\n", "is not a prefix file"),
        ('{"settings": 3, "complete": true}\n', "is not a prefix file"),
        ('{"settings": {}, "complete": true}\n\n', "is not a prefix file"),
        ("\n", "is not a prefix file"),
    ],
)
def test_files_that_are_not_this_output_are_refused_and_unchanged(content, mend, recipe, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text(content)
    assert status(command(recipe, tmp_path / "p.jsonl", "http://127.0.0.1:9/v1")) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert mend in line
    assert (tmp_path / "p.jsonl").read_text() == content


# ---------------------------------------------------------------- the student


@pytest.mark.slow
def test_student_writes_the_same_output_after_interruptions(recipe, wide_dir, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert status(command(recipe, whole, student=wide_dir)) == 0
    held = check_whole(whole, recipe, student=3)
    assert len({text for row in held for text in row["student"]}) > 9
    for after in (2, 4, 7):
        with monkeypatch.context() as patched:
            patched.setattr(prefixes, "STUDENT_BATCH_ROWS", 6)
            stop_after(patched, after)
            assert status(command(recipe, parts, student=wide_dir)) == 2
    assert len({(entry["question"], entry["index"]) for entry in entries(parts)}) == 2 + 4 + 7
    assert status(command(recipe, parts, student=wide_dir)) == 0
    assert parts.read_bytes() == whole.read_bytes()


def stop_after(monkeypatch, n):
    add, left = Journal.add, iter(range(n))

    def adding(self, *entry):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "full", "p")
        add(self, *entry)

    monkeypatch.setattr(Journal, "add", adding)


def test_question_too_long_for_the_student_is_counted_and_skipped(wide_dir, tmp_path, capsys):
    questions = ["2 + 3", "9 + " * POSITIONS + "1", "4 + 5"]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"question": q, "answer": "5"}) + "\n" for q in questions))
    recipe = tmp_path / "rows.toml"
    (tmp_path / "t.jsonl").write_text('{"question": "6 + 1", "answer": "7"}\n')
    data = f'data = "{tmp_path}/q.jsonl"\ntest_data = "{tmp_path}/t.jsonl"\n'
    recipe.write_text(f'[task]\nname = "dataset"\n{data}')
    assert status(command(recipe, tmp_path / "p.jsonl", student=wide_dir, n=3, per_question=2)) == 2
    assert "2 prefixes are missing (a question of" in capsys.readouterr().err
    held = {row["question"]: len(row["student"]) for row in rows_of(tmp_path / "p.jsonl")}
    assert held == {q: 2 for q in questions if len(q) <= POSITIONS}


def test_recipe_that_will_use_the_prefixes_can_request_them(service, tmp_path):
    """The file that its task reads does not exist yet."""
    recipe, output = tmp_path / "prefixed.toml", tmp_path / "p.jsonl"
    recipe.write_text(f'[task]\nname = "prefixed"\nfile = "{output}"\n[task.task]\nname = "arithmetic"\n')
    with proxied(service) as proxy:
        assert status(command(recipe, output, proxy.url, n=2, per_question=1)) == 0
    task = replace(with_split(config.load_config(recipe).task, "train"), dropout=0.0)
    assert all(prompt.prefix for prompt in task.sample(0, 2))


def test_truncate_tokens_limits_the_length_of_prefixes(service, recipe, wide_dir, tmp_path):
    with proxied(service) as proxy:
        assert status(command(recipe, tmp_path / "p.jsonl", proxy.url, student=wide_dir, truncate_tokens=3)) == 0
    held = check_whole(tmp_path / "p.jsonl", recipe, teacher=3, student=3)
    lengths = {len(text) for row in held for text in [*row["teacher"], *row["student"]]}
    assert max(lengths) == 3, "a character is a token here"


def test_empty_answers_of_a_student_are_counted(recipe, wide_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prefixes, "clean_text", lambda text: "")
    assert status(command(recipe, tmp_path / "p.jsonl", student=wide_dir, retries=1, n=2)) == 2
    assert "6 prefixes are missing (the student's answers are empty)" in capsys.readouterr().err


# ---------------------------------------------------------------- imports and tasks


@pytest.mark.slow
def test_teacher_alone_does_not_import_torch(service, recipe, tmp_path):
    code = (
        "import sys\nfrom pellucid import cli\ncli.parse_command_line(sys.argv[1:])()\nsys.exit('torch' in sys.modules)"
    )
    with proxied(service) as proxy:
        arguments = command(recipe, tmp_path / "p.jsonl", proxy.url)
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    check_whole(tmp_path / "p.jsonl", recipe, teacher=3)


@pytest.mark.slow
def test_questions_come_from_the_innermost_task_without_repeats():
    @dataclass(frozen=True)
    class Inner:
        split: str = "test"

        def sample(self, step, n):
            return [Prompt(f"{i}", f"{self.split} {i % 3}", "a") for i in range(n)]

    assert [prompt.question for prompt in prefixes.sample_questions(Curriculum(Inner()), 5)] == [
        "train 0",
        "train 1",
        "train 2",
    ]

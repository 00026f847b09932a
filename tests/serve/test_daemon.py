"""Test `pellucid serve start`, `stop`, `status` and `restart`, mostly with a stub in place of the service."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from pellucid import cli
from pellucid.serve import daemon
from pellucid.types import UserError
from serving import post, request

SERVICE = """#!{python}
# Stands in for the interpreter: its command line is that of a service.
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

words = " ".join(sys.argv).replace("--port=", "--port ").split()
port, how = words[words.index("--port") + 1], words[words.index("serve") + 1]

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(json.dumps({{"instance": os.environ["PELLUCID_INSTANCE"]}}).encode())

    def log_message(self, *_):
        pass

if how == "refuses":
    print("first line")
    sys.exit("the model is not there")
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("started with", sys.argv[1:], flush=True)
if how == "mute":
    time.sleep(1000)
HTTPServer(("127.0.0.1", int(port)), Health).serve_forever()
"""


@pytest.fixture
def started(monkeypatch):
    """Yield a list of the processes that the test starts, and kill them afterwards."""
    started, popen = [], subprocess.Popen

    def remembered(*arguments, **settings):
        started.append(popen(*arguments, **settings))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", remembered)
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def service(started, tmp_path, monkeypatch):
    """Return a function that builds arguments of `pellucid serve start` for a stub, which starts without delay."""
    program = tmp_path / "python"
    program.write_text(SERVICE.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return lambda how="model", port=None: [how, "--port", str(port or free_port()), "--folder", str(tmp_path / "here")]


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def serve(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", *arguments])
    return ended.value.code


def held(tmp_path):
    return json.loads((tmp_path / "here" / "serve.pid").read_text())


def gone(pid):
    """Return whether the process has ended. A zombie counts as ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(") ")[2][0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pid):
    while not gone(pid):
        time.sleep(0.01)


def test_start_status_and_stop_report_the_service(service, tmp_path, capsys):
    arguments = service()
    where = arguments[-2:]
    assert serve("start", *arguments) == 0
    found = held(tmp_path)
    url = f"http://127.0.0.1:{arguments[2]}"
    assert found["url"] == url
    assert f"{url}, pid {found['pid']}, log {tmp_path}/here/serve.log" in capsys.readouterr().out
    assert not gone(found["pid"])
    assert serve("status", *where) == 0
    assert capsys.readouterr().out == f"{url}, pid {found['pid']}, answers\n"
    assert serve("stop", *where) == 0
    assert capsys.readouterr().out == f"stopped pid {found['pid']}\n"
    wait_until_gone(found["pid"])
    assert not (tmp_path / "here" / "serve.pid").exists()
    assert serve("status", *where) == 3
    assert serve("stop", *where) == 0
    assert capsys.readouterr().out == "no service is running\n" * 2


def test_second_start_in_a_folder_is_refused_and_first_keeps_running(service, tmp_path, capsys):
    assert serve("start", *service()) == 0
    first = held(tmp_path)
    assert serve("start", *service()) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"a service is already running: {first['url']}, pid {first['pid']}" in line
    assert held(tmp_path) == first
    assert not gone(first["pid"])


def test_restart_starts_a_new_process_with_the_same_arguments(service, tmp_path):
    arguments = service()
    assert serve("start", *arguments) == 0
    first = held(tmp_path)
    assert serve("restart", *arguments[-2:]) == 0
    second = held(tmp_path)
    wait_until_gone(first["pid"])
    assert not gone(second["pid"])
    same = ("url", "arguments")
    assert [second[key] for key in same] == [first[key] for key in same]
    assert second["instance"] != first["instance"]
    log = (tmp_path / "here" / "serve.log").read_text().splitlines()
    assert len(log) == 2
    assert log[0] == log[1], "both were started alike, and the log goes on"
    words = [arguments[0], *("=".join(pair) for pair in zip(arguments[1::2], arguments[2::2], strict=True))]
    assert str(words) in log[0].replace("'-P', '-m', 'pellucid', 'serve', ", "")


@pytest.mark.slow
def test_restart_works_after_the_service_was_killed(service, tmp_path, capsys):
    arguments = service()
    assert serve("start", *arguments) == 0
    first = held(tmp_path)
    os.kill(first["pid"], signal.SIGKILL)
    wait_until_gone(first["pid"])
    assert serve("status", *arguments[-2:]) == 3
    assert serve("restart", *arguments[-2:]) == 0
    assert held(tmp_path)["pid"] != first["pid"]
    assert serve("status", *arguments[-2:]) == 0


def test_restart_without_a_pid_file_is_refused(tmp_path, capsys):
    assert serve("restart", "--folder", str(tmp_path)) == 2
    assert f"{tmp_path}/serve.pid: nothing was started here" in capsys.readouterr().err


def test_start_replaces_the_pid_file_of_a_dead_service(service, tmp_path):
    arguments = service()
    dead = subprocess.Popen([shutil.which("true")])
    dead.wait()
    left_behind(tmp_path, dead.pid, arguments)
    assert serve("start", *arguments) == 0
    assert held(tmp_path)["pid"] != dead.pid


def left_behind(tmp_path, pid, arguments):
    (tmp_path / "here").mkdir()
    recorded = about(pid=pid, started=1e9, url=f"http://127.0.0.1:{arguments[2]}", arguments=arguments)
    (tmp_path / "here" / "serve.pid").write_text(recorded)


def about(**changes):
    return json.dumps({"pid": 1, "started": 1.0, "url": "http://x", "instance": "", "arguments": []} | changes)


@pytest.mark.parametrize(
    "command",
    [
        ["sleep", "1000"],
        # other pellucid processes: a training, and a service that was started by hand
        ["sh", "-c", "sleep 1000; true", "pellucid", "train", "recipe.toml"],
        ["sh", "-c", "sleep 1000; true", "pellucid", "serve", "another", "--port", "1"],
    ],
)
def test_other_process_with_the_pid_of_a_dead_service_is_left_running(service, tmp_path, command, capsys):
    other = subprocess.Popen([shutil.which(command[0]), *command[1:]], start_new_session=True)
    try:
        left_behind(tmp_path, other.pid, service())
        where = ["--folder", str(tmp_path / "here")]
        assert serve("status", *where) == 3
        assert serve("stop", *where) == 0
        assert capsys.readouterr().out == "no service is running\n" * 2
        assert serve("restart", *where) == 0
        assert held(tmp_path)["pid"] != other.pid
        assert other.poll() is None, "it was not stopped"
    finally:
        os.killpg(other.pid, signal.SIGKILL)


DAMAGED_PID_FILES = [
    "",
    "{",
    "[]",
    '{"pid": 1}',
    "\0" * 20,
    "\udcff",
    "[" * 10_000,
    about(pid="one"),
    about(pid=-1),
    about(pid=0),
    about(pid=10**30),
    about(started="noon"),
    about(arguments="--port 1"),
    about(url=None),
]


@pytest.mark.parametrize("action", ["start", "stop", "status", "restart"])
def test_damaged_pid_file_exits_with_one_line(service, tmp_path, action, capsys):
    """A full disk or a power failure can leave such files."""
    arguments = service()
    (tmp_path / "here").mkdir()
    for content in DAMAGED_PID_FILES:
        (tmp_path / "here" / "serve.pid").write_bytes(content.encode(errors="surrogateescape"))
        assert serve(action, *(arguments if action == "start" else arguments[-2:])) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert f"{tmp_path}/here/serve.pid is damaged" in line


def test_start_reports_why_the_service_ended_at_once(service, tmp_path, capsys):
    assert serve("start", *service("refuses")) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"the service ended at once: the model is not there (more in {tmp_path}/here/serve.log)" in line
    assert not (tmp_path / "here" / "serve.pid").exists()


@pytest.mark.slow
def test_start_terminates_a_service_that_never_answers(service, started, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(daemon, "STOP_TIMEOUT_SECONDS", 0.1)
    assert serve("start", *service("mute")) == 2
    assert "did not answer" in capsys.readouterr().err
    assert started[0].wait() == -signal.SIGTERM
    assert not (tmp_path / "here" / "serve.pid").exists()


def test_stop_kills_a_service_that_ignores_sigterm(service, tmp_path, monkeypatch):
    arguments = service("deaf")
    assert serve("start", *arguments) == 0
    pid = held(tmp_path)["pid"]
    monkeypatch.setattr(daemon, "STOP_TIMEOUT_SECONDS", 0.2)
    assert serve("stop", *arguments[-2:]) == 0
    wait_until_gone(pid)


def test_status_is_1_when_the_service_runs_but_does_not_answer(service, tmp_path, monkeypatch, capsys):
    arguments = service()
    assert serve("start", *arguments) == 0
    monkeypatch.setattr(daemon.Daemon, "is_answering", lambda _: False)
    assert serve("status", *arguments[-2:]) == 1
    assert "does not answer" in capsys.readouterr().out


@contextmanager
def another(said):
    """Start another HTTP server that answers every request with `said`. Yield its port and the requested paths."""

    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_):
            pass

    asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1], asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("said", [b"", b"{}", b"[]", b"<html>", b'{"status": "ok", "instance": "another"}'])
def test_start_does_not_accept_the_answer_of_another_program(service, started, tmp_path, monkeypatch, capsys, said):
    """The stub never answers. The program that answers on its port is not the service."""
    monkeypatch.setattr(daemon, "STOP_TIMEOUT_SECONDS", 0.2)
    with another(said) as (port, asked):
        assert serve("start", *service("mute", port=port)) == 2
    assert asked[0] == "/health"
    assert "did not answer" in capsys.readouterr().err
    assert started[0].poll() is not None
    assert not (tmp_path / "here" / "serve.pid").exists()


@pytest.mark.slow
def test_start_reports_a_port_in_use(started, model_dir, tmp_path, capsys):
    with another(b"{}") as (port, _):
        where = ["--port", str(port), "--folder", str(tmp_path / "here")]
        assert serve("start", str(model_dir), *where) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"the service ended at once: pellucid: cannot listen on 127.0.0.1:{port} (Address already in use)" in line
    assert "choose another --port" in line


@pytest.mark.slow
def test_health_checks_ignore_http_proxy(service, monkeypatch):
    """urllib reads proxies from the environment when it creates an opener."""
    with another(b"{}") as (port, asked):
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.setattr(urllib.request, "_opener", None)
        arguments = service()
        assert serve("start", *arguments) == 0
        assert serve("status", *arguments[-2:]) == 0
    assert asked == []


def test_pid_file_is_private_and_exists_before_the_service_answers(service, started, tmp_path, capsys):
    """While a first start waits for its service, a second start is refused, and status and stop find the service."""
    arguments, pid_file = service("mute"), tmp_path / "here" / "serve.pid"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(cli.parse_command_line(["serve", "start", *arguments]))
        while not pid_file.exists():
            time.sleep(0.01)
        found = held(tmp_path)
        assert pid_file.stat().st_mode & 0o777 == 0o600
        assert found["pid"] == started[0].pid
        assert found["started"] == pytest.approx(psutil.Process(found["pid"]).create_time(), abs=2)
        assert serve("start", *service("mute")) == 2
        assert "starts a service in this folder" in capsys.readouterr().err
        assert serve("status", *arguments[-2:]) == 1
        assert serve("stop", *arguments[-2:]) == 0
        with pytest.raises(UserError, match="ended at once"):
            first.result()
    assert len(started) == 1


@pytest.mark.parametrize("when", ["while it waits", "before the pid file"])
def test_ctrl_c_leaves_no_orphan(service, started, tmp_path, monkeypatch, when):
    if when == "while it waits":
        monkeypatch.setattr(daemon.Daemon, "is_answering", lambda _: os.kill(os.getpid(), signal.SIGINT))
    else:
        write = daemon.write_file_atomically
        monkeypatch.setattr(
            daemon, "write_file_atomically", lambda *told: os.kill(os.getpid(), signal.SIGINT) or write(*told)
        )
    assert serve("start", *service("mute")) == 130
    assert started[0].poll() == -signal.SIGTERM
    assert not (tmp_path / "here" / "serve.pid").exists()


@pytest.mark.slow
def test_ctrl_c_kills_a_service_that_ignores_sigterm(service, started, tmp_path, monkeypatch):
    def interrupted(_):
        if "started with" in (tmp_path / "here" / "serve.log").read_text():
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(daemon, "STOP_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(daemon.Daemon, "is_answering", interrupted)
    assert serve("start", *service("deaf")) == 130
    assert started[0].poll() == -signal.SIGKILL


def test_process_with_same_pid_but_a_later_start_is_left_running(service, tmp_path):
    """After a reboot, services may get the pids that they had before."""
    arguments = service()
    assert serve("start", *arguments) == 0
    found = held(tmp_path)
    (tmp_path / "here" / "serve.pid").write_text(json.dumps(found | {"started": found["started"] - 60}))
    assert serve("status", *arguments[-2:]) == 3
    assert serve("stop", *arguments[-2:]) == 0
    assert not gone(found["pid"])


@pytest.mark.slow
def test_service_imports_no_local_modules_but_finds_local_tasks(started, recipe, tmp_path, monkeypatch):
    """A local tomllib.py would shadow Python's own module. A task file is still found by its path."""
    task, run_dir = Path(__file__).parents[1] / "digits_task.py", tmp_path / "run"
    with pytest.raises(SystemExit):
        cli.main(["train", str(recipe), "--run", str(run_dir), "--algorithm.steps", "1"])
    (tmp_path / "task_of_mine.py").write_text(task.read_text())
    config = run_dir / "config.json"
    config.write_text(config.read_text().replace(str(task), "task_of_mine.py"))
    (tmp_path / "tomllib.py").write_text("raise SystemExit('the wrong tomllib')")
    monkeypatch.chdir(tmp_path)
    port, where = free_port(), ["--folder", str(tmp_path / "here")]
    assert serve("start", str(run_dir), "--port", str(port), "--dtype", "float32", *where) == 0
    try:
        _, answered = post(f"http://127.0.0.1:{port}/group", {"group_size": 2, "max_tokens": 4})
    finally:
        assert serve("stop", *where) == 0
    assert [type(row["reward"]) for row in answered["completions"]] == [float, float]


@pytest.mark.parametrize(
    ("host", "port", "url"), [("127.0.0.1", 1, "http://127.0.0.1:1"), ("::1", 2, "http://[::1]:2")]
)
def test_make_url_formats_ipv4_and_ipv6_hosts(host, port, url):
    assert daemon.make_url(host, port) == url


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_invalid_port_exits_with_one_line(model_dir, port, capsys):
    assert serve(str(model_dir), "--port", port) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "cannot listen on" in line


def test_start_refuses_port_0(tmp_path, capsys):
    assert serve("start", "tiny", "--port", "0", "--folder", str(tmp_path)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--port 0" in line
    assert not list(tmp_path.iterdir())


def test_start_warns_when_the_service_is_open_to_everyone(service, monkeypatch, capsys):
    monkeypatch.delenv("PELLUCID_TOKEN", raising=False)
    arguments = service()
    assert serve("start", *arguments, "--host", "0.0.0.0") == 0
    assert "open to everyone" in capsys.readouterr().err
    assert serve("stop", *arguments[-2:]) == 0
    assert serve("start", *service(), "--host", "0.0.0.0", "--token", "secret") == 0
    assert "open to everyone" not in capsys.readouterr().err


@pytest.mark.slow
def test_sigterm_answers_all_pending_requests(started, model_dir, tmp_path):
    """A real service gets the signal while it decodes twelve requests."""
    port, where = free_port(), ["--folder", str(tmp_path / "here")]
    assert serve("start", str(model_dir), "--port", str(port), "--name", "tiny", "--dtype", "float32", *where) == 0
    body, url = {"prompt": "2+3=", "max_tokens": 60, "n": 4}, f"http://127.0.0.1:{port}"
    with ThreadPoolExecutor(12) as pool:
        before = request(f"{url}/health")[1]["requests"]
        answers = [pool.submit(post, f"{url}/v1/completions", body) for _ in range(12)]
        seen = 0
        while request(f"{url}/health")[1]["requests"] - before - (seen := seen + 1) < 12:
            pass
        os.kill(held(tmp_path)["pid"], signal.SIGTERM)
        for status, answer in (answer.result() for answer in answers):  # on a slow machine some do not finish in time
            assert status == 200 or (status, answer["error"]["message"]) == (503, "the service is shutting down")
    wait_until_gone(started[-1].pid)


@pytest.mark.slow
def test_the_real_service_runs_in_the_background(started, model_dir, tmp_path):
    port, where = free_port(), ["--folder", str(tmp_path / "here")]
    assert serve("start", str(model_dir), "--port", str(port), "--name", "tiny", "--dtype", "float32", *where) == 0
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as response:
            assert json.load(response)["model"] == "tiny"
        assert serve("status", *where) == 0
        pid = held(tmp_path)["pid"]
    finally:
        assert serve("stop", *where) == 0
    wait_until_gone(pid)


@pytest.mark.parametrize("said", [None, b"", b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 404 Not Found\r\n\r\n"])
def test_is_answering_is_false_for_closed_ports_and_other_programs(said):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def reply():
            with listener.accept()[0] as caller:
                caller.recv(1000)
                caller.sendall(said)

        thread = threading.Thread(target=reply)
        if said is None:
            listener.close()
        else:
            thread.start()
        assert not daemon.Daemon(1, 0.0, url, "", []).is_answering()
        if said is not None:
            thread.join()

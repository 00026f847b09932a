"""Run Python programs in processes forked from one that has already imported what takes long: torch and the package.

Each has its own environment, working directory and streams, like a started process. Tests of what happens before or
during the import of torch start their process instead.

Launchers that start Python themselves find it in `python()`: tests/forked_python.py, which requests a process.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp

from pellucid import cli
from pellucid.utils.plugins import pause_garbage_collection

HERE = Path(__file__).parent
NAME = "pellucid-forking"
"""Followed by the process id of the test session. It names a socket outside the file system."""
MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "gemma3")]
WANTED = [
    "hypothesis",
    "pytest",
    "pellucid.training.run",
    "pellucid.distributed.fsdp2",
    "pellucid.serve.vllm_server",
    *MODELS,
]


# ---------------------------------------------------------------- client


class Forked:
    """Run `count` processes of one command, `SCRIPT ...` or `-m MODULE ...`, side by side.

    pid: the id of the first process. The others are asked to end when one has failed.
    returncode: the first that is not 0, else 0, and -N if signal N ended the process; None while they run.
    """

    def __init__(self, *command, count=1, env=None, stdout=1, stderr=2):
        self.returncode, self._read = None, b""
        self._said, theirs = socket.socketpair()
        request = {
            "count": count,
            "command": list(map(str, command)),
            "env": dict(os.environ if env is None else env),
            "cwd": os.getcwd(),
            "path": sys.path,
        }
        streams = [stream if isinstance(stream, int) else stream.fileno() for stream in (stdout, stderr)]
        socket.send_fds(server(), [json.dumps(request).encode()], [*streams, theirs.fileno()])
        theirs.close()
        self.pid = int(self._line())

    def wait(self):
        """Return the exit status when all processes have ended."""
        if self.returncode is None:
            self.returncode = int(self._line())
            self._said.close()
        return self.returncode

    def poll(self):
        """Return the exit status, or None while they run."""
        if self.returncode is None:
            self._said.setblocking(False)
            with suppress(BlockingIOError):
                heard = self._said.recv(100)
                if not heard:
                    raise RuntimeError("the server of forked processes has ended")
                self._read += heard
            self._said.setblocking(True)
        return self.wait() if b"\n" in self._read else self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def _line(self):
        while b"\n" not in self._read:
            if not (more := self._said.recv(100)):
                raise ChildProcessError("who waits for the forked processes has ended")
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line


def ran(*command, count=1, env=None):
    """Run a command to its end, and return it with its output."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        status = Forked(*command, count=count, env=env, stdout=out, stderr=err).wait()
        said = [stream.seek(0) or stream.read() for stream in (out, err)]
    return subprocess.CompletedProcess(command, status, *said)


@cache
def server():
    """Return a socket to the forking process, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"\0{NAME}-{os.getpid()}")
    listening.listen()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    handles = [theirs.fileno(), listening.fileno()]
    process = subprocess.Popen([sys.executable, __file__, *map(str, handles)], env=environment, pass_fds=handles)
    theirs.close()
    listening.close()
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours


@cache
def python():
    """Return a program that is called like Python."""
    server()
    program = Path(mkdtemp()) / "python"
    atexit.register(lambda: shutil.rmtree(program.parent))
    asking = f'"{sys.executable}" -S -E "{HERE}/forked_python.py" {NAME}-{os.getpid()}'
    program.write_text(f'#!/bin/sh\nexec {asking} "$@"\n')
    program.chmod(0o755)
    return str(program)


# ---------------------------------------------------------------- server


def serve(asked, listening):
    """Return a request in each of the processes that it asks for. Their waiter and this process never return."""
    while True:
        ready, _, _ = select.select([asked, listening], [], [])
        message, handles = heard_of(asked) if asked in ready else heard_of(listening.accept()[0], apart=True)
        with suppress(ChildProcessError):  # there are no more children to wait for
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not message and asked in ready:
            os._exit(0)
        if message and os.fork() == 0:
            asked.close()
            listening.close()
            return begun(json.loads(message), *handles)
        for handle in handles:
            os.close(handle)


def heard_of(asking, apart=False):
    """Return a message and its handles: two streams and the socket to answer on, which is `asking` if `apart`."""
    message, handles, _, _ = socket.recv_fds(asking, 2**20, 3)
    return message, [*handles, asking.detach()] if apart else handles


def begun(request, out, err, said):
    """Return the request in each of its processes. Their parent sends the id of the first, then how they ended."""
    for stream, number in ((out, 1), (err, 2)):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    pids = []
    for rank in range(request["count"]):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.close(said)
            if "WORLD_SIZE" in os.environ and "RANK" not in os.environ:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            return request
    os.write(said, b"%d\n" % pids[0])
    os.write(said, b"%d\n" % ended_together(pids))
    os._exit(0)


def ended_together(running):
    """Return the first status that is not 0, else 0. If a process fails, the others are asked to end."""
    status = 0
    while running:
        pid, raw = os.wait()
        running.remove(pid)
        if (one := os.waitstatus_to_exitcode(raw)) and not status:
            status = one
            for other in running:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGTERM)
    return status


def imported():
    """Import what the programs need."""
    cli.quiet_libraries()
    with pause_garbage_collection():
        for name in WANTED:
            with suppress(ModuleNotFoundError):  # a machine with a GPU may lack what only the service needs
                import_module(name)


def main(*handles):
    imported()
    request = serve(*(socket.socket(fileno=int(handle)) for handle in handles))
    named = request["command"][0] == "-m"
    sys.argv = request["command"][named:]
    sys.path[:] = [str(HERE), *request["path"]]
    if named:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])

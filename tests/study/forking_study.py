"""Run `pellucid study` with runs that are forked from this process, which has already imported their modules.

The runner still sets the arguments, the environment, the streams, the session and the lock of each run.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
from subprocess import DEVNULL, STDOUT
from types import SimpleNamespace

from pellucid import cli
from pellucid.study import runner


class Forking:
    """Implements the part of subprocess.Popen that the runner uses."""

    def __init__(self, command, *, stdin, stdout, stderr, env, pass_fds, start_new_session):
        python, _, named, *words = command
        assert (python, named, stdin, stderr, start_new_session) == (sys.executable, "-m", DEVNULL, STDOUT, True)
        self.returncode = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(stdout.fileno(), 1)
            os.dup2(1, 2)
            os.environ.clear()
            os.environ.update(env)
            os._exit(trained(words))

    def poll(self):
        return self._ended(os.WNOHANG)

    def wait(self):
        return self._ended(0)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def _ended(self, how):
        if self.returncode is None and (raw := os.waitpid(self.pid, how))[0]:
            self.returncode = os.waitstatus_to_exitcode(raw[1])
        return self.returncode


def trained(words):
    """Run a command line and return its exit status."""
    sys.argv = list(words)
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code or 0
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    runner.subprocess = SimpleNamespace(Popen=Forking, DEVNULL=DEVNULL, STDOUT=STDOUT)
    cli.main(["study", *sys.argv[1:]])

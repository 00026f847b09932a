"""Run like Python, in a process that a server forks: `forked_python.py NAME [-u] SCRIPT ...` or `... -m MODULE ...`.

It starts without `site`, imports little, forwards signals, and ends like that process. See tests/forked.py.
"""

import json
import os
import signal
import socket
import sys


def main(name, *command):
    said = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    said.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
    said.connect(f"\0{name}")
    request = {
        "count": 1,
        "command": command[1:] if command[0] == "-u" else command,
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "path": os.environ["PYTHONPATH"].split(os.pathsep),
    }
    socket.send_fds(said, [json.dumps(request).encode()], [1, 2])
    pid = int(said.recv(100))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int(said.recv(100))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


main(*sys.argv[1:])

"""A proxy in front of a service that injects faults."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "sk-proj-verysecret0123456789"
"""The key that the proxy quotes when it refuses a request."""
LATE = 2.0
"""The delay of a late answer, in seconds."""


def says(text, reason="stop", tokens=5):
    """Return the complete answer of an endpoint."""
    choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}}
    return json.dumps({"choices": [choice], "usage": {"total_tokens": tokens}})


class Proxy(ThreadingHTTPServer):
    """Forward requests, except for the faults that `fault(number, body)` returns. Record the time and fault of each."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, upstream: str, fault=lambda number, body: "", delay=0.0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream, self.fault, self.delay, self.lock = upstream, fault, delay, threading.Lock()
        self.seen, self.keys, self.bodies = [], [], []
        self.closing = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def count(self, what):
        return sum(became == what for _, became in self.seen)

    def handle_error(self, request, client_address):
        """Ignore clients that were killed and hung up."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(raw)
        with server.lock:
            fault = server.fault(len(server.seen), body)
            server.seen.append((time.monotonic(), fault))
            server.keys.append(self.headers["Authorization"])
            server.bodies.append(body)
        time.sleep(server.delay)
        if callable(fault):
            fault(self)
        elif fault == "drop":
            self.close_connection = True
        elif fault == "stall":
            server.closing.wait()
            self.close_connection = True
        elif fault == "late":
            time.sleep(LATE)
            self.pass_on(raw)
        elif fault == "twice":
            self.pass_on(raw, times=2)
        elif fault == "empty":
            self.reply(200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": " <think> "}}]})
        elif fault.startswith("{"):
            self.reply(200, fault)
        elif fault == "garbage":
            self.reply(200, "{half", "application/json")
        elif fault:
            status, _, wait = fault.partition(" ")
            said = {"message": f"Wrong: {KEY} and {KEY[:9]}***89", "code": None}
            self.reply(int(status), {"error": said}, retry_after=wait)
        else:
            self.pass_on(raw)

    def pass_on(self, raw, times=1):
        request = urllib.request.Request(self.server.upstream + self.path, raw, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as response:
            self.reply(response.status, response.read().decode() * times)

    def reply(self, status, body, kind="application/json", retry_after="", **headers):
        raw = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(raw)))
        if retry_after:
            self.send_header("Retry-After", retry_after)
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_):
        pass


@contextmanager
def proxied(service, fault=lambda number, body: "", delay=0.0):
    proxy = Proxy(service, fault, delay)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.closing.set()
        proxy.shutdown()
        thread.join()
        proxy.server_close()

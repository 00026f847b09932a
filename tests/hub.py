"""A fake Hugging Face Hub: an HTTP server that accepts and stores what huggingface_hub sends."""

from __future__ import annotations

import base64
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_standin"
LARGE = 512
"""Files with more bytes are uploaded as large files, by LFS."""


@dataclass
class Hub:
    """The received data, and how the next requests are answered."""

    user: str = "me"
    private: dict[str, bool] = field(default_factory=dict)
    """Whether each repository is private, by USER/NAME."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Committed files, by USER/NAME/path."""
    commits: list[dict] = field(default_factory=list)
    """The header of each commit."""
    stored: dict[str, bytes] = field(default_factory=dict)
    """Large files by their sha256, committed or not."""
    fails: dict[str, int] = field(default_factory=dict)
    """The status of the response, by the beginning of the path."""
    requests: list[str] = field(default_factory=list)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self):
        self.answered(b"")

    def do_POST(self):
        self.answered(self.body())

    def do_PUT(self):
        self.answered(self.body())

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def answered(self, body: bytes) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        status, answer = self.answer(path, body)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def answer(self, path: str, body: bytes) -> tuple[int, dict | list]:
        if status := next((status for begin, status in self.hub.fails.items() if path.startswith(begin)), 0):
            return status, {"error": "as the test asks for"}
        if path.startswith("/lfs/"):  # the URL itself is the permission
            self.hub.stored[path.removeprefix("/lfs/")] = body
            return 200, {}
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path.startswith("/api/models/"):
            user, name, *action = path.removeprefix("/api/models/").split("/")
            return self.of_repository(f"{user}/{name}", action[0] if action else "", body)
        return {"/api/repos/create": self.create, "/api/validate-yaml": lambda _: (200, {})}.get(path, self.batch)(body)

    def of_repository(self, repository: str, action: str, body: bytes) -> tuple[int, dict | list]:
        if repository not in self.hub.private:
            return 404, {"error": "Repository not found"}
        about = {"id": repository, "private": self.hub.private[repository], "tags": [], "downloads": 0}
        actions = {"preupload": self.preupload, "commit": self.commit, "tree": self.tree}
        return 200, actions[action](repository, body) if action else about

    def create(self, body: bytes) -> tuple[int, dict]:
        asked = json.loads(body)
        if asked["organization"] != self.hub.user:
            return 403, {"error": f"You don't have the rights to create a model under {asked['organization']}"}
        name = f"{asked['organization']}/{asked['name']}"
        known = name in self.hub.private
        self.hub.private.setdefault(name, asked.get("private", asked.get("visibility") == "private"))
        return (409 if known else 200), {"url": f"{self.hub.url}/{name}", "error": "You already created this"}

    def preupload(self, _: str, body: bytes) -> dict:
        modes = [
            {"path": file["path"], "uploadMode": "lfs" if file["size"] > LARGE else "regular", "shouldIgnore": False}
            for file in json.loads(body)["files"]
        ]
        return {"files": modes}

    def tree(self, repository: str, _: bytes) -> list[dict]:
        """Return all files of a repository, whichever part was requested."""
        of_it = {name.removeprefix(f"{repository}/"): content for name, content in self.hub.files.items()}
        return [{"type": "file", "path": path, "size": len(content), "oid": ""} for path, content in of_it.items()]

    def batch(self, body: bytes) -> tuple[int, dict]:
        """Return the upload URL of each large file."""
        asked = json.loads(body)["objects"]
        objects = [{**each, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}} for each in asked]
        return 200, {"transfer": "basic", "objects": objects}

    def commit(self, repository: str, body: bytes) -> dict:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.hub.commits.append(value)
            elif line["key"] == "file":
                self.hub.files[f"{repository}/{value['path']}"] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del self.hub.files[f"{repository}/{value['path']}"]
            else:
                self.hub.files[f"{repository}/{value['path']}"] = self.hub.stored[value["oid"]]
        oid = f"{len(self.hub.commits):040x}"
        return {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repository}/commit/{oid}"}

    def log_message(self, *_):
        """Print nothing, because requests are stored."""


@contextmanager
def serving():
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfThisHub", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

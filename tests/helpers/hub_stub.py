"""A local hub: the paths, headers and error codes that huggingface_hub relies on, over a dict of files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/models/(?P<repo>.+)/(?P<what>revision|tree)/(?P<revision>[^/]+)")
_FILE = re.compile(r"/(?P<repo>.+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class Hub(ThreadingHTTPServer):
    """Serves at ``url`` for the duration of the ``with`` block."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.branches: dict[tuple[str, str], str] = {}  # (repository, branch) to commit
        self.commits: dict[tuple[str, str], dict[str, bytes]] = {}  # (repository, commit) to files
        self.gated: set[str] = set()
        self.broken: dict[str, int] = {}  # file: number of times its connection breaks in the middle
        self.failing: set[str] = set()  # files with response status 500
        self.asked: list[tuple[str, str, str | None]] = []  # (method, file, range) of all files
        self.tokens: set[str | None] = set()  # authorization headers received

    def add(self, repo: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Put files into a branch as a new commit, and return its name."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.branches[repo, branch], self.commits[repo, commit] = commit, files
        return commit

    def fetched(self) -> list[str]:
        """Return the requested files, sorted, once per request."""
        return sorted(file for method, file, _ in self.asked if method == "GET")

    def __enter__(self) -> Hub:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        match = _API.fullmatch(path) or _FILE.fullmatch(path)
        if match is None:
            return self.error(404, "")
        self.server.tokens.add(self.headers["authorization"])
        repo, revision = match["repo"], unquote(match["revision"])
        if repo not in {name for name, _ in self.server.branches}:
            return self.error(401, "RepoNotFound")
        commit = self.server.branches.get((repo, revision), revision)
        files = self.server.commits.get((repo, commit))
        if files is None:
            return self.error(404, "RevisionNotFound")
        if match.re is _FILE:
            return self.file(repo, commit, files, unquote(match["file"]))
        if match["what"] == "tree":
            answer = [{"type": "file", "path": n, "size": len(b), "oid": "0" * 40} for n, b in files.items()]
        else:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            answer = {"id": repo, "sha": commit, "siblings": siblings}
        self.answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    do_HEAD = do_GET

    def file(self, repo: str, commit: str, files: dict[str, bytes], name: str) -> None:
        hub, asked_range = self.server, self.headers["range"]
        hub.asked.append((self.command, name, asked_range))
        if repo in hub.gated:
            return self.error(401, "GatedRepo")
        if name not in files:
            return self.error(404, "EntryNotFound")
        if name in hub.failing and self.command == "GET":
            return self.error(500, "")
        content, start = files[name], 0
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
        if asked_range:
            start = int(re.fullmatch(r"bytes=(\d+)-", asked_range)[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        breaks = self.command == "GET" and hub.broken.get(name, 0) > 0
        if breaks:
            hub.broken[name] -= 1
        self.answer(206 if asked_range else 200, content[start:], headers, only_half=breaks)

    def error(self, status: int, code: str) -> None:
        self.answer(status, b"", {"X-Error-Code": code} if code else {})

    def answer(self, status: int, body: bytes, headers: dict[str, str], only_half: bool = False) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if only_half else body)
            self.wfile.flush()
            self.close_connection = only_half

    def log_message(self, *_) -> None:
        pass

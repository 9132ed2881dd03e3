"""A local hub: the paths, headers and error codes that huggingface_hub relies on, over a dict of files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_API = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<repo>.+?)/(?P<what>revision|tree|refs)(/(?P<revision>[^/]+)(/(?P<folder>.+))?)?"
)
_FILE = re.compile(r"/(?P<repo>.+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


def _etag(name: str, content: bytes) -> str:
    """As the hub: SHA-256 of a large file, git's hash of another one."""
    is_large = name.endswith((".safetensors", ".bin", ".parquet"))
    return (hashlib.sha256(content) if is_large else hashlib.sha1(b"blob %d\0" % len(content) + content)).hexdigest()


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


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
        self.damaged: dict[str, bytes] = {}  # file: content that is sent instead
        self.failing: set[str] = set()  # files with response status 500
        self.asked: list[tuple[str, str, str | None]] = []  # (method, file, range) of all files
        self.tokens: set[str | None] = set()  # authorization headers received

    def add(self, repo: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Put files into a branch as a new commit, and return its name; a dataset's name starts with datasets/."""
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
    disable_nagle_algorithm = True  # otherwise each answer takes 40 ms
    server: Hub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        match = _API.fullmatch(path) or _FILE.fullmatch(path)
        if match is None:
            return self.error(404, "")
        self.server.tokens.add(self.headers["authorization"])
        repo, revision = match["repo"], unquote(match["revision"] or "main")
        if match.re is _API and match["kind"] == "datasets":
            repo = f"datasets/{repo}"
        if repo not in {name for name, _ in self.server.branches}:
            return self.error(401, "RepoNotFound")
        commit = self.server.branches.get((repo, revision), revision)
        files = self.server.commits.get((repo, commit))
        if files is None:
            return self.error(404, "RevisionNotFound")
        if match.re is _FILE:
            return self.file(repo, commit, files, unquote(match["file"]))
        if match["what"] == "refs":
            branches = [branch for name, branch in self.server.branches if name == repo]
            answer = {"branches": [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": commit} for b in branches]}
            answer |= {"tags": [], "converts": []}
        elif match["what"] == "tree":
            below = f"{unquote(match['folder'])}/" if match["folder"] else ""
            found = {n: b for n, b in files.items() if n.startswith(below)}
            if not found:
                return self.error(404, "EntryNotFound")
            answer = [{"type": "file", "path": n, "size": len(b), "oid": _sha1(b)} for n, b in found.items()]
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
        content = hub.damaged.get(name, content) if self.command == "GET" else content
        headers, end = {"ETag": f'"{_etag(name, files[name])}"', "X-Repo-Commit": commit}, len(content)
        if asked_range:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", asked_range).groups()
            start, end = int(first), min(int(last or end - 1) + 1, end)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        breaks = self.command == "GET" and hub.broken.get(name, 0) > 0
        if breaks:
            hub.broken[name] -= 1
        self.answer(206 if asked_range else 200, content[start:end], headers, only_half=breaks)

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

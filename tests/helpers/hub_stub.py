"""A local hub: the paths, headers and error codes that huggingface_hub relies on, over a dict of files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

_API = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<repo>.+?)"
    r"(/(?P<what>revision|tree|refs)(/(?P<revision>[^/]+)(/(?P<folder>.+))?)?)?"
)
_WRITE = re.compile(r"/api/models/(?P<repo>.+?)/(?P<what>preupload|commit)/(?P<revision>[^/]+)")
_LARGE = re.compile(r"/(?P<repo>.+)\.git/info/lfs/objects/batch")
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
        self.is_private: dict[str, bool] = {}
        self.cards: dict[str, dict[str, str]] = {}  # metadata of a repository's README
        self.refused_writes: dict[str, int] = {}  # what (create, preupload, commit): response status
        self.uploaded: dict[str, bytes] = {}  # large files by SHA-256

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
            if below and not found:
                return self.error(404, "EntryNotFound")
            answer = [{"type": "file", "path": n, "size": len(b), "oid": _sha1(b)} for n, b in found.items()]
            folders = {str(parent) for name in found for parent in PurePosixPath(name).parents[:-1]}
            paths = sorted(path for path in folders if path.startswith(below))
            answer += [{"type": "directory", "path": path, "size": 0, "oid": _sha1(path.encode())} for path in paths]
            if "recursive=true" not in urlsplit(self.path).query.lower():
                answer = [entry for entry in answer if "/" not in entry["path"].removeprefix(below)]
        else:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            answer = {
                "id": repo,
                "sha": commit,
                "siblings": siblings,
                "private": self.server.is_private.get(repo, False),
            }
            answer["cardData"] = self.server.cards.get(repo, {})
        self.answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        hub, body = self.server, self.rfile.read(int(self.headers["content-length"]))
        hub.tokens.add(self.headers["authorization"])
        path = urlsplit(self.path).path
        match = _WRITE.fullmatch(path) or _LARGE.fullmatch(path)
        what = match["what"] if match is not None and match.re is _WRITE else path.rpartition("/")[2]
        if what in hub.refused_writes:
            return self.error(hub.refused_writes[what], "")
        repo = match["repo"] if match is not None else ""
        if match is not None and repo not in {name for name, _ in hub.branches}:
            return self.error(404, "RepoNotFound")
        answer = getattr(self, f"write_{what.replace('-', '_')}")(repo, body)
        self.answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        self.server.uploaded[hashlib.sha256(content).hexdigest()] = content
        self.answer(200, b"", {"ETag": "x"})

    def write_create(self, _: str, body: bytes) -> dict:
        asked = json.loads(body)
        repo = f"{asked['organization']}/{asked['name']}"
        if repo not in {name for name, _ in self.server.branches}:
            self.server.add(repo, {})
            self.server.is_private[repo] = asked.get("private", asked.get("visibility") == "private")
        return {"url": f"{self.server.url}/{repo}"}

    def write_validate_yaml(self, _: str, body: bytes) -> dict:
        return {"errors": [], "warnings": []}

    def write_preupload(self, repo: str, body: bytes) -> dict:
        large = (".safetensors", ".bin")
        modes = {f["path"]: "lfs" if f["path"].endswith(large) else "regular" for f in json.loads(body)["files"]}
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}

    def write_batch(self, repo: str, body: bytes) -> dict:
        objects = json.loads(body)["objects"]
        actions = [{"upload": {"href": f"{self.server.url}/large/{one['oid']}"}} for one in objects]
        pairs = zip(objects, actions, strict=True)
        return {"transfer": "basic", "objects": [one | {"actions": action} for one, action in pairs]}

    def write_commit(self, repo: str, body: bytes) -> dict:
        hub = self.server
        files = dict(hub.commits[repo, hub.branches[repo, "main"]])
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = hub.uploaded[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        commit = hub.add(repo, files)
        return {"success": True, "commitOid": commit, "commitUrl": f"{hub.url}/{repo}/commit/{commit}"}

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
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if only_half else body)
            self.wfile.flush()
            self.close_connection = only_half

    def log_message(self, *_) -> None:
        pass

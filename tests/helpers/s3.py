"""An S3 server (moto's) in this process, behind a proxy that injects faults."""

import http.client
import logging
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BUCKET, KEY, SECRET = "bucket", "AKIAEXAMPLEKEY", "not-a-real-secret"
ERROR = "<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"


@dataclass
class Faults:
    """What goes wrong, each with a chance between 0 and 1 for every request; counts of what has been done."""

    error_500: float = 0.0
    slow_down_503: float = 0.0
    cut_request: float = 0.0
    """The connection ends before the server sees the request."""
    cut_response: float = 0.0
    """The server has done what it was asked to; half of its answer arrives."""
    bytes_per_second: float = 0.0
    """Speed of each upload; 0 is unlimited."""
    full_after: int | None = None
    """Bytes that may be written in all; then the bucket is full."""
    full_status: int = 403
    is_refused: bool = False
    """Every write is answered as with a wrong key."""
    cut_uploads_of: str | None = None
    """The connection ends before each upload of an object whose name contains this."""
    requests: Counter = field(default_factory=Counter)
    paths: Counter = field(default_factory=Counter)
    """Downloads of each object."""
    done: Counter = field(default_factory=Counter)
    written: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        self.random, self.lock = random.Random(self.seed), threading.Lock()

    def draw(self, name: str) -> bool:
        with self.lock:
            hit = self.random.random() < getattr(self, name)
            self.done[name] += hit
        return hit


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Server"

    def do(self) -> None:
        faults: Faults = self.server.faults
        body = self._read(faults)
        with faults.lock:
            faults.requests[self.command] += 1
            faults.paths[self.path] += self.command == "GET"
        if self.server.checks_keys and f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            faults.done["wrong key"] += 1
            return self._answer(403, "InvalidAccessKeyId")
        if faults.is_refused and self.command != "GET":
            faults.done["is_refused"] += 1
            return self._answer(403, "SignatureDoesNotMatch")
        if faults.cut_uploads_of is not None and self.command == "PUT" and faults.cut_uploads_of in self.path:
            faults.done["cut_uploads_of"] += 1
            return self._cut()
        if faults.draw("cut_request"):
            return self._cut()
        if faults.draw("error_500"):
            return self._answer(500, "InternalError")
        if faults.draw("slow_down_503"):
            return self._answer(503, "SlowDown")
        if self.command in ("PUT", "POST") and "delete" not in self.path:
            if faults.full_after is not None and faults.written + len(body) > faults.full_after:
                faults.done["full"] += 1
                return self._answer(faults.full_status, "QuotaExceeded" if faults.full_status == 403 else "Full")
            faults.written += len(body)
        return self._forward(body, faults)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do

    def _read(self, faults: Faults) -> bytes:
        left, body = int(self.headers.get("Content-Length") or 0), bytearray()
        while left:
            piece = self.rfile.read(min(left, 65536))
            if not piece:
                raise ConnectionError
            body += piece
            left -= len(piece)
            if faults.bytes_per_second:
                time.sleep(len(piece) / faults.bytes_per_second)
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return bytes(body)

    def _forward(self, body: bytes, faults: Faults) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.moto_port)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "content-length")}
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        if response.getheader("Content-Length") is None:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if faults.draw("cut_response"):
            self.wfile.write(content[: len(content) // 2])
            return self._cut()
        if self.command != "HEAD":
            self.wfile.write(content)
        connection.close()

    def _answer(self, status: int, code: str) -> None:
        content = b"" if self.command == "HEAD" else ERROR.format(code=code).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _cut(self) -> None:
        with suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(2)
        self.close_connection = True

    def log_message(self, *args) -> None:
        pass

    def handle(self) -> None:
        with suppress(OSError):  # the client has gone
            super().handle()


class Server(ThreadingHTTPServer):
    """The proxy; ``faults`` may be replaced at any time."""

    daemon_threads = True

    def __init__(self, moto_port: int) -> None:
        super().__init__(("127.0.0.1", 0), Proxy)
        self.moto_port, self.faults, self.checks_keys = moto_port, Faults(), True
        # not through the proxy
        import boto3  # slow to import, as moto: every worker collects the files that use this one

        self.client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{moto_port}",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    @property
    def environ(self) -> dict[str, str]:
        """Variables for a process that uses this server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def objects(self, prefix: str) -> dict[str, int]:
        """Names and sizes of the objects that begin with ``prefix``, which the names omit."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        found = {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", [])}
        return {name.removeprefix(prefix): size for name, size in found.items()}

    def checkpoints(self, run: str) -> set[str]:
        """Names of a run's complete checkpoints."""
        return {m[1] for name in self.objects(f"{run}/") if (m := re.fullmatch(r"([^/]+)/COMPLETE", name))}

    def read(self, name: str) -> bytes:
        return self.client.get_object(Bucket=BUCKET, Key=name)["Body"].read()


@contextmanager
def serve() -> Iterator[Server]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    _, port = moto.get_host_and_port()
    server = Server(port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.client.create_bucket(Bucket=BUCKET)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        moto.stop()

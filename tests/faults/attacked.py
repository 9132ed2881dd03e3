"""A server to attack, and its clients."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from helpers.processes import Forked
from helpers.sealing import seal
from helpers.talker import make_talker

LENGTH, ROWS, QUEUE = 8192, 4, 8
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WATCH = """
import http.client, sys, time
while True:
    begin, connection = time.monotonic(), http.client.HTTPConnection(sys.argv[1], timeout=60)
    try:
        connection.request("GET", "/health")
        is_right = connection.getresponse().status == 200
    except OSError:
        is_right = False
    connection.close()
    print(time.monotonic() - begin if is_right else 60, flush=True)
    time.sleep(0.05)
"""


class Server:
    """`toolkit serve` of a model whose chats are known, and whose completions never end before max_tokens."""

    def __init__(self, folder: Path, shutdown_timeout: int = 5) -> None:
        make_talker(folder, block_size=LENGTH)
        (folder / "generation_config.json").write_text('{"eos_token_id": []}')
        options = {"port": 0, "max_concurrent_requests": ROWS, "max_queue": QUEUE, "max_seq_length": LENGTH}
        options |= {"max_new_tokens": LENGTH, "shutdown_timeout": shutdown_timeout, "temperature": 0}
        self.name = str(seal(folder))
        self.process = Forked(["serve", self.name, *(f"--{name}={value}" for name, value in options.items())])
        line = self.process.stderr.readline()
        assert line.startswith("http://"), line + self.process.stderr.read()
        self.address = urlsplit(line.split()[0]).netloc
        self.memory = self.peak_mib()

    def peak_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def send(self, path: str, content: bytes | None = None) -> tuple[int, bytes]:
        """Return the status and the answer; 0 if the server closes the connection while it is sent."""
        connection = HTTPConnection(self.address, timeout=120)
        try:
            method = "GET" if content is None else "POST"
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        except (ConnectionError, HTTPException):
            return 0, b""
        finally:
            connection.close()

    def post(self, path: str, **fields: object) -> tuple[int, bytes]:
        return self.send(path, json.dumps({"model": self.name} | fields).encode())

    def chat(self, question: str) -> tuple[int, str]:
        status, answer = self.post(CHAT, messages=[{"role": "user", "content": question}])
        return status, json.loads(answer)["choices"][0]["message"]["content"] if status == 200 else ""

    def open(self, content: bytes, buffer: int | None = None) -> socket.socket:
        """Send bytes on a new connection, with a receive buffer of so many bytes."""
        client = socket.socket()
        client.settimeout(60)
        if buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        host, port = self.address.split(":")
        client.connect((host, int(port)))
        client.sendall(content)
        return client

    def request(self, path: str, **fields: object) -> bytes:
        content = json.dumps({"model": self.name} | fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self.address}\r\nContent-Type: application/json\r\n"
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content

    def wait_for(self, seconds: float, **counts: int) -> None:
        """Wait until as many requests run or wait."""
        deadline = time.monotonic() + seconds
        while not counts.items() <= (health := json.loads(self.send("/health")[1])).items():
            assert time.monotonic() < deadline, f"not {counts} after {seconds:.0f} s: {health}"
            time.sleep(0.1)

    @contextmanager
    def watched(self) -> Iterator[list[float]]:
        """Ask /health all the time, from another process; the seconds of each answer, at the end."""
        seconds: list[float] = []
        watch = subprocess.Popen([sys.executable, "-c", WATCH, self.address], stdout=subprocess.PIPE, text=True)
        try:
            seconds.append(float(watch.stdout.readline()))  # it has started, on a busy machine too
            yield seconds
        finally:
            watch.terminate()
            seconds += map(float, watch.communicate()[0].split())

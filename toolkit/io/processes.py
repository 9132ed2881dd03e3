"""Processes that answer requests, one line of JSON each, and the cores for them."""

import json
import os
import subprocess
import sys
from typing import IO, cast


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_server(module: str, stderr: int) -> subprocess.Popen[bytes]:
    """Start a process that calls ``serve()`` of a module, which reads requests from stdin and answers on stdout.

    Args:
        stderr: As of :class:`subprocess.Popen`.
    """
    code = f"import json, sys; sys.path = json.loads(sys.argv[1]); from {module} import serve; serve()"
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps([*map(str, sys.path)])],  # which may have changed since the start
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,  # Ctrl-C must not reach it
    )


def exchange(process: subprocess.Popen[bytes], line: bytes, limit: int = -1) -> bytes:
    """Send a request and return the answer, at most ``limit`` bytes; without a line end, the process has ended."""
    stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)  # both are pipes
    try:
        stdin.write(line)
        stdin.flush()
    except BrokenPipeError:
        return b""
    return stdout.readline(limit)

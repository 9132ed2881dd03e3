"""A process in which templates are rendered: it has the limits on time and memory that jinja's sandbox lacks.

One process serves all templates of this one. It starts with the first request, ends after a while without any or with
this process, and starts again when it is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

from toolkit.errors import UserError

CPU_SECONDS = 10  # for one request
MEMORY = 1 << 30  # bytes
# With the module search path of this process, which may have been changed since it started.
_CODE = "import json, sys; sys.path = json.loads(sys.argv[1]); from toolkit.data.template_sandbox import serve; serve()"
_lock = threading.Lock()
_running: tuple[int, subprocess.Popen] | None = None  # after the id of the process that started it


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of :func:`toolkit.data.template_sandbox.serve`: ``{"text": ...}`` or ``{"error": ...}``.

    What is not of a JSON type is replaced by the name of its type in angle brackets, as transformers does.

    Raises:
        RecursionError: the request is nested too deeply.
        UserError: the process cannot be started.
    """
    request = request | {"cpu_seconds": CPU_SECONDS, "memory": MEMORY}
    line = json.dumps(request, default=lambda value: f"<{type(value).__name__}>").encode() + b"\n"
    with _lock:
        for _ in range(2):
            process = _start()
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            except BaseException:  # such as Ctrl-C: the answer must not be taken for that to the next request
                process.kill()
                process.wait()
                raise
            if answer.endswith(b"\n"):
                return json.loads(answer)
            with contextlib.suppress(OSError):
                process.communicate()  # closes the pipes
            if process.returncode:  # 0: it has waited too long for this request
                break
    return {"error": _describe_end(process.returncode)}


def _start() -> subprocess.Popen:
    """The running process, or a new one."""
    global _running
    if _running is None or _running[0] != os.getpid() or _running[1].poll() is not None:
        command = [sys.executable, "-c", _CODE, json.dumps([str(path) for path in sys.path])]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:  # in a session of its own: Ctrl-C is for this process
            process = subprocess.Popen(command, start_new_session=True, **pipes)
        except OSError as error:
            raise UserError(f"chat template: its process cannot be started: {error.strerror or error}") from error
        _running = os.getpid(), process
    return _running[1]


def _describe_end(code: int) -> str:
    if code == -signal.SIGXCPU:
        return f"the template takes more than {CPU_SECONDS} s to show the messages"
    return f"the template ends the process that renders it (exit code {code})"

"""Render templates in a subprocess with CPU time and memory limits, which jinja's sandbox lacks.

One subprocess serves all templates. It starts on the first request, exits when idle or when this process exits, and
restarts on demand.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
from typing import Any

from toolkit.errors import UserError
from toolkit.io.processes import exchange, start_server

CPU_SECONDS = 10  # per request
MEMORY = 1 << 30  # bytes
_lock = threading.Lock()
_running: tuple[int, subprocess.Popen[bytes]] | None = None  # (parent pid, subprocess)


def send_request(request: dict[str, Any]) -> dict[str, Any]:
    """Send a request to :func:`toolkit.data.chat.sandbox.serve`; return ``{"text": ...}`` or ``{"error": ...}``.

    Values that are not JSON serializable become the type name in angle brackets, as in transformers.

    Raises:
        RecursionError: The request is nested too deeply.
    """
    request = request | {"cpu_seconds": CPU_SECONDS, "memory": MEMORY}
    line = json.dumps(request, default=lambda value: f"<{type(value).__name__}>").encode() + b"\n"
    with _lock:
        for _ in range(2):
            process = _start()
            try:
                response = exchange(process, line)
            except BaseException:  # such as Ctrl-C; the next request must not read this response
                process.kill()
                process.wait()
                raise
            if response.endswith(b"\n"):
                return json.loads(response)
            with contextlib.suppress(OSError):
                process.communicate()  # closes the pipes
            if process.returncode:  # 0: exited when idle
                break
    if process.returncode == -signal.SIGXCPU:
        return {"error": f"the template takes more than {CPU_SECONDS} s to render the messages"}
    return {"error": f"the template crashed the rendering process (exit code {process.returncode})"}


def _start() -> subprocess.Popen[bytes]:
    global _running
    if _running is None or _running[0] != os.getpid() or _running[1].poll() is not None:
        try:
            process = start_server("toolkit.data.chat.sandbox", subprocess.DEVNULL)
        except OSError as error:
            raise UserError(f"chat template: cannot start the rendering process: {error.strerror or error}") from error
        _running = os.getpid(), process
    return _running[1]

"""Anonymous memory of a process, without mapped files. For scripts in a separate process."""

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def anonymous() -> int:
    """Return the bytes of anonymous memory in use."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024


def rise(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[int, int, Any]:
    """Call ``function``; return the peak increase of memory, the increase after it (bytes), and its result."""
    ctypes.CDLL(None).malloc_trim(0)  # otherwise memory freed by imports would hide a part
    before, peak, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.0005):
            peak[0] = max(peak[0], anonymous() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = function(*args, **options)
    finally:
        done.set()
        watcher.join()
    after = anonymous() - before
    return max(peak[0], after), after, result


def with_path() -> dict[str, str]:
    """Return the environment of a script that imports this module."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}

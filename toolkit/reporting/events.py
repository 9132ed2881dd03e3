"""``logs/events.jsonl``: what a report needs and metrics.csv cannot hold: launches, samples, warnings, the end."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from toolkit import __version__
from toolkit.extension import extension_versions
from toolkit.io.safe_parse import parse_json

EVENTS = "logs/events.jsonl"
_PACKAGES = ("torch", "lightning", "litdata", "tokenizers", "transformers", "bitsandbytes", "numpy")
_MAX_LINE, _MAX_BYTES = 2**20, 2**26


class EventLog:
    """Appends events to a file, one JSON object per line. A failure to write is ignored: training must not stop."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, kind: str, **values: Any) -> None:
        line = json.dumps({"kind": kind, "time": round(time.time(), 1)} | values, default=str)
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab") as file:
                torn = file.tell() and not _ends_with_newline(self.path)
                file.write(b"\n" * bool(torn) + line.encode() + b"\n")


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def parse_events(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events of a file. Skip torn and foreign lines."""
    for line in content[:_MAX_BYTES].split(b"\n"):
        with suppress(ValueError):
            event = parse_json(line) if 0 < len(line) <= _MAX_LINE else None
            if isinstance(event, dict) and isinstance(event.get("kind"), str):
                yield event


def environment() -> dict[str, str]:
    """Return versions and machine of this process, without names of hosts, users or paths."""
    facts = {"toolkit": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    return (
        facts | extension_versions() | {"system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"}
    )

"""``logs/events.jsonl``: what a report needs and metrics.csv cannot hold: launches, samples, warnings, the end."""

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from toolkit.extension import extension_versions
from toolkit.io.safe_parse import no_follow, parse_json
from toolkit.version import __version__

EVENTS, REPORT = "logs/events.jsonl", "report.html"
_PACKAGES = (
    "torch", "lightning", "litdata", "jsonargparse", "transformers", "peft", "bitsandbytes", "torchao", "tokenizers",
    "safetensors", "huggingface_hub", "numpy",
)  # fmt: skip
_MAX_LINE = 2**20  # bytes


def write_event(out_dir: Path, kind: str, **values: Any) -> None:
    """Append an event to the file of a run, as one line of JSON. A failure is ignored: training must not stop."""
    line = json.dumps({"kind": kind, "time": round(time.time(), 1)} | values, default=str)
    with suppress(OSError):
        (out_dir / EVENTS).parent.mkdir(parents=True, exist_ok=True)
        with open(out_dir / EVENTS, "a+b", opener=no_follow) as file:
            file.seek(max(0, file.tell() - 1))
            is_torn = file.read(1) not in (b"", b"\n")  # a kill or a full disk has cut the last line
            file.write(b"\n" * is_torn + line.encode() + b"\n")


def parse_events(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events of a file. Skip torn and foreign lines."""
    for line in content.split(b"\n"):
        with suppress(ValueError):
            event = parse_json(line) if 0 < len(line) <= _MAX_LINE else None
            if isinstance(event, dict) and isinstance(event.get("kind"), str):
                yield event


@cache  # reading the metadata of twelve packages takes as long as a small step
def package_versions() -> dict[str, str]:
    """Return the versions of toolkit, of Python and of the packages that affect a run."""
    versions = {"toolkit": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def environment() -> dict[str, str]:
    """Return versions and machine of this process, without names of hosts, users or paths."""
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return package_versions() | extension_versions() | {"system": system}

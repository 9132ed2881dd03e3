"""Folders of prepared data: each appears whole or not at all, and what a killed process left is removed (law S5)."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "manifest.json"
DAMAGE = (ValueError, TypeError, KeyError, OSError)  # what reading a damaged folder can raise
HEARTBEAT = 10.0  # seconds between two lines while long data is read


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/toolkit/data``, or the same under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "toolkit" / "data"


def choose_cache_dir(value: str | None) -> Path:
    """The folder of ``--data.cache_dir``, or the default one."""
    return Path(value).expanduser() if value else default_cache_dir()


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Give a temporary folder beside ``folder``, to be published; what is still there at the end is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{_unfinished_prefix()}{os.getpid()}-", dir=folder.parent))
    temporary.chmod(0o755)  # mkdtemp's folder is private, a cache may be shared
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, folder: Path, is_whole: Callable[[], bool]) -> None:
    """Rename ``temporary`` to ``folder``, unless another process was quicker: then ``folder`` ``is_whole``.

    Raises:
        OSError: if it cannot be renamed.
    """
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.exists():
            raise
        if is_whole():
            return  # another process was quicker; its data is the same
        damaged = temporary.with_name(f"{temporary.name}-damaged")
        os.rename(folder, damaged)
        os.rename(temporary, folder)
        shutil.rmtree(damaged, ignore_errors=True)


def clean_up(cache_dir: Path) -> None:
    """Remove what killed preparations on this machine have left behind."""
    prefix = _unfinished_prefix()
    for leftover in cache_dir.glob(f"{prefix}*"):
        pid = leftover.name[len(prefix) :].split("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True)


def _unfinished_prefix() -> str:
    return f".unfinished-{socket.gethostname()}-"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True

"""Names of temporary files and folders, which tell whose they are, and the removal of those whose process died."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

TMP = ".tmp-"  # every temporary name begins with it
_TOOLKIT = f"{TMP}toolkit-"  # others may have files of that kind beside
_ABANDONED = 24 * 3600  # seconds without a change, after which a process on another machine is taken for dead


def temporary_path(path: Path) -> Path:
    """Return the name beside ``path`` for what this process writes until it is complete and renamed."""
    return path.with_name(f"{temporary_prefix()}{path.name}")


def temporary_prefix() -> str:
    """Return what the names of this process's temporary files begin with."""
    return f"{_machine()}{os.getpid()}-"


def sweep(folder: Path) -> None:
    """Remove what processes that died left in ``folder``, and never what a live one writes there.

    Of a process on another machine, or in another container, only the age of its files can tell.
    """
    for path in folder.glob(f"{_TOOLKIT}*"):
        if path.name.startswith(_machine()):
            pid = path.name.removeprefix(_machine()).partition("-")[0]
            is_dead = pid.isdigit() and not _is_alive(int(pid))
        else:
            is_dead = time.time() - _last_change(path) > _ABANDONED
        if is_dead:
            remove([path])


def remove(paths: Iterable[Path]) -> None:
    """Delete files and folders, as far as that is possible; of a symbolic link only the link."""
    for path in paths:
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


@functools.cache
def _machine() -> str:
    """Machines by name, and containers on it, which have process ids of their own."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"{_TOOLKIT}{socket.gethostname()}-{namespace:x}-"


def _last_change(path: Path) -> float:
    """When anything in a file or folder last changed, in seconds since 1970; now where that cannot be seen."""
    try:
        inside = [] if path.is_symlink() else path.rglob("*")
        return max(one.lstat().st_mtime for one in (path, *inside))
    except OSError:
        return time.time()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True

"""Locks of files, which end with the process that holds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def lock(file: IO[Any], wait: bool = True) -> bool | None:
    """Lock an open file until it is closed.

    Returns:
        False if another process holds it; None where there are no locks (Windows, some network file systems).
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


@contextmanager
def file_lock(path: Path, wait: bool = True) -> Iterator[IO[str] | None]:
    """Hold a lock of the processes that share a folder. Yield its file, None if another process holds it.

    Where there are no locks, it counts as held: work may be done twice.
    """
    with open(path, "a") as file:
        yield None if lock(file, wait) is False else file

"""File locks. They are released when the process ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from toolkit.io.safe_parse import no_follow


def lock(file: IO[Any], wait: bool = True) -> bool | None:
    """Lock an open file until it is closed.

    Returns:
        True if locked, False if another process holds the lock, None without lock support (some network file systems).
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def file_lock(path: Path, wait: bool = True) -> Iterator[IO[str] | None]:
    """Hold a lock file. Yield the open file, or None if another process holds the lock.

    Without lock support, the lock counts as acquired, and two processes may do the same work.
    """
    with open(path, "a", opener=no_follow) as file:
        yield None if lock(file, wait) is False else file

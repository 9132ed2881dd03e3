"""The lock of a run's folder: only one process writes checkpoints there at a time (S1)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from toolkit.errors import UserError

LOCK = ".lock"


@contextmanager
def exclusive(out_dir: Path) -> Iterator[None]:
    """Keep a second process from running in the same folder, as long as this lasts.

    The lock is the system's and ends with the process, however it ends. Where there are none (Windows, some network
    file systems), nothing is locked.

    Raises:
        UserError: another process runs there, or the folder cannot be written.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        file = _open_lock(out_dir, os.O_CREAT)
    except OSError as error:
        is_link = os.path.islink(out_dir / LOCK)
        fix = f"its {LOCK} is a symbolic link; delete it" if is_link else "give a folder that can be written"
        raise UserError(f"--out_dir {out_dir}: {error.strerror or error}; {fix}") from error
    with file:
        _locks.add(file)
        try:
            if _lock(file, out_dir):
                file.truncate(0)
                file.write(f"{os.getpid()}\n")
                file.flush()
            yield
        finally:
            _locks.discard(file)


_locks: set[IO[str]] = set()
"""The open lock files of this process."""


def _close_locks() -> None:
    for file in _locks:
        file.close()
    _locks.clear()


if hasattr(os, "register_at_fork"):  # a lock lasts as long as any process has the file open: not in data workers
    os.register_at_fork(after_in_child=_close_locks)


def is_removed(out_dir: Path) -> bool:
    """Whether a folder that this process has locked was removed since.

    Raises:
        UserError: another run has begun there.
    """
    for file in _locks:
        if Path(file.name) == out_dir / LOCK:
            file.seek(0)
            try:
                if (out_dir / LOCK).read_text() != file.read():
                    raise UserError(f"--out_dir {out_dir}: was removed, and another run has begun there")
            except FileNotFoundError:
                return True
    return False


def _open_lock(out_dir: Path, flags: int = 0) -> IO[str]:
    """Open the lock file itself: a stranger's may be a link to a file that would then be overwritten."""
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return open(out_dir / LOCK, "r+", opener=lambda path, own: os.open(path, own | flags, 0o666))


def _lock(file: IO[str], out_dir: Path) -> bool:
    """Lock the file until it is closed, and return whether that can be done here."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "?"
        raise UserError(
            f"--out_dir {out_dir}: process {owner} is running there; wait for it, or give another"
        ) from None
    except (ImportError, OSError):
        return False
    return True


def require_free(out_dir: Path) -> None:
    """Make sure that nobody runs there at the moment, before anything is read that may be gone in the next.

    Raises:
        UserError: another process does.
    """
    with suppress(OSError), _open_lock(out_dir) as file:  # no such file: nobody has ever run there
        _lock(file, out_dir)

"""Lock a run's folder, so that only one process at a time writes checkpoints there (S1)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from toolkit.errors import UserError
from toolkit.io.locks import lock
from toolkit.io.safe_parse import no_follow, read_bounded

LOCK = ".lock"


@contextmanager
def exclusive_lock(out_dir: Path) -> Iterator[None]:
    """Hold an exclusive lock on a run's folder.

    The operating system releases the lock when the process ends. Has no effect if locks are not supported (some
    network file systems).
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
                try:
                    os.ftruncate(file.fileno(), 0)
                    os.write(file.fileno(), f"{os.getpid()}\n".encode())  # closing would write a full buffer again
                except OSError as error:  # a full disk
                    raise UserError(f"--out_dir {out_dir}: cannot write {LOCK}: {error.strerror or error}") from error
            yield
        finally:
            _locks.discard(file)


_locks: set[IO[str]] = set()
"""Lock files that this process holds open."""


def _close_locks() -> None:
    for file in _locks:
        file.close()
    _locks.clear()


# a forked data worker that kept the file open would keep the lock
os.register_at_fork(after_in_child=_close_locks)


def detect_lost_lock(out_dir: Path) -> bool:
    """Return True if this process's lock file was deleted. Raise UserError if another run has replaced it."""
    for file in _locks:
        if Path(file.name) == out_dir / LOCK:
            file.seek(0)
            try:
                if read_bounded(out_dir / LOCK, "log") != file.read().encode():
                    raise UserError(f"--out_dir {out_dir}: was deleted, and another run has started there")
            except FileNotFoundError:
                return True
    return False


def _open_lock(out_dir: Path, flags: int = 0) -> IO[str]:
    """Open the lock file without following a symbolic link, whose target would be overwritten."""
    return open(out_dir / LOCK, "r+", opener=lambda path, default: no_follow(path, default | flags))


def _lock(file: IO[str], out_dir: Path) -> bool:
    """Lock the file until it is closed. Return False if locks are not supported."""
    is_locked = lock(file, wait=False)
    if is_locked is False:
        file.seek(0)
        owner = file.read(20).strip() or "?"
        raise UserError(f"--out_dir {out_dir}: process {owner} is running there; wait for it, or give another folder")
    return is_locked is True


def require_unlocked(out_dir: Path) -> None:
    """Raise UserError if another process runs in the folder, because it could delete files being read."""
    with suppress(OSError), _open_lock(out_dir) as file:  # no such file: no run has used the folder
        _lock(file, out_dir)

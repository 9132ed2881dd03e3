"""Atomic writes of small files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from toolkit.errors import UserError
from toolkit.leftovers import sweep, temporary_path

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def file_error(path: Path, error: OSError) -> UserError:
    """Return a one-line error for a failed operation on ``path``, with a fix."""
    hint = "free some space" if error.errno in _NO_SPACE else "check the path and its permissions"
    return UserError(f"{path}: {error.strerror or error}; {hint}")


def write_atomic(path: Path, content: bytes) -> None:
    """Atomically replace ``path`` with ``content``; readers and crashes see either the old or the new file.

    Raises:
        OSError: The folder is not writable or the disk is full; the old file is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    temporary = temporary_path(path)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _fsync_folder(folder: Path) -> None:
    """Make the rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

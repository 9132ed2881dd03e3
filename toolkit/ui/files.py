"""Small files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from toolkit.errors import UserError
from toolkit.leftovers import sweep, temporary_path

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def file_error(path: Path, error: OSError) -> UserError:
    """Return the one line that says what the system refused to do with ``path``, and the mend."""
    hint = "free some space" if error.errno in _NO_SPACE else "check the path and its permissions"
    return UserError(f"{path}: {error.strerror or error}; {hint}")


def write_whole(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``; a reader, or a crash at any instant, sees the old file or the new one.

    Raises:
        OSError: The folder cannot be written, or the disk is full; the old file is still there.
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
    """Make the rename itself last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

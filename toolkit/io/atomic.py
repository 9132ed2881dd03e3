"""Atomic writes of small files."""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.io.tempfiles import sweep, temporary_path

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def file_error(path: Path, error: OSError) -> UserError:
    """Return a one-line error for a failed operation on ``path``, with a fix."""
    hint = "free some space" if error.errno in NO_SPACE else "check the path and its permissions"
    if error.errno == errno.ELOOP:
        return UserError(f"{path}: is a symbolic link, which is not followed; replace it with a file")
    return UserError(f"{path}: {error.strerror or error}; {hint}")


def disk_full_reason(error: BaseException | None) -> str | None:
    """Return the reason if a full or failing disk, a quota or a file size limit caused the error, else None."""
    while error is not None and not isinstance(error, UserError):
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return error.strerror
        # torch's zip writer, given a path, loses the errno and reports a short write like this.
        if isinstance(error, RuntimeError) and re.search(r"unexpected pos|PytorchStreamWriter", str(error)):
            reason = disk_full_reason(error.__cause__ or error.__context__)
            return reason or f"{os.strerror(errno.ENOSPC)}, or the disk failed"
        error = error.__cause__ or error.__context__
    return None


def write_atomic(path: Path, content: bytes) -> None:
    """Atomically replace ``path`` with ``content``. After a crash, the file is either old or new.

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
        sync(path.parent)  # makes the rename durable
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Atomically write a JSON file of a cache, without fsync. A power failure may lose the file."""
    temporary = temporary_path(path)
    try:
        temporary.write_text(json.dumps(value), encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Create a file with the same content. Neither may be changed in place afterwards."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def sync(path: Path) -> None:
    """Sync a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync a folder tree to disk. After a rename, it survives a power failure."""
    for root, _, files in os.walk(folder):
        for name in files:
            sync(Path(root) / name)
        sync(Path(root))

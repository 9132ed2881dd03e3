"""S4 no-code-from-files: check the contents of torch's zip files before :func:`torch.load` reads them."""

import io
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import IO, Any

from toolkit.errors import UserError

DAMAGED = "the file is damaged or truncated; copy or download it again"
ZIP_MAGIC = b"PK\x03\x04"
BinaryFile = IO[bytes] | io.RawIOBase


def zip_entries(file: BinaryFile, path: Path) -> list[zipfile.ZipInfo]:
    """Return the directory of a zip file."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.infolist()
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise UserError(f"{path}: {DAMAGED}") from error


def require_uncompressed_zip(file: BinaryFile, path: Path) -> None:
    """Reject zip bombs (torch.save does not compress) and TorchScript programs."""
    entries, size = zip_entries(file, path), file.seek(0, os.SEEK_END)
    if any(e.filename.endswith("/constants.pkl") for e in entries):
        raise UserError(f"{path}: refused: it holds a TorchScript program; only files of tensors are read")
    is_stored = all(e.compress_type == zipfile.ZIP_STORED and e.file_size == e.compress_size for e in entries)
    if not is_stored or sum(e.file_size for e in entries) > size:
        raise UserError(f"{path}: refused: its contents are compressed, which torch.save does not do; save it again")


def describe_load_error(error: Exception) -> str:
    """Return a one-line reason for a failed ``torch.load``."""
    text = str(error)
    named = re.search(r"GLOBAL ([\w.]+)", text)
    if isinstance(error, pickle.UnpicklingError):
        what = f"{named[1]}, which could run code" if named else "more than tensors and could run code"
        return f"refused: it holds {what}; only files of tensors are read"
    return DAMAGED


class FileSlice(io.RawIOBase):
    """A read-only view of a part of a file. torch's version fails to seek from the end."""

    def __init__(self, file: BinaryFile, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        bytes_left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(min(len(buffer), bytes_left)) or b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

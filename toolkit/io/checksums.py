"""Compute and verify file checksums in several threads.

CRC-32 is the fastest checksum in the standard library. It detects flipped bits and zeroed sectors, but not intentional
changes.
"""

import errno
import os
import stat
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

CHUNK = 64 * 1024 * 1024  # bytes per checksum and per thread task
_READ_SIZE = 1024 * 1024  # bytes per read; fits into a core's cache
_THREADS = min(16, os.cpu_count() or 1)  # zlib releases the GIL


class Checksum(TypedDict):
    """Size and checksums of one file, JSON-serializable."""

    size: int
    """Size in bytes."""
    crc32: list[str]
    """CRC-32 of each 64 MiB chunk, in hexadecimal."""


Checksums = dict[str, Checksum]  # by file name


def checksum_files(folder: Path, names: Iterable[str]) -> Checksums:
    """Compute {name: checksum} for files in a folder. Names are relative paths."""
    names = list(names)
    sizes = {name: _size(folder / name) for name in names}
    chunks = [(name, start) for name in names for start in range(0, sizes[name], CHUNK)]
    files = {name: Checksum(size=sizes[name], crc32=[]) for name in names}
    with ThreadPoolExecutor(_THREADS) as pool:
        values = pool.map(lambda chunk: _crc32(folder / chunk[0], chunk[1]), chunks)
        for (name, _), value in zip(chunks, values, strict=True):
            files[name]["crc32"].append(value)
    return files


def find_damage(folder: Path, files: Mapping[str, Checksum]) -> dict[str, str]:
    """Verify files against :func:`checksum_files`. Return {name: reason} for damaged files.

    Checksums read from a file must first pass :func:`check_entries`.
    """

    def find_problem(name: str, index: int, crc32: str | None) -> str | None:
        path, size, start = folder / name, files[name]["size"], index * CHUNK
        try:
            if (actual := _size(path)) != size:
                return f"{actual:,} bytes instead of {size:,}"
            is_same = crc32 is None or _crc32(path, start) == crc32
            return None if is_same else f"checksum mismatch (after byte {start:,})"
        except OSError as error:
            return "missing" if isinstance(error, FileNotFoundError) else error.strerror or str(error)

    chunks = [(name, i, crc32) for name, entry in files.items() for i, crc32 in enumerate(entry["crc32"] or [None])]
    with ThreadPoolExecutor(_THREADS) as pool:
        problems = list(pool.map(lambda chunk: find_problem(*chunk), chunks))
    damaged: dict[str, str] = {}
    for (name, *_), why in zip(chunks, problems, strict=True):
        if why is not None:
            damaged.setdefault(name, why)
    return damaged


def check_entries(files: Any) -> Checksums:
    """Validate names and checksums read from a file, and return them.

    Raises:
        ValueError: An entry is malformed, or a name points outside the folder.
    """
    if not isinstance(files, dict):
        raise ValueError("files must be a mapping of names to checksums")
    for name, entry in files.items():
        path = PurePosixPath(name)
        if not name.isprintable() or not name or path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{name!r:.100} is not a path inside the folder")
        size, values = (entry.get("size"), entry.get("crc32")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or size < 0 or not isinstance(values, list) or len(values) != -(-size // CHUNK):
            raise ValueError(f"{name!r:.100}: must have a size and one crc32 for each {CHUNK:,} bytes")
    return files


def _size(path: Path) -> int:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # reading a pipe could block forever
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return status.st_size


def _crc32(path: Path, start: int) -> str:
    """Return the CRC-32 of the chunk at byte ``start``, in hexadecimal."""
    value, remaining, buffer = 0, CHUNK, memoryview(bytearray(_READ_SIZE))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while remaining and (n := file.readinto(buffer[: min(remaining, _READ_SIZE)])):
            value, remaining = zlib.crc32(buffer[:n], value), remaining - n
    return f"{value:08x}"

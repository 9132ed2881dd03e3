"""Compute and verify file checksums in several threads.

CRC-32 is the fastest checksum in the standard library. It detects flipped bits and zeroed sectors, but not intentional
changes.
"""

import errno
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypedDict

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


class Chunk(NamedTuple):
    """A chunk of a file: its first byte, its end and its CRC-32."""

    name: str
    start: int
    stop: int
    crc32: str

    @property
    def mismatch(self) -> str:
        return f"checksum mismatch (after byte {self.start:,})"


def iterate_chunks(files: Mapping[str, Checksum]) -> Iterator[Chunk]:
    """Yield the chunks of files. An empty file has one."""
    for name, entry in files.items():
        for i, crc32 in enumerate(entry["crc32"] or [crc32_of(b"")]):
            yield Chunk(name, i * CHUNK, min(entry["size"], (i + 1) * CHUNK), crc32)


def crc32_of(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


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

    def find_problem(chunk: Chunk) -> str | None:
        path, size = folder / chunk.name, files[chunk.name]["size"]
        try:
            if (actual := _size(path)) != size:
                return f"{actual:,} bytes instead of {size:,}"
            return None if _crc32(path, chunk.start) == chunk.crc32 else chunk.mismatch
        except OSError as error:
            return "missing" if isinstance(error, FileNotFoundError) else error.strerror or str(error)

    chunks = list(iterate_chunks(files))
    with ThreadPoolExecutor(_THREADS) as pool:
        problems = list(pool.map(find_problem, chunks))
    damaged: dict[str, str] = {}
    for chunk, why in zip(chunks, problems, strict=True):
        if why is not None:
            damaged.setdefault(chunk.name, why)
    return damaged


def check_entries(files: Any) -> Checksums:
    """Validate names and checksums read from a file, and return them.

    Raises:
        ValueError: An entry is malformed, or a name points outside the folder.
    """
    if not isinstance(files, dict):
        raise ValueError("files must be a mapping of names to checksums")
    for name, entry in files.items():
        if not (name.isprintable() and name and is_inside(name)):
            raise ValueError(f"{name!r:.100} is not a path inside the folder")
        size, values = (entry.get("size"), entry.get("crc32")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or size < 0 or not isinstance(values, list) or len(values) != -(-size // CHUNK):
            raise ValueError(f"{name!r:.100}: must have a size and one crc32 for each {CHUNK:,} bytes")
    return files


def is_inside(name: str) -> bool:
    """Whether a name read from a file is a path inside the file's folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


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

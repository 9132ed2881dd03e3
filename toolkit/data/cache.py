"""Cache prepared data in folders that are published atomically (S5) and verified before reading (S7).

Temporary folders of killed processes are removed.
"""

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from toolkit.data.base import Report, Values
from toolkit.errors import DataError, UserError
from toolkit.io.checksums import Checksums, check_entries, checksum_files, find_damage
from toolkit.io.paths import user_cache
from toolkit.io.tempfiles import sweep, temporary_prefix

T = TypeVar("T")

MANIFEST = "manifest.json"
CHECKSUMS = "checksums.json"
CRC_FILE = "crc32.npy"  # CRC-32 checksums of a token array's chunks
DAMAGE_ERRORS = (ValueError, TypeError, KeyError, OSError, EOFError, DataError)  # raised when a damaged folder is read
HEARTBEAT = 10.0  # seconds between progress lines
ANNOUNCE_BYTES = 1 << 31  # announce reads of at least this size: they take seconds
_LARGE_BYTES = 1 << 26  # bytes; tokens of larger folders are verified when read
_reads_only = ContextVar("reads_only", default=False)


class NotPreparedError(Exception):
    """Data would have to be prepared or downloaded, see :func:`read_only`."""


@contextmanager
def read_only() -> Iterator[None]:
    """Let data modules only read prepared data: they raise NotPreparedError instead of preparing it."""
    token = _reads_only.set(True)
    try:
        yield
    finally:
        _reads_only.reset(token)


def require_preparation() -> None:
    """Raise NotPreparedError in :func:`read_only`. Called before data is prepared, downloaded or listed remotely."""
    if _reads_only.get():
        raise NotPreparedError


def throttle(report: Report) -> Report:
    """Return a function that reports a line if the last one, or this call, is HEARTBEAT seconds ago."""
    reported_at = time.monotonic()

    def report_if_due(line: str) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at > HEARTBEAT:
            reported_at = time.monotonic()
            report(line)

    return report_if_due


def choose_cache_dir(value: str | None = None) -> Path:
    """Return the ``--data.cache_dir`` folder, by default ``$XDG_CACHE_HOME/toolkit/data``, in ``~/.cache``."""
    return Path(value).expanduser() if value else user_cache() / "data"


@contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder next to ``folder`` for :func:`publish`. Remove it on exit if unpublished."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f"{temporary_prefix()}{secrets.token_hex(4)}"
    temporary.mkdir()  # mkdtemp creates private folders, but a cache may be shared
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, folder: Path, read: Callable[[], Any] = lambda: None) -> None:
    """Write checksums, then rename ``temporary`` to ``folder``, unless another process published first.

    An existing ``folder`` is replaced if it is damaged, see :func:`find_prepared`.
    """
    files = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file())
    (temporary / CHECKSUMS).write_text(json.dumps({"files": checksum_files(temporary, files)}), encoding="utf-8")
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.exists():
            raise
        if not find_prepared(folder, read)[1]:
            return  # another process published the same data first
        damaged = temporary.with_name(f"{temporary.name}-damaged")
        os.rename(folder, damaged)
        os.rename(temporary, folder)
        shutil.rmtree(damaged, ignore_errors=True)


def load_or_prepare(
    folder: Path,
    what: str,
    read: Callable[[], T],
    make: Callable[[Path], None],
    report: Report,
) -> tuple[T, bool]:
    """Read a prepared folder, or prepare it first. Return ``read()`` and whether it was a cache hit.

    Args:
        folder: The prepared folder in the cache, named after the data key.
        what: Name of the prepared data, for the log.
        read: Reads ``folder``; raises one of DAMAGE_ERRORS if it is damaged.
        make: Writes the data into an empty folder.
    """
    try:
        prepared, reason = find_prepared(folder, read)
        if prepared is not None:
            return prepared, True
        require_preparation()
        report(f"Data: preparing {folder} ({reason}): {what}")
        sweep(folder.parent)
        with staging_folder(folder) as temporary:
            make(temporary)
            publish(temporary, folder, read)
        return read(), False
    except OSError as error:
        raise UserError(f"--data.cache_dir {folder.parent}: cannot be used: {error.strerror or error}") from error


def find_prepared(folder: Path, read: Callable[[], T]) -> tuple[T | None, str]:
    """Verify a prepared folder and return ``read()``, or None and the reason for the cache miss."""
    if not folder.exists():
        return None, "not prepared yet"
    try:
        verify(folder)
        return read(), ""
    except DAMAGE_ERRORS as error:
        return None, f"the cached data is damaged ({error!s})"


def hash_inputs(inputs: Any) -> str:
    """Return the cache key for JSON values, a hex SHA-256."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, manifest: Values) -> None:
    """Write a folder's manifest, including the data key."""
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path, key: str) -> Values:
    """Return a prepared folder's manifest.

    Raises:
        ValueError: The manifest is damaged or has a different key.
    """
    manifest = json.loads((folder / MANIFEST).read_bytes())
    if not isinstance(manifest, dict) or manifest.get("key") != key:
        raise ValueError(f"{MANIFEST} belongs to other data")
    return manifest


def read_checksums(folder: Path) -> Checksums:
    if not (folder / CHECKSUMS).is_file():
        raise ValueError(f"{CHECKSUMS} is missing")
    content = json.loads((folder / CHECKSUMS).read_bytes())
    return check_entries(content.get("files") if isinstance(content, dict) else None)


def verify(folder: Path) -> None:
    """Verify the checksums of ``folder``.

    In folders over 64 MiB, tokens are skipped for a fast start; ChunkedArray verifies them when they are read.
    """
    files = read_checksums(folder)
    if sum(entry["size"] for entry in files.values()) > _LARGE_BYTES:
        verified_later = tuple(name.removesuffix(CRC_FILE) for name in files if name.endswith(f"/{CRC_FILE}"))
        files = {n: e for n, e in files.items() if not (n.endswith(".bin") and n.startswith(verified_later))}
    if damaged := find_damage(folder, files):
        raise ValueError("; ".join(f"{name}: {why}" for name, why in damaged.items()))

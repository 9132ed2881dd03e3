"""Cache folders of prepared data: published atomically (S5) and verified before they are read (S7).

Leftovers of killed processes are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from toolkit.data.base import Report
from toolkit.errors import DataError, UserError
from toolkit.io.checksums import Checksum, check_entries, checksum_files, find_damage
from toolkit.io.locks import lock
from toolkit.io.paths import user_cache
from toolkit.io.tempfiles import remove, sweep, temporary_prefix

T = TypeVar("T")

MANIFEST = "manifest.json"
CHECKSUMS = "checksums.json"
PIECES = "crc32.npy"  # checksums of the pieces of an array of tokens
DAMAGE_ERRORS = (ValueError, TypeError, KeyError, OSError, EOFError, DataError)  # raised on reading a damaged folder
HEARTBEAT = 10.0  # seconds between progress lines
ANNOUNCE_BYTES = 1 << 31  # reading this much takes seconds
_LARGE = 1 << 32  # bytes; tokens of larger data are verified as they are read


def default_cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/toolkit/data``, with ``~/.cache`` as the default."""
    return user_cache() / "data"


def choose_cache_dir(value: str | None) -> Path:
    """Return the folder of ``--data.cache_dir``, or the default."""
    return Path(value).expanduser() if value else default_cache_dir()


@contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder next to ``folder`` to fill and :func:`publish`; remove it on exit if unpublished."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f"{temporary_prefix()}{secrets.token_hex(4)}"
    temporary.mkdir()  # not mkdtemp, whose folders are private: a cache may be shared
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, folder: Path, is_intact: Callable[[], bool]) -> None:
    """Write checksums, then rename ``temporary`` to ``folder``, unless another process published first.

    If ``folder`` exists and ``is_intact()``, it is kept; a damaged one is replaced.
    """
    files = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file())
    (temporary / CHECKSUMS).write_text(json.dumps({"files": checksum_files(temporary, files)}), encoding="utf-8")
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.exists():
            raise
        if is_intact():
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
    """Return ``read``'s result for a prepared folder, and whether it was in the cache.

    Args:
        folder: In the cache folder, named after the key of the data.
        what: Name of the prepared data, for the log.
        read: Reads ``folder``; raises one of DAMAGE_ERRORS if it is damaged.
        make: Fills a folder.
    """
    try:
        prepared, reason = find_prepared(folder, read, report)
        if prepared is not None:
            return prepared, True
        report(f"Data: preparing {folder} ({reason}): {what}")
        clean_up(folder.parent)
        with staging_folder(folder) as temporary:
            make(temporary)
            publish(temporary, folder, lambda: find_prepared(folder, read, report)[0] is not None)
        return read(), False
    except OSError as error:
        raise UserError(f"--data.cache_dir {folder.parent}: cannot be used: {error.strerror or error}") from error


def find_prepared(folder: Path, read: Callable[[], T], report: Report) -> tuple[T | None, str]:
    """Verify a prepared folder and return ``read()``, or None and the reason for the cache miss."""
    if not folder.exists():
        return None, "not prepared yet"
    try:
        verify(folder, report)
        return read(), ""
    except DAMAGE_ERRORS as error:
        return None, f"the cached data is damaged ({error!s})"


def hash_inputs(inputs: dict[str, Any]) -> str:
    """Return the key of data made from these inputs, a hex SHA-256."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a folder; it has the key of the data."""
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path, key: str) -> dict[str, Any]:
    """Return the manifest of a prepared folder.

    Raises:
        ValueError: It is damaged, or belongs to data with another key.
    """
    manifest = json.loads((folder / MANIFEST).read_bytes())
    if not isinstance(manifest, dict) or manifest.get("key") != key:
        raise ValueError(f"{MANIFEST} belongs to other data")
    return manifest


def read_checksums(folder: Path) -> dict[str, Checksum]:
    if not (folder / CHECKSUMS).is_file():
        raise ValueError(f"{CHECKSUMS} is missing")
    content = json.loads((folder / CHECKSUMS).read_bytes())
    return check_entries(content.get("files") if isinstance(content, dict) else None)


def require_intact(folder: Path, checksums: Mapping[str, Checksum]) -> None:
    if damaged := find_damage(folder, checksums):
        raise ValueError("; ".join(f"{name}: {why}" for name, why in damaged.items()))


def verify(folder: Path, report: Report) -> None:
    """Compare the files of ``folder`` with their checksums, once per user and machine.

    Stamps in ``~/.cache/toolkit/verified`` record the sizes, mtimes and inodes of verified files. Tokens of more than
    4 GiB are skipped, to start a run at once; ChunkedArray verifies them as it reads them.
    """
    checksums = read_checksums(folder)
    files = checksums
    if sum(entry["size"] for entry in files.values()) > _LARGE:
        verified_later = tuple(name.removesuffix(PIECES) for name in files if name.endswith(f"/{PIECES}"))
        files = {n: e for n, e in files.items() if not (n.endswith(".bin") and n.startswith(verified_later))}
    with _open_stamp(folder) as stamp:
        stats = {name: (folder / name).stat() for name in files}  # before reading: a later change is detected next time
        versions = {name: [stat.st_size, stat.st_mtime_ns, stat.st_ino] for name, stat in stats.items()}
        verified = {"folder": str(folder.resolve()), "checksums": {"files": checksums}, "versions": versions}
        if stamp is not None and _read_stamp(stamp) == verified:
            return
        if (size := sum(stat.st_size for stat in stats.values())) >= ANNOUNCE_BYTES:
            report(f"Data: verifying {size / 1e9:,.1f} GB in {folder}, once on this machine")
        require_intact(folder, files)
        if stamp is not None:
            stamp.seek(0)
            stamp.truncate()
            json.dump(verified, stamp)


@contextmanager
def _open_stamp(folder: Path) -> Iterator[IO[str] | None]:
    """Yield a folder's locked stamp file, or None if it cannot be written. With the lock, only one rank verifies."""
    stamps = user_cache() / "verified"
    name = hashlib.sha256(f"{socket.gethostname()} {folder.resolve()}".encode()).hexdigest()[:32]
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):
            stamps.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(stamps / f"{name}.json", "a+", encoding="utf-8"))
            lock(file)
        yield file


def _read_stamp(stamp: IO[str]) -> Any:
    stamp.seek(0)
    with contextlib.suppress(ValueError, RecursionError):
        return json.load(stamp)
    return None


def clean_up(cache_dir: Path) -> None:
    """Remove leftovers of killed preparations and stamps of deleted folders."""
    sweep(cache_dir)
    remove(path for path in cache_dir.glob(".unfinished-*") if time.time() - path.stat().st_mtime > 86_400)  # old name
    for path in (user_cache() / "verified").glob("*.json"):
        with contextlib.suppress(ValueError, OSError, TypeError, KeyError):
            if not Path(json.loads(path.read_bytes())["folder"]).exists():
                path.unlink()

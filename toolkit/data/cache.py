"""Folders of prepared data: each appears whole or not at all (S5), and is verified before it is read (S7).

What a killed process left is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from toolkit.checksums import check_entries, checksum_files, find_damage
from toolkit.leftovers import sweep, temporary_prefix

MANIFEST = "manifest.json"
CHECKSUMS = "checksums.json"
DAMAGE = (ValueError, TypeError, KeyError, OSError)  # what reading a damaged folder can raise
HEARTBEAT = 10.0  # seconds between two lines while long data is read
_ANNOUNCED = 1 << 31  # bytes: verifying so many takes seconds


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/toolkit/data``, or the same under ``~/.cache``."""
    return _user_cache() / "data"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "toolkit"


def choose_cache_dir(value: str | None) -> Path:
    """The folder of ``--data.cache_dir``, or the default one."""
    return Path(value).expanduser() if value else default_cache_dir()


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Give a temporary folder beside ``folder``, to be published; what is still there at the end is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f"{temporary_prefix()}{secrets.token_hex(4)}"
    temporary.mkdir()  # and not mkdtemp's, which is private: a cache may be shared
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, folder: Path, is_whole: Callable[[], bool]) -> None:
    """Rename ``temporary`` to ``folder``, unless another process was quicker: then ``folder`` ``is_whole``.

    The checksums of its files are written first.

    Raises:
        OSError: if it cannot be read or renamed.
    """
    files = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file())
    (temporary / CHECKSUMS).write_text(json.dumps({"files": checksum_files(temporary, files)}), encoding="utf-8")
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.exists():
            raise
        if is_whole():
            return  # another process was quicker; its data is the same
        damaged = temporary.with_name(f"{temporary.name}-damaged")
        os.rename(folder, damaged)
        os.rename(temporary, folder)
        shutil.rmtree(damaged, ignore_errors=True)


def verify(folder: Path, report: Callable[[str], None]) -> None:
    """Compare the files of ``folder`` with their checksums, unless this user's processes on this machine did before.

    That is known by the sizes, times and inodes of the files, which are noted in ``~/.cache/toolkit/verified``.

    Raises:
        ValueError: naming a file that is damaged.
        OSError: the checksums or the files cannot be read.
    """
    if not (folder / CHECKSUMS).is_file():
        raise ValueError(f"{CHECKSUMS} is missing")
    content = json.loads((folder / CHECKSUMS).read_bytes())
    files = check_entries(content.get("files") if isinstance(content, dict) else None)
    with _open_stamp(folder) as stamp:
        stats = {name: (folder / name).stat() for name in files}  # before the bytes: a later change is seen next time
        versions = {name: [stat.st_size, stat.st_mtime_ns, stat.st_ino] for name, stat in stats.items()}
        seen = {"folder": str(folder.resolve()), "checksums": content, "versions": versions}
        if stamp is not None and _read_stamp(stamp) == seen:
            return
        if (size := sum(stat.st_size for stat in stats.values())) >= _ANNOUNCED:
            report(f"Data: verifying {size / 1e9:,.1f} GB in {folder}, once on this machine")
        if damaged := find_damage(folder, files):
            raise ValueError("; ".join(f"{name}: {why}" for name, why in damaged.items()))
        if stamp is not None:
            stamp.seek(0)
            stamp.truncate()
            json.dump(seen, stamp)


@contextmanager
def _open_stamp(folder: Path) -> Iterator[IO[str] | None]:
    """The note about a folder, locked so that of several ranks one verifies; None where none can be kept."""
    stamps = _user_cache() / "verified"
    name = hashlib.sha256(f"{socket.gethostname()} {folder.resolve()}".encode()).hexdigest()[:32]
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError, ImportError):  # ImportError: Windows has no fcntl
            import fcntl

            stamps.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(stamps / f"{name}.json", "a+", encoding="utf-8"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _read_stamp(stamp: IO[str]) -> Any:
    stamp.seek(0)
    with contextlib.suppress(ValueError, RecursionError):
        return json.load(stamp)
    return None


def clean_up(cache_dir: Path) -> None:
    """Remove what killed preparations have left behind."""
    sweep(cache_dir)
    _forget_removed_folders()


def _forget_removed_folders() -> None:
    for path in (_user_cache() / "verified").glob("*.json"):
        with contextlib.suppress(ValueError, OSError, TypeError, KeyError):
            if not Path(json.loads(path.read_bytes())["folder"]).exists():
                path.unlink()

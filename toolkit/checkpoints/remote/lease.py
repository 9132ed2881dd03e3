"""The lease of a run's folder on remote storage: an object that says which process runs there, refreshed by it.

Object stores have no locks. The lease keeps a second launch of the same command from writing beside the first; two that
start within the same second may both find none, and the later write wins. What the clocks of the machines show does not
matter: a lease is stale if nobody has refreshed it while another process watched.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from toolkit.errors import UserError
from toolkit.io.safe_parse import parse_json
from toolkit.io.storage import Storage, StorageError
from toolkit.io.tempfiles import has_ended, temporary_prefix

LEASE = ".lease.json"
REFRESH = 10.0  # seconds
STALE = 35.0  # seconds without a refresh
SETTLE = 1.0  # seconds after which the last of several writers is known


class Lease:
    """This process's lease of a folder.

    Args:
        storage: The folder.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage, self.id = storage, secrets.token_hex(8)
        self.taken_by: str | None = None
        """The process that has taken the folder over from this one."""
        self._count = 0
        self._stale: bytes | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def require_free(self, report: Callable[[str], None]) -> None:
        """Check that no other run is alive in the folder. Takes :data:`STALE` seconds after a crash elsewhere.

        Raises:
            StorageError: the lease cannot be read.
        """
        seen = self.storage.read(LEASE)
        if seen in (None, self._stale) or has_ended(str(_parse(seen).get("process", ""))):
            return
        report(f"{self.storage.url} was in use by {_describe(seen)}; looking for up to {STALE:g} s whether it still is")
        deadline = time.monotonic() + STALE
        while time.monotonic() < deadline:
            time.sleep(min(1.0, STALE / 10))
            now = self.storage.read(LEASE)
            if now is None:
                return
            if now != seen:
                raise self._in_use(now)
        self._stale = seen

    def acquire(self, report: Callable[[str], None]) -> None:
        """Take the folder for this process, and keep refreshing the lease in the background.

        Raises:
            StorageError: the lease cannot be read or written.
        """
        self.require_free(report)
        self._write()
        time.sleep(SETTLE)
        if (now := self.storage.read(LEASE)) is not None and not self._is_own(now):
            raise self._in_use(now)
        self._thread = threading.Thread(target=self._refresh, name="lease", daemon=True)
        self._thread.start()

    def require_own(self) -> None:
        """Check on the storage that no other process has taken the folder over.

        Raises:
            StorageError: one has, or the lease cannot be read.
        """
        if self.taken_by is None:
            self._look()
        if self.taken_by is not None:
            raise StorageError(f"another run has taken over: {self.taken_by}")

    def release(self) -> None:
        """Give the folder free. Where that fails, the lease becomes stale."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            with suppress(StorageError):
                now = self.storage.read(LEASE)
                if now is not None and self._is_own(now):
                    self.storage.delete(LEASE)

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH):
            with suppress(StorageError):  # it may be stale for a while
                self._look()
                if self.taken_by is not None:
                    return
                self._write()

    def _look(self) -> None:
        now = self.storage.read(LEASE)
        if now is not None and not self._is_own(now):
            self.taken_by = _describe(now)

    def _write(self) -> None:
        self._count += 1
        values = {
            "id": self.id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": temporary_prefix(),
            "count": self._count,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self.storage.write(LEASE, json.dumps(values).encode())

    def _is_own(self, content: bytes) -> bool:
        return _parse(content).get("id") == self.id

    def _in_use(self, content: bytes) -> UserError:
        return self.storage.error(
            f"another run is alive there ({_describe(content)}); wait for it, or give another folder"
        )


def _parse(content: bytes | None) -> dict[str, object]:
    try:
        values = parse_json(content or b"{}")
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _describe(content: bytes | None) -> str:
    values = _parse(content)
    text = f"process {values.get('pid', '?')} on {values.get('host', '?')}, {values.get('time', 'time unknown')}"
    return "".join(c for c in text if c.isprintable())[:150]

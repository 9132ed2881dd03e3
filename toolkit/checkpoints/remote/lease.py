"""Lease a run's folder on remote storage. An object names the process that owns it, which refreshes the object.

Object stores have no locks. The lease keeps a second launch of the same command from writing to the same folder. If
both start within the same second, the later write wins. Clocks of different machines are not compared: a lease is stale
if another process sees no refresh for :data:`STALE_S` seconds.
"""

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress

from toolkit.data.base import Report
from toolkit.errors import UserError
from toolkit.io.safe_parse import parse_json
from toolkit.io.storage import Storage, StorageError
from toolkit.io.tempfiles import has_ended, temporary_prefix

LEASE = ".lease.json"
REFRESH_S = 10.0  # seconds
STALE_S = 35.0  # seconds without a refresh
SETTLE_S = 1.0  # seconds to wait before checking which of several writers was last


class Lease:
    """This process's lease on a folder. Methods raise :class:`StorageError` if a request fails."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.id = storage, secrets.token_hex(8)
        self.taken_by: str | None = None
        """Description of the process that took over the folder, if any."""
        self._count = 0
        self._stale: bytes | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def require_free(self, report: Report) -> None:
        """Raise UserError if another run is active in the folder. Takes :data:`STALE_S` s after a crash elsewhere."""
        first = self.storage.read(LEASE)
        if first in (None, self._stale) or has_ended(str(_parse(first).get("process", ""))):
            return
        report(
            f"{self.storage.url} was in use by {_describe(first)}; checking for up to {STALE_S:g} s whether it still is"
        )
        deadline = time.monotonic() + STALE_S
        while time.monotonic() < deadline:
            time.sleep(min(1.0, STALE_S / 10))
            now = self.storage.read(LEASE)
            if now is None:
                return
            if now != first:
                raise self._in_use(now)
        self._stale = first

    def acquire(self, report: Report) -> None:
        """Acquire the lease, and refresh it in a background thread."""
        self.require_free(report)
        self._write()
        time.sleep(SETTLE_S)
        if (owner := self._other_owner()) is not None:
            raise self._in_use(owner)
        self._thread = threading.Thread(target=self._refresh, name="lease", daemon=True)
        self._thread.start()

    def require_held(self) -> None:
        """Raise StorageError if another process has taken over the folder."""
        if self.taken_by is None:
            self._find_owner()
        if self.taken_by is not None:
            raise StorageError(f"another run has taken over: {self.taken_by}")

    def release(self) -> None:
        """Delete the lease. If that fails, it becomes stale."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            with suppress(StorageError):
                if _parse(self.storage.read(LEASE)).get("id") == self.id:
                    self.storage.delete(LEASE)

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH_S):
            with suppress(StorageError):  # the next refresh may succeed
                self._find_owner()
                if self.taken_by is not None:
                    return
                self._write()

    def _find_owner(self) -> None:
        if (owner := self._other_owner()) is not None:
            self.taken_by = _describe(owner)

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

    def _other_owner(self) -> bytes | None:
        """Return the lease's content if another process holds it, else None."""
        content = self.storage.read(LEASE)
        return None if content is None or _parse(content).get("id") == self.id else content

    def _in_use(self, content: bytes) -> UserError:
        return self.storage.error(
            f"another run is alive there ({_describe(content)}); wait for it, or give another folder "
            "(see remote_storage: two runs)"
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

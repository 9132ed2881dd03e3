"""One object in a run's folder on remote storage names the process that owns the folder.

Object stores have no locks. The object keeps a second launch of the same command from writing to the same folder while
the first is alive. Of two that start at the same time, the one that wrote last goes on; the other stops at its next
checkpoint. Clocks of different machines are not compared: the owner rewrites the object every :data:`REFRESH_S`
seconds, and has ended if nobody does for :data:`STALE_S`.
"""

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from toolkit.data.base import Report
from toolkit.errors import one_line
from toolkit.io.safe_parse import parse_json
from toolkit.io.storage import Storage, StorageError
from toolkit.io.tempfiles import has_ended, temporary_prefix

LEASE = ".lease.json"
REFRESH_S = 10.0  # seconds
STALE_S = 35.0  # seconds


class Lease:
    """This process's ownership of a folder. Methods raise :class:`StorageError` if a request fails."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.id = storage, secrets.token_hex(8)
        self.taken_by: str | None = None
        """Description of the process that took over the folder, if any."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def require_free(self, report: Report) -> None:
        """Raise UserError if another run is active in the folder. Takes :data:`STALE_S` s after a crash elsewhere."""
        if not (owner := self._read()):
            return
        if not has_ended(str(owner.get("process", ""))):
            report(f"{self.storage.url} was in use by {_describe(owner)}; waiting {STALE_S:g} s to see if it still is")
            deadline = time.monotonic() + STALE_S
            while time.monotonic() < deadline:
                time.sleep(STALE_S / 35)
                if (now := self._read()) != owner:
                    if not now:
                        return
                    raise self.storage.error(
                        f"another run is alive there ({_describe(now)}); wait for it, or give another folder "
                        "(see remote_storage: two runs)"
                    )
        self.storage.delete(LEASE)

    def acquire(self, report: Report) -> None:
        """Own the folder, and rewrite the object in a background thread."""
        self.require_free(report)
        self._write()
        self._thread = threading.Thread(target=self._refresh, name="lease", daemon=True)
        self._thread.start()

    def require_held(self) -> None:
        """Raise StorageError if another process has taken over the folder."""
        owner = self._read()
        if owner.get("id", self.id) != self.id:
            self.taken_by = _describe(owner)
        if self.taken_by is not None:
            raise StorageError(f"another run has taken over: {self.taken_by}")

    def release(self) -> None:
        """Delete the object. If that fails, it becomes stale."""
        self._ended.set()
        self.storage.fs.retries = 3  # of s3fs: the process ends in a minute, also if the storage does not respond
        if self._thread is not None:
            self._thread.join()
            with suppress(StorageError):
                self.require_held()
                self.storage.delete(LEASE)

    def _refresh(self) -> None:
        while self.taken_by is None and not self._ended.wait(REFRESH_S):
            with suppress(StorageError):  # the next one may succeed
                self.require_held()
                self._write()

    def _write(self) -> None:
        values = {
            "id": self.id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": temporary_prefix(),
            "time": datetime.now(timezone.utc).isoformat(),  # to the microsecond: differs each time
        }
        self.storage.write(LEASE, json.dumps(values).encode())

    def _read(self) -> dict[str, Any]:
        """Return the owner, or {} if there is none."""
        content = self.storage.read(LEASE)
        with suppress(ValueError):
            values = parse_json(content or b"{}")
            return values if isinstance(values, dict) else {"id": None}
        return {"id": None}  # not ours


def _describe(owner: dict[str, Any]) -> str:
    return one_line(f"process {owner.get('pid')} on {owner.get('host')}, {owner.get('time')}")[:150]

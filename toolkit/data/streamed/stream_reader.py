"""Readers of a stream. A process requests segments, starts tokenize workers and waits for the segments."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import IO

from toolkit.data.base import Report
from toolkit.data.cache import throttle
from toolkit.data.streamed.stream import SegmentCounts, Stream
from toolkit.errors import DataError, one_line
from toolkit.io.atomic import write_json
from toolkit.io.locks import file_lock, lock
from toolkit.io.tempfiles import machine_name

_POLL = 0.05  # seconds between checks for a segment
_MAX_STARTS = 4  # starts per tokenize worker before any segment is ready


@dataclass(frozen=True)
class SegmentRequest:
    """The segments that a process needs.

    Args:
        keep: Segments in use; they must not be evicted.
        ahead: Next segments to read, most urgent first.
        is_waiting: Whether the process waits for the first of ``ahead``.
        origin: The source to read them from, see :class:`~toolkit.data.streamed.source.Source`.
    """

    keep: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    is_waiting: bool = False
    origin: str = ""


class StreamReader:
    """Requests segments and waits for them. A forked copy registers as a separate reader.

    Args:
        workers: Number of tokenize workers.
        max_bytes: Disk budget for segments in bytes; None for no limit.
    """

    def __init__(self, stream: Stream, workers: int, max_bytes: int | None, report: Report) -> None:
        self.stream, self.workers, self.max_bytes, self.report = stream, workers, max_bytes, report
        self.latest_request = SegmentRequest()
        self._file: Path | None = None
        self._lock: IO[str] | None = None
        self._pid = 0
        self._starts = 0

    def request(self, request: SegmentRequest) -> None:
        """Publish the segments that this process needs. Start tokenize workers if one of ``ahead`` is not ready.

        Raises:
            DataError: The cache folder is lost, or workers were started too often.
        """
        try:
            if request != self.latest_request or self._pid != os.getpid():
                self._register()
                assert self._file is not None
                self.latest_request = request
                write_json(self._file, request.__dict__ | {"origin": self.stream.source.origin})
            if not all(map(self.stream.ready, request.ahead)):
                self._starts += start_workers(self.stream, self.workers, self.max_bytes)
        except OSError as error:
            hint = "was it deleted? resume to prepare the data again"
            raise DataError(f"{self.stream.folder}: {one_line(error)}; {hint}") from error
        if self._starts > _MAX_STARTS * self.workers:
            raise DataError(_describe_death(self.stream.folder))

    def reset_starts(self) -> None:
        """Reset the start count after a segment becomes ready."""
        self._starts = 0

    def wait(self, number: int, keep: list[int], ahead: list[int]) -> SegmentCounts:
        """Wait until a segment can be read. Return the counts. See :class:`SegmentRequest` for ``keep`` and ``ahead``.

        Raises:
            DataError: The segment cannot be prepared.
        """
        if (counts := self.stream.ready(number)) is not None:
            self.request(SegmentRequest(keep, ahead))
            return counts
        started, report_progress = time.monotonic(), throttle(self.report)
        error = self.stream.error_file(number)
        error.unlink(missing_ok=True)  # from an earlier attempt
        self.request(SegmentRequest(keep, [number, *ahead], is_waiting=True))
        while (counts := self.stream.ready(number)) is None:
            time.sleep(_POLL)
            with contextlib.suppress(FileNotFoundError):
                raise DataError(error.read_text(encoding="utf-8"))
            self.request(self.latest_request)
            waited = time.monotonic() - started
            report_progress(f"Data: waiting for {self.stream.source.noun} {number:,} ({waited:.0f} s)")
        self.reset_starts()
        self.request(SegmentRequest(keep, ahead))
        return counts

    def close(self) -> None:
        """Withdraw the requests of this process."""
        if self._file is not None and self._pid == os.getpid():
            self._file.unlink(missing_ok=True)
            self._file.with_suffix(".lock").unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
        self._file = self._lock = None
        read_requests(self.stream.folder)  # removes the files of processes that were killed

    def _register(self) -> None:
        """Create this process's request file. Hold a lock that shows other processes it is alive."""
        if self._pid == os.getpid() and self._file is not None:
            return
        name = f"{machine_name()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._file, self._pid = self.stream.folder / "readers" / f"{name}.json", os.getpid()
        self._lock = open(self._file.with_suffix(".lock"), "w")  # noqa: SIM115 - held as long as the process lives
        lock(self._lock)
        # at exit, after multiprocessing has ended the data loading processes
        Finalize(None, self.close, exitpriority=-1)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "report": print, "_file": None, "_lock": None, "_pid": 0}


def read_requests(folder: Path) -> list[SegmentRequest]:
    """Return the requests of running readers. Delete the files of readers that have ended."""
    requests = []
    for file in sorted((folder / "readers").glob("*.json")):
        if file.name.startswith("."):
            continue
        lock_file = file.with_suffix(".lock")
        with contextlib.suppress(FileNotFoundError), open(lock_file, "a") as opened:
            if lock(opened, wait=False):
                file.unlink(missing_ok=True)
                lock_file.unlink(missing_ok=True)
                continue
        with contextlib.suppress(ValueError, TypeError, OSError):
            requests.append(SegmentRequest(**json.loads(file.read_bytes())))
    return requests


def _describe_death(folder: Path) -> str:
    """Return a one-line message with the last log line of a tokenize worker."""
    lines = [text for file in sorted(folder.glob("readers/*preparer-*.log")) if (text := file.read_text().strip())]
    last = one_line(lines[-1].splitlines()[-1])[:300] if lines else "it was killed; is there enough memory?"
    return f"{folder}: the process that prepares the data ended {_MAX_STARTS} times in a row: {last}"


_processes: dict[tuple[Path, str], subprocess.Popen[bytes]] = {}
"""Tokenize workers started by this process. A worker ends when its stdin closes, at the latest with this process."""


def start_workers(stream: Stream, workers: int, max_bytes: int | None) -> int:
    """Start tokenize workers that no process on this machine runs for this source. Return the number started."""
    started, folder, origin = 0, stream.folder, stream.source.origin
    for slot in range(workers):
        name = f"{origin}preparer-{slot}"
        mine = _processes.get((folder, name))
        if mine is not None and mine.poll() is None:
            continue
        # Locks are per machine: each machine that shares the folder has its own tokenize workers.
        with file_lock(folder / "locks" / f"{machine_name()}-{name}", wait=False) as lock:
            if lock is not None:
                _processes[folder, name] = _start(folder, origin, name, max_bytes, lock)
                started += 1
    return started


def _start(folder: Path, origin: str, name: str, max_bytes: int | None, lock: IO[str]) -> subprocess.Popen[bytes]:
    """Start a tokenize worker that holds ``lock`` until it ends."""
    with open(folder / "readers" / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "toolkit.data.streamed.tokenize_worker", str(folder), str(max_bytes or 0), origin],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=[lock.fileno()],
            start_new_session=True,  # a launcher signals the process group of a run
        )


def stop_workers(folder: Path) -> None:
    """Kill the tokenize workers started by this process, and wait until they exit."""
    for key in [key for key in _processes if key[0] == folder]:
        process = _processes.pop(key)
        process.kill()  # safe: segments are published atomically
        process.wait()


def folder_bytes(folder: Path) -> int:
    """Return the disk usage of a folder's files in bytes. Other processes may delete some."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total

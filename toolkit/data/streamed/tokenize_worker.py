"""Worker process that tokenizes segments ahead of the readers: ``python -m toolkit.data.streamed.tokenize_worker``.

It runs at low priority. It exits when its standard input, a pipe from the parent process, closes.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

from toolkit.data.streamed.stream import Stream
from toolkit.data.streamed.stream_reader import SegmentRequest, folder_bytes, read_requests
from toolkit.io.storage import StorageError
from toolkit.io.threads import ignore_signals

_POLL = 0.1  # seconds between checks of the requests
_MARGIN = 1.2  # safety factor on the estimated segment size
_RETRY = 30.0  # seconds before another attempt at a segment whose storage failed


def main(folder: Path, max_bytes: int, origin: str = "") -> None:
    """Tokenize the segments that readers of ``folder`` request from a source, until standard input closes."""
    ignore_signals()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # other cores are for training and other workers
    if hasattr(os, "nice"):
        os.nice(10)
    _serve(Stream.load(folder, origin), max_bytes)


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _serve(stream: Stream, max_bytes: int) -> None:
    failed: dict[int, float] = {}  # segment: time of the last storage failure
    while True:
        requests = read_requests(stream.folder)
        mine = [request for request in requests if request.origin == stream.source.origin]
        for number in _missing(stream, mine):
            if time.monotonic() - failed.get(number, -_RETRY) < _RETRY and not _is_awaited(number, mine):
                continue
            if max_bytes and not make_room(stream, requests, number, max_bytes):
                continue
            try:
                stream.prepare(number, wait=False)
                break
            except BlockingIOError:
                continue
            except (StorageError, OSError) as error:
                failed[number] = time.monotonic()
                path = f"{stream.folder}: " if isinstance(error, OSError) else ""
                stream.error_file(number).write_text(f"{path}{error}", encoding="utf-8")
        else:
            time.sleep(_POLL)


def _missing(stream: Stream, requests: list[SegmentRequest]) -> Iterator[int]:
    """Yield the missing segments, round-robin over the processes. Waiting processes come first."""
    queues = [w.ahead for w in sorted(requests, key=lambda w: not w.is_waiting)]
    seen = set()
    for number in (n for turn in zip_longest(*queues) for n in turn if n is not None):
        if number not in seen and stream.ready(number) is None:
            yield number
        seen.add(number)


def _is_awaited(number: int, requests: list[SegmentRequest]) -> bool:
    return any(w.is_waiting and w.ahead[:1] == [number] for w in requests)


def make_room(stream: Stream, requests: list[SegmentRequest], number: int, max_bytes: int) -> bool:
    """Evict segments until ``number`` fits into the budget. Return whether it may be prepared.

    Evict unused segments first, oldest first. If a process waits for the new segment, also evict segments needed later.
    Never evict segments in use.
    """
    sizes = {}  # segment: (publication time, bytes)
    for path in (stream.folder / "units").iterdir():
        with suppress(FileNotFoundError):  # another tokenize worker evicts it
            if path.name.isdigit():
                sizes[int(path.name)] = path.stat().st_mtime, folder_bytes(path)
    expected = stream.source.expected_bytes
    ratio = max((size / max(1, expected(segment)) for segment, (_, size) in sizes.items()), default=1.0)
    excess = folder_bytes(stream.folder / "units") + int(_MARGIN * ratio * expected(number)) - max_bytes
    in_use = {n for w in requests for n in w.keep}
    later = {n for w in requests for n in w.ahead} - in_use
    is_awaited = _is_awaited(number, requests)
    for segment in sorted(sizes, key=lambda n: (n in later, sizes[n][0])):
        if excess <= 0:
            return True
        if segment not in in_use and (segment not in later or is_awaited):
            stream.evict(segment)
            excess -= sizes[segment][1]
    return excess <= 0 or is_awaited


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])

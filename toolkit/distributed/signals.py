"""S3: a signal asks the loop to stop; it does not interrupt a step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

WATCHED = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)]
PATIENCE = 1.0  # seconds within which a second Ctrl-C is taken for an echo of the first


class SignalWatch:
    """While active, the first SIGINT, SIGTERM, SIGUSR1 or SIGHUP (a closed terminal) is noted in ``received``.

    Launchers and schedulers send the same signal twice, or one after the other: further ones change nothing. Only a
    second Ctrl-C some time after the first, a person's impatience, acts as it always did.

    Handlers can be set in the main thread only; elsewhere (a notebook's worker thread) nothing is watched.
    """

    def __init__(self) -> None:
        self.received: int = 0
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is threading.main_thread():
            for number in WATCHED:
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup wants it so
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT == number and time.monotonic() - self._since > PATIENCE:
            self._restore()
            signal.raise_signal(number)
        if not self.received:
            self.received, self._since = number, time.monotonic()

    def ignore(self) -> None:
        """Ignore further signals from here on, until the process ends: its state is saved, and it must report that.

        :func:`handlers_restored` ends this in a process that lives on.
        """
        while self._previous:  # not with a handler of Python's: these are removed shortly before a process ends
            signal.signal(self._previous.popitem()[0], signal.SIG_IGN)

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def __exit__(self, *exc: object) -> None:
        self._restore()


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Bring back the handlers of signals at the end, as they were before."""
    before = {number: signal.getsignal(number) for number in WATCHED}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

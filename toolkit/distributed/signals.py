"""Law S3: a signal asks the loop to stop; it does not interrupt a step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class SignalWatch:
    """While active, the first SIGINT, SIGTERM or SIGUSR1 is noted in ``received``; a second one acts as it always did.

    Handlers can be set in the main thread only; elsewhere (a notebook's worker thread) nothing is watched.
    """

    def __init__(self) -> None:
        self.received: int = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is threading.main_thread():
            names = ("SIGINT", "SIGTERM", "SIGUSR1")  # Windows has no SIGUSR1
            for number in (getattr(signal, name) for name in names if hasattr(signal, name)):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def __exit__(self, *exc: object) -> None:
        self._restore()

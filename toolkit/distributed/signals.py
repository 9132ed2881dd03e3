"""Law S3: a signal asks the loop to stop; it does not interrupt a step."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

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
            names = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")  # Windows has only the first two
            for number in (getattr(signal, name) for name in names if hasattr(signal, name)):
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup wants it so
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT == number and time.monotonic() - self._since > PATIENCE:
            self._restore()
            signal.raise_signal(number)
        if not self.received:
            self.received, self._since = number, time.monotonic()

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def __exit__(self, *exc: object) -> None:
        self._restore()

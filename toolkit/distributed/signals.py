"""S3 graceful-signals: a signal requests a stop of the loop and never interrupts a step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]
DEBOUNCE_SECONDS = 1.0  # a second Ctrl-C within this time is a duplicate of the first


class SignalWatch:
    """Records the first SIGINT, SIGTERM, SIGUSR1 or SIGHUP (closed terminal) in ``received`` while active.

    Launchers and schedulers may send several signals in a row; later ones are ignored. Only a second Ctrl-C, more than
    ``DEBOUNCE_SECONDS`` after the first, has its default effect. Python allows handlers in the main thread only; in
    another thread, such as a notebook's worker, no signal is handled.

    After the block, SIGUSR1 and SIGHUP have no effect where their default is to kill: everything is saved.
    """

    def __init__(self) -> None:
        self.received: int = 0
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # set by nohup
                    self._previous[number] = signal.signal(number, self._record)
        return self

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT == number and time.monotonic() - self._since > DEBOUNCE_SECONDS:
            _restore(self._previous)
            signal.raise_signal(number)
        if not self.received:
            self.received, self._since = number, time.monotonic()

    def ignore(self) -> None:
        """Ignore further signals until the process exits, because its state is saved and must be reported.

        In a process that continues, :func:`restore_handlers_on_exit` restores the handlers.
        """
        while self._previous:  # SIG_IGN, because Python removes its own handlers before the process exits
            signal.signal(self._previous.popitem()[0], signal.SIG_IGN)

    def __exit__(self, *exc: object) -> None:
        for number, previous in self._previous.items():
            if number not in (signal.SIGINT, signal.SIGTERM) and previous == signal.SIG_DFL:
                self._previous[number] = _do_nothing  # unlike SIG_IGN, not inherited by new processes
        _restore(self._previous)


def hold_signals(is_held: bool) -> None:
    """Hold SIGINT and SIGTERM back until the program can report them to the other processes; or deliver them."""
    signal.pthread_sigmask(signal.SIG_BLOCK if is_held else signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


def ignore_until_exit() -> None:
    """Ignore all signals, for a process that only has to exit with its code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # Python removes its own handlers before the process exits


@contextmanager
def restore_handlers_on_exit() -> Iterator[None]:
    """Restore the previous signal handlers on exit."""
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            _restore(before)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def _restore(handlers: dict[int, Any]) -> None:
    """Install the handlers and clear the dictionary, so a second call does nothing."""
    while handlers:
        number, handler = handlers.popitem()
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)

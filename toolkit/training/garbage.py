"""Run Python's garbage collection while the host waits for the device."""

from __future__ import annotations

import gc
from types import TracebackType

STEPS_BETWEEN_COLLECTIONS = 20


class GarbageCollection:
    """Context that replaces automatic garbage collection by :meth:`collect`, from the first call until exit.

    Automatic collection runs at different times on each rank, and every time all ranks wait. Objects that exist at the
    first collection are frozen; later collections skip them.
    """

    def __enter__(self) -> GarbageCollection:
        self._calls, self._was_enabled = 0, gc.isenabled()
        # Do not unfreeze objects that the program froze. Python 3.12 starts with some hundred frozen ones.
        self._can_freeze = gc.get_freeze_count() < 1000
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._can_freeze:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def collect(self, *, is_due: bool = True) -> None:
        """Collect if ``is_due`` or every STEPS_BETWEEN_COLLECTIONS calls. The first call freezes all objects."""
        is_first, self._calls = self._calls == 0, self._calls + 1
        if is_first or is_due or self._calls % STEPS_BETWEEN_COLLECTIONS == 0:
            gc.collect()
        if is_first:
            gc.disable()
            if self._can_freeze:
                gc.freeze()

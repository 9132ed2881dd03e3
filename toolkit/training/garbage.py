"""Run Python's garbage collection while the host waits for the device."""

from __future__ import annotations

import gc
import time
from types import TracebackType

STEPS_BETWEEN_COLLECTIONS = 20
MAX_FREEZES = 3
"""The first step, validation and save create objects that last. Later ones would freeze cycles that soon die."""


class GarbageCollection:
    """Context that replaces automatic garbage collection by :meth:`collect`, from the first call until exit.

    Automatic collection runs at different times on each rank, and every time all ranks wait. A full collection visits
    all objects: hundreds of thousands after ``torch.compile``, half a second. So steps collect young objects only, even
    in long runs without validation and save, and objects that exist at the first full collections are frozen; later
    collections skip them.
    """

    def __enter__(self) -> GarbageCollection:
        self._steps = self._full_collections = 0
        self._seconds = self._first_at = 0.0
        self._was_enabled = gc.isenabled()
        # Do not unfreeze objects that the program froze. Python 3.12 starts with some hundred frozen ones.
        self._can_freeze = gc.get_freeze_count() < 1000
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._can_freeze:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    @property
    def share(self) -> float:
        """Fraction of the time since the first collection that later collections took."""
        return self._seconds / (time.perf_counter() - self._first_at) if self._full_collections else 0.0

    def collect(self, *, is_full: bool = True) -> None:
        """Collect all objects if ``is_full``, and in the first call; otherwise young ones, in every 20th call."""
        self._steps += 1
        is_first = not self._full_collections
        is_full |= is_first
        if not is_full and self._steps % STEPS_BETWEEN_COLLECTIONS:
            return
        started_at = time.perf_counter()
        gc.collect(2 if is_full else 1)
        if is_full:
            if self._can_freeze and self._full_collections < MAX_FREEZES:
                gc.freeze()
            self._full_collections += 1
        ended_at = time.perf_counter()
        if is_first:
            gc.disable()
            self._first_at = ended_at
        else:
            self._seconds += ended_at - started_at

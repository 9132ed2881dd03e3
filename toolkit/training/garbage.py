"""Python's garbage collection during training: only while the host would wait for the device anyhow."""

from __future__ import annotations

import gc
from types import TracebackType

STEPS_BETWEEN_COLLECTIONS = 20


class GarbageCollection:
    """From the first :meth:`collect` to the exit of the context, garbage in cycles is collected only by these calls.

    The automatic collector starts at any allocation, on every rank at another time, and all ranks wait for the one that
    walks the objects of all libraries. Objects of before the first collection are exempt from later ones.
    """

    def __enter__(self) -> GarbageCollection:
        self._calls, self._was_enabled = 0, gc.isenabled()
        self._can_freeze = gc.get_freeze_count() == 0  # what the program itself has frozen stays so
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._can_freeze:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def collect(self, *, is_due: bool = True) -> None:
        """Collect garbage if ``is_due``, and in any case after so many calls; the first call freezes all objects."""
        is_first, self._calls = self._calls == 0, self._calls + 1
        if is_first or is_due or self._calls % STEPS_BETWEEN_COLLECTIONS == 0:
            gc.collect()
        if is_first:
            gc.disable()
            if self._can_freeze:
                gc.freeze()

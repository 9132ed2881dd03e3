"""Checkpoints whose files are written late, while training goes on."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from toolkit.distributed import ranks
from toolkit.training import engine
from toolkit.training.checkpointer import Checkpointer
from toolkit.training.pending_save import PendingSave


@contextmanager
def writes_that_last(steps: int, at_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let each write in the background begin after so many further steps, or when the run waits for it.

    ``at_wait`` is called when the run waits for a write that has not begun.
    """
    condition, done, is_awaited = threading.Condition(), 0, False
    step, write, wait = engine.launch_step, PendingSave.write, Checkpointer._wait

    def counting_step(*args, **options):
        nonlocal done
        result = step(*args, **options)
        with condition:
            done += 1
            condition.notify_all()
        return result

    def late_write(self):
        if threading.current_thread().name == "checkpoint":  # others write while training waits
            with condition:
                last = done + steps
                condition.wait_for(lambda: done >= last or is_awaited)
        write(self)

    def noted_wait(self, pending, **options):
        nonlocal is_awaited
        if self.is_writing:
            at_wait()
        with condition:
            is_awaited = True
            condition.notify_all()
        wait(self, pending, **options)
        is_awaited = False

    with (
        mock.patch.object(engine, "launch_step", counting_step),
        mock.patch.object(PendingSave, "write", late_write),
        mock.patch.object(Checkpointer, "_wait", noted_wait),
    ):
        yield


def slow_fsync(seconds: float) -> Callable[[int], None]:
    """Return a slow ``os.fsync``: the first call by each function lasts so long."""
    fsync, seen = os.fsync, set()

    def slow(descriptor: int) -> None:
        caller = sys._getframe(1).f_code
        if caller not in seen:
            seen.add(caller)
            time.sleep(seconds)
        fsync(descriptor)

    return slow


@contextmanager
def slow_disk(rank: int) -> Iterator[None]:
    """From the first save on, fsync of one rank lasts longer than ranks wait for each other during a save."""
    start_save, fsync = Checkpointer._saving, os.fsync

    @contextmanager
    def impatient(self):
        if os.fsync is fsync and ranks.global_rank() == rank:
            os.fsync = slow_fsync(1.6)
        with start_save(self), ranks.extended_timeout(1.0, 60.0):
            yield

    with mock.patch.object(Checkpointer, "_saving", impatient), mock.patch.object(os, "fsync", fsync):
        yield

"""Checkpoints whose files are written late, while training goes on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from toolkit.training import trainer
from toolkit.training.pending_save import PendingSave
from toolkit.training.saving import Saver


@contextmanager
def writes_that_last(steps: int, at_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let each write in the background begin after so many further steps, or when the run waits for it.

    ``at_wait`` is called when the run waits for a write that has not begun.
    """
    condition, done, is_awaited = threading.Condition(), 0, False
    step, write, wait = trainer.train_step, PendingSave.write, Saver._wait

    def counting_step(*args, **options):
        nonlocal done
        result = step(*args, **options)
        with condition:
            done += 1
            condition.notify_all()
        return result

    def late_write(self):
        if threading.current_thread() is not threading.main_thread():
            with condition:
                last = done + steps
                condition.wait_for(lambda: done >= last or is_awaited)
        write(self)

    def noted_wait(self, pending):
        nonlocal is_awaited
        if self.is_writing:
            at_wait()
        with condition:
            is_awaited = True
            condition.notify_all()
        wait(self, pending)
        is_awaited = False

    with (
        mock.patch.object(trainer, "train_step", counting_step),
        mock.patch.object(PendingSave, "write", late_write),
        mock.patch.object(Saver, "_wait", noted_wait),
    ):
        yield

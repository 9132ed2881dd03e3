"""Save checkpoints while training waits, or concurrently with ``--train.async_save``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch.profiler import record_function

from toolkit.checkpoints.run.host_copy import HostCopies
from toolkit.distributed import ranks
from toolkit.errors import one_line
from toolkit.training.callbacks import notify
from toolkit.training.callbacks.base import callback_states
from toolkit.training.callbacks.upload import submit_upload
from toolkit.training.pending_save import PendingSave
from toolkit.training.trace import SAVE

if TYPE_CHECKING:
    from toolkit.training.trainer import Trainer

REPORT_WAITS_OVER_S = 1.0  # minimum wait for the previous checkpoint to report


class Saver:
    """Saves the checkpoints of a run. Every rank calls each method at the same step.

    At most one checkpoint is written at a time. It is committed after all ranks have written; then callbacks run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._checkpointer = trainer, trainer.run.checkpointer
        self._keep_last = trainer.args.train.keep_last
        self._copies = HostCopies() if trainer.args.train.async_save else None
        self._pending: PendingSave | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing its files."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, name: str) -> Path:
        """Finish the save in progress, then save ``out_dir/name``."""
        self.finish()
        with self._saving():
            self._trainer.update_progress()
            folder = self._checkpointer.save(name, self._trainer.progress, callback_states(self._trainer.callbacks))
        self._notify(folder)
        return folder

    def start(self, name: str) -> None:
        """Save ``out_dir/name``. With ``--train.async_save`` return before the files are written."""
        if self._copies is None:
            self.save(name)
            return
        self.finish()
        with self._saving():
            self._trainer.update_progress()
            states = callback_states(self._trainer.callbacks)
            self._pending = self._checkpointer.begin(name, self._trainer.progress, states, self._copies)
            self._thread = threading.Thread(target=self._pending.write, name="checkpoint")
            self._thread.start()

    def finish(self) -> None:
        """Complete the save in progress, if there is one."""
        if (pending := self._pending) is None:
            return
        with self._saving():
            self._wait(pending)
            self._pending = None
            folder = pending.commit(self._keep_last)
        self._notify(folder)

    def finish_after(self, error: BaseException, is_on_all_ranks: bool = False) -> None:
        """Complete the save in progress, if possible, when the run ends with ``error``.

        The saved state was finite. After an error on one rank, the other ranks may have exited. Rank 0 then commits an
        unsharded checkpoint alone, and deletes a sharded one.
        """
        if (pending := self._pending) is None:
            return
        try:
            if is_on_all_ranks or ranks.world_size() == 1:
                self.finish()
            elif ranks.global_rank() == 0:
                self._wait(pending, is_alone=True)
                if pending.is_sharded:
                    pending.abandon()
                else:
                    folder = pending.commit_alone(self._keep_last)
                    self._trainer.display.message(f"saved {folder}")
                    submit_upload(self._trainer.callbacks, folder)
        except Exception as second:  # report the first error, which ended the run
            self._trainer.display.message(f"note: the save in progress failed as well: {one_line(second)}")
        finally:
            self._pending = None

    def _wait(self, pending: PendingSave, is_alone: bool = False) -> None:
        """Wait until all ranks' files are written, or only this rank's if ``is_alone``."""
        thread, started = self._thread, time.perf_counter()
        assert thread is not None

        def is_done(seconds: float) -> bool:
            thread.join(seconds)
            return not thread.is_alive()

        if is_alone:
            thread.join()
        else:
            ranks.wait_for_all(is_done, pending.wait_reporter())
        seconds = time.perf_counter() - started
        if seconds > REPORT_WAITS_OVER_S:
            self._trainer.display.message(f"waited {seconds:.1f} s until {pending.folder} was written")

    def _notify(self, folder: Path) -> None:
        notify(self._trainer.callbacks, "on_checkpoint_saved", self._trainer, folder)
        self._trainer.display.phase("training")

    @contextmanager
    def _saving(self) -> Iterator[None]:
        self._trainer.display.phase("saving")
        timeouts = self._trainer.run.timeouts
        with ranks.extended_timeout(timeouts.first, timeouts.later), record_function(SAVE):
            yield
        self._trainer.display.phase("training")

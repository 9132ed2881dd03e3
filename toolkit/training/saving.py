"""Save checkpoints while training waits, or concurrently with ``--train.async_save``."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from toolkit.checkpoints.run.host_copy import HostCopies
from toolkit.data.base import State
from toolkit.distributed import ranks
from toolkit.distributed.launch import Timeouts
from toolkit.planning.limits import Progress
from toolkit.training.checkpointer import Checkpointer
from toolkit.training.pending_save import PendingSave
from toolkit.training.trace import SAVE

REPORT_WAITS_OVER_S = 1.0  # minimum wait for the previous checkpoint to report


class Saver:
    """Writes the checkpoints of a run. Every rank calls each method at the same step.

    At most one checkpoint is written at a time. It is committed after all ranks have written.
    """

    def __init__(self, checkpointer: Checkpointer, timeouts: Timeouts, display: Any) -> None:
        train = checkpointer.config.args.train
        self._checkpointer, self._timeouts, self._display = checkpointer, timeouts, display
        self._keep_last = train.keep_last
        self._copies = HostCopies() if train.async_save else None
        self._pending: PendingSave | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_async(self) -> bool:
        return self._copies is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing its files."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, name: str, progress: Progress, callbacks: State) -> Path:
        """Write ``out_dir/name`` atomically, and delete the oldest checkpoints. No other save may be in progress.

        Args:
            callbacks: The callbacks' states by name.
        """
        with self._saving():
            pending = self._checkpointer.begin(name, progress, callbacks)
            pending.write_on_all_ranks()
            return pending.commit(self._keep_last)

    def start(self, name: str, progress: Progress, callbacks: State) -> None:
        """Start to write ``out_dir/name`` concurrently with training; arguments as in :meth:`save`."""
        with self._saving():
            self._pending = self._checkpointer.begin(name, progress, callbacks, self._copies)
            self._thread = threading.Thread(target=self._pending.write, name="checkpoint")
            self._thread.start()

    def finish(self) -> Path | None:
        """Complete the save in progress and return its folder; None if there is none."""
        if (pending := self._pending) is None:
            return None
        with self._saving():
            self._wait(pending)
            self._pending = None
            return pending.commit(self._keep_last)

    def finish_alone(self) -> Path | None:
        """Complete the save in progress on rank 0, because the other ranks may have exited; None if it cannot.

        An unsharded checkpoint is committed, a sharded one is deleted.
        """
        pending, self._pending = self._pending, None
        if pending is None or ranks.global_rank() != 0:
            return None
        self._wait(pending, is_alone=True)
        if pending.is_sharded:
            pending.abandon()
            return None
        return pending.commit_alone(self._keep_last)

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
            self._display.message(f"waited {seconds:.1f} s until {pending.folder} was written")

    @contextmanager
    def _saving(self) -> Iterator[None]:
        self._display.phase("saving")
        with ranks.extended_timeout(self._timeouts.first, self._timeouts.later), record_function(SAVE):
            yield
        self._display.phase("training")

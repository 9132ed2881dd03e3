"""Prefetch the next step's micro-batches in a thread while the current step computes."""

from collections.abc import Iterator
from concurrent.futures import Future, wait

import torch

from toolkit.data.batch import Batch
from toolkit.io.threads import run_in_thread

_CLOSE_SECONDS = 5.0  # timeout for a thread that hangs in a read


class Prefetcher:
    """Iterator over ``steps`` that prefetches one step in a thread. On CUDA, the thread also pins the batches.

    On CUDA the thread starts to read a step at :meth:`start_read`, not before: it takes turns with the thread that
    launches kernels (the interpreter's lock), and while the first ones are launched, the device waits for each.

    If ``steps`` raises an exception, it is raised again when the caller takes that step.

    Args:
        steps: Yields the micro-batches of each step. Iterated in a thread for each step; the first starts the workers.
        device: Device of the model.
        reads_ahead: False reads each step in the caller's thread when it is taken, for data that is not thread-safe.
    """

    def __init__(self, steps: Iterator[list[Batch]], device: torch.device, reads_ahead: bool = True) -> None:
        self._steps, self._device, self._reads_ahead = steps, device, reads_ahead
        self._next: Future[list[Batch]] | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        self.start_read()
        if self._next is None:
            return next(self._steps)
        step, self._next = self._next.result(), None
        if self._device.type != "cuda":
            self.start_read()
        return step

    def start_read(self) -> None:
        """Let a thread prefetch a step, if there is none yet."""
        if self._reads_ahead and self._next is None:
            # A daemon thread: at exit, the interpreter would wait for a non-daemon thread that hangs in a read.
            self._next = run_in_thread(self._read, name="read-ahead", daemon=True)

    def pause(self, seconds: float | None = None) -> None:
        """Wait for the pending prefetch. No thread reads then, until the caller takes that step."""
        if self._next is not None:
            wait([self._next], seconds)

    def close(self) -> None:
        """Wait for the pending prefetch, but not for one that hangs. The iterator must not be used afterwards."""
        self.pause(_CLOSE_SECONDS)

    def _read(self) -> list[Batch]:
        step = next(self._steps)
        if self._device.type != "cuda":
            return step
        torch.cuda.set_device(self._device)  # a new thread defaults to device 0 and would create a CUDA context there
        return [batch.pin_memory() for batch in step]

"""Prefetch the next step's micro-batches in a thread while the current step computes."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from queue import SimpleQueue

import torch

from toolkit.data.batch import Batch

_CLOSE_SECONDS = 5.0  # timeout for joining a thread that hangs in a read


class Prefetcher:
    """Iterator over ``steps`` that prefetches one step in a thread. On CUDA, the thread also pins the batches.

    On CUDA the thread starts to read a step at :meth:`start_read`, not before: it takes turns with the thread that
    launches kernels (the interpreter's lock), and while the first ones are launched, the device waits for each.

    If ``steps`` raises an exception, it is raised again when the caller takes that step. The thread prefetches exactly
    one step and stays idle until the caller takes it.

    Args:
        steps: Yields the micro-batches of each step. Iterated in the thread, where a generator starts its workers.
        device: Device of the model.
    """

    def __init__(self, steps: Iterator[list[Batch]], device: torch.device) -> None:
        self._steps, self._device = steps, device
        self._requests: SimpleQueue[Future[list[Batch]] | None] = SimpleQueue()
        self._next: Future[list[Batch]] | None = None
        # A daemon thread: at exit, the interpreter would wait for a non-daemon thread that hangs in a read.
        self._thread = threading.Thread(target=self._serve, name="read-ahead", daemon=True)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        self.start_read()
        assert self._next is not None
        step, self._next = self._next.result(), None
        if self._device.type != "cuda":
            self.start_read()
        return step

    def start_read(self) -> None:
        """Let the thread prefetch a step, if it has none yet."""
        if self._next is None:
            if self._thread.ident is None:
                self._thread.start()
            self._next = Future()
            self._requests.put(self._next)

    def start_copy(self) -> None:
        """Start an asynchronous copy of the prefetched step to the device. No-op if it is not read yet."""
        step = self._next
        if self._device.type == "cpu" or step is None or not step.done() or step.exception() is not None:
            return
        self._next = Future()
        self._next.set_result([batch.to(self._device) for batch in step.result()])

    def pause(self) -> None:
        """Wait for the pending prefetch. The prefetch thread then stays idle until the caller takes that step."""
        if self._next is not None:
            wait([self._next])

    def close(self) -> None:
        """Stop the thread. The iterator must not be used afterwards."""
        self._requests.put(None)
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                request.set_result(self._read())
            except BaseException as error:
                request.set_exception(error)

    def _read(self) -> list[Batch]:
        step = next(self._steps)
        if self._device.type != "cuda":
            return step
        torch.cuda.set_device(self._device)  # a new thread defaults to device 0 and would create a CUDA context there
        return [batch.pin_memory() for batch in step]

"""Reading ahead: a thread prepares the next step's micro-batches while the current step computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from queue import SimpleQueue

import torch

from toolkit.data.loader import Batch

_CLOSE_SECONDS = 5.0  # limit for a read that hangs at the end of the process


class ReadAhead:
    """Iterates over ``steps``, read one step ahead by a thread, which also pins them for asynchronous copies to CUDA.

    An exception of ``steps`` is raised when its step is taken. The thread reads nothing until the next step is taken,
    nor after :meth:`pause`.

    Args:
        steps: The micro-batches of each step. The thread reads them: a generator starts its workers there.
        device: Where the steps are computed.
    """

    def __init__(self, steps: Iterator[list[Batch]], device: torch.device) -> None:
        self._steps, self._device = steps, device
        self._requests: SimpleQueue[Future[list[Batch]] | None] = SimpleQueue()
        self._next: Future[list[Batch]] | None = None
        # A daemon: the interpreter waits for all others, even for one that never returns from a read.
        self._thread = threading.Thread(target=self._serve, name="read-ahead", daemon=True)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        if self._next is None:
            self._thread.start()
            self._next = self._request()
        step = self._next.result()
        self._next = self._request()
        return step

    def copy_ahead(self) -> None:
        """Start to copy the next step to the device, if it has been read; what the device computes now comes first."""
        step = self._next
        if self._device.type == "cpu" or step is None or not step.done() or step.exception() is not None:
            return
        self._next = Future()
        self._next.set_result([batch.to(self._device) for batch in step.result()])

    def pause(self) -> None:
        """Wait until the next step has been read; the caller then uses the data alone until it takes that step."""
        if self._next is not None:
            wait([self._next])

    def close(self) -> None:
        """End the thread; the iterator is not used afterwards."""
        self._requests.put(None)
        if self._next is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _request(self) -> Future[list[Batch]]:
        step: Future[list[Batch]] = Future()
        self._requests.put(step)
        return step

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
        torch.cuda.set_device(self._device)  # a thread starts with device 0, and would create a context there
        return [batch.pin_memory() for batch in step]

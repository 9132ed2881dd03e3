"""Run functions in threads, with a timeout, and in processes that ignore a run's signals."""

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def run_in_thread(function: Callable[[], T], name: str | None = None, daemon: bool = False) -> Future[T]:
    """Call a function in a new thread. A daemon thread does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return future


def call_with_timeout(seconds: float, function: Callable[[], T]) -> T:
    """Return ``function()``, run in a thread, for clients without a timeout.

    Raises TimeoutError after ``seconds``; the thread then keeps running.
    """
    result = run_in_thread(function, daemon=True)
    if not wait([result], seconds).done:
        raise TimeoutError("no answer")
    return result.result()


def ignore_signals() -> None:
    """Ignore the signals that launchers send to all processes of a run. Only the training process handles them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

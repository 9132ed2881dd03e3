"""Run the processes that the benchmarks measure, and end them with the benchmark."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import UserError

# The glibc settings of disable_malloc_trim in toolkit/distributed/cpu_memory.py, for the peers.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "LITDATA_DISABLE_VERSION_CHECK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None

RUNNING: list[int] = []
"""Process IDs of the running products."""


@dataclass
class CompletedRun:
    """The output and peak memory (GB) of a successful process."""

    output: str
    peak_memory_gb: float


class RunFailedError(RuntimeError):
    """A product failed; the message contains the end of its output."""


def start(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process in a new process group. On Linux it ends when this one does, also after SIGKILL."""
    return subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent, **options)


def end_with_parent() -> None:
    """End this process when its parent ends. On Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end(process: subprocess.Popen[Any], number: signal.Signals = signal.SIGKILL) -> None:
    """End a process of :func:`start` with its children."""
    send_signal(process.pid, number)
    process.wait()


def run_script(command: list[str], max_seconds: float | None = None, **options: Any) -> tuple[int, str | None]:
    """Run a script of this folder. Return its exit code and what it printed, if ``stdout`` is a pipe.

    Raises:
        RunFailedError: It did not end within ``max_seconds``.
    """
    process = start(command, text=True, **options)
    try:
        output = process.communicate(timeout=max_seconds)[0]
        return process.returncode, output
    except BaseException as error:
        end(process, signal.SIGTERM)  # so that it ends the processes that it started
        if isinstance(error, subprocess.TimeoutExpired):
            raise RunFailedError(f"was not done after {max_seconds:.0f} s") from None
        raise


def send_signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.killpg(group, number)


def exit_on_signals() -> None:
    """Exit on SIGTERM, as of `timeout`, and on Ctrl-C, so that the processes are ended."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def run_process(
    product: str,
    command: list[str],
    folder: Path,
    threads: int,
    extra: dict[str, str],
    *,
    max_seconds: float | None = None,
    is_done: Callable[[], bool] = lambda: False,
) -> CompletedRun:
    """Run a product in ``folder``, and wait until it has ended or ``is_done()``, which ends it.

    Raises:
        UserError: toolkit reported a user error (exit code 2).
        RunFailedError: The process failed, or did not end within ``max_seconds``.
    """
    inherited = {k: v for k, v in os.environ.items() if k not in MALLOC and k != "PYTHONPATH"}
    environment = inherited | QUIET | {"OMP_NUM_THREADS": str(threads)} | extra
    log, started = folder / f"{product}.log", time.monotonic()
    with open(log, "wb") as file:
        process = start(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT)
        RUNNING.append(process.pid)
        try:
            # wait4: getrusage(RUSAGE_CHILDREN) would return the maximum over all children so far.
            while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
                if is_done():
                    end(process)
                    return CompletedRun(log.read_text(errors="replace"), 0.0)
                if max_seconds is not None and time.monotonic() - started > max_seconds:
                    last = tail(log.read_text(errors="replace"), 1)
                    raise RunFailedError(f"{product} was not done after {max_seconds:.0f} s; its last line: {last}")
                time.sleep(0.05)
        except BaseException:
            end(process)
            raise
        finally:
            RUNNING.remove(process.pid)
    _, status, usage = ended
    process.returncode = os.waitstatus_to_exitcode(status)
    output = log.read_text(errors="replace")
    if process.returncode == 2 and product == "toolkit":
        raise UserError(output.strip().splitlines()[-1])
    if process.returncode:
        raise RunFailedError(f"{product} failed with exit code {process.returncode}; its output ends:\n{tail(output)}")
    return CompletedRun(output, rss_gb(usage))


def take_turns(runs: Collection[Future[Any]], seconds: float) -> None:
    """Alternate between the products every ``seconds``, pausing the others, until all runs end.

    If ``seconds`` cover several steps, the pauses do not affect a product's median step.
    """
    try:
        while not all(run.done() for run in runs):
            for pid in RUNNING[:] or [0]:  # 0: none has started yet
                until = time.monotonic() + seconds
                while pid in (*RUNNING, 0) and time.monotonic() < until:
                    for process in RUNNING[:]:
                        send_signal(process, signal.SIGCONT if process == pid else signal.SIGSTOP)
                    time.sleep(0.05)
                    if not pid:
                        break
    except BaseException:
        for process in RUNNING[:]:
            send_signal(process, signal.SIGKILL)
        raise


def rss_gb(usage: resource.struct_rusage) -> float:
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def tail(output: str, lines: int = 15) -> str:
    return "\n".join(output.splitlines()[-lines:])

"""Where the processes of a run meet before the process group exists: torch's TCPStore, on rank 0 or in torchrun.

A process that fails before it has come there (a mistake in its own command, say) publishes that at the store, and the
others, which wait for it, end.
"""

from __future__ import annotations

import hashlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from toolkit.distributed.world import Environ, cluster_environment, detect_world
from toolkit.errors import UserError, is_settled

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
FAILED = "failed"  # the key of the first failure before the rendezvous
BOOT = 60.0  # seconds that a process of this run may take to start, however short --timeout is
_FIRST_TRY = 10.0  # seconds in which a failed process looks for the store before it prints its message


def within(seconds: float, act: Callable[[], T]) -> T:
    """Call ``act`` in a thread: torch's client of a store that does not answer waits without a limit.

    Raises:
        TimeoutError: it has not returned within ``seconds``; the thread is left behind.
    """
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((act(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError("no answer") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def open_store(host: str, port: int, seconds: float, is_host: bool) -> Store:
    """Open the store at an address; it lives in rank 0, or in torchrun.

    Raises:
        TimeoutError: nobody answers there; with the last reason as its text.
        torch.distributed.DistError: the port is taken, or who answers is no store.
    """
    from torch import distributed as dist

    is_host = is_host and not _is_in_torchrun()
    deadline = time.monotonic() + seconds
    while not is_host:  # torch tries as long, but writes a stack to stderr each time
        try:
            socket.create_connection((host, port), timeout=max(1.0, seconds)).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(error.strerror or str(error)) from None
            time.sleep(0.2)
    timeout = timedelta(seconds=max(seconds, 5.0))
    # multi_tenant: a later run in the same processes takes the same server
    return within(
        max(deadline - time.monotonic(), 5.0),
        lambda: dist.TCPStore(host, port, None, is_host, timeout, wait_for_workers=False, multi_tenant=True),
    )


def name_run(number: int) -> str:
    """The prefix of a run's keys: torchrun's store outlives a failed attempt, and what was published in it."""
    return f"run-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}-{number}"


def _is_in_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


# ---- a failure before the rendezvous


class _Place(NamedTuple):
    """A process of a run that has failed, by what its launcher, or the user, has set."""

    host: str
    port: int
    rank: int
    others: int | None
    """How many other processes there are; None if only the command's options tell."""
    prefix: str
    """Names the process, where it is not the first."""


def report_failure(error: BaseException | None, text: str, code: int, report: Callable[[str], None]) -> None:
    """Report that this process fails. If it has not met the others of its run, they end, too.

    Args:
        error: The exception, if it is one.
        text: Why it fails.
        code: Its exit code.
        report: Prints the text after a prefix. It is called unless another process has reported the same text.
    """
    place = None if is_settled(error) or isinstance(error, KeyboardInterrupt) else _find_place()
    if place is None:
        return report("")
    report_once = cache(lambda: report(place.prefix))
    if place.others is None or (place.rank == 0 and not _is_in_torchrun()):
        report_once()
    try:
        store = _open_to_publish(place, _FIRST_TRY)
        if store is None:  # rank 0 may be slower to start
            report_once()
            store = _open_to_publish(place, BOOT)
        if store is None:
            return
        if store.add(f"{FAILED}/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1:  # nobody has reported the same
            report_once()
    except (Exception, KeyboardInterrupt):
        return report_once()
    with suppress(Exception, KeyboardInterrupt):  # the store may end with another process
        _publish(store, place, text, code)


def _open_to_publish(place: _Place, seconds: float) -> Store | None:
    from torch import distributed as dist

    try:
        store = open_store(place.host, place.port, seconds, is_host=place.rank == 0)
    except (TimeoutError, dist.DistError):
        return None
    return dist.PrefixStore(name_run(0), store)  # only the first run of a process has nobody to end it


def _publish(store: Store, place: _Place, text: str, code: int) -> None:
    """See :class:`toolkit.distributed.shutdown.ShutdownCoordinator` for what the keys mean."""
    store.compare_set(FAILED, "", f"{code} {place.prefix}{text}")
    store.set("ended", "")
    if place.rank != 0:
        store.add("read", 1)
        return
    store.set("end", f"{code} {text}")
    if _is_in_torchrun():
        return
    # The store lives in this process: keep it until the others have read it.
    deadline = time.monotonic() + (BOOT if place.others is not None else _FIRST_TRY)
    while time.monotonic() < deadline and (place.others is None or store.add("read", 0) < place.others):
        time.sleep(0.05)


def _find_place(environ: Environ = os.environ) -> _Place | None:
    """Return where this process would have met others; None if there are none, or their address is not known."""
    by_hand = {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys()  # on --num_nodes nodes, two at least
    has_launcher = bool({"LOCAL_RANK", "SLURM_NTASKS"} & environ.keys())
    try:
        nodes = None if has_launcher or not by_hand else max(2, int(environ["NODE_RANK"]) + 1)
        layout = detect_world("auto", nodes, None, environ)
        if layout.world_size == 1:
            return None
        environment = cluster_environment(layout)
        host, port = environment.main_address, environment.main_port
    except (UserError, ValueError):
        return None
    rank = layout.global_rank
    is_numbered = layout.devices > 1 or "LOCAL_RANK" in environ  # else by nodes
    prefix = "" if rank == 0 else f"{'rank' if is_numbered else 'node'} {rank}: "
    return _Place(host, port, rank, layout.world_size - 1 if has_launcher else None, prefix)

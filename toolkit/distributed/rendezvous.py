"""Rendezvous of a run's processes before the process group exists: torch's TCPStore, on rank 0 or in torchrun.

A process that fails before the rendezvous, for example on a wrong flag, publishes its failure at the store. The waiting
processes then end.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from toolkit.config import AUTO, Auto
from toolkit.distributed.launchers import Environ, find_launchers
from toolkit.distributed.world import cluster_environment, detect_world
from toolkit.errors import TerminatedError, UserError, is_reported
from toolkit.io.threads import call_with_timeout

if TYPE_CHECKING:
    from torch.distributed import Store

FAILED = "failed"  # the key of the first failure before the rendezvous
STARTUP_TIMEOUT_S = 60.0  # for a process of this run to start, regardless of --timeout
DATA_TIMEOUT_S = 20.0  # for one that has started to read the prepared data
CONNECT_TIMEOUT_S = 10.0  # for a failed process to reach the store before it prints its message


def open_store(host: str, port: int, seconds: float, is_host: bool) -> Store:
    """Open the store at an address; rank 0 or torchrun hosts it.

    Raises:
        TimeoutError: no answer at this address; the message is the last error.
        torch.distributed.DistError: another program uses the port.
    """
    from torch import distributed as dist

    is_host = is_host and not is_in_torchrun()
    deadline = time.monotonic() + seconds
    while not is_host:  # torch retries too, but prints a stack trace each time
        try:
            socket.create_connection((host, port), timeout=max(1.0, seconds)).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(error.strerror or str(error)) from None
            time.sleep(0.2)
    timeout = timedelta(seconds=max(seconds, 5.0))
    # multi_tenant: a later run in the same processes reuses the server
    return call_with_timeout(
        max(deadline - time.monotonic(), 5.0),
        lambda: dist.TCPStore(host, port, None, is_host, timeout, wait_for_workers=False, multi_tenant=True),
    )


def run_key_prefix(number: int) -> str:
    """Return the prefix of a run's keys. It is unique because torchrun's store outlives a failed attempt.

    The restart count is used only there, because it may differ between nodes: torchrun counts the restarts that a
    node's own ranks have caused (pytorch/pytorch#108158).
    """
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] if is_in_torchrun() else 0
    return f"run-{attempt}-{number}"


def is_in_torchrun() -> bool:
    """Whether torchrun hosts the store. TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes rank 0 host it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


# ---- a failure before the rendezvous


class _FailedProcess(NamedTuple):
    """This process, which failed, and the address of the run's store."""

    host: str
    port: int
    rank: int
    others: int | None
    """Number of other processes; None if only the command's options specify it."""
    prefix: str
    """Prefix of messages that names the process; empty for rank 0."""


def report_failure(error: BaseException | None, text: str, code: int, report: Callable[[str], None]) -> None:
    """Report the failure of this process. Before the rendezvous, also end the other processes.

    ``report`` prints ``text`` with a prefix. If another process has reported the same text, it is not called.
    """
    is_interrupted = isinstance(error, KeyboardInterrupt) and not isinstance(error, TerminatedError)
    peer = None if is_reported(error) or is_interrupted else _locate_this_process()
    if peer is None:
        return report("")
    report_once = cache(lambda: report(peer.prefix))
    if peer.others is None or (peer.rank == 0 and not is_in_torchrun()):
        report_once()
    try:
        store = _open_to_publish(peer, min(CONNECT_TIMEOUT_S, _timeout()))
        if store is None:  # rank 0 may be slower to start
            report_once()
            store = _open_to_publish(peer, _timeout() - CONNECT_TIMEOUT_S)
        if store is None:
            return
        if store.add(f"{FAILED}/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1:  # first to report this text
            report_once()
    except (Exception, KeyboardInterrupt):
        return report_once()
    with suppress(Exception, KeyboardInterrupt):  # the store may end with another process
        _publish(store, peer, text, code)


user_timeout = ""
"""Value of ``--timeout`` on the command line or in a YAML file; empty until they are read."""


def _timeout() -> float:
    """Return the seconds to try to reach other processes: at most ``--timeout``, read from argv if not parsed yet."""
    match = re.match(r"([\d.]+)$", user_timeout) or re.search(r"--timeout[= ]([\d.]+)", " ".join(sys.argv))
    with suppress(ValueError):
        return min(STARTUP_TIMEOUT_S, 60 * float(match[1])) if match else STARTUP_TIMEOUT_S
    return STARTUP_TIMEOUT_S


def _open_to_publish(peer: _FailedProcess, seconds: float) -> Store | None:
    from torch import distributed as dist

    try:
        store = open_store(peer.host, peer.port, seconds, is_host=peer.rank == 0)
    except (TimeoutError, dist.DistError):
        return None
    return dist.PrefixStore(run_key_prefix(0), store)  # later runs of this process end through ShutdownCoordinator


def _publish(store: Store, peer: _FailedProcess, text: str, code: int) -> None:
    """Publish a failure; :class:`toolkit.distributed.shutdown.ShutdownCoordinator` defines the keys."""
    store.compare_set(FAILED, "", f"{code} {peer.prefix}{text}")
    store.set("ended", "")
    if peer.rank != 0:
        store.add("read", 1)
        return
    store.set("end", f"{code} {text}")
    if is_in_torchrun():
        return
    # This process hosts the store: keep it until the others have read it.
    deadline = time.monotonic() + (_timeout() if peer.others is not None else min(CONNECT_TIMEOUT_S, _timeout()))
    while time.monotonic() < deadline and (peer.others is None or store.add("read", 0) < peer.others):
        time.sleep(0.05)


def _locate_this_process(environ: Environ = os.environ) -> _FailedProcess | None:
    """Return this process's rank and store address in a multi-process run; None for one process or if unknown."""
    is_manual = {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys()  # at least two nodes
    try:
        has_launcher = bool({"LOCAL_RANK", "SLURM_NTASKS"} & environ.keys() or find_launchers(environ))
        if "LOCAL_RANK" in environ and {"RANK", "WORLD_SIZE"} <= environ.keys() and "LOCAL_WORLD_SIZE" not in environ:
            # mpirun and the like: --devices specifies how many of the processes are on this node
            environ = {**environ, "LOCAL_WORLD_SIZE": environ["WORLD_SIZE"], "LOCAL_RANK": environ["RANK"]}
            environ.pop("NODE_RANK", None)
        nodes: int | Auto = AUTO if has_launcher or not is_manual else max(2, int(environ["NODE_RANK"]) + 1)
        world = detect_world(AUTO, nodes, None, environ)
        if world.world_size == 1:
            return None
        environment = cluster_environment(world)
        host, port = environment.main_address, environment.main_port
    except (UserError, ValueError):
        return None
    rank = world.global_rank
    has_ranks = world.devices > 1 or "LOCAL_RANK" in environ  # otherwise one process per node
    prefix = "" if rank == 0 else f"{'rank' if has_ranks else 'node'} {rank}: "
    return _FailedProcess(host, port, rank, world.world_size - 1 if has_launcher else None, prefix)

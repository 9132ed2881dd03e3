"""How the processes of a run start, meet, and end: together.

They meet twice. First at a store on rank 0 (torch's TCPStore), where they wait for each other while the data is
prepared (law S5) and where each leaves word of why it ends; then in the process group, for the collectives.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple, NoReturn, TypeVar

from lightning.fabric import Fabric
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from torch import distributed as dist

from toolkit.distributed import ranks
from toolkit.distributed.layout import Layout
from toolkit.errors import CommandEnd, EndedTogether, PeerLost, UserError

T = TypeVar("T")
_PARENT = "TOOLKIT_PARENT_PID"  # tells a process that another one of its node has started it
_HEARTBEAT = 30.0  # seconds between two lines of a rank that waits
_LINGER = 5.0  # seconds that a failed run gives its ranks to end by themselves
_LOST = ("onnection", "imed out", "timeout", "roken pipe", "NCCL", "gloo", "socket", "Store")  # in torch's messages
_runs = count()


class Timeouts(NamedTuple):
    """Seconds to wait for a rank that does not answer."""

    first: float
    """Before the first step is done, while models are built and kernels compiled, and while checkpoints are written."""
    later: float

    @classmethod
    def of(cls, minutes: float | None) -> Timeouts:
        return cls(30 * 60, 5 * 60) if minutes is None else cls(minutes * 60, minutes * 60)


class Launched:
    """For Fabric's strategies of several processes: starting them is one thing, the process group another."""

    def _configure_launcher(self: Any) -> None:
        self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self: Any) -> None:
        ParallelStrategy.setup_environment(self)
        self._set_world_ranks()


class _Launcher(_SubprocessScriptLauncher):
    """Fabric's, which starts the same command once per device, with another watch over the processes.

    Fabric's own kills the run at once when a process ends in any way but well, be it with a checkpoint saved.
    """

    def launch(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[_PARENT] = str(os.getpid())
            self._call_children_scripts()
            threading.Thread(target=_watch_children, args=(self.procs,), daemon=True).start()
        elif os.environ.get(_PARENT) == str(os.getppid()):
            threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


def _watch_children(processes: list[subprocess.Popen]) -> None:
    """End this process, too, some time after one of its children failed: it may be stuck in a collective."""
    while all(process.poll() in (None, 0) for process in processes):
        time.sleep(0.5)
    time.sleep(6 * _LINGER)
    failed = next((i, p.returncode) for i, p in enumerate(processes, 1) if p.returncode)
    print(f"local rank {failed[0]} ended with {failed[1]}, and the run with it", file=sys.stderr, flush=True)
    _kill(processes)
    os.kill(os.getpid(), signal.SIGKILL)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(2 * _LINGER)
    os.kill(os.getpid(), signal.SIGKILL)


def _kill(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        with suppress(OSError):
            process.kill()


@contextmanager
def launched(fabric: Fabric, layout: Layout, timeouts: Timeouts) -> Iterator[RunGroup]:
    """Start the processes of a run; they end together, with one message and the exit code of what went wrong.

    Raises:
        UserError: the processes do not find each other within the timeout.
        PeerLost: another process is gone, or does not answer.
        EndedTogether: rank 0 has said why the run ends.
    """
    if layout.world_size == 1:
        fabric.launch()
        yield RunGroup(fabric, layout, None, timeouts)
        return
    fabric.launch()
    group = RunGroup(fabric, layout, _meet(layout, timeouts), timeouts)
    try:
        yield group
        if ranks.is_distributed():
            ranks.barrier()
    except BaseException as error:
        group.end(error)


def _meet(layout: Layout, timeouts: Timeouts) -> dist.Store:
    if ranks.is_distributed():  # a second run in the same processes
        return dist.PrefixStore(f"run-{next(_runs)}", dist.distributed_c10d._get_default_store())
    try:
        store, _, _ = next(
            dist.rendezvous("env://", layout.global_rank, layout.world_size, timeout=timedelta(seconds=timeouts.first))
        )
    except (RuntimeError, ValueError) as error:
        address = f"MASTER_ADDR {os.environ.get('MASTER_ADDR')}, MASTER_PORT {os.environ.get('MASTER_PORT')}"
        why = " ".join(str(error).split(". Exception raised from")[0].split())
        raise UserError(
            f"{address}: the {layout.world_size} processes of the run did not meet there within "
            f"{timeouts.first / 60:g} minutes ({why}); start all of them, let every node reach this address, or raise "
            "--timeout"
        ) from None
    return store


class RunGroup:
    """The processes of one run, from their first meeting on.

    Args:
        store: Where they meet; None in a run of one process.
    """

    def __init__(self, fabric: Fabric, layout: Layout, store: dist.Store | None, timeouts: Timeouts) -> None:
        self.fabric, self.layout, self.timeouts = fabric, layout, timeouts
        self._store = store

    def first_then_others(self, prepare: Callable[[], T]) -> T:
        """Call ``prepare`` on rank 0, then on the first rank of each other node, then on the rest (law S5)."""
        if self._store is None:
            return prepare()
        mine, local = self.layout.global_rank, self.layout.local_rank
        if mine != 0:
            self._wait_for("prepared/0")
        if mine != 0 and local != 0:
            self._wait_for(f"prepared/{self.layout.node_rank}")
        value = prepare()
        if local == 0:
            self._store.set(f"prepared/{self.layout.node_rank}", "")
        return value

    def connect(self) -> None:
        """Make the process group.

        Raises:
            UserError: there are more or fewer processes than the layout says.
        """
        if self._store is None:
            return
        rank, size = self.layout.global_rank, self.layout.world_size
        if not ranks.is_distributed():
            backend = "cpu:gloo,cuda:nccl" if self.fabric.device.type == "cuda" else "gloo"
            timeout = timedelta(seconds=self.timeouts.first)
            dist.init_process_group(backend, store=self._store, rank=rank, world_size=size, timeout=timeout)
            atexit.register(_disconnect)
        if not self.fabric.world_size == ranks.world_size() == size:
            raise UserError(
                f"--devices {self.layout.devices}: {size} processes were expected on --num_nodes "
                f"{self.layout.num_nodes}, and there are {ranks.world_size()}"
            )

    def first_step_done(self) -> None:
        ranks.set_timeout(self.timeouts.later)

    def _wait_for(self, key: str) -> None:
        """Wait as long as it takes, saying so now and then; a rank that has failed ends the wait."""
        assert self._store is not None
        started = said = time.monotonic()
        while True:
            if self._store.check([key]):
                return
            if self._ended():
                raise PeerLost("another rank has ended")
            time.sleep(0.05)  # the store's own wait writes a warning whenever it comes back without the key
            now = time.monotonic()
            if now - said > _HEARTBEAT and (self.layout.local_rank == 0 or self.layout.global_rank == 1):
                said = now
                ranks.rank_print(f"waiting for the data to be prepared ({now - started:.0f} s)")

    # ---- the end

    def end(self, error: BaseException) -> NoReturn:
        """Leave word of why this process ends, learn why the others do, and raise what is to be said here."""
        first = self.layout.global_rank == 0
        own = not _is_loss(error)
        with suppress(Exception):  # the store may be gone with rank 0
            self._tell(error) if own else self._store.set(f"lost/{self.layout.global_rank}", "")
        try:
            raise self._verdict(error, own, first) from (None if not own else error.__cause__)
        finally:
            if first:
                self._linger()

    def _verdict(self, error: BaseException, own: bool, first: bool) -> BaseException:
        if first:
            if own:
                return error
            verdict = self._cause() or self._gone(error)
            with suppress(Exception):
                self._tell(verdict)
            return verdict
        if own and not isinstance(error, CommandEnd):
            return error  # a bug: its traceback is only here
        with suppress(Exception):
            deadline = time.monotonic() + 2 * _LINGER
            while not self._store.check(["end/0"]) and time.monotonic() < deadline:
                time.sleep(0.05)
            return EndedTogether(int(self._store.get("end/0").decode().partition(" ")[0]))
        return error if own else PeerLost(f"rank 0 is gone, and the run with it; {_GO_ON}")

    def _tell(self, error: BaseException) -> None:
        known = isinstance(error, CommandEnd)
        code = error.exit_code if known else 130 if isinstance(error, KeyboardInterrupt) else 1
        text = str(error) if known else f"{type(error).__name__}: {error}"
        self._store.set(f"end/{self.layout.global_rank}", f"{code} {text}")

    def _ended(self) -> list[int]:
        return [r for r in range(self.layout.world_size) if self._store.check([f"end/{r}"])]

    def _cause(self) -> CommandEnd | None:
        """What another rank has said about its end; waits a moment for it."""
        deadline = time.monotonic() + _LINGER / 2
        while time.monotonic() < deadline:
            with suppress(Exception):
                for rank in self._ended():
                    code, _, text = self._store.get(f"end/{rank}").decode().partition(" ")
                    cause = PeerLost(f"rank {rank}: {text}")
                    cause.exit_code = int(code)
                    return cause
            if self._dead_children():
                break
            time.sleep(0.1)
        return None

    def _gone(self, error: BaseException) -> PeerLost:
        dead = self._dead_children()
        others = range(1, self.layout.world_size)
        with suppress(Exception):
            silent = [r for r in others if not self._store.check([f"lost/{r}"])]
            others = dead or silent or others
        names = ", ".join(map(str, others))
        which = f"rank {names} is gone" if len(others) == 1 else f"one of the ranks {names} is gone"
        if any(word in str(error) for word in ("imed out", "timeout")) and not dead:
            which = f"no answer from rank {names} within --timeout ({self.timeouts.later / 60:g} minutes)"
        return PeerLost(f"{which}, and the run with it; {_GO_ON}")

    def _dead_children(self) -> list[int]:
        processes = getattr(self.fabric.strategy.launcher, "procs", [])
        base = self.layout.node_rank * self.layout.devices
        return [base + i for i, process in enumerate(processes, 1) if process.poll() not in (None, 0)]

    def _linger(self) -> None:
        """Keep the store, which lives in this process, until all have read it; then end what does not end."""
        processes = getattr(self.fabric.strategy.launcher, "procs", [])
        deadline = time.monotonic() + _LINGER
        with suppress(Exception):
            while time.monotonic() < deadline and len(self._ended()) < self.layout.world_size:
                if processes and all(process.poll() is not None for process in processes):
                    break
                time.sleep(0.1)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        _kill(processes)


_GO_ON = "--resume auto goes on with the newest checkpoint"


def _is_loss(error: BaseException) -> bool:
    """Whether torch says that another process has gone or does not answer."""
    if isinstance(error, PeerLost):
        return True
    if isinstance(error, CommandEnd) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST)


def _disconnect() -> None:
    if ranks.is_distributed():
        with suppress(Exception):
            dist.destroy_process_group()

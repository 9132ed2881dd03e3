"""Launch a run's processes and connect them. :mod:`toolkit.distributed.shutdown` shuts them down.

Processes first rendezvous at a store on rank 0 (torch's TCPStore) and wait there while the data is prepared (S5).
They then create the process group for collectives.
"""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import distributed as dist

from toolkit.config import AUTO, Auto
from toolkit.distributed import lifeline, ranks
from toolkit.distributed.interfaces import choose_gloo_interface
from toolkit.distributed.lifeline import Lifeline
from toolkit.distributed.rendezvous import DATA_TIMEOUT_S, STARTUP_TIMEOUT_S, is_in_torchrun, open_store, run_key_prefix
from toolkit.distributed.shutdown import ShutdownCoordinator, children, name_ranks
from toolkit.distributed.world import WorldInfo
from toolkit.errors import PeerLostError, UserError, first_line
from toolkit.io.threads import call_with_timeout

T = TypeVar("T")
_HEARTBEAT = 30.0  # seconds between messages of a waiting rank
_runs = count()


class Timeouts(NamedTuple):
    """Seconds to wait for an unresponsive rank.

    ``first`` applies until the first step completes (model build, kernel compilation), and while checkpoints are saved.
    """

    first: float
    later: float

    @classmethod
    def from_minutes(cls, minutes: float | Auto) -> Timeouts:
        return cls(30 * 60, 5 * 60) if minutes == AUTO else cls(minutes * 60, minutes * 60)


@contextmanager
def launch_processes(fabric: Fabric, world: WorldInfo, timeouts: Timeouts) -> Iterator[RunGroup]:
    """Launch a run's processes. If one fails, all exit with one message and the exit code of the root cause."""
    fabric.launch()
    group = RunGroup(fabric, world, timeouts)
    if world.world_size == 1:
        yield group
        return
    group.shutdown.watch()
    try:
        group.rendezvous()
        yield group
        ranks.barrier()
    except BaseException as error:
        group.shutdown.end(error)
    group.shutdown.done()


class RunGroup:
    """The processes of a run, from the rendezvous on. With one process every wait is a no-op."""

    def __init__(self, fabric: Fabric, world: WorldInfo, timeouts: Timeouts) -> None:
        self.fabric, self.world, self.timeouts = fabric, world, timeouts
        self.shutdown = ShutdownCoordinator(world)
        self._store: dist.Store | None = None

    def rendezvous(self) -> None:
        """Connect to the store and wait for all ranks there."""
        strategy, rank = self.fabric.strategy, self.world.global_rank
        assert isinstance(strategy, ParallelStrategy) and strategy.cluster_environment is not None
        host, port = strategy.cluster_environment.main_address, strategy.cluster_environment.main_port
        address, limit = (
            f"MASTER_ADDR {host}, MASTER_PORT {port}",
            f"within {self.timeouts.first / 60:g} minutes",
        )
        hint = (
            "start all processes, let every node reach this address, or raise --timeout (see troubleshooting: hanging)"
        )
        try:
            store = open_store(host, port, self.timeouts.first, is_host=rank == 0)
        except TimeoutError as error:
            raise UserError(f"{address}: no answer from rank 0 {limit} ({error}); {hint}") from None
        except dist.DistError as error:
            why = first_line(error)
            raise UserError(f"{address}: not usable ({why}); use a free port of the first node") from None
        name = run_key_prefix(next(_runs))
        self._store = store = dist.PrefixStore(name, store)
        # A separate connection: the process group blocks the other one while it waits for a key.
        self.shutdown.store = dist.PrefixStore(name, open_store(host, port, self.timeouts.first, is_host=False))
        if self._query_store(lambda: store.add(f"claimed/{rank}", 1)) > 1:
            if is_in_torchrun():  # the nodes disagree on the number of restarts
                raise UserError(
                    f"RANK {rank}: taken by an earlier attempt of this torchrun job; give each attempt a new store: "
                    "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun on every node"
                )
            raise UserError(
                f"NODE_RANK {self.world.node_rank}: another process is also rank {rank}; number the nodes from 0"
            )
        what = "for all processes to start"
        if rank != 0:
            self._wait_for(lifeline.ADDRESS, what)
        self.shutdown.lifeline = self._query_store(lambda: Lifeline(store, host, port, rank))
        try:
            self._wait_for_ranks("here", what, STARTUP_TIMEOUT_S)
        except TimeoutError as error:
            raise UserError(f"{address}: {error} did not connect {limit}; {hint}") from None

    def decide_on_rank0(self, decide: Callable[[], bool], key: str = "decided") -> bool:
        """Return rank 0's decision on every rank, before there is a process group. Each has its own ``key``."""
        if (store := self._store) is None:
            return decide()
        if self.world.global_rank == 0:
            store.set(key, str(decide()))
        self._wait_for(key, "for rank 0 to read the checkpoint")
        return self._query_store(lambda: store.get(key)) == b"True"

    def prepare_in_turns(self, prepare: Callable[[], T]) -> T:
        """Call ``prepare`` on rank 0, then on the first rank of each other node, then on the rest (S5)."""
        if (store := self._store) is None:
            return prepare()
        what = "for the data to be prepared"
        if self.world.global_rank != 0:
            self._wait_for("prepared/0", what)
        if self.world.local_rank != 0:
            self._wait_for(f"prepared/{self.world.node_rank}", what)
        value = prepare()
        if self.world.local_rank == 0:
            self._query_store(lambda: store.set(f"prepared/{self.world.node_rank}", ""))
        return value

    def init_process_group(self) -> None:
        """Create the process group when all ranks have arrived."""
        lifeline = self.shutdown.lifeline
        if self.world.world_size == 1 and isinstance(self.fabric.strategy, ParallelStrategy):
            if not ranks.is_distributed():  # FSDP over one rank
                create_process_group(dist.HashStore(), self.world, self.fabric.device, self.timeouts.first)
            return
        if self._store is None or lifeline is None:
            return  # one process
        try:  # torch's own wait does not detect a failed rank
            self._wait_for_ranks("ready", "for all ranks to have the data", DATA_TIMEOUT_S)
        except TimeoutError as error:
            waited = f"for {self.timeouts.first / 60:g} minutes"
            hint = "raise --timeout if it needs longer (see troubleshooting: hanging)"
            raise PeerLostError(f"no answer from {error} {waited}; {hint}") from None
        lifeline.is_watching = False
        if not ranks.is_distributed():
            create_process_group(self._store, self.world, self.fabric.device, self.timeouts.first)
        ranks.set_timeout(self.timeouts.first)
        ranks.barrier()  # no rank needs the lifeline from here on
        lifeline.close()
        world = self.world
        if not self.fabric.world_size == ranks.world_size() == world.world_size:
            raise UserError(
                f"expected {world.world_size} processes (--devices {world.devices} x --num_nodes {world.num_nodes}), "
                f"but {ranks.world_size()} are connected; give the numbers that the launcher uses"
            )

    def _wait_for_ranks(self, name: str, what: str, at_least: float = 0.0) -> None:
        """Wait until all ranks reach this point. Rank 0 enforces the timeout: ``at_least`` (s) for its children."""
        store = self._store
        assert store is not None
        self._query_store(lambda: store.set(f"{name}/{self.world.global_rank}", ""))
        if self.world.global_rank != 0:
            return self._wait_for(name, what)
        started, others = time.monotonic(), range(1, self.world.world_size)
        for rank in others:
            seconds = max(self.timeouts.first, at_least if rank <= len(children) else 0)
            try:
                self._wait_for(f"{name}/{rank}", what, started + seconds)
            except TimeoutError:
                missing = [r for r in others if not store.check([f"{name}/{r}"])]
                raise TimeoutError(name_ranks(missing)) from None
        store.set(name, "")

    def _wait_for(self, key: str, what: str, deadline: float = math.inf) -> None:
        """Wait until another rank sets ``key``, with periodic messages. Raise PeerLostError if a rank fails."""
        started = last_message = time.monotonic()
        while not self._query_store(lambda: self._is_set(key)):
            if (now := time.monotonic()) > deadline:
                raise TimeoutError
            if now - last_message >= _HEARTBEAT and self.shutdown.is_reporter:
                last_message = now
                ranks.rank_print(f"waiting {what} ({now - started:.0f} s)")
            time.sleep(0.05)  # the store's own wait logs a warning on every timeout

    def _is_set(self, key: str) -> bool:
        assert self._store is not None
        if self._store.check([key]):
            return True
        if self.shutdown.peer_ended():
            raise PeerLostError("another rank has ended")
        return False

    def _query_store(self, query: Callable[[], T]) -> T:
        """Run a store query; torch's client alone would wait forever for a dead store."""
        try:
            return call_with_timeout(self.timeouts.first, query)
        except TimeoutError:
            minutes = self.timeouts.first / 60
            raise PeerLostError(f"no answer from rank 0's store for {minutes:g} minutes (--timeout)") from None


def create_process_group(store: dist.Store, world: WorldInfo, device: torch.device, seconds: float) -> None:
    """Create the process group of ranks on ``device``, with a timeout in seconds; it ends with this process."""
    timeout, backends = timedelta(seconds=seconds), choose_backends(device)
    rank, size = world.global_rank, world.world_size
    if world.num_nodes > 1:
        choose_gloo_interface()
    dist.init_process_group(store=store, rank=rank, world_size=size, timeout=timeout, **backends)
    atexit.register(leave_process_group)


def choose_backends(device: torch.device) -> dict[str, Any]:
    """Return the backend arguments of ``init_process_group`` for a rank on ``device``.

    NCCL would guess the device from the rank, which is wrong if a rank does not see all devices of its node.
    """
    if device.type != "cuda":
        return {"backend": "gloo"}
    return {"backend": "cpu:gloo,cuda:nccl", "device_id": device}


def leave_process_group() -> None:
    """Leave the process group, if there is one."""
    if ranks.is_distributed():
        with suppress(Exception):
            dist.destroy_process_group()
        # gloo's threads may still hold tensors of the last collectives; freeing one during interpreter exit aborts
        time.sleep(0.2)

"""Rank information and collectives. In a single process, every collective returns its input.

Small values (counts, flags, names) use CPU collectives on every device: gloo reports a lost rank at once, as an
exception.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from toolkit.distributed.mesh import Layout
from toolkit.errors import PeerLostError, UserError, join_first
from toolkit.io.threads import run_in_thread
from toolkit.private_torch import set_group_timeouts

T = TypeVar("T")
_timeout = 30 * 60.0
_layout: Layout | None = None
_groups: dict[Any, Any] = {}


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def global_rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


def set_layout(layout: Layout) -> None:
    """Set the layout of this run's ranks."""
    global _layout
    _layout = layout
    _groups.clear()


def layout() -> Layout:
    """Return the layout of this run's ranks. Default: data parallelism without sharding."""
    return Layout(replicate=world_size()) if _layout is None else _layout


def is_first(*dimensions: str) -> bool:
    """Whether this rank is the first in these mesh dimensions, see :meth:`toolkit.distributed.mesh.Layout.is_first`."""
    return layout().is_first(global_rank(), *dimensions)


def group(*dimensions: str) -> Any:
    """Return the process group of the ranks that differ from this one only in these mesh dimensions.

    Collective on its first call with these dimensions: all ranks call it, in the same order.
    """
    key = (layout(), dimensions)
    if key not in _groups:
        groups = layout().groups(*dimensions)
        is_world = groups == [list(range(world_size()))]
        _groups[key] = dist.group.WORLD if is_world else dist.new_subgroups_by_enumeration(groups)[0]
    return _groups[key]


def barrier() -> None:
    """Wait until all ranks call this."""
    all_reduce_sum(here=1)


def all_reduce_sum(**values: int) -> dict[str, int]:
    """Sum each value over all ranks, in one collective. For 0/1 flags, a sum above zero means "on some rank"."""
    return all_reduce_and_gather((), **values)[0]


def all_reduce_and_gather(numbers: Sequence[int], **values: int) -> tuple[dict[str, int], list[list[int]]]:
    """Sum each value over all ranks, and gather the ``numbers`` of every rank, in one collective.

    The ranks all-reduce a matrix that is zero except for each rank's row: 16 kB for two numbers on 1,024 ranks.
    """
    if not is_distributed():
        return values, [list(numbers)]
    gathered = torch.zeros(world_size(), len(numbers), dtype=torch.int64)
    gathered[global_rank()] = torch.tensor(numbers, dtype=torch.int64)
    packed = torch.cat([torch.tensor(list(values.values()), dtype=torch.int64), gathered.flatten()])
    dist.all_reduce(packed)
    sums, everywhere = packed[: len(values)].tolist(), packed[len(values) :].view_as(gathered).tolist()
    return dict(zip(values, sums, strict=True)), everywhere


def sum_over_ranks(tensor: Tensor, *dimensions: str) -> Tensor:
    """Sum a tensor in place, on its device, over all ranks, or over the ranks of :func:`group`."""
    if is_distributed():
        dist.all_reduce(tensor, group=group(*dimensions) if dimensions else None)
    return tensor


def divide_sums_(tensors: Sequence[Tensor], divisors: Sequence[int], device: torch.device, *dimensions: str) -> None:
    """Set tensors to their fp32 sums over the ranks of :func:`group`, divided, with one all-reduce on ``device``."""
    flat = sum_over_ranks(torch.cat([tensor.to(device).flatten().float() for tensor in tensors]), *dimensions)
    sums = flat.split([tensor.numel() for tensor in tensors])
    for tensor, divisor, total in zip(tensors, divisors, sums, strict=True):
        tensor.copy_(total.view_as(tensor) / divisor)


def call_on_all_ranks(function: Callable[[], T]) -> T:
    """Call ``function`` and return its result. If it raises UserError on any rank, all ranks raise the first one."""
    result: Any = None
    error = None
    try:
        result = function()
    except UserError as caught:
        error = caught
    for each in filter(None, all_gather_object(error)):
        raise each
    return result


def broadcast_from_rank0(value: T | None) -> T:
    """Return rank 0's value on every rank; the others may pass None."""
    values: list[Any] = [value]
    if is_distributed():
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def all_gather_object(value: T) -> list[T]:
    """Return the values of all ranks in rank order."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def rank_print(*message: object, rank: int | None = None) -> None:
    """Print a message with a rank prefix, on ``rank`` or on every rank.

    Before the process group exists, the rank is read from the launcher's environment variables.

    >>> rank_print("ready", rank=1)
    [rank 1] ready
    """
    here = global_rank() if is_distributed() else _rank_from_launcher()
    if rank is None or rank == here:
        # a single write, because concurrent lines of several ranks would mix
        sys.stdout.write(" ".join([f"[rank {here}]", *map(str, message)]) + "\n")
        sys.stdout.flush()


def _rank_from_launcher() -> int:
    """Return the rank set by torchrun, by SLURM, or by toolkit's launcher (LOCAL_RANK)."""
    if "RANK" not in os.environ and "LOCAL_RANK" in os.environ:
        node, per_node, local = (os.environ.get(n, "0") for n in ("NODE_RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"))
        return int(node) * int(per_node) + int(local)
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def set_timeout(seconds: float) -> None:
    """Set the timeout of collectives in all existing process groups."""
    global _timeout
    _timeout = seconds
    if is_distributed():
        set_group_timeouts(seconds)


def timeout() -> float:
    """Return the timeout of collectives in seconds."""
    return _timeout


@contextmanager
def extended_timeout(seconds: float, after: float) -> Iterator[None]:
    """Set the timeout of collectives to ``seconds`` in the block (for slow disk writes), and to ``after`` on exit."""
    set_timeout(seconds)
    try:
        yield
    finally:
        set_timeout(after)


def wait_for_all(is_done: Callable[[float], bool], on_heartbeat: Callable[[list[int]], None]) -> None:
    """Wait without a time limit until every rank's work is done. Every rank calls this.

    The ranks exchange heartbeats, so the timeout applies only to an unresponsive rank.

    Args:
        is_done: Waits at most the given number of seconds and returns whether this rank's work is done.
        on_heartbeat: Called after each heartbeat with the ranks whose work is not done.
    """
    while True:
        _, done = all_reduce_and_gather([int(is_done(min(5.0, _timeout / 4)))])
        if all(flag for (flag,) in done):
            return
        on_heartbeat([rank for rank, (flag,) in enumerate(done) if not flag])


def run_with_heartbeat(function: Callable[[], T], on_heartbeat: Callable[[list[int]], None]) -> T:
    """Run ``function``, wait until all ranks have finished it, and return the result. Every rank calls this.

    With several ranks, ``function`` runs in a thread while the caller exchanges heartbeats, so it must not call a
    collective. If another rank is lost, this raises at once and the thread continues.
    """
    if world_size() == 1:
        return function()
    future = run_in_thread(function, name="disk")
    wait_for_future(future, on_heartbeat)
    return future.result()


def wait_for_future(future: Future, on_heartbeat: Callable[[list[int]], None]) -> None:
    """Wait until the futures of all ranks are done, see :func:`wait_for_all`."""
    wait_for_all(lambda seconds: bool(wait([future], seconds).done), on_heartbeat)


class WaitReporter:
    """Reports a wait for other ranks: first after half the timeout (at most 30 s), then each time the wait doubles.

    Args:
        what: What the other ranks are doing, for messages.
        report: Prints a line.
    """

    def __init__(self, what: str, report: Callable[[str], None]) -> None:
        self._what, self._report = what, report
        self._started, self._clock = time.monotonic(), time.strftime("%H:%M:%S")
        self._next = min(30.0, _timeout / 2)

    def __call__(self, busy: list[int]) -> None:
        if (seconds := time.monotonic() - self._started) >= self._next:
            self._next = 2 * seconds
            who = "rank" if len(busy) == 1 else "ranks"
            names = join_first(list(map(str, busy)))
            self._report(f"waiting for {who} {names} to {self._what} (since {self._clock}, {seconds:.0f} s)")


def run_on_rank0(function: Callable[[], T], on_heartbeat: Callable[[list[int]], None] | None = None) -> T | None:
    """Call ``function`` on rank 0 and return its result there, None elsewhere. An exception raises on all ranks.

    With ``on_heartbeat`` it may take longer than the timeout, see :func:`run_with_heartbeat`.

    Raises:
        PeerLostError: on the other ranks, if rank 0 failed with another error than a UserError.
    """

    def attempt() -> tuple[T | None, Exception | None]:
        try:
            return function() if global_rank() == 0 else None, None
        except Exception as caught:
            return None, caught

    value, error = attempt() if on_heartbeat is None else run_with_heartbeat(attempt, on_heartbeat)
    to_others = error if isinstance(error, UserError) else error and PeerLostError("rank 0 has ended")
    failure = broadcast_from_rank0(to_others)
    if failure is not None:
        raise error or failure
    return value


def result_of_rank0(function: Callable[[], T], on_heartbeat: Callable[[list[int]], None] | None = None) -> T:
    """Call ``function`` on rank 0 and return its result on every rank, see :func:`run_on_rank0`."""
    return broadcast_from_rank0(run_on_rank0(function, on_heartbeat))

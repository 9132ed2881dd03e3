"""Check communication between ranks: correct values, bandwidth by size, point-to-point links, clock skew.

Bandwidths follow nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): ``algbw`` is size /
time; ``busbw`` is ``algbw`` times 2 (n - 1) / n for all-reduce, and times (n - 1) / n for all-gather and reduce-scatter
(size: the complete tensor). ``busbw`` is comparable to the hardware's bandwidth for any number of ranks n.
"""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from toolkit.distributed import ranks
from toolkit.errors import DifferenceError

_KIB, _MIB = 1 << 10, 1 << 20
SIZES = {"cpu": (4 * _KIB, 64 * _KIB, _MIB, 16 * _MIB), "cuda": (4 * _KIB, 64 * _KIB, _MIB, 16 * _MIB, 256 * _MIB)}
"""Bytes by type of device."""
_PATTERN = 251  # elements after which values repeat; keeps sums over ranks exact in fp32


class Measurement(NamedTuple):
    """Timing of one operation.

    Args:
        operation: Name of the operation.
        size: Bytes of the complete tensor.
        seconds: Mean time on the slowest rank over several repetitions.
        algbw, busbw: Bytes per second; see the module docstring.
    """

    operation: str
    size: int
    seconds: float
    algbw: float
    busbw: float


class Link(NamedTuple):
    """Bandwidth in bytes per second from one rank to the next, while all ranks send around a ring."""

    sender: int
    receiver: int
    bandwidth: float


def measure_collectives(device: torch.device) -> Iterator[Measurement]:
    """Check and time all-reduce, all-gather and reduce-scatter. All ranks must iterate together."""
    n = ranks.world_size()
    for size in SIZES.get(device.type, SIZES["cpu"]):
        for name, (prepare, factor) in _OPERATIONS.items():
            operation, result, expected = prepare(_elements(size, n), device)
            _local_seconds(operation, device, 1)
            _require_correct(f"{name} of {format_size(size)}", result, expected)
            seconds = _time(operation, device, 5 if size > _MIB else 20)
            yield Measurement(name, size, seconds, size / seconds, size / seconds * factor(n))


def measure_ring(device: torch.device) -> list[Link]:
    """Check and time point-to-point transfers around the ring of ranks. Every rank returns all links."""
    rank, n = ranks.global_rank(), ranks.world_size()
    size = SIZES.get(device.type, SIZES["cpu"])[-1]
    sent, received = _values(_elements(size, n), rank, device), torch.empty(_elements(size, n), device=device)

    def transfer() -> None:
        operations = [dist.P2POp(dist.isend, sent, (rank + 1) % n), dist.P2POp(dist.irecv, received, (rank - 1) % n)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    _local_seconds(transfer, device, 1)
    _require_correct(f"transfer of {format_size(size)}", received, _values(received.numel(), (rank - 1) % n, device))
    seconds = ranks.all_gather_object(_local_seconds(transfer, device, 5))
    return [Link((receiver - 1) % n, receiver, size / time) for receiver, time in enumerate(seconds)]


def measure_clock_skew(leaders: list[int]) -> dict[int, float]:
    """Return the clock skew of the ranks ``leaders``, in seconds ahead of rank 0; empty on other ranks.

    As in NTP, rank 0 requests the time and compares the reply with the midpoint of the round trip.
    """
    skews, clock, rank = {}, torch.zeros((), dtype=torch.float64), ranks.global_rank()
    for leader in leaders:
        best = (float("inf"), 0.0)  # the shortest of several round trips is the most accurate
        for _ in range(5):
            if rank == leader:
                dist.recv(clock, 0)
                dist.send(clock.fill_(time.time()), 0)
            elif rank == 0:
                asked_at = time.time()
                dist.send(clock, leader)
                dist.recv(clock, leader)
                answered_at = time.time()
                best = min(best, (answered_at - asked_at, float(clock) - (asked_at + answered_at) / 2))
        if rank == 0:
            skews[leader] = best[1]
    return skews


def format_size(size: int) -> str:
    return f"{size // _MIB} MiB" if size >= _MIB else f"{size // _KIB} KiB"


# ---- operations: (function to call, output, expected output)

# torch 2.13 renamed them
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Prepared = tuple[Callable[[], object], Tensor, Tensor]


def _all_reduce(count: int, device: torch.device) -> Prepared:
    result = _values(count, ranks.global_rank(), device)  # in place: only the first call is checked
    return lambda: dist.all_reduce(result), result, _sum(count, device)


def _all_gather(count: int, device: torch.device) -> Prepared:
    n, share = ranks.world_size(), count // ranks.world_size()
    values, result = _values(share, ranks.global_rank(), device), torch.empty(count, device=device)
    expected = torch.cat([_values(share, rank, device) for rank in range(n)])
    return lambda: _gather(result, values), result, expected


def _reduce_scatter(count: int, device: torch.device) -> Prepared:
    rank, share = ranks.global_rank(), count // ranks.world_size()
    values, result = _values(count, rank, device), torch.empty(share, device=device)
    expected = _sum(count, device)[rank * share : (rank + 1) * share]
    return lambda: _scatter(result, values), result, expected


_OPERATIONS: dict[str, tuple[Callable[[int, torch.device], Prepared], Callable[[int], float]]] = {
    "all-reduce": (_all_reduce, lambda n: 2 * (n - 1) / n),
    "all-gather": (_all_gather, lambda n: (n - 1) / n),
    "reduce-scatter": (_reduce_scatter, lambda n: (n - 1) / n),
}
"""By name: how to prepare it, and busbw / algbw for n ranks."""


def _elements(size: int, n: int) -> int:
    """Return the number of fp32 elements in ``size`` bytes, rounded to a multiple of n."""
    return max(1, size // 4 // n) * n


def _values(count: int, rank: int, device: torch.device) -> Tensor:
    """Return the values that a rank sends: integers that differ by rank."""
    return (torch.arange(count, device=device) % _PATTERN + rank).float()


def _sum(count: int, device: torch.device) -> Tensor:
    """Return the sum of all ranks' values."""
    n = ranks.world_size()
    return (torch.arange(count, device=device) % _PATTERN * n + n * (n - 1) // 2).float()


def _require_correct(what: str, result: Tensor, expected: Tensor) -> None:
    wrong = [rank for rank, ok in enumerate(ranks.all_gather_object(torch.equal(result, expected))) if not ok]
    if wrong:
        raise DifferenceError(f"{what}: wrong values on rank {', '.join(map(str, wrong))}")


def _time(operation: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Return the mean time of an operation on the slowest rank, in seconds."""
    return max(ranks.all_gather_object(_local_seconds(operation, device, repetitions)))


def _local_seconds(operation: Callable[[], object], device: torch.device, repetitions: int) -> float:
    ranks.barrier()
    started = time.perf_counter()
    for _ in range(repetitions):
        operation()
    if device.type == "cuda":
        _wait_for_cuda()
    return (time.perf_counter() - started) / repetitions


def _wait_for_cuda() -> None:
    """Wait for queued operations with a timeout; ``torch.cuda.synchronize`` waits forever if a rank is missing.

    The timeout is shorter than the collectives', where NCCL's watchdog ends the process without naming the rank.
    Not tried on CUDA.
    """
    event, deadline = torch.cuda.Event(), time.monotonic() + 0.75 * ranks.timeout()
    event.record()
    while not event.query():
        if time.monotonic() > deadline:
            raise dist.DistError("Timed out waiting for a collective on CUDA")
        time.sleep(5e-5)

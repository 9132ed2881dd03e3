"""Check communication between ranks: correct values, bandwidth by size, point-to-point links, clock skew.

Bandwidths follow nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): ``algbw`` is size /
time; ``busbw`` is ``algbw`` times 2 (n - 1) / n for all-reduce, and times (n - 1) / n for all-gather and reduce-scatter
(size: the complete tensor). ``busbw`` is comparable to the hardware's bandwidth for any number of ranks n.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist

from toolkit.distributed import ranks
from toolkit.errors import DifferenceError

_KIB, _MIB = 1 << 10, 1 << 20
SIZES = {"cpu": (4 * _KIB, 64 * _KIB, _MIB, 16 * _MIB), "cuda": (4 * _KIB, 64 * _KIB, _MIB, 16 * _MIB, 256 * _MIB)}
"""Bytes by type of device."""
# torch 2.13 renamed them
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_PATTERN = 251  # elements after which values repeat; keeps sums over ranks exact in fp32


def measure_collectives(device: torch.device) -> Iterator[tuple[str, int, float, float, float]]:
    """Check and time all-reduce, all-gather and reduce-scatter. All ranks must iterate together.

    Yields:
        The name of the operation, the bytes of the complete tensor, the mean time on the slowest rank over several
        repetitions in seconds, and algbw and busbw in bytes per second; see the module docstring.
    """
    rank, n = ranks.global_rank(), ranks.world_size()
    for size in SIZES[device.type]:
        count = _elements(size, n)
        share = count // n
        values, total = _values(count, rank, device), _sum(count, device)
        reduced, gathered, scattered = values.clone(), torch.empty_like(values), torch.empty(share, device=device)
        operations: dict[str, tuple[Callable[[], object], Tensor, Tensor]] = {  # what to call, its output, expected
            # in place: only the first call is checked
            "all-reduce": (partial(dist.all_reduce, reduced), reduced, total),
            "all-gather": (
                partial(_gather, gathered, values[:share]),
                gathered,
                torch.cat([_values(share, other, device) for other in range(n)]),
            ),
            "reduce-scatter": (partial(_scatter, scattered, values), scattered, total[rank * share :][:share]),
        }
        for name, (operation, result, expected) in operations.items():
            _local_seconds(operation, device, 1)
            _require_correct(f"{name} of {format_size(size)}", result, expected)
            seconds = max(ranks.all_gather_object(_local_seconds(operation, device, 5 if size > _MIB else 20)))
            factor = (2 if result is reduced else 1) * (n - 1) / n
            yield name, size, seconds, size / seconds, size / seconds * factor


def measure_ring(device: torch.device) -> list[float]:
    """Check and time point-to-point transfers while all ranks send to the next rank.

    Returns the bandwidth from each rank to the next in bytes per second, on every rank.
    """
    rank, n = ranks.global_rank(), ranks.world_size()
    size = SIZES[device.type][-1]
    sent, received = _values(_elements(size, n), rank, device), torch.empty(_elements(size, n), device=device)

    def transfer() -> None:
        operations = [dist.P2POp(dist.isend, sent, (rank + 1) % n), dist.P2POp(dist.irecv, received, (rank - 1) % n)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    _local_seconds(transfer, device, 1)
    _require_correct(f"transfer of {format_size(size)}", received, _values(received.numel(), (rank - 1) % n, device))
    first, *others = ranks.all_gather_object(size / _local_seconds(transfer, device, 5))  # measured by the receivers
    return [*others, first]


def measure_clock_skew() -> list[float]:
    """Return the clock skew of each rank, in seconds ahead of rank 0, to about the duration of a barrier."""
    rounds = []
    for _ in range(5):
        ranks.barrier()
        times = ranks.all_gather_object(time.time())
        rounds.append([time - times[0] for time in times])
    return [min(skews, key=abs) for skews in zip(*rounds, strict=True)]  # with the least delay after the barrier


def format_size(size: int) -> str:
    return f"{size // _MIB} MiB" if size >= _MIB else f"{size // _KIB} KiB"


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


def _local_seconds(operation: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Return the mean time of an operation on this rank, in seconds."""
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

"""Collectives for scripts, the same under torchrun, SLURM and toolkit's launcher; no-ops in a single process.

Under torchrun and srun all processes exist from the start, and :func:`setup_distributed` connects them. With
``python train.py`` and ``devices=2``, the first ``toolkit.train`` starts and connects the other processes.
"""

import functools
import itertools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from toolkit.config import AUTO
from toolkit.distributed import ranks
from toolkit.distributed.launchers import PARENT
from toolkit.distributed.rendezvous import open_store, run_key_prefix
from toolkit.distributed.run_group import create_process_group, leave_process_group
from toolkit.distributed.world import WorldInfo, cluster_environment, detect_world
from toolkit.errors import UserError, did_you_mean

P = ParamSpec("P")
T = TypeVar("T")
_OPERATIONS = ("sum", "mean", "min", "max", "product")
_setups = itertools.count()


def setup_distributed(timeout_minutes: float = 30) -> None:
    """Create the process group of processes that torchrun or srun started. ``toolkit.train`` then uses it.

    Collectives support CPU tensors (gloo) and CUDA tensors (NCCL, not tested). Does nothing if the processes are
    already connected, with a single process, or if toolkit launched the processes.

    Args:
        timeout_minutes: Timeout in minutes for connecting and for each collective.
    """
    world = _world()
    if ranks.is_distributed() or world.world_size == 1 or PARENT in os.environ:
        return
    device = torch.device("cuda", world.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    environment, seconds = cluster_environment(world), 60 * timeout_minutes
    host, port = environment.main_address, environment.main_port
    try:
        store = open_store(host, port, seconds, is_host=world.global_rank == 0)
    except (TimeoutError, dist.DistError) as error:
        raise UserError(f"MASTER_ADDR {host}, MASTER_PORT {port}: no answer from rank 0 ({error})") from None
    prefix = f"setup-{run_key_prefix(next(_setups))}"  # the store may outlive a group, whose addresses are stale
    create_process_group(dist.PrefixStore(prefix, store), world, device, seconds)


def cleanup_distributed() -> None:
    """Destroy the process group, if there is one. Every rank calls this."""
    leave_process_group()


def get_rank() -> int:
    """Return the global rank of this process, from 0."""
    return ranks.global_rank() if ranks.is_distributed() else _world().global_rank


def get_local_rank() -> int:
    """Return the rank of this process on its node, from 0."""
    return _world().local_rank


def get_world_size() -> int:
    """Return the number of processes."""
    return ranks.world_size() if ranks.is_distributed() else _world().world_size


def is_main_process() -> bool:
    """Whether this is rank 0."""
    return get_rank() == 0


def all_reduce(tensor: Tensor, op: str | dist.ReduceOp = "sum") -> Tensor:
    """Reduce a tensor over all ranks, in place, and return it; every rank calls this.

    Args:
        tensor: A tensor of the same shape and dtype on all ranks.
        op: "sum", "mean", "min", "max" or "product", or torch's ReduceOp.
    """
    if isinstance(op, str) and op not in _OPERATIONS:
        raise UserError(f"op {op}: must be one of {', '.join(_OPERATIONS)}{did_you_mean(op, _OPERATIONS)}")
    if not ranks.is_distributed():
        return tensor
    if op in ("mean", dist.ReduceOp.AVG):  # gloo has no mean
        dist.all_reduce(tensor)
        return tensor.div_(ranks.world_size())
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()) if isinstance(op, str) else op)
    return tensor


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks in rank order. Shape and dtype must be equal. Every rank calls this."""
    if not ranks.is_distributed():
        return [tensor]
    local = tensor.contiguous()
    gathered = [torch.empty_like(local) for _ in range(ranks.world_size())]
    dist.all_gather(gathered, local)
    return gathered


def broadcast(tensor: Tensor, src: int = 0) -> Tensor:
    """Broadcast rank ``src``'s tensor to all ranks, in place, and return it. Every rank calls this."""
    if ranks.is_distributed():
        dist.broadcast(tensor, src)
    return tensor


def print_rank_0(*message: object) -> None:
    """Print a message in the first process, under OpenLanguageModel's name."""
    if is_main_process():
        print(*message, flush=True)


def main_process_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorate a function to run only on rank 0. On other ranks it returns None."""

    @functools.wraps(function)
    def on_rank0(*args: P.args, **options: P.kwargs) -> T | None:
        return function(*args, **options) if is_main_process() else None

    return on_rank0


def _world() -> WorldInfo:
    return detect_world(AUTO, AUTO, None)

"""N4 synchronized-replicas: after the first step, all model replicas must be bit-equal."""

from collections.abc import Container, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from toolkit.distributed.ranks import all_gather_object, global_rank, is_distributed, layout
from toolkit.errors import GuardError, join_first
from toolkit.private_torch import local_shard

_CHUNK = 1 << 22  # elements per addition; an int64 copy is 32 MiB


def checksum(tensor: Tensor) -> tuple[int, int]:
    """Return two sums over a tensor's bits: plain, and weighted by position (detects swapped elements)."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    plain = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weighted = torch.zeros_like(plain)
    for chunk in tensor.detach().contiguous().view(words).flatten().split(_CHUNK):
        bits = chunk.to(torch.int64)
        plain += bits.sum()
        # overflow wraps around, identically on all devices
        weighted += (bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum()
    return int(plain), int(weighted)


_CAUSE = "; this is an error in the strategy, not in your settings or data"


def require_equal_replicas(parameters: Mapping[str, Tensor], sizes: dict[str, int], cut: Container[str] = ()) -> None:
    """Compare the checksums of all parameters over the ranks. Collective; raises GuardError on every rank.

    Args:
        parameters: This rank's shard of each parameter, by name; the same names in the same order on every rank of a
            pipeline stage.
        sizes: The number of elements of each complete parameter.
        cut: The names of the parameters that tensor parallelism divides.
    """
    if not is_distributed():
        return
    local = [local_shard(parameter) for parameter in parameters.values()]
    checksums = all_gather_object([(*checksum(shard), shard.numel()) for shard in local])
    stage = replace(layout(), pipeline=1)  # ranks of other stages have other parameters
    first = global_rank() // stage.world_size * stage.world_size
    checksums = checksums[first : first + stage.world_size]
    for i, name in enumerate(parameters):
        by_rank = [rank_checksums[i] for rank_checksums in checksums]
        numels = [numel for _, _, numel in by_rank]
        size = sizes[name] // (layout().tensor if name in cut else 1)
        is_sharded = any(numel != size for numel in numels)  # with any strategy
        holders = stage.first_holders(is_sharded, name in cut)
        for rank, holder in enumerate(holders):
            if by_rank[rank] != by_rank[holder]:
                raise GuardError(
                    f"the replicas of {name} on ranks {first + holder} and {first + rank} differ after the first step: "
                    f"gradients are not synchronized between them{_CAUSE}"
                )
        if (held := sum(numels[rank] for rank in set(holders))) != sizes[name]:
            names = join_first([str(first + rank) for rank in sorted(set(holders))])
            raise GuardError(
                f"the shards of {name} on ranks {names} have {held} elements instead of {sizes[name]}: the "
                f"strategy does not shard as planned{_CAUSE}"
            )

"""N4: after the first step, the copies of the model that a strategy keeps must be equal, bit for bit."""

from __future__ import annotations

import torch
from torch import distributed as dist

from toolkit.distributed.ranks import is_distributed, world_size
from toolkit.errors import GuardError

_CHUNK = 1 << 22  # elements per addition: int64 copies of so many are 32 MiB


def checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """Two sums over the bits of a tensor: plain, and weighted by position (so that an exchange is seen)."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    plain = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weighted = torch.zeros_like(plain)
    for part in tensor.detach().contiguous().view(words).flatten().split(_CHUNK):
        bits = part.to(torch.int64)
        plain += bits.sum()
        weighted += (
            bits * torch.arange(1, bits.numel() + 1, device=bits.device)
        ).sum()  # wraps around, alike everywhere
    return int(plain), int(weighted)


def require_equal_replicas(parameters: dict[str, torch.Tensor], sizes: dict[str, int], shards: int) -> None:
    """Compare what the ranks hold of each parameter. Collective.

    Args:
        parameters: This rank's part of each parameter, by name; the same names in the same order on every rank.
        sizes: The number of elements of each whole parameter.
        shards: Ranks that share one copy of the model: ranks r and r + shards hold the same.

    Raises:
        GuardError: copies differ, or the parts of a copy are not a whole, with the parameter's name, on every rank.
    """
    if not is_distributed():
        return
    facts = [[*checksum(part), part.numel()] for part in parameters.values()]
    mine = torch.tensor(facts, dtype=torch.int64)
    everywhere = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(everywhere, mine)
    for i, name in enumerate(parameters):
        by_rank = [tuple(facts[i].tolist()) for facts in everywhere]
        numels = [numel for _, _, numel in by_rank]
        whole = all(numel == sizes[name] for numel in numels)  # held by every rank, sharded or not
        group = 1 if whole else shards
        for rank, (held, reference) in enumerate(zip(by_rank, by_rank[:group] * (len(by_rank) // group), strict=True)):
            if held != reference:
                raise GuardError(
                    f"the copies of {name} on ranks {rank % group} and {rank} differ after the first step: their "
                    "gradients do not reach each other; this is a fault of the strategy, not of the data"
                )
        if not whole and sum(numels[:group]) != sizes[name]:
            raise GuardError(
                f"the parts of {name} on ranks 0 to {group - 1} have {sum(numels[:group])} elements instead of "
                f"{sizes[name]}: the strategy does not shard as planned"
            )

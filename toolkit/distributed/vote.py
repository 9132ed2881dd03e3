"""What the ranks of a run agree on."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric


def vote(fabric: Fabric, **values: int) -> dict[str, int]:
    """Sum each value over all ranks, in one collective. Flags are 0 or 1: above zero means that some rank says yes."""
    if fabric.world_size == 1:
        return values
    ballot = torch.tensor(list(values.values()), dtype=torch.int64, device=fabric.device)
    return dict(zip(values, fabric.all_reduce(ballot, reduce_op="sum").tolist(), strict=True))

"""How the ranks of a run are arranged: the only place that knows the dimensions. Imports no torch.

Three sizes hide in "world size": who reads different rows (data), whose losses and gradients are summed (loss), and all
ranks, which agree on votes and errors.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Layout:
    """The size of each dimension, from the outermost to the innermost; neighboring ranks differ in the last one first.

    Args:
        pipeline: Stages that hold different layers.
        replicate: Replicas of what is sharded.
        shard: Ranks that share the weights of a replica.
        context: Ranks that share the tokens of a row.
        tensor: Ranks that share each matrix of a layer.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.pipeline * self.loss_ranks * self.tensor

    @property
    def data_parallel(self) -> int:
        """Ranks that read different rows."""
        return self.replicate * self.shard

    @property
    def loss_ranks(self) -> int:
        """Ranks whose losses, tokens and gradients are summed."""
        return self.data_parallel * self.context

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a rank in each dimension."""
        places = {}
        for field in reversed(fields(self)):
            rank, places[field.name] = divmod(rank, getattr(self, field.name))
        return places

    def data_rank(self, rank: int) -> int:
        """Return the place of a rank among those that read different rows."""
        place = self.coordinates(rank)
        return place["replicate"] * self.shard + place["shard"]

    def __str__(self) -> str:
        return " x ".join(f"{size} {field.name}" for field in fields(self) if (size := getattr(self, field.name)) > 1)


def data_mesh(layout: Layout, device_type: str) -> Any:
    """Return the device mesh of the data-parallel ranks: (shard,), or (replicate, shard) where there are replicas."""
    from torch.distributed.device_mesh import init_device_mesh

    if layout.replicate == 1:
        return init_device_mesh(device_type, (layout.shard,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (layout.replicate, layout.shard), mesh_dim_names=("replicate", "shard"))

"""Layout of a run's ranks along the mesh dimensions. Imports torch only to build a mesh.

"World size" can mean three numbers: ranks that read different rows (data), ranks whose losses and gradients are summed
(loss), and all ranks, which synchronize flags and errors.
"""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Layout:
    """Size of each mesh dimension, outermost first. Consecutive ranks differ in the innermost dimension.

    Args:
        pipeline: Pipeline stages. Each holds different layers.
        replicate: Model replicas. Each is sharded over ``shard`` ranks.
        shard: Ranks over which a replica's weights are sharded.
        context: Ranks over which the tokens of a row are split.
        tensor: Ranks over which each matrix of a layer is split.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.pipeline * self.loss_ranks * self.tensor

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read different rows."""
        return self.replicate * self.shard

    @property
    def loss_ranks(self) -> int:
        """Number of ranks whose losses, tokens and gradients are summed."""
        return self.data_parallel * self.context

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate in each dimension."""
        places = {}
        for field in reversed(fields(self)):
            rank, places[field.name] = divmod(rank, getattr(self, field.name))
        return places

    def data_rank(self, rank: int) -> int:
        """Return a rank's index among the data-parallel ranks."""
        place = self.coordinates(rank)
        return place["replicate"] * self.shard + place["shard"]

    def __str__(self) -> str:
        return " x ".join(f"{size} {field.name}" for field in fields(self) if (size := getattr(self, field.name)) > 1)


def data_mesh(layout: Layout, device_type: str) -> Any:
    """Return the device mesh of the data-parallel ranks: (shard,), or (replicate, shard) with several replicas."""
    from torch.distributed.device_mesh import init_device_mesh

    if layout.replicate == 1:
        return init_device_mesh(device_type, (layout.shard,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (layout.replicate, layout.shard), mesh_dim_names=("replicate", "shard"))

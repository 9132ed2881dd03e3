"""Layout of a run's ranks along the mesh dimensions. Imports torch only to build a mesh.

"World size" can mean three numbers: ranks that read different rows (data), ranks whose losses and gradients are summed
(loss), and all ranks, which synchronize flags and errors.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from toolkit.errors import UserError


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
    def model_parallel(self) -> int:
        """Number of ranks that read the same rows, because they compute one copy of the model together."""
        return self.pipeline * self.context * self.tensor

    @property
    def loss_ranks(self) -> int:
        """Number of ranks whose losses, tokens and gradients are summed."""
        return self.data_parallel * self.context

    @property
    def length_divisor(self) -> int:
        """Divisor of every sequence length: each context-parallel rank computes two chunks of a row."""
        return 2 * self.context if self.context > 1 else 1

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

    def is_first(self, rank: int, *dimensions: str) -> bool:
        """Whether a rank is the first in these dimensions. Only it reports what the others repeat."""
        place = self.coordinates(rank)
        return not any(place[name] for name in dimensions)

    def groups(self, *dimensions: str) -> list[list[int]]:
        """Return the ranks of each group. The ranks of a group differ only in these dimensions."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            key = tuple(place for name, place in self.coordinates(rank).items() if name not in dimensions)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    def first_holders(self, is_sharded: bool, is_cut: bool) -> list[int]:
        """Return, for each rank, the first rank that holds the same part of a parameter.

        Args:
            is_sharded: Whether the parameter is sharded over the ranks of a replica.
            is_cut: Whether tensor parallelism divides it.
        """
        same = ["replicate", *([] if is_sharded else ["shard", "context"]), *([] if is_cut else ["tensor"])]
        firsts = {rank: group[0] for group in self.groups(*same) for rank in group}
        return [firsts[rank] for rank in range(self.world_size)]

    def __str__(self) -> str:
        return " x ".join(f"{size} {field.name}" for field in fields(self) if (size := getattr(self, field.name)) > 1)


UNSHARDED = Layout()


def data_devices(model_parallel: Layout, devices: int, num_nodes: int) -> tuple[int, int]:
    """Return the data-parallel ranks per node and the number of nodes, for one pipeline stage.

    If a stage is a part of a node, the stage counts as the node. ``model_parallel`` has the sizes of the other
    dimensions.

    Raises:
        UserError: The sizes do not divide the devices.
    """
    tensor, context, pipeline = model_parallel.tensor, model_parallel.context, model_parallel.pipeline
    require_divisor("tensor_parallel_size", tensor, devices, f"the {devices} devices of a node")
    world = devices * num_nodes
    require_divisor("context_parallel_size", context, world // tensor, f"{world} devices / {tensor} tensor parallel")
    rest, inner = world // (tensor * context), tensor * context
    require_divisor(
        "pipeline_parallel_size", pipeline, rest, f"{world} devices / ({tensor} tensor x {context} context parallel)"
    )
    if num_nodes % pipeline == 0 and devices % inner == 0:
        return devices // inner, num_nodes // pipeline
    if pipeline % num_nodes == 0:
        return rest // pipeline, 1
    return 1, rest // pipeline


def sharded_layout(
    sharding: str, shard_size: int | None, model_parallel: Layout, devices: int, num_nodes: int
) -> Layout:
    """Return FSDP's layout for the name of a sharding strategy and the devices of each node.

    HYBRID_SHARD shards over ``shard_size`` data-parallel ranks, by default all of a node, and replicates over the
    rest. ``model_parallel`` has the sizes of the other dimensions.

    Raises:
        UserError: The sizes do not divide the devices.
    """
    per_node, nodes = data_devices(model_parallel, devices, num_nodes)
    ranks = per_node * nodes
    shards = {"HYBRID_SHARD": shard_size or per_node, "NO_SHARD": 1}.get(sharding, ranks)
    require_divisor("fsdp.shard_size", shards, ranks, f"the data-parallel size {ranks}")
    return replace(model_parallel, replicate=ranks // shards, shard=shards)


def require_divisor(option: str, size: int, whole: int, description: str) -> None:
    """Raise UserError with the sizes that work if an option's value does not divide ``whole``."""
    if whole % size:
        sizes = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
        raise UserError(f"--{option} {size}: does not divide {description}; use {'one of ' * (whole > 1)}{sizes}")


def data_mesh(layout: Layout, device_type: str) -> Any:
    """Return the device mesh over which weights are sharded: (shard,), or (replicate, shard) with several replicas.

    Its shard dimension also covers the context-parallel ranks, which hold the same weights and other tokens.
    """
    from torch.distributed.device_mesh import init_device_mesh

    shard, names = layout.shard * layout.context, ("replicate", "shard") if layout.replicate > 1 else ("shard",)
    if layout.pipeline * layout.tensor == 1:
        return init_device_mesh(device_type, (layout.replicate, shard)[-len(names) :], mesh_dim_names=names)
    sizes = (layout.pipeline, layout.replicate, shard, layout.tensor)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))
    return mesh[names]

"""Local shards of DTensors as plain parameters for the optimizer, without a copy.

Some optimizer operators do not support DTensors, and DTensor dispatch costs host time. Sharded and replicated weights
can be in one parameter group.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

_SHARD, _SHARDING = "_toolkit_shard", "_toolkit_sharding"
ROW_STATE = ("row_var", "absmax1", "absmax2")
"""Optimizer state keys with values for each row, in other shapes than the weight's: of Adafactor and AdamW8bit."""
SHARED_STATE = ("col_var", "qmap1", "qmap2")
"""Optimizer state keys of matrices that are equal on all ranks, and may have the shape of a shard."""


@dataclass(frozen=True)
class RowSharding:
    """The division of a parameter's rows over a group of ranks.

    Args:
        shape: Shape of the unsharded parameter.
        group: The ranks that hold the shards, in the order of the rows.
        device: "cpu" or "cuda": where the group's collectives run.
    """

    shape: torch.Size
    group: dist.ProcessGroup
    device: str

    @property
    def size(self) -> int:
        """Number of shards."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """Index of this rank's shard."""
        return self.group.rank()

    def first_row(self, rank: int) -> int:
        """Return the first row of a rank's shard. DTensor's rule: ceil(rows / ranks) rows each, fewer at the end."""
        return min(rank * -(-self.shape[0] // self.size), self.shape[0])

    def numel(self, rank: int) -> int:
        """Return the number of elements of a rank's shard. Rank 0 has the most."""
        return (self.first_row(rank + 1) - self.first_row(rank)) * self.shape[1:].numel()


def add_shards(module: nn.Module) -> None:
    """Attach to each DTensor parameter its local shard as a plain parameter."""
    parameters: Iterable[Any] = module.parameters()
    for parameter in parameters:
        if hasattr(parameter, "to_local"):
            shard = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
            mesh = parameter.device_mesh
            setattr(shard, _SHARDING, RowSharding(parameter.shape, mesh.get_group("shard"), mesh.device_type))
            setattr(parameter, _SHARD, shard)


def sharding_of(parameter: Tensor) -> RowSharding | None:
    """Return how the parameter that an optimizer updates is sharded; None if it is on every rank."""
    sharding: RowSharding | None = getattr(parameter, _SHARDING, None)
    return None if sharding is None or sharding.size == 1 else sharding


def largest_shard(parameter: Tensor) -> int:
    """Return the elements of a parameter's largest shard, the same on every rank."""
    sharding = sharding_of(parameter)
    return parameter.numel() if sharding is None else sharding.numel(0)


def shard_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return the tensor that the optimizer updates: the parameter's local shard, or the parameter if unsharded.

    Its ``grad`` is this rank's gradient once the step's gradient is complete, and the optimizer's state has it as key.
    A rank's shard of a parameter with fewer rows than ranks may be empty.
    """
    return getattr(parameter, _SHARD, parameter)


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether :func:`add_shards` attached a local shard to the parameter."""
    return hasattr(parameter, _SHARD)


def give_gradients(module: nn.Module) -> None:
    """Set each shard's gradient to the local gradient of its DTensor, without a copy."""
    for parameter in module.parameters():
        if is_sharded(parameter) and parameter.grad is not None:
            gradient: Any = parameter.grad
            shard_of(parameter).grad = gradient.to_local()


def sharded_values(values: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Return a parameter's optimizer state. Tensors that are sharded as the parameter become DTensors."""
    if not is_sharded(parameter):
        return values
    shard = shard_of(parameter)
    return {
        key: _as_dtensor(value, parameter) if isinstance(value, Tensor) and _has_rows(key, value, shard) else value
        for key, value in values.items()
    }


def _has_rows(key: str, value: Tensor, shard: Tensor) -> bool:
    """Whether an optimizer's tensor has values for each row of a shard."""
    is_as_shard = value.shape in (shard.shape, (shard.numel(),))  # Prodigy flattens its state
    return not is_shared_state(key, value) and (key in (*ROW_STATE, *SHARED_STATE) or is_as_shard)


def is_shared_state(key: str, value: Any) -> bool:
    """Whether an optimizer's tensor is equal on all ranks, whatever its shape; stacked experts have a matrix each."""
    return key in SHARED_STATE and value.ndim <= 2


def _as_dtensor(value: Tensor, parameter: Any) -> Tensor:
    """Wrap values for each row of the parameter's shard in a DTensor with the parameter's mesh and placements."""
    if value.ndim < parameter.ndim:
        value = value.view(len(shard_of(parameter)), -1)
    shape = torch.Size((parameter.shape[0], *value.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        value, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )

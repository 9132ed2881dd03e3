"""Local shards of DTensors as plain parameters for the optimizer, without a copy.

Some optimizer operators do not support DTensors, and DTensor dispatch costs host time. Sharded and replicated weights
can be in one parameter group.
"""

from typing import Any

import torch
from torch import Tensor, nn

_SHARD = "_toolkit_shard"


def add_shards(module: nn.Module) -> None:
    """Attach to each DTensor parameter its local shard as a plain parameter."""
    for parameter in module.parameters():
        if hasattr(parameter, "to_local"):
            local = parameter.to_local().detach()
            setattr(parameter, _SHARD, nn.Parameter(local, requires_grad=parameter.requires_grad))


def shard_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return the tensor that the optimizer updates: the parameter's local shard, or the parameter if unsharded."""
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


def as_dtensor(value: Tensor, parameter: Any) -> Tensor:
    """Wrap a tensor shaped like the parameter's shard in a DTensor with the parameter's mesh and placements."""
    from torch.distributed.tensor import DTensor

    layout = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(value, parameter.device_mesh, parameter.placements, **layout)


def sharded_values(values: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Return a parameter's optimizer state. Tensors shaped like the parameter's shard become DTensors."""
    if not is_sharded(parameter):
        return values
    shape = shard_of(parameter).shape
    return {
        key: as_dtensor(value, parameter) if isinstance(value, torch.Tensor) and value.shape == shape else value
        for key, value in values.items()
    }

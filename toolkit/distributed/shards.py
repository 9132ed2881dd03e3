"""What optimizers update: plain tensors, in the memory of this rank's shards of DTensors.

Optimizers then need no knowledge of DTensors, which some of their operators do not support and which cost host time.
Sharded and replicated weights can be in one group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_SHARD = "_toolkit_shard"


def add_shards(module: nn.Module) -> None:
    """Give each DTensor of a module its shard as a plain parameter."""
    for parameter in module.parameters():
        if hasattr(parameter, "to_local"):
            local = parameter.to_local().detach()
            setattr(parameter, _SHARD, nn.Parameter(local, requires_grad=parameter.requires_grad))


def shard_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return what an optimizer updates for a parameter of a module: its shard, or the parameter itself."""
    return getattr(parameter, _SHARD, parameter)


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether an optimizer updates a shard of the parameter, see :func:`add_shards`."""
    return hasattr(parameter, _SHARD)


def give_gradients(module: nn.Module) -> None:
    """Give the shards the gradients of their DTensors, in the same memory."""
    for parameter in module.parameters():
        if is_sharded(parameter) and parameter.grad is not None:
            gradient: Any = parameter.grad
            shard_of(parameter).grad = gradient.to_local()


def as_dtensor(value: Tensor, parameter: Any) -> Tensor:
    """Return a tensor of the shape of the parameter's shard as a DTensor like the parameter."""
    from torch.distributed.tensor import DTensor

    layout = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(value, parameter.device_mesh, parameter.placements, **layout)


def sharded_values(values: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Return the optimizer's values for a parameter with DTensors for what is sharded like it."""
    if not is_sharded(parameter):
        return values
    shape = shard_of(parameter).shape
    return {
        key: as_dtensor(value, parameter) if isinstance(value, torch.Tensor) and value.shape == shape else value
        for key, value in values.items()
    }

"""Build the arguments of a model's forward from a batch."""

import inspect
from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from toolkit.data.batch import Batch
from toolkit.distributed.private_lightning import FabricModule
from toolkit.models.attention_kernels import DocumentBounds


def original_module(model: nn.Module) -> nn.Module:
    """Unwrap a model from Fabric and the strategy."""
    return model.module if isinstance(model, FabricModule) else model


def forward_inputs(model: nn.Module, batch: Batch, device: torch.device) -> dict[str, torch.Tensor | DocumentBounds]:
    """Return the arguments of the model's forward, on ``device``.

    Models with random numbers in forward get ``sample_keys``; models with attention kernels get ``document_bounds``.
    """
    parameters = _parameters(type(original_module(model)).forward)
    return batch.inputs(device, "sample_keys" in parameters, "document_bounds" in parameters)


@cache
def _parameters(forward: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)

"""The arguments of a model's forward for a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from toolkit.data.loader import Batch
from toolkit.distributed.private_lightning import FabricModule
from toolkit.models.attention_kernels import DocumentBounds


def original_module(model: nn.Module) -> nn.Module:
    """Return the model before Fabric and the strategy wrapped it."""
    return model.module if isinstance(model, FabricModule) else model


def forward_inputs(model: nn.Module, batch: Batch, device: torch.device) -> dict[str, torch.Tensor | DocumentBounds]:
    """Return the arguments of the model's forward, on ``device``.

    ``sample_keys`` are for a model that draws random numbers in it, ``document_bounds`` for one with attention kernels.
    """
    parameters = _parameters(type(original_module(model)).forward)
    return batch.inputs(device, "sample_keys" in parameters, "document_bounds" in parameters)


@cache
def _parameters(forward: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)

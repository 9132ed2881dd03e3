"""What a model's forward takes beside a batch, and what it reports beside the loss; see ``toolkit.models.gpt.GPT``."""

from __future__ import annotations

import inspect
from typing import cast

import torch
from torch import nn

from toolkit.data.loader import Batch
from toolkit.distributed.private_lightning import FabricModule
from toolkit.models.attention_kernels import DocumentBounds
from toolkit.models.gpt import GPT


def original_module(model: nn.Module) -> nn.Module:
    """Return the model before Fabric and the strategy wrapped it."""
    return model.module if isinstance(model, FabricModule) else model


def forward_inputs(model: nn.Module, batch: Batch, device: torch.device) -> dict[str, torch.Tensor | DocumentBounds]:
    """Return the arguments of the model's forward.

    sample_keys are for a model that draws random numbers in it, document_bounds for one with attention kernels.
    """
    parameters = inspect.signature(type(original_module(model)).forward).parameters
    return batch.inputs(device, "sample_keys" in parameters, "document_bounds" in parameters)


def loss_parts(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parts of the model's loss."""
    return getattr(original_module(model), "loss_parts", ())


def pop_loss_parts(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the sums of the parts since the last call, fp32 scalars, in the order of their names."""
    names = loss_parts(model)
    if not names:
        return {}
    module = cast(GPT, original_module(model))
    sums, module.loss_part_sums = module.loss_part_sums, {}
    return {name: sums[name] for name in names if name in sums}

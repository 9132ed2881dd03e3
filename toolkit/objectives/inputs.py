"""Build the arguments of a model's forward from a batch."""

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.data.batch import Batch
from toolkit.models.gpt import GPT, Targets
from toolkit.models.neftune import SampleNoise


def original_module(model: nn.Module) -> nn.Module:
    """Unwrap a model from Fabric and the strategy."""
    lightning = sys.modules.get("toolkit.distributed.private_lightning")  # a plan wraps nothing and does not import it
    return model.module if lightning and isinstance(model, lightning.FabricModule) else model


def forward_inputs(model: nn.Module, batch: Batch, device: torch.device) -> dict[str, Any]:
    """Return the arguments of the model's forward, on ``device``.

    Models with random numbers in forward get ``sample_keys``. GPT, which has attention kernels, gets document bounds,
    and in training the noise of ``--train.neftune_alpha`` and ``--lora_dropout``.
    """
    module: Any = original_module(model)
    forward = type(module).forward
    is_gpt = forward is GPT.forward
    inputs = batch.inputs(device, "sample_keys" in _parameters(forward), with_bounds=is_gpt)
    if is_gpt and module.training and (module.execution.neftune_alpha or module.has_dropout):
        noise = SampleNoise(module.execution.neftune_alpha, module.seed, tuple(batch.sample_keys))
        return inputs | {"noise": noise}
    return inputs


def run_with_head(
    model: nn.Module, batch: Batch, device: torch.device, head: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """Run a GPT. Return the result of ``head``, see :class:`Targets`, and the load-balancing loss, an fp32 scalar."""
    inputs = forward_inputs(model, batch, device)
    return model(**inputs | {"labels": Targets(inputs["labels"], head)})


@cache
def _parameters(forward: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)

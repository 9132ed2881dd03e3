"""Build a model with one block of each kind and tensors without memory, for memory and speed estimates."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.data.batch import Batch
from toolkit.distributed.units import AUTOCAST_DTYPES
from toolkit.extension import load_registered, registered
from toolkit.models.attention_kernels import DocumentBounds
from toolkit.models.config import ModelConfig
from toolkit.models.config_checks import PER_LAYER
from toolkit.models.context_parallel import ContextGroup
from toolkit.models.families import family_of
from toolkit.models.fp8 import convert_to_fp8
from toolkit.models.gpt import GPT
from toolkit.models.lora import is_adapter
from toolkit.objectives.base import LOSS, Objective
from toolkit.objectives.inputs import run_with_head
from toolkit.objectives.next_token import NextToken
from toolkit.planning.meta_model import build_part
from toolkit_plan.measure.inputs import MemoryInputs


def one_layer_of_each_kind(config: ModelConfig, n_first: int = 1, n_last: int = 1) -> tuple[ModelConfig, list[int]]:
    """Return a config with one layer of each kind, and the number of model layers that each represents.

    Args:
        config: The architecture.
        n_first: First layers to keep separate, because the first layer's input may need no gradient.
        n_last: Last layers to keep separate, because the final norm may save the last layer's output.
    """
    if family_of(config).model_class() is not None:  # it may treat any layer differently
        return config, [1] * config.n_layer
    end = max(n_first, config.n_layer - n_last)
    kinds: dict[Any, list[int]] = {}  # layers by the kind; by their number if they are separate
    for layer in range(config.n_layer):
        kind = tuple(values and values[layer] for values in (getattr(config, name) for name in PER_LAYER))
        kinds.setdefault(kind if n_first <= layer < end else layer, []).append(layer)
    return select_layers(config, [layers[0] for layers in kinds.values()]), list(map(len, kinds.values()))


def select_layers(config: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    """Return the config of a model with some of the layers."""
    lists: dict[str, Any] = {
        name: [values[i] for i in layers] for name in PER_LAYER if (values := getattr(config, name)) is not None
    }
    return replace(config, n_layer=len(layers), **lists)


def sample_model(inputs: MemoryInputs, device: str, tensor_group: Any = None) -> GPT:
    """Return a model with weights in the run's dtypes, or in 16 bits if FSDP gathers them in 16 bits.

    ``device`` is "meta", or any device in a FakeTensorMode. For ``tensor_group`` see
    :func:`toolkit.distributed.tensor_parallel.split_model`.
    """
    model = build_part(inputs.config, inputs.lora, inputs.tensor, tensor_group).train()
    gathered = AUTOCAST_DTYPES.get(inputs.precision) if inputs.strategy.kind == "fsdp" else None
    blocks = {weight for block in model.blocks for weight in block.parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device=device))
        for name, weight in list(module.named_parameters(recurse=False)):
            dtype = inputs.dtype
            if is_adapter(f"{prefix}.{name}"):
                dtype = torch.float32
            elif gathered and weight in blocks and weight.ndim > 1:
                dtype = gathered
            empty = torch.empty_like(weight, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(empty, weight.requires_grad))
    model.tie_weights()
    if inputs.fp8 != "none":
        convert_to_fp8(model, inputs.fp8, inputs.device)
    model.execute_with(autocasts_residual=inputs.residual_dtype == "bf16")
    if (size := inputs.strategy.layout.context) > 1:
        # every rank computes as much; nothing is gathered without data
        model.execute_with(context=ContextGroup(0, size))
    return model


class _LastScores(NextToken):
    """Reads the scores of the last tokens."""

    def sums(self, model: nn.Module, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        loss, balancing = run_with_head(model, batch, device, lambda model, x, labels: model.scores(x[:, -1]).sum())
        return {LOSS: loss + balancing}


def objective_of(frozen: Any, config: ModelConfig) -> Objective:
    """Return the objective of a run with or without a frozen model. jsd needs most of the divergences."""
    if config.head is not None:
        return _LastScores()
    if frozen is None or "Distillation" not in registered("objectives"):
        objective = NextToken()
    else:
        objective = load_registered("objectives", "Distillation")("", "jsd", temperature=2.0)
    objective.frozen = frozen
    return objective


def micro_batch(inputs: MemoryInputs, device: str) -> Batch:
    """Return a micro-batch of full rows. Packed rows have one document each."""
    n_rows = inputs.micro_batch_size
    empty = partial(torch.empty, (n_rows, inputs.seq_length), dtype=torch.int64, device=device)
    n_tokens = n_rows * inputs.seq_length
    batch = Batch(empty(), empty(), [0] * n_rows, n_tokens, n_tokens, sample_keys=[0] * n_rows)
    if inputs.packed:
        cu_seqlens = torch.empty(n_rows + 1, dtype=torch.int32, device=device)
        batch.packed = {"positions": empty(), "documents": empty()}
        batch.bounds = DocumentBounds(cu_seqlens, inputs.seq_length)
    return batch

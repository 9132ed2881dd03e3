"""Build a model with one block of each kind and tensors without memory, for memory and speed estimates."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from toolkit.data.batch import Batch
from toolkit.distributed.tensor_parallel import split_model
from toolkit.measure.inputs import MemoryInputs
from toolkit.models.attention_kernels import DocumentBounds
from toolkit.models.config import ModelConfig
from toolkit.models.context_parallel import ContextGroup
from toolkit.models.families import family_of
from toolkit.models.fp8 import convert_to_fp8
from toolkit.models.gpt import GPT
from toolkit.models.lora import adapted_on_meta, is_adapter
from toolkit.models.lora_config import LoRAConfig
from toolkit.models.quantize import refuse_experts
from toolkit.objectives.base import Objective
from toolkit.objectives.distillation import Distillation
from toolkit.objectives.next_token import NextToken

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Autocast's dtype by precision."""
_PER_LAYER = ("sliding_window_indices", "rope_indices", "moe_indices")
"""Config fields with an entry per layer. Layers with equal entries are identical."""


def one_layer_of_each_kind(config: ModelConfig, n_first: int = 1, n_last: int = 1) -> tuple[ModelConfig, list[int]]:
    """Return a config with one layer of each kind, and the number of model layers that each represents.

    Args:
        config: The architecture.
        n_first: First layers to keep separate, because the first layer's input may need no gradient.
        n_last: Last layers to keep separate, because the final norm may save the last layer's output.
    """
    if family_of(config).model_class() is not None:  # an extension's model may treat any layer differently
        return config, [1] * config.n_layer
    layers = list(zip(*(getattr(config, name) or [None] * config.n_layer for name in _PER_LAYER), strict=True))
    end = max(n_first, config.n_layer - n_last)
    kinds = Counter(layers[n_first:end])
    sample = [*layers[:n_first], *kinds, *layers[end:]]
    lists: dict[str, Any] = {
        name: list(column)
        for name, column in zip(_PER_LAYER, zip(*sample, strict=True), strict=True)
        if getattr(config, name) is not None
    }
    counts = [1] * n_first + list(kinds.values()) + [1] * (config.n_layer - end)
    return replace(config, n_layer=len(sample), **lists), counts


def first_layers(config: ModelConfig, n_layer: int) -> ModelConfig:
    """Return the config of the first ``n_layer`` layers."""
    lists = {name: values[:n_layer] for name in _PER_LAYER if (values := getattr(config, name)) is not None}
    return replace(config, n_layer=n_layer, **lists)


_built: dict[str, GPT] = {}


def model_of(config: ModelConfig, lora: LoRAConfig | None, tensor: int = 1) -> GPT:
    """Return the model on the meta device, or a rank's part of it. The last models are cached.

    ``tensor`` is the number of ranks over which each layer is divided.
    """
    key = f"{config} {lora} {tensor}"
    if key not in _built:
        if len(_built) > 1:
            _built.clear()  # consecutive plans use the same model, and the same frozen model
        _built[key] = _part_on_meta(config, lora, tensor)
    return _built[key]


def _part_on_meta(config: ModelConfig, lora: LoRAConfig | None, tensor: int, group: Any = None) -> GPT:
    model = adapted_on_meta(config, lora)
    if tensor > 1:
        split_model(model, tensor, group=group)
    return model


def sample_model(setup: MemoryInputs, device: str, tensor_group: Any = None) -> GPT:
    """Return a model with weights in the run's dtypes, or in 16 bits if FSDP gathers them in 16 bits.

    ``device`` is "meta", or any device in a FakeTensorMode. For ``tensor_group`` see
    :func:`toolkit.distributed.tensor_parallel.split_model`.
    """
    model = _part_on_meta(setup.config, setup.lora, setup.tensor, tensor_group).train()
    gathered = AUTOCAST.get(setup.precision) if setup.strategy.kind == "fsdp" else None
    blocks = {id(p) for block in model.blocks for p in block.parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
        for name, weight in list(module.named_parameters(recurse=False)):
            dtype = setup.dtype
            if is_adapter(f"{prefix}.{name}"):
                dtype = torch.float32
            elif gathered and id(weight) in blocks and weight.ndim > 1:
                dtype = gathered
            empty = torch.empty(weight.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=weight.requires_grad))
    model.tie_weights()
    if setup.fp8 != "none":
        convert_to_fp8(model, setup.fp8, setup.device)
    if (size := setup.strategy.layout.context) > 1:
        # every rank computes as much; nothing is gathered without data
        model.execute_with(context=ContextGroup(0, size))
    return model


def objective_of(frozen: Any) -> Objective:
    """Return the objective of a run with or without a frozen model. jsd needs most of the divergences."""
    objective = NextToken() if frozen is None else Distillation("", "jsd", temperature=2.0)
    objective.frozen = frozen
    return objective


def quantized_weights(setup: MemoryInputs, model: GPT) -> dict[str, nn.Parameter]:
    """Return the 4-bit weights by name: the linear layers of the blocks, if --quantize is set."""
    if setup.quantize is None:
        return {}
    refuse_experts(setup.config, setup.quantize)
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith("transformer.h.")]
    return {f"{name}.weight": model.get_parameter(f"{name}.weight") for name in linears}


def micro_batch(setup: MemoryInputs, device: str) -> Batch:
    """Return a micro-batch of full rows. Packed rows have one document each."""
    n_rows = setup.micro_batch_size
    empty = partial(torch.empty, (n_rows, setup.seq_length), dtype=torch.int64, device=device)
    n_tokens = n_rows * setup.seq_length
    batch = Batch(empty(), empty(), [0] * n_rows, n_tokens, n_tokens, sample_keys=[0] * n_rows)
    if setup.packed:
        cu_seqlens = torch.empty(n_rows + 1, dtype=torch.int32, device=device)
        batch.packed = {"positions": empty(), "documents": empty()}
        batch.bounds = DocumentBounds(cu_seqlens, setup.seq_length)
    return batch

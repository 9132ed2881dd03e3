"""How a device stores the parameters of a model. Sizes are in bytes."""

from typing import NamedTuple

from torch import nn

from toolkit.distributed.units import block_dtypes
from toolkit.models.block import Block
from toolkit.models.gpt import GPT
from toolkit.models.lora import is_adapter
from toolkit.models.quantize import quantized_layers
from toolkit.optim.classes import hybrid_class
from toolkit.optim.groups import block_params, no_decay_params
from toolkit_plan.measure.inputs import FP32, MemoryInputs

WEIGHTS, QUANTIZED_BASE, ADAPTERS = "weights", "quantized_base", "adapters"
"""Kinds of parameters, as in :class:`toolkit_plan.measure.memory.Memory`."""
# bitsandbytes: 4 bits, and an fp32 scale per 64 weights; with double quantization an 8-bit scale per 64 weights, and an
# fp32 scale per 256 scales (Dettmers et al. 2023, QLoRA, section 3).
BYTES_4BIT = 0.5
SCALES_4BIT = {"bnb.nf4": 4 / 64, "bnb.nf4-dq": 1 / 64 + 4 / (64 * 256)}


class StoredParameter(NamedTuple):
    """A parameter on one device.

    Args:
        kind: :data:`WEIGHTS`, :data:`QUANTIZED_BASE` or :data:`ADAPTERS`.
        itemsize: Bytes per element, without the scales of 4-bit weights.
        decays: Whether it has weight decay.
        is_main: Whether a hybrid optimizer's main optimizer updates it.
        parts: Rows of the parts that Muon orthogonalizes.
        is_replicated: Whether FSDP replicates it: vectors under mixed precision.
        shards: Ranks over which its rows are sharded.
        is_offloaded: Whether its shard is in CPU memory.
    """

    parameter: nn.Parameter
    kind: str
    itemsize: float
    decays: bool
    is_main: bool
    parts: tuple[int, ...]
    is_replicated: bool
    shards: int
    is_offloaded: bool

    @property
    def numel(self) -> int:
        """Elements on all devices."""
        return self.parameter.numel()

    @property
    def bytes(self) -> float:
        """Bytes of the shard."""
        return self.itemsize * self.numel / self.shards

    @property
    def is_trained(self) -> bool:
        return self.parameter.requires_grad


def stored_parameters(inputs: MemoryInputs, model: GPT) -> list[StoredParameter]:
    """Return the parameters of a model, which may be on the meta device, as a device stores them."""
    strategy, quantized, stored = inputs.strategy, quantized_weights(inputs, model), []
    no_decay, rows = no_decay_params(model), block_params(model, (Block,))
    hybrid = None if inputs.optimizer_class else hybrid_class(inputs.optimizer["name"])
    for name, parameter in model.named_parameters():
        kind, itemsize = WEIGHTS, float(inputs.weight_bytes)
        if name in quantized:
            kind, itemsize = QUANTIZED_BASE, BYTES_4BIT
        elif is_adapter(name):
            kind, itemsize = ADAPTERS, FP32
        decays, is_main = name not in no_decay, False
        if hybrid is not None and parameter.requires_grad:
            is_main = hybrid.is_main(parameter, name in rows, decays)
        parts = (inputs.optimizer.get("split_qkv") and rows.get(name)) or (parameter.shape[0],)
        is_replicated = parameter.ndim < 2 and block_dtypes(inputs.fsdp, inputs.precision) is not None
        is_sharded = strategy.kind == "fsdp" and not is_replicated
        shards = strategy.shards if is_sharded else 1
        is_offloaded = is_sharded and strategy.offloads
        stored.append(
            StoredParameter(parameter, kind, itemsize, decays, is_main, parts, is_replicated, shards, is_offloaded)
        )
    return stored


def quantized_weights(inputs: MemoryInputs, model: GPT) -> dict[str, nn.Parameter]:
    """Return the 4-bit weights by name, if --quantize is set."""
    layers = [] if inputs.quantize is None else quantized_layers(model)
    return {f"{name}.weight": layer.get_parameter("weight") for name, layer in layers}

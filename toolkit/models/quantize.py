"""Quantize the base model for QLoRA: linear layers of the blocks become 4-bit, with the experts, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from toolkit.errors import require_bitsandbytes, require_option
from toolkit.models.aligned import AlignedLinear
from toolkit.models.gpt import GPT
from toolkit.models.lora_config import Quantize as Quantize
from toolkit.models.lora_layers import replace_linear
from toolkit.models.moe import StackedLinear

if TYPE_CHECKING:  # it needs bitsandbytes
    from toolkit.models.linear_4bit import Layer4bit

BLOCK = 64  # weights per quantization scale

NESTED: Quantize = "bnb.nf4-dq"


def quantized_layers(model: GPT) -> list[tuple[str, Any]]:
    """Return name and layer of the linear layers of the blocks, including experts, without routers."""
    layers = model.transformer.h.named_modules(prefix="transformer.h")
    return [
        (name, layer)
        for name, layer in layers
        if isinstance(layer, nn.Linear | StackedLinear) and not isinstance(layer, AlignedLinear)
    ]


def quantize_linears(
    model: GPT,
    kind: Quantize,
    weight_of: Callable[[str], Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Replace the blocks' linear layers, with or without adapters, with 4-bit layers.

    Works layer by layer, without a second copy of the model. Biases, adapters and all other parameters stay on their
    device, including meta.

    Args:
        model: Modified in place.
        kind: "bnb.nf4": 4-bit NormalFloat with an fp32 scale for every 64 weights, 4.5 bits each; "bnb.nf4-dq": the
            scales are quantized as well, about 4.13 bits.
        weight_of: Maps a name such as ``transformer.h.0.attn.qkv.weight`` to the weight in the checkpoint's dtype, to
            avoid rounding twice. Default: the layers' weights.
        device: Device of the quantized weights.
    """
    for name, new in _replaced_linears(model, kind):
        weight = new.weight if weight_of is None else weight_of(f"{name}.weight")
        new.quantize_weight(weight, kind == NESTED, device)


def reserve_quantized(
    model: GPT, kind: Quantize, storage: torch.dtype, weight_of: Callable[[str], Tensor], device: torch.device
) -> dict[str, Callable[[], Tensor]]:
    """Replace the layers like :func:`quantize_linears`, but leave the 4-bit weights on the meta device for FSDP.

    FSDP materializes and quantizes one block at a time and keeps only its shard. Every rank keeps all quantization
    scales. FSDP must not cast the packed parameters, which have dtype ``storage``.

    Returns:
        Functions by parameter name that return the packed values.
    """
    values: dict[str, Callable[[], Tensor]] = {}
    for name, new in _replaced_linears(model, kind):
        new.reserve_weight(storage)
        values[f"{name}.weight"] = partial(new.pack, partial(weight_of, f"{name}.weight"), kind == NESTED, device)
    return values


def _replaced_linears(model: GPT, kind: Quantize) -> Iterator[tuple[str, Layer4bit]]:
    """Replace the layers. Yields name and new layer, still with the old weight, one by one."""
    # on import, bitsandbytes warns about missing optional CPU kernels
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    require_bitsandbytes(f"--quantize {kind}")
    from toolkit.models.linear_4bit import Linear4bit, StackedLinear4bit

    for name, layer in quantized_layers(model):
        # bitsandbytes (0.50) quantizes blocks across row boundaries, but its CPU kernels restart blocks in each row
        hint = f"{name} has {layer.in_features} input features, not a multiple of {BLOCK}, which bitsandbytes "
        hint += "computes incorrectly on some devices; run without --quantize"
        require_option(layer.in_features % BLOCK == 0, "quantize", kind, hint)
        new_class = StackedLinear4bit if isinstance(layer, StackedLinear) else Linear4bit
        owner, _, own_name = name.rpartition(".")
        yield name, replace_linear(model.get_submodule(owner), own_name, new_class)

"""Block-scaled FP8 weights, as published for DeepSeek-V3, dequantized to bfloat16 on reading.

A file holds ``X``, (out, in), in float8_e4m3fn, and ``X_scale_inv``, fp32: one scale for each block of config.json's
``weight_block_size``, usually 128 x 128. The last blocks of a row or column may be smaller.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from toolkit.checkpoints.hf.files import Dequantized, StoredTensor

METHOD = "fp8"  # quant_method in config.json
BITS = 8  # per weight
_SCALES = "_scale_inv"


def block_size(config_json: dict[str, Any]) -> tuple[int, int] | None:
    """Return (rows, columns) of the blocks that a ``config.json`` specifies; None if it has no such weights."""
    quantization = config_json.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        return None
    match quantization.get("weight_block_size"), quantization.get("fmt", "e4m3"):
        case [int(rows), int(columns)], "e4m3" if rows > 0 and columns > 0:
            return rows, columns
    return None


def join_scales(tensors: dict[str, StoredTensor], block: tuple[int, int]) -> dict[str, Dequantized]:
    """Move each pair of 8-bit weight and matching scales from ``tensors`` to one weight."""
    weights = {}
    for name in [name for name in tensors if f"{name}{_SCALES}" in tensors]:
        weight, scales = tensors[name], tensors[f"{name}{_SCALES}"]
        fits = _n_blocks(weight, block) == scales.shape
        if weight.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32 and len(weight.shape) == 2 and fits:
            del tensors[name], tensors[f"{name}{_SCALES}"]
            weights[name] = Dequantized(weight.shape, partial(_read, weight, scales, block))
    return weights


def _read(weight: StoredTensor, scales: StoredTensor, block: tuple[int, int]) -> Tensor:
    return dequantize(weight.read(), scales.read(), block)


def _n_blocks(weight: StoredTensor, block: tuple[int, int]) -> tuple[int, ...]:
    """Return the number of blocks along each of the first two dimensions."""
    return tuple(-(-n // size) for n, size in zip(weight.shape, block, strict=False))


def describe_load_error(name: str, tensors: dict[str, StoredTensor], block: tuple[int, int]) -> str:
    """Describe why an 8-bit weight could not be joined with its scales."""
    scales, shape = tensors.get(f"{name}{_SCALES}"), _n_blocks(tensors[name], block)
    if scales is None:
        return f"{name}{_SCALES} {shape}, the scales of its blocks, is missing"
    kind = str(scales.dtype).removeprefix("torch.")
    return f"{name}{_SCALES} is {scales.shape} in {kind}; it must be {shape} in float32"


def dequantize(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Dequantize (out, in) in float8_e4m3fn, with fp32 scales of its blocks, to (out, in) in bf16.

    Products are computed in fp32 and rounded once, as in DeepSeek's ``fp8_cast_bf16.py`` and transformers. One row of
    blocks at a time, because the intermediate tensors are several times as large.
    """
    result = torch.empty(weight.shape, dtype=torch.bfloat16)
    for rows, part, scale in zip(result.split(block[0]), weight.split(block[0]), scales, strict=True):
        rows.copy_(part.float() * scale.repeat_interleave(block[1])[: weight.size(1)])
    return result

"""Dequantize block-scaled FP8 weights (the format of DeepSeek-V3) to bfloat16 when they are read.

A file holds the weight ``X``, (out, in), in float8_e4m3fn, and the fp32 scales ``X_scale_inv``, one per block. The
block size is ``weight_block_size`` in config.json, usually 128 x 128. The last blocks of a row or column may be
smaller.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from toolkit.checkpoints.hf.files import Dequantized, StoredTensor

BITS = 8  # per weight
_SCALES = "_scale_inv"


def block_size(config_json: dict[str, Any]) -> tuple[int, int] | None:
    """Return the block size (rows, columns) from ``config.json``; None if it specifies no block-scaled FP8."""
    match config_json.get("quantization_config"):
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)], **other}:
            is_supported = rows > 0 and columns > 0 and other.get("fmt", "e4m3") == "e4m3"
            return (rows, columns) if is_supported else None
    return None


def join_scales(tensors: dict[str, StoredTensor], block: tuple[int, int]) -> dict[str, Dequantized]:
    """Remove FP8 weights with matching scales from ``tensors``. Return them as dequantized weights by name."""
    weights = {}
    for name in [name for name in tensors if f"{name}{_SCALES}" in tensors]:
        weight, scales = tensors[name], tensors[f"{name}{_SCALES}"]
        fits = _n_blocks(weight, block) == scales.shape
        if weight.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32 and len(weight.shape) == 2 and fits:
            del tensors[name], tensors[f"{name}{_SCALES}"]
            weights[name] = Dequantized(weight.shape, (weight, scales), partial(dequantize, block=block))
    return weights


def _n_blocks(weight: StoredTensor, block: tuple[int, int]) -> tuple[int, ...]:
    """Return the number of blocks along each of the first two dimensions."""
    return tuple(-(-n // size) for n, size in zip(weight.shape, block, strict=False))


def describe_load_error(name: str, tensors: dict[str, StoredTensor], block: tuple[int, int]) -> str:
    """Return why the scales of an FP8 weight are missing or do not match."""
    scales = tensors.get(f"{name}{_SCALES}")
    actual = "missing" if scales is None else f"{scales.shape} in {str(scales.dtype).removeprefix('torch.')}"
    return f"{name}{_SCALES} is {actual}; it must be {_n_blocks(tensors[name], block)} in float32"


def dequantize(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Dequantize a float8_e4m3fn weight, (out, in), with fp32 block scales to bf16.

    Products are computed in fp32 and rounded once, as in DeepSeek's ``fp8_cast_bf16.py`` and transformers. Processes
    one row of blocks at a time, because the intermediate tensors are several times larger.
    """
    result = torch.empty(weight.shape, dtype=torch.bfloat16)
    for rows, part, scale in zip(result.split(block[0]), weight.split(block[0]), scales, strict=True):
        rows.copy_(part.float() * scale.repeat_interleave(block[1])[: weight.size(1)])
    return result

"""MXFP4 expert weights, as published for gpt-oss, dequantized to bfloat16 on reading.

MXFP4 (Open Compute Project, Microscaling Formats 1.0): values of one sign, two exponent and one mantissa bit, with a
shared power-of-two scale for each 32 of them. A file holds ``X_blocks``, (experts, out, in / 32, 16), two values per
byte, the lower bits first, and ``X_scales``, (experts, out, in / 32), exponents plus 127, both uint8. Dequantized, the
weight is X, (experts, in, out).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from toolkit.checkpoints.hf.files import Dequantized, StoredTensor

METHOD = "mxfp4"  # quant_method in config.json
BITS = 4 + 8 / 32  # per weight
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCKS, _SCALES = "_blocks", "_scales"


def is_packed(config_json: dict[str, Any]) -> bool:
    """Whether a ``config.json`` specifies MXFP4 weights."""
    quantization = config_json.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == METHOD


def join_blocks(tensors: dict[str, StoredTensor]) -> dict[str, Dequantized]:
    """Move each pair of matching blocks and scales from ``tensors`` to one weight."""
    weights = {}
    for weight in [name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)]:
        blocks, scales = tensors[f"{weight}{_BLOCKS}"], tensors.get(f"{weight}{_SCALES}")
        if scales is None or {blocks.dtype, scales.dtype} != {torch.uint8} or weight in tensors:
            continue
        if len(scales.shape) == 3 and blocks.shape == (*scales.shape, 16):
            del tensors[f"{weight}{_BLOCKS}"], tensors[f"{weight}{_SCALES}"]
            experts, outputs, groups, size = blocks.shape
            weights[weight] = Dequantized((experts, groups * size * 2, outputs), partial(_read, blocks, scales))
    return weights


def _read(blocks: StoredTensor, scales: StoredTensor) -> Tensor:
    return dequantize(blocks.read(), scales.read())


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize (experts, out, in / 32, 16) and (experts, out, in / 32), uint8, to a view (experts, in, out) in bf16.

    Bit-equal to transformers' ``convert_moe_packed_tensors``. One expert at a time, because the intermediate tensors
    are several times as large.
    """
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    weights = torch.empty(*blocks.shape[:2], 32 * blocks.size(2), dtype=torch.bfloat16)
    for weight, block, scale in zip(weights, blocks, scales, strict=True):
        pairs = torch.stack((block & 15, block >> 4), dim=-1).flatten(-2)
        weight.copy_(torch.ldexp(values[pairs.int()], scale.int().unsqueeze(-1) - 127).flatten(-2))
    return weights.mT

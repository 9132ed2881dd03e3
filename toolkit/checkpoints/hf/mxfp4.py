"""Dequantize MXFP4 expert weights (the format of gpt-oss) to bfloat16 when they are read.

MXFP4 (Open Compute Project, Microscaling Formats 1.0) values have one sign, two exponent and one mantissa bit. Each
group of 32 values shares a power-of-two scale. A file holds two uint8 tensors per weight: ``X_blocks``, (experts, out,
in / 32, 16), with two values per byte, lower bits first, and ``X_scales``, (experts, out, in / 32), with exponents plus
127. The dequantized weight ``X`` is (experts, in, out).
"""

import torch
from torch import Tensor

from toolkit.checkpoints.hf.files import Dequantized, StoredTensor

BITS = 4 + 8 / 32  # per weight
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCKS, _SCALES = "_blocks", "_scales"


def join_blocks(tensors: dict[str, StoredTensor]) -> dict[str, Dequantized]:
    """Remove matching blocks and scales from ``tensors``. Return them as dequantized weights by name."""
    weights = {}
    for weight in [name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)]:
        blocks, scales = tensors[f"{weight}{_BLOCKS}"], tensors.get(f"{weight}{_SCALES}")
        if scales is None or {blocks.dtype, scales.dtype} != {torch.uint8} or weight in tensors:
            continue
        if len(scales.shape) == 3 and blocks.shape == (*scales.shape, 16):
            del tensors[f"{weight}{_BLOCKS}"], tensors[f"{weight}{_SCALES}"]
            experts, outputs, groups, size = blocks.shape
            weights[weight] = Dequantized((experts, groups * size * 2, outputs), (blocks, scales), dequantize)
    return weights


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize blocks and scales (uint8) to a bf16 view of shape (experts, in, out).

    Blocks are (experts, out, in / 32, 16), scales (experts, out, in / 32). Bit-equal to transformers'
    ``convert_moe_packed_tensors``. Processes one expert at a time, because the intermediate tensors are several times
    larger.
    """
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    weights = torch.empty(*blocks.shape[:2], 32 * blocks.size(2), dtype=torch.bfloat16)
    for weight, block, scale in zip(weights, blocks, scales, strict=True):
        pairs = torch.stack((block & 15, block >> 4), dim=-1).flatten(-2)
        weight.copy_(torch.ldexp(values[pairs.int()], scale.int().unsqueeze(-1) - 127).flatten(-2))
    return weights.mT

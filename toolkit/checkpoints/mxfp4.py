"""Experts of gpt-oss in 4 bits, as they are published: read as the 16-bit weights that they stand for.

MXFP4 (Open Compute Project, Microscaling Formats 1.0): numbers of one sign, two exponent and one mantissa bit, and for
each 32 of them a power of two. A file holds ``X_blocks``, (experts, out, in / 32, 16), two numbers in a byte, the lower
bits first, and ``X_scales``, (experts, out, in / 32), exponents plus 127, both uint8. In 16 bits the weight is X,
(experts, in, out).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from toolkit.checkpoints.hf_reader import Stored

METHOD = "mxfp4"  # config.json's word for it
BITS = 4 + 8 / 32  # per weight
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCKS, _SCALES = "_blocks", "_scales"


class Packed(NamedTuple):
    """A weight in two tensors of a file, read like a :class:`toolkit.checkpoints.hf_reader.Stored`."""

    blocks: Stored
    scales: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, groups, size = self.blocks.shape
        return experts, groups * size * 2, outputs

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def read(self) -> Tensor:
        """The weight, in memory, once."""
        return dequantized(self.blocks.read(), self.scales.read())


def is_packed(config_json: dict[str, Any]) -> bool:
    """Whether a ``config.json`` says that weights are in MXFP4."""
    quantization = config_json.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == METHOD


def joined(found: dict[str, Stored]) -> dict[str, Stored | Packed]:
    """Put one weight in the place of the blocks and scales that make it, where both are there and fit together."""
    weights: dict[str, Stored | Packed] = dict(found)
    for weight in [name.removesuffix(_BLOCKS) for name in found if name.endswith(_BLOCKS)]:
        blocks, scales = found[f"{weight}{_BLOCKS}"], found.get(f"{weight}{_SCALES}")
        if scales is None or {blocks.dtype, scales.dtype} != {torch.uint8} or weight in found:
            continue
        if len(scales.shape) == 3 and blocks.shape == (*scales.shape, 16):
            del weights[f"{weight}{_BLOCKS}"], weights[f"{weight}{_SCALES}"]
            weights[weight] = Packed(blocks, scales)
    return weights


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """(experts, out, in / 32, 16) and (experts, out, in / 32), uint8 -> (experts, in, out), bf16, a view.

    The same bits as transformers' ``convert_moe_packed_tensors``. One expert at a time, because what goes between is
    several times as large.
    """
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    weights = torch.empty(*blocks.shape[:2], 32 * blocks.size(2), dtype=torch.bfloat16)
    for weight, block, scale in zip(weights, blocks, scales, strict=True):
        pairs = torch.stack((block & 15, block >> 4), dim=-1).flatten(-2)
        weight.copy_(torch.ldexp(values[pairs.int()], scale.int().unsqueeze(-1) - 127).flatten(-2))
    return weights.mT

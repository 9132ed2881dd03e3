"""Weights in 8 bits, as DeepSeek-V3 is published: read as the 16-bit weights that they stand for.

A file holds ``X``, (out, in), in float8_e4m3fn, and ``X_scale_inv``, fp32: one number for each block of config.json's
``weight_block_size``, usually 128 x 128, that all of the block is multiplied by. Blocks at the end may be smaller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from toolkit.checkpoints.hf_reader import Stored, Weight

METHOD = "fp8"  # config.json's word for it
BITS = 8  # per weight
_SCALES = "_scale_inv"


class Scaled(NamedTuple):
    """A weight and its scales in files, read like a :class:`toolkit.checkpoints.hf_reader.Stored`."""

    weight: Stored
    scales: Stored
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def read(self) -> Tensor:
        """The weight, in memory, once."""
        return dequantized(self.weight.read(), self.scales.read(), self.block)


def block_size(config_json: dict[str, Any]) -> tuple[int, int] | None:
    """The rows and columns of the blocks that a ``config.json`` tells; None where it tells of no such weights."""
    quantization = config_json.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        return None
    block = quantization.get("weight_block_size")
    is_pair = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    return tuple(block) if is_pair and quantization.get("fmt", "e4m3") == "e4m3" else None


def joined(found: dict[str, Weight], block: tuple[int, int]) -> dict[str, Weight]:
    """Put one weight in the place of an 8-bit one and its scales, where both are there and fit together."""
    weights = dict(found)
    for name in [name for name in found if f"{name}{_SCALES}" in found]:
        weight, scales = found[name], found[f"{name}{_SCALES}"]
        fits = _blocks(weight, block) == scales.shape
        if weight.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32 and len(weight.shape) == 2 and fits:
            del weights[f"{name}{_SCALES}"]
            weights[name] = Scaled(weight, scales, block)
    return weights


def _blocks(weight: Weight, block: tuple[int, int]) -> tuple[int, ...]:
    """How many blocks a weight has along each of its first two axes."""
    return tuple(-(-n // size) for n, size in zip(weight.shape, block, strict=False))


def describe_load_error(name: str, found: dict[str, Weight], block: tuple[int, int]) -> str:
    """Why an 8-bit weight was not joined with its scales."""
    scales, shape = found.get(f"{name}{_SCALES}"), _blocks(found[name], block)
    if scales is None:
        return f"{name}{_SCALES} {shape}, the scales of its blocks, is missing"
    kind = str(scales.dtype).removeprefix("torch.")
    return f"{name}{_SCALES} is {scales.shape} in {kind}; it must be {shape} in float32"


def dequantized(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """(out, in) in float8_e4m3fn and the scales of its blocks, fp32 -> (out, in), bf16.

    The products are fp32 and rounded once, as DeepSeek's own ``fp8_cast_bf16.py`` and transformers have them. One row
    of blocks at a time, because what goes between is several times as large.
    """
    found = torch.empty(weight.shape, dtype=torch.bfloat16)
    for rows, part, scale in zip(found.split(block[0]), weight.split(block[0]), scales, strict=True):
        rows.copy_(part.float() * scale.repeat_interleave(block[1])[: weight.size(1)])
    return found

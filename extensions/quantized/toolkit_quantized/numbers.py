"""Integers and scales of quantized weights: the same in training, in files and in inference.

torchao's IntxFakeQuantizer with its default scales has the same, for a weight in the dtype of matmuls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import require_package
from toolkit.models.config import Fields
from toolkit.models.fp8 import hide_torchao_warnings
from toolkit_quantized.qat import QATArgs

require_package("--qat.weights", "torchao", "0.18")
hide_torchao_warnings()
from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine  # noqa: E402


@dataclass(frozen=True)
class FakeQuantizer:
    """How a layer quantizes its weight, and its inputs.

    Args:
        bits: Of the integers that stand for weights; None leaves the weights as they are.
        rounds_inputs: Whether the inputs are rounded to int8, with a scale and a zero point per token.
        group_size: Weights of a row that share a scale.
        dtype: Dtype of the run's matmuls. Weights are rounded to it before, and scales have it: the integers are the
            same whether a weight is stored, gathered or loaded in fp32 or in this dtype.
    """

    bits: int | None
    rounds_inputs: bool
    group_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, qat: Fields) -> FakeQuantizer:
        """Return the format of ``ModelConfig.qat``. Its ``weights`` are ``[INPUTS-]WEIGHTS``, such as int8-int4.

        Raises:
            UserError: A value is not valid, such as one from an edited file.
        """
        checked: Any = str(qat["weights"]).replace("-none", "-int4")  # int8-none: see freeze
        QATArgs(checked, qat["group_size"] or 0)  # raises
        *inputs, weights = qat["weights"].split("-")
        bits = None if weights == "none" else int(weights.removeprefix("int"))
        return cls(bits, bool(inputs), qat["group_size"], getattr(torch, qat["dtype"]))

    @property
    def largest(self) -> int:
        """The largest integer: 7 for int4. The smallest is -8."""
        assert self.bits is not None
        return 2 ** (self.bits - 1) - 1


def quantize(weight: Tensor, quantizer: FakeQuantizer) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a weight, (out, in): symmetric, with scale = max(abs(group)) / 7.5 for int4.

    Returns:
        Integers, (out, in) fp32; scales, (out, in / group_size) fp32 with values of ``quantizer.dtype``; and where a
        weight is clipped to the largest integer, (out, in) bool.
    """
    exact = weight.to(quantizer.dtype).float()
    block, low, high = (1, quantizer.group_size), -quantizer.largest - 1, quantizer.largest
    scale, _ = choose_qparams_affine(
        exact, MappingType.SYMMETRIC, block, torch.int8, low, high, torch.finfo(quantizer.dtype).smallest_normal,
        quantizer.dtype, torch.int32,
    )  # fmt: skip
    scale = scale.float().view(len(exact), -1)  # its reciprocal in bf16 would move int8 values by half a step
    groups = exact.unflatten(-1, (-1, quantizer.group_size))
    values = (groups * (1.0 / scale).unsqueeze(-1)).round_()  # as torchao's quantize_affine, which takes twice the time
    is_clipped = values > high
    return values.clamp_(low, high).flatten(-2), scale, is_clipped.flatten(-2)


def dequantize(values: Tensor, scale: Tensor) -> Tensor:
    """Return the weight, (out, in) in fp32, that integers, (out, in), and scales, (out, groups), stand for."""
    return (values.unflatten(-1, (scale.size(-1), -1)) * scale.unsqueeze(-1)).flatten(-2)


def round_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x, (..., in), to int8 per token and back. Also returns where a value is clipped, (..., in) bool."""
    block, exact = (*[1] * (x.ndim - 1), x.size(-1)), x.float()
    scale, zero = choose_qparams_affine(
        exact, MappingType.ASYMMETRIC, block, torch.int8, eps=torch.finfo(torch.float32).eps, scale_dtype=torch.float32,
        zero_point_dtype=torch.int32, keepdim=True,
    )  # fmt: skip
    unclipped = (exact * (1.0 / scale)).round() + zero  # in fp32: Inductor (torch 2.13) fails on int8 on a CPU
    values = unclipped.clamp(-128, 127)
    return ((values - zero) * scale).to(x.dtype), unclipped != values

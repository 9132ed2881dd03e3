"""Linear layers and experts with 4-bit weights; with adapters: QLoRA (Dettmers et al. 2023). Requires bitsandbytes."""

from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from toolkit.models.mixed_mm import matmul_dtype
from toolkit.models.moe import StackedLinear, grouped_product


class Layer4bit(nn.Module):
    """A layer with a 4-bit weight, (out, in) or (experts, out, in)."""

    weight: Any  # nn.Parameter
    quant_state: Any  # scales and shape; stored here too, because FSDP's views of the weight lack it

    def base_weight(self) -> Tensor:
        """Return the dequantized weight."""
        return _dequantize(self.weight.data, self.quant_state)

    def quantize_weight(self, weight: Tensor, nested: bool, device: torch.device | str) -> None:
        """Quantize ``weight`` to NF4 with block size 64. ``nested`` also quantizes the scales."""
        module: Any = self
        quantized = bnb.nn.Params4bit(weight.detach(), compress_statistics=nested, quant_type="nf4", module=module)
        self.weight = quantized.to(device)  # type: ignore[misc]  # the overloads of bitsandbytes lack the class itself

    def reserve_weight(self, storage: torch.dtype) -> None:
        """Create a meta weight for packed 4-bit values with the floating-point dtype ``storage``.

        FSDP shards only floating-point parameters. :meth:`pack` returns the values.
        """
        size = self.weight.numel() // 2 // storage.itemsize
        self.weight = nn.Parameter(torch.empty(size, 1, dtype=storage, device="meta"), requires_grad=False)

    def pack(self, read: Callable[[], Tensor], nested: bool, device: torch.device | str) -> Tensor:
        """Quantize the weight that ``read`` returns. Returns the packed values for :meth:`reserve_weight`'s weight."""
        packed, self.quant_state = bnb.functional.quantize_4bit(
            read().detach().to(device).contiguous(), blocksize=64, compress_statistics=nested, quant_type="nf4",
            quant_storage=self.weight.dtype,
        )  # fmt: skip
        return packed


class Linear4bit(Layer4bit, bnb.nn.Linear4bit):
    """bitsandbytes' Linear4bit with a plain forward that computes in the input dtype or autocast dtype.

    The original forward sets the dtype from the first input and casts the bias in place. On CPUs with bf16
    instructions, its first call in eval mode repacks the weight for a kernel without gradients, which breaks later
    training.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        y = self.project(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def project(self, x: Tensor) -> Tensor:
        """Return the output without the bias."""
        return bnb.matmul_4bit(x.to(matmul_dtype(x)), self.weight.view(torch.uint8), quant_state=self.quant_state)


class StackedLinear4bit(Layer4bit, StackedLinear):
    """Stacked linear layers with 4-bit weights, which are dequantized for each product."""

    def project(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return the output without the biases."""
        product: Tensor = _GroupedProduct4bit.apply(x, self.weight, self.quant_state, ends)
        return product


class _GroupedProduct4bit(torch.autograd.Function):
    """:func:`toolkit.models.moe.grouped_product` of a frozen 4-bit weight. Only the packed values are saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, quant_state: Any, ends: Tensor) -> Tensor:
        ctx.save_for_backward(weight, ends)
        ctx.quant_state = quant_state
        return grouped_product(x, _dequantize(weight, quant_state).to(x.dtype).transpose(-2, -1), ends)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        weight, ends = ctx.saved_tensors
        dense = _dequantize(weight, ctx.quant_state).to(grad_output.dtype)
        return grouped_product(grad_output.contiguous(), dense, ends), None, None, None


def _dequantize(packed: Tensor, quant_state: Any) -> Tensor:
    return bnb.functional.dequantize_4bit(packed.view(torch.uint8), quant_state)

"""Linear layers with 4-bit weights, with or without adapters. Requires bitsandbytes."""

from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from toolkit.models.lora_layers import LoRAMixin
from toolkit.models.mixed_mm import matmul_dtype


class Linear4bit(bnb.nn.Linear4bit):
    """bitsandbytes' Linear4bit with a plain forward that computes in the input dtype or autocast dtype.

    The original forward sets the dtype from the first input and casts the bias in place. On CPUs with bf16
    instructions, its first call in eval mode repacks the weight for a kernel without gradients, which breaks later
    training.
    """

    quant_state: Any  # scales and shape; stored here too, because FSDP's views of the weight lack it

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        y = self.project(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def project(self, x: Tensor) -> Tensor:
        """Return the output without the bias."""
        return bnb.matmul_4bit(x.to(matmul_dtype(x)), self.weight.view(torch.uint8), quant_state=self.quant_state)

    def base_weight(self) -> Tensor:
        """Return the dequantized weight, (out, in)."""
        return bnb.functional.dequantize_4bit(self.weight.data.view(torch.uint8), self.quant_state)

    def quantize_weight(self, weight: Tensor, nested: bool, device: torch.device | str) -> None:
        """Quantize ``weight`` (out, in) to NF4 with block size 64. ``nested`` also quantizes the scales."""
        quantized = bnb.nn.Params4bit(weight.detach(), compress_statistics=nested, quant_type="nf4", module=self)
        self.weight = quantized.to(device)  # type: ignore[misc]  # the overloads of bitsandbytes lack the class itself

    def reserve_weight(self, storage: torch.dtype) -> None:
        """Create a meta weight for packed 4-bit values with the floating-point dtype ``storage``.

        FSDP shards only floating-point parameters. :meth:`pack` returns the values.
        """
        size = self.in_features * self.out_features // 2 // storage.itemsize
        empty = torch.empty(size, 1, dtype=storage, device="meta")
        self.weight = nn.Parameter(empty, requires_grad=False)  # type: ignore[assignment]

    def pack(self, read: Callable[[], Tensor], nested: bool, device: torch.device | str) -> Tensor:
        """Quantize the weight that ``read`` returns. Returns the packed values for :meth:`reserve_weight`'s weight."""
        packed, self.quant_state = bnb.functional.quantize_4bit(
            read().detach().to(device).contiguous(), blocksize=64, compress_statistics=nested, quant_type="nf4",
            quant_storage=self.weight.dtype,
        )  # fmt: skip
        return packed


class LoRALinear4bit(LoRAMixin, Linear4bit):
    """A 4-bit layer with adapters (QLoRA, Dettmers et al. 2023)."""

    weight: bnb.nn.Params4bit

"""A linear layer with a 4-bit weight, with or without adapters. Needs bitsandbytes."""

from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn

from toolkit.models.lora_layers import LoRAMixin


class Linear4bit(bnb.nn.Linear4bit):
    """bitsandbytes' layer with a plain forward: matrix products in the dtype of the input, or autocast's.

    The original forward fixes the dtype at the first input and casts the bias in place. On CPUs with bf16 instructions
    the first evaluation repacks the weight for a kernel without gradient, which later training would then use.
    """

    quant_state: Any  # scales and shape; here as well, for the views of the weight that FSDP makes have none

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        y = self.project(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return forward without the bias."""
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        return bnb.matmul_4bit(x, self.weight.view(torch.uint8), quant_state=self.quant_state)

    def base_weight(self) -> torch.Tensor:
        """Return the dequantized weight, (out, in)."""
        return bnb.functional.dequantize_4bit(self.weight.data.view(torch.uint8), self.quant_state)

    def quantize_weight(self, weight: torch.Tensor, nested: bool, device: torch.device | str) -> None:
        """Quantize ``weight`` (out, in) to NF4 in blocks of 64; ``nested`` also quantizes the scales of the blocks."""
        quantized = bnb.nn.Params4bit(weight.detach(), compress_statistics=nested, quant_type="nf4", module=self)
        self.weight = quantized.to(device)  # type: ignore[misc]  # the overloads of bitsandbytes lack the class itself

    def reserve_weight(self, storage: torch.dtype) -> None:
        """Give the layer a weight on the meta device for packed 4-bit values, stored as a floating-point dtype.

        FSDP shards floating-point parameters only. :meth:`pack` returns the values.
        """
        size = self.in_features * self.out_features // 2 // storage.itemsize
        empty = torch.empty(size, 1, dtype=storage, device="meta")
        self.weight = nn.Parameter(empty, requires_grad=False)  # type: ignore[assignment]

    def pack(self, read: Callable[[], torch.Tensor], nested: bool, device: torch.device | str) -> torch.Tensor:
        """Quantize the weight that ``read`` returns, but return the values for the weight that was reserved."""
        packed, self.quant_state = bnb.functional.quantize_4bit(
            read().detach().to(device).contiguous(), blocksize=64, compress_statistics=nested, quant_type="nf4",
            quant_storage=self.weight.dtype,
        )  # fmt: skip
        return packed


class LoRALinear4bit(LoRAMixin, Linear4bit):
    """A 4-bit layer with adapters (QLoRA, Dettmers et al. 2023)."""

    weight: bnb.nn.Params4bit

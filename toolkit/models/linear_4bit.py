"""A linear layer whose weight is held in 4 bits, with adapters or without. Needs bitsandbytes."""

from __future__ import annotations

import bitsandbytes as bnb
import torch

from toolkit.models.lora import LoRAMixin


class Linear4bit(bnb.nn.Linear4bit):
    """bitsandbytes' layer with a plain forward: products in the dtype of the input, or autocast's.

    Its own forward fixes the dtype with the first input, casts the bias in place, and on CPUs with bf16 instructions
    repacks the weight in the first evaluation for a product that has no gradient, which all later training would take.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        y = self.project(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """As forward, without the bias."""
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        return bnb.matmul_4bit(x, self.weight, quant_state=self.weight.quant_state)

    def base_weight(self) -> torch.Tensor:
        """The weight as it is computed with, (out, in)."""
        return bnb.functional.dequantize_4bit(self.weight.data, self.weight.quant_state)

    def take_weight(self, weight: torch.Tensor, nested: bool, device: torch.device | str) -> None:
        """Quantise ``weight`` (out, in), in blocks of 64 to NF4; ``nested`` quantises the blocks' scales as well."""
        self.weight = bnb.nn.Params4bit(weight.detach(), compress_statistics=nested, quant_type="nf4").to(device)


class LoRALinear4bit(LoRAMixin, Linear4bit):
    """Such a layer with adapters (QLoRA, Dettmers et al. 2023)."""

"""The normalisation of what a block reads and adds; torch's own but for Gemma's offset."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from toolkit.models.config import ModelConfig


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight (Gemma): fp32 inside, the sum too, and rounded once at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).type_as(x)


def make_norm(config: ModelConfig, size: int | None = None) -> nn.Module:
    """Return a norm over the last axis, ``size`` wide (n_embd when not given).

    torch computes all kinds in fp32 inside, whatever the dtype of the input, and rounds once at the end.
    """
    size = size or config.n_embd
    if config.norm_class_name == "LayerNorm":
        return nn.LayerNorm(size, eps=config.norm_eps, elementwise_affine=config.norm_affine)
    kind = OffsetRMSNorm if config.norm_offset else nn.RMSNorm
    return kind(size, eps=config.norm_eps, elementwise_affine=config.norm_affine)

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


class LayerNormPerHead(nn.LayerNorm):
    """LayerNorm of each head by itself, with weights of its own and no bias (StableLM 2 12B), fp32 inside."""

    def __init__(self, heads: int, size: int, eps: float) -> None:
        super().__init__(heads * size, eps=eps, bias=False)  # in one row: like any norm's, spared from decay
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., heads * size) -> the same."""
        of_heads = x.float().unflatten(-1, (self.heads, -1))
        y = F.layer_norm(of_heads, of_heads.shape[-1:], eps=self.eps) * self.weight.float().view(self.heads, -1)
        return y.flatten(-2).type_as(x)


def make_norm(config: ModelConfig, size: int | None = None) -> nn.Module:
    """Return a norm over the last axis, ``size`` wide (n_embd when not given).

    torch computes all kinds in fp32 inside, whatever the dtype of the input, and rounds once at the end.
    """
    size = size or config.n_embd
    if config.norm_class_name == "LayerNorm":
        return nn.LayerNorm(size, eps=config.norm_eps, elementwise_affine=config.norm_affine)
    kind = OffsetRMSNorm if config.norm_offset else nn.RMSNorm
    return kind(size, eps=config.norm_eps, elementwise_affine=config.norm_affine)


def make_qk_norm(config: ModelConfig, heads: int) -> nn.Module:
    """Return the norm of so many heads' queries or keys: as wide as one head, or as all of them together."""
    if config.norm_qk_type == "per_head":
        return LayerNormPerHead(heads, config.head_size, config.norm_eps)
    return make_norm(config, config.head_size * (heads if config.norm_qk_type == "olmo2" else 1))

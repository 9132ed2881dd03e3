"""Normalization layers: torch's, Gemma's RMSNorm with offset, and LayerNorm per head."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.models.config import ModelConfig
from toolkit.models.mixed_mm import matmul_dtype

Norm = nn.RMSNorm | nn.LayerNorm


class LayerNorm(nn.LayerNorm):
    """LayerNorm, computed in fp32. For ``is_residual_norm`` see :func:`make_norm`."""

    is_residual_norm = False

    def forward(self, x: Tensor) -> Tensor:
        if not _is_bf16_stream(self, x):
            return super().forward(x)
        weight, bias = (None if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """RMSNorm, computed in fp32 and rounded once at the end. For ``is_residual_norm`` see :func:`make_norm`.

    On CUDA torch has a fused kernel for inputs and weights of one dtype. Under autocast the queries and keys are in 16
    bits and their norm's weight is in fp32: without the casts, torch would run an operator for each step.
    """

    is_residual_norm = False

    def forward(self, x: Tensor) -> Tensor:
        if _is_bf16_stream(self, x):
            return _bf16_rms_norm(self, x, self.weight)
        if self.weight is None or self.weight.dtype == x.dtype:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).type_as(x)


class OffsetRMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight (Gemma). Computed in fp32, rounded once at the end."""

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.weight.float()
        if _is_bf16_stream(self, x):
            return _bf16_rms_norm(self, x, weight)
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).type_as(x)


def _is_bf16_stream(norm: LayerNorm | RMSNorm, x: Tensor) -> bool:
    """Whether x is a bf16 residual stream under autocast, which would compute its norm in fp32 on CUDA."""
    return norm.is_residual_norm and x.dtype == torch.bfloat16 == matmul_dtype(x, torch.float32)


def _bf16_rms_norm(norm: RMSNorm, x: Tensor, weight: Tensor | None) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, norm.normalized_shape, None if weight is None else weight.to(x.dtype), norm.eps)


class LayerNormPerHead(nn.LayerNorm):
    """LayerNorm per head with separate weights and no bias (StableLM 2 12B), computed in fp32."""

    def __init__(self, heads: int, size: int, eps: float) -> None:
        super().__init__(heads * size, eps=eps, bias=False)  # 1-D, so excluded from weight decay like other norms
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """(..., heads * size) -> (..., heads * size)."""
        heads = x.float().unflatten(-1, (self.heads, -1))
        y = F.layer_norm(heads, heads.shape[-1:], eps=self.eps) * self.weight.float().view(self.heads, -1)
        return y.flatten(-2).type_as(x)


def make_norm(config: ModelConfig, size: int | None = None, is_residual_norm: bool = False) -> Norm:
    """Return a norm over a last axis of ``size`` (default n_embd).

    All norms are computed in fp32 for any input dtype and rounded once at the end. If autocast computes in bf16 and the
    residual stream is in bf16, ``is_residual_norm`` rounds the norm's factor (weight, or 1 + weight) to bf16, as
    autocast does for matmuls, so that kernels read and save only bf16.
    """
    size = size or config.n_embd
    norm: LayerNorm | RMSNorm
    if config.norm_class_name == "LayerNorm":
        norm = LayerNorm(size, config.norm_eps, config.norm_affine, bias=config.norm_bias)
    else:
        kind = OffsetRMSNorm if config.norm_offset else RMSNorm
        norm = kind(size, eps=config.norm_eps, elementwise_affine=config.norm_affine)
    norm.is_residual_norm = is_residual_norm
    return norm


def make_qk_norm(config: ModelConfig, heads: int) -> Norm:
    """Return the QK-norm for ``heads`` query or key heads: over each head, or over all heads."""
    if config.norm_qk_type == "per_head":
        return LayerNormPerHead(heads, config.head_size, config.norm_eps)
    return make_norm(config, config.head_size * (heads if config.norm_qk_type == "olmo2" else 1))

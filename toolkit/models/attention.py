"""Causal self-attention with grouped queries, one fused projection and an optional cache of keys and values."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from toolkit.models.config import ModelConfig
from toolkit.models.norm import make_qk_norm
from toolkit.models.rope import Rotation
from toolkit.models.visibility import Seen


class LayerCache(Protocol):
    """Keys and values of one layer. ``length`` is the number of tokens held so far."""

    length: int

    def update(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append k and v, (B, n_query_groups, T, head_size) each, and return all that is held, (..., length, ...)."""


class CausalSelfAttention(nn.Module):
    """proj(attention(q, k, v)), where ``qkv`` yields all queries, then all keys, then all values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.n_groups, self.head_size = config.n_head, config.n_query_groups, config.head_size
        self.scale, self.cap, self.clip = config.attention_scale, config.attention_logit_softcapping, config.clip_qkv
        width = (self.n_head + 2 * self.n_groups) * self.head_size
        self.qkv = nn.Linear(config.n_embd, width, bias=config.bias or config.attn_bias)
        self.proj = nn.Linear(self.n_head * self.head_size, config.n_embd, bias=config.bias)
        self.norm_q = self.norm_k = None
        if config.norm_qk:
            self.norm_q, self.norm_k = make_qk_norm(config, self.n_head), make_qk_norm(config, self.n_groups)
        self.sinks = nn.Parameter(torch.zeros(self.n_head)) if config.attention_sinks else None

    def forward(
        self,
        x: torch.Tensor,
        seen: Seen,
        rotation: Rotation | None = None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """(B, T, n_embd) -> (B, T, n_embd)."""
        B, T, _ = x.shape
        qkv = self.qkv(x)
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        qkv = qkv.view(B, T, self.n_head + 2 * self.n_groups, self.head_size)
        qk, v = qkv.split((self.n_head + self.n_groups, self.n_groups), dim=2)
        if self.norm_q is not None:
            qk = self._normalized(qk)
        if rotation is not None:
            qk = rotation.apply(qk)
        q, k = qk.split((self.n_head, self.n_groups), dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads or groups, T, head_size)
        if cache is not None:
            k, v = cache.update(k, v)
        k, v = k[:, :, -seen.keys :], v[:, :, -seen.keys :]
        if self.cap is not None:
            y = capped_attention(q, k, v, seen, self.scale, self.cap)
        elif self.sinks is not None:
            y = sink_attention(q, k, v, seen, self.scale, self.sinks)
        else:
            y = fused_attention(q, k, v, seen.mask, seen.is_causal, self.scale)
        return self.proj(y.transpose(1, 2).reshape(B, T, self.n_head * self.head_size))

    def _normalized(self, qk: torch.Tensor) -> torch.Tensor:
        """(B, T, heads and groups, head_size), by norms of one head or of all heads of a token."""
        width = self.norm_q.normalized_shape[0]
        parts = qk.split((self.n_head, self.n_groups), dim=2)
        norms = (self.norm_q, self.norm_k)
        if width == self.head_size:
            return torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], dim=2)
        return torch.cat([norm(part.flatten(2)).view_as(part) for norm, part in zip(norms, parts, strict=True)], dim=2)


def fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float
) -> torch.Tensor:
    """``scaled_dot_product_attention``, by a kernel that never holds all scores.

    Args:
        q: (B, n_head, T, width).
        k: (B, n_query_groups, keys, width); v the same.
        mask, is_causal, scale: As torch's function takes them.

    Returns:
        (B, n_head, T, width), in the dtype of q.
    """
    repeats, enable_gqa = q.size(1) // k.size(1), False
    if repeats > 1:  # not "enable_gqa = repeats > 1": a compiled block's sizes can be symbolic, and so would it be
        if takes_groups(q, mask):
            enable_gqa = True
        else:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def takes_groups(q: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether a fused kernel takes grouped queries.

    On CUDA that is FlashAttention alone, which takes neither masks nor fp32; with grouped queries torch would choose
    the plain way instead, without a word, and hold the scores of all queries and keys.
    """
    return not q.is_cuda or mask is None and q.dtype != torch.float32 and q.size(-1) <= 256


def capped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen, scale: float, cap: float
) -> torch.Tensor:
    """Attention whose scores s become cap * tanh(s / cap) (Gemma 2), which no fused kernel of torch's computes.

    Holds the scores of all queries and keys. Scores and softmax are fp32.

    Args:
        q: (B, n_head, T, head_size).
        k: (B, n_query_groups, keys, head_size); v the same.
        seen: What the queries see of the keys.
        scale: Multiplies the scores before the cap.
        cap: In the unit of the scaled scores.

    Returns:
        (B, n_head, T, head_size), in the dtype of q.
    """
    mask = seen.mask
    if seen.is_causal:
        mask = torch.ones(q.size(2), seen.keys, dtype=torch.bool, device=q.device).tril()
    repeats = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = cap * torch.tanh((q @ k.transpose(-1, -2)).float() * (scale / cap))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1).to(v.dtype) @ v


def sink_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen, scale: float, sinks: torch.Tensor
) -> torch.Tensor:
    """Attention in which each head has one score more, of a key without a value: what takes a share of the softmax and
    gives nothing (gpt-oss, OpenAI 2025, arXiv 2508.10925).

    That key is written out, so that fused kernels take it: the first one, zero but for an element that no other key
    has, where each query has its head's score. A query that nobody reads stands in front, too, so that causal attention
    is causal still and needs no mask.

    Args:
        q: (B, n_head, T, head_size).
        k: (B, n_query_groups, keys, head_size); v the same.
        seen: What the queries see of the keys; all see the one more.
        scale: Multiplies queries times keys, not the sinks.
        sinks: (n_head,), the scores.

    Returns:
        (B, n_head, T, head_size), in the dtype of q.
    """
    size = q.size(-1)
    q, k, v = (F.pad(x, (0, 8 - size % 8, 1, 0)) for x in (q, k, v))  # kernels take rows of multiples of 8 elements
    q[..., size] = (sinks / scale)[:, None]
    k[:, :, 0, size] = 1
    mask = None if seen.mask is None else F.pad(seen.mask, (1, 0, 1, 0), value=True)
    return fused_attention(q, k, v, mask, seen.is_causal, scale)[:, :, 1:, :size]

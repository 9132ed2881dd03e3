"""Causal self-attention with grouped queries, one fused projection and an optional cache of keys and values."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from toolkit.models.config import ModelConfig
from toolkit.models.rope import Rotation


class LayerCache(Protocol):
    """Keys and values of one layer. ``length`` is the number of tokens held so far."""

    length: int

    def update(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append k and v, (B, n_query_groups, T, head_size) each, and return all that is held, (..., length, ...)."""


def cache_mask(held: int, new: int, device: torch.device) -> torch.Tensor | None:
    """Which of the ``held + new`` keys each new query sees: (new, held + new), bool; None where no mask is needed.

    One new token sees everything. With an empty cache attention is plainly causal, which the kernels know by
    themselves (see :class:`CausalSelfAttention`).
    """
    if held == 0 or new == 1:
        return None
    queries = torch.arange(held, held + new, device=device)
    return torch.arange(held + new, device=device) <= queries[:, None]


def document_mask(documents: torch.Tensor) -> torch.Tensor:
    """Law N9: which tokens each token sees, itself and those before it in its document.

    (B, T) numbers of documents -> (B, 1, T, T), bool.
    """
    T = documents.size(1)
    causal = torch.ones(T, T, dtype=torch.bool, device=documents.device).tril()
    return (causal & (documents[:, :, None] == documents[:, None, :]))[:, None]


class CausalSelfAttention(nn.Module):
    """proj(attention(q, k, v)), where ``qkv`` yields all queries, then all keys, then all values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.n_groups, self.head_size = config.n_head, config.n_query_groups, config.head_size
        width = (self.n_head + 2 * self.n_groups) * self.head_size
        self.qkv = nn.Linear(config.n_embd, width, bias=config.bias or config.attn_bias)
        self.proj = nn.Linear(self.n_head * self.head_size, config.n_embd, bias=config.bias)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation | None = None,
        mask: torch.Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """(B, T, n_embd) -> (B, T, n_embd). Without a mask each token sees itself and all before it."""
        B, T, _ = x.shape
        is_causal = mask is None and T > 1
        qkv = self.qkv(x).view(B, T, self.n_head + 2 * self.n_groups, self.head_size)
        qk, v = qkv.split((self.n_head + self.n_groups, self.n_groups), dim=2)
        if rotation is not None:
            qk = rotation.apply(qk)
        q, k = qk.split((self.n_head, self.n_groups), dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads or groups, T, head_size)
        if cache is not None:
            k, v = cache.update(k, v)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=self.n_groups != self.n_head
        )
        return self.proj(y.transpose(1, 2).reshape(B, T, self.n_head * self.head_size))

"""The normalisation of a block's inputs; both kinds are torch's own."""

from __future__ import annotations

from torch import nn

from toolkit.models.config import ModelConfig


def make_norm(config: ModelConfig) -> nn.Module:
    """Return a norm over the last axis, n_embd wide.

    torch computes both in fp32 inside, whatever the dtype of the input, and rounds once at the end.
    """
    if config.norm_class_name == "RMSNorm":
        return nn.RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps)

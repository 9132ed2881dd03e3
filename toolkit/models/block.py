"""The transformer block and the inputs that all blocks share."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from toolkit.models.attention import CausalSelfAttention
from toolkit.models.config import ModelConfig
from toolkit.models.keyed_random import DropoutBits
from toolkit.models.kv_cache import KVCache, LayerCache
from toolkit.models.masks import AttentionMask, MaskBuilder, SequenceStarts
from toolkit.models.mlp import make_mlp
from toolkit.models.norm import make_norm
from toolkit.models.rope import RotaryEmbedding


class Block(nn.Module):
    """A transformer block: the unit of FSDP wrapping, activation checkpointing and compilation."""

    may_be_unit = True  # of FSDP, by size or class

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()

        def norm(is_used: bool, is_residual_norm: bool = False) -> nn.Module:
            return make_norm(config, is_residual_norm=is_residual_norm) if is_used else nn.Identity()

        self.norm_1 = norm(config.norm_1, is_residual_norm=True)
        self.attn = make_attention(config, layer)
        self.post_attention_norm = norm(config.post_attention_norm)
        self.norm_2 = None if config.shared_attention_norm else norm(config.norm_2, is_residual_norm=True)
        self.mlp = make_experts(config) if config.has_experts(layer) else make_mlp(config)
        self.post_mlp_norm = norm(config.post_mlp_norm)
        self.parallel_residual, self.residual_multiplier = config.parallel_residual, config.residual_multiplier
        self.window, self.rope_index = config.window(layer), config.rope_index(layer)
        self.has_experts, self.uses_linear_attention = config.has_experts(layer), config.has_linear_attention(layer)
        self.dropout_bits = DropoutBits()

    def forward(
        self,
        x: Tensor,
        attn_mask: AttentionMask | SequenceStarts,
        rope: RotaryEmbedding | None,
        cache: LayerCache | None = None,
        token_mask: Tensor | None = None,
        kv_source: Tensor | None = None,
        dropout_bits: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(B, T, n_embd) -> (B, T, n_embd).

        With ``kv_source``, (B, T, n_embd), attention takes keys and values from norm_1(kv_source) and queries from
        norm_1(x) (cross-attention); the residual stream is x.

        ``dropout_bits``, (B, T) int64, are what the dropout of adapters depends on.

        Attention mask (sequence starts with linear attention) and rotary embedding are arguments: computing them inside
        one block would compile that block separately.

        With experts and ``token_mask`` (B, T), bool, also returns the load-balancing loss of each row, (B,). It is
        returned rather than stored, because FSDP's hooks only see return values.
        """
        if not torch.compiler.is_compiling():  # when activations are recomputed, it has the bits of a later micro-batch
            self.dropout_bits.tokens = dropout_bits
        normed = self.norm_1(x)
        kv_source = None if kv_source is None else self.norm_1(kv_source)
        attended = x + self._scale_residual(
            self.post_attention_norm(self.attn(normed, attn_mask, rope, cache, kv_source))
        )
        if self.norm_2 is not None:
            normed = self.norm_2(x if self.parallel_residual else attended)
        if token_mask is None or not self.has_experts:
            return attended + self._scale_residual(self.post_mlp_norm(self.mlp(normed)))
        y, balancing_loss = self.mlp(normed, token_mask)
        return attended + self._scale_residual(self.post_mlp_norm(y)), balancing_loss

    def _scale_residual(self, x: Tensor) -> Tensor:
        return x if self.residual_multiplier == 1.0 else x * self.residual_multiplier


def make_attention(config: ModelConfig, layer: int) -> nn.Module:
    if config.has_linear_attention(layer):
        from toolkit.models.linear_attention import GatedDeltaNet  # few models have it

        return GatedDeltaNet(config)
    if config.latent_attention is None:
        return CausalSelfAttention(config)
    from toolkit.models.latent_attention import LatentAttention  # few models have it

    return LatentAttention(config)


def make_experts(config: ModelConfig) -> nn.Module:
    from toolkit.models.moe import LLaMAMoE  # with custom operators, and few models have experts

    return LLaMAMoE(config)


class BlockInputs(NamedTuple):
    """Inputs shared by all blocks of a forward pass. For ``token_mask`` and ``dropout_bits``, see :class:`Block`.

    ``per_layer`` has an input of each block (Gemma 4).
    """

    masks: MaskBuilder
    ropes: dict[int, RotaryEmbedding]
    kv_cache: KVCache | None
    token_mask: Tensor | None = None
    dropout_bits: Tensor | None = None
    per_layer: tuple[Tensor, ...] | None = None

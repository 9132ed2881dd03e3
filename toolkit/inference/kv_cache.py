"""KV cache: keys and values of the previous tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from toolkit.models.config import ModelConfig


class LayerCache:
    """Keys and values of one layer, (batch, groups, max_length, width), filled up to ``length`` positions.

    Args:
        shape: (batch, groups, max_length).
        widths: Widths of keys and values; with latent attention, those of latent and shared rotary key.
        device: Device of the tensors.
        dtype: Dtype of keys and values.
    """

    def __init__(
        self, shape: tuple[int, int, int], widths: tuple[int, int], device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self.keys, self.values = (torch.zeros(*shape, width, device=device, dtype=dtype) for width in widths)
        self.length = 0

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of T new positions.

        Args:
            k: (batch, groups, T, width), already rotated.
            v: The same shape except for the width.

        Returns:
            Keys and values of all positions so far, (batch, groups, length, width): views, valid until the next
            update.

        Raises:
            ValueError: The cache is full.
        """
        end = self.length + k.size(2)
        if end > self.keys.size(2):
            raise ValueError(f"{end} positions do not fit into a KV cache of {self.keys.size(2)}")
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reserve(self, max_length: int) -> None:
        """Grow the capacity to ``max_length`` positions, keeping the cached ones."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            if max_length > old.size(2):
                new = old.new_zeros(*old.shape[:2], max_length, old.size(3))
                new[:, :, : self.length] = old[:, :, : self.length]
                setattr(self, name, new)


class KVCache:
    """One :class:`LayerCache` per layer, allocated for ``max_length`` positions.

    Memory: 2 x n_layer x batch_size x n_query_groups x max_length x head_size x bytes of ``dtype``; with latent
    attention, n_layer x batch_size x max_length x (kv_lora_rank + qk_rope_head_dim) x bytes.

    Not a ``collections.abc.Sequence``: Fabric rebuilds sequences among a model's arguments.

    Attributes:
        prompt: (B, T) int64: the complete prompt, of which a forward pass may see only a part; None if unknown.
        seed: The sampling seed, the same on all ranks; 0 without one.
        state: For a model to keep what belongs to the cached sequence.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        max_length: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        assert config.n_query_groups is not None and config.head_size is not None  # set by ModelConfig
        groups, widths = config.n_query_groups, (config.head_size, config.head_size)
        if (latent := config.latent_attention) is not None:
            groups, widths = 1, (latent["kv_lora_rank"], latent["qk_rope_head_dim"])
        shape = (batch_size, groups, max_length)
        self.sequence_length = 0  # length of the sequence the cache was computed for, see generate.prefill
        self.prompt: Tensor | None = None
        self.seed = 0
        self.state: dict[str, Any] = {}
        self.layers = [LayerCache(shape, widths, device, dtype) for _ in range(config.n_layer)]

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def length(self) -> int:
        """Number of positions cached in all layers; an interrupted forward pass fills only some layers."""
        return min(layer.length for layer in self.layers)

    def truncate(self, length: int) -> None:
        """Drop the positions from ``length`` on.

        Raises:
            ValueError: The cache has fewer positions.
        """
        if length > self.length:
            raise ValueError(f"a KV cache of {self.length} positions has no {length}")
        for layer in self.layers:
            layer.length = length

    def reserve(self, max_length: int) -> None:
        """Grow the capacity to ``max_length`` positions, keeping the cached ones."""
        for layer in self.layers:
            layer.reserve(max_length)

"""KV cache: keys and values of previous tokens."""

from copy import copy
from typing import Any

import torch
from torch import Tensor

from toolkit.models.config import ModelConfig


class LayerCache:
    """Keys and values of one layer, (batch, groups, max_length, width), filled up to ``length`` positions.

    With ``position``, (1,) int64, shapes are fixed: an update writes one token there and returns all ``max_length``
    positions. The caller masks later positions and sets ``length``.

    Args:
        shape: (batch, groups, max_length).
        widths: Widths of keys and values; with latent attention, of the latent and the shared rotary key.
    """

    def __init__(
        self, shape: tuple[int, int, int], widths: tuple[int, int], device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self.keys, self.values = (torch.zeros(*shape, width, device=device, dtype=dtype) for width in widths)
        self.length = 0
        self.position: Tensor | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the (already rotated) keys and values of T new positions, (batch, groups, T, width).

        Returns views of all cached keys and values, (batch, groups, length, width), valid until the next update. Raises
        ValueError if the cache is full.
        """
        if self.position is not None:
            # unlike assignment, index_copy_ does not cast; under autocast k and v may have fewer bits
            k, v = k.to(self.keys.dtype), v.to(self.values.dtype)
            return self.keys.index_copy_(2, self.position, k), self.values.index_copy_(2, self.position, v)
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
    """One :class:`LayerCache` per layer, allocated for ``max_length`` positions. ``tensor_ranks`` divide the heads.

    Memory: 2 x n_layer x batch_size x n_query_groups x max_length x head_size x bytes of ``dtype``; with latent
    attention, n_layer x batch_size x max_length x (kv_lora_rank + qk_rope_head_dim) x bytes.

    Not a ``collections.abc.Sequence``: Fabric rebuilds sequences among a model's arguments.

    Attributes:
        prompt: (B, T), int64: the complete prompt, even if prefilled in parts; None if unknown.
        seed: Sampling seed, the same on all ranks; default 0.
        state: Model-specific state of the cached sequence.
        starts: (B,), int64: index of the first token in each left-padded row; None without padding.
        sequence_length: Complete sequence length for longrope, if the next pass and the cache cover only the beginning;
            or (B, 1), int64, per row.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        max_length: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        tensor_ranks: int = 1,
    ) -> None:
        assert config.n_query_groups is not None and config.head_size is not None  # set by ModelConfig
        groups, widths = config.n_query_groups // tensor_ranks, (config.head_size, config.head_size)
        if (latent := config.latent_attention) is not None:
            groups, widths = 1, (latent["kv_lora_rank"], latent["qk_rope_head_dim"])
        shape = (batch_size, groups, max_length)
        self.long_rows: list[bool] | None = None  # see decode.prefill
        self.prompt: Tensor | None = None
        self.seed = 0
        self.state: dict[str, Any] = {}
        self.starts: Tensor | None = None
        self.sequence_length: int | Tensor | None = None
        self.layers = [LayerCache(shape, widths, device, dtype) for _ in range(config.n_layer)]

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    @property
    def capacity(self) -> int:
        """Number of allocated positions."""
        return self.layers[0].keys.size(2)

    @property
    def tensors(self) -> list[Tensor]:
        """Keys and values of all layers, (batch, groups, capacity, width)."""
        return [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]

    def view(self, rows: slice, columns: slice, length: int) -> "KVCache":
        """Return a cache of these rows and positions, the first ``length`` of them cached, in the same memory."""
        view = copy(self)
        view.layers = [copy(layer) for layer in self.layers]
        for layer in view.layers:
            layer.keys, layer.values = layer.keys[rows, :, columns], layer.values[rows, :, columns]
            layer.length = length
        return view

    @property
    def position(self) -> Tensor | None:
        """Write position of the next token, (1,) int64, if shapes are fixed. Set it between forward passes."""
        return self.layers[0].position

    @position.setter
    def position(self, position: Tensor | None) -> None:
        for layer in self.layers:
            layer.position = position

    @property
    def length(self) -> int:
        """Number of positions cached in every layer. An interrupted forward pass may fill only some layers."""
        return min(layer.length for layer in self.layers)

    def advance(self, count: int) -> None:
        """Add ``count`` to ``length`` after a forward pass with fixed shapes."""
        for layer in self.layers:
            layer.length += count

    def truncate(self, length: int) -> None:
        """Drop all positions from ``length`` on. Raises ValueError if ``length`` exceeds the cached length."""
        if length > self.length:
            raise ValueError(f"a KV cache of {self.length} positions has no {length}")
        for layer in self.layers:
            layer.length = length

    def reserve(self, max_length: int) -> None:
        """Grow the capacity to ``max_length`` positions, keeping the cached ones."""
        for layer in self.layers:
            layer.reserve(max_length)

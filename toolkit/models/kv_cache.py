"""KV cache: keys and values of previous tokens, and recurrent states that depend on them."""

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


class StateCache:
    """The recurrent state of one layer with linear attention, after ``length`` positions. Its size is fixed.

    With ``position``, the caller sets ``length``, as for :class:`LayerCache`. An interrupted update leaves a length of
    0.

    Attributes:
        state: (batch, n_value_heads, key_size, value_size), fp32, or fp64 for a model in fp64.
        window: (batch, conv_size - 1, channels): the last inputs of the short convolution.
    """

    def __init__(self, sizes: dict[str, int], batch_size: int, device: torch.device | str, dtype: torch.dtype) -> None:
        keys, values = (sizes[f"n_{part}_heads"] * sizes[f"{part}_size"] for part in ("key", "value"))
        shape = (batch_size, sizes["n_value_heads"], sizes["key_size"], sizes["value_size"])
        self.state = torch.zeros(shape, device=device, dtype=torch.promote_types(dtype, torch.float32))
        self.window = torch.zeros(batch_size, sizes["conv_size"] - 1, 2 * keys + values, device=device, dtype=dtype)
        self.length = 0
        self.position: Tensor | None = None

    def update(self, state: Tensor, window: Tensor, n_new: int) -> None:
        """Replace state and window, in place, by those after ``n_new`` more positions."""
        length, self.length = self.length, 0
        self.state.copy_(state)
        self.window.copy_(window)
        self.length = length + (n_new if self.position is None else 0)


class KVCache:
    """One :class:`LayerCache` per layer, allocated for ``max_length`` positions; with linear attention,
    :class:`StateCache`. Layers that share keys and values have none. ``tensor_ranks`` divide the heads.

    Memory: 2 x n_layer x batch_size x n_query_groups x max_length x head_size x bytes of ``dtype``; with latent
    attention, n_layer x batch_size x max_length x (kv_lora_rank + qk_rope_head_dim) x bytes. A layer with linear
    attention instead needs batch_size x (n_value_heads x key_size x value_size x 4 bytes + (conv_size - 1) x
    (2 x n_key_heads x key_size + n_value_heads x value_size) x bytes), at any length.

    Not a ``collections.abc.Sequence``: Fabric rebuilds sequences among a model's arguments.

    Attributes:
        capacity: Number of allocated positions.
        device: Device of keys, values and states.
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
        self.long_rows: list[bool] | None = None  # see decode.prefill
        self.prompt: Tensor | None = None
        self.seed = 0
        self.state: dict[str, Any] = {}
        self.starts: Tensor | None = None
        self.sequence_length: int | Tensor | None = None
        self.capacity, self.device = max_length, torch.device(device)
        self._saved: tuple[int, list[Tensor]] = 0, []

        def layer_cache(layer: ModelConfig) -> LayerCache:
            groups, widths = layer.n_query_groups // tensor_ranks, (layer.head_size, layer.head_size)
            if (latent := layer.latent_attention) is not None:
                groups, widths = 1, (latent["kv_lora_rank"], latent["qk_rope_head_dim"])
            return LayerCache((batch_size, groups, max_length), widths, device, dtype)

        self.layers = [
            StateCache(config.linear_attention, batch_size, device, dtype)
            if config.linear_attention is not None and config.has_linear_attention(layer)
            else layer_cache(config.layer(layer))
            for layer in range(config.n_cached_layer)
        ]

    def __getitem__(self, layer: int) -> LayerCache | StateCache:
        return self.layers[layer]

    @property
    def tensors(self) -> list[Tensor]:
        """Keys and values of all layers, (batch, groups, capacity, width)."""
        caches = [layer for layer in self.layers if isinstance(layer, LayerCache)]
        return [tensor for cache in caches for tensor in (cache.keys, cache.values)]

    @property
    def recurrent_states(self) -> list[Tensor]:
        """State and window of each :class:`StateCache`, (batch, ...)."""
        caches = [layer for layer in self.layers if isinstance(layer, StateCache)]
        return [tensor for cache in caches for tensor in (cache.state, cache.window)]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.tensors, *self.recurrent_states))

    def view(self, rows: slice, columns: slice, length: int) -> "KVCache":
        """Return a cache of these rows and positions, the first ``length`` of them cached, in the same memory."""
        view = copy(self)
        view._saved = 0, []
        view.layers, view.capacity = [copy(layer) for layer in self.layers], len(range(self.capacity)[columns])
        for layer in view.layers:
            if isinstance(layer, StateCache):
                layer.state, layer.window = layer.state[rows], layer.window[rows]
            else:
                layer.keys, layer.values = layer.keys[rows, :, columns], layer.values[rows, :, columns]
            layer.length = length
        return view

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in new memory."""
        for layer in self.layers:
            for name in ("state", "window") if isinstance(layer, StateCache) else ("keys", "values"):
                setattr(layer, name, getattr(layer, name)[rows])
        self.starts = None if self.starts is None else self.starts[rows]

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

    def save(self) -> None:
        """Save the recurrent states, for :meth:`restore` and :meth:`truncate`."""
        self._saved = self.length, [state.clone() for state in self.recurrent_states]

    def restore(self) -> None:
        """Return to the saved length and recurrent states; to an empty cache, if none are saved."""
        length, states = self._saved
        for i, state in enumerate(self.recurrent_states):
            state.copy_(states[i]) if states else state.zero_()
        for layer in self.layers:
            layer.length = length

    def truncate(self, length: int) -> None:
        """Drop all positions from ``length`` on. Raises ValueError if ``length`` exceeds the cached length.

        Recurrent states only return to the saved ones or to an empty cache, and ``length`` with them.
        """
        if length > self.length:
            raise ValueError(f"a KV cache of {self.length} positions has no {length}")
        if self.recurrent_states and (length == 0 or any(layer.length != length for layer in self.layers)):
            if self._saved[0] > length:
                self._saved = 0, []
            return self.restore()
        for layer in self.layers:
            layer.length = length

    def reserve(self, max_length: int) -> None:
        """Grow the capacity to ``max_length`` positions, keeping the cached ones."""
        self.capacity = max(self.capacity, max_length)
        for layer in self.layers:
            if isinstance(layer, LayerCache):
                layer.reserve(max_length)


def next_positions(T: int, device: torch.device, block_size: int, kv_cache: KVCache | None) -> tuple[Tensor, int]:
    """Return the positions of T new tokens, (T,) or (B, T), and the number of keys (cached plus T new).

    Raises ValueError if a sequence would be longer than ``block_size``.
    """
    if kv_cache is not None and kv_cache.position is not None:
        positions, length = kv_cache.position, kv_cache.capacity
    else:
        n_cached = 0 if kv_cache is None else kv_cache.length
        positions, length = torch.arange(n_cached, n_cached + T, device=device), n_cached + T
    if kv_cache is not None and kv_cache.starts is not None:
        # clamp, because finished rows keep running with the others
        return (positions - kv_cache.starts[:, None]).clamp(0, block_size - 1), length
    if length > block_size and (kv_cache is None or kv_cache.position is None):
        raise ValueError(f"sequence length {length} exceeds the model's block_size {block_size}")
    return positions, length

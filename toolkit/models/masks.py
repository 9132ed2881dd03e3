"""Attention masks for packed documents, sliding windows and a KV cache.

Where causal attention or no mask is equivalent, no mask is built: that is the kernels' fast path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionMask(NamedTuple):
    """Which keys the queries of a layer attend to.

    Args:
        n_keys: Number of most recent keys that any query attends to.
        mask: (n_new, n_keys) or (B, 1, n_new, n_keys), bool; None where no mask is needed.
        is_causal: Without a mask: True for causal attention, False for attention to all keys.
    """

    n_keys: int
    mask: torch.Tensor | None = None
    is_causal: bool = False


class AttentionMaskBuilder:
    """Builds and caches the attention masks of one forward pass, one per sliding-window size.

    Not a dataclass or tuple: see :class:`toolkit.models.rope.RotaryEmbedding`.

    Args:
        n_cached: Tokens in the KV cache.
        n_new: Tokens of this pass, which follow the cached ones.
        device: Device of the masks.
        documents: (B, n_new), int64, document ids of packed rows; tokens attend only within their document (N9). Not
            supported with a KV cache.
        uniform_length: See :class:`toolkit.models.gpt.GPT`.
    """

    def __init__(
        self,
        n_cached: int,
        n_new: int,
        device: torch.device,
        documents: torch.Tensor | None = None,
        uniform_length: int = 0,
    ) -> None:
        assert documents is None or n_cached == 0, "packed documents are for training, a KV cache is for generation"
        self._n_cached, self._n_new, self._device, self._documents = n_cached, n_new, device, documents
        self._uniform_length = uniform_length
        self._masks: dict[int | None, AttentionMask] = {}

    def for_window(self, window: int | None) -> AttentionMask:
        """Return the mask of a layer with this sliding window (the token itself included); None for full attention."""
        if window is not None and window >= max(self._n_cached + self._n_new, self._uniform_length):
            window = None
        if window not in self._masks:
            self._masks[window] = self._build(window)
        return self._masks[window]

    def _build(self, window: int | None) -> AttentionMask:
        total = self._n_cached + self._n_new
        if self._documents is None:
            if self._n_new == 1:  # the newest token attends to all keys in its window
                return AttentionMask(total if window is None else window)
            if window is None and self._n_cached == 0:
                return AttentionMask(total, is_causal=True)
        n_keys = total if window is None else min(total, self._n_new + window - 1)
        queries = torch.arange(self._n_cached, total, device=self._device)[:, None]
        keys = torch.arange(total - n_keys, total, device=self._device)
        mask = keys <= queries
        if window is not None:
            mask &= keys > queries - window
        if self._documents is not None:
            mask = (mask & (self._documents[:, :, None] == self._documents[:, None, -n_keys:]))[:, None]
        return AttentionMask(n_keys, mask)

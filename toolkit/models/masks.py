"""Which keys each query sees: one description for packed documents, sliding windows and a cache of keys and values.

Where causal attention, or no mask at all, says the same, the kernels get that: it is their fast path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionMask(NamedTuple):
    """What a layer's queries see of its keys.

    Args:
        keys: Only so many of the last keys matter.
        mask: (new, keys) or (B, 1, new, keys), bool; None where no mask is needed.
        is_causal: Without a mask: each query sees itself and all before it, else everything.
    """

    keys: int
    mask: torch.Tensor | None = None
    is_causal: bool = False


class AttentionMaskBuilder:
    """What the queries of one forward pass see, by the window of the layer.

    A plain object: see :class:`toolkit.models.rope.RotaryEmbedding`.

    Args:
        held: Tokens in the cache of keys and values.
        new: Tokens of this pass, which follow them.
        device: Where masks are made.
        documents: (B, new), int64: which of the documents packed into a row each token belongs to; tokens see only
            their own (N9). Not together with a cache.
        uniform_length: See :class:`toolkit.models.gpt.GPT`.
    """

    def __init__(
        self,
        held: int,
        new: int,
        device: torch.device,
        documents: torch.Tensor | None = None,
        uniform_length: int = 0,
    ) -> None:
        assert documents is None or held == 0, "packed documents are for training, a cache is for generation"
        self._held, self._new, self._device, self._documents = held, new, device, documents
        self._uniform_length = uniform_length
        self._known: dict[int | None, AttentionMask] = {}

    def for_window(self, window: int | None) -> AttentionMask:
        """What the queries see of a layer whose tokens see ``window`` tokens back, themselves included, or all."""
        if window is not None and window >= max(self._held + self._new, self._uniform_length):
            window = None
        if window not in self._known:
            self._known[window] = self._look(window)
        return self._known[window]

    def _look(self, window: int | None) -> AttentionMask:
        total = self._held + self._new
        if self._documents is None:
            if self._new == 1:  # the newest token sees all that its window holds
                return AttentionMask(total if window is None else window)
            if window is None and self._held == 0:
                return AttentionMask(total, is_causal=True)
        keys = total if window is None else min(total, self._new + window - 1)
        queries = torch.arange(self._held, total, device=self._device)[:, None]
        at = torch.arange(total - keys, total, device=self._device)
        mask = at <= queries
        if window is not None:
            mask &= at > queries - window
        if self._documents is not None:
            mask = (mask & (self._documents[:, :, None] == self._documents[:, None, -keys:]))[:, None]
        return AttentionMask(keys, mask)

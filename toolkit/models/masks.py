"""Attention masks for packed documents, sliding windows and a KV cache.

No mask is built if causal or full attention is equivalent, because fused kernels are faster without one, or if a kernel
of :mod:`toolkit.models.attention_kernels` is used.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.models.attention_kernels import DocumentBounds, FlashMask, FlexMask, make_flash_mask, make_flex_mask
from toolkit.models.context_parallel import ContextGroup


class KernelChoice(NamedTuple):
    """Selects a kernel of :mod:`toolkit.models.attention_kernels`.

    Args:
        name: "flash", or "flex" for soft-capped scores.
        for_causal: Also use the kernel for plain causal attention, without sliding window or packed rows.
    """

    name: str
    for_causal: bool


class AttentionMask(NamedTuple):
    """The attention mask of a layer.

    Args:
        n_keys: Number of most recent keys that the queries attend to; earlier keys are dropped.
        mask: (n_new, n_keys) or (B, 1, n_new, n_keys), bool; None if no mask is needed.
        is_causal: If ``mask`` is None: True for causal attention, False for attention to all keys.
        kernel_mask: Kernel-specific mask; overrides the other fields.
        context: Ranks that share the tokens of a row. Queries are of this rank's tokens, keys of all ``n_keys`` tokens.
        chunks: With ``context``, the masks of this rank's two chunks; they override the other fields.
    """

    n_keys: int
    mask: Tensor | None = None
    is_causal: bool = False
    kernel_mask: FlashMask | FlexMask | None = None
    context: ContextGroup | None = None
    chunks: "tuple[AttentionMask, ...]" = ()


class SequenceStarts(NamedTuple):
    """What linear attention needs instead of a mask.

    Args:
        starts: (B, n_new), bool: True for the first token of a document or of a left-padded row, which depends on no
            token before it; None if the new tokens continue the cached ones.
    """

    starts: Tensor | None = None


class MaskBuilder(ABC):
    """Builds and caches the attention masks of one forward pass, one per sliding-window size.

    Not a dataclass or tuple: see :class:`toolkit.models.rope.RotaryEmbedding`. Windows of ``longest`` tokens are full
    attention.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._masks: dict[int | None, AttentionMask] = {}
        self._sequence_starts: SequenceStarts | None = None

    def for_window(self, window: int | None) -> AttentionMask:
        """Return the mask for a sliding window in tokens, including the current one; None for full attention."""
        if window is not None and window >= self._longest:
            window = None
        if window not in self._masks:
            self._masks[window] = self._build(window)
        return self._masks[window]

    def for_linear_attention(self) -> SequenceStarts:
        """Return where the sequences of the new tokens start."""
        if self._sequence_starts is None:
            self._sequence_starts = SequenceStarts(self._find_starts())
        return self._sequence_starts

    @abstractmethod
    def _build(self, window: int | None) -> AttentionMask: ...

    def _find_starts(self) -> Tensor | None:
        raise AssertionError("linear attention needs complete rows: refused with context parallelism")


class AttentionMaskBuilder(MaskBuilder):
    """See :class:`MaskBuilder`.

    Args:
        n_cached: Number of tokens before the new ones, such as those in the KV cache.
        n_new: Number of new tokens in this forward pass.
        device: Device of the masks.
        documents: (B, n_cached + n_new or more), int64, document ids of packed rows; tokens attend only within their
            document (N9).
        uniform_length: See :class:`toolkit.models.execution.Execution`.
        batch_size: Number of rows, B.
        kernel: Kernel to use instead of masks.
        bounds: Document bounds on ``device``; "flash" needs them for packed rows.
        starts: (B,), int64: index of the first token in each left-padded row; None without padding. Not supported with
            documents.
    """

    def __init__(
        self,
        n_cached: int,
        n_new: int,
        device: torch.device,
        documents: Tensor | None = None,
        uniform_length: int = 0,
        batch_size: int = 1,
        kernel: KernelChoice | None = None,
        bounds: DocumentBounds | None = None,
        starts: Tensor | None = None,
    ) -> None:
        super().__init__(max(n_cached + n_new, uniform_length))
        assert documents is None or starts is None, "rows of packed documents are not padded on the left"
        self._batch_size, self._kernel, self._bounds = batch_size, kernel, bounds
        self._n_cached, self._n_new, self._device, self._documents = n_cached, n_new, device, documents
        self._starts = starts

    def _build(self, window: int | None) -> AttentionMask:
        total = self._n_cached + self._n_new
        if (kernel_mask := self._kernel_mask(window)) is not None:
            return AttentionMask(total, kernel_mask=kernel_mask)
        if self._documents is None and self._starts is None:
            if self._n_new == 1:  # the newest token attends to all keys in its window
                return AttentionMask(total if window is None else window)
            if window is None and self._n_cached == 0:
                return AttentionMask(total, is_causal=True)
        n_keys = total if window is None else min(total, self._n_new + window - 1)
        queries = torch.arange(self._n_cached, total, device=self._device)[:, None]
        keys = torch.arange(total - n_keys, total, device=self._device)
        mask = _visible_keys(queries, keys, window, self._starts)
        if self._documents is not None:
            of_queries, of_keys = self._documents[:, self._n_cached : total], self._documents[:, total - n_keys : total]
            mask = (mask & (of_queries[:, :, None] == of_keys[:, None]))[:, None]
        return AttentionMask(n_keys, mask)

    def _find_starts(self) -> Tensor | None:
        total = self._n_cached + self._n_new
        if self._documents is not None:
            is_first = F.pad(self._documents[:, 1:] != self._documents[:, :-1], (1, 0), value=True)
            return is_first[:, self._n_cached : total]
        if self._starts is None:
            return None
        return torch.arange(self._n_cached, total, device=self._device) == self._starts[:, None]

    def _kernel_mask(self, window: int | None) -> FlashMask | FlexMask | None:
        is_causal = window is None and self._documents is None
        if self._kernel is None or self._n_new == 1 or (is_causal and not self._kernel.for_causal):
            return None
        if self._kernel.name == "flash":
            length = self._n_new if self._documents is None else self._documents.size(1)
            chunk = (self._n_cached, self._n_cached + self._n_new, length) if length > self._n_new else None
            return make_flash_mask(window, self._bounds, chunk)
        shape = (self._batch_size, self._n_new)
        return make_flex_mask(shape, window, self._documents, self._device, start=self._n_cached)


class ContextMaskBuilder(MaskBuilder):
    """Builds the attention masks of a forward pass whose rows are shared by the ranks of a context group.

    Each of this rank's two chunks attends to the tokens before it like new tokens to a KV cache.

    Args:
        group: The context group.
        length: Tokens of a complete row.
        options: Further arguments of :class:`AttentionMaskBuilder`, of complete rows.
    """

    def __init__(self, group: ContextGroup, length: int, *options: Any) -> None:
        size = length // (2 * group.size)
        self._group, self._length = group, length
        self._builders = [AttentionMaskBuilder(start, size, *options) for start in group.chunk_starts(size)]
        super().__init__(max(builder._longest for builder in self._builders))

    def _build(self, window: int | None) -> AttentionMask:
        chunks = tuple(builder.for_window(window) for builder in self._builders)
        return AttentionMask(self._length, context=self._group, chunks=chunks)


class FixedShapeMaskBuilder(MaskBuilder):
    """Builds fixed-shape masks for decoding one token per row with a fixed-shape KV cache.

    Args:
        position: (1,), int64: cache position of the new tokens.
        n_keys: Capacity of the cache.
        starts: See :class:`AttentionMaskBuilder`.
    """

    def __init__(self, position: Tensor, n_keys: int, starts: Tensor | None) -> None:
        super().__init__(n_keys)
        self._position, self._starts = position, starts

    def _build(self, window: int | None) -> AttentionMask:
        keys = torch.arange(self._longest, device=self._position.device)
        return AttentionMask(self._longest, _visible_keys(self._position[None], keys, window, self._starts))

    def _find_starts(self) -> Tensor | None:
        return None if self._starts is None else self._position == self._starts[:, None]


def _visible_keys(queries: Tensor, keys: Tensor, window: int | None, starts: Tensor | None) -> Tensor:
    """Return the mask, (n_new, n_keys) or (B, 1, n_new, n_keys), of queries and keys at these positions.

    queries: (n_new, 1), keys: (n_keys,). ``starts``: see :class:`AttentionMaskBuilder`.
    """
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    if starts is not None:  # padding attends to itself, because a softmax over no keys is NaN
        mask = (mask & (keys >= starts[:, None, None, None])) | (keys == queries)
    return mask

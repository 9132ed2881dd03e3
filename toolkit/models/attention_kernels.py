"""Attention on CUDA in 16 bits without a (T, T) mask: FlashAttention and FlexAttention.

FlashAttention supports document bounds, sliding windows and grouped queries; attention sinks are applied to its output.
FlexAttention is compiled and supports soft-capping. Neither materializes scores or masks, repeats keys or values, or
computes masked blocks. :mod:`toolkit.models.attention_dispatch` chooses the kernel and checks it on the device first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from toolkit.private_torch import FLASH_BACKWARD, FLASH_FORWARD, has_no_data, mark_dynamic, specialized_floats

BLOCK = 128
"""Tokens per query or key block in both kernels."""


class DocumentBounds(NamedTuple):
    """Document bounds of packed rows. Computed on the CPU with the batch, because kernels need them without a sync.

    Args:
        cu_seqlens: (n + 1,), int32: start of each document in the flattened rows, then the end of the last. Trailing
            documents may be empty.
        max_length: Upper bound on document length in tokens.
    """

    cu_seqlens: Tensor
    max_length: int

    def to(self, device: torch.device) -> DocumentBounds:
        """Return the bounds on ``device``. The copy is asynchronous if ``cu_seqlens`` is in pinned memory."""
        return self._replace(cu_seqlens=self.cu_seqlens.to(device, non_blocking=True))


class Documents(NamedTuple):
    """Document ids of packed rows, (B, T) int64, and their bounds on the same device."""

    ids: Tensor
    bounds: DocumentBounds


def document_bounds(documents: Tensor) -> DocumentBounds:
    """Return the document bounds of packed rows. ``documents`` are ids on the CPU, (B, T).

    A document is a run of equal ids in one row.

    Empty documents pad the count to a power of two, to limit the number of distinct shapes.
    """
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = is_first.view(-1).nonzero().view(-1)
    n = len(starts)
    cu_seqlens = torch.full(((1 << (n - 1).bit_length()) + 1,), documents.numel(), dtype=torch.int32)
    cu_seqlens[:n] = starts
    # a smaller bound saves nothing, and FlashAttention has a separate path for queries of one token
    return DocumentBounds(cu_seqlens, max(BLOCK, int(cu_seqlens.diff().max())))


# ---- FlashAttention


class FlashMask(NamedTuple):
    """Mask of FlashAttention: causal, with optional sliding window and documents.

    Args:
        window: Sliding-window size in keys before the query; -1 for all.
        cu_seqlens: See :class:`DocumentBounds`, on the device. None if each row is one document.
        max_length: See :class:`DocumentBounds`. An int64 scalar tensor on the CPU, because a Python int would give
            compiled blocks one graph per value.
        cu_queries: Same as ``cu_seqlens``, for the queries if they are only the last tokens of the keys.
    """

    window: int
    cu_seqlens: Tensor | None = None
    max_length: Tensor | None = None
    cu_queries: Tensor | None = None


def make_flash_mask(
    window: int | None, bounds: DocumentBounds | None, chunk: tuple[int, int, int] | None = None
) -> FlashMask:
    """Return a layer's mask. ``window`` includes the current token; None for full attention.

    With ``chunk`` (start, end, T), the queries are tokens ``start`` to ``end`` of rows of T tokens, and the keys are
    the tokens before ``end``. FlashAttention aligns a document's last query with its last key, so each document is cut
    at ``end``.
    """
    n_before = -1 if window is None else window - 1
    if bounds is None:
        return FlashMask(n_before)
    cu_seqlens, cu_queries = bounds.cu_seqlens, None
    if chunk is not None:
        start, end, T = chunk
        row, at = cu_seqlens // T, cu_seqlens % T
        cu_seqlens, cu_queries = row * end + at.clamp(max=end), row * (end - start) + (at - start).clamp(0, end - start)
        mark_dynamic(cu_queries, 0)
    # one graph for any number of documents
    mark_dynamic(cu_seqlens, 0)
    return FlashMask(n_before, cu_seqlens, torch.tensor(bounds.max_length, device="cpu"), cu_queries)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlashMask,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention, optionally with sinks (see :func:`toolkit.models.attention.sink_attention`)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, _ = _flash(q, k, v, sinks, mask.cu_seqlens, mask.cu_queries, mask.max_length, mask.window, scale)
    return out.transpose(1, 2)


# A custom op is opaque to torch.compile, so one graph serves any number and length of documents.
@torch.library.custom_op("toolkit::flash_attention", mutates_args=())
def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_queries: Tensor | None,
    max_length: Tensor | None,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Map (B, T, heads or groups, width) to the output and log-sum-exps, (B, n_head, T); packed: (n_head, B * T).

    A sink is a key with zero value that all queries attend to. It adds to the softmax denominator: log-sum-exp' =
    log(e^lse + e^sink) and out' = out * e^(lse - lse'). FlashAttention's backward pass recomputes probabilities from
    the log-sum-exp. Passing out' and lse' therefore gives the gradients with the sink.
    """
    lengths, options = _options((q, k), (cu_queries, cu_seqlens), max_length, window, scale)
    q_, k_, v_ = _flatten((q, k, v), cu_seqlens)
    out, lse, *_ = FLASH_FORWARD(q_, k_, v_, *lengths, 0.0, window < 0, False, **options)
    if sinks is not None:
        with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
        out = (out * (lse - with_sinks).exp().transpose(-1, -2).unsqueeze(-1)).to(q.dtype)
        lse = with_sinks
    return out.reshape(q.shape).contiguous(), lse


@_flash.register_fake
def _(
    q: Tensor, k: Any, v: Any, sinks: Any, cu_seqlens: Tensor | None, *others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, T, heads, _ = q.shape
    shape = (B, heads, T) if cu_seqlens is None else (heads, B * T)
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("toolkit::flash_attention_backward", mutates_args=())
def _flash_backward_op(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_queries: Tensor | None,
    max_length: Tensor | None,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and sinks. Without sinks, the last is empty."""
    lengths, options = _options((q, k), (cu_queries, cu_seqlens), max_length, window, scale)
    tensors = _flatten((grad.contiguous(), q, k, v, out), cu_seqlens)
    rng_state, unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)  # without dropout
    gradients = FLASH_BACKWARD(*tensors, lse, *lengths, 0.0, window < 0, rng_state, unused, **options)
    grad_q, grad_k, grad_v = (g.reshape(t.shape).contiguous() for g, t in zip(gradients, (q, k, v), strict=True))
    if sinks is None:
        return grad_q, grad_k, grad_v, q.new_empty(0)
    share = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp()  # of the softmax; its gradient is -share * sum(grad * out)
    grad_of_share = (grad.to(lse.dtype) * out).sum(-1)  # (B, T, n_head)
    per_head = share.transpose(-1, -2).reshape(grad_of_share.shape) * grad_of_share
    return grad_q, grad_k, grad_v, -per_head.sum((0, 1)).to(sinks.dtype)


@_flash_backward_op.register_fake
def _(
    grad: Any, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, sinks: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grad_sinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_sinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, cu_seqlens, cu_queries, max_length, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, cu_seqlens, cu_queries, max_length)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read only once, because activation checkpointing recomputes them
    *gradients, grad_sinks = _flash_backward_op(grad, *saved, ctx.window, ctx.scale)
    has_sinks = saved[5] is not None
    return (*gradients, grad_sinks if has_sinks else None, *[None] * 5)


_flash.register_autograd(_backward, setup_context=_setup_context)


def _flatten(tensors: tuple[Tensor, ...], cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    """Flatten (B, T, heads, width) to (B * T, heads, width) for packed documents; otherwise unchanged."""
    return tensors if cu_seqlens is None else tuple(t.flatten(0, 1) for t in tensors)


def _options(
    queries_and_keys: tuple[Tensor, Tensor],
    bounds: tuple[Tensor | None, Tensor | None],
    max_length: Tensor | None,
    window: int,
    scale: float,
) -> tuple[tuple[Any, ...], dict[str, float]]:
    """Return bounds and maximum lengths of the documents' queries and keys, and the kernels' keyword arguments."""
    cu_queries, cu_seqlens = bounds
    sizes = [t.size(1) if max_length is None else int(max_length) for t in queries_and_keys]
    lengths = cu_seqlens if cu_queries is None else cu_queries, cu_seqlens, *sizes
    return lengths, {"scale": scale, "window_size_left": window, "window_size_right": 0}


# ---- FlexAttention


class FlexMask(NamedTuple):
    """Causal mask of FlexAttention. It holds only tensors, so compiled blocks share a graph.

    Args:
        first_key: (B, T), int32: first key that each query attends to.
        kv, full_kv: Key blocks that are partially and fully visible to each query block: counts, (B, 1, blocks), and
            indices, (B, 1, blocks, blocks), int32. The indices come first in each row.
        q, full_q: Same, for the query blocks that attend to each key block.
        last_key: (T,), int32: last key that each query attends to. None if there is a query per key.
    """

    first_key: Tensor
    kv: tuple[Tensor, Tensor]
    full_kv: tuple[Tensor, Tensor]
    q: tuple[Tensor, Tensor]
    full_q: tuple[Tensor, Tensor]
    last_key: Tensor | None = None


def make_flex_mask(
    shape: tuple[int, int], window: int | None, documents: Tensor | None, device: torch.device, start: int = 0
) -> FlexMask:
    """Return a layer's mask for rows of ``shape`` (B, T). Needs no (T, T) matrix and no sync.

    ``window`` includes the current token; None for full attention. In ``documents`` (B, start + T or more), a document
    is a run of equal ids. The queries are the last T of ``start`` + T tokens, the keys are all of them.
    """
    B, T = shape
    at = torch.arange(start + T, device=device)
    first_key = torch.zeros_like(at) if window is None else (at - (window - 1)).clamp(min=0)
    first_key = first_key.repeat(B, 1)
    if documents is not None:
        is_first = F.pad(documents[:, 1 : start + T] != documents[:, : start + T - 1], (1, 0))
        first_key = torch.maximum(first_key, (at * is_first).cummax(1).values)
    first_key = first_key[:, start:]
    # two extra blocks, because a dimension of size 1 would cost another graph
    first_query, first_of_keys = (torch.arange(n // BLOCK + 2, device=device) * BLOCK for n in (T, start + T))
    last_query = (first_query + BLOCK - 1).clamp(max=T - 1)
    # first_key never decreases
    lowest, highest = first_key[:, first_query.clamp(max=T - 1)], first_key[:, last_query]
    is_row, last_of_keys = (first_query < T)[:, None], first_of_keys + BLOCK - 1
    is_seen = is_row & (first_of_keys <= start + last_query[:, None]) & (last_of_keys >= lowest[..., None])
    is_full = is_row & (last_of_keys <= start + first_query[:, None]) & (first_of_keys >= highest[..., None])
    is_seen, is_full = (is_seen & ~is_full)[:, None], is_full[:, None]
    kv, full_kv, q, full_q = (_ordered(each) for each in (is_seen, is_full, is_seen.mT, is_full.mT))
    last_key = at[start:].to(torch.int32) if start else None
    return FlexMask(first_key.to(torch.int32), kv, full_kv, q, full_q, last_key)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Map (..., n), bool, to the number of True values and an index tensor that lists them first."""
    return blocks.sum(-1, dtype=torch.int32), blocks.int().argsort(dim=-1, descending=True, stable=True).int()


def flex_attention_with_softcap(
    q: Tensor, k: Tensor, v: Tensor, mask: FlexMask, scale: float, logit_softcap: float
) -> Tensor:
    """See :func:`toolkit.models.attention.softcap_attention`."""
    if not torch.compiler.is_compiling() and has_no_data(q):  # meta tensors: same shapes and costs, nothing to compile
        return flash_attention(q, k, v, FlashMask(-1), scale)
    run = _softcap if torch.compiler.is_compiling() else _compiled_softcap()
    return run(q, k, v, mask, scale, logit_softcap)


def _softcap(q: Tensor, k: Tensor, v: Tensor, mask: FlexMask, scale: float, logit_softcap: float) -> Tensor:
    factor = scale / logit_softcap

    def softcap(score: Tensor, *_: Tensor) -> Tensor:
        return logit_softcap * torch.tanh(score * factor)

    def is_visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        last_key = query if mask.last_key is None else mask.last_key[query]
        return (key <= last_key) & (key >= mask.first_key[b, query])

    (n_kv, kv), (n_full_kv, full_kv), (n_q, queries), (n_full_q, full_q) = mask[1:5]
    block_mask = BlockMask(
        seq_lengths=(q.size(2), k.size(2)),
        kv_num_blocks=n_kv,
        kv_indices=kv,
        full_kv_num_blocks=n_full_kv,
        full_kv_indices=full_kv,
        q_num_blocks=n_q,
        q_indices=queries,
        full_q_num_blocks=n_full_q,
        full_q_indices=full_q,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=is_visible,
    )
    # rows of fewer than 128 tokens, too: flex decoding is another kernel, which the self-check does not see
    options: Any = {"FORCE_USE_FLEX_ATTENTION": True}
    out = flex_attention(q, k, v, softcap, block_mask, scale=1.0, enable_gqa=True, kernel_options=options)
    assert isinstance(out, Tensor)
    return out


@functools.cache
def _compiled_softcap(backend: str = "inductor") -> Callable[..., Tensor]:
    """Compile :func:`_softcap` for use in uncompiled blocks. Floats are constants, as FlexAttention requires."""
    compiled = torch.compile(_softcap, backend=backend, fullgraph=True)

    def run(*args: Any) -> Tensor:
        with specialized_floats():
            return compiled(*args)

    return run

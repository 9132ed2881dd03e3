"""Attention masks for all combinations of window, KV cache and packed documents, against a reference."""

import pytest
import torch

from toolkit.models.context_parallel import ContextGroup
from toolkit.models.masks import AttentionMask, AttentionMaskBuilder, ContextMaskBuilder, FixedShapeMaskBuilder

CPU = torch.device("cpu")


def reference_mask(n_cached: int, n_new: int, window: int | None, documents: torch.Tensor | None) -> torch.Tensor:
    """The reference mask, (B, n_new, n_cached + n_new), bool: causal, within the window, within the document."""
    rows = 1 if documents is None else documents.size(0)
    mask = torch.zeros(rows, n_new, n_cached + n_new, dtype=torch.bool)
    for b in range(rows):
        for i in range(n_new):
            for j in range(n_cached + n_new):
                at = n_cached + i
                mask[b, i, j] = j <= at and (window is None or at - j < window)
                if documents is not None:
                    mask[b, i, j] &= bool(documents[b, i] == documents[b, j])
    return mask


def as_mask(n_cached: int, n_new: int, window: int | None, documents: torch.Tensor | None) -> torch.Tensor:
    """The full mask equivalent to the arguments of the kernels."""
    attn_mask = AttentionMaskBuilder(n_cached, n_new, CPU, documents).for_window(window)
    return as_rows(attn_mask, n_new, n_cached + n_new, n_cached + n_new)


def as_rows(attn_mask: AttentionMask, n_new: int, end: int, total: int) -> torch.Tensor:
    """The mask of ``n_new`` queries over ``total`` keys; the last key that it covers is ``end - 1``."""
    mask = attn_mask.mask
    if mask is None:
        mask = torch.ones(n_new, attn_mask.n_keys, dtype=torch.bool)
        mask = mask.tril() if attn_mask.is_causal else mask
    mask = mask.view(-1, n_new, attn_mask.n_keys)
    return torch.nn.functional.pad(mask, (end - attn_mask.n_keys, total - end))


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize(("n_cached", "n_new"), [(0, 1), (0, 9), (5, 1), (5, 4), (2, 9)])
def test_masks_match_reference(n_cached, n_new, window):
    assert torch.equal(as_mask(n_cached, n_new, window, None), reference_mask(n_cached, n_new, window, None))


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_n9_document_masks_match_reference(window):
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 1, 1, -1, -1]])
    assert torch.equal(as_mask(0, 9, window, documents), reference_mask(0, 9, window, documents))


def test_no_mask_where_fast_paths_apply():
    causal = AttentionMask(9, None, True)
    assert AttentionMaskBuilder(0, 9, CPU).for_window(None) == causal
    assert AttentionMaskBuilder(0, 9, CPU).for_window(9) == causal  # a window that covers all tokens
    assert AttentionMaskBuilder(5, 1, CPU).for_window(None) == AttentionMask(6)  # one new token attends to all keys
    assert AttentionMaskBuilder(5, 1, CPU).for_window(4) == AttentionMask(4)  # or to the last keys
    assert AttentionMaskBuilder(20, 2, CPU).for_window(4).mask.shape == (2, 5)  # excludes keys outside all windows
    builder = AttentionMaskBuilder(0, 9, CPU)
    assert builder.for_window(3).mask is builder.for_window(3).mask  # built once for all layers


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_n9_masks_of_context_parallel_chunks_are_rows_of_the_reference(window):
    packed = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3], [0, 0, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1]])
    for documents in (None, packed):
        reference = reference_mask(0, 12, window, documents)
        for size in (2, 3):
            for rank in range(size):
                group = ContextGroup(rank, size)
                masks = ContextMaskBuilder(group, 12, CPU, documents).for_window(window)
                own = group.split(torch.arange(12)).chunk(2)
                for start, rows, mask in zip(group.chunk_starts(len(own[0])), own, masks.chunks, strict=True):
                    end = start + len(rows)
                    assert rows.tolist() == list(range(start, end))
                    dense = as_rows(mask, len(rows), end, 12)
                    assert torch.equal(dense, reference[:, rows].expand_as(dense))


def test_n9_sequence_starts_of_linear_attention():
    documents = torch.tensor([[0, 0, 0, 1, 2, 2], [5, 5, 5, 5, 5, -1]])
    packed = AttentionMaskBuilder(0, 6, CPU, documents).for_linear_attention().starts
    assert packed.tolist() == [[True, False, False, True, True, False], [True, *[False] * 4, True]]
    padded = torch.tensor([0, 3, 5])  # the rows' first tokens
    for n_cached, n_new in ((0, 4), (4, 2), (6, 1)):
        starts = AttentionMaskBuilder(n_cached, n_new, CPU, starts=padded).for_linear_attention().starts
        assert starts.nonzero().tolist() == [
            [b, at - n_cached] for b, at in enumerate(padded.tolist()) if n_cached <= at < n_cached + n_new
        ]
    fixed = FixedShapeMaskBuilder(torch.tensor([3]), 8, padded).for_linear_attention().starts
    assert fixed.tolist() == [[False], [True], [False]]
    assert AttentionMaskBuilder(0, 6, CPU).for_linear_attention().starts is None
    with pytest.raises(AssertionError, match="linear attention needs complete rows"):
        ContextMaskBuilder(ContextGroup(rank=0, size=2), 8, CPU).for_linear_attention()

"""What each query sees, in every combination of window, cache and packed documents, against the plain definition."""

import pytest
import torch

from toolkit.models.masks import AttentionMaskBuilder

CPU = torch.device("cpu")


def plain(held: int, new: int, window: int | None, documents: torch.Tensor | None) -> torch.Tensor:
    """(B, new, held + new), bool, by the words: not what comes later, not beyond the window, not of other documents."""
    rows = 1 if documents is None else documents.size(0)
    seen = torch.zeros(rows, new, held + new, dtype=torch.bool)
    for b in range(rows):
        for i in range(new):
            for j in range(held + new):
                at = held + i
                seen[b, i, j] = j <= at and (window is None or at - j < window)
                if documents is not None:
                    seen[b, i, j] &= bool(documents[b, i] == documents[b, j])
    return seen


def as_mask(held: int, new: int, window: int | None, documents: torch.Tensor | None) -> torch.Tensor:
    """The same from what is given to the kernels."""
    seen = AttentionMaskBuilder(held, new, CPU, documents).for_window(window)
    mask = seen.mask
    if mask is None:
        mask = torch.ones(new, seen.n_keys, dtype=torch.bool)
        mask = mask.tril() if seen.is_causal else mask
    mask = mask.view(-1, new, seen.n_keys)
    return torch.cat((mask.new_zeros(mask.size(0), new, held + new - seen.n_keys), mask), dim=2)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize(("held", "new"), [(0, 1), (0, 9), (5, 1), (5, 4), (2, 9)])
def test_masks_match_reference(held, new, window):
    assert torch.equal(as_mask(held, new, window, None), plain(held, new, window, None))


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_n9_document_masks_match_reference(window):
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 1, 1, -1, -1]])
    assert torch.equal(as_mask(0, 9, window, documents), plain(0, 9, window, documents))


def test_no_mask_where_fast_paths_apply():
    assert AttentionMaskBuilder(0, 9, CPU).for_window(None) == (9, None, True)  # plainly causal
    assert AttentionMaskBuilder(0, 9, CPU).for_window(9) == (9, None, True)  # a window that holds everything
    assert AttentionMaskBuilder(5, 1, CPU).for_window(None) == (6, None, False)  # one new token sees all
    assert AttentionMaskBuilder(5, 1, CPU).for_window(4) == (4, None, False)  # or the last ones
    assert AttentionMaskBuilder(20, 2, CPU).for_window(4).mask.shape == (2, 5)  # keys that nobody sees are left out
    one = AttentionMaskBuilder(0, 9, CPU)
    assert one.for_window(3).mask is one.for_window(3).mask  # made once for all layers

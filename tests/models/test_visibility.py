"""What each query sees, in every combination of window, cache and packed documents, against the plain definition."""

import pytest
import torch

from toolkit.models.visibility import Visibility

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
    seen = Visibility(held, new, CPU, documents).through(window)
    mask = seen.mask
    if mask is None:
        mask = torch.ones(new, seen.keys, dtype=torch.bool)
        mask = mask.tril() if seen.is_causal else mask
    mask = mask.view(-1, new, seen.keys)
    return torch.cat((mask.new_zeros(mask.size(0), new, held + new - seen.keys), mask), dim=2)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize(("held", "new"), [(0, 1), (0, 9), (5, 1), (5, 4), (2, 9)])
def test_masks_are_the_plain_definition(held, new, window):
    assert torch.equal(as_mask(held, new, window, None), plain(held, new, window, None))


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_n9_documents_are_the_plain_definition(window):
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 1, 1, -1, -1]])
    assert torch.equal(as_mask(0, 9, window, documents), plain(0, 9, window, documents))


def test_the_kernels_fast_paths_are_taken():
    assert Visibility(0, 9, CPU).through(None) == (9, None, True)  # plainly causal
    assert Visibility(0, 9, CPU).through(9) == (9, None, True)  # a window that holds everything
    assert Visibility(5, 1, CPU).through(None) == (6, None, False)  # one new token sees all
    assert Visibility(5, 1, CPU).through(4) == (4, None, False)  # or the last ones
    assert Visibility(20, 2, CPU).through(4).mask.shape == (2, 5)  # keys that nobody sees are left out
    one = Visibility(0, 9, CPU)
    assert one.through(3).mask is one.through(3).mask  # made once for all layers
